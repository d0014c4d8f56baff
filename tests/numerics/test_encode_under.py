"""Codes under scales that are there already, and formats with blocks of another size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.numerics import bits, blocks, formats


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bdr_mx9", "nvfp4", "fp8_e4m3:16", "vsq4:32"])
def test_codes_under_their_own_scales_are_the_same(name):
    format = formats.find(name)
    x = np.random.default_rng(0).standard_normal((16, format.k1)).astype(np.float32)
    x *= np.exp2(np.arange(-8, 8))[:, None].astype(np.float32)
    x[3], x[4, 1], x[5, :2] = 0, np.nan, (0, np.inf)
    words = bits.float_bits(jnp.asarray(x)).reshape(16, 1, -1, format.k2)
    scale = blocks.tensor_scale_of(words, format, axis=2) if format.scale == "e4m3" else None
    rule = "floor" if format.scale == "exponent" else None
    made = blocks.encode_blocks(words, format, axis=2, rule=rule, rounding="ties_to_even", tensor_scale=scale)
    again = blocks.encode_under(words, made, format, rounding="ties_to_even", tensor_scale=scale)
    np.testing.assert_array_equal(again, made.codes)
    # One number of each block alone, as a column of a matrix is.
    subs = None if made.sub_scales is None else made.sub_scales[:, :, :1]
    one = blocks.encode_under(
        words[:, :, :1, :1], made._replace(sub_scales=subs), format, rounding="ties_to_even", tensor_scale=scale
    )
    np.testing.assert_array_equal(one, made.codes[:, :, :1, :1])


@pytest.mark.slow
def test_what_lies_beyond_a_scale_saturates():
    format = formats.find("mxfp4_e2m1")
    words = bits.float_bits(jnp.asarray([[[[0.5, 7.0, -1e30, 3.0]]]]))
    scales = blocks.EncodedBlocks(words, jnp.full((1, 1, 1, 1), 127, jnp.uint8), None)
    codes = blocks.encode_under(words, scales, format, rounding="ties_to_even")
    decoded = blocks.decode_blocks(scales._replace(codes=codes), format)
    values = jax.lax.bitcast_convert_type(decoded, jnp.float32)
    assert values.ravel().tolist() == [0.5, 6, -6, 3]


def test_blocks_of_another_size_have_it_in_their_name():
    format = formats.find("int4:128")
    assert (format.name, format.k1, format.k2, format.bits_per_element) == ("int4:128", 128, 128, 4.25)
    vsq = formats.find("vsq4:64")
    assert (vsq.k1, vsq.k2) == (64, 16)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mxfp4_e2m1:16", "blocks of mxfp4_e2m1 have 32 values, always; got mxfp4_e2m1:16"),
        ("int4:12", "any multiple of 8 values; got int4:12"),
        ("int4:x", "any multiple of 8 values; got int4:x"),
        ("vsq4:48", "any multiple of 32 values"),
        ("vsq6:32", "any multiple of 64 values"),
        ("int5:128", "there is no 'int5:128'"),
    ],
)
def test_sizes_that_blocks_cannot_have_are_refused(name, words):
    with pytest.raises(UserError, match=words):
        formats.find(name)
