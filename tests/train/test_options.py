"""What a run may train of a model, the averages that it keeps beside it, and what a skipped step leaves alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import killed_run
import numpy as np
import pytest
import small_language_run as small
from changes import changed
from outside_files import load

from scalejax import optim
from scalejax.errors import UserError
from scalejax.optim import AdamW, Average, Constant, Sgd
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Evaluation, Gradients, Precision
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run
from scalejax.train.task import Field

ONE, EIGHT = MeshShape(fsdp=1), MeshShape(replica=2, fsdp=4)
MLP_AND_HEAD = "layers/mlp/.*|head/weight"
EMA = Average(name="ema", decay=0.9)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def host(tree):
    return jax.tree.map(np.asarray, tree)


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def paths_in(tree):
    """Paths of parameters of which a tree has a leaf."""
    paths = [path[-1] for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path.key for path in paths if isinstance(path, jax.tree_util.DictKey)}


# Frozen parameters.


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Fsdp(form="explicit", accumulate="local", sharding="SHARD_GRAD_OP"),
        Ddp(bucket_bytes=4096),
    ],
    ids=["local", "ddp"],
)
def test_frozen_parameters_keep_their_bits_and_the_others_move_as_if_all_were_trained(texts, x64, strategy):
    found = {}
    changes = {
        "optimizer": Sgd(learning_rate=Constant(value=0.1), momentum=0.9),
        "gradients": Gradients(microbatch=1),
        "precision": Precision(params="float64"),
        "strategy": strategy,
    }
    for pattern in (".*", MLP_AND_HEAD):
        run = small.bind(texts, EIGHT, trainable=pattern, **changes)
        state, at = run.begin()
        before = host(state.params)
        state, losses = small.steps(run, state, at, 1)
        found[pattern] = before, host(state.params), losses, state
    before, whole, losses, _ = found[".*"]
    begun, part, same_losses, state = found[MLP_AND_HEAD]
    trained = run.program.trained
    assert trained == {path for path in before if path.startswith("layers/mlp/")} | {"head/weight"}
    np.testing.assert_allclose(same_losses, losses, rtol=1e-12)
    for path in before:
        assert np.array_equal(begun[path], before[path])
        assert np.array_equal(part[path], before[path]) == (path not in trained), path
        np.testing.assert_allclose(part[path], (whole if path in trained else before)[path], rtol=1e-9, atol=1e-12)
    assert paths_in(state.optimizer) == trained
    # The norm is that of the gradients that there are: of plain SGD, of the step that was taken.
    norm = np.sqrt(sum(((part[path] - before[path]) ** 2).sum() for path in trained)) / 0.1
    np.testing.assert_allclose(float(state.metrics["steps"].grad_norm.value), norm, rtol=1e-9)


def test_a_pattern_that_names_nothing_is_refused(texts):
    for pattern, message in (
        ("layers/mpl/.*", "trainable='layers/mpl/.*' names none of the .* parameters"),
        ("mlp", "names none of the .* It is a regular expression of whole paths"),
        ("layers/(", "trainable must be a regular expression of paths; got 'layers/[(]'"),
    ):
        with pytest.raises(UserError, match=message):
            small.bind(texts, ONE, trainable=pattern)


# Averages.


def recursion(before, after, decay):
    """The average after a step, in float64."""
    return {path: decay * before[path] + (1 - decay) * np.asarray(after[path], np.float64) for path in before}


def test_averages_follow_their_recursion_and_are_what_is_scored(texts):
    late = Average(name="late", decay=0.5, from_step=3)
    averages = {"averages": (EMA, late), "trainable": "layers/.*"}
    run = small.bind(texts, EIGHT, **averages, evaluation__average="ema")
    state, at = run.begin()
    assert state.averages.keys() == {"ema", "late"}
    trained = run.program.trained
    want = {name: {path: np.asarray(state.params[path], np.float64) for path in trained} for name in ("ema", "late")}
    for step in range(5):
        state, _ = small.steps(run, state, at.after(8 * step), 1)
        want["ema"] = recursion(want["ema"], state.params, 0.9)
        want["late"] = recursion(want["late"], state.params, 0.5 if step >= 3 else 0.0)
        for name, average in want.items():
            assert state.averages[name].keys() == trained
            for path, value in average.items():
                np.testing.assert_allclose(state.averages[name][path], value, rtol=2e-6, atol=1e-7)
                if name == "late" and step < 3:
                    assert np.array_equal(state.averages[name][path], state.params[path])
    for path in trained:
        assert state.averages["ema"][path].sharding == state.params[path].sharding
        assert not np.array_equal(state.averages["ema"][path], state.params[path])

    def loss(run, state):
        batches = run.program.task.eval_batches(run.data, run.mesh, "validation")
        return scoring.score(run.program, state, batches).measure()["loss"]

    plain = small.bind(texts, EIGHT, **averages)
    averaged = dataclasses.replace(state, params={**state.params, **state.averages["ema"]})
    assert loss(run, state) == loss(plain, averaged) != loss(plain, state)
    # A run scores each state that it is given, not the last one of that step.
    assert plain.score(averaged, "validation")["val_loss"] == loss(run, state)
    assert plain.score(state, "validation")["val_loss"] == loss(plain, state)


@pytest.mark.slow
def test_a_killed_run_with_frozen_parameters_and_averages_goes_on_to_the_same_bits(texts, tmp_path):
    options = {"trainable": MLP_AND_HEAD, "averages": (EMA,), "evaluation__average": "ema", "evaluation__every": 4}
    experiment = small.experiment(texts, **options)
    whole = loop.train(experiment, workdir=tmp_path / "whole")
    resumed = killed_run.train(experiment, tmp_path / "killed", at=7)
    assert resumed["val_loss"] == whole["val_loss"]
    states = []
    for name in ("whole", "killed"):
        run = Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape()))
        with Checkpointer(tmp_path / name / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
            states.append(host(dataclasses.replace(run.restore(checkpoints, 12)[0], key=())))
    assert same_bits(*states)
    assert not same_bits(states[0].averages["ema"], {path: states[0].params[path] for path in run.program.trained})
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")]
    assert lines[0] == lines[1]
    again = loop.evaluate(experiment, workdir=tmp_path / "killed", split="validation")
    assert again["val_loss"] == whole["val_loss"]
    plain = dataclasses.replace(experiment, evaluation=dataclasses.replace(experiment.evaluation, average=None))
    assert loop.evaluate(plain, workdir=tmp_path / "killed", split="validation")["val_loss"] != whole["val_loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"averages": (EMA,), "evaluation__average": "emma"},
            "evaluation.average is 'emma', but the averages of the run are: ema. Name one of them",
        ),
        ({"evaluation__average": "ema"}, "evaluation.average is 'ema', but the averages of the run are: none"),
        ({"evaluation__statistics": 2}, "evaluation.statistics is 2, but LlamaConfig keeps no running means"),
        ({"averages": (EMA, dataclasses.replace(EMA, decay=0.5))}, "averages: names must differ; got ema, ema"),
    ],
)
def test_averages_that_are_not_there_are_refused(texts, changes, message):
    experiment = small.experiment(texts, **changes)
    with pytest.raises(UserError, match=message):
        binding.bind(experiment, experiment.data.schema(), make_mesh(EIGHT))


# Steps that are skipped.


@pytest.mark.parametrize(
    "strategy",
    [
        Fsdp(form="explicit", param_dtype="float16"),
        pytest.param(Fsdp(param_dtype="float16"), marks=pytest.mark.slow),
    ],
    ids=["explicit", "implicit"],
)
def test_a_skipped_step_changes_neither_parameters_nor_averages_nor_the_optimizer(texts, strategy):
    run = small.bind(
        texts,
        EIGHT,
        strategy=strategy,
        optimizer=AdamW(learning_rate=Constant(value=1e-2)),
        precision=Precision(compute="float16"),
        gradients__loss_scaling=LossScaling(initial=2.0**22, interval=100),
        averages=(EMA,),
        trainable=MLP_AND_HEAD,
    )
    state, at = run.begin()
    skipped = taken = 0
    for step in range(12):
        before, scale = host((state.params, state.averages, state.optimizer)), float(state.loss_scale.scale)
        state, _ = small.steps(run, state, at.after(8 * step), 1)
        after = host((state.params, state.averages, state.optimizer))
        if int(state.loss_scale.skipped) > skipped:
            skipped += 1
            assert same_bits(before, after)
            assert float(state.loss_scale.scale) == scale / 2
            continue
        taken += 1
        assert float(state.loss_scale.scale) == scale
        frozen = set(after[0]) - run.program.trained
        assert same_bits(*({path: params[path] for path in frozen} for params in (before[0], after[0])))
        assert not same_bits(before[0], after[0])
        for path, value in recursion(before[1]["ema"], after[0], 0.9).items():
            np.testing.assert_allclose(after[1]["ema"][path], value, rtol=2e-6, atol=1e-7)
        if taken == 3:
            break
    assert skipped >= 1
    assert taken == 3
    sums = state.metrics["steps"]
    assert (int(sums.skipped), int(sums.nonfinite), int(sums.steps)) == (skipped, 0, skipped + taken)
    counters = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 0]
    assert counters
    assert {int(count) for count in counters} == {taken}


# Optimizers by path, and what the host draws for a step.


@pytest.mark.slow
def test_optimizers_by_path_on_eight_devices_are_those_on_one(texts, x64):
    rules = (optim.For(paths="layers/.*", optimizer=optim.AdamW()), optim.For(paths=".*", optimizer=Sgd()))
    found = []
    for mesh in (ONE, EIGHT):
        run = small.bind(texts, mesh, optimizer=optim.ByPath(rules=rules), precision=Precision(params="float64"))
        state, at = run.begin()
        state, losses = small.steps(run, state, at, 3)
        found.append((losses, host(state.params)))
        sharded = {path for path, x in run.program.abstract_state().params.items() if any(x.sharding.spec)}
        for path, leaf in jax.tree_util.tree_flatten_with_path(run.program.abstract_state().optimizer)[0]:
            if getattr(path[-1], "key", None) in sharded:
                assert any(leaf.sharding.spec), path
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    for path, value in found[0][1].items():
        np.testing.assert_allclose(found[1][1][path], value, rtol=1e-9, atol=1e-12, err_msg=path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """A classifier of shapes whose features are scaled by what the host drew for the step."""

    net: Any

    def task(self, schema):
        outer = type(self.net.task(schema))

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class ScaledTask(outer):
            def fields(self):
                return super().fields() | {"scale": Field(shape=(2,), dtype="float32", scope="step")}

            def drawn(self, rng):
                return {"scale": rng.uniform(0.5, 1.5, 2).astype(np.float32)}

            def loss(self, model, batch, *, keys, gather):
                found = super().loss(model, batch, keys=keys, gather=gather)
                factor = batch["scale"].sum().astype(found.sum.dtype)
                outputs = {**found.outputs, "scale": jnp.broadcast_to(batch["scale"], (len(batch["labels"]), 2))}
                return dataclasses.replace(found, sum=found.sum * factor, outputs=outputs)

        return ScaledTask(width=self.net.width, schema=schema)


@pytest.mark.slow
def test_fields_that_the_host_draws_are_those_of_seed_and_step(tmp_path, monkeypatch):
    user = load("shapes.py")
    experiment = changed(user.shapes(), model=Scales(net=user.NetConfig()), steps=6, log_every=2, checkpoints__every=3)
    seen, place = [], convert.place_fields

    def watched(program, batch, processes, step):
        placed = place(program, batch, processes, step)
        seen.append(np.asarray(placed["scale"]))
        return placed

    monkeypatch.setattr(convert, "place_fields", watched)
    whole = loop.train(dataclasses.replace(experiment, evaluation=Evaluation()), workdir=tmp_path / "whole")
    expected = [np.random.default_rng((0, step)).uniform(0.5, 1.5, 2).astype(np.float32) for step in range(7)]
    np.testing.assert_array_equal(seen[:6], expected[1:])
    assert all(np.array_equal(one, expected[0]) for one in seen[-2:])
    loop.train(changed(experiment, steps=3), workdir=tmp_path / "two")
    again = loop.train(experiment, workdir=tmp_path / "two", resume="must")
    assert again["test_loss"] == whole["test_loss"]
    data = experiment.data.build()
    losses = []
    for strategy, devices in ((Fsdp(), 1), (Fsdp(form="explicit"), 8)):
        mesh = make_mesh(MeshShape(), jax.devices()[:devices])
        program = binding.bind(changed(experiment, strategy=strategy), data.schema, mesh)
        placed = convert.to_device(next(data.train_batches(start_example=0)), program, step=1)
        losses.append(float(program.train_step(program.init(), placed)[1]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
