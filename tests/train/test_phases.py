"""Runs in phases: other fields, parameters, data or another model from some step on, in one run folder."""

import dataclasses
import errno
import json
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import killed_run
import numpy as np
import pytest
import small_language_run as small
import small_run
from changes import changed
from outside_files import load

from scalejax import configs, optim
from scalejax.configs import as_data
from scalejax.data import Categorical
from scalejax.errors import UserError
from scalejax.inference import run_model
from scalejax.models.llm import model_folder
from scalejax.parallel.embedding.config import Adam as RowAdam
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures, RowwiseAdagrad
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop, phases
from scalejax.train.checkpoints import array_store, trained
from scalejax.train.checkpoints.array_store import LazyArray
from scalejax.train.experiment import Checkpoints, Experiment, Init, Phase, Tables
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import run_state
from scalejax.train.runs.run import Run
from scalejax.train.step import Program

EMA = optim.Average(name="ema", decay=0.9)


@pytest.fixture(scope="module")
def user():
    return load("shapes.py")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def stored(folder: Any) -> dict[str, Any]:
    """All arrays of the newest checkpoint of a run and what its host knew, as they lie on disk."""
    newest = trained.open_run(folder)
    found = trained.Checkpoint.read(newest.checkpoints[-1])
    arrays = {name: described for name, described in found.manifest.arrays.items()}
    values = {name: np.asarray(x[...]) for name, x in newest.params.items()}
    values |= {f"variables.{name}": np.asarray(x[...]) for name, x in newest.variables.items()}
    values |= {f"{a}.{name}": np.asarray(x[...]) for a, own in newest.averages.items() for name, x in own.items()}
    return {"arrays": arrays, "values": values, "host": found.manifest.host, "metrics": found.manifest.metrics}


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for name, value in one.pop("values").items():
        np.testing.assert_array_equal(two["values"][name], value, err_msg=name)
    two.pop("values")
    assert one == two


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubled:
    """Twice as many features, each of them there twice and of half the weight in the head: the same function."""

    def operate(self, trained: trained.Trained, fresh: trained.Trained) -> trained.Trained:
        def twice(array: Any, axis: int) -> Any:
            shape = tuple(2 * n if i == axis else n for i, n in enumerate(array.shape))
            return LazyArray(shape, array.dtype, lambda index: np.concatenate([array[...]] * 2, axis)[index])

        head = trained.params["head"]
        halved = LazyArray(head.shape, head.dtype, lambda index: head[index] / 2)
        params = {name: twice(x, x.ndim - 1) for name, x in trained.params.items() if name != "head"}
        assert set(fresh.params) == set(trained.params)
        return dataclasses.replace(
            trained,
            params=params | {"head": twice(halved, 0)},
            variables={name: twice(x, 0) for name, x in trained.variables.items()},
        )


def grown(user: Any) -> Experiment:
    """Eight features, then sixteen, then the head alone on other pictures, with averages from the second phase on."""
    return changed(
        user.shapes(),
        steps=8,
        log_every=4,
        evaluation__every=0,
        checkpoints__every=3,
        checkpoints__keep_last=9,
        phases=(
            Phase(name="wide", steps=7, changes={"model.width": 16, "averages": (EMA,)}, surgery=Doubled()),
            Phase(name="head", steps=5, changes={"trainable": "head", "data.seed": 1, "strategy.form": "explicit"}),
        ),
    )


