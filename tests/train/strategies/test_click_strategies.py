"""A click model under every strategy, in both forms, in parts, with what else a run may have, equals one device.

In float64, where what differs is the order of sums alone. Looked-up rows are inputs of the gradient that are never
exchanged; their gradients go to the update of the tables.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import small_run
import stablehlo
from changes import changed
from covering import covering

from scalejax import optim
from scalejax.data import Categorical
from scalejax.errors import UserError
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import FactorizationMachine, FeatureCross, SelfAttention
from scalejax.models.recsys.towers import DlrmTower, TowersConfig
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.towers import Partition
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.batches.pipeline import Pipeline
from scalejax.train.experiment import Checkpoints, Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run

SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
STRATEGIES = {
    **{f"implicit {s}": Fsdp(sharding=s) for s in SHARDINGS},
    **{f"explicit {s}": Fsdp(sharding=s, form="explicit") for s in SHARDINGS},
    "local FULL_SHARD": Fsdp(form="explicit", accumulate="local"),
    "ddp": Ddp(bucket_bytes=4096),
    "ddp local": Ddp(bucket_bytes=4096, accumulate="local"),
}
MESH = MeshShape(replica=2, fsdp=4)
MAPS = (MappedFeatures(features=("item",), id_map=IdMapConfig(rows=1217)),)
WITH = {
    "nothing": {},
    "clip": {"gradients__clip": 0.05},
    "id maps": {"tables__id_maps": MAPS},
    "dedup": {"tables__dedup": (DedupGroup(features=("shop", "hour"), rows_per_example=1.0),)},
    "ids ahead": {"tables__pipeline": "ids"},
    "stale": {"tables__pipeline": "stale"},
    "deltas": {"tables__full_every": 6},
    "frozen": {"trainable": "head/.*"},
    "averages": {"averages": (optim.Average(decay=0.5),), "evaluation__average": "ema"},
    "host memory": {"placement__offload": "optimizer and parameters"},
    "scaled": {"gradients__loss_scaling": LossScaling(initial=2.0**20, interval=2)},
}
CHANGES_NOTHING = ("host memory", "scaled")
"""Compared with one device without it."""
CASES = covering(
    [
        (strategy, parts, extra, "implicit" in strategy)
        for strategy in reversed(STRATEGIES)  # HYBRID_SHARD, which cuts and copies, is taken before the others
        if "local" not in strategy
        for parts in (2, 1)
        for extra in WITH
    ],
    columns=[(0, 1), (1, 2), (2, 3)],
)
"""What a run may have meets every form, whole and in parts."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def double(rows, **changes):
    experiment = small_run.experiment(rows, precision=Precision(params="float64"), tables__dtype="float64")
    experiment = changed(experiment, **{"model": dataclasses.replace(experiment.model, dropout=0.0), **changes})
    if experiment.tables.id_maps:
        wide = tuple(dataclasses.replace(f, rows=None) if f.name == "item" else f for f in experiment.data.categorical)
        assert all(isinstance(f, Categorical) for f in wide)
        experiment = changed(experiment, data=dataclasses.replace(experiment.data, categorical=wide))
    return experiment


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def trained(experiment, mesh, devices, steps=4):
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(mesh, jax.devices()[:devices]))
    state, losses = run.program.init(), []
    with convert.prefetch(data.train_batches(start_example=0), run.program) as batches:
        feed = Pipeline(run.program, batches, steps)
        for _ in range(steps):
            feed.take()
            state, loss = feed.step(state)
            losses.append(float(loss))
    resting = "device" if experiment.placement.offload == "none" else "pinned_host"
    assert kinds((state.params, state.optimizer)) == {resting}
    assert kinds(state.tables) == {"device"}
    stored = run.to_stored(state)
    stored["key"] = jax.random.key_data(stored["key"])
    return losses, jax.tree.map(np.asarray, stored)


@functools.cache
def on_one_device(rows, extra, model=None):
    changes = {} if model is None else {"model": model}
    return trained(double(rows, **({} if extra in CHANGES_NOTHING else WITH[extra]), **changes), MeshShape(), 1)


