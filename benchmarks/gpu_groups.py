"""The GPU kernels of integer groups (SDP4Bit): checked against XLA, then timed beside it and a plain copy.

python benchmarks/gpu_groups.py [--json FILE] [--seconds 60]      # on a machine with a GPU
python benchmarks/gpu_groups.py --smoke                           # anywhere: tiny sizes, kernels interpreted

One JSON object a line, to standard output and to FILE, as gpu_report.py says. `checks` come first: codes, scales and
sums of heavy-tailed numbers, with NaN, infinities and groups of zeros among them, must equal XLA's to the bit. Where
one differs, nothing is timed and the exit status is 1.

Then each kernel, rated by the bytes that it has to move, as a share of the bandwidth of a copy in the same run (aim:
0.7): Hadamard transform and quantizing, the sum over eight devices transformed back or quantized again, and adding to a
copy in bfloat16. Then int4:128 for other sizes of a program than those of the package; and the compressors of
`parallel.compression`, which XLA alone compiles, there and back.
"""

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_report import Report, compiled, main, timed

from scalejax.bench.cases import gradient_compressors
from scalejax.kernels import group_quantize
from scalejax.kernels.group_quantize import IntGroups, pallas_gpu
from scalejax.kernels.group_quantize.api import Implementation
from scalejax.parallel.compression import compressors

KERNELS: tuple[Implementation, ...] = ("pallas_gpu", "xla")
FORMATS = {
    "int4:128": IntGroups(bits=4, size=128),
    "int8:128": IntGroups(bits=8, size=128),
    "int4:2048": IntGroups(bits=4, size=2048),
}
COMPRESSORS = {
    **gradient_compressors.COMPRESSORS,
    "onebit, groups of 128": compressors.OneBit(group=128),
    "randomk": compressors.RandomKEntries(),
}
DEVICES = 8
SEED = np.array([1, 2], np.uint32)


def calls(format: IntGroups, numbers: int, x: jax.Array, *, smoke: bool, implementation: Implementation) -> Any:
    """{what: (function, arguments, bytes to move)} for float32[DEVICES, numbers]."""
    how = {"implementation": implementation, "interpret": smoke and implementation == "pallas_gpu"}
    seed = jnp.asarray(SEED)
    groups = jax.jit(functools.partial(group_quantize.quantize, format=format, implementation="xla"))(x)
    base = jnp.ones(numbers * DEVICES, jnp.bfloat16)
    row = numbers * format.bytes_per_value
    flat = jax.tree.map(jnp.ravel, groups)
    return {
        "transform and quantize": (
            lambda x, seed: group_quantize.quantize(x, format, seed, transform="hadamard", **how),
            (x.reshape(-1), seed), DEVICES * (4 * numbers + row),
        ),
        "sum and transform": (
            lambda groups: group_quantize.dequantize_sum(groups, format, transform="hadamard", **how),
            (groups,), DEVICES * row + 4 * numbers,
        ),
        "sum and quantize": (
            lambda groups, seed: group_quantize.requantize(groups, format, format, seed, **how),
            (groups, seed), DEVICES * row + row,
        ),
        "add": (
            lambda base, groups: group_quantize.dequantize_add(base, groups, format, **how),
            (base, flat), DEVICES * (row + 4 * numbers),
        ),
    }  # fmt: skip


def numbers_of(count: int) -> jax.Array:
    """Heavy tails: a ratio of normal numbers."""
    a, b = jax.random.normal(jax.random.key(0), (2, DEVICES, count))
    return a / jnp.maximum(jnp.abs(b), 1e-3)


def check(report: Report, *, smoke: bool) -> bool:
    """Whether kernels give what XLA gives."""
    wrong: dict[str, int] = {}
    checked, count = 0, 2048 * (3 if smoke else 1000)
    x = numbers_of(count)
    x = x.at[0, 5].set(jnp.nan).at[1, -1].set(jnp.inf).at[2, :2048].set(0)
    for name, format in list(FORMATS.items())[: 1 if smoke else None]:
        ours, theirs = (calls(format, count, x, smoke=smoke, implementation=i) for i in KERNELS)
        for what, (function, arguments, _) in ours.items():
            pairs = zip(*(jax.tree.leaves(jax.jit(f)(*arguments)) for f in (function, theirs[what][0])), strict=True)
            different = sum(int((bits_of(a) != bits_of(b)).sum()) for a, b in pairs)
            checked += 1
            if different:
                wrong[f"{what}, {name}"] = different
    report.line(case="checks", checked=checked, wrong=wrong)
    return not wrong


def bits_of(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def time_cases(report: Report, *, smoke: bool) -> None:
    """Each kernel on a bucket of 2^28 numbers."""
    count = 2048 if smoke else 2**25
    x = numbers_of(count)
    for name, format in list(FORMATS.items())[: 1 if smoke else None]:
        for implementation in KERNELS:
            made = calls(format, count, x, smoke=smoke, implementation=implementation)
            for what, (function, arguments, moved) in made.items():
                case = f"{what}, {name}, {DEVICES} x {count}"
                if report.has_time_for(case, 4):
                    program = jax.jit(function)
                    seconds = timed(lambda f=program, a=arguments: f(*a))
                    report.timing(
                        case, implementation, seconds, int(moved), "what is read and written once", goal_share=0.7
                    )
    tiles(report, x, count, smoke=smoke)
    time_compressors(report, x)


def tiles(report: Report, x: jax.Array, count: int, *, smoke: bool) -> None:
    """int4:128 for every size of a program that might be the best."""
    usual, lowered = pallas_gpu.BLOCKS, {}
    made = calls(FORMATS["int4:128"], count, x, smoke=smoke, implementation="pallas_gpu")
    sizes = [pallas_gpu.GpuBlocks(*given) for given in itertools.product((2048, 4096, 8192), (1, 2, 4), (1, 8))]
    if not report.has_time_for("tiles", 40):
        return
    for blocks, what in itertools.product(sizes[:1] if smoke else sizes, made):
        if blocks.unroll == 1 or what.startswith("sum"):
            pallas_gpu.BLOCKS = blocks
            jax.clear_caches()  # sizes are no arguments
            function, arguments, _ = made[what]
            lowered[what, blocks] = jax.jit(function).lower(*arguments)
    pallas_gpu.BLOCKS = usual
    for (what, blocks), program in compiled(lowered).items():
        _, arguments, moved = made[what]
        seconds = timed(lambda f=program, a=arguments: f(*a), turns=5)
        case = f"tiles, {what}, int4:128, {DEVICES} x {count}, {blocks}"
        report.timing(case, "pallas_gpu", seconds, int(moved), "what is read and written once")


def time_compressors(report: Report, x: jax.Array) -> None:
    """Both ways of every compressor, a row for each device."""
    rows, n = x.shape
    for name, compressor in COMPRESSORS.items():
        key = None if compressor.traits.keys == "none" else jnp.asarray(SEED)
        encode, decode = jax.jit(compressor.encode), jax.jit(functools.partial(compressor.decode, n=n, key=key))
        moved = rows * (4 * n + compressor.payload_bytes(n))
        if report.has_time_for(name, 8):
            ways = {"compress": functools.partial(encode, x, key), "back": functools.partial(decode, encode(x, key))}
            for what, call in ways.items():
                case = f"{what}, {name}, {rows} x {n}"
                report.timing(case, "xla", timed(call), moved, "what is read and written once", goal_share=0.7)


if __name__ == "__main__":
    sys.exit(main("gpu_groups", __doc__, check, time_cases, seconds=60))