@pytest.fixture(scope="module")
def whole(user, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    recorded = {"recipe": "shapes.py", "experiment": as_data.to_data(grown(user))}
    return folder, loop.train(grown(user), workdir=folder, record=recorded)


def test_phases_that_share_an_optimizer_share_its_schedule():
    base = Experiment(
        model=small.MODEL,
        data=None,  # pyright: ignore[reportArgumentType]
        steps=10,
        phases=(
            Phase(name="long", steps=20, changes={"gradients.clip": 1.0}),
            Phase(name="short", steps=5, changes={"optimizer": optim.Sgd()}),
            Phase(name="end", steps=1),
        ),
    )
    found = phases.resolved(base)
    assert [(s.name, s.start, s.stop, s.optimizer_from, s.experiment.steps) for s in found] == [
        ("", 0, 10, 0, 30),
        ("long", 10, 30, 0, 30),
        ("short", 30, 35, 30, 6),
        ("end", 35, 36, 30, 6),
    ]
    assert [s.experiment.gradients.clip for s in found] == [None, 1.0, 1.0, 1.0]
    assert [s.keeps_optimizer for s in found] == [False, True, False, True]
    assert base.total_steps == 36
    for step, number in ((10, 0), (11, 1), (36, 3), (40, 3)):
        assert phases.experiment_at(base, pathlib.Path("nowhere"), step) == found[number].experiment


def test_rates_of_a_phase_whose_optimizer_begins_anew_begin_with_it():
    rising = optim.WarmupLinear(peak=1.0, warmup=0.5)
    whole = Experiment(
        model=small.MODEL,
        data=None,  # pyright: ignore[reportArgumentType]
        steps=10,
        tables=Tables(schedule=rising),
        phases=(Phase(name="other", steps=8, changes={"optimizer": optim.Sgd(learning_rate=rising)}),),
    )
    phase = phases.resolved(whole)[1]
    bound: Any = {"task": None, "mesh": None, "model": None, "collection": None}  # rates know none of these
    program = Program(experiment=phase.experiment, schedules_from=phase.optimizer_from, **bound)

    def rates(skipped: int) -> list[float]:
        scale = types.SimpleNamespace(skipped=skipped)
        states: Any = [types.SimpleNamespace(step=step, loss_scale=scale) for step in range(10 + skipped, 18 + skipped)]
        return [float(program._learning_rate(state)) for state in states]

    want = pytest.approx([float(rising.build(8)(step)) for step in range(8)])
    assert [float(program.row_schedule(step)) for step in range(10, 18)] == want
    assert (rates(0), rates(3)) == (want, want)


def test_what_a_run_knows_on_the_host_comes_back_from_its_checkpoint():
    best = run_state.Best(step=12, value=0.5, final=0.25)
    known = run_state.HostState(examples=640, data_from=480, weight=123.0, flops=7e9, best=best)
    assert run_state.HostState.from_dict(json.loads(json.dumps(known.to_dict())), {}) == known
    assert known.position == 160


@pytest.mark.slow
def test_a_phase_that_changes_nothing_is_the_run_without_it(texts, tmp_path):
    one = small.experiment(texts, steps=12, optimizer__learning_rate=optim.WarmupCosine(peak=1e-2, warmup=0.25))
    two = dataclasses.replace(one, steps=5, phases=(Phase(name="more", steps=7),))
    loop.train(one, workdir=tmp_path / "one")
    loop.train(two, workdir=tmp_path / "two")
    a, b = stored(tmp_path / "one"), stored(tmp_path / "two")
    for name, value in a["values"].items():
        np.testing.assert_array_equal(b["values"][name], value, err_msg=name)
    assert a["host"]["examples"] == b["host"]["examples"]
    rates = [
        {
            line["step"]: line["learning_rate"]
            for line in read_lines(tmp_path / name / "metrics.jsonl")
            if "learning_rate" in line
        }
        for name in ("one", "two")
    ]
    assert {step: rates[1][step] for step in rates[0]} == rates[0]


@pytest.mark.slow
def test_a_surgery_keeps_the_function_and_the_run_goes_on(user, whole):
    folder, summary = whole
    assert summary["steps"] == 20
    assert summary["test_accuracy"] > 0.6
    newest = trained.open_run(folder)
    assert newest.params["head"].shape == (16, 2)
    assert newest.step == 20
    report = (folder / "report.html").read_text()
    assert all(f">{phase}<" in report for phase in ("wide", "head"))
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "window"] == [4, 8, 12, 15, 16, 20]
    experiment = grown(user)
    runs = loop._bind(experiment, None)
    state, _ = runs[0].open_to_score(folder, 8)
    before = runs[0].score(state, "validation")["val_loss"]
    with loop._checkpointer(folder / "checkpoints", runs[0]) as checkpoints:
        checkpoints.become(experiment.checkpoints, runs[0].identity())
        state, host = runs[1].follow(runs[0], checkpoints)
    assert host.examples == 8 * 32
    np.testing.assert_allclose(runs[1].score(state, "validation")["val_loss"], before, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(state.averages["ema"]["head"]), np.asarray(state.params["head"]))


