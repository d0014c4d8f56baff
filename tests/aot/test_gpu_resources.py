"""What the kernels for NVIDIA's GPUs need of a Hopper's registers, and the stack that they spill to, against a table.

Another version of the compiler may choose otherwise: the failing assertion prints the table anew.
"""

import functools
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import pytest
from aot import (
    cuda_topology,
    gpu_resources,
    test_block_quant,
    test_embedding_kernels,
    test_flash_attention,
    test_group_quantize,
    test_grouped_matmul,
    test_mx,
    test_paged_attention,
    test_sampled_spmm,
)
from jax.sharding import NamedSharding, PartitionSpec

import scalejax
from scalejax.kernels import block_quant, mx

pytestmark = pytest.mark.aot

TABLE = pathlib.Path(__file__).with_name("gpu_kernels.toml")
ROWS = 2**20


@functools.cache
def hopper():
    return cuda_topology.mesh(1)


def on(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(hopper(), PartitionSpec()))


def embedding_bag(what):
    program = test_embedding_kernels._programs("pallas_gpu", ROWS)[what]
    return test_embedding_kernels._compile(hopper(), program)


def flash_attention():
    form = next(iter(test_flash_attention.FORMS.values()))
    return test_flash_attention.compile_whole(hopper(), *test_flash_attention.program("pallas_gpu", **form))


def paged_attention():
    program = test_paged_attention.program("pallas_gpu")
    return test_flash_attention.compile_whole(hopper(), *program)


def compiled(function, *arguments):
    return cuda_topology.compile_for(hopper(), function, *arguments)


def quantized_bag():
    def look_up(rows, ids, lengths):
        return block_quant.quantized_bag(rows, ids, lengths, implementation="pallas_gpu")

    return compiled(look_up, test_block_quant.table(on, "int4", dim=128), on((2048,), jnp.int32), on((256,), jnp.int32))


def quantize():
    def blocks(x):
        return mx.quantize_blocks(x, "mxfp8_e4m3", axis=1, implementation="pallas_gpu")

    return compiled(blocks, on((512, 1024), jnp.bfloat16))


def dequantize():
    def blocks(packed):
        return mx.dequantize_blocks(packed, jnp.bfloat16, implementation="pallas_gpu")

    packed = test_mx.packed("mxfp8_e4m3", (512, 1024), 1)
    return compiled(blocks, jax.tree.map(lambda array: on(array.shape, array.dtype), packed))


def product():
    def multiply(x, weights):
        packed = mx.quantize_blocks(weights, "mxfp8_e4m3", axis=0, implementation="pallas_gpu")
        return mx.matmul(x, packed, implementation="pallas_gpu")

    return compiled(multiply, on((512, 1024), jnp.bfloat16), on((1024, 512), jnp.bfloat16))


def integer_groups(what):
    function, *shapes = test_group_quantize.programs("int4:128", "pallas_gpu")[what]
    return compiled(function, *jax.tree.map(lambda array: on(array.shape, array.dtype), shapes))


def sampled():
    program = test_sampled_spmm._sampled("pallas_gpu", width=test_sampled_spmm.WIDTH, strategy="fastrand")
    return test_sampled_spmm._compile(
        hopper(), program, test_sampled_spmm._csr(False), test_sampled_spmm._features(jnp.float32)
    )


def exact():
    return test_sampled_spmm._compile(
        hopper(),
        test_sampled_spmm._exact_with_gradient("pallas_gpu"),
        test_sampled_spmm._small_plan(),
        test_sampled_spmm._features(jnp.bfloat16, nodes=512),
    )


def grouped(dtype):
    return test_grouped_matmul.compile_mlp(hopper(), "pallas_gpu", test_grouped_matmul.gradients, dtype=dtype)


CASES = {
    "embedding lookup": lambda: embedding_bag("lookup"),
    "embedding gather": lambda: embedding_bag("gather"),
    "sums and row-wise AdaGrad": lambda: embedding_bag("sums and row-wise adagrad"),
    "AdaGrad": lambda: embedding_bag("adagrad"),
    "flash attention": flash_attention,
    "paged attention": paged_attention,
    "quantized lookup": quantized_bag,
    "MX quantize": quantize,
    "MX dequantize": dequantize,
    "MX product": product,
    "integer groups, quantize": lambda: integer_groups("quantize"),
    "integer groups, sum": lambda: integer_groups("sum"),
    "integer groups, requantize": lambda: integer_groups("requantize"),
    "sampled product": sampled,
    "exact product": exact,
    "grouped products": lambda: grouped(jnp.bfloat16),
    "grouped products, float32": lambda: grouped(jnp.float32),
}


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("case", CASES)
def test_kernels_need_the_registers_of_the_table_on_hopper(case):
    found = {name: list(needed) for name, needed in gpu_resources.resources(CASES[case]()).items()}
    # The others are XLA's own.
    kernels = {name: needed for name, needed in found.items() if not re.search(r"fusion|^(wrapped|memset|loop)_", name)}
    printed = "\n".join(f"{name} = {needed}" for name, needed in sorted(kernels.items()))
    assert kernels == tomllib.loads(TABLE.read_text()).get(case), f"[{case!r}]\n{printed}"


def test_every_kernel_for_gpus_is_in_the_table():
    sources = pathlib.Path(scalejax.__file__).parent.glob("kernels/*/pallas_gpu.py")
    named = {name for source in sources for name in re.findall(r'name="(\w+)"', source.read_text())}
    measured = {name for case in tomllib.loads(TABLE.read_text()).values() for name in case}
    assert named <= measured
