"""Stochastic rounding: to a neighbour, unbiased, the same for the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.errors import UserError
from scalejax.numerics.stochastic import hash_bits, hash_key, place_bits, stochastic_round


def neighbours(value, dtype):
    """The largest number of the type not above, and the smallest not below a value inside its range."""
    nearest = np.asarray(value, np.float32).astype(dtype)
    if float(nearest) == value:
        return float(nearest), float(nearest)
    step = np.nextafter(nearest, np.asarray(np.inf if float(nearest) < value else -np.inf, dtype), dtype=dtype)
    return tuple(sorted((float(nearest), float(step))))


@pytest.mark.default_cases("bfloat16")
@settings(max_examples=80, deadline=None)
@given(st.floats(-60000, 60000, width=32), st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_result_is_one_of_the_two_neighbours(dtype, value, bits):
    if value and abs(value) < 2.0**-120:
        return  # bfloat16 subnormals, which CPUs flush
    got = float(stochastic_round(jnp.float32(value), dtype, jnp.uint32(bits)))
    assert got in neighbours(value, jnp.dtype(dtype)), (value, got)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_mean_of_many_rounds_is_the_value(dtype):
    values = np.float32([1.0 + 2**-11, -3.14159, 1e-3, 6.0e-7, 300.1, 0.0])
    count = 1 << 14
    bits = hash_bits(jnp.arange(count, dtype=jnp.uint32)[:, None], jnp.arange(len(values), dtype=jnp.uint32)[None])
    rounds = np.asarray(stochastic_round(jnp.broadcast_to(values, bits.shape), dtype, bits), np.float64)
    low, high = np.array([neighbours(float(v), jnp.dtype(dtype)) for v in values]).T
    # Standard deviation of the mean of `count` draws between two neighbours, at most half their distance each; the
    # chance has 13 bits for float16, 16 for bfloat16.
    bound = 4 * (high - low) / 2 / np.sqrt(count) + (high - low) * 2.0**-13
    assert (abs(rounds.mean(axis=0) - values) <= bound).all()


@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_updates_below_half_a_unit_add_up_where_rounding_to_nearest_stalls(dtype):
    unit = float(jnp.finfo(dtype).eps)
    chance, nearest = jnp.ones(4096, dtype), jnp.ones(4096, dtype)
    for step in range(64):
        bits = hash_bits(jnp.uint32(step), jnp.arange(4096, dtype=jnp.uint32))
        chance = stochastic_round(chance.astype(jnp.float32) + unit / 16, dtype, bits)
        nearest = (nearest.astype(jnp.float32) + unit / 16).astype(dtype)
    assert (nearest == 1).all()
    grown = np.asarray(chance, np.float64).mean() - 1
    assert abs(grown - 4 * unit) < 0.1 * unit  # 64 / 16 units


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_not_finite_stays_and_what_fits_stays(dtype):
    special = jnp.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, -2.0])
    got = np.asarray(stochastic_round(special, dtype, jnp.full(7, 0xFFFFFFFF, jnp.uint32)), np.float32)
    np.testing.assert_array_equal(got, special)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(special))


def test_float16_beyond_its_range_becomes_its_largest_number():
    got = stochastic_round(jnp.float32([1e6, -1e6]), jnp.float16, jnp.zeros(2, jnp.uint32))
    np.testing.assert_array_equal(np.asarray(got, np.float32), [65504, -65504])


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_bfloat16_beyond_its_range_becomes_its_largest_number(bits):
    largest = np.finfo(np.float32).max
    got = stochastic_round(jnp.float32([largest, -largest]), jnp.bfloat16, jnp.full(2, bits, jnp.uint32))
    top = float(jnp.finfo(jnp.bfloat16).max)
    np.testing.assert_array_equal(np.asarray(got, np.float32), [top, -top])


def test_other_types_are_refused():
    with pytest.raises(UserError, match="bfloat16 or float16; got float32 and float8_e4m3fn"):
        stochastic_round(jnp.ones(1), jnp.float8_e4m3fn, jnp.zeros(1, jnp.uint32))


def test_bits_depend_on_every_word_and_are_even():
    bits = np.asarray(hash_bits(jnp.arange(1 << 12, dtype=jnp.uint32)[:, None], jnp.arange(16, dtype=jnp.uint32)[None]))
    assert len(np.unique(bits)) > 0.99 * bits.size
    share = np.unpackbits(bits.reshape(-1).view(np.uint8)).reshape(bits.size, 32).mean(axis=0)
    assert abs(share - 0.5).max() < 4 * 0.5 / np.sqrt(bits.size)


def mixed(*words):
    """MurmurHash3's finalizer after each word, in whole numbers of Python."""
    state = 0x9E3779B9
    for word in words:
        state ^= word
        state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
        state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
        state ^= state >> 16
    return state


def test_places_have_the_bits_of_their_row_and_column_under_a_key():
    words = jnp.array([5, 2**32 - 7], jnp.uint32)
    got = np.asarray(place_bits(words, (2, 3, 4)))
    expected = [[mixed(column, mixed(5, 2**32 - 7, row)) for column in range(4)] for row in range(6)]
    np.testing.assert_array_equal(got, np.uint32(expected).reshape(2, 3, 4))
    np.testing.assert_array_equal(place_bits(words, (4,)), np.uint32(expected[0]))
    np.testing.assert_array_equal(jax.random.bits(hash_key(words), (2, 3, 4), jnp.uint32), got)


def test_streams_of_different_keys_and_rows_have_nothing_in_common():
    keys = jnp.stack([jnp.arange(16, dtype=jnp.uint32), jnp.zeros(16, jnp.uint32)], axis=1)
    streams = np.asarray(jax.vmap(lambda key: place_bits(key, (2, 4096)))(keys)).reshape(32, 4096)
    pairs = np.corrcoef(streams.astype(np.float64) / 2**32)[np.triu_indices(32, 1)]
    assert abs(pairs).max() < 5 / np.sqrt(4096)
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(streams[:, :-lag].ravel(), streams[:, lag:].ravel())[0, 1]) < 4 / np.sqrt(32 * 4000)
    # Of 131,072 numbers of 32 bits two or three pairs are equal by chance; the same set in another order would be all.
    assert len(np.unique(streams)) > streams.size - 20


def test_a_key_for_rounding_does_nothing_else():
    key = hash_key(jnp.zeros(2, jnp.uint32))
    with pytest.raises(UserError, match="32 random bits at a time; got 8"):
        jax.random.bits(key, (4,), jnp.uint8)
    with pytest.raises(UserError, match="cannot be split or folded"):
        jax.random.split(key)
    with pytest.raises(UserError, match="cannot be split or folded"):
        jax.random.fold_in(key, 1)