@pytest.mark.default_cases("step 16")
@pytest.mark.parametrize("step", [5, 9, 16], ids="step {}".format)
def test_a_run_that_is_killed_in_any_phase_goes_on_to_the_same_bits(step, user, whole, tmp_path):
    summary = killed_run.train(grown(user), tmp_path, at=step)
    assert summary["test_accuracy"] == whole[1]["test_accuracy"]
    assert_same(stored(tmp_path), stored(whole[0]))
    assert read_lines(tmp_path / "metrics.jsonl") == read_lines(whole[0] / "metrics.jsonl")


def test_other_data_begin_with_their_first_example(whole):
    newest = trained.Checkpoint.read(whole[0] / "checkpoints" / "20").manifest.host
    assert newest["examples"] == 20 * 32
    assert newest["data_from"] == 15 * 32


def test_frozen_parameters_are_stored_once(user, whole, tmp_path):
    folder, _ = whole
    checkpoints = folder / "checkpoints"
    (frozen,) = checkpoints.glob("frozen-*")
    assert frozen.name == "frozen-18"
    for step in (18, 20):
        said = json.loads((checkpoints / str(step) / "manifest.json").read_text())["content"]
        assert said["frozen"]["folder"] == frozen.name
        assert set(said["frozen"]["names"]) == {"params.filters", "params.norm/scale", "params.norm/bias"}
    own = trained.Checkpoint.read(checkpoints / "20").whole()
    assert [name for name in own if name.startswith("params.")] == ["params.head"]
    # What reads a run reads both, and misses what is gone.
    opened = trained.open_run(folder)
    assert set(opened.params) == {"filters", "norm/scale", "norm/bias", "head"}
    frozen.rename(tmp_path / "away")
    try:
        with pytest.raises(UserError, match="frozen-18, which holds the frozen parameters, is missing"):
            trained.open_run(folder)
        with pytest.raises(UserError, match="frozen-18, which holds the frozen parameters, is missing"):
            loop.train(grown(user), workdir=folder, resume="must")
    finally:
        (tmp_path / "away").rename(frozen)


@pytest.mark.slow
def test_frozen_parameters_that_nobody_names_any_more_are_removed(user, tmp_path):
    phase = Phase(name="all", steps=6, changes={"trainable": ".*"})
    loop.train(
        changed(
            user.shapes(), steps=4, trainable="head", checkpoints__every=2, checkpoints__keep_best=0, phases=(phase,)
        ),
        workdir=tmp_path,
    )
    assert not list((tmp_path / "checkpoints").glob("frozen-*"))
    assert set(trained.open_run(tmp_path).params) == {"filters", "norm/scale", "norm/bias", "head"}


@pytest.mark.slow
def test_routers_alone_are_trained_in_a_second_phase(texts, tmp_path):
    experiment = small.experiment(
        texts, steps=4, phases=(Phase(name="head", steps=4, changes={"trainable": "head/.*"}),)
    )
    loop.train(experiment, workdir=tmp_path)
    first, last = (trained.open_run(tmp_path, step).params for step in (4, 8))
    changed_ones = {path for path in last if not np.array_equal(first[path][...], last[path][...])}
    assert changed_ones == {"head/weight"}


def test_an_earlier_step_is_scored_with_the_model_of_its_phase(user, whole):
    for step in (6, 12, 20):
        found = loop.evaluate(grown(user), workdir=whole[0], split="test", step=step)
        assert (found["steps"], found["examples"]) == (step, step * 32)


@pytest.mark.slow
def test_a_run_may_begin_with_a_surgery_of_another(user, whole, tmp_path):
    source = changed(user.shapes(), steps=3)
    loop.train(source, workdir=tmp_path / "source")
    digest = trained.open_run(tmp_path / "source").digest
    init = Init(path=str(tmp_path / "source"), digest=digest[:12], surgery=Doubled())
    experiment = changed(source, model__width=16, init=init)
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(MeshShape(), jax.devices()[:1]))
    state, host = run.begin()
    assert host.examples == 0
    plain = Run.bind(source, data, make_mesh(MeshShape(), jax.devices()[:1]))
    there, _ = plain.open_to_score(tmp_path / "source", None)
    np.testing.assert_allclose(
        run.score(state, "validation")["val_loss"], plain.score(there, "validation")["val_loss"], rtol=1e-5
    )
    other = changed(experiment, init=dataclasses.replace(init, digest="abc"))
    with pytest.raises(UserError, match=r"has the digest .* and init.digest is 'abc'"):
        Run.bind(other, data, make_mesh(MeshShape(), jax.devices()[:1])).begin()


