"""Repeats a block over stacked parameters, one scanned and rematerialised body.

Every parameter of the block has a leading axis of layers. A scan compiles the block once, whatever the depth, and the
parameters of one layer are fetched inside its body, where they can be gathered from shards and dropped again.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import jax
from flax import nnx
from jax.sharding import AxisType

from scalejax.errors import UserError, check_one_of
from scalejax.parallel import pipeline
from scalejax.parallel.gradients.blocks import RematPolicy
from scalejax.parallel.mesh import batch_shards

if TYPE_CHECKING:
    from jaxtyping import PyTree

M = TypeVar("M")
X = TypeVar("X")
Y = TypeVar("Y")
Beside = TypeVar("Beside")

Remat = Literal["none", "full", "dots"]
"""What the backward pass finds: "none" all that the forward pass computed, "full" the input of each layer, "dots" also
the results of matrix products with parameters."""

Arrays = dict[str, jax.Array]


class Gather(Protocol):
    """Makes the parameters of a block whole before they are used, {path: array} to the same.

    Called once for each layer, inside the scan and its rematerialisation, with the arrays of that layer. Its derivative
    may be a reduction over devices. A gather that has an attribute `remat`, a function of a jax rematerialisation
    policy to another, says so what of its own work is kept.
    """

    def __call__(self, params: Arrays, /) -> Arrays: ...


def whole(params: Arrays) -> Arrays:
    """The gather of parameters that are whole already."""
    return params


def remat_policy(remat: Remat, gather: Gather = whole) -> RematPolicy | None:
    """jax's policy for a choice of `Remat`, as `gather` wants it; None = everything is kept.

    Raises:
      ValueError: there is no such choice.
    """
    policies = {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    check_one_of("remat", remat, policies)
    adapt = getattr(gather, "remat", None)
    policy = policies[remat]
    return policy if adapt is None else adapt(policy)


def apply_layers(
    layers: nnx.Module,
    body: Callable[[Any, X, Beside], X],
    x: X,
    beside: Beside,
    *,
    prefix: str = "layers",
    remat: Remat = "none",
    gather: Gather = whole,
    stage_parts: int | None = None,
    unroll: int = 1,
) -> X:
    """x = body(layer l, x, beside) for each layer in turn, over the devices of `stage` where the mesh has several.

    Args:
      layers: One block whose parameters all have a leading axis of layers.
      body: (block with the parameters of one layer, x, beside) -> x.
      x: Pytree of arrays [B, ...].
      beside: Pytree of arrays [B, ...] that every layer reads.
      prefix: What comes before the paths of the parameters, as `gather` sees them.
      remat: What is kept for the backward pass.
      gather: Fetches the parameters of a layer.
      stage_parts: Parts into which a pipeline cuts the rows of each device; None = the most up to four a stage.
      unroll: Layers in one turn of the scan (not of a pipeline's).

    Returns:
      The last x.

    Raises:
      UserError: the layers do not divide over the stages, or the rows over the parts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages = 1 if mesh.empty else mesh.shape.get(pipeline.AXIS, 1)
    options: dict[str, Any] = {"prefix": prefix, "remat": remat, "gather": gather}
    if stages == 1:
        run = functools.partial(scan_layers, unroll=unroll, **options)
        return run(layers, lambda layer, x, _: (body(layer, x, beside), None), x)[0]
    by_hand = mesh.axis_types[mesh.axis_names.index(pipeline.AXIS)] == AxisType.Manual
    step, params = _one_layer(layers, lambda layer, carry, _: ((body(layer, *carry), carry[1]), None), **options)

    if _variables(layers):
        raise UserError(
            f"{type(layers).__name__} has variables that are no parameters, which a pipeline over stage={stages} does "
            "not carry. Use a mesh with stage=1."
        )

    def stacked(params: Arrays, carry: tuple[X, Beside]) -> tuple[X, Beside]:
        return step(carry, ((params, {}), None))[0]

    (rows,) = {leaf.shape[0] for leaf in jax.tree.leaves((x, beside))}
    local = rows if by_hand else rows // batch_shards(mesh)
    parts = stage_parts or max(n for n in range(1, 4 * stages + 1) if local % n == 0)
    if local % parts:
        raise UserError(
            f"model.stage_parts={parts} does not divide the {local} rows of a device. Choose a divisor, or None."
        )
    if not by_hand:
        return pipeline.pipelined(stacked, mesh=mesh, parts=parts)(params, (x, beside))[0]
    cut = jax.tree.map(lambda leaf: leaf.reshape(parts, rows // parts, *leaf.shape[1:]), (x, beside))
    out, _ = pipeline.run_stages(stacked, params, cut)
    return jax.tree.map(lambda leaf: leaf.reshape(rows, *leaf.shape[2:]), out)


def scan_layers(
    layers: nnx.Module,
    body: Callable[[Any, X, Any], tuple[X, Y]],
    carry: X,
    xs: "PyTree[jax.Array]" = None,
    *,
    prefix: str = "layers",
    remat: Remat = "none",
    gather: Gather = whole,
    unroll: int = 1,
) -> tuple[X, Y]:
    """carry, y_l = body(layer l, carry, x_l) for each layer in turn.

    Args:
      layers: One block whose parameters all have a leading axis of layers.
      body: (block with the parameters of one layer, carry, x of that layer) -> (carry, y).
      carry: Pytree of arrays.
      xs: Pytree of arrays with a leading axis of layers, or None.
      prefix: What comes before the paths of the parameters, as `gather` sees them.
      remat: What is kept for the backward pass.
      gather: Fetches the parameters of a layer.
      unroll: Layers in one turn of the scan: what is kept of them is not stacked, which spares small models on CPUs the
        filling of fresh memory with zeros, and takes longer to compile.

    Returns:
      The last carry, and the ys stacked.
    """
    step, params = _one_layer(layers, body, prefix=prefix, remat=remat, gather=gather)
    kept = _variables(layers)
    carry, (ys, changed) = jax.lax.scan(
        step, carry, ((params, {p: v[...] for p, v in kept.items()}), xs), unroll=unroll
    )
    for path, value in changed.items():
        kept[path][...] = value
    return carry, ys


def _variables(layers: nnx.Module) -> dict[tuple[Any, ...], nnx.Variable[Any]]:
    """What of a module is no parameter, by path: running means, say."""
    found = nnx.to_flat_state(nnx.state(layers))
    return {path: variable for path, variable in found if not isinstance(variable, nnx.Param)}


def _one_layer(
    layers: nnx.Module, body: Callable[[Any, X, Any], tuple[X, Y]], *, prefix: str, remat: Remat, gather: Gather
) -> tuple[Callable[[X, "PyTree"], tuple[X, tuple[Y, "PyTree"]]], Arrays]:
    """The body of a scan, and the parameters of all layers.

    It is (carry, ((parameters of a layer, its other variables), x)) -> (carry, (y, the next variables)).
    """
    values, merge = split_params(layers, prefix)
    others = {f"{prefix}/{'/'.join(map(str, path))}": path for path in _variables(layers)}

    def step(carry: X, scanned: "PyTree") -> tuple[X, tuple[Y, "PyTree"]]:
        (params, variables), x = scanned
        own = {name: variables[path] for name, path in others.items()}
        layer = merge({**gather(params), **own})
        carry, y = body(layer, carry, x)
        return carry, (y, {path: variable[...] for path, variable in _variables(layer).items()})

    policy = remat_policy(remat, gather)
    if policy is not None:
        # In a scan nothing can be merged with the forward pass, so no barrier against that is needed.
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    return step, {name: value for name, value in values.items() if name not in others}


def split_params(module: M, prefix: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], M]]:
    """The parameters of a module by path under a prefix, and what puts it together with others in their place.

    Before they are gathered, values may be other pytrees than single arrays.
    """
    graph, state = nnx.split(module)
    variables = {f"{prefix}/{'/'.join(map(str, path))}": (path, v) for path, v in nnx.to_flat_state(state)}

    def merge(params: dict[str, Any]) -> M:
        flat = [(path, variable.replace(params[name])) for name, (path, variable) in variables.items()]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    return {name: variable.get_value() for name, (_, variable) in variables.items()}, merge
