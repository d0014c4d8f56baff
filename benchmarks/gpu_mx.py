"""The GPU kernels of packed blocks: checked against XLA, then timed beside it, a plain copy and bfloat16 products.

python benchmarks/gpu_mx.py [--json FILE] [--seconds 120]      # on a machine with a GPU
python benchmarks/gpu_mx.py --smoke                            # anywhere: tiny sizes, kernels interpreted

One JSON object a line, to standard output and to FILE, as gpu_report.py says. `checks` come first: codes, scales and
decoded numbers of every format and case of tests/cases/mx_cases.py, and of numbers of every exponent, subnormal ones
too, must equal XLA's to the bit, products to 1e-2 (the rounding of bfloat16 results). Where one differs, nothing is
timed and the exit status is 1.

Quantizing and decoding are rated by the bytes that they have to move, as a share of the bandwidth of a copy in the same
run (aim: 0.8). Products of 1 to 8 rows with packed weights are rated by the time of the same product with bfloat16
weights (aims: 1.5 for mxfp8, 2.5 for mxfp4; the limits are what the bytes allow, 1.94 and 3.76), many of them in one
program: the host takes longer to start one than it lasts. At the end two formats for other sizes of a program than
those of the package.
"""

import concurrent.futures
import dataclasses
import itertools
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "cases"))

import jax
import jax.numpy as jnp
import numpy as np
from gpu_report import REPEATS, Report, compiled, main, repeated, timed
from mx_cases import CASES

from scalejax.kernels import mx
from scalejax.kernels.mx.api import Implementation
from scalejax.kernels.mx.blocks import GPU, GpuTiles
from scalejax.numerics.formats import FORMATS

KERNELS: tuple[Implementation, ...] = ("pallas_gpu", "xla")
NAMES = [name for name, format in FORMATS.items() if format.scale != "float32"]
TIMED = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "nvfp4", "bdr_mx9", "bdr_mx6")
SMOKE = ("mxfp4_e2m1", "nvfp4")
GOALS = {"mxfp8_e4m3": 1.5, "mxfp4_e2m1": 2.5}


def how(implementation: Implementation, smoke: bool) -> dict[str, Any]:
    return {"implementation": implementation, "interpret": smoke and implementation == "pallas_gpu"}


def bits_of(tree: Any) -> list[np.ndarray]:
    widths = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    arrays = (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
    return [np.atleast_1d(array).view(widths[array.dtype.itemsize]) for array in arrays]


def bit_patterns(rows: int, columns: int) -> jax.Array:
    """float32 of every exponent, subnormal numbers among them, those of a row near one another; a few NaN."""
    keys = jax.random.split(jax.random.key(3))
    largest = jax.random.randint(keys[0], (rows, 1), 0, 260)
    words = jax.random.bits(keys[1], (rows, columns), jnp.uint32)
    exponent = jnp.clip(largest - (words >> 23 & 7).astype(jnp.int32), 0, 255).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((words & jnp.uint32(0x807FFFFF)) | exponent << 23, jnp.float32)


def check(report: Report, *, smoke: bool) -> bool:
    """Whether kernels give what XLA gives, formats side by side: most of the time programs are compiled."""
    given = {"bit patterns": (bit_patterns(512, 64), 1)}
    for case, said in list(CASES.items())[: 3 if smoke else None]:
        x = jax.random.normal(jax.random.key(0), said.shape).astype(said.dtype)
        given[case] = x.reshape(-1).at[0].set(jnp.nan).reshape(said.shape), said.axis
    names = SMOKE if smoke else NAMES
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: differences(name, given, smoke), names))
    wrong = {f"{what}, {name}": worst for name, (_, those) in zip(names, found, strict=True) for what, worst in those}
    report.line(case="checks", checked=sum(count for count, _ in found), wrong=wrong)
    return not wrong


