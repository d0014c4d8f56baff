"""Rows under codebooks that they share: limits that are known, k-means of scikit-learn, lookups, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_oracle

from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import SHARED_CODEBOOK_FORMATS, shared_codebook

pytestmark = pytest.mark.usefixtures("strict_promotion")

OWN = {"kmeans4_shared": "kmeans4", "kmeans2_shared": "kmeans2"}
BITS = {"kmeans4_shared": 4, "kmeans2_shared": 2}
# Of two formats the smaller one stands for both in the default tests.
BOTH = [pytest.param("kmeans4_shared", marks=pytest.mark.slow), "kmeans2_shared"]
WIDTH = 9  # of all tables of the default tests: one compilation


def spread(rows, dim, seed=0):
    """Rows of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, dim)) * np.exp(rng.normal(size=(rows, 1)))).astype(np.float32)


def decoded(rows):
    return np.asarray(block_quant.dequantize_rows(rows))


def errors(table, found):
    return np.square(found.astype(np.float64) - table).sum(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("format", BOTH)
def test_a_codebook_for_each_row_is_that_of_the_row(format):
    table = spread(60, WIDTH)
    alone = errors(table, decoded(block_quant.quantize_rows_kmeans(jnp.asarray(table), OWN[format])))
    rows = block_quant.share_codebooks(jnp.asarray(table), format, books=60)
    assert sorted(np.asarray(rows.codebook_ids)) == list(range(60))
    np.testing.assert_allclose(errors(table, decoded(rows)), alone, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("format", BOTH)
def test_every_number_has_the_nearest_entry_of_the_codebook_of_its_row(format):
    table = spread(100, WIDTH, seed=1)
    rows = block_quant.share_codebooks(jnp.asarray(table), format, books=7)
    books, codebook_ids = np.asarray(rows.books, np.float64), np.asarray(rows.codebook_ids)
    assert (np.diff(books, axis=1) >= 0).all()
    assert set(codebook_ids) <= set(range(7))
    nearest = np.abs(table[:, :, None] - books[codebook_ids][:, None, :]).min(axis=2)
    np.testing.assert_array_equal(np.abs(decoded(rows).astype(np.float64) - table), nearest)
    # Entries are the means of their values, so that k-means has come to rest but for the rounding to float16.
    for book in set(codebook_ids):
        numbers, found = table[codebook_ids == book].astype(np.float64), decoded(rows)[codebook_ids == book]
        for entry in np.unique(found):
            assert numbers[found == entry].mean() == pytest.approx(entry, rel=2.0**-11 * 1.01, abs=2.0**-25)


@pytest.mark.slow
def test_rows_of_like_size_go_together():
    table = np.random.default_rng(2).normal(size=(64, WIDTH)).astype(np.float32)
    table[::2] *= 50
    rows = block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared", books=2)
    codebook_ids = np.asarray(rows.codebook_ids)
    assert len(set(codebook_ids[::2])) == len(set(codebook_ids[1::2])) == 1
    assert codebook_ids[0] != codebook_ids[1]
    one = block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared", books=1)
    assert errors(table, decoded(rows))[1::2].sum() < 0.1 * errors(table, decoded(one))[1::2].sum()


@pytest.mark.slow
@pytest.mark.parametrize("format", SHARED_CODEBOOK_FORMATS)
def test_one_codebook_is_about_as_good_as_scikit_learn_s(format):
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    table = np.random.default_rng(3).normal(size=(100, 24)).astype(np.float32)
    found = errors(table, decoded(block_quant.share_codebooks(jnp.asarray(table), format, books=1))).sum()
    numbers = table.reshape(-1, 1).astype(np.float64)
    theirs = cluster.KMeans(1 << BITS[format], n_init=10, random_state=0).fit(numbers).inertia_
    # Both stop at some local optimum. 11 digits of float16 cost nothing that shows.
    assert 0.95 * theirs < found < 1.05 * theirs


@pytest.mark.slow
def test_rows_of_like_sizes_lose_less_than_in_int4_and_take_fewer_bytes():
    table = np.random.default_rng(0).normal(size=(2000, 64)).astype(np.float32)
    rows = block_quant.share_codebooks(jnp.asarray(table), "kmeans4_shared")
    uniform = block_quant.quantize_rows(jnp.asarray(table), "int4")
    assert errors(table, decoded(rows)).sum() < 0.95 * errors(table, decoded(uniform)).sum()
    assert rows.nbytes < 0.98 * uniform.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("format", SHARED_CODEBOOK_FORMATS)
def test_more_codebooks_lose_less_and_one_a_row_least(format):
    table = spread(240, 24, seed=4)
    found = [
        errors(table, decoded(block_quant.share_codebooks(jnp.asarray(table), format, books=books))).sum()
        for books in (1, 4, 16, 64, 240)
    ]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.5 * found[0]


@pytest.mark.slow
def test_few_different_numbers_come_back_as_they_were():
    some = np.array([-3.5, 0.0, 0.25, 2.0], np.float32)
    table = some[np.random.default_rng(5).integers(0, 4, (40, WIDTH))]
    rows = block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared", books=3)
    np.testing.assert_array_equal(decoded(rows), table)


def test_bytes_of_a_table():
    table = spread(40, WIDTH)
    rows = block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared")
    assert rows.books.shape == (3, 4)  # one for 16 rows
    assert rows.nbytes == rows.codes.nbytes + rows.codebook_ids.nbytes + rows.books.nbytes == 40 * (3 + 1) + 3 * 8
    assert block_quant.table_bytes("kmeans2_shared", 40, WIDTH) == rows.nbytes
    assert block_quant.table_bytes("kmeans4_shared", 10**6, 64) == 10**6 * 33 + 255 * 32
    shares = {d: block_quant.table_bytes("kmeans4_shared", 10**6, d) / 10**6 / (4 * d) for d in (32, 64, 128)}
    assert {d: round(share, 3) for d, share in shares.items()} == {32: 0.133, 64: 0.129, 128: 0.127}
    assert block_quant.table_bytes("int4", 10, 64) == 360
    assert [shared_codebook.count(rows) for rows in (0, 1, 16, 17, 4080, 4081, 10**6)] == [1, 1, 1, 2, 255, 255, 255]


@pytest.mark.slow
def test_broken_rows_decode_to_nan_are_counted_and_bear_on_no_codebook():
    table = spread(20, WIDTH)
    sound = decoded(block_quant.share_codebooks(jnp.asarray(table[5:]), "kmeans2_shared", books=2))
    table[0, 3], table[1, 0], table[2, 5], table[3, 1], table[4] = np.nan, np.inf, -np.inf, 65520, np.nan
    rows = block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared", books=2)
    assert int(block_quant.nonfinite_rows(rows)) == 5
    assert np.isnan(decoded(rows)[:5]).all()
    np.testing.assert_array_equal(decoded(rows)[5:], sound)
    none = block_quant.share_codebooks(jnp.asarray(table[:5]), "kmeans2_shared", books=255)
    assert np.isnan(decoded(none)).all()
    assert int(block_quant.nonfinite_rows(none)) == 5


@pytest.mark.slow
def test_ids_of_no_row_give_zeros_though_no_code_stands_for_zero():
    rows = block_quant.share_codebooks(jnp.ones((4, WIDTH)), "kmeans2_shared")
    found = block_quant.gather_quantized_rows(rows, jnp.asarray([-1, 2, 4], jnp.int32))
    np.testing.assert_array_equal(found, np.repeat([[0.0], [1.0], [0.0]], WIDTH, axis=1))


@pytest.mark.slow
def test_a_lookup_is_that_of_the_decoded_table_to_the_bit():
    rng = np.random.default_rng(3)
    rows = block_quant.share_codebooks(jnp.asarray(spread(60, WIDTH)), "kmeans2_shared")
    lengths = jnp.asarray([3, 0, 20, 1, 6], jnp.int32)
    ids = jnp.asarray(rng.integers(-3, 64, 32), jnp.int32)  # some are no rows, and add nothing
    assert ((ids < 0) | (ids >= 60)).any()
    found = block_quant.quantized_bag(rows, ids, lengths, pooling="mean")
    whole = block_quant.quantized_bag(rows, ids, lengths, pooling="mean", implementation="reference")
    np.testing.assert_array_equal(found, whole)
    jitted = jax.jit(lambda *a: block_quant.quantized_bag(*a, pooling="mean"))(rows, ids, lengths)
    np.testing.assert_array_equal(jitted, found)
    none = block_quant.share_codebooks(jnp.ones((0, WIDTH)), "kmeans2_shared")
    assert block_quant.quantized_bag(none, ids, lengths).shape == (5, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 3, 17])
@pytest.mark.parametrize("format", SHARED_CODEBOOK_FORMATS)
def test_widths_that_fill_no_whole_bytes(format, dim):
    table = row_oracle.rows(dim)["normal"][:60]
    rows = block_quant.share_codebooks(jnp.asarray(table), format)
    assert rows.codes.shape == (60, -(-dim * BITS[format] // 8))
    places = np.arange(dim) * BITS[format]
    codes = (np.asarray(rows.codes)[:, places // 8] >> (places % 8).astype(np.uint8)) & ((1 << BITS[format]) - 1)
    books = np.asarray(rows.books, np.float32)[np.asarray(rows.codebook_ids)]
    np.testing.assert_array_equal(decoded(rows), np.take_along_axis(books, codes.astype(int), axis=1))


@pytest.mark.slow
def test_clusters_of_many_rows_are_found_among_some(monkeypatch):
    table = spread(400, 16, seed=6)
    wanted = errors(table, decoded(block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared", books=8))).sum()
    monkeypatch.setattr(shared_codebook, "_FITTED", 100)
    found = errors(table, decoded(block_quant.share_codebooks(jnp.asarray(table), "kmeans2_shared", books=8))).sum()
    assert 0.7 * wanted < found < 1.3 * wanted


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: block_quant.share_codebooks(t, "kmeans2"), "one of kmeans4_shared, kmeans2_shared; got 'kmeans2'"),
        (lambda t: block_quant.share_codebooks(t.astype(jnp.int32), "kmeans2_shared"), "table must be float32"),
        (lambda t: block_quant.share_codebooks(t, "kmeans2_shared", books=0), r"books must lie in [1, 255]"),
        (lambda t: block_quant.share_codebooks(t, "kmeans2_shared", books=256), "or be None; got 256"),
        (jax.jit(lambda t: block_quant.share_codebooks(t, "kmeans2_shared")), "table must be an array, not traced"),
        (
            lambda t: block_quant.quantized_bag(
                block_quant.share_codebooks(t, "kmeans2_shared"),
                jnp.zeros(2, jnp.int32),
                jnp.ones(2, jnp.int32),
                implementation="pallas_gpu",
            ),
            '"pallas_gpu" has no codebooks; got rows in kmeans2_shared',
        ),
    ],
)
def test_mistakes_are_refused(call, words):
    with pytest.raises((UserError, UnsupportedError)) as caught:
        call(jnp.ones((2, WIDTH)))
    assert words in str(caught.value)
