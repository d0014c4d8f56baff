"""Small integers as streams of bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.parallel.compression.compressors import levels


def streams(codes, bits):
    """Bytes of the widths 8, 4, 2 and 1 that add up to `bits`, the lowest bits of the codes in the first."""
    found, low = [], 0
    for width in (8, 8, 4, 2, 1):
        if low + width <= bits:
            stream = [0] * -(-len(codes) * width // 8)
            for i, code in enumerate(codes):
                stream[i * width // 8] += ((code >> low) % 2**width) << (i * width % 8)
            found, low = found + stream, low + width
    assert low == bits
    return found


@pytest.mark.default_cases(first=10)
@pytest.mark.parametrize("bits", range(1, 17))
def test_bytes_are_those_of_the_definition_and_come_back(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2, 21))
    data = np.asarray(jax.jit(levels.pack, static_argnums=1)(jnp.asarray(codes, jnp.int32), bits))
    assert data.shape == (2, levels.packed_bytes(21, bits))
    for row, expected in zip(data, codes, strict=True):
        assert row.tolist() == streams(expected.tolist(), bits)
    np.testing.assert_array_equal(jax.jit(levels.unpack, static_argnums=(1, 2))(data, bits, 21), codes)
    assert levels.packed_bytes(64, bits) == 8 * bits