def compare(rows, extra, mesh=MESH, model=None, **changes):
    losses, state = on_one_device(rows, extra, model)
    experiment = double(rows, **WITH[extra], **({} if model is None else {"model": model}))
    other, found = trained(changed(experiment, **changes), mesh, 8)
    np.testing.assert_allclose(other, losses, rtol=1e-12)
    for part in ("params", "tables", *(["averages"] if "averages" in state else [])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found[part], state[part])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("strategy", "parts", "extra"),
    [*(case[:3] for case in CASES), ("local FULL_SHARD", 2, "clip"), ("ddp local", 2, "scaled")],
)
def test_equals_one_device(rows, strategy, parts, extra):
    compare(rows, extra, strategy=STRATEGIES[strategy], gradients__microbatch=8 // parts)


CUT = ("implicit FULL_SHARD", "explicit HYBRID_SHARD")
"""Under which every parameter that divides is cut, and gathered in the backward pass again."""
DHEN = DhenConfig(
    dim=4,
    layers=(
        EnsembleLayer(
            modules=(
                FeatureCross(outputs=8),
                FactorizationMachine(outputs=8, rank=4, hidden=(16,)),
                SelfAttention(outputs=8),
            ),
            ensemble="weighted",
        ),
    ),
    repeats=2,
    bottom_hidden=(16,),
    head_hidden=(16,),
)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("strategy", CUT)
def test_dhen_of_any_sharding_beside_its_tables_equals_one_device(rows, strategy):
    compare(rows, "nothing", model=DHEN, strategy=STRATEGIES[strategy])


TOWERS = {
    "tables__exchange": Exchange(capacity_factor=8.0, route="two_level"),
    "tables__sharding": ShardingPlan(
        tables=tuple(TablePlan(table=name, kind="table_row_wise") for name in ("shop", "hour", "item"))
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("extra", ["id maps", "dedup", "stale", "deltas"])
def test_an_exchange_in_two_levels_equals_one_device(rows, extra):
    compare(rows, extra, **TOWERS)


OVER_TOWERS = TowersConfig(
    base=DlrmConfig(dim=8, bottom_hidden=(16,), top_hidden=(16,)),
    towers=Partition(towers=(("item",), ("hour", "shop"))),
    modules=(DlrmTower(dim=8, mixed=1), FactorizationMachine(outputs=2, rank=2, hidden=(8,))),
)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("strategy", CUT)
def test_towers_of_any_sharding_beside_their_tables_equal_one_device(rows, strategy):
    compare(rows, "nothing", model=OVER_TOWERS, strategy=STRATEGIES[strategy])


def gathers(rows, sharding):
    """All-gathers of a step as it states them, and the names of the parameters that are sharded."""
    experiment = small_run.experiment(rows, strategy=Fsdp(sharding=sharding, form="explicit"))
    built = binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))
    lowered = built.train_step.lower(built.abstract_state(), built.abstract_batch())
    found = stablehlo.stated_collectives(lowered, built.mesh)
    return sum(c.count for c in found if c.kind == "all-gather"), [
        name for name, spec in built.specs.items() if any(spec)
    ]


@pytest.mark.slow
def test_a_model_that_is_fetched_whole_gathers_again_where_gathered_copies_are_dropped(rows):
    kept, sharded = gathers(rows, "SHARD_GRAD_OP")
    dropped, _ = gathers(rows, "FULL_SHARD")
    assert kept == len(sharded) >= 8
    # Biases and what the features meet first have no part in the backward pass.
    matrices = [
        name for name in sharded if name.startswith(("layers", "head")) and not name.endswith(("bias", "scale"))
    ]
    assert len(matrices) <= dropped - kept <= len(sharded)
    assert len(matrices) >= 8


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (MeshShape(fsdp=2, replica=2, context=2), "explicit FULL_SHARD"),
        (MeshShape(fsdp=4, context=2), "ddp"),
        (MeshShape(fsdp=4, stage=2), "implicit FULL_SHARD"),
        (MeshShape(fsdp=4, tensor=2), "explicit FULL_SHARD"),
    ],
    ids=str,
)
def test_axes_that_a_click_model_does_not_know_hold_rows_of_its_tables_alone(rows, mesh, strategy):
    compare(rows, "nothing", mesh, strategy=STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", ["explicit FULL_SHARD", "ddp"])
def test_stages_over_which_nothing_is_cut_are_refused_where_they_would_be_a_pipeline(rows, strategy):
    experiment = small_run.experiment(rows, strategy=STRATEGIES[strategy])
    with pytest.raises(UserError, match=r"^strategy=\w+ in its explicit form runs placement.mesh.stage=2 .* Wukong"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape(fsdp=4, stage=2)))


