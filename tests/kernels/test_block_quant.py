"""Row-wise int8, int4 and int2: the bytes of a literal oracle, lookups, the greedy range, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_oracle

from scalejax import compat
from scalejax.errors import UserError
from scalejax.kernels import block_quant, embedding_bag
from scalejax.kernels.block_quant import ROW_FORMATS

pytestmark = pytest.mark.usefixtures("strict_promotion")

CASES = row_oracle.rows(24)


def fused(table, format, **arguments):
    return np.asarray(block_quant.fuse_rows(block_quant.quantize_rows(jnp.asarray(table), format, **arguments)))


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_bytes_are_those_of_the_oracle(format):
    table = np.concatenate(list(CASES.values()))
    found, wanted = fused(table, format), row_oracle.quantize(table, format)
    names = np.repeat(list(CASES), [len(rows) for rows in CASES.values()])
    assert not sorted(set(names[(found != wanted).any(axis=1)]))


@pytest.mark.slow
@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("dim", [1, 3, 5, 33])
def test_widths_that_fill_no_whole_bytes(format, dim):
    table = row_oracle.rows(dim)["normal"]
    assert np.array_equal(fused(table, format), row_oracle.quantize(table, format))
    assert fused(table, format).shape[1] == block_quant.row_bytes(format, dim)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_tables_are_quantized_as_the_float32_numbers_that_they_hold(dtype):
    table = jnp.asarray(CASES["normal"]).astype(dtype)
    assert np.array_equal(fused(table, "int4"), row_oracle.quantize(np.asarray(table.astype(jnp.float32)), "int4"))


@pytest.mark.default_cases(first=2)
@pytest.mark.parametrize("format", ROW_FORMATS)
def test_decoded_numbers_are_those_of_the_oracle(format):
    table = np.concatenate([CASES[name] for name in ("normal", "spread", "constant", "ties", "zero")])
    rows = block_quant.quantize_rows(jnp.asarray(table), format)
    decoded = np.asarray(block_quant.dequantize_rows(rows))
    wanted = row_oracle.dequantize(row_oracle.quantize(table, format), format, table.shape[1])
    assert np.array_equal(decoded, wanted, equal_nan=True)  # some rows are beyond float16
    jitted = np.asarray(jax.jit(block_quant.dequantize_rows)(rows))
    assert np.array_equal(jitted, decoded, equal_nan=True)


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_errors_stay_within_half_a_step_and_the_rounding_of_scale_and_bias(format):
    table = np.concatenate([CASES["normal"], CASES["uniform"]])
    rows = block_quant.quantize_rows(jnp.asarray(table), format)
    error = np.abs(np.asarray(block_quant.dequantize_rows(rows), np.float64) - table)
    span = np.ptp(table, axis=1, keepdims=True).astype(np.float64)
    steps = (1 << row_oracle.BITS[format]) - 1
    half = format != "int8"
    # A scale that float16 rounded down leaves the largest number up to range * 2^-11 above the last code, and a
    # float16 below 2^-14 has an absolute error of 2^-25; the bias moves the range by its own rounding.
    bias = np.abs(table).max(axis=1, keepdims=True) * 2.0**-11 if half else 0
    slack = (span * 2.0**-11 + steps * 2.0**-25 + bias) if half else span * 2.0**-22
    assert (error <= span / steps / 2 * (1 + 2.0**-10) + slack).all()


@pytest.mark.slow
def test_broken_rows_decode_to_nan_and_are_counted():
    table = np.ones((6, 8), np.float32) * np.arange(8)
    table[1, 3], table[2, 0], table[3, 5] = np.nan, np.inf, -np.inf
    table[4, 1], table[4, 2] = 3e38, -3e38  # its range overflows
    for format in ROW_FORMATS:
        rows = block_quant.quantize_rows(jnp.asarray(table), format)
        assert int(block_quant.nonfinite_rows(rows)) == 4
        decoded = np.asarray(block_quant.dequantize_rows(rows))
        assert np.isnan(decoded[1:5]).all()
        assert np.isfinite(decoded[[0, 5]]).all()
        assert np.array_equal(np.asarray(block_quant.fuse_rows(rows)), row_oracle.quantize(table, format))


@pytest.mark.default_cases
@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("layout", ["training", "inference"])
@pytest.mark.parametrize("align", [1, 16])
def test_fused_bytes_split_into_what_they_were(format, layout, align):
    rows = block_quant.quantize_rows(jnp.asarray(CASES["normal"]), format)
    data = block_quant.fuse_rows(rows, layout=layout, align=align)
    assert data.shape[1] == block_quant.row_bytes(format, 24, align=align)
    assert data.shape[1] % align == 0
    back = block_quant.split_rows(data, format, 24, layout=layout, align=align)
    for name in ("codes", "scales", "biases"):
        assert np.array_equal(np.asarray(getattr(back, name)), np.asarray(getattr(rows, name)))
    if layout == "inference":
        size = rows.scales.dtype.itemsize
        assert np.array_equal(np.asarray(data[:, :size]).view(rows.scales.dtype)[:, 0], np.asarray(rows.scales))


def test_sizes_against_float32():
    sizes = {(f, d): block_quant.row_bytes(f, d) / (4 * d) for f in ("int8", "int4") for d in (32, 64, 72, 128)}
    assert sizes[("int8", 64)] == 0.28125
    assert sizes[("int4", 64)] == 0.140625
    assert round(sizes[("int4", 72)], 4) == 0.1389
    assert sizes[("int4", 32)] == 0.15625
    rows = block_quant.quantize_rows(jnp.ones((10, 64)), "int4")
    assert rows.nbytes == 10 * 36 == rows.codes.nbytes + rows.scales.nbytes + rows.biases.nbytes
    assert [block_quant.row_bytes("int4", 16, align=align) for align in (1, 16)] == [12, 16]  # padding counts


def test_a_range_of_the_encoder_s_epsilon_has_half_of_the_codes():
    rows = block_quant.quantize_rows(jnp.asarray([[0, 1e-8, 5e-9]], jnp.float32), "int8")
    assert rows.codes.tolist() == [[0, 128, 64]]


@pytest.mark.slow
@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_lookup_is_that_of_the_decoded_table_to_the_bit(format, pooling, weighted):
    rng = np.random.default_rng(1)
    rows = block_quant.quantize_rows(jnp.asarray(CASES["normal"]), format)
    lengths = jnp.asarray([3, 0, 20, 1, 6], jnp.int32)
    ids = jnp.asarray(rng.integers(-3, 204, 32), jnp.int32)  # some are no rows, and two slots belong to no bag
    weights = jnp.asarray(rng.normal(size=32).astype(np.float32)) if weighted else None
    found = block_quant.quantized_bag(rows, ids, lengths, weights=weights, pooling=pooling)
    whole = jnp.asarray(
        row_oracle.dequantize(row_oracle.quantize(CASES["normal"], format), format, CASES["normal"].shape[1])
    )
    wanted = embedding_bag.embedding_bag(whole, ids, lengths, weights=weights, pooling=pooling)
    assert np.array_equal(np.asarray(found), np.asarray(wanted))
    jitted = jax.jit(lambda r, i, n, w: block_quant.quantized_bag(r, i, n, weights=w, pooling=pooling))(
        rows, ids, lengths, weights
    )
    assert np.array_equal(np.asarray(jitted), np.asarray(wanted))


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_optimised_programs_have_the_same_bits():
    """LLVM contracts products and sums where it can, but for what is written against it."""
    for format in ("int8", "int4"):
        test_bytes_are_those_of_the_oracle(format)
        test_decoded_numbers_are_those_of_the_oracle(format)
        for weighted in (False, True):
            test_a_lookup_is_that_of_the_decoded_table_to_the_bit(format, "mean", weighted)


KERNEL = {"implementation": "pallas_gpu", "interpret": True}
LOOKUPS = [(f, p, w) for f in ROW_FORMATS for p in ("sum", "mean") for w in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "pooling", "weighted"), LOOKUPS)
def test_the_kernel_of_lookups_decodes_and_sums_in_the_order_of_ids(format, pooling, weighted):
    """In a width that is no power of two; a row with a NaN, ids that are no rows, slots that belong to no bag."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(50, 37)).astype(np.float32)
    table[7, 36] = np.nan
    rows = block_quant.quantize_rows(jnp.asarray(table), format)
    lengths = jnp.asarray(rng.integers(0, 9, 77), jnp.int32)
    ids = jnp.asarray(rng.integers(-2, 53, int(lengths.sum()) + 3), jnp.int32).at[5].set(7)
    options = {"weights": jnp.asarray(rng.normal(size=len(ids)), jnp.float32) if weighted else None, "pooling": pooling}
    wanted = np.asarray(block_quant.quantized_bag(rows, ids, lengths, implementation="reference", **options))
    assert np.isnan(wanted).any()
    found = np.asarray(block_quant.quantized_bag(rows, ids, lengths, **KERNEL, **options))
    # A product may be rounded together with the sum that it goes to: one with a weight; on a GPU one of 32 bits.
    fused = weighted or (compat.platform() == "gpu" and rows.scales.dtype == jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 if fused else 0)


