"""Packed blocks compiled for every chip: quantizing and decoding along both kinds of axes, and products."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels import mx
from scalejax.numerics.formats import FORMATS
from scalejax.numerics.packing import Packed
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
NAMES = [name for name, format in FORMATS.items() if format.scale != "float32"]
FORMS = {
    **{f"{name}, last axis": (name, 1, (512, 2048), jnp.bfloat16) for name in NAMES},
    **{f"{name}, first axis": (name, 0, (2048, 512), jnp.float32) for name in NAMES},
    "columns that fill no tile": ("mxfp8_e5m2", 0, (4096, 1000), jnp.float32),
    "rows that fill no tile": ("mxfp6_e2m3", 1, (300, 5120), jnp.bfloat16),
    "few rows": ("mxfp4_e2m1", 1, (8, 4096), jnp.bfloat16),
    "float16": ("mxfp4_e2m1", 0, (4096, 512), jnp.float16),
    "a tail": ("mxfp8_e4m3", 1, (100, 1000), jnp.float32),
}
PRODUCTS = {
    **{f"{name}, last axis": (name, 1, (8, 2048, 512), jnp.bfloat16) for name in NAMES},
    **{f"{name}, first axis": (name, 0, (8, 2048, 512), jnp.bfloat16) for name in NAMES},
    "one row": ("mxfp8_e4m3", 0, (1, 4096, 4096), jnp.bfloat16),
    "columns that fill no tile": ("mxfp8_e5m2", 1, (8, 8192, 1000), jnp.bfloat16),
    "float32": ("mxfp6_e2m3", 1, (64, 4096, 512), jnp.float32),
    "many rows": ("mxfp4_e2m1", 0, (1024, 4096, 2048), jnp.bfloat16),
}
ONE = "mxfp6_e2m3, last axis"
"""What is compiled for every chip."""

FLOAT4 = "f4_e2m1fn"
"""As jax prints the dtype."""


def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def tpu(name):
    found = topology.make_mesh(topology.parse(name), None)[0].devices.reshape(-1)[:1]
    return Mesh(found, ("x",), axis_types=(AxisType.Auto,))


def compiled(mesh, function, *shapes):
    """The text of a program, which has no floats of 4 bits where the chip has none."""
    if "TPU7x" not in mesh.devices.flat[0].device_kind:
        assert FLOAT4 not in str(jax.make_jaxpr(function)(*shapes))
    place = NamedSharding(mesh, P())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    return cuda_topology.compile_for(mesh, function, *placed).as_text()


def packed(name, shape, axis) -> Packed:
    """Of shapes; by XLA, which needs no chip."""
    make = jax.eval_shape(
        lambda x: mx.quantize_blocks(x, name, axis=axis, tail="pad", implementation="xla"),
        like(shape, jnp.float32),
    )
    assert dataclasses.is_dataclass(make)
    return make


def blocks_compile(mesh, implementation, form, mark):
    name, axis, shape, dtype = FORMS[form]
    x = like(shape, dtype)

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

    assert mark in compiled(mesh, multiply, like((rows, depth), dtype), weights)


def in_turn(forms):
    """Formats along their last and their first axis in turn, and what is special."""
    count = len(NAMES)
    return [form for n, form in enumerate(forms) if n >= 2 * count or (n // count + n) % 2 == 0]


def on_chips(forms):
    """For v5e, which has the fewest instructions; one for every chip, and FP4 for v7x, which alone has it."""
    fours = [form for form in forms if form.startswith(("mxfp4_e2m1, ", "nvfp4, "))]
    chosen = [form for form in forms if form in in_turn(forms) or form in fours]
    return (
        [(form, CHIPS[0]) for form in chosen] + [(ONE, chip) for chip in CHIPS] + [(form, CHIPS[-1]) for form in fours]
    )


TPU = 'custom_call_target="tpu_custom_call"'


@pytest.mark.parametrize(("form", "chip"), on_chips(FORMS))
def test_blocks_compile_for_a_tpu(form, chip):
    blocks_compile(tpu(chip), "pallas_tpu", form, TPU)


@pytest.mark.parametrize(("product", "chip"), on_chips(PRODUCTS))
def test_products_compile_for_a_tpu(product, chip):
    product_compiles(tpu(chip), "pallas_tpu", product, TPU)


@pytest.mark.parametrize("form", [form for form, (name, *_) in FORMS.items() if name in ("mxfp4_e2m1", "nvfp4")])
def test_xla_s_programs_have_no_floats_of_4_bits(form):
    name, axis, shape, dtype = FORMS[form]
    for function, given in (
        (lambda x: mx.quantize_blocks(x, name, axis=axis, tail="pad", implementation="xla"), like(shape, dtype)),
        (lambda p: mx.dequantize_blocks(p, dtype, implementation="xla"), packed(name, shape, axis)),
    ):
        assert FLOAT4 not in str(jax.make_jaxpr(function)(given))


def test_a_float_of_4_bits_would_be_seen():
    assert FLOAT4 in str(jax.make_jaxpr(lambda x: x.astype(jnp.float4_e2m1fn))(like((8,), jnp.float32)))


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", in_turn(FORMS))
def test_blocks_compile_in_turn(form):
    blocks_compile(cuda_topology.mesh(1), "pallas_gpu", form, "mx_")


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("product", in_turn(PRODUCTS))
def test_products_compile_in_turn(product):
    product_compiles(cuda_topology.mesh(1), "pallas_gpu", product, "mx_matmul")
