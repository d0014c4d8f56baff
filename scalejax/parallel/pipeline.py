"""A stack of equal layers run over the devices of `stage`: GPipe (Huang et al. 2019, arXiv 1811.06965).

Each of S stages holds L / S layers. The batch is cut into parts; in every tick each stage runs its layers on one part
and hands the result to the next:

    tick      0   1   2   3   4   5          parts = 4, S = 3
    stage 0   a   b   c   d   .   .
    stage 1   .   a   b   c   d   .
    stage 2   .   .   a   b   c   d

parts + S - 1 ticks for parts ticks of work: (S - 1) / (parts + S - 1) of the time is a bubble. The whole is a scan with
one collective-permute in its body; its derivative is the same pipeline in reverse, all forward ticks before all
backward ones, so that what a layer keeps for its backward pass is kept for all parts: rematerialise it, with
`jax.checkpoint` around the body. Stages that wait compute on data of another part, which nothing reads.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError, check_at_least
from scalejax.parallel.mesh import batch_shards, cut, join

if TYPE_CHECKING:
    from jaxtyping import PyTree

AXIS = "stage"

X = TypeVar("X")
Body = Callable[["PyTree[jax.Array]", X], X]
"""(parameters of one layer, x) -> x of the same structure, shapes and dtypes."""


def ticks(parts: int, stages: int) -> int:
    """Ticks of a pass over all parts."""
    return parts + stages - 1


def pipelined(body: Body[X], *, mesh: Mesh | AbstractMesh, parts: int) -> Callable[["PyTree[jax.Array]", X], X]:
    """The stack `x = body(layer, x)`, one layer after the other, run over the stages of a mesh.

    For programs under jit with shardings: `stage` alone is manual, so that the body may be sharded over the other axes
    as it is without a pipeline. See `run_stages` for code that is inside a shard_map already.

    Args:
      body: One layer. What it needs of the batch (positions, say) must be in x, and comes out unchanged.
      mesh: The devices.
      parts: Cuts of the batch; a multiple of the stages wastes least.

    Returns:
      (parameters, x) -> x. Parameters are a pytree of arrays [L, ...], whose first axis is sharded over `stage`; x is a
      pytree of arrays [B, ...], sharded over the batch axes. Differentiable.

    Raises:
      UserError: on call: the layers do not divide over the stages, or the batch over parts and devices.
    """
    check_at_least("pipelined: parts", parts, 1)
    stages = mesh.shape[AXIS]

    def run(params: "PyTree[jax.Array]", x: X) -> X:
        check_layers(params, stages)
        shards = batch_shards(mesh)
        for leaf in jax.tree.leaves(x):
            if leaf.shape[0] % (parts * shards):
                raise UserError(
                    f"pipelined: a batch of {leaf.shape[0]} does not divide into {parts} parts on {shards} devices of "
                    f"the batch axes. Use a multiple of {parts * shards}."
                )
        local = jax.shard_map(
            lambda params, x: jax.tree.map(lambda y: y[None], run_stages(body, params, x)),
            mesh=mesh,
            in_specs=(P(AXIS), P()),
            out_specs=P(AXIS),
            axis_names={AXIS},
            check_vma=False,
        )
        out = local(params, jax.tree.map(lambda leaf: cut(leaf, mesh, parts), x))
        return jax.tree.map(lambda y: join(y[-1], mesh), out)  # of the last stage

    return run


def run_stages(body: Body[X], params: "PyTree[jax.Array]", parts: X) -> X:
    """A pass of all parts through the stages; runs inside a shard_map in which `stage` is manual.

    Args:
      body: One layer.
      params: Pytree of arrays [L / S, ...], the layers of this stage.
      parts: Pytree of arrays [parts, ...], equal on all stages; the first stage reads it.

    Returns:
      Results of the last stage, [parts, ...]. On other stages the array holds other numbers, which must not be used:
      see `on_last_stage`.
    """
    stages, stage = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    (count,) = {leaf.shape[0] for leaf in jax.tree.leaves(parts)}
    # No pair leads back to the first stage, which takes its parts from the batch; it receives zeros.
    onward = [(i, i + 1) for i in range(stages - 1)]

    def layers(x: X) -> X:
        return jax.lax.scan(lambda x, layer: (body(layer, x), None), x, params)[0]

    def tick(received: X, number: jax.Array) -> tuple[X, X]:
        # Behind its last part the first stage runs that one again: what comes of it never reaches the results.
        fresh = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, count - 1)], parts)
        x = jax.tree.map(functools.partial(jnp.where, stage == 0), fresh, received)
        y = layers(x)
        return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, onward), y), y

    # Stages that wait for their first part work on real data, since zeros might give NaN in some layer.
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    _, results = jax.lax.scan(tick, first, jnp.arange(ticks(count, stages), dtype=jnp.int32))
    return jax.tree.map(lambda leaf: leaf[stages - 1 :], results)


def on_last_stage(x: X) -> X:
    """x on the last stage and zeros on the others: what a loss must count of what follows a pipeline."""
    last = jax.lax.axis_index(AXIS) == jax.lax.axis_size(AXIS) - 1
    return jax.tree.map(lambda leaf: jnp.where(last, leaf, jnp.zeros_like(leaf)), x)


def check_layers(params: object, stages: int) -> None:
    """Refuses layers that do not divide over the stages.

    Raises:
      UserError: names the numbers.
    """
    for leaf in jax.tree.leaves(params):
        if leaf.shape[0] % stages:
            near = leaf.shape[0] // stages * stages
            nearest = f"{near} or {near + stages}" if near else f"{stages}"
            raise UserError(
                f"pipelined: {leaf.shape[0]} layers do not divide over stage={stages}. Use {nearest} layers, or "
                "another number of stages."
            )
