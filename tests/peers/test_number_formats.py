"""torchao's MXTensor, FBGEMM's MX4 codec and microxcaling against ours: the same codes, scales, bytes and numbers.

All divide by scales that are normal float32 numbers only, and the first two do not poison blocks for infinities; so
magnitudes stay between 2^-100 and 2^100 here, and docs/numerics.md says what happens beyond.
"""

import importlib
import pathlib
import sys
import types

import pytest

pytest.importorskip("torchao", reason="torchao is not installed; benchmarks/peers.sh installs it")

import format_cases
import jax.numpy as jnp
import numpy as np
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from scalejax.numerics.formats import FORMATS
from scalejax.numerics.packing import pack
from scalejax.numerics.quantize import cast, quantize

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}
RULES = ("floor", "rceil", "ceil", "even")


def numbers(name, rule):
    """Blocks of 32: every bfloat16 of the range as the largest, ties and random numbers beside it; NaNs in a few."""
    maxima = format_cases.all_bfloat16()
    kept = (np.abs(maxima) > 2.0**-100) & (np.abs(maxima) < 2.0**100)
    x = format_cases.blocks(maxima[kept], FORMATS[name], rule, seed=21)
    x[5, 3] = x[77, 0] = np.nan
    return x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_torchao_gives_the_same_codes_and_scales(name, rule):
    x = numbers(name, rule)
    scales, codes = to_mx(torch.tensor(x), ELEMENTS[name], 32, ScaleCalculationMode(rule))
    quantized = quantize(jnp.asarray(x), name, axis=1, scale_rule=rule)
    np.testing.assert_array_equal(np.asarray(quantized.scales)[:, 0], scales.view(torch.uint8).numpy()[:, 0])
    ours = np.asarray(pack(quantized).codes if name == "mxfp4_e2m1" else quantized.codes)
    theirs = codes.view(torch.uint8).numpy()
    good = ~np.isnan(x).any(axis=1)
    # Their codes in a block with NaN are those of NaN, where the element has one; ours are 0.
    np.testing.assert_array_equal(ours[good], theirs[good])


@pytest.mark.parametrize("rounding", ["ties_to_even", "ties_away"])
@pytest.mark.parametrize("name", [*ELEMENTS, "mxint8"])
def test_microxcaling_gives_the_same_numbers(name, rounding):
    """Its default, "nearest", has ties away from zero; the rule is "floor".

    It takes floor(log2(a)) in float32, which is one too many for the largest number below a power of two; no largest
    magnitude here is one. And it rounds by floor(a + 0.5) in float32, by which the number just below half of the
    smallest step becomes a step: left out.
    """
    theirs = pytest.importorskip("mx.mx_ops", reason="microxcaling is not installed; benchmarks/peers.sh installs it")
    x = numbers(name, "floor")
    element = FORMATS[name].element
    step = np.exp2(
        np.frexp(np.abs(x).max(axis=1, keepdims=True))[1] - 1.0 - element.max_exponent + element.step_exponent
    )
    below = np.abs(x) == np.nextafter((step / 2).astype(np.float32), np.float32(0))
    assert 0 < below.sum() < 0.01 * x.size
    how = {"ties_to_even": "even", "ties_away": "nearest"}[rounding]
    wanted = theirs._quantize_mx(
        torch.tensor(x), 8, name.removeprefix("mx"), axes=[-1], block_size=32, round=how
    ).numpy()
    found = np.asarray(cast(jnp.asarray(x), name, axis=1, rounding=rounding))
    np.testing.assert_array_equal(found[~below], wanted[~below])


def fbgemm_reference():
    """FBGEMM's reference codec in torch; its package imports triton, which a machine without a GPU lacks."""
    folder = pathlib.Path(pytest.importorskip("fbgemm_gpu").__file__).parent / "triton"
    package = types.ModuleType("fbgemm_mx4")
    package.__path__ = [str(folder)]
    sys.modules.setdefault("fbgemm_mx4", package)
    return importlib.import_module("fbgemm_mx4.quantize_ref")


def test_fbgemm_s_mx4_codec_writes_the_same_bytes():
    """Exponents by its "even", elements half up in magnitude, and the scale behind the 16 bytes of its block.

    On the tie itself, 1.75, its reference takes log2 of the largest float32 below a power of two, in float32, and
    arrives at the power; its kernel reads the exponent's bits and does not. Those blocks are left out.
    """
    reference = fbgemm_reference()
    x = numbers("mxfp4_e2m1", "even_fbgemm")
    largest = np.abs(x).max(axis=1)
    x = x[~np.isnan(largest) & (np.frexp(largest)[0] != 1.75 / 2)]
    theirs = reference.py_quantize_mx4(torch.tensor(x), 32, rounding_mode=2).numpy()
    packed = pack(quantize(jnp.asarray(x), "mxfp4_e2m1", axis=1, scale_rule="even_fbgemm", rounding="ties_away"))
    ours = np.concatenate([np.asarray(packed.codes), np.asarray(packed.scales)], axis=1)
    np.testing.assert_array_equal(ours[:, 16], theirs[:, 16])
    np.testing.assert_array_equal(ours, theirs)
