"""What the step model says of the exchange of experts is what the compiled step of a recipe moves."""

import dataclasses

import pytest

from scalejax import configs
from scalejax.data.text.tokens import TokenSchema
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.models.llm.moma import ModalityExperts
from scalejax.parallel import mesh as meshes
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding, topology
from scalejax.plan.arithmetic import decoders, step_model
from scalejax.train.precision import dtypes_of
from scalejax.train.runs import binding

CASES = {
    # Experts in the place of those of the recipe, and whether the number of an expert travels with each place.
    "dropless": (None, True),
    "room between two": (Experts(count=4, router=TopK(k=2, pair_factor=1.25)), True),
    "with a capacity": (
        Experts(count=4, router=TopK(k=2, capacity_factor=1.25), execution="batched"),
        False,
    ),
    "global": (Experts(count=4, router=ExpertChoice(group="global"), execution="batched"), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_exchange_of_a_recipe_is_that_of_the_model(name):
    part, numbered = CASES[name]
    experiment = configs.load("mixtral-smoke", ["data.batch_size=8"])
    if part is not None:
        experiment = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, mlp=part))
    shape = MeshShape(fsdp=4, expert=2)
    mesh = meshes.make_mesh(shape)
    program = binding.bind(experiment, experiment.data.schema(), mesh)
    compute = dtypes_of(experiment.precision, mesh).compute
    training = decoders.training_of(experiment, shape, 8, compute_dtype=compute)
    found = step_model.estimate(decoders.decoder_of(experiment), training, topology.parse("v5e:2x4"))
    (tokens,) = (m for m in found.moved if m.what == "tokens of experts")
    compiled = program.train_step.lower(program.abstract_state(), program.abstract_batch()).compile()
    found = [c for c in explain_sharding(compiled, mesh) if c.kind == "all-to-all" and c.axis == "expert"]
    model = experiment.model
    # Forward, and again in the backward pass of a layer of which nothing is kept.
    numbers = 2 * model.layers * 4 * tokens.payload_bytes // (model.dim * 4) if numbered else 0
    assert sum(c.bytes for c in found) == tokens.payload_bytes * tokens.count + numbers


def test_places_of_modalities_are_those_of_the_fullest_row():
    part = ModalityExperts(groups=(("text", 2), ("image", 4)))
    schema = TokenSchema(vocabulary=90, length=100, modalities=("text", "image"), capacities=(60, 70))
    assert part.bound(schema).capacity(100, 8) == pytest.approx(1.3)
    whole = dataclasses.replace(part, router=ExpertChoice(group="global")).bound(schema)
    assert whole.capacity(100, 8) == pytest.approx(0.6 * 2 + 0.7 * 4)
