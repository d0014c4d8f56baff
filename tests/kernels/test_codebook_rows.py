"""Rows under codebooks of their own: the best of all partitions, k-means of scikit-learn, lookups, and refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_oracle

from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels import block_quant, embedding_bag
from scalejax.kernels.block_quant import CODEBOOK_FORMATS

pytestmark = pytest.mark.usefixtures("strict_promotion")

# Of two formats the smaller one stands for both in the default tests.
BOTH = [pytest.param("kmeans4", marks=pytest.mark.slow), "kmeans2"]

BITS = {"kmeans4": 4, "kmeans2": 2}
CASES = row_oracle.rows(24)


def decoded(table, format):
    return np.asarray(block_quant.dequantize_rows(block_quant.quantize_rows_kmeans(jnp.asarray(table), format)))


def errors(table, found):
    return np.square(found.astype(np.float64) - table).sum(axis=1)


def least_error(row, clusters):
    """Of all ways to cut the sorted values of a row into runs, in float64."""
    x, best = np.sort(row.astype(np.float64)), np.inf
    for cuts in itertools.combinations_with_replacement(range(len(x) + 1), clusters - 1):
        ends = (0, *cuts, len(x))
        runs = [x[i:j] for i, j in itertools.pairwise(ends) if j > i]
        best = min(best, sum(np.square(run - run.mean()).sum() for run in runs))
    return best


def rounding(table):
    """What float16 may add to the error of a row, above the means' own: D (2^-12 of the largest)^2."""
    return table.shape[1] * np.square(np.abs(table).max(axis=1) * 2.0**-11 + 2.0**-25)


def test_codebooks_are_the_best_of_all():
    table = np.random.default_rng(0).normal(size=(40, 9)).astype(np.float32)
    table[10:20] = np.exp(2 * table[10:20])
    table[20:30] = np.round(table[20:30])  # equal values
    found = errors(table, decoded(table, "kmeans2"))
    wanted = np.array([least_error(row, 4) for row in table])
    # A mean is the best of its run, so that moving it costs only the square of how far.
    assert (found >= wanted * (1 - 1e-6) - 1e-12).all()
    assert (found <= wanted * (1 + 1e-5) + rounding(table)).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", CODEBOOK_FORMATS)
def test_no_kmeans_of_scikit_learn_is_better(format):
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    table = np.random.default_rng(1).normal(size=(12, 64)).astype(np.float32)
    found = errors(table, decoded(table, format))
    theirs = np.array(
        [
            cluster.KMeans(1 << BITS[format], n_init=10, random_state=0).fit(row[:, None].astype(np.float64)).inertia_
            for row in table
        ]
    )
    assert (found <= theirs * (1 + 1e-6) + rounding(table)).all()
    assert (found > 0.7 * theirs).all()  # which finds nearly as good ones


@pytest.mark.parametrize("format", BOTH)
def test_few_different_numbers_come_back_as_they_were(format):
    rng = np.random.default_rng(2)
    some = rng.normal(size=(50, 1 << BITS[format])).astype(np.float16).astype(np.float32)
    table = np.take_along_axis(some, rng.integers(0, some.shape[1], (50, 9)), axis=1)
    table[0], table[1, 1:] = 0, 2.5
    rows = block_quant.quantize_rows_kmeans(jnp.asarray(table), format)
    np.testing.assert_array_equal(block_quant.dequantize_rows(rows), table)
    books = np.asarray(rows.books[1], np.float32)
    assert sorted(books[:2].tolist()) == books[:2].tolist()
    assert not books[2:].any()


@pytest.mark.slow
def test_errors_are_below_those_of_a_scale_and_a_bias():
    table = CASES["normal"]
    greedy = block_quant.quantize_rows(jnp.asarray(table), "int4", range="greedy")
    assert (
        errors(table, decoded(table, "kmeans4")) < errors(table, np.asarray(block_quant.dequantize_rows(greedy)))
    ).all()


