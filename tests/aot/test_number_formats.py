"""The arithmetic of number formats, compiled for every TPU: whole arrays by XLA, and a tile inside a Pallas kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding

from scalejax.numerics import blocks, formats
from scalejax.numerics.quantize import cast
from scalejax.parallel import mesh as meshes
from scalejax.plan import topology

pytestmark = pytest.mark.aot

NAMES = ["bdr_mx9", "mxfp8_e4m3", "mxfp4_e2m1", "fp8_e4m3", "vsq4", "nvfp4"]
COLUMNS = 512
CASES = [*((name, "v5e:2x2") for name in NAMES), *(("nvfp4", chip) for chip in ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"))]
"""A v5e has the fewest kinds of instructions; NVFP4 has scales of scales."""


def on(chip: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.MeshShape())
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(mesh.devices.flat[0]))


@pytest.mark.parametrize(("name", "chip"), CASES)
def test_whole_arrays(name, chip):
    jax.jit(lambda x: cast(x, name, axis=1)).lower(on(chip, (256, 1024))).compile()


@pytest.mark.parametrize(
    ("name", "chip", "rounding"),
    [
        *((*case, "ties_to_even") for case in CASES),
        *((name, CASES[0][1], "stochastic") for name in ("bdr_mx9", "mxfp4_e2m1", "nvfp4")),
    ],
)
def test_a_tile_in_a_kernel(name, chip, rounding):
    """Quantizes and dequantizes blocks along sublanes, from the functions that whole arrays use."""
    format = formats.find(name)
    if format.k1 > 32:
        format = dataclasses.replace(format, k1=32, k2=32 if format.sub_scale == "none" else format.k2)
    apart = (format.k1 // format.k2, format.k2, COLUMNS)

    def kernel(x, out):
        tile = x[...]
        g = jnp.ones((1, 1, 1), jnp.float32) if format.scale == "e4m3" else None
        encoded = blocks.encode_blocks(
            lax.bitcast_convert_type(tile, jnp.int32).reshape(apart),
            format,
            axis=0,
            rule="rceil" if format.scale == "exponent" else None,
            rounding=rounding,
            chance=lax.bitcast_convert_type(tile, jnp.uint32).reshape(apart) if rounding == "stochastic" else None,
            tensor_scale=g,
        )
        out[...] = lax.bitcast_convert_type(blocks.decode_blocks(encoded, format, g), jnp.float32).reshape(tile.shape)

    spec = pl.BlockSpec((format.k1, COLUMNS), lambda i: (0, i))
    call = pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((format.k1, 2 * COLUMNS), jnp.float32),
    )
    jax.jit(call).lower(on(chip, (format.k1, 2 * COLUMNS))).compile()
