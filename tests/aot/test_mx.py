"""Packed blocks compiled for every chip: quantizing and decoding along both kinds of axes, and products."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels import mx
from scalejax.numerics.packing import Packed
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
FORMS = {
    "mxfp8_e4m3, last axis": ("mxfp8_e4m3", 1, (512, 8192), jnp.bfloat16),
    "mxfp8_e5m2, first axis": ("mxfp8_e5m2", 0, (4096, 1000), jnp.float32),
    "mxfp6_e2m3, last axis": ("mxfp6_e2m3", 1, (300, 5120), jnp.bfloat16),
    "mxfp6_e3m2, first axis": ("mxfp6_e3m2", 0, (2080, 512), jnp.bfloat16),
    "mxfp4_e2m1, last axis": ("mxfp4_e2m1", 1, (8, 4096), jnp.bfloat16),
    "mxfp4_e2m1, first axis": ("mxfp4_e2m1", 0, (4096, 512), jnp.float16),
    "mxint8, last axis": ("mxint8", 1, (256, 4096), jnp.float32),
    "nvfp4, first axis": ("nvfp4", 0, (1024, 256), jnp.float32),
    "bdr_mx9, last axis": ("bdr_mx9", 1, (256, 4096), jnp.bfloat16),
    "bdr_mx6, first axis": ("bdr_mx6", 0, (4096, 512), jnp.float32),
    "bdr_mx4, last axis": ("bdr_mx4", 1, (256, 4096), jnp.float32),
    "a tail": ("mxfp8_e4m3", 1, (100, 1000), jnp.float32),
}
PRODUCTS = {
    "mxfp8_e4m3, one row": ("mxfp8_e4m3", 0, (1, 4096, 4096), jnp.bfloat16),
    "mxfp8_e5m2, eight rows": ("mxfp8_e5m2", 1, (8, 8192, 1000), jnp.bfloat16),
    "mxfp6_e2m3, float32": ("mxfp6_e2m3", 1, (64, 4096, 512), jnp.float32),
    "mxfp4_e2m1, one row": ("mxfp4_e2m1", 1, (1, 4096, 4096), jnp.bfloat16),
    "mxfp4_e2m1, many rows": ("mxfp4_e2m1", 0, (1024, 4096, 2048), jnp.bfloat16),
    "nvfp4": ("nvfp4", 0, (8, 4096, 1024), jnp.bfloat16),
    "bdr_mx9": ("bdr_mx9", 0, (8, 4096, 1024), jnp.bfloat16),
    "bdr_mx6": ("bdr_mx6", 1, (8, 5120, 1024), jnp.bfloat16),
    "bdr_mx4": ("bdr_mx4", 0, (8, 4096, 1024), jnp.bfloat16),
}


def tpu(name):
    found = topology.make_mesh(topology.parse(name), None)[0].devices.reshape(-1)[:1]
    return Mesh(found, ("x",), axis_types=(AxisType.Auto,))


def compiled(mesh, function, *shapes):
    place = NamedSharding(mesh, P())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    return cuda_topology.compile_for(mesh, function, *placed).as_text()


def packed(name, shape, axis) -> Packed:
    """Of shapes; by XLA, which needs no chip."""
    make = jax.eval_shape(
        lambda x: mx.quantize_blocks(x, name, axis=axis, tail="pad", implementation="xla"),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    assert dataclasses.is_dataclass(make)
    return make


def blocks_compile(mesh, implementation, form, mark):
    name, axis, shape, dtype = FORMS[form]
    x = jax.ShapeDtypeStruct(shape, dtype)

    def quantize(x):
        return mx.quantize_blocks(x, name, axis=axis, tail="pad", implementation=implementation)

    def dequantize(p):
        return mx.dequantize_blocks(p, dtype, implementation=implementation)

    assert compiled(mesh, quantize, x).count(mark) >= 1
    assert compiled(mesh, dequantize, packed(name, shape, axis)).count(mark) >= 1


def product_compiles(mesh, implementation, product, mark):
    name, axis, (rows, depth, columns), dtype = PRODUCTS[product]
    weights = packed(name, (depth, columns) if axis == 0 else (columns, depth), axis)

    def multiply(x, weights):
        return mx.matmul(x, weights, implementation=implementation)

    assert mark in compiled(mesh, multiply, jax.ShapeDtypeStruct((rows, depth), dtype), weights)


def slow_but(one, cases):
    """The cases, all of them slow but one."""
    return [case if case == one else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


TPU = 'custom_call_target="tpu_custom_call"'

# Each form for one chip, one with 6-bit codes for every chip; by default that one for one chip alone.
EVERYWHERE = "mxfp6_e2m3, last axis"
COVERED = [(form, name) for n, form in enumerate(FORMS) for name in (CHIPS if form == EVERYWHERE else [CHIPS[n % 4]])]


@pytest.mark.parametrize(("form", "name"), slow_but((EVERYWHERE, "v6e:2x2"), COVERED))
def test_blocks_compile_for_a_tpu(form, name):
    blocks_compile(tpu(name), "pallas_tpu", form, TPU)


EVERY_PRODUCT = "mxfp4_e2m1, one row"
PRODUCTS_COVERED = [
    (form, name) for n, form in enumerate(PRODUCTS) for name in (CHIPS if form == EVERY_PRODUCT else [CHIPS[n % 4]])
]


@pytest.mark.parametrize(("product", "name"), slow_but((EVERY_PRODUCT, "v6e:2x2"), PRODUCTS_COVERED))
def test_products_compile_for_a_tpu(product, name):
    product_compiles(tpu(name), "pallas_tpu", product, TPU)


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", FORMS)
def test_blocks_compile_for_hopper(form):
    blocks_compile(cuda_topology.mesh(1), "pallas_gpu", form, "mx_")


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_compile_for_hopper(product):
    product_compiles(cuda_topology.mesh(1), "pallas_gpu", product, "mx_matmul")
