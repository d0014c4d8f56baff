"""The GPU kernels of packed blocks: checked against XLA, then timed beside it, a plain copy and bfloat16 products.

python benchmarks/gpu_mx.py [--json FILE] [--seconds 120]      # on a machine with a GPU
python benchmarks/gpu_mx.py --smoke                            # anywhere: tiny sizes, kernels interpreted

One JSON object a line, to standard output and to FILE, as gpu_report.py says. `checks` come first: codes, scales and
decoded numbers of every format and case of tests/cases/mx_cases.py, and of numbers of every exponent, subnormal ones
too, must equal XLA's to the bit, products to 1e-2 (the rounding of bfloat16 results). Where one differs, nothing is
timed and the exit status is 1.

Quantizing and decoding are rated by the bytes that they have to move, as a share of the bandwidth of a copy in the same
run (aim: 0.8). Products of 1 to 8 rows with packed weights are rated by the time of the same product with bfloat16
weights (aims: 1.5 for mxfp8, 2.5 for mxfp4; the limits are what the bytes allow, 1.94 and 3.76).
"""

import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "cases"))

import jax
import jax.numpy as jnp
import numpy as np
from gpu_report import Report, main, timed
from mx_cases import CASES

from scalejax.kernels import mx
from scalejax.kernels.mx.api import Implementation
from scalejax.numerics.formats import FORMATS

KERNELS: tuple[Implementation, ...] = ("pallas_gpu", "xla")
NAMES = [name for name, format in FORMATS.items() if format.scale != "float32"]
TIMED = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "nvfp4", "bdr_mx9", "bdr_mx6")
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
    """Whether kernels give what XLA gives."""
    wrong: dict[str, float] = {}
    checked = 0
    given = {"bit patterns": (bit_patterns(512, 64), 1)}
    for case, said in list(CASES.items())[: 3 if smoke else None]:
        x = jax.random.normal(jax.random.key(0), said.shape).astype(said.dtype)
        given[case] = x.reshape(-1).at[0].set(jnp.nan).reshape(said.shape), said.axis
    for name in TIMED[:3] if smoke else NAMES:
        for case, (x, axis) in given.items():
            packed = [mx.quantize_blocks(x, name, axis=axis, tail="pad", **how(i, smoke)) for i in KERNELS]
            back = [mx.dequantize_blocks(packed[1], x.dtype, **how(i, smoke)) for i in KERNELS]
            for what, (ours, theirs) in (("quantize", packed), ("dequantize", back)):
                pairs = zip(bits_of(ours), bits_of(theirs), strict=True)
                checked += 1
                different = sum(int((a != b).sum()) for a, b in pairs)
                if different:
                    wrong[f"{what}, {name}, {case}"] = different
        for axis in (0, 1):
            matrix = jax.random.normal(jax.random.key(1), (256, 160) if axis == 0 else (160, 256))
            weights = mx.quantize_blocks(matrix, name, axis=axis, implementation="xla")
            for dtype in (jnp.bfloat16, jnp.float32):
                x = jax.random.normal(jax.random.key(2), (5, 256), dtype)
                ours, theirs = (np.asarray(mx.matmul(x, weights, **how(i, smoke)), np.float32) for i in KERNELS)
                checked += 1
                worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
                if not worst < (1e-2 if dtype == jnp.bfloat16 else 1e-4):
                    wrong[f"matmul, {name}, axis {axis}, {jnp.dtype(dtype)}"] = worst
    report.line(case="checks", checked=checked, wrong=wrong)
    return not wrong


def blocks(report: Report, *, smoke: bool) -> None:
    """Quantizing and decoding a matrix of bfloat16, along either axis."""
    shape = (64, 128) if smoke else (16384, 16384)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    for name in TIMED:
        for axis in (1, 0):
            case = f"{name}, blocks along axis {axis} of {shape[0]} x {shape[1]}"
            if not report.has_time_for(case, 8):
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
    depth, columns = (128, 64) if smoke else (8192, 8192)
    matrix = jax.random.normal(jax.random.key(1), (depth, columns), jnp.bfloat16)
    plain = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    for rows in (1, 8) if smoke else (1, 2, 4, 8):
        x = jax.random.normal(jax.random.key(2), (rows, depth), jnp.bfloat16)
        case = f"{rows} x {depth} times {depth} x {columns}"
        if not report.has_time_for(case, 15):
            continue
        bfloat16_s = timed(lambda x=x: plain(x, matrix))
        report.timing(f"bfloat16, {case}", "xla", bfloat16_s, 2 * matrix.size, "2 * weights")
        for name in TIMED:
            for axis in (0, 1):
                weights = mx.quantize_blocks(matrix if axis == 0 else matrix.T, name, axis=axis, implementation="xla")
                multiply = jax.jit(lambda x, w: mx.matmul(x, w, **how("pallas_gpu", smoke)))
                seconds = timed(lambda x=x, w=weights, f=multiply: f(x, w))
                report.timing(
                    f"{name}, blocks along axis {axis}, {case}", "pallas_gpu", seconds, weights.nbytes,
                    "bytes of codes and scales", ratio_to_bfloat16=bfloat16_s / seconds,
                    limit=2 * matrix.size / weights.nbytes, goal=GOALS.get(name),
                )  # fmt: skip


def time_cases(report: Report, *, smoke: bool) -> None:
    blocks(report, smoke=smoke)
    products(report, smoke=smoke)


if __name__ == "__main__":
    sys.exit(main("gpu_mx", __doc__, check, time_cases, seconds=120))
