"""Rows sorted by group, each times the matrix of its group, against the same work without groups.

The unit of work is one call; "examples" are rows. The peer `dense` multiplies all rows with one matrix: as many
operations, one product. The peer `ragged_dot` is jax.lax.ragged_dot of the same groups. Ours is what a layer of experts
takes on the device at hand. Cases:

    forward-balanced  forward-zipf    a product
    train-balanced    train-zipf      a product and the gradients of rows and weights
    mlp-balanced      mlp-zipf        a gated MLP a group, with its gradients

Balanced groups have equally many rows; those of "zipf" as many as 1 / rank asks for, in multiples of 128. On a CPU
float32, 4,096 rows of width 128, hidden 384 and 8 groups; on a GPU bfloat16, 32,768 rows of width 4,096, hidden 14,336
and 8 groups, as an expert layer of Mixtral 8x7B has. All groups have equal matrices, each in memory of its own, so that
results of the dense product are those of the grouped one, and gradients of its matrix their sum over groups.

Figures: `tflops` and `tflops_peer`, and `largest`, the share of rows of the largest group.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.bench import machine
from scalejax.bench.harness import Contest, OutputsDiffer, Timed, repeated
from scalejax.kernels.grouped_matmul import grouped_gated_mlp, grouped_matmul

CASES = ("forward-balanced", "forward-zipf", "train-balanced", "train-zipf", "mlp-balanced", "mlp-zipf")
PEERS = ("dense", "ragged_dot")

BLOCK = 128

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference of results, over the largest number among them."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Rows, width, hidden units, groups."""

    rows: int
    width: int
    hidden: int
    groups: int


_CPU_SIZE = Size(4096, 128, 384, 8)
_GPU_SIZE = Size(32768, 4096, 14336, 8)


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    return contest(case, against, _CPU_SIZE if machine.on_cpu() else _GPU_SIZE)


def contest(case: str, against: str | None, size: Size) -> Contest:
    """Ours and the peer's product of the same rows."""
    what, _, spread = case.partition("-")
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    sizes = group_sizes(size, zipf=spread == "zipf")
    x, weights, g = _operands(size, what, dtype)
    stacked = [jnp.tile(w[None], (size.groups, 1, 1)) for w in weights]
    ours = _program(_grouped(sizes, None), what == "forward", x, stacked, g)
    peer = None
    if against == "dense":
        peer = _program(_dense, what == "forward", x, weights, g)
    elif against == "ragged_dot":
        peer = _program(_grouped(sizes, "ragged_dot"), what == "forward", x, stacked, g)

    def check() -> None:
        assert peer is not None
        for number, (one, two) in enumerate(zip(jax.tree.leaves(ours()), jax.tree.leaves(peer()), strict=True)):
            one, two = (np.asarray(a, np.float32) for a in (one, two))
            one = one.sum(0) if one.ndim > two.ndim else one
            difference = np.abs(one - two).max() / np.abs(two).max()
            if not difference <= TOLERANCE[jnp.dtype(dtype).name]:
                raise OutputsDiffer(f"result {number} differs by {difference:.1e} of its largest number")

    timed = Timed(repeated(lambda: jax.block_until_ready(ours())))
    timed_peer = None if peer is None else Timed(repeated(lambda: jax.block_until_ready(peer())))

    def figures() -> dict[str, float]:
        operations = 2 * len(weights) * (1 if what == "forward" else 3) * size.rows * size.width * size.hidden / 1e12
        found = {"tflops": operations / timed.seconds()}
        if timed_peer is not None:
            found["tflops_peer"] = operations / timed_peer.seconds()
        return {**found, "largest": float(sizes.max() / size.rows)}

    return Contest(timed, size.rows, machine.device_name(device), timed_peer, check, figures=figures)


def group_sizes(size: Size, *, zipf: bool) -> np.ndarray:
    """int32[groups], multiples of 128 that sum to all rows."""
    share = 1 / np.arange(1, size.groups + 1) if zipf else np.ones(size.groups)
    ends = np.round(np.cumsum(share) / share.sum() * (size.rows // BLOCK)) * BLOCK
    return np.diff(ends, prepend=0).astype(np.int32)


_Multiply = Callable[..., jax.Array]


def _grouped(sizes: np.ndarray, implementation: Literal["ragged_dot"] | None) -> _Multiply:
    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        given = jnp.asarray(sizes)
        if len(weights) == 1:
            return grouped_matmul(x, weights[0], given, block=BLOCK, implementation=implementation)
        gate, up, down = weights
        return grouped_gated_mlp(x, gate, up, down, given, block=BLOCK, implementation=implementation)

    return run


def _dense(x: jax.Array, *weights: jax.Array) -> jax.Array:
    if len(weights) == 1:
        return x @ weights[0]
    gate, up, down = weights
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _program(
    multiply: _Multiply, forward: bool, x: jax.Array, weights: list[jax.Array], g: jax.Array
) -> Callable[[], object]:
    def train(x: jax.Array, g: jax.Array, *weights: jax.Array) -> object:
        y, back = jax.vjp(multiply, x, *weights)
        return y, back(g)

    compiled = jax.jit((lambda x, g, *weights: multiply(x, *weights)) if forward else train)
    return lambda: compiled(x, g, *weights)


def _operands(size: Size, what: str, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Rows, the matrices of a group and the cotangent of the result."""
    wide, narrow = (size.width, size.hidden), (size.hidden, size.width)
    matrices = [wide, wide, narrow] if what == "mlp" else [wide]
    shapes = [(size.rows, size.width), (size.rows, matrices[-1][1]), *matrices]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, g, *weights = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return x, [w / w.shape[0] ** 0.5 for w in weights], g
