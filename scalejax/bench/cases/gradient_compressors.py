"""Compressing gradients and back on a CPU, against the same algorithms in torch.

The unit of work is one encoding and one decoding of float32[8, 2097152], heavy-tailed, payloads in memory of their own
between the two; "examples" are its numbers. Peers: `torch` as it runs op by op, `torch-compile` through torch.compile.

    int4:128           groups of SDP4Bit, rounded stochastically, two codes in a byte
    blocks-int4:128    the compressor `Blocks` in the format of the same name, rounded stochastically
    onebit             signs, eight in a byte, under the mean magnitude of a row
    topk               a thousandth of each row, values and places
    linear-dithering   16 levels of either sign under the largest magnitude of a row, equally far apart; no peer
    natural-dithering  7 levels of either sign, powers of two; no peer

Figures: bytes of the payload a value, and of dithering what the levels of this array took if they were entropy-coded as
in the released code of BytePS-Compress (nothing travels so: an exchange has to know sizes before it runs).

Before anything is timed, what comes back from both sides must be equal to 1e-6 of the largest number; rounded
stochastically, it must lie within a step of the scale of what was sent on both sides, and be unbiased.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from scalejax.bench import machine, peers
from scalejax.bench.harness import Contest, OutputsDiffer, Unsuited, repeated
from scalejax.kernels import group_quantize
from scalejax.parallel.compression import compressors
from scalejax.parallel.compression.compressors import Compressor, Payload

CASES = ("int4:128", "blocks-int4:128", "onebit", "topk", "linear-dithering", "natural-dithering")
PEERS = ("torch", "torch-compile")
ON_CPU = True

SHAPE = (8, 2**21)
K = 0.001
GROUPS = group_quantize.IntGroups(bits=4, size=128)
DITHERINGS = {
    "linear-dithering": compressors.LinearDithering(levels=16),
    "natural-dithering": compressors.NaturalDithering(levels=7),
}
COMPRESSORS: dict[str, Compressor] = {
    "blocks-int4:128": compressors.Blocks(format="int4:128"),
    "onebit": compressors.OneBit(),
    "topk": compressors.TopKEntries(k=K),
    **DITHERINGS,
}


class Peer(Protocol):
    """The same work in another library."""

    def run(self) -> None: ...

    def result(self) -> np.ndarray:
        """float32[rows, n] that comes back."""
        ...


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case.

    Raises:
      Unsuited: a peer that the case does not have.
    """
    return contest(case, against, SHAPE)


def contest(case: str, against: str | None, shape: tuple[int, int]) -> Contest:
    """Ours and the peer's compressor on the same array."""
    if against is not None and case in DITHERINGS:
        raise Unsuited(f"--against {against}: {case} has no peer. Time it alone.")
    device = jax.devices("cpu")[0]
    numbers = np.random.default_rng(0).standard_t(3, shape).astype(np.float32)
    x = jax.device_put(numbers, device)
    encode, decode = _programs(case, shape[1])
    key = jax.device_put(np.array([1, 2], np.uint32), device)

    def ours() -> jax.Array:
        return decode(encode(x, key)).block_until_ready()

    peer: Peer | None = None
    if against is not None:
        threads = len(machine.usable_cpus())
        kind = case.removeprefix("blocks-")
        peer = peers.load("torch_compressors").RoundTrip(numbers, kind, K, against == "torch-compile", threads)

    def check() -> None:
        assert peer is not None
        _check(case, numbers, np.asarray(ours()), peer.result())

    def figures() -> dict[str, float]:
        if case not in COMPRESSORS:
            return {"payload_bytes_a_value": GROUPS.bytes_per_value}
        found = {"payload_bytes_a_value": COMPRESSORS[case].payload_bytes(shape[1]) / shape[1]}
        if (dithering := DITHERINGS.get(case)) is not None:
            levels = dithering.signed_levels(encode(x, key), shape[1])
            found["entropy_coded_bytes_a_value"] = sum(map(compressors.entropy_coded_bytes, levels)) / x.size
        return found

    return Contest(
        repeated(ours),
        x.size,
        machine.device_name(device),
        None if peer is None else repeated(peer.run),
        check,
        figures=figures,
    )


def _programs(case: str, n: int) -> tuple[Callable[[jax.Array, jax.Array], Payload], Callable[[Payload], jax.Array]]:
    if case in COMPRESSORS:
        compressor = COMPRESSORS[case]
        return jax.jit(compressor.encode), jax.jit(lambda payload: compressor.decode(payload, n))

    def encode(x: jax.Array, key: jax.Array) -> Payload:
        groups = group_quantize.quantize(x, GROUPS, key, implementation="xla")
        return {"codes": groups.codes, "scales": groups.scales}

    def decode(payload: Payload) -> jax.Array:
        groups = group_quantize.QuantizedGroups(payload["codes"], payload["scales"])
        return group_quantize.dequantize(groups, GROUPS, implementation="xla")

    return jax.jit(encode), jax.jit(decode)


def _check(case: str, sent: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> None:
    if not case.endswith("int4:128"):
        different = np.abs(ours - theirs) > 1e-6 * np.abs(sent).max()
        if different.any():
            raise OutputsDiffer(f"{case}: {int(different.sum())} of {ours.size} numbers differ")
        return
    groups = sent.reshape(-1, GROUPS.size)
    step = np.abs(groups).max(axis=1, keepdims=True) / 7
    for whose, back in (("ours", ours), ("the peer's", theirs)):
        missed = (back.reshape(groups.shape) - groups) / step
        # Stochastic rounding of a step has a variance of at most a quarter.
        if np.abs(missed).max() > 1 + 1e-4 or abs(missed.mean()) > 3 * missed.size**-0.5:
            raise OutputsDiffer(
                f"{case}: {whose} is off by up to {np.abs(missed).max()} steps, {missed.mean()} on average"
            )
