"""Arrays as bytes of block formats: what comes back, how many bytes, and what padding and NaN do."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.numerics.formats import FORMATS
from scalejax.numerics.quantize import cast
from scalejax.parallel.compression import codec
from scalejax.parallel.compression.wire_formats import WIRE_FORMATS, check_formats

FEW = ("bdr_mx9", "bdr_mx4", "mxfp6_e3m2", "fp8_e4m3")
MANY = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in WIRE_FORMATS]
# Bytes of 64 values in full blocks, and of the 23 values of a block and a tail: scales, pairs' bits and codes.
BYTES = {
    "bdr_mx9": (72, 2 + 2 + 23),
    "bdr_mx6": (48, 2 + 2 + 15),
    "bdr_mx4": (32, 2 + 2 + 9),
    "mxfp8_e4m3": (66, 1 + 23),
    "mxfp8_e5m2": (66, 1 + 23),
    "mxfp6_e2m3": (50, 1 + 18),
    "mxfp6_e3m2": (50, 1 + 18),
    "mxfp4_e2m1": (34, 1 + 12),
    "mxint8": (66, 1 + 23),
    "fp8_e4m3": (68, 4 + 23),
    "fp8_e5m2": (68, 4 + 23),
}


def numbers(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))).astype(np.float32)


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


@functools.partial(jax.jit, static_argnums=(1, 2))
def there_and_back(x, format, dtype=jnp.float32):
    return codec.decode(codec.encode(x, format), format, length=x.shape[-1], dtype=dtype)


@pytest.mark.default_cases
@pytest.mark.parametrize("format", MANY)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.slow), 23, pytest.param(64, marks=pytest.mark.slow), 1100]
)
def test_what_comes_back_is_the_cast_to_the_bit(format, dtype, length):
    x = jnp.asarray(numbers(3, length), dtype)
    expected = cast(x, format, axis=-1, tail="pad")
    np.testing.assert_array_equal(bits(there_and_back(x, format, dtype)), bits(expected))


@pytest.mark.parametrize("format", WIRE_FORMATS)
def test_a_vector_takes_the_bytes_of_its_format(format):
    full, ragged = BYTES[format]
    assert (codec.encoded_bytes(64, format), codec.encoded_bytes(23, format)) == (full, ragged)
    for count in (64, 23):
        encoded = jax.eval_shape(lambda x: codec.encode(x, format), jax.ShapeDtypeStruct((2, count), jnp.float32))
        assert (encoded.shape, encoded.dtype) == ((2, codec.encoded_bytes(count, format)), jnp.uint8)
    many = 1 << 20
    assert codec.encoded_bytes(many, format) == many * FORMATS[format].bits_per_element / 8


@pytest.mark.default_cases("bdr_mx4", "fp8_e4m3")
@pytest.mark.parametrize("format", MANY)
def test_padding_changes_nothing_and_does_not_travel(format):
    x = numbers(23)
    padded = np.zeros(math.ceil(23 / FORMATS[format].k1) * FORMATS[format].k1, np.float32)
    padded[:23] = x
    np.testing.assert_array_equal(
        bits(there_and_back(jnp.asarray(x), format)), bits(there_and_back(jnp.asarray(padded), format)[:23])
    )
    assert codec.encoded_bytes(23, format) < codec.encoded_bytes(padded.size, format)


def test_every_vector_begins_a_block():
    x = jnp.asarray(numbers(4, 2, 23))
    together = codec.encode(x, "bdr_mx6")
    for i in range(4):
        for j in range(2):
            np.testing.assert_array_equal(together[i, j], codec.encode(x[i, j], "bdr_mx6"))


@pytest.mark.default_cases
@pytest.mark.parametrize("format", MANY)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_makes_nan_of_its_block_alone(format, value):
    k1 = FORMATS[format].k1
    x = numbers(2 * k1 + 5)
    x[k1 + 3] = value
    x[:k1] = 0
    got = np.asarray(there_and_back(jnp.asarray(x), format))
    assert np.isnan(got[k1 : 2 * k1]).all()
    assert (got[:k1] == 0).all()
    assert not np.isnan(got[2 * k1 :]).any()


@pytest.mark.parametrize("format", ["bdr_mx9", "fp8_e4m3"])
def test_no_vectors_and_vectors_of_nothing_travel_too(format):
    for shape in ((0, 32), (3, 0)):
        assert there_and_back(jnp.zeros(shape), format).shape == shape


def test_bytes_of_another_format_or_length_are_refused():
    data = codec.encode(jnp.ones((3, 64)), "bdr_mx9")
    for format, length in (("bdr_mx6", 64), ("bdr_mx9", 63), ("bdr_mx9", 80)):
        with pytest.raises(UserError, match=rf"decode: {length} values in {format} are uint8.*; got uint8\[3, 72\]"):
            codec.decode(data, format, length=length)
    with pytest.raises(UserError, match=r"got int32\[3, 72\]"):
        codec.decode(data.astype(jnp.int32), "bdr_mx9", length=64)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_integers_are_refused(dtype):
    with pytest.raises(UserError, match="must be float32, bfloat16 or float16"):
        codec.encode(jnp.zeros(32, dtype), "bdr_mx9")


def test_names_are_formats_and_others_are_refused_with_the_list():
    assert set(WIRE_FORMATS) <= set(FORMATS)
    check_formats("Thing", first=None, second="bdr_mx9")
    for name in ("mx9", "nvfp4", "float8_e4m3fn"):
        with pytest.raises(UserError, match=f"Thing: field must be one of bdr_mx9, .*mxfp8_e4m3.*; got '{name}'"):
            check_formats("Thing", field=name)
