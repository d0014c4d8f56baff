"""Products in number formats for machines that are not here: FP8 by the library on Hopper, emulated ones on TPUs."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from scalejax.numerics.quantized.products import mx_dot_general
from scalejax.numerics.quantized.rules import QuantizationRule
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


def on_hopper(products, **compiler_options):
    where = cuda_topology.mesh(1)
    given = arguments(NamedSharding(where, P()))
    return cuda_topology.compile_for(where, products, *given, compiler_options=compiler_options).as_text()


@pytest.fixture(scope="module")
def counted():
    """What `benchmarks/gpu_fp8.py` asks of a program before it times it."""
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_fp8.py"
    if not script.exists():
        pytest.skip("runs in a checkout; here are no benchmarks")
    return runpy.run_path(str(script))["float8_products"]


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("scales", ["tensor", "rows"])
def test_native_products_are_library_calls_on_hopper(counted, scales):
    """The three of them. Without a device XLA cannot time its own kernels against the library, so these are off."""
    text = on_hopper(three_products(QuantizationRule(scales=scales, **FP8)), xla_gpu_enable_triton_gemm=False)
    targets = re.findall(r'custom_call_target="([^"]+)"', text)
    assert targets == ["__cublas$lt$matmul$f8"] * 3
    assert counted(text) == {"library": 3, "kernels": 0}


@cuda_topology.needs_cuda_compiler
def test_kernels_that_xla_makes_itself_take_float8_too(counted):
    text = on_hopper(three_products(QuantizationRule(scales="tensor", **FP8)))
    pairs = re.findall(r" dot\(%([\w.]+), %([\w.]+)\)", text)  # inside fusions, whose parameters they are
    operands = [sorted(re.findall(rf"[( ]{re.escape(name)}: (\w+)\[", text)[0] for name in pair) for pair in pairs]
    assert sorted(operands) == [["f8e4m3fn"] * 2, *[["f8e4m3fn", "f8e5m2"]] * 2]
    assert counted(text) == {"library": 0, "kernels": 3}


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("triton", [False, True])
def test_products_of_bfloat16_are_not_counted_for_float8(counted, triton):
    text = on_hopper(three_products(QuantizationRule()), xla_gpu_enable_triton_gemm=triton)
    assert counted(text) == {"library": 0, "kernels": 0}


@pytest.mark.parametrize(
    ("chip", "name"),
    [("v5e:2x2", "bdr_mx9"), *((chip, "native") for chip in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"))],
)
def test_tpus_compile_them(chip, name):
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.MeshShape())
    emulated = QuantizationRule(weight_qtype=name, act_qtype=name, bwd_qtype=name) if name != "native" else None
    rule = emulated or QuantizationRule(scales="tensor", **FP8)
    where = SingleDeviceSharding(mesh.devices.flat[0])
    jax.jit(three_products(rule)).lower(*arguments(where)).compile()