@pytest.mark.slow
def test_the_kernel_of_lookups_takes_ids_of_64_bits(x64):
    rows = block_quant.quantize_rows(jnp.asarray(CASES["normal"]), "int4")
    ids, lengths = jnp.asarray([0, 3, 1, 900, -1]), jnp.asarray([2, 0, 3])
    assert ids.dtype == lengths.dtype == jnp.int64
    found, wanted = (block_quant.quantized_bag(rows, ids, lengths, **how) for how in (KERNEL, {}))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, KERNEL], ids=["xla", "pallas_gpu"])
def test_lookups_without_rows_or_bags(how):
    ids, lengths, nothing = jnp.asarray([0, 1]), jnp.asarray([1, 1]), jnp.zeros(0, jnp.int32)
    none, some = (block_quant.quantize_rows(jnp.ones((count, 4)), "int4") for count in (0, 3))
    for rows, i, n in ((none, ids, lengths), (some, ids, nothing)):
        found = block_quant.quantized_bag(rows, i, n, **how)
        assert found.shape == (len(n), 4)
        assert not np.asarray(found).any()


def test_ids_of_few_bits_do_not_wrap():
    rows = block_quant.quantize_rows(jnp.arange(300.0)[:, None] * jnp.ones((1, 4)), "int4")
    found = block_quant.quantized_bag(rows, jnp.asarray([0, 200], jnp.uint8), jnp.asarray([1, 1], jnp.int8))
    assert np.array_equal(np.asarray(found)[:, 0], [0, 200])


