"""Packed rows in lane rows, and the TPU's kernel of lookups in them under interpret mode. Oracles: bytes that were
put together one by one in NumPy, and lookups in the decoded table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bag_cases import CASES, Case
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.errors import UnsupportedError
from scalejax.inference.recommendation import click_model
from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import CODEBOOK_FORMATS, ROW_FORMATS, LaneRows, pallas_tpu
from scalejax.parallel.embedding.config import TableConfig

WAIT = pltpu.InterpretParams()  # copies happen when they are waited for; unwritten memory is NaN
EAGER = pltpu.InterpretParams(dma_execution_mode="eager")


@pytest.fixture(autouse=True)
def _strict(strict_promotion):
    yield
    pltpu.reset_tpu_interpret_mode_state()


@functools.cache
def usual():
    """Rows that fill 3 lane rows and leave room in the last; row 7 is not finite."""
    table = normal(45, 72)
    table[7, 3] = np.nan
    return quantized(table, "int4")


def quantized(table, format):
    """Codebooks are any: looking for those of wide rows takes minutes."""
    if format not in CODEBOOK_FORMATS:
        return block_quant.quantize_rows(jnp.asarray(table), format)
    (count, dim), bits, rng = table.shape, {"kmeans4": 4, "kmeans2": 2}[format], np.random.default_rng(0)
    books = np.sort(rng.normal(size=(count, 1 << bits)).astype(np.float16), axis=1)
    books[np.isnan(table).any(axis=1)] = np.nan
    codes = rng.integers(0, 256, (count, -(-dim * bits // 8)), np.uint8)
    return block_quant.CodebookRows(codes=jnp.asarray(codes), books=jnp.asarray(books), format=format, dim=dim)


def normal(count, dim):
    return np.random.default_rng(dim).normal(size=(count, dim)).astype(np.float32)


def literal_lane_rows(rows):
    """int32[lane rows, width] of rows, byte by byte."""
    records = []
    for number in range(rows.codes.shape[0]):
        codes = np.asarray(rows.codes[number]).tobytes()
        records.append(codes + bytes(-len(codes) % 4))
    if rows.format in CODEBOOK_FORMATS:
        books = [np.asarray(book).tobytes() for book in rows.books]
        if len(records[0]) + len(books[0]) > 512:
            records = [codes + bytes(-len(codes) % 512) for codes in records]
        records = [codes + book for codes, book in zip(records, books, strict=True)]
    size = len(records[0])
    together = max(1, 512 // size)
    lane_rows = [b"".join(records[i : i + together]) for i in range(0, len(records), together)]
    width = -(-size // 512) * 512
    return np.frombuffer(b"".join(lane_row + bytes(width - len(lane_row)) for lane_row in lane_rows), "<i4").reshape(
        -1, width // 4
    )


# (format, D): words that fill lane rows and words that do not, rows of exactly a lane row, and of more.
SHAPES = [("int4", 72), ("int8", 12), ("int2", 16), ("int2", 3), ("int8", 516), ("kmeans2", 16), ("kmeans4", 970)]


@pytest.mark.parametrize(
    ("format", "dim"),
    [shape if shape == SHAPES[0] else pytest.param(*shape, marks=pytest.mark.slow) for shape in SHAPES]
    + [pytest.param(f, d, marks=pytest.mark.slow) for f in ROW_FORMATS for d in (64, 128, 256)],
)
def test_lane_rows_hold_the_bytes_of_the_rows_in_their_order(format, dim):
    rows = usual() if (format, dim) == SHAPES[0] else quantized(normal(45, dim), format)
    packed = block_quant.pack_lanes(rows)
    assert np.array_equal(np.asarray(packed.lane_rows), literal_lane_rows(rows))
    for ours, theirs in zip(jax.tree.leaves(block_quant.unpack_lanes(packed)), jax.tree.leaves(rows), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    leaves = [packed.lane_rows] if format in CODEBOOK_FORMATS else [packed.lane_rows, packed.scales, packed.biases]
    assert packed.nbytes == sum(np.asarray(leaf).nbytes for leaf in leaves)


@pytest.mark.parametrize(
    ("format", "dim", "size"),
    [
        ("int8", 64, 72),
        ("int8", 72, 512 / 7 + 8),
        ("int8", 128, 136),
        ("int8", 256, 264),
        ("int8", 640, 1024 + 8),
        ("int4", 16, 12),
        ("int4", 72, 512 / 14 + 4),
        ("int4", 128, 68),
        ("int2", 16, 8),
    ],
)
def test_bytes_of_a_row_are_those_that_are_documented(format, dim, size):
    count = 128 * 7 * 3  # fills whole lane rows in all of these
    kind = jnp.float32 if format == "int8" else jnp.float16
    bits = {"int8": 8, "int4": 4, "int2": 2}[format]
    shapes = jax.ShapeDtypeStruct((count, dim * bits // 8), jnp.uint8), jax.ShapeDtypeStruct((count,), kind)
    rows = block_quant.QuantizedRows(codes=shapes[0], scales=shapes[1], biases=shapes[1], format=format, dim=dim)
    assert jax.eval_shape(block_quant.pack_lanes, rows).nbytes == count * size


def assert_lookup(rows, case, weights, pooling, interpret):
    packed = block_quant.pack_lanes(rows)
    arguments = (jnp.asarray(case.ids), jnp.asarray(case.lengths))
    options = {"weights": None if weights is None else jnp.asarray(weights), "pooling": pooling}
    found = block_quant.quantized_bag(packed, *arguments, **options, implementation="pallas_tpu", interpret=interpret)
    wanted = block_quant.quantized_bag(rows, *arguments, **options, implementation="reference")
    np.testing.assert_array_equal(found, wanted)
    return np.asarray(found)


def powers(case):
    """Weights of both signs and zeros whose products are exact: with others, a product and the sum that it goes to may
    be rounded together."""
    weights = case.weights()
    return np.where(weights == 0, 0, np.copysign(2.0 ** np.round(weights), weights)).astype(np.float32)


LOOKUPS = [(f, d) for i, f in enumerate(ROW_FORMATS) for d in ((16, 128), (64, 256), (72, 128))[i % 3]] + [
    ("int8", 640), ("int4", 37), ("kmeans4", 64), ("kmeans2", 130), ("kmeans4", 970),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "dim", "interpret"),
    [("int4", 72, WAIT), *((*case, True) for case in LOOKUPS)],
)
def test_a_lookup_is_that_of_the_decoded_table_to_the_bit(format, dim, interpret):
    """Empty bags, ids at both ends and twice, ids that are no rows, a row with a NaN."""
    case = Case(
        45,
        np.array([44, 0, -1, 0, 0, 45, 3, -(2**31), 7, 2**31 - 1], np.int32),
        np.array([2, 0, 5, 0, 2], np.int32),  # the last id is of no bag
    )
    rows = usual()
    if (format, dim) != ("int4", 72):
        table = normal(45, dim)
        table[7, dim - 1] = np.nan
        rows = quantized(table, format)
    found = assert_lookup(rows, case, powers(case), "mean", interpret)
    assert np.isnan(found).any(axis=1).tolist() == [False, False, False, False, True]
    assert not found[[1, 3]].any()
    if interpret is True:
        assert_lookup(rows, case, None, "sum", interpret)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_batches_that_are_easily_got_wrong(name):
    case = CASES[name]
    rows = quantized(case.table(20), "int8")
    assert_lookup(rows, case, None, "sum", True)
    assert_lookup(rows, case, powers(case), "mean", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "interpret"), [("empty bags", EAGER), ("large pooling", WAIT), ("large pooling", EAGER)]
)
def test_lookups_on_a_simulated_chip(name, interpret):
    """More ids than copies are in flight at a time."""
    case = CASES[name]
    assert_lookup(quantized(case.table(24), "int2"), case, None, "sum", interpret)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "kmeans2"])
def test_every_platform_looks_rows_up_in_lane_rows(format):
    """To the bit; ids that are no rows and a row with a NaN among them."""
    rows = usual() if format == "int4" else quantized(normal(45, 20), format)
    packed = block_quant.pack_lanes(rows)
    ids, lengths = jnp.asarray([44, -1, 0, 45, 7, 0, 0], jnp.int32), jnp.asarray([2, 0, 2, 1, 2], jnp.int32)
    wanted = np.asarray(block_quant.quantized_bag(rows, ids, lengths))
    for implementation in (None, "xla", "reference"):
        found = block_quant.quantized_bag(packed, ids, lengths, implementation=implementation)
        assert np.array_equal(np.asarray(found), wanted, equal_nan=True)


def test_a_click_model_takes_tables_in_lane_rows():
    """Bags, and a fixed number of ids for each example."""
    config = TableConfig(name="t", rows=45, dim=72, features=("bags", "pairs"))
    ids = {"bags": jnp.asarray([3, 19, 0, 5], jnp.int32), "pairs": jnp.asarray([[1, 2], [19, 0]], jnp.int32)}
    inputs = click_model.Inputs(ids, {"bags": jnp.asarray([1, 2], jnp.int32)}, jnp.zeros((2, 1)))
    embed = jax.jit(lambda table: click_model.embed((config,), {"t": table}, inputs))
    wanted, found = embed(usual()), embed(block_quant.pack_lanes(usual()))
    for feature in ids:
        assert np.array_equal(np.asarray(found[feature]), np.asarray(wanted[feature]))


@pytest.mark.parametrize("implementation", ["pallas_tpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_lookups_without_rows_or_bags(implementation):
    def table(count):
        lane_rows, scales = jnp.zeros((count, 128), jnp.int32), jnp.ones(count, jnp.float16)
        return LaneRows(lane_rows=lane_rows, scales=scales, biases=scales, format="int8_half", dim=512, num_rows=count)

    ids, nothing = jnp.asarray([0, 1]), jnp.zeros(0, jnp.int32)
    for rows, i, n in ((table(0), ids, ids), (table(3), ids, nothing), (table(3), nothing, ids)):
        found = block_quant.quantized_bag(rows, i, n, implementation=implementation)
        assert found.shape == (len(n), 512)
        assert not np.asarray(found).any()


def test_none_picks_the_kernel_for_lane_rows_on_a_tpu_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(pallas_tpu, "bag", lambda *_: taken.append(True) or jnp.zeros((1, 72)))
    rows = usual()
    packed, call = block_quant.pack_lanes(rows), (jnp.asarray([1]), jnp.asarray([1]))
    block_quant.quantized_bag(packed, *call)
    assert not taken
    monkeypatch.setattr(compat, "platform", lambda: "tpu")
    block_quant.quantized_bag(rows, *call)
    block_quant.quantized_bag(packed, *call, implementation="xla")
    assert not taken
    block_quant.quantized_bag(packed, *call)
    assert len(taken) == 1
    # More bags than it takes.
    monkeypatch.setattr(pallas_tpu, "most_bags", lambda dim: 0)
    block_quant.quantized_bag(packed, *call)
    assert len(taken) == 1
    with pytest.raises(UnsupportedError, match="at most 0 bags of width 72 at once; got 1"):
        block_quant.quantized_bag(packed, *call, implementation="pallas_tpu")


@pytest.mark.parametrize(
    ("implementation", "pack", "words"),
    [
        ("pallas_tpu", lambda rows: rows, "takes LaneRows; got QuantizedRows"),
        ("pallas_gpu", block_quant.pack_lanes, "has no lanes; got rows in int4"),
    ],
)
def test_rows_of_another_layout_are_refused_by_name(implementation, pack, words):
    rows: LaneRows = pack(usual())
    with pytest.raises(UnsupportedError, match=words):
        block_quant.quantized_bag(rows, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), implementation=implementation)


@pytest.mark.slow
def test_codebooks_that_rows_share_are_refused():
    scalar = jnp.zeros((1, 4), jnp.float16)
    shared: Any = block_quant.SharedCodebookRows(
        codes=scalar, codebook_ids=scalar, books=scalar, format="kmeans2_shared", dim=4
    )
    with pytest.raises(UnsupportedError, match="got SharedCodebookRows"):
        block_quant.pack_lanes(shared)
