"""Operands quantized and decoded by the Triton kernels, interpreted: the bits of XLA, and where compilers take them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scalejax import compat
from scalejax.numerics import formats, packing
from scalejax.numerics import quantize as numerics
from scalejax.numerics.quantized.products import mx_dot_general
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.compression import packed_blocks

THREE = QuantizationRule(weight_qtype="bdr_mx9", act_qtype="mxfp4_e2m1", bwd_qtype="mxfp8_e5m2", tail="pad")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What is compiled is for a GPU, as far as kernels are chosen by it, and kernels are interpreted."""
    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, interpret, **rest: call(*args, interpret=True, **rest))
    monkeypatch.setattr(compat, "platform", lambda: "gpu")
    monkeypatch.setattr(packed_blocks, "unpartitioned", lambda x: True)
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_and_their_gradients_have_the_same_bits(as_on_a_gpu, dtype):
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((48, 80), (80, 64), (48, 64)))

    def run(quantizer, x, w, g):
        product = functools.partial(mx_dot_general, rule=THREE, quantizer=quantizer)
        y, pull = jax.vjp(lambda x, w: product(x, w, (((1,), (0,)), ((), ()))), x, w)
        return y, *pull(g)

    ours, theirs = (jax.jit(functools.partial(run, q)) for q in (packed_blocks.quantize, numerics.quantize))
    assert "mx_quantize" in str(ours.trace(x, w, g).jaxpr)
    assert "mx_" not in str(theirs.trace(x, w, g).jaxpr)
    jax.tree.map(np.testing.assert_array_equal, ours(x, w, g), theirs(x, w, g))


@pytest.mark.slow
def test_packed_weights_decode_to_the_same_bits(as_on_a_gpu):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 64)), jnp.float32)
    for name in ("mxfp6_e2m3", "nvfp4"):
        quantized = numerics.quantize(x, name, axis=-1)
        decoded = packed_blocks.dequantize(packing.pack(quantized), jnp.bfloat16)
        np.testing.assert_array_equal(decoded, numerics.dequantize(quantized, jnp.bfloat16))


def gpus(*shape):
    names = ("data", "fsdp")[: len(shape)]
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    return AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), abstract_device=device)


def kernels(mesh, format="mxfp8_e4m3", *, manual=None):
    """Names of the kernels that quantize an array of 1,024 numbers for a mesh, and decode it."""

    def there_and_back(x):
        held = packed_blocks.quantize(x, formats.find(format), axis=-1, scale_rule=None, tail="refuse")
        return held.decode(x.dtype) if isinstance(held, packed_blocks.PackedBlocks) else numerics.dequantize(held)

    function = there_and_back
    if manual is not None:
        function = jax.shard_map(
            there_and_back, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=set(manual), check_vma=False
        )
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((1, 1024), jnp.float32)))
    return set(re.findall(r"name=(mx_\w+)", text))


BOTH = {"mx_quantize", "mx_dequantize"}


@pytest.mark.parametrize(
    ("mesh", "manual", "expected"),
    [
        (gpus(), None, BOTH),
        (gpus(1), None, BOTH),
        (gpus(8), None, set()),
        (gpus(2, 4), ("data", "fsdp"), BOTH),
        (gpus(2, 4), ("fsdp",), set()),
    ],
    ids=["no axes", "one", "eight", "all manual", "some manual"],
)
def test_kernels_are_taken_where_no_compiler_would_have_to_partition_them(mesh, manual, expected):
    assert kernels(mesh, manual=manual) == expected


def test_a_format_in_which_xla_is_faster_stays_with_it():
    assert kernels(gpus(1), "nvfp4") == set()


def test_a_cpu_stays_with_xla():
    made = packed_blocks.quantize(jnp.ones((1, 32)), formats.find("mxfp8_e4m3"), axis=-1, scale_rule=None, tail="pad")
    assert isinstance(made, numerics.Quantized)
