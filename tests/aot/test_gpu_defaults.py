"""Recipes compiled for a Hopper GPU: which of our kernels they take when nothing is said, and which by name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import cuda_topology
from changes import changed
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.configs.llm import llama
from scalejax.configs.recsys import dlrm
from scalejax.inference.packed_params import PackedWeight
from scalejax.inference.recommendation import click_model
from scalejax.kernels import mx
from scalejax.models.llm.mapping import Entry
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.train.runs import binding

pytestmark = [
    pytest.mark.aot,
    cuda_topology.needs_cuda_compiler,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def kernels(compiled):
    """Names of the Triton kernels of Pallas in a compiled program."""
    calls = [line for line in compiled.as_text().splitlines() if "custom_call_target=" in line]
    return set(re.findall(r"\b(embedding_\w+|mx_\w+)", " ".join(calls)))


def step_of(experiment, gpus=1):
    mesh = meshes.make_mesh(MeshShape(), cuda_topology.devices(1, gpus))
    step, arguments = binding.bind(experiment, experiment.data.schema(), mesh, abstract=True).repeated_step()
    return step.trace(*arguments).lower().compile()


@pytest.mark.parametrize(
    ("gpus", "named", "expected"),
    [(1, None, {"embedding_gather_rows"}), (2, None, {"embedding_gather_rows"}), (1, "xla", set())],
)
def test_a_step_of_a_click_model_looks_rows_up_by_the_kernel_and_updates_them_by_xla(gpus, named, expected):
    assert kernels(step_of(changed(dlrm.smoke(), tables__implementation=named), gpus)) == expected


@pytest.mark.parametrize("length", [1, 3, None])
def test_scores_of_a_click_model_look_rows_up_by_the_kernel(length):
    mesh = cuda_topology.mesh(1)
    place = NamedSharding(mesh, P())

    def like(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    config = click_model.TableConfig(name="t", rows=1000, dim=16, features=("f",), pooling="mean")
    ids = like((64,) if length is None else (8, length), jnp.int32)
    inputs = click_model.Inputs({"f": ids}, {"f": like((8,), jnp.int32)} if length is None else {}, like((8, 1)))
    compiled = cuda_topology.compile_for(
        mesh, lambda table, inputs: click_model.embed((config,), {"t": table}, inputs), like((1000, 16)), inputs
    )
    assert kernels(compiled) == {"embedding_gather_rows" if length == 1 else "embedding_bag"}


MXFP8 = QuantizationRule(
    module_path="layers/attention/out", weight_qtype="mxfp8_e4m3", act_qtype="mxfp8_e4m3", bwd_qtype="mxfp8_e5m2",
    tail="pad",
)  # fmt: skip


# Over several devices the implicit form leaves it to the compiler to partition products, which it cannot with a kernel.
@pytest.mark.parametrize(("gpus", "expected"), [(1, {"mx_quantize", "mx_dequantize"}), (2, set())])
def test_products_of_training_are_quantized_by_the_kernel_on_one_gpu(gpus, expected):
    experiment = changed(llama.smoke(), quantization=(MXFP8,), strategy=Fsdp(form="implicit"))
    assert kernels(step_of(experiment, gpus)) == expected


def test_packed_weights_are_decoded_by_the_kernel():
    mesh = cuda_topology.mesh(1)
    entry = Entry("w", "w", "O I -> I O")

    def decode(packed):
        dtype = np.dtype(jnp.bfloat16)
        return PackedWeight(packed, entry, (("O", 64), ("I", 256)), dtype, dtype).decode()

    packed = jax.eval_shape(
        lambda x: mx.quantize_blocks(x, "mxfp4_e2m1", axis=-1), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    )
    place = NamedSharding(mesh, P())
    packed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), packed)
    assert kernels(cuda_topology.compile_for(mesh, decode, packed)) == {"mx_dequantize"}
