"""Products in number formats for machines that are not here: FP8 by the library on Hopper, emulated ones on TPUs."""

import re

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from scalejax.numerics.products import mx_dot_general
from scalejax.numerics.rules import QuantizationRule
from scalejax.parallel import mesh as meshes
from scalejax.plan import topology

pytestmark = pytest.mark.aot

FP8 = {"weight_qtype": "fp8_e4m3", "act_qtype": "fp8_e4m3", "bwd_qtype": "fp8_e5m2", "implementation": "native"}


def three_products(rule):
    def run(x, w, g):
        y, pull = jax.vjp(lambda x, w: mx_dot_general(x, w, (((1,), (0,)), ((), ())), rule=rule), x, w)
        return y, *pull(g)

    return run


def arguments(sharding):
    return [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in ((512, 1024), (1024, 256), (512, 256))
    ]


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("scales", ["tensor", "rows"])
def test_native_products_are_library_calls_on_hopper(scales):
    """The three of them. Without a device XLA cannot time its own kernels against the library, so these are off."""
    where = cuda_topology.mesh(1)
    compiled = cuda_topology.compile_for(
        where,
        three_products(QuantizationRule(scales=scales, **FP8)),
        *arguments(NamedSharding(where, P())),
        compiler_options={"xla_gpu_enable_triton_gemm": False},
    )
    targets = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())
    assert targets == ["__cublas$lt$matmul$f8"] * 3


@cuda_topology.needs_cuda_compiler
def test_kernels_that_xla_makes_itself_take_float8_too():
    where = cuda_topology.mesh(1)
    rule = QuantizationRule(scales="tensor", **FP8)
    text = cuda_topology.compile_for(where, three_products(rule), *arguments(NamedSharding(where, P()))).as_text()
    headers = re.findall(r"^%gemm_fusion\S* \(parameter_\S+: (\w+)\[[^)]*parameter_\S+: (\w+)\[", text, re.MULTILINE)
    found = sorted(headers) or sorted(re.findall(r"custom_call_target=\"(__cublas\$lt\$matmul\$f8)\"", text))
    assert len(found) == 3


@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", ["bdr_mx9", "native"])
def test_tpus_compile_them(chip, name):
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.MeshShape())
    emulated = QuantizationRule(weight_qtype=name, act_qtype=name, bwd_qtype=name) if name != "native" else None
    rule = emulated or QuantizationRule(scales="tensor", **FP8)
    where = SingleDeviceSharding(mesh.devices.flat[0])
    jax.jit(three_products(rule)).lower(*arguments(where)).compile()