def differences(name: str, given: dict[str, tuple[jax.Array, int]], smoke: bool) -> tuple[int, list[tuple[str, float]]]:
    """(how many results of a format were looked at, which of them differ and by how much)"""
    wrong: list[tuple[str, float]] = []
    checked = 0
    for case, (x, axis) in given.items():
        packed = [mx.quantize_blocks(x, name, axis=axis, tail="pad", **how(i, smoke)) for i in KERNELS]
        back = [mx.dequantize_blocks(packed[1], x.dtype, **how(i, smoke)) for i in KERNELS]
        for what, (ours, theirs) in (("quantize", packed), ("dequantize", back)):
            pairs = zip(bits_of(ours), bits_of(theirs), strict=True)
            checked += 1
            different = sum(int((a != b).sum()) for a, b in pairs)
            if different:
                wrong.append((f"{what}, {case}", different))
    for axis in (0, 1):
        matrix = jax.random.normal(jax.random.key(1), (256, 160) if axis == 0 else (160, 256))
        weights = mx.quantize_blocks(matrix, name, axis=axis, implementation="xla")
        for dtype in (jnp.bfloat16, jnp.float32):
            x = jax.random.normal(jax.random.key(2), (5, 256), dtype)
            ours, theirs = (np.asarray(mx.matmul(x, weights, **how(i, smoke)), np.float32) for i in KERNELS)
            checked += 1
            worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
            if not worst < (1e-2 if dtype == jnp.bfloat16 else 1e-4):
                wrong.append((f"matmul, axis {axis}, {jnp.dtype(dtype)}", worst))
    return checked, wrong


def blocks(report: Report, *, smoke: bool) -> None:
    """Quantizing and decoding a matrix of bfloat16, along either axis."""
    shape = (64, 128) if smoke else (16384, 16384)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    for name in SMOKE if smoke else TIMED:
        for axis in (1, 0):
            case = f"{name}, blocks along axis {axis} of {shape[0]} x {shape[1]}"
            if not report.has_time_for(case, 3):
                continue
            for implementation in KERNELS:
                options = how(implementation, smoke)
                quantize = jax.jit(lambda x, n=name, a=axis, o=options: mx.quantize_blocks(x, n, axis=a, **o))
                packed = quantize(x)
                decode = jax.jit(lambda p, o=options: mx.dequantize_blocks(p, jnp.bfloat16, **o))
                moved = 2 * x.size + packed.nbytes
                formula = "2 * numbers + bytes of codes and scales"
                calls = {"quantize": lambda f=quantize: f(x), "dequantize": lambda f=decode, p=packed: f(p)}
                for what, call in calls.items():
                    # NVFP4 reads the whole array once more for its largest number.
                    more = 2 * x.size if (what, name) == ("quantize", "nvfp4") else 0
                    report.timing(f"{what} {case}", implementation, timed(call), moved + more, formula, goal_share=0.8)


def products(report: Report, *, smoke: bool) -> None:
    """A few rows times packed weights, against the same with bfloat16 weights."""
    if not report.has_time_for("products", 30):
        return
    depth, columns = (128, 64) if smoke else (8192, 8192)
    repeats = 2 if smoke else REPEATS
    matrix = jax.random.normal(jax.random.key(1), (depth, columns), jnp.bfloat16)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    def multiply(x: jax.Array, w: Any) -> jax.Array:
        return mx.matmul(x, w, **how("pallas_gpu", smoke))

    lowered: dict[tuple[int, str], jax.stages.Lowered] = {}
    operands: dict[tuple[int, str], tuple[Any, Any]] = {}
    for rows in (8,) if smoke else (1, 8):
        x = jax.random.normal(jax.random.key(2), (rows, depth), jnp.bfloat16)
        weights: dict[str, Any] = {"bfloat16": matrix}
        for name, axis in itertools.product(SMOKE if smoke else TIMED, (0, 1)):
            made = mx.quantize_blocks(matrix if axis == 0 else matrix.T, name, axis=axis, implementation="xla")
            weights[f"{name}, blocks along axis {axis}"] = made
        for name, w in weights.items():
            operands[rows, name] = x, w
            lowered[rows, name] = jax.jit(repeated(plain if w is matrix else multiply, repeats)).lower(x, w)
    bfloat16_s = 0.0
    for (rows, name), program in compiled(lowered).items():
        x, w = operands[rows, name]
        case = f"{name}, {rows} x {depth} times {depth} x {columns}"
        seconds = timed(lambda f=program, x=x, w=w: f(x, w), turns=5) / repeats
        if w is matrix:
            bfloat16_s = seconds
            report.timing(case, "xla", seconds, w.nbytes, "2 * weights")
        else:
            report.timing(
                case, "pallas_gpu", seconds, w.nbytes, "bytes of codes and scales",
                ratio_to_bfloat16=bfloat16_s / seconds, limit=matrix.nbytes / w.nbytes,
                goal=GOALS.get(name.split(",")[0]),
            )  # fmt: skip


