"""Causal attention, forward alone and with gradients, against what jax offers.

The unit of work is one call on a batch of sequences; the peer `jax` is jax.nn.dot_product_attention, as XLA's matrix
products of all scores on a CPU and as cuDNN on a GPU. Ours are the chunks by XLA on a CPU and the Triton kernels on a
GPU, where `implementation=None` would take cuDNN itself. Cases:

    forward-d64   train-d64        heads of 64 numbers, four query heads a key/value head
    forward-d128  train-d128       heads of 128

On a CPU float32 and 1,024 positions; on a GPU bfloat16 and 8,192. Figures: `tflops` and `tflops_peer`, of the visible
half of the matrix products alone, 2 of them forward and 6 with gradients (scores that are made again are not counted);
on a GPU whose dense bfloat16 peak is known also their shares of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.bench import machine
from scalejax.bench.harness import Contest, Effort, OutputsDiffer, Timed
from scalejax.kernels.flash_attention import flash_attention

CASES = ("forward-d64", "train-d64", "forward-d128", "train-d128")
PEERS = ("jax",)
EFFORT = Effort(turns=9)

PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Dense bfloat16, per second, by jax's name of the device (NVIDIA's data sheets)."""

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Largest difference of results, over the largest number among them: sums in float32, of operands rounded to what the
dtype has; bfloat16 rounds the weights and the output."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Batch, positions, query heads, key/value heads."""

    batch: int
    length: int
    heads: int
    kv_heads: int


_CPU_SIZES = {64: Size(2, 1024, 8, 2), 128: Size(1, 1024, 8, 2)}
_GPU_SIZES = {64: Size(4, 8192, 32, 8), 128: Size(2, 8192, 32, 8)}


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    width = int(case.rpartition("-d")[2])
    sizes = (_CPU_SIZES if machine.on_cpu() else _GPU_SIZES)[width]
    return contest(sizes, width, gradients=case.startswith("train"), against=against)


def contest(sizes: Size, width: int, *, gradients: bool, against: str | None) -> Contest:
    """Ours and the peer's attention on the same operands."""
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    operands = _operands(sizes, width, dtype)
    named = "pallas_gpu" if device.platform == "gpu" else "xla"
    ours = _Side(_program(functools.partial(_ours, implementation=named), gradients), operands)
    peer = None
    if against is not None:
        peers = "xla" if device.platform == "cpu" else "cudnn"
        peer = _Side(_program(functools.partial(_jax, implementation=peers), gradients), operands)

    def check() -> None:
        assert peer is not None
        for number, (one, two) in enumerate(zip(ours.results(), peer.results(), strict=True)):
            difference = np.abs(one - two).max() / np.abs(two).max()
            if not difference <= TOLERANCE[jnp.dtype(dtype).name]:
                raise OutputsDiffer(f"result {number} differs by {difference:.1e} of its largest number")

    def figures() -> dict[str, float]:
        flops = useful_flops(sizes, width, gradients=gradients)
        found = {"tflops": flops / ours.run.seconds() / 1e12}
        if peer is not None:
            found["tflops_peer"] = flops / peer.run.seconds() / 1e12
        peak = PEAK_FLOPS.get(device.device_kind)
        if peak is not None:
            found |= {f"share_of_peak{name[6:]}": value * 1e12 / peak for name, value in found.items()}
        return found

    return Contest(
        ours.run,
        sizes.batch * sizes.length,
        machine.device_name(device),
        None if peer is None else peer.run,
        check,
        figures=figures,
    )


def useful_flops(sizes: Size, width: int, *, gradients: bool) -> float:
    """Operations of causal attention: 2 products forward, 4 more with gradients, half of each visible."""
    products = 6 if gradients else 2
    return products * 2 * sizes.batch * sizes.heads * sizes.length**2 * width / 2


class _Side:
    """A compiled program on its operands, and how long its turns took."""

    def __init__(self, program: Callable[..., object], operands: tuple[jax.Array, ...]):
        self.program = program
        self.operands = operands
        self.run = Timed(self._run)

    def _run(self, count: int) -> None:
        done: object = None
        for _ in range(count):
            done = self.program(*self.operands)
        jax.block_until_ready(done)

    def results(self) -> list[np.ndarray]:
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(self.program(*self.operands))]


def _ours(q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: Literal["pallas_gpu", "xla"]) -> jax.Array:
    return flash_attention(q, k, v, implementation=implementation)[0]


def _jax(q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: Literal["cudnn", "xla"]) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def _program(attention: Callable[..., jax.Array], gradients: bool) -> Callable[..., object]:
    def forward(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> jax.Array:
        return attention(q, k, v)

    def train(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(d_out)

    return jax.jit(train if gradients else forward)


def _operands(sizes: Size, width: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    of_queries = (sizes.batch, sizes.length, sizes.heads, width)
    of_keys = (sizes.batch, sizes.length, sizes.kv_heads, width)
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, (of_queries, of_keys, of_keys, of_queries), strict=True)
    )
