"""A small Llama planned by the TPU compiler: depths on a line, arithmetic beside it, and the search as a whole."""

import dataclasses

import pytest
from plan.arithmetic.test_mesh_search import Rows

from scalejax.models.llm import llama3
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import LLM
from scalejax.plan import search, topology
from scalejax.plan.arithmetic import decoders, step_model
from scalejax.plan.run import plan_on
from scalejax.train.experiment import Experiment, Gradients, Placement

pytestmark = pytest.mark.aot

SMALL = llama3.LlamaConfig(
    layers=8,
    dim=512,
    ffn_dim=1024,
    heads=8,
    kv_heads=4,
    vocabulary=1024,
    max_positions=256,
    remat="full",
    attention="reference",  # compiles fastest; the kernels' own tests compile them
    loss_positions=64,  # few, so that the layers and not the loss decide what lives at one time
)
MACHINE = topology.parse("v6e:2x2")


def _experiment(**fields):
    model = dataclasses.replace(SMALL, **fields)
    data = Rows(batch_size=8, length=256, vocabulary=1024)
    return Experiment(
        model=model,
        data=data,
        steps=10,
        strategy=Fsdp(param_dtype="bfloat16"),
        gradients=Gradients(clip=1.0),
        placement=Placement(rules=LLM),
    )


@pytest.fixture(scope="module")
def compiled():
    return plan_on(_experiment(), MACHINE, MeshShape(fsdp=4))


def test_the_compiled_state_is_the_estimated_one(compiled):
    experiment = _experiment()
    training = decoders.training_of(experiment, MeshShape(fsdp=4), 4, compute_dtype="bfloat16")
    found = step_model.memory_of_device(decoders.decoder_of(experiment), training, devices=4)
    wanted = compiled.memory.bytes_per_chip
    assert found["parameters"] == pytest.approx(wanted["parameters"], rel=0.01)
    assert found["optimizer state"] == pytest.approx(wanted["optimizer state"], rel=0.01)


def test_a_search_ranks_what_it_compiled():
    found = search(_experiment(), "v6e:2x2", compiles=1)
    (best,) = found.ranked
    assert best.compiled.memory.fits
    assert best.step_s is not None
    assert best.compiled.model_flops == best.estimate.decoder.model_flops_per_token(256) * 8 * 256