def click_experiment(rows: Any, **changes: Any) -> Experiment:
    """Rows in full checkpoints at 4 and 8 and at the beginning of a phase, in deltas elsewhere; ids without bound."""
    features = (*small_run.FEATURES[:2], Categorical(name="item", rows=None))
    ids = MappedFeatures(features=("item",), id_map=IdMapConfig(rows=1 + 64 * 2, ways=2, policy="lru"))
    own = {
        "data": small_run.data(rows, categorical=features),
        "steps": 5,
        "log_every": 2,
        "evaluation__every": 0,
        "checkpoints": Checkpoints(every=2, keep_last=20, keep_best=0),
        "tables__full_every": 4,
        "tables__id_maps": (ids,),
        "tables__optimizer": RowAdam(learning_rate=0.05),
    }
    return small_run.experiment(rows, **{**own, **changes})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    columns = small_run.columns()
    item = (columns["item"] % 40).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet", {"item": item})


def tables_of(folder: Any, experiment: Experiment, step: int) -> dict[str, Any]:
    """Everything that is stored of the tables at a step, by the run of its phase."""
    (run,) = [r for r in loop._bind(experiment, None) if r.phase.start < step <= r.phase.stop]
    with loop._checkpointer(folder / "checkpoints", run) as checkpoints:
        loop._become(checkpoints, run)
        state, _ = run.restore(checkpoints, step)
    stored = run.to_stored(state)["tables"]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), stored)


@pytest.mark.slow
def test_tables_go_on_with_their_states_and_maps_in_a_phase_that_leaves_them_alone(rows, tmp_path):
    plain = click_experiment(rows, steps=9)
    phase = Phase(name="more", steps=4, changes={"gradients.clip": 1e9})
    parted = click_experiment(rows, phases=(phase,))
    loop.train(plain, workdir=tmp_path / "plain")
    loop.train(parted, workdir=tmp_path / "parted")
    one, two = tables_of(tmp_path / "plain", plain, 9), tables_of(tmp_path / "parted", parted, 9)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert any(np.any(leaf) for name, leaf in one["shop"].items() if not name.startswith("rows_"))
    killed_run.train(parted, tmp_path / "killed", at=7)
    jax.tree.map(np.testing.assert_array_equal, tables_of(tmp_path / "killed", parted, 9), two)
    # What follows a phase may build on no checkpoint of the phase before.
    manifests = {
        s: trained.Checkpoint.read(tmp_path / "parted" / "checkpoints" / f"{s}").manifest for s in (4, 5, 6, 8)
    }
    assert [step for step, manifest in manifests.items() if manifest.delta is None] == [4, 6, 8]


@pytest.mark.slow
def test_another_optimizer_of_the_tables_takes_their_rows_alone(rows, tmp_path):
    changes = {"tables.optimizer": RowwiseAdagrad(), "optimizer": optim.Sgd()}
    experiment = click_experiment(rows, phases=(Phase(name="other", steps=1, changes=changes),))
    loop.train(experiment, workdir=tmp_path)
    before = tables_of(tmp_path, experiment, 5)
    first, second = loop._bind(experiment, None)
    with loop._checkpointer(tmp_path / "checkpoints", first) as checkpoints:
        loop._become(checkpoints, first)
        state, _ = second.follow(first, checkpoints)
    after = second.to_stored(state)["tables"]
    np.testing.assert_array_equal(np.asarray(after["shop"]["rows_tail"]), before["shop"]["rows_tail"])
    fresh = second.to_stored(second.program.init())["tables"]
    states = [name for name in after["shop"] if not name.startswith(("rows_", "updated_"))]
    assert states
    for name in states:
        np.testing.assert_array_equal(np.asarray(after["shop"][name]), np.asarray(fresh["shop"][name]))
    assert int(after["(counts)"]["updates"]) == 0
    for leaf, value in before["(id maps)"]["item"].items():
        wanted = value - 5 if leaf.endswith("seen") else np.zeros_like(value) if leaf == "counts" else value
        np.testing.assert_array_equal(np.asarray(after["(id maps)"]["item"][leaf]), wanted, err_msg=leaf)


