"""Stochastic levels, and their size after entropy coding."""

import numpy as np
import pytest
from compressor_cases import KEY, back, encoded, heavy

from scalejax.errors import UserError
from scalejax.numerics.stochastic import place_bits
from scalejax.parallel.compression.compressors import LinearDithering, NaturalDithering, entropy_coded_bytes


def length(row, kind):
    row = row.astype(np.float64)
    return abs(row).max() if kind == "max" else np.sqrt((row**2).sum())


def chance_of(shape, bits):
    """float64 in [0, 1), `bits` bits each; that the bits are random is tested where they are made."""
    return (np.asarray(place_bits(KEY, shape)) >> (32 - bits)) * 2.0**-bits


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "scale"), [(1, "max"), (7, "l2"), (100, "max"), (32767, "l2")])
def test_linear_levels_are_those_of_the_definition(scale, levels):
    x, compressor = heavy(2, 150), LinearDithering(levels=levels, scale=scale)
    got = np.asarray(compressor.signed_levels(encoded(compressor, x, KEY), 150))
    chance, fraction = chance_of(x.shape, 30 - levels.bit_length()), 2.0 ** (levels.bit_length() - 30)
    unsure = 0
    for r in range(2):
        unit = length(x[r], scale) / levels
        for i in range(150):
            exact = float(x[r, i]) / unit + chance[r, i]
            # The quotient is rounded to a float32, and cut to the bits that chance has.
            near = abs(exact - round(exact)) < 4 * fraction + 2.0**-22 * abs(exact)
            unsure += near
            assert near or got[r, i] == np.floor(exact)
        np.testing.assert_allclose(np.asarray(back(compressor, x, KEY))[r], got[r] * unit, rtol=1e-6)
    assert unsure <= (2 if levels < 1000 else 20)
    assert abs(got).max() <= levels


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "scale"), [(1, "max"), (2, "l2"), (4, "max"), (8, "l2"), (30, "max")])
def test_natural_levels_are_those_of_the_definition(scale, levels):
    x, compressor = heavy(2, 150), NaturalDithering(levels=levels, scale=scale)
    x[0, 5] = 0
    got = np.asarray(compressor.signed_levels(encoded(compressor, x, KEY), 150))
    chance = chance_of(x.shape, 23)
    for r in range(2):
        whole = length(x[r], scale)
        for i in range(150):
            y = abs(float(x[r, i])) / whole * 2 ** (levels - 1)
            low = 0 if y <= 1 else 2 ** int(np.ceil(np.log2(y)) - 1)
            distance = (y - low) / max(low, 1)
            near = abs(distance + chance[r, i] - 1) < 1e-5 or abs(distance) < 1e-5
            expected = low + max(low, 1) * (distance + chance[r, i] >= 1)
            assert near or got[r, i] == np.sign(x[r, i]) * expected
        decoded = np.asarray(back(compressor, x, KEY))[r]
        np.testing.assert_allclose(decoded, got[r] * (whole / 2 ** (levels - 1)), rtol=1e-6)
        assert decoded[5] == 0 or r


@pytest.mark.parametrize("kind", [LinearDithering, NaturalDithering])
def test_the_largest_value_of_a_row_stays(kind):
    for seed in range(5):
        x = heavy(1, 9, seed=seed)
        got, i = np.asarray(back(kind(levels=5), x, KEY)), abs(x).argmax()
        np.testing.assert_allclose(got[0, i], x[0, i], rtol=1e-6)


@pytest.mark.parametrize("kind", [LinearDithering, NaturalDithering])
def test_values_take_the_bits_of_their_levels(kind):
    widths = {1: 2, 2: 3, 3: 3, 7: 4, 8: 5, 15: 5, 16: 6}
    assert {levels: kind(levels=levels).payload_bytes(800) - 4 for levels in widths} == {
        levels: 100 * width for levels, width in widths.items()
    }


def test_levels_out_of_range_are_refused():
    for kind, most in ((LinearDithering, 32767), (NaturalDithering, 30)):
        for levels in (0, -1, most + 1, 2.0, True, "3", None):
            with pytest.raises(
                UserError, match=f"{kind.__name__}: levels must be a whole number from 1 to {most}; got"
            ):
                kind(levels=levels)
        assert repr(kind(levels=np.int32(3))) == repr(kind(levels=3))
        with pytest.raises(UserError, match="scale must be one of max, l2; got 'mean'"):
            kind(levels=3, scale="mean")


def delta(value):
    """Elias' delta code: the length of the length in zeros, the length, the number without its first bit."""
    length = f"{len(f'{value:b}'):b}"
    return "0" * (len(length) - 1) + length + f"{value:b}"[1:]


def read_delta(text, at):
    zeros = text.index("1", at) - at
    count = int(text[at + zeros : at + 2 * zeros + 1], 2)
    at += 2 * zeros + 1
    return int("1" + text[at : at + count - 1], 2), at + count - 1


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [LinearDithering(levels=40, scale="l2"), NaturalDithering(levels=6)])
def test_the_entropy_coded_size_is_that_of_a_literal_coder(compressor):
    row = np.asarray(compressor.signed_levels(encoded(compressor, heavy(1, 700), KEY), 700))[0]
    text, last = "", -1
    for i, level in enumerate(row.tolist()):
        if level:
            text, last = text + delta(i - last) + "01"[level < 0] + delta(abs(level)), i
    read, at, last = np.zeros(700, int), 0, -1
    while at < len(text):
        gap, at = read_delta(text, at)
        sign, (magnitude, at) = text[at], read_delta(text, at + 1)
        last += gap
        read[last] = -magnitude if sign == "1" else magnitude
    np.testing.assert_array_equal(read, row)
    assert entropy_coded_bytes(row) == 4 * -(-len(text) // 32) + 4 + 4
    assert len(text) % 32  # the last word is not full


def test_known_lengths_of_the_code():
    assert [delta(value) for value in (1, 2, 3, 4, 10, 17)] == ["1", "0100", "0101", "01100", "00100010", "001010001"]
    assert entropy_coded_bytes(np.zeros(100)) == 8
    # 4 + 1 + 1 bits for the first, whose distance is 2, and 1 + 1 + 1 for each of the others: 33.
    assert entropy_coded_bytes([0, 1, -1, 1, 1, 1, -1, 1, 1, 1, 1]) == 4 * 2 + 8
    assert entropy_coded_bytes(np.r_[np.zeros(2**20), -(2**29)]) == 4 * -(-(29 + 1 + 38) // 32) + 8