@pytest.mark.slow
def test_long_bags_are_summed_in_float32_and_cast_once():
    table = jnp.full((1, 8), 0.1, jnp.float32)
    rows = block_quant.quantize_rows(table, "int8")
    ids, lengths = jnp.zeros(5000, jnp.int32), jnp.asarray([5000], jnp.int32)
    found = block_quant.quantized_bag(rows, ids, lengths, dtype=jnp.float16)
    assert found.dtype == jnp.float16
    # Sums in float16 would stop at 256, where 0.1 is less than half of an ulp.
    assert np.allclose(np.asarray(found, np.float32), 500, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "int8", "int8_half", "int2"])
def test_the_greedy_range_is_never_worse(format):
    rng = np.random.default_rng(2)
    outliers = rng.normal(size=(300, 40)).astype(np.float32)
    outliers[np.arange(300), rng.integers(0, 40, 300)] *= 6
    heavy = rng.standard_t(3, (1800, 40)).astype(np.float32)  # more rows than are searched together
    table = np.concatenate([outliers, heavy, row_oracle.rows(40)["constant"], np.zeros((1, 40), np.float32)])

    def errors(range):
        rows = block_quant.quantize_rows(jnp.asarray(table), format, range=range)
        return np.square(np.asarray(block_quant.dequantize_rows(rows), np.float64) - table).sum(axis=1)

    naive, greedy = errors("minmax"), errors("greedy")
    assert (greedy <= naive * (1 + 1e-5)).all()  # the search compares errors that were summed in float32
    if format in ("int4", "int2"):
        assert greedy.sum() < 0.9 * naive.sum()


def test_the_greedy_range_keeps_broken_rows_broken_and_small_rows_exact():
    table = np.concatenate([CASES["subnormal"][:4], np.full((1, 24), np.nan, np.float32)])
    found, wanted = fused(table, "int8", range="greedy"), row_oracle.quantize(table, "int8")
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: block_quant.quantize_rows(t, "int3"), "one of int8, int8_half, int4, int2; got 'int3'"),
        (lambda t: block_quant.quantize_rows(t.astype(jnp.int32), "int8"), "got int32[2, 8]"),
        (lambda t: block_quant.quantize_rows(t[0], "int8"), "got float32[8]"),
        (lambda t: block_quant.quantize_rows(t, "int4", range="best"), "one of minmax, greedy; got 'best'"),
        (lambda t: block_quant.split_rows(jnp.zeros((2, 9), jnp.uint8), "int4", 8), "have 8 bytes each"),
        (lambda t: block_quant.fuse_rows(block_quant.quantize_rows(t, "int8"), layout="gpu"), "got 'gpu'"),
        (lambda t: block_quant.fuse_rows(block_quant.quantize_rows(t, "int8"), align=0), "got 0"),
        (
            lambda t: block_quant.fuse_rows(block_quant.quantize_rows_kmeans(t, "kmeans2")),
            "rows must be from quantize_rows; got kmeans2",
        ),
        (
            lambda t: block_quant.quantized_bag(
                block_quant.quantize_rows(t, "int8"),
                jnp.zeros(1, jnp.int32),
                jnp.ones(1, jnp.int32),
                implementation="cuda",
            ),
            "got 'cuda'",
        ),
        (lambda t: block_quant.quantize_rows(t[:, :0], "int8"), "must have a number at least; got [2, 0]"),
        (
            lambda t: block_quant.gather_quantized_rows(block_quant.quantize_rows(t, "int8"), jnp.zeros(2)),
            "ids must be a vector of integers; got float32[2]",
        ),
        (
            lambda t: block_quant.quantized_bag(
                block_quant.quantize_rows(t, "int8"), jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32), pooling="max"
            ),
            "one of sum, mean; got 'max'",
        ),
        (
            lambda t: block_quant.quantized_bag(
                block_quant.quantize_rows(t, "int8"), jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32), dtype=jnp.int8
            ),
            "dtype must be of floating point; got int8",
        ),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(UserError) as error:
        call(jnp.ones((2, 8), jnp.float32))
    assert words in str(error.value)
