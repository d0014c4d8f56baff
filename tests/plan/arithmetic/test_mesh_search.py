"""The search without a compiler: what it keeps, what it drops and why, and the line through two depths."""

import dataclasses
import io
import json

import pytest
from changes import changed
from rich.console import Console

from scalejax import configs
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm import llama3
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh, mesh_text
from scalejax.parallel.rules import LLM
from scalejax.plan import PlanResult, check_fits, search, topology
from scalejax.plan.arithmetic import decoders, mesh_search, step_model
from scalejax.plan.arithmetic import published_runs as runs
from scalejax.plan.compiled.collectives import Collective
from scalejax.plan.compiled.memory import MemoryPlan
from scalejax.plan.compiled.roofline import Roofline
from scalejax.plan.render import render
from scalejax.train.experiment import Experiment, Gradients, Placement

V6E = topology.parse("v6e:4x4")
MIXTRAL = Experts(count=8, router=TopK(k=2, capacity_factor=1.25), execution="batched")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Data of a shape, without any content."""

    batch_size: int
    length: int
    vocabulary: int = 256

    def schema(self):
        return TokenSchema(vocabulary=self.vocabulary, length=self.length)

    def build(self):
        raise NotImplementedError


def _experiment(size="3.1-8b", *, batch=16, length=8192, **fields):
    given = Experiment(
        model=llama3.SIZES[size],
        data=Rows(batch_size=batch, length=length),
        steps=10,
        gradients=Gradients(clip=1.0),
        placement=Placement(rules=LLM),
    )
    return changed(given, **fields)


def _mixtral(part=MIXTRAL, **given):
    small = dataclasses.replace(llama3.SIZES["3.2-1b"], tie_embeddings=False, mlp=part)
    return changed(_experiment(**given), model=small)


def _prune(experiment, machine=V6E, **given):
    decoder = decoders.decoder_of(experiment)

    def training(mesh):
        return decoders.training_of(experiment, mesh, machine.devices, compute_dtype="bfloat16")

    return mesh_search.prune(
        decoder, training, machine, share=0.7, remats=decoders.remats_of(experiment.model), **given
    )


def test_meshes_are_all_ways_to_write_the_devices_as_a_product():
    found = list(mesh_search.meshes(V6E))
    # 16 = 2^4 over four axes: (4 + 3) choose 3.
    assert len(found) == len({dataclasses.astuple(mesh) for mesh in found}) == 35
    assert all(m.replica * m.fsdp * m.context * m.tensor == 16 for m in found)
    two = list(mesh_search.meshes(topology.parse("v6e:2x2,slices=2")))
    assert all(m.replica % 2 == 0 for m in two)  # only this axis may cross slices


def test_experts_are_spread_over_as_many_devices_as_divide_them():
    found = list(mesh_search.meshes(V6E, experts=12))
    assert {mesh.expert for mesh in found} == {1, 2, 4}
    assert len(found) == len({dataclasses.astuple(mesh) for mesh in found}) == 35 + 20 + 10  # of 16, 8 and 4 devices
    assert all(m.replica * m.fsdp * m.expert * m.context * m.tensor == 16 for m in found)
    candidates, _ = _prune(_mixtral(batch=64))
    assert {c.mesh.expert for c in candidates} == {1, 2, 4, 8}


def test_every_combination_is_a_candidate_or_dropped_with_a_reason():
    candidates, dropped = _prune(_experiment())
    meshes = [m for m in mesh_search.meshes(V6E) if m.replica == 1]  # FULL_SHARD makes no difference of the two
    seen = {(mesh_text(c.mesh), c.remat) for c in candidates}
    for d in dropped:
        seen |= {(mesh_text(d.mesh), name) for name in (step_model.REMATS if d.remat == "any" else [d.remat])}
    assert seen == {(mesh_text(m), remat) for m in meshes for remat in step_model.REMATS}
    assert all(d.reason for d in dropped)
    steps = [c.estimate.step_s for c in candidates]
    assert steps == sorted(steps)


def test_what_cannot_fit_is_dropped_by_its_largest_kinds():
    candidates, dropped = _prune(_experiment(batch=64))
    reasons = {(mesh_text(d.mesh), d.remat): d.reason for d in dropped}
    assert "activations" in reasons["fsdp=16", "none"]
    assert "of 31.25 GiB" in reasons["fsdp=16", "none"]
    assert all(c.estimate.memory_bytes <= 1.1 * 31.25 * 2**30 for c in candidates)


def test_what_does_not_divide_is_dropped_once_for_all_policies():
    _, dropped = _prune(_experiment(batch=8))
    (row,) = [d for d in dropped if mesh_text(d.mesh) == "fsdp=16"]
    assert (row.remat, row.reason) == ("any", "batch=8 does not divide by replica x fsdp x expert x parts=16")


def test_hybrid_sharding_searches_copies():
    candidates, _ = _prune(_experiment(strategy=Fsdp(sharding="HYBRID_SHARD")))
    assert any(c.mesh.replica > 1 for c in candidates)
    copied = next(c for c in candidates if c.mesh.replica == 2 and c.mesh.fsdp == 8)
    assert any(m.axes == ("replica",) and m.kind == "all-reduce" for m in copied.estimate.moved)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=() if at == "Mixtral 8x22B, v6e" else pytest.mark.slow, id=at)
        for at, run in ((run.name, run) for run in runs.RUNS)
    ],
)
def test_the_searched_mesh_is_no_worse_than_the_published_one(run):
    machine, share = topology.parse(run.machine), runs.SHARES[run.machine.partition(":")[0]]

    def training(mesh):
        return dataclasses.replace(run.training, mesh=mesh)

    remats = {**step_model.REMATS, "published": run.training.remat}
    candidates, _ = mesh_search.prune(run.decoder, training, machine, share=share, remats=remats)
    # Where devices lie is no part of a search.
    published = dataclasses.replace(run, layout="own").estimate(share)
    assert candidates[0].estimate.step_s <= published.step_s


def _result(layers, *, constant=0, fits=True):
    """A plan whose every figure is a + b * layers, the temporaries with a constant of their own."""
    gather = Collective(
        kind="all-gather", axes=("fsdp",), group_size=16, bytes=50 + 10 * layers, count=1 + 2 * layers,
        minimum_bytes=5 * layers, trip_count_known=True, groups=(),
    )  # fmt: skip
    reduced = dataclasses.replace(gather, kind="all-reduce", bytes=8, count=1, minimum_bytes=8)
    return PlanResult(
        topology=V6E,
        mesh={"fsdp": 16},
        memory=MemoryPlan(
            fits=fits, bytes_per_chip={"parameters": 7 + 3 * layers, "temporaries": 100 + constant}, hbm_bytes=1000
        ),
        flops=1 + 4 * layers,
        model_flops=4 * layers,
        collectives=(gather, reduced),
        roofline=Roofline(compute_s=2.0 * layers, hbm_s=1.0 + layers, ici_s=0.5, dcn_s=0.0) if fits else None,
        unsharded=(),
        compile_s=1.0,
        warnings=("odd",),
    )


@pytest.fixture
def compiled(monkeypatch):
    """A search whose compiler answers at once: time and memory by the estimate, backwards in rank."""
    asked = []

    def plan_on(experiment, machine, mesh):
        asked.append((experiment.model.layers, mesh_text(mesh), experiment.model.remat))
        slow = 100.0 / len(asked)
        base = _result(experiment.model.layers)
        return dataclasses.replace(base, roofline=dataclasses.replace(base.roofline, ici_s=slow))

    monkeypatch.setattr(mesh_search, "plan_on", plan_on)
    return asked


def test_a_search_compiles_the_best_few_and_ranks_them_by_what_was_compiled(compiled):
    lines = []
    found = search(_experiment(batch=64), "v6e:4x4", progress=lines.append)
    assert [layers for layers, _, _ in compiled] == [32] * 5
    assert len(lines) == 5
    best = [(mesh_text(c.mesh), c.remat) for c in sorted(found.ranked, key=lambda c: c.estimate.step_s)]
    assert best == [(mesh, remat) for _, mesh, remat in compiled]
    steps = [c.step_s for c in found.ranked]
    assert steps == sorted(steps)
    # Products at the share of their peak, 2 s a layer at the peak, and links.
    line = found.ranked[0].compiled.roofline
    assert steps[0] == pytest.approx(2.0 * 32 / runs.SHARES["v6e"] + line.ici_s)


def test_a_search_as_tables_and_json(compiled):
    found = search(_experiment(batch=64), "v6e:4x4", compiles=2)
    stored = json.loads(json.dumps(found.to_json()))
    assert len(stored["ranked"]) == 2
    assert stored["ranked"][0]["compiled"]["topology"] == "v6e:4x4"
    assert {row["reason"] for row in stored["dropped"]} == {d.reason for d in found.dropped}
    out = io.StringIO()
    render(found, Console(file=out, width=200))
    text = out.getvalue()
    for expected in ("v6e:4x4", "best first", "Not compiled, by arithmetic", "Dropped by arithmetic", "remat full"):
        assert expected in text


def test_a_machine_that_is_too_small_names_what_came_nearest():
    with pytest.raises(UserError, match=r"nothing fits on v6e:2x2; the nearest: .*, remat full: needs about") as error:
        search(_experiment("3.1-405b"), "v6e:2x2", compiles=0)
    machine = topology.parse("v6e:2x2")
    _, dropped = _prune(_experiment("3.1-405b"), machine)
    assert all(d.memory_bytes is None or d.memory_bytes > 1.1 * machine.chip.usable_hbm_bytes for d in dropped)
    least = min((d for d in dropped if d.memory_bytes), key=lambda d: d.memory_bytes)
    assert f"{mesh_text(least.mesh)}, remat {least.remat}: {least.reason}" in str(error.value)


def test_at_most_five_are_compiled():
    with pytest.raises(UserError, match="compiles must be 0 to 5"):
        search(_experiment(), "v6e:4x4", compiles=6)


def test_block_formats_on_the_wire_are_refused():
    strategy = Fsdp(form="explicit", reduce_format="bdr_mx6")
    with pytest.raises(UserError, match=r"strategy.reduce_format is 'bdr_mx6'.*leave --search out"):
        search(_experiment(strategy=strategy), "v6e:4x4", compiles=0)


@dataclasses.dataclass(frozen=True)
class _NarrowMlp(llama3.GatedMlp):
    """Which the dimensions of a config do not describe."""

    def build(self, config, rngs, dtypes):
        return super().build(dataclasses.replace(config, ffn_dim=8), rngs, dtypes)


@pytest.mark.parametrize("model", [object(), dataclasses.replace(llama3.SIZES["3.1-8b"], mlp=_NarrowMlp())])
def test_a_model_that_is_no_decoder_is_refused_and_its_memory_not_estimated(model):
    odd = dataclasses.replace(_experiment(), model=model)
    check_fits(odd, make_mesh(MeshShape()), memory_bytes=1)
    with pytest.raises(UserError, match="must be a decoder"):
        search(odd, "v6e:4x4")


def test_mixture_of_depths_is_refused_by_its_own_name():
    with pytest.raises(UserError, match=r"^model.depth is MixtureOfDepths, .* Leave depth out"):
        decoders.decoder_of(configs.load("moma-pretrain-1-4b-mod"))


def test_an_experiment_is_read_into_the_terms_of_the_model():
    strategy = Fsdp(form="explicit", param_dtype="bfloat16", reduce_dtype="float32")
    experiment = _experiment(batch=64, gradients__microbatch=2, strategy=strategy)
    found = decoders.training_of(experiment, MeshShape(fsdp=16), 16, compute_dtype="bfloat16")
    assert (found.batch, found.sequence, found.parts) == (64, 8192, 2)
    assert (found.gather_bytes, found.reduce_bytes, found.optimizer_bytes) == (2, 4, 8)
    assert found.sharded_over == ("fsdp",)
    kept = dataclasses.replace(experiment, strategy=Fsdp(sharding="SHARD_GRAD_OP"))
    assert decoders.training_of(kept, MeshShape(fsdp=16), 16, compute_dtype="bfloat16").reshard == "keep"
    local = dataclasses.replace(experiment, strategy=Fsdp(form="explicit", accumulate="local", param_dtype="bfloat16"))
    found = decoders.training_of(local, MeshShape(fsdp=16), 16, compute_dtype="bfloat16")
    assert (found.accumulate, found.gather_bytes, found.reduce_bytes) == ("local", 2, 4)  # added up in float32
    away = decoders.training_of(
        changed(experiment, placement__offload="optimizer"), MeshShape(fsdp=16), 16, compute_dtype="bfloat16"
    )
    assert away.optimizer_rests == "host"
    assert step_model.memory_of_device(decoders.decoder_of(experiment), away, 16)["optimizer state"] == 0
    decoder = decoders.decoder_of(experiment)
    assert decoder == runs.LLAMA31_8B


def test_the_recipe_of_mixtral_is_the_model_of_the_published_runs():
    experiment = configs.load("mixtral-pretrain-8x7b")
    assert decoders.decoder_of(experiment) == runs.MIXTRAL_8X7B
    found = decoders.training_of(experiment, MeshShape(fsdp=64, expert=4), 256, compute_dtype="bfloat16")
    published = runs.run("Mixtral 8x22B, v6e").training
    assert (found.capacity_factor, found.sharded_over) == (published.capacity_factor, published.sharded_over)
    assert (found.batch, found.sequence, found.remat) == (1024, 4096, step_model.REMATS["full"])


def test_experts_in_groups_have_a_router_each_and_the_places_of_the_data():
    experiment = configs.load("moma-pretrain-1-4b")
    decoder = decoders.decoder_of(experiment)
    assert (decoder.experts, decoder.active_experts, decoder.routers) == (8, 1, 2)
    training = decoders.training_of(experiment, MeshShape(fsdp=16, expert=4), 64, compute_dtype="bfloat16")
    assert training.capacity_factor == 2 * 2252 / 4096  # 0.55 of 4,096 for either modality


@pytest.mark.parametrize(
    ("part", "active", "factor"),
    [
        (MIXTRAL, 2, 1.25),
        (Experts(count=4, router=TopK(k=3)), 3, None),
        (Experts(count=8, router=ExpertChoice(), execution="batched"), 1, None),
    ],
)
def test_experts_are_read_into_the_terms_of_the_model(part, active, factor):
    experiment = _mixtral(part, batch=64)
    decoder = decoders.decoder_of(experiment)
    assert (decoder.experts, decoder.active_experts) == (part.count, active)
    assert decoder.parameters == experiment.model.parameters()
    training = decoders.training_of(experiment, MeshShape(fsdp=16), 16, compute_dtype="bfloat16")
    assert training.capacity_factor == factor


@pytest.mark.parametrize("execution", ["batched", "sequential"])
def test_the_policy_dots_finds_products_of_experts_where_each_has_its_own(execution):
    experiment = decoders.with_model(_mixtral(dataclasses.replace(MIXTRAL, execution=execution)), remat="dots")
    kept = {"gate_up", "down"} if execution == "sequential" else set()
    chosen = decoders.training_of(experiment, MeshShape(fsdp=16), 16, compute_dtype="bfloat16").remat
    assert set(chosen.kept) == {"input", "query", "key_value", "out", "router"} | kept
    candidates, _ = _prune(experiment)
    assert next(c for c in candidates if c.remat == "dots").estimate.training.remat == chosen