def tiles(report: Report, *, smoke: bool) -> None:
    """Quantizing, decoding and one row times weights, for every size of a program that might be the best."""
    if not report.has_time_for("tiles", 60):
        return
    shape, depth = ((64, 128), 64) if smoke else ((16384, 16384), 8192)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    kind = next((name for name in GPU if name and jax.devices()[0].device_kind.startswith(name)), "")
    usual, options = GPU[kind], how("pallas_gpu", smoke)
    for_streams = [
        dataclasses.replace(usual, elements=elements, warps=warps)
        for elements, warps in itertools.product((1024, 2048, 4096), (2, 4, 8))
    ]
    for_products = [
        dataclasses.replace(usual, rows=16, columns=columns, depth=along, programs=programs * 132, stages=stages)
        for columns, along, programs, stages in itertools.product((32, 64, 128), (128, 256), (4, 8), (2, 4))
    ]
    lowered: dict[tuple[str, GpuTiles], Any] = {}
    operands: dict[str, tuple[Any, ...]] = {}
    for name in SMOKE[:1] if smoke else ("mxfp8_e4m3", "mxfp4_e2m1"):
        packed = mx.quantize_blocks(x, name, axis=1, implementation="xla")
        weights = mx.quantize_blocks(x[:depth, :depth], name, axis=0, implementation="xla")
        cases: dict[str, tuple[Any, tuple[Any, ...], list[GpuTiles]]] = {
            f"quantize {name}": (lambda x, n=name: mx.quantize_blocks(x, n, axis=1, **options), (x,), for_streams),
            f"dequantize {name}": (
                lambda packed: mx.dequantize_blocks(packed, jnp.bfloat16, **options), (packed,), for_streams
            ),
            f"1 row times {depth} x {depth}, {name}": (
                repeated(lambda row, w: mx.matmul(row, w, **options), 2 if smoke else REPEATS),
                (x[:1, :depth], weights), for_products,
            ),
        }  # fmt: skip
        for case, (function, arguments, sizes) in cases.items():
            operands[case] = arguments
            for said in sizes[: 1 if smoke else None]:
                GPU[kind] = said
                jax.clear_caches()  # sizes are no arguments
                lowered[case, said] = jax.jit(function).lower(*arguments)
        GPU[kind] = usual
    for (case, said), program in compiled(lowered).items():
        arguments = operands[case]
        seconds = timed(lambda f=program, a=arguments: f(*a), turns=5)
        if "times" in case:
            seconds, moved = seconds / REPEATS, arguments[1].nbytes
        else:
            moved = 2 * x.size + operands[f"dequantize {case.split()[1]}"][0].nbytes
        report.timing(f"tiles, {case}, {said}", "pallas_gpu", seconds, moved, "what is read and written once")


def time_cases(report: Report, *, smoke: bool) -> None:
    blocks(report, smoke=smoke)
    products(report, smoke=smoke)
    tiles(report, smoke=smoke)


if __name__ == "__main__":
    sys.exit(main("gpu_mx", __doc__, check, time_cases, seconds=120))