OVERFLOWS = list(
    itertools.product(
        ("implicit FULL_SHARD", "explicit HYBRID_SHARD", "ddp"),
        (1, 2),
        ("ordered", "exact"),
        ("none", "stale"),
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "parts", "accumulate", "pipeline"), covering(OVERFLOWS, columns=[]))
def test_an_overflow_leaves_everything_as_it_was_but_the_factor(rows, strategy, parts, accumulate, pipeline):
    """From a factor beyond what float16 can hold down to one that it can, and on."""
    experiment = small_run.experiment(
        rows,
        gradients__loss_scaling=LossScaling(initial=2.0**32, interval=100),
        gradients__microbatch=8 // parts,
        precision=Precision(compute="float16"),
        strategy=STRATEGIES[strategy],
        tables__accumulate=accumulate,
        tables__pipeline=pipeline,
        averages=(optim.Average(decay=0.5),),
    )
    run = Run.bind(experiment, experiment.data.build(), make_mesh(MESH))

    def held(state):
        stored = run.to_stored(state)
        return jax.tree.map(np.asarray, {name: stored[name] for name in ("params", "optimizer", "averages", "tables")})

    state, host = run.begin()
    begun = held(state)
    with run.feed(host, 40) as feed:
        for number in range(1, 41):
            feed.take()
            state, _ = feed.step(state)
            if int(state.loss_scale.skipped) < number:
                break
            assert float(state.loss_scale.scale) == 2.0 ** (32 - number)
            jax.tree.map(np.testing.assert_array_equal, held(state), begun)
    skipped = int(state.loss_scale.skipped)
    assert 4 < skipped < 40
    assert number == skipped + 1
    moved = held(state)
    for part in ("params", "averages"):
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (moved[part], begun[part])), strict=True))
    for name in ("shop", "hour", "item"):
        pairs = zip(*(jax.tree.leaves(tables["tables"][name]) for tables in (moved, begun)), strict=True)
        assert any((a != b).any() for a, b in pairs)
    # The optimizer has counted the steps that were taken, and not those that were skipped.
    counts = [int(leaf) for leaf in jax.tree.leaves(moved["optimizer"]) if leaf.ndim == 0]
    assert counts
    assert set(counts) == {1}
    sums = state.metrics["steps"]
    assert (int(sums.skipped), int(sums.nonfinite), int(sums.steps)) == (skipped, 0, number)


@pytest.mark.slow
def test_a_run_with_averages_and_frozen_parameters_goes_on_to_the_same_bits(rows, tmp_path):
    options = {
        "averages": (optim.Average(name="slow", decay=0.9),),
        "evaluation__average": "slow",
        "trainable": "(layers|head)/.*",
        "strategy": Fsdp(form="explicit"),
        "checkpoints": Checkpoints(every=4),
    }
    experiment = small_run.experiment(rows, **options)
    loop.train(experiment, workdir=tmp_path / "whole")
    loop.train(dataclasses.replace(experiment, steps=4), workdir=tmp_path / "parts")
    loop.train(experiment, workdir=tmp_path / "parts", resume="must")
    states = [small_run.restored(experiment, tmp_path / name) for name in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    stored = states[0][0]
    assert set(stored["averages"]["slow"]) == {name for name in stored["params"] if name.startswith(("layers", "head"))}
    scored = loop.evaluate(experiment, workdir=tmp_path / "whole", split="validation")
    plain = loop.evaluate(changed(experiment, evaluation__average=None), workdir=tmp_path / "whole", split="validation")
    assert scored["val_logloss"] != plain["val_logloss"]


@pytest.mark.slow
def test_quantized_modules_train_under_an_explicit_strategy(rows):
    rule = QuantizationRule(module_path="head/.*", weight_qtype="mxint8", act_qtype="mxint8", tail="pad")
    experiment = small_run.experiment(rows, quantization=(rule,), strategy=Fsdp(form="explicit"))
    losses, _ = trained(experiment, MESH, 8)
    plain, _ = trained(small_run.experiment(rows), MESH, 8)
    assert losses != plain
    np.testing.assert_allclose(losses, plain, rtol=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainable": "nothing/.*"}, r"trainable='nothing/\.\*' names none of the \d+ parameters"),
        ({"trainable": "("}, "trainable must be a regular expression"),
        ({"evaluation__average": "ema"}, "evaluation.average is 'ema', but the averages of the run are: none"),
        (
            {"checkpoints": Checkpoints(best_metric="dice")},
            "is scored by logloss, ne, auc, gauc",
        ),
    ],
)
def test_mistakes_are_named(rows, changes, message):
    experiment = small_run.experiment(rows, **changes)
    with pytest.raises(UserError, match=message):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape())).abstract_state()


@pytest.mark.slow
def test_parameters_and_rows_begin_with_those_of_another_run(rows, tmp_path):
    experiment = small_run.experiment(rows, steps=6)
    loop.train(experiment, workdir=tmp_path)
    there, _ = small_run.restored(experiment, tmp_path)
    run = Run.bind(changed(experiment, init=str(tmp_path)), experiment.data.build(), make_mesh(MESH))
    state, host = run.begin()
    here = jax.tree.map(np.asarray, {k: v for k, v in run.to_stored(state).items() if k in ("params", "tables")})
    jax.tree.map(np.testing.assert_array_equal, here["params"], there["params"])
    for name in ("shop", "hour", "item"):
        for part in ("rows_body", "rows_tail"):
            if part in here["tables"][name]:
                np.testing.assert_array_equal(here["tables"][name][part], there["tables"][name][part])
    assert host.examples == 0
    assert int(state.step) == 0