@pytest.mark.slow
def test_a_language_model_may_begin_with_a_model_folder(texts, tmp_path):
    experiment = small.experiment(texts, steps=2)
    loop.train(experiment, workdir=tmp_path / "run")
    model_folder.convert(run_model.open_run(tmp_path / "run", experiment), tmp_path / "model", to="model")
    model_folder.convert(run_model.open_run(tmp_path / "run", experiment), tmp_path / "theirs", to="huggingface")
    there = trained.open_run(tmp_path / "run").params
    for name in ("model", "theirs"):
        for mesh in (MeshShape(fsdp=1), MeshShape(fsdp=2, tensor=2)):
            changes = {"init": str(tmp_path / name), "placement__mesh": mesh, "strategy__replicate_below": 0}
            begun = changed(experiment, **changes)
            run = Run.bind(begun, experiment.data.build(), make_mesh(mesh, jax.devices()[: mesh.fsdp * mesh.tensor]))
            state, _ = run.begin()
            for path, value in state.params.items():
                np.testing.assert_array_equal(np.asarray(value), there[path][...], err_msg=path)
    for init, message in (
        (Init(path=str(tmp_path / "model"), step=2), "is no run folder, and so step, average and digest mean nothing"),
        (str(texts), "has no model.json"),
        (str(tmp_path / "nowhere"), "nowhere is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            Run.bind(changed(experiment, init=init), experiment.data.build(), make_mesh(MeshShape())).begin()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshHead:
    """The trained model with the head of the fresh one."""

    def operate(self, trained: trained.Trained, fresh: trained.Trained) -> trained.Trained:
        return dataclasses.replace(trained, params={**trained.params, "head/weight": fresh.params["head/weight"]})


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "optimizer and parameters"])
def test_a_surgery_reads_what_is_fresh_wherever_it_lies(texts, offload, tmp_path):
    mesh = MeshShape(fsdp=8)
    changes = {"placement__mesh": mesh, "placement__offload": offload, "averages": (EMA,)}
    phase = Phase(name="head", steps=2, surgery=FreshHead())
    experiment = small.experiment(texts, steps=2, phases=(phase,), **changes)
    loop.train(experiment, workdir=tmp_path)
    first, second = loop._bind(experiment, None)
    with loop._checkpointer(tmp_path / "checkpoints", first) as checkpoints:
        loop._become(checkpoints, first)
        state, _ = second.follow(first, checkpoints)
    fresh, before = second.program.init().params, trained.open_run(tmp_path, 2).params
    for path, value in state.params.items():
        wanted = np.asarray(fresh[path]) if path == "head/weight" else before[path][...]
        np.testing.assert_array_equal(np.asarray(value), wanted, err_msg=path)
        np.testing.assert_array_equal(np.asarray(state.averages["ema"][path]), wanted, err_msg=path)


@pytest.mark.slow
def test_scores_of_other_data_keep_no_checkpoint(user, tmp_path):
    """The best of a phase is kept, although that of easier data before was better."""
    easy = changed(
        user.shapes(),
        steps=40,
        evaluation__every=10,
        checkpoints__every=10,
        checkpoints__keep_last=1,
        phases=(
            Phase(name="noise", steps=40, changes={"data": user.Shapes(seed=1), "optimizer": user.shapes().optimizer}),
        ),
    )
    loop.train(easy, workdir=tmp_path)
    scored = {}
    for line in read_lines(tmp_path / "metrics.jsonl"):
        if line["kind"] == "evaluation" and line["split"] == "validation" and line["step"] > 40:
            scored.setdefault(line["step"], line["accuracy"])
    best = min(step for step in scored if scored[step] == max(scored.values()))
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()}
    assert kept == {best, 80}
    assert trained.Checkpoint.read(tmp_path / "checkpoints" / "80").manifest.host["best"]["step"] == best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases_", "message"),
    [
        ((), "phase is 'wide' in the checkpoint and absent here"),
        ((Phase(name="broad", steps=7, changes={"model.width": 16}, surgery=Doubled()),), "phase is 'wide' .* 'broad'"),
    ],
)
def test_a_checkpoint_of_a_phase_is_not_taken_for_that_of_another(user, tmp_path, phases_, message):
    experiment = changed(grown(user), steps=4, checkpoints__every=2)
    loop.train(dataclasses.replace(experiment, phases=experiment.phases[:1]), workdir=tmp_path)
    other = dataclasses.replace(experiment, steps=experiment.steps if phases_ else 30, phases=phases_)
    with pytest.raises(UserError, match=message):
        loop.train(other, workdir=tmp_path, resume="must")


