"""Memory that cannot suffice: against what a real state takes, and the remedies that a message names."""

import dataclasses
import re

import jax
import pytest
from changes import changed
from plan.arithmetic.test_mesh_search import Rows

from scalejax import optim
from scalejax.configs import overrides
from scalejax.errors import UserError
from scalejax.models.llm import llama3
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.rules import LLM
from scalejax.plan import check_fits
from scalejax.plan.arithmetic import estimate
from scalejax.plan.compiled import memory
from scalejax.train.experiment import Experiment, Gradients, Placement
from scalejax.train.runs import binding

SMALL = llama3.LlamaConfig(
    layers=4, dim=64, ffn_dim=128, heads=8, kv_heads=4, vocabulary=256, max_positions=512, remat="none"
)


def _experiment(**fields):
    given = Experiment(
        model=SMALL,
        data=Rows(batch_size=32, length=512),
        steps=10,
        gradients=Gradients(clip=1.0),
        placement=Placement(rules=LLM),
    )
    return changed(given, **fields)


@pytest.mark.parametrize("strategy", [Fsdp(), Fsdp(sharding="NO_SHARD"), Fsdp(sharding="HYBRID_SHARD"), Ddp()])
@pytest.mark.parametrize("where", ["none", "optimizer"])
def test_state_at_rest_is_what_a_run_keeps(strategy, where):
    tensor = 1 if isinstance(strategy, Ddp) else 2
    mesh = make_mesh(MeshShape(replica=2, fsdp=4 // tensor, tensor=tensor))
    experiment = _experiment(strategy=strategy, placement__offload=where)
    found = estimate.needed_bytes(experiment, mesh)
    program = binding.bind(experiment, experiment.data.schema(), mesh)
    kept = memory.arguments_by_kind(program.abstract_state(), program.abstract_batch())
    assert found["parameters"] == pytest.approx(kept["parameters"], rel=0.01)
    away = where == "optimizer"
    assert found["optimizer state"] == pytest.approx(kept["optimizer state"], rel=0.01, abs=64 * away)  # two counters
    assert (found["optimizer state"] == 0) == away


def test_what_fits_passes_and_unknown_memory_refuses_nothing():
    mesh = make_mesh(MeshShape())
    needed = sum(estimate.needed_bytes(_experiment(), mesh).values())
    check_fits(_experiment(), mesh, memory_bytes=needed)
    with pytest.raises(UserError, match="Memory cannot suffice"):
        check_fits(_experiment(), mesh, memory_bytes=needed - 1)


def _refused(experiment, share, mesh=None):
    """The message at a share of what is needed, and the remedy in it."""
    mesh = mesh or make_mesh(MeshShape())
    kinds = estimate.needed_bytes(experiment, mesh)
    with pytest.raises(UserError) as error:
        check_fits(experiment, mesh, memory_bytes=int(share * sum(kinds.values())))
    return str(error.value), kinds


def test_the_largest_kind_comes_first():
    text, kinds = _refused(_experiment(), 0.9)
    largest = max(kinds, key=lambda kind: kinds[kind])
    assert re.search(r"before compiling\): (\w[\w ]*) [\d.]+ [KMG]iB", text).group(1) == largest == "activations"


def test_remedies_are_named_in_the_order_of_what_they_cost():
    assert "with --set model.remat=dots." in _refused(_experiment(), 0.9)[0]
    assert "with --set model.remat=full." in _refused(_experiment(), 0.3)[0]
    full = _experiment(model=dataclasses.replace(SMALL, remat="full"))
    assert "with --set gradients.microbatch=2." in _refused(full, 0.9)[0]
    state = {"model": dataclasses.replace(SMALL, remat="full"), "data": Rows(batch_size=8, length=64)}
    assert "with --set strategy=Fsdp." in _refused(_experiment(**state, strategy=Ddp()), 0.9)[0]
    text, _ = _refused(_experiment(**state, strategy=Fsdp(sharding="NO_SHARD")), 0.9)
    assert "with --set strategy.sharding=FULL_SHARD." in text


def _sets(text):
    """The changes that a message names."""
    return [f"{path}={value.rstrip('.')}" for path, value in re.findall(r"--set (\S+)=(\S+)", text)]


@pytest.mark.parametrize("strategy", [Ddp(), Fsdp(sharding="NO_SHARD", form="explicit"), Fsdp()], ids=str)
@pytest.mark.parametrize("share", [0.7, 0.4, 0.25, 0.1])
def test_what_a_message_names_does_as_it_is_written(monkeypatch, strategy, share):
    monkeypatch.setattr(estimate, "_host_is_apart", lambda mesh: True)
    mesh = make_mesh(MeshShape())
    experiment = _experiment(strategy=strategy, optimizer=optim.AdamW())
    room = int(share * sum(estimate.needed_bytes(experiment, mesh).values()))
    with pytest.raises(UserError) as error:
        check_fits(experiment, mesh, memory_bytes=room)
    sets = _sets(str(error.value))
    assert sets
    sizes = [text for text in sets if text.startswith("placement.mesh.")]
    other = overrides.apply(experiment, [text for text in sets if text not in sizes])
    mesh = make_mesh(overrides.apply(experiment, sizes).placement.mesh) if sizes else mesh
    check_fits(other, mesh, memory_bytes=room)


def test_state_goes_to_the_host_where_nothing_else_suffices(monkeypatch):
    alone = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    model = dataclasses.replace(SMALL, remat="full")
    experiment = _experiment(model=model, data=Rows(batch_size=1, length=64))
    kinds = estimate.needed_bytes(experiment, alone)
    room = sum(kinds.values()) - kinds["optimizer state"]
    with pytest.raises(UserError, match="alone fill 2 such devices"):
        check_fits(experiment, alone, memory_bytes=room)  # here the host's memory is that of the device
    monkeypatch.setattr(estimate, "_host_is_apart", lambda mesh: True)
    with pytest.raises(UserError, match=r"with --set placement.offload=optimizer --set gradients.microbatch=1\."):
        check_fits(experiment, alone, memory_bytes=room)
    check_fits(changed(experiment, placement__offload="optimizer"), alone, memory_bytes=room)


def test_a_named_remedy_does():
    mesh = make_mesh(MeshShape())
    experiment = _experiment()
    room = int(0.3 * sum(estimate.needed_bytes(experiment, mesh).values()))
    with pytest.raises(UserError, match=r"model\.remat=full"):
        check_fits(experiment, mesh, memory_bytes=room)
    check_fits(dataclasses.replace(experiment, model=dataclasses.replace(SMALL, remat="full")), mesh, memory_bytes=room)


def test_a_model_that_is_too_large_says_how_many_devices_hold_it():
    large = _experiment(model=llama3.SIZES["3.1-8b"], data=Rows(batch_size=8, length=8192))
    mesh = make_mesh(MeshShape())
    with pytest.raises(UserError, match=r"alone fill (\d+) such devices") as error:
        check_fits(large, mesh, memory_bytes=10**9)
    # 16 bytes a parameter: itself, its gradient and the two moments of AdamW.
    devices = int(re.search(r"fill (\d+) such", str(error.value)).group(1))
    assert devices == -(-16 * 8_030_261_248 // 10**9)


def test_a_model_that_is_no_decoder_is_let_through_and_cannot_be_estimated():
    odd, mesh = _experiment(model=object()), make_mesh(MeshShape())
    check_fits(odd, mesh, memory_bytes=1)
    with pytest.raises(UserError, match="must be a decoder"):
        estimate.needed_bytes(odd, mesh)


def test_runs_that_train_a_part_of_a_decoder_are_let_through():
    mesh = make_mesh(MeshShape())
    with pytest.raises(UserError, match="Memory cannot suffice"):
        check_fits(_experiment(), mesh, memory_bytes=1)
    check_fits(_experiment(trainable="head/.*"), mesh, memory_bytes=1)


def test_eight_devices_share_the_state():
    alone = estimate.needed_bytes(_experiment(), make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))
    together = estimate.needed_bytes(_experiment(), make_mesh(MeshShape(fsdp=8)))
    assert together["parameters"] == -(-alone["parameters"] // 8)
    assert together["activations"] == alone["activations"] // 8
