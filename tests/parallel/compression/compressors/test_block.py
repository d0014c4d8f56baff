"""Block formats as compressors."""

import jax.numpy as jnp
import numpy as np
import pytest
from compressor_cases import KEY, back, encoded, heavy

from scalejax.errors import UserError
from scalejax.parallel.compression.compressors import Blocks


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "size"), [(4, 128), (8, 128), (4, 2048)])
def test_integers_are_one_of_the_two_next_to_the_value(bits, size):
    x, most = heavy(2, 300), 2 ** (bits - 1) - 1
    compressor = Blocks(format=f"int{bits}:{size}")
    data = np.asarray(encoded(compressor, x, KEY)["blocks"])
    decoded = np.asarray(back(compressor, x, KEY))
    blocks = -(-300 // size)
    assert data.shape == (2, 4 * blocks + 300 * bits // 8)
    for r in range(2):
        scales = data[r, : 4 * blocks].copy().view(np.float32)
        codes = data[r, 4 * blocks :]
        if bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=1).ravel()
        for b in range(blocks):
            part = x[r, b * size : (b + 1) * size].astype(np.float64)
            assert scales[b] == np.float32(abs(part).max() / most)
            for i, value in enumerate(part, start=b * size):
                level = int(codes[i]) - 2**bits * (codes[i] >= 2 ** (bits - 1))
                assert level in (np.floor(value / scales[b]), np.ceil(value / scales[b]))
                assert abs(level) <= most
                assert decoded[r, i] == np.float32(level) * scales[b]


def test_rounded_to_nearest_it_wants_no_key_and_stochastically_one():
    assert Blocks(format="int4:128").traits[:3] == ("int4:128, stochastic", "own", "unbiased")
    nearest = Blocks(format="int4:128", rounding="ties_to_even")
    assert nearest.traits[:3] == ("int4:128, ties_to_even", "none", "biased")
    x = heavy(1, 64)
    np.testing.assert_array_equal(encoded(nearest, x)["blocks"], encoded(nearest, x, KEY)["blocks"])


def test_formats_that_do_not_travel_or_would_be_biased_are_refused():
    with pytest.raises(UserError, match="nvfp4 share a float32 with the whole array"):
        Blocks(format="nvfp4", rounding="ties_to_even")
    with pytest.raises(UserError, match=r'stochastic" is biased for bdr_mx4 under scale_rule="floor".*"rceil"'):
        Blocks(format="bdr_mx4")
    with pytest.raises(UserError, match="there is no 'int5'"):
        Blocks(format="int5")
    with pytest.raises(UserError, match="int8:128 scales by its largest magnitude and takes no rule"):
        Blocks(format="int8:128", scale_rule="rceil").encode(jnp.ones((1, 8)), KEY)