@pytest.mark.slow
def test_id_maps_keep_their_order_in_time_where_a_run_begins_with_another(rows, tmp_path):
    experiment = click_experiment(rows, steps=8)
    loop.train(experiment, workdir=tmp_path)
    found = trained.open_run(tmp_path)
    assert int(found.updates[...]) == 8
    begun = click_experiment(rows, init=str(tmp_path))
    run = Run.bind(begun, begun.data.build(), make_mesh(MeshShape()))
    state, _ = run.begin()
    before = found.maps["item"]["seen"][...]
    after = np.asarray(state.tables["maps"]["item"]["seen"])
    occupied = found.maps["item"]["frequency"][...] > 0
    np.testing.assert_array_equal(after[occupied], before[occupied] - 8)
    assert after[occupied].max() < 0 == int(state.tables["updates"])


def test_a_full_disk_while_frozen_parameters_are_stored_is_one_message(user, tmp_path, monkeypatch):
    def full(store):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(array_store.ArrayStore, "wait", full)
    with pytest.raises(UserError, match=r"cannot save checkpoint .* intact.*: .*[Nn]o space"):
        loop.train(changed(user.shapes(), steps=2, trainable="head"), workdir=tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_model_that_was_written_is_begun_with_and_not_trained_on(user, tmp_path):
    experiment = changed(user.shapes(), steps=2)
    loop.train(experiment, workdir=tmp_path / "run")
    trained.write_run(tmp_path / "written", trained.open_run(tmp_path / "run"))
    with pytest.raises(UserError, match=r"holds a model and no state of training, .* --set init=.*written"):
        loop.train(changed(experiment, steps=4), workdir=tmp_path / "written", resume="must")


@pytest.mark.slow
def test_a_graph_network_goes_on_in_a_phase(tmp_path):
    plain = configs.load("gcn-smoke", ["steps=8", "log_every=2", "evaluation.every=0"])
    parted = dataclasses.replace(plain, steps=5, phases=(Phase(name="more", steps=3),))
    loop.train(plain, workdir=tmp_path / "plain")
    loop.train(parted, workdir=tmp_path / "parted")
    one, two = (stored(tmp_path / name)["values"] for name in ("plain", "parted"))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_an_experiment_with_phases_is_data(user):
    experiment = grown(user)
    data = as_data.to_data(experiment)
    assert data["fields"]["phases"][0]["fields"]["changes"]["fields"]["model.width"] == 16
    assert as_data.same(experiment, grown(user))
    assert as_data.diff(experiment, changed(experiment, phases=experiment.phases[:1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"changes": {"model.depth": 3}}, "'more' changes model.depth, but there is no field 'depth': NetConfig has"),
        ({"changes": {"seed": 3}}, "'more' changes seed, which holds for the whole run"),
        ({"changes": {"checkpoints": 3}}, "'more' changes checkpoints, which holds for the whole run"),
        ({"changes": {"gradients.clip": -1.0}}, "'more' changes gradients.clip: Gradients: clip must be above 0"),
        ({"changes": {"trainable": "nose/.*"}}, "trainable='nose/.*' names none"),
        ({"steps": 0}, "Phase 'more': steps must be a whole number of at least 1"),
        ({"name": "a b"}, "name must be of letters"),
        ({"changes": {"model.width": 16}}, "'more' has no surgery, and so it must have the model of the phase before"),
        ({"changes": {"model.width": 9}, "surgery": Doubled()}, "'more': .*does not fit the model: of other shapes"),
    ],
)
def test_mistakes_are_named(user, phase, message, tmp_path):
    with pytest.raises(UserError, match=message):
        made = Phase(**{"name": "more", "steps": 2, **phase})
        loop.train(changed(user.shapes(), steps=2, phases=(made,)), workdir=tmp_path)


def test_all_phases_have_one_room_for_distinct_rows():
    """Its size is in the shapes of a step, which a width that returns would compile anew for a room of its own."""
    sets = ["placement.mesh=none", "data.batch_size=64"]
    runs = loop._bind(configs.load("dlrm-smoke_alternate", sets), None)
    assert runs[0].program is runs[2].program
    rooms = []
    for run in (runs[0], runs[2]):
        with run.feed(run_state.HostState(), 1) as feed:
            feed.take()
        rooms.append(run.room)
    assert rooms[0] is rooms[1]
    assert rooms[0]._of  # a feed asks it
