"""The step of a Llama on eight chips with attention kernels forced: it compiles, fits, and moves what it should."""

import dataclasses
import math
from typing import Any

import pytest
from changes import changed

from scalejax.configs.llm import llama
from scalejax.data.text.files import TextData
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.parallel import xla_flags
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import plan_program, run, topology
from scalejax.plan.compiled import collectives, hlo, memory
from scalejax.train.runs import binding

pytestmark = pytest.mark.aot

MODEL = LlamaConfig(
    layers=2, dim=1024, ffn_dim=2816, heads=8, kv_heads=4, vocabulary=32_000, max_positions=2048, loss_positions=512
)


def built(name: str, attention: Any, strategy: Fsdp, shape: MeshShape, model: LlamaConfig = MODEL, **changes: Any):
    data = TextData(length=2048, batch_size=16, vocabulary=32_000)
    experiment = changed(
        llama.tiny(),
        model=dataclasses.replace(model, attention=attention),
        data=data,
        strategy=strategy,
        **changes,
    )
    machine = topology.parse(name)
    mesh, _ = topology.make_mesh(machine, shape)
    return binding.bind(experiment, data.schema(), mesh), machine


@pytest.mark.parametrize(
    ("name", "attention", "form"),
    [
        ("v5p:2x2x2", "splash", "explicit"),
        ("v5e:2x4", "pallas_tpu", "implicit"),
    ],
)
def test_compiles_with_kernels_on_fsdp_and_tensor(name, attention, form):
    strategy = Fsdp(form=form, param_dtype="bfloat16")
    program, machine = built(name, attention, strategy, MeshShape(fsdp=4, tensor=2))
    found = plan_program(program, machine)
    assert found.memory.fits, found.memory.message
    text = program.train_step.trace(program.abstract_state(), program.abstract_batch()).lower().as_text()
    assert "tpu_custom_call" in text
    kinds = {(c.kind, c.axis) for c in found.collectives}
    assert any("fsdp" in axis for _, axis in kinds)
    assert any("tensor" in axis for _, axis in kinds)
    # The loss is made in slices: nothing of the size of all logits, 16 x 2,048 x 32,000 in float32, exists.
    logits = 16 * 2048 * 32_000 * 4 // 8
    assert found.memory.bytes_per_chip["temporaries"] < logits


@pytest.mark.slow
def test_state_on_the_host_and_options_by_name_reach_the_compiler():
    options = ("tpu-async-collectives", "gpu-latency-hiding")
    changes = {"placement__offload": "optimizer and parameters", "xla_flags": options}
    small = dataclasses.replace(MODEL, dim=128, ffn_dim=256, heads=4, kv_heads=2)
    program, _ = built("v5e:2x4", "reference", Fsdp(param_dtype="bfloat16"), MeshShape(fsdp=8), small, **changes)
    assert program.compiler_options == dict(xla_flags.SETS["tpu-async-collectives"].options)
    state, batch = program.abstract_state(), program.abstract_batch()
    kinds = memory.arguments_by_kind(state, batch)
    assert "parameters" not in kinds
    assert kinds["optimizer state"] == 2 * 4  # two counters
    found = program.train_step.lower(state, batch).compile().memory_analysis()
    whole = sum(4 * p.size for p in program.model.params.values())
    assert found.host_argument_size_in_bytes == pytest.approx(
        3 * whole / 8, rel=0.05
    )  # two moments of AdamW, and tiles
    assert found.argument_size_in_bytes < 0.01 * whole


@pytest.mark.parametrize("name", ["v5p:2x2x2", "v6e:4x4"])
def test_recipes_sum_gradients_in_float32_and_in_little_more_bytes_than_a_reduce_scatter(name):
    """The compiler makes an all-reduce of a reduce-scatter over several sides of a torus; of one side, of most."""
    experiment = llama.tiny()
    machine = topology.parse(name)
    mesh, _ = topology.make_mesh(machine, MeshShape())
    program = binding.bind(experiment, experiment.data.schema(), mesh)
    with run.no_compile_cache():
        text = program.train_step.lower(program.abstract_state(), program.abstract_batch()).compile().as_text()
    module = hlo.parse(text)
    numbers = {"bf16": 0, "f32": 0}
    for execution in module.executions():
        for i in execution.computation.instructions:
            if i.opcode.removesuffix("-start") in ("all-reduce", "reduce-scatter"):
                for array in i.arrays:
                    numbers[array.dtype] += math.prod(array.dims) * execution.count
    whole = sum(p.size for p in program.model.params.values())
    assert numbers["bf16"] < 2000 < numbers["f32"]  # norms, gathered as a sum
    sums = [c for c in collectives.of_module(module, mesh) if c.kind in ("all-reduce", "reduce-scatter")]
    assert sum(c.minimum_bytes for c in sums) < 0.75 * collectives.minimum_bytes("all-reduce", 4 * whole, mesh.size)
