"""How experts are chosen is part of what a run is: others go on from its checkpoints only by a surgery."""

import dataclasses
import shutil

import pytest
import small_language_run as small

from scalejax.errors import UserError
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.parallel.mesh import MeshShape
from scalejax.surgery.experts import Upcycle
from scalejax.train import loop
from scalejax.train.experiment import Init, Phase


def chosen(group="sequence", count=4):
    return Experts(count=count, router=ExpertChoice(group=group), execution="batched")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    texts = small.write(tmp_path_factory.mktemp("texts") / "documents")
    return small.experiment(texts, steps=2, log_every=1, model__mlp=chosen())


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    loop.train(experiment, workdir=folder)
    return folder


def with_experts(experiment, part, **changes):
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, mlp=part), **changes)


OTHERS = {
    "group": (chosen("global"), "model.mlp.router.group is 'sequence' in the checkpoint and 'global' here"),
    "count": (chosen(count=8), "model.mlp.count is '4' in the checkpoint and '8' here"),
    "router": (
        Experts(count=4, router=TopK(k=1)),
        "model.mlp.router is 'ExpertChoice' in the checkpoint and 'TopK' here",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_with_other_experts_does_not_go_on_from_a_checkpoint(experiment, run, name):
    part, said = OTHERS[name]
    with pytest.raises(UserError, match=said) as refused:
        loop.train(with_experts(experiment, part, steps=4), workdir=run, resume="must")
    assert "with init= and a surgery such as surgery.experts.Upcycle" in str(refused.value)
    with pytest.raises(UserError, match=said):
        loop.evaluate(with_experts(experiment, part), workdir=run, split="validation")


@pytest.mark.slow
def test_it_goes_on_with_the_same_experts_on_other_devices(experiment, run, tmp_path):
    """How they are computed and the mesh are no part of it."""
    shutil.copytree(run, tmp_path / "run")
    placement = dataclasses.replace(experiment.placement, mesh=MeshShape(fsdp=4, expert=2))
    part = dataclasses.replace(chosen(), execution="sequential")
    made = with_experts(experiment, part, steps=3, placement=placement)
    assert loop.train(made, workdir=tmp_path / "run", resume="must")["steps"] == 3


@pytest.mark.slow
def test_a_model_to_begin_with_has_the_same_experts_or_a_surgery(experiment, run, tmp_path):
    other = with_experts(experiment, chosen("global"), init=str(run))
    with pytest.raises(UserError, match=r"router.group is 'sequence' in the checkpoint and 'global' here.*Upcycle"):
        loop.train(other, workdir=tmp_path / "refused")
    same = with_experts(experiment, chosen(), init=str(run))
    upcycled = dataclasses.replace(other, init=Init(path=str(run), surgery=Upcycle()))
    for name, made in {"same": same, "upcycled": upcycled}.items():
        assert loop.train(made, workdir=tmp_path / name)["steps"] == 2


def test_a_phase_with_another_group_wants_a_surgery(experiment, tmp_path):
    phase = Phase(name="wide", steps=1, changes={"model.mlp": chosen("global")})
    with pytest.raises(UserError, match=r"'wide' has no surgery.*model.mlp.router.group is 'sequence'"):
        loop.train(dataclasses.replace(experiment, phases=(phase,)), workdir=tmp_path)


def test_the_group_of_layers_that_choose_tokens_is_part_of_it_too():
    model = dataclasses.replace(small.MODEL, mlp=chosen(), depth=MixtureOfDepths(group="device"))
    assert dict(model.routed.identity) == {**chosen().identity, "depth.group": "device"}
