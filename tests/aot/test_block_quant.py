"""Row-wise quantization, lookups in packed rows and products of 8-bit integers, compiled for every TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import QuantizedRows, dense
from scalejax.parallel import mesh as meshes
from scalejax.plan import topology

pytestmark = pytest.mark.aot

CHIPS = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("v5p:2x2x1", "v6e:2x2")), "v5e:2x2", "tpu7x:2x2x1"]


def place(chip):
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.MeshShape())
    sharding = SingleDeviceSharding(mesh.devices.flat[0])
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("chip", CHIPS)
def test_rows(chip, format):
    on = place(chip)
    kind = jnp.float32 if format == "int8" else jnp.float16
    codes = on((4096, 128 if format == "int8" else 64), jnp.uint8)
    rows = QuantizedRows(codes=codes, scales=on((4096,), kind), biases=on((4096,), kind), format=format, dim=128)
    jax.jit(lambda x: block_quant.quantize_rows(x, format)).lower(on((4096, 128), jnp.float32)).compile()
    bag = jax.jit(block_quant.quantized_bag).lower(rows, on((2048,), jnp.int32), on((256,), jnp.int32)).compile()
    # Only what is looked up is decoded: the whole table in float32 would take 2 MiB.
    assert bag.memory_analysis().temp_size_in_bytes < 2 * 2048 * 128 * 4 + 2**20


@pytest.mark.parametrize("chip", CHIPS)
def test_products_of_integers(chip):
    on = place(chip)
    weight = dense.Int8Weight(
        codes=on((512, 256), jnp.int8), scales=on((256,), jnp.float32), sums=on((256,), jnp.int32)
    )
    compiled = jax.jit(dense.int8_matmul).lower(on((1024, 512), jnp.float32), weight).compile()
    assert "s8[" in compiled.as_text()
