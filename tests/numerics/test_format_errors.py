"""Formats and arguments that cannot be are refused, by name and with what to do."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.numerics import elements, formats
from scalejax.numerics import quantize as api

pytestmark = pytest.mark.usefixtures("strict_promotion")


def test_unknown_names_list_the_nearest():
    with pytest.raises(UserError, match=r"no 'mx9'; the nearest are bdr_mx9"):
        formats.find("mx9")
    with pytest.raises(UserError, match=r"the nearest are.*mxfp6_e3m2"):
        formats.find("mxfp6-e3m")
    with pytest.raises(UserError, match="there are bdr_mx9, bdr_mx6, bdr_mx4, msfp16"):
        formats.find("zzz")
    with pytest.raises(UserError, match="must be a BlockFormat or the name of one; got 6"):
        formats.find(6)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool"])
def test_integers_are_refused_by_name(dtype):
    with pytest.raises(UserError, match=f"float32, bfloat16 or float16; got {dtype}"):
        api.quantize(jnp.zeros(32, dtype), "mxint8", axis=0)


def test_float64_is_refused_by_name(x64):
    with pytest.raises(UserError, match=r"got float64. Cast it to float32 first"):
        api.quantize(jnp.zeros(32, jnp.float64), "mxint8", axis=0)
    assert api.cast(jnp.ones(32, jnp.float32), "bdr_mx4", axis=0).dtype == jnp.float32


def test_lists_are_refused_by_name():
    with pytest.raises(UserError, match=r"x must be an array; got a list. Pass jnp.asarray"):
        api.quantize([1.0] * 32, "mxint8", axis=0)


def test_float64_of_numpy_is_refused_too():
    """jax would make float32 of it without a word."""
    with pytest.raises(UserError, match="got float64"):
        api.quantize(np.zeros(32), "mxint8", axis=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": 2}, "axis: x has 1 axes; got axis 2"),
        ({"scale_rule": "round"}, "scale_rule: must be one of floor, rceil.*'round'"),
        (
            {"scale_rule": "qwix", "format": "mxint8"},
            "qwix defines its rule for E4M3, E5M2, E2M1; got elements of INT8",
        ),
        ({"scale_rule": "floor", "format": "nvfp4"}, "nvfp4 scales by its largest magnitude and takes no rule"),
        ({"rounding": "up"}, "rounding: must be one of ties_to_even, .*'up'"),
        ({"rounding": "stochastic"}, "key: stochastic rounding needs one"),
        ({"key": 0}, "no other rounding does; got one with rounding 'ties_to_even'"),
        ({"tail": "drop"}, "tail must be one of refuse, pad; got 'drop'"),
        ({"tensor_scale": np.float32(1)}, "tensor_scale: mxfp8_e4m3 has none"),
        ({"tensor_scale": np.ones(2, np.float32), "format": "nvfp4"}, r"must be float32\[\]; got float32\[2\]"),
        ({"tensor_scale": 1.0, "format": "nvfp4"}, r"must be float32\[\]; got the number 1.0. Pass jnp.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    arguments = {"format": "mxfp8_e4m3", "axis": 0} | arguments
    with pytest.raises(UserError, match=message):
        api.quantize(jnp.zeros(32), arguments.pop("format"), **arguments)


def test_results_of_other_types_are_refused():
    with pytest.raises(UserError, match="dtype must be float32, bfloat16 or float16; got int8"):
        api.dequantize(api.quantize(jnp.zeros(32), "mxint8", axis=0), jnp.int8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k1": 16, "k2": 3, "m": 4}, "k1 must be a multiple of k2"),
        ({"m": 16}, "2 to 16 bits; got S16 with 17"),
        ({"d1": 9, "m": 4}, "has 2 or 3 .* bits; got d1=9"),
        ({"d2": 9, "m": 4}, "d2 must be at most 8"),
        ({"d2": 5, "m": 4}, r"smallest step would be 2\^-161"),
        ({"m": -1}, "m must be at least 1 magnitude bit beside the sign; got -1"),
    ],
)
def test_formats_that_cannot_be_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        formats.bdr(**values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": "power"}, "scale must be one of exponent, float32, e4m3; got 'power'"),
        ({"sub_scale": "power", "k2": 8, "d2": 1}, "sub_scale must be one of none, exponent, integer; got 'power'"),
        ({"scale": "e4m3", "element": elements.integer(8)}, "elements of at most 4 significant bits; got I8"),
        ({"element": elements.unsigned(8)}, "must have room for a sign above max_code; got U8, unsigned"),
        ({"element": dataclasses.replace(elements.E2M1, max_code=8)}, "got E2M1, .* of 4 bits with max_code=8"),
    ],
)
def test_kinds_of_scales_that_cannot_be_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        formats.BlockFormat(**{"name": "mine", "element": elements.E2M1, "k1": 16, "k2": 16, **fields})
