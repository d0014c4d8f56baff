"""Lookups in packed rows in lane rows, compiled for every TPU, and the laying out of a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import CodebookRows, QuantizedRows
from scalejax.plan import topology

pytestmark = pytest.mark.aot

ROWS, IDS, BAGS = 2**20, 2**15, 2**10
CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
BITS = {"int8": 8, "int8_half": 8, "int4": 4, "int2": 2, "kmeans4": 4, "kmeans2": 2}
# In the default run of these tests each chip has the first; all of them have rows that fill no whole lane row.
LOOKUPS = [("int4", 72, True), ("int8", 72, False), ("int2", 16, False), ("kmeans4", 64, False)]
MORE = [("int8", 128, True), ("int8_half", 256, False), ("int8", 640, True), ("kmeans2", 130, False)]


def one_chip(name):
    devices = topology.make_mesh(topology.parse(name), None)[0].devices.reshape(-1)
    return Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))


def on(mesh, tree):
    def place(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(place, tree)


def table(format, dim):
    """Of shapes."""
    codes = jax.ShapeDtypeStruct((ROWS, -(-dim * BITS[format] // 8)), jnp.uint8)
    if format in block_quant.CODEBOOK_FORMATS:
        books = jax.ShapeDtypeStruct((ROWS, 1 << BITS[format]), jnp.float16)
        return CodebookRows(codes=codes, books=books, format=format, dim=dim)
    scales = jax.ShapeDtypeStruct((ROWS,), jnp.float32 if format == "int8" else jnp.float16)
    return QuantizedRows(codes=codes, scales=scales, biases=scales, format=format, dim=dim)


@pytest.mark.parametrize(
    ("format", "dim", "weighted", "chip"),
    [*((*case, CHIPS[0]) for case in LOOKUPS + MORE), (*LOOKUPS[0], CHIPS[-1])],
)
def test_lookups_keep_no_decoded_row(chip, format, dim, weighted):
    mesh = one_chip(chip)
    rows = jax.eval_shape(block_quant.pack_lanes, table(format, dim))
    ids, lengths = jax.ShapeDtypeStruct((IDS,), jnp.int32), jax.ShapeDtypeStruct((BAGS,), jnp.int32)
    weights = jax.ShapeDtypeStruct((IDS,), jnp.float32) if weighted else None

    def look_up(rows, ids, lengths, weights):
        # No name: on this platform it is the one that is picked.
        return block_quant.quantized_bag(rows, ids, lengths, weights=weights)

    compiled = cuda_topology.compile_for(mesh, look_up, *on(mesh, (rows, ids, lengths, weights)))
    text = compiled.as_text()
    assert "tpu_custom_call" in text
    assert "quantized_bag" in text
    # Sums, 128 columns at a time, and some numbers an id, 16 at most: an array of rows, one an id, would have
    # 128 lanes each, whatever its width, and the table is larger still.
    columns = -(-dim // 128) * 128
    assert compiled.memory_analysis().temp_size_in_bytes < BAGS * columns * 4 + IDS * 16 * 4 + 2**18
    assert f"f32[{IDS},{dim}]" not in text
    assert f"f32[{IDS},{columns}]" not in text
    assert f"s32[{IDS},128]" not in text


@pytest.mark.parametrize(("format", "chip"), [("kmeans4", CHIPS[0]), *(("int4", chip) for chip in CHIPS[::3])])
def test_laying_a_table_out_takes_memory_of_the_order_of_the_table(chip, format):
    mesh = one_chip(chip)
    compiled = cuda_topology.compile_for(mesh, block_quant.pack_lanes, *on(mesh, (table(format, 72),)))
    memory = compiled.memory_analysis()
    # Arrays of a few words a row are padded to lane rows of 128, which for all rows at a time would be 40 tables.
    assert memory.temp_size_in_bytes < 4 * memory.argument_size_in_bytes