@pytest.mark.parametrize("dim", [*(pytest.param(d, marks=pytest.mark.slow) for d in (1, 3, 17)), 9])
@pytest.mark.parametrize("format", BOTH)
def test_widths_that_fill_no_whole_bytes(format, dim):
    table = row_oracle.rows(dim)["normal"][:60]
    rows = block_quant.quantize_rows_kmeans(jnp.asarray(table), format)
    assert rows.codes.shape == (60, -(-dim * BITS[format] // 8))
    assert rows.nbytes == rows.codes.nbytes + rows.books.nbytes == 60 * block_quant.row_bytes(format, dim)
    places = np.arange(dim) * BITS[format]
    codes = (np.asarray(rows.codes)[:, places // 8] >> (places % 8).astype(np.uint8)) & ((1 << BITS[format]) - 1)
    by_hand = np.take_along_axis(np.asarray(rows.books, np.float32), codes.astype(int), axis=1)
    np.testing.assert_array_equal(block_quant.dequantize_rows(rows), by_hand)
    if dim <= 1 << BITS[format]:
        np.testing.assert_array_equal(by_hand, table.astype(np.float16).astype(np.float32))


def test_bytes_of_a_row():
    sizes = {(f, d): block_quant.row_bytes(f, d) / (4 * d) for f in CODEBOOK_FORMATS for d in (32, 64, 128)}
    assert sizes[("kmeans4", 32)] == 0.375
    assert sizes[("kmeans4", 64)] == 0.25
    assert sizes[("kmeans4", 128)] == 0.1875
    assert sizes[("kmeans2", 64)] == 24 / 256


@pytest.mark.parametrize("format", BOTH)
def test_broken_rows_decode_to_nan_and_are_counted(format):
    table = np.ones((6, 9), np.float32) * np.arange(9)
    table[1, 3], table[2, 0], table[3, 5], table[4, 1] = np.nan, np.inf, -np.inf, 1e6
    rows = block_quant.quantize_rows_kmeans(jnp.asarray(table), format)
    assert int(block_quant.nonfinite_rows(rows)) == 4
    found = np.asarray(block_quant.dequantize_rows(rows))
    assert np.isnan(found[1:5]).all()
    assert np.isfinite(found[[0, 5]]).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", CODEBOOK_FORMATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_lookup_is_that_of_the_decoded_table_to_the_bit(format, weighted):
    rng = np.random.default_rng(3)
    rows = block_quant.quantize_rows_kmeans(jnp.asarray(CASES["normal"]), format)
    lengths = jnp.asarray([3, 0, 20, 1, 6], jnp.int32)
    ids = jnp.asarray(rng.integers(-3, 204, 32), jnp.int32)  # some are no rows
    weights = jnp.asarray(rng.normal(size=32).astype(np.float32)) if weighted else None
    found = block_quant.quantized_bag(rows, ids, lengths, weights=weights, pooling="mean")
    whole = block_quant.quantized_bag(rows, ids, lengths, weights=weights, pooling="mean", implementation="reference")
    np.testing.assert_array_equal(found, whole)
    plain = embedding_bag.embedding_bag(
        jnp.asarray(np.asarray(block_quant.dequantize_rows(rows))), ids, lengths, weights=weights, pooling="mean"
    )
    np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-6)
    none = block_quant.quantize_rows_kmeans(jnp.ones((0, 4)), format)
    assert block_quant.quantized_bag(none, ids, lengths).shape == (5, 4)
    np.testing.assert_array_equal(jax.jit(block_quant.dequantize_rows)(rows), block_quant.dequantize_rows(rows))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: block_quant.quantize_rows_kmeans(t, "kmeans3"), "one of kmeans4, kmeans2; got 'kmeans3'"),
        (
            lambda t: block_quant.quantize_rows_kmeans(t.astype(jnp.int32), "kmeans4"),
            "quantize_rows_kmeans: table must be float32",
        ),
        (lambda t: block_quant.quantize_rows_kmeans(t[:, :0], "kmeans4"), "must have a number at least"),
        (
            lambda t: block_quant.quantized_bag(
                block_quant.quantize_rows_kmeans(t, "kmeans2"),
                jnp.zeros(2, jnp.int32),
                jnp.ones(2, jnp.int32),
                implementation="pallas_gpu",
            ),
            '"pallas_gpu" has no codebooks; got rows in kmeans2',
        ),
    ],
)
def test_mistakes_are_refused(call, words):
    with pytest.raises((UserError, UnsupportedError)) as caught:
        call(jnp.ones((2, 9)))
    assert words in str(caught.value)
