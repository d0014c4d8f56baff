"""Arrays as bytes of block formats: what comes back, how many bytes, and what padding and NaN do."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering

from scalejax.errors import UserError
from scalejax.numerics.formats import find
from scalejax.numerics.quantize import cast
from scalejax.numerics.stochastic import hash_key
from scalejax.parallel.compression import codec
from scalejax.parallel.compression.wire_formats import WIRE_FORMATS, check_formats

FEW = ("bdr_mx9", "bdr_mx4", "mxfp6_e3m2", "fp8_e4m3", "int4:128")
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
    "int8:128": (68, 4 + 23),
    "int4:128": (36, 4 + 12),
    "int4:2048": (36, 4 + 12),
}
WITH_EXPONENTS = [name for name in WIRE_FORMATS if find(name).scale == "exponent"]
KEY = jnp.array([3, 4], jnp.uint32)


def numbers(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))).astype(np.float32)


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


@functools.partial(jax.jit, static_argnums=(1, 2))
def there_and_back(x, format, dtype=jnp.float32):
    return codec.decode(codec.encode(x, format), format, length=x.shape[-1], dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "dtype", "length"),
    covering(
        [*itertools.product(WIRE_FORMATS, (jnp.float32, jnp.bfloat16), (1, 23, 64, 1100))], columns=[(0, 1), (1, 2)]
    ),
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
    assert codec.encoded_bytes(many, format) == many * find(format).bits_per_element / 8


@pytest.mark.default_cases("bdr_mx4", "fp8_e4m3")
@pytest.mark.parametrize("format", MANY)
def test_padding_changes_nothing_and_does_not_travel(format):
    x = numbers(23)
    padded = np.zeros(math.ceil(23 / find(format).k1) * find(format).k1, np.float32)
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
    k1 = find(format).k1
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


@functools.partial(jax.jit, static_argnums=(2, 3))
def stochastic(x, key, format, scale_rule=None):
    data = codec.encode(x, format, scale_rule=scale_rule, rounding="stochastic", key=key)
    return codec.decode(data, format, length=x.shape[-1])


@pytest.mark.default_cases(first=1)
@pytest.mark.parametrize(
    ("format", "scale_rule"), [("int4:128", None), ("int8:128", None), ("fp8_e4m3", None), ("bdr_mx4", "rceil")]
)
def test_rounded_stochastically_too_it_is_the_cast_to_the_bit(format, scale_rule):
    x = jnp.asarray(numbers(3, 300))
    expected = cast(
        x, format, axis=-1, tail="pad", scale_rule=scale_rule, rounding="stochastic", key=hash_key(KEY)
    )  # fmt: skip
    got = stochastic(x, KEY, format, scale_rule)
    np.testing.assert_array_equal(bits(got), bits(expected))
    assert not np.array_equal(got, stochastic(x, KEY + jnp.uint32(1), format, scale_rule))


def mean_error(rounds, x):
    """In standard errors, and in parts of the value where it is always the same."""
    rounds = np.asarray(rounds, np.float64)
    error = np.maximum(rounds.std(axis=0, ddof=1) / np.sqrt(len(rounds)), 1e-6 * abs(x))
    return (abs(rounds.mean(axis=0) - x) / error).max()


@pytest.mark.slow
@pytest.mark.parametrize("format", FEW)
def test_stochastic_rounding_is_right_on_average_where_nothing_saturates_and_refused_elsewhere(format):
    x = np.float32([1.9999, -1.3, 0.9, -0.77, 0.31, 0.12, -0.05, 0.011])
    keys = jnp.stack([jnp.arange(4000, dtype=jnp.uint32), jnp.zeros(4000, jnp.uint32)], axis=1)
    rule = "rceil" if format in WITH_EXPONENTS else None
    assert mean_error(jax.vmap(lambda key: stochastic(x, key, format, rule))(keys), x) < 4
    if rule:
        biased = jax.vmap(
            lambda key: cast(jnp.asarray(x), format, axis=-1, tail="pad", rounding="stochastic", key=hash_key(key))
        )
        assert mean_error(jax.jit(biased)(keys), x) > 100
        for refused in (None, "floor", "even"):
            with pytest.raises(UserError, match=rf'stochastic" is biased for {format} under scale_rule="(floor|even)"'):
                codec.encode(x, format, scale_rule=refused, rounding="stochastic", key=KEY)


def test_a_key_goes_with_stochastic_rounding_and_a_scale_of_the_array_does_not_travel():
    with pytest.raises(UserError, match="stochastic rounding needs one"):
        codec.encode(jnp.ones(8), "int4:128", rounding="stochastic")
    with pytest.raises(UserError, match="no other rounding does"):
        codec.encode(jnp.ones(8), "int4:128", key=KEY)
    with pytest.raises(UserError, match="nvfp4 share a float32 with the whole array"):
        codec.encode(jnp.ones(16), "nvfp4")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_integers_are_refused(dtype):
    with pytest.raises(UserError, match="must be float32, bfloat16 or float16"):
        codec.encode(jnp.zeros(32, dtype), "bdr_mx9")


def test_names_are_formats_and_others_are_refused_with_the_list():
    assert all(find(name).scale != "e4m3" for name in WIRE_FORMATS)
    check_formats("Thing", first=None, second="bdr_mx9")
    for name in ("mx9", "nvfp4", "float8_e4m3fn"):
        with pytest.raises(UserError, match=f"Thing: field must be one of bdr_mx9, .*mxfp8_e4m3.*; got '{name}'"):
            check_formats("Thing", field=name)
