"""Row-wise quantization, lookups in packed rows and products of 8-bit integers, compiled for every TPU."""

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import QuantizedRows, dense
from scalejax.parallel import mesh as meshes
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def place(chip):
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.MeshShape())
    sharding = SingleDeviceSharding(mesh.devices.flat[0])
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def table(on, format, count=4096, dim=128) -> QuantizedRows:
    """Of shapes."""
    kind = jnp.float32 if format == "int8" else jnp.float16
    codes = on((count, block_quant.row_bytes(format, dim) - 2 * jnp.dtype(kind).itemsize), jnp.uint8)
    return QuantizedRows(codes=codes, scales=on((count,), kind), biases=on((count,), kind), format=format, dim=dim)


@pytest.mark.parametrize(
    ("chip", "format"),
    [
        *(("v5e:2x2", format) for format in ("int8", "int8_half", "int4", "int2")),
        *((chip, "int4") for chip in ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")),
    ],
)
def test_rows(chip, format):
    on = place(chip)
    rows = table(on, format)
    jax.jit(lambda x: block_quant.quantize_rows(x, format)).lower(on((4096, 128), jnp.float32)).compile()
    bag = jax.jit(block_quant.quantized_bag).lower(rows, on((2048,), jnp.int32), on((256,), jnp.int32)).compile()
    # Only what is looked up is decoded: the whole table in float32 would take 2 MiB.
    assert bag.memory_analysis().temp_size_in_bytes < 2 * 2048 * 128 * 4 + 2**20


@pytest.mark.parametrize("chip", ["v5e:2x2", "tpu7x:2x2x1"])
def test_products_of_integers(chip):
    on = place(chip)
    weight = dense.Int8Weight(
        codes=on((512, 256), jnp.int8), scales=on((256,), jnp.float32), sums=on((256,), jnp.int32)
    )
    compiled = jax.jit(dense.int8_matmul).lower(on((1024, 512), jnp.float32), weight).compile()
    assert "s8[" in compiled.as_text()


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("format", ["int8", "int8_half", "int4", "int2"])
@pytest.mark.parametrize("dim", [128, 37])
def test_the_kernel_of_lookups_for_hopper(dim, format, weighted):
    mesh = cuda_topology.mesh(1)

    def on(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def look_up(rows, ids, lengths, weights):
        return block_quant.quantized_bag(rows, ids, lengths, weights=weights, implementation="pallas_gpu")

    weights = on((2048,), jnp.float32) if weighted else None
    arguments = (table(on, format, dim=dim), on((2048,), jnp.int32), on((256,), jnp.int32), weights)
    compiled = cuda_topology.compile_for(mesh, look_up, *arguments)
    assert "quantized_bag" in compiled.as_text()
    # No decoded row is kept: all of them in float32 would take N * D * 4 bytes.
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * dim
