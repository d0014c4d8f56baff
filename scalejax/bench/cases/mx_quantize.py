"""Quantizing an array to packed OCP formats on a CPU, against torchao's `to_mx`.

The unit of work is one call on float32[4096, 4096] (`bfloat16` in the last case), blocks of 32 along the last axis,
scale rule "floor", codes and scales in memory of their own; "examples" are its elements. Peers: `torchao` as it runs
op by op, `torchao-compile` through torch.compile. 6-bit codes are packed here, four in three bytes, and a byte each
there. Codes and scales must be equal to the bit before anything is timed. Cases are names of formats.

Figures: `floor_share`, what one pass of XLA over the array takes that turns each number into a byte, over what ours
takes: the scales need a pass of their own.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.bench import machine, peers
from scalejax.bench.harness import Contest, OutputsDiffer, Timed, repeated
from scalejax.kernels.mx import quantize_blocks
from scalejax.numerics.packing import Packed, unpack

CASES = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxfp8_e4m3-bfloat16")
PEERS = ("torchao", "torchao-compile")
ON_CPU = True

SHAPE = (4096, 4096)


class Peer(Protocol):
    """The same work in another library."""

    def run(self) -> None: ...

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """uint8 codes, 4-bit ones two in a byte, and uint8 scales."""
        ...


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    return contest(case, against, SHAPE)


def contest(case: str, against: str | None, shape: tuple[int, int]) -> Contest:
    """Ours and the peer's quantizer on the same array."""
    name, _, dtype = case.partition("-")
    device = jax.devices("cpu")[0]
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x = jax.device_put(jnp.asarray(numbers, dtype or "float32"), device)
    quantize = jax.jit(lambda x: quantize_blocks(x, name, axis=-1, implementation="xla"))
    peer: Peer | None = None
    if against is not None:
        compiled = against == "torchao-compile"
        threads = len(machine.usable_cpus())
        peer = peers.load("torchao_mx").Quantizer(numbers, name, dtype or "float32", compiled, threads)

    def check() -> None:
        assert peer is not None
        packed = quantize(x)
        for what, ours, theirs in zip(("codes", "scales"), _arrays(packed), peer.results(), strict=True):
            different = int((ours != theirs).sum())
            if different:
                raise OutputsDiffer(f"{different} of {ours.size} {what} differ")

    ours = _timed(quantize, x)
    return Contest(
        ours,
        x.size,
        machine.device_name(device),
        None if peer is None else repeated(peer.run),
        check,
        figures=lambda: {"floor_share": _floor_seconds(x) / ours.seconds()},
    )


def _timed(program: Callable[[jax.Array], object], x: jax.Array) -> Timed:
    return Timed(repeated(lambda: jax.block_until_ready(program(x))))


def _floor_seconds(x: jax.Array) -> float:
    floor = _timed(jax.jit(lambda x: lax.convert_element_type(x, jnp.int8)), x)
    floor(3)
    for _ in range(9):
        floor(4)
    return floor.seconds()


def _arrays(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    codes = unpack(packed).codes if packed.format.element.bits == 6 else packed.codes
    return np.asarray(codes), np.asarray(packed.scales)
