"""A classifier of images from a user's file: no edit in the package, and everything that other models have."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changes import changed
from outside_files import load

from scalejax import optim
from scalejax.data.arrays import ArrayDataSet
from scalejax.errors import UserError
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Precision
from scalejax.train.metrics.classification import Accuracy
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import add, pair_zeros, ratio
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run


@pytest.fixture(scope="module")
def user():
    return load("shapes.py")


@pytest.fixture(scope="module")
def trained(user, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return folder, loop.train(user.shapes(), workdir=folder)


def stored(experiment, folder, devices=None):
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(MeshShape(), jax.devices()[:devices]))
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        tree, host = checkpoints.restore(None, run.abstract_stored())
    tree["key"] = jax.random.key_data(tree["key"])
    return jax.tree.map(np.asarray, tree), host


@pytest.mark.slow
def test_it_learns_and_its_own_metric_and_picture_are_in_the_run(trained):
    folder, summary = trained
    assert summary["test_accuracy"] > 0.8
    assert 0 <= summary["test_confused"] < 0.5
    assert summary["images_per_s"] > 0
    lines = read_lines(folder / "metrics.jsonl")
    assert {"accuracy", "loss", "grad_norm"} <= set(lines[0])
    measures = json.loads((folder / "measures.json").read_text())
    assert [value["name"] for value in measures["values"]] == ["accuracy", "loss", "confused"]
    report = (folder / "report.html").read_text()
    assert "How many shapes are right." in report
    assert "squares taken for crosses" in report
    assert "perplexity" not in report


def test_it_goes_on_to_the_same_bits_with_its_running_means(user, trained, tmp_path):
    experiment = user.shapes()
    loop.train(changed(experiment, steps=30), workdir=tmp_path)
    loop.train(experiment, workdir=tmp_path, resume="must")
    one, two = stored(experiment, trained[0]), stored(experiment, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, one[0], two[0])
    assert one[1] == two[1]
    assert np.abs(one[0]["variables"]["norm/mean"]).max() > 0.01
    again = loop.evaluate(experiment, workdir=tmp_path, split="test")
    assert again["test_accuracy"] == trained[1]["test_accuracy"]


@pytest.mark.default_cases("explicit", "hybrid")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        (Fsdp(), MeshShape()),
        (Fsdp(form="explicit"), MeshShape()),
        (Ddp(), MeshShape()),
        (Fsdp(sharding="HYBRID_SHARD", form="explicit"), MeshShape(replica=2, fsdp=4)),
    ],
    ids=["implicit", "explicit", "ddp", "hybrid"],
)
def test_means_of_eight_devices_are_those_of_the_global_batch(user, strategy, mesh):
    found = []
    for devices, own, how in ((1, MeshShape(), Fsdp()), (8, mesh, strategy)):
        experiment = changed(user.shapes(), precision=Precision(params="float64"), strategy=how)
        data = experiment.data.build()
        built = binding.bind(experiment, data.schema, make_mesh(own, jax.devices()[:devices]))
        state, losses, batches = built.init(), [], data.train_batches(start_example=0)
        for _ in range(4):
            state, loss = built.train_step(state, convert.to_device(next(batches), built))
            losses.append(float(loss))
        found.append((losses, jax.tree.map(np.asarray, {**state.params, **state.variables})))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    for name, value in found[0][1].items():
        np.testing.assert_allclose(found[1][1][name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("strategy", "devices"), [(Fsdp(), 1), (Fsdp(form="explicit"), 8)], ids=["one", "eight"])
def test_running_means_are_made_anew_for_what_is_scored(user, trained, strategy, devices):
    """They are the averages over three batches of what NumPy finds, whatever those of training were."""
    data = user.Shapes().build()
    run = Run.bind(
        changed(user.shapes(), evaluation__statistics=3, strategy=strategy),
        data,
        make_mesh(MeshShape(), jax.devices()[:devices]),
    )
    state, _ = run.open_to_score(trained[0], None)
    made = run._with_new_statistics(state)
    filters, means, variances = np.asarray(state.params["filters"]), [], []
    for _, batch in zip(range(3), data.train_batches(start_example=0), strict=False):
        windows = np.lib.stride_tricks.sliding_window_view(batch["images"], (3, 3), axis=(1, 2))
        features = np.einsum("bhwij,ijf->bhwf", windows, filters[:, :, 0])
        means.append(features.mean((0, 1, 2)))
        variances.append(features.var((0, 1, 2)))
    np.testing.assert_allclose(made.variables["norm/mean"], np.mean(means, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(made.variables["norm/variance"], np.mean(variances, 0), rtol=1e-4)
    assert np.abs(np.asarray(state.variables["norm/variance"]) - np.mean(variances, 0)).max() > 1e-3
    plain = dataclasses.replace(run.experiment, evaluation=user.shapes().evaluation)
    by_hand = Run.bind(plain, data, run.mesh).score(made, "test")
    assert run.score(state, "test")["test_loss"] == by_hand["test_loss"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread(MetricBase):
    """Mean square of the logits, which adds up over days."""

    @property
    def values(self):
        return (Value(name="spread", title="mean square of logits"),)

    @property
    def collects(self):
        return ("logits",)

    @property
    def lifetime(self):
        return ("spread",)

    def zeros(self):
        return {"squares": pair_zeros(), "count": pair_zeros()}

    def update(self, sums, loss, batch):
        squares = jnp.square(loss.outputs["logits"])
        return {"squares": add(sums["squares"], squares.sum()), "count": add(sums["count"], jnp.float32(squares.size))}

    def compute(self, sums):
        return {"spread": ratio(sums["squares"], sums["count"])}

    def of_collected(self, collected):
        squares = np.square(collected["logits"].astype(np.float64))
        return {"squares": squares.sum(), "count": np.float64(squares.size)}


class ByDay(ArrayDataSet):
    """Every three batches of the stream are a day."""

    def days(self):
        return tuple((f"day {n}", 96 * n, 96 * (n + 1)) for n in range(2))

    def range_batches(self, first, stop, *, process_index=0, process_count=1):
        batches = self.train_batches(start_example=first, process_index=process_index, process_count=process_count)
        return itertools.islice(batches, (stop - first) // self.batch_size)


@pytest.mark.slow
def test_days_are_scored_with_means_that_are_made_anew(user, tmp_path, monkeypatch):
    """Parameters stay as they were, and so do the means of the first batches: those of training move on."""
    monkeypatch.setattr(user, "ArrayDataSet", ByDay)
    monkeypatch.setattr(user.NetTask, "metrics", lambda self: (Accuracy(unit="images"), Spread()))
    experiment = changed(
        user.shapes(),
        optimizer=optim.Sgd(learning_rate=optim.Constant(value=0.0)),
        steps=6,
        evaluation__every=0,
        evaluation__validation="progressive",
        evaluation__statistics=2,
        checkpoints__every=0,
    )
    summary = loop.train(experiment, workdir=tmp_path)
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(MeshShape()))
    state, _ = run.begin()
    made, found = run._with_new_statistics(state), {}
    for name, first, stop in data.days():
        found[name], begun = (
            scoring.score(run.program, one, data.range_batches(first, stop)).measure()["spread"]
            for one in (made, state)
        )
        assert abs(found[name] - begun) > 0.01 * begun
    lines = {line["split"]: line for line in read_lines(tmp_path / "metrics.jsonl") if line.get("split") in found}
    assert {name: line["spread"] for name, line in lines.items()} == pytest.approx(found, rel=1e-6)
    assert {name: line["step"] for name, line in lines.items()} == {"day 0": 0, "day 1": 3}
    assert summary["progressive_spread"] == pytest.approx(np.mean(list(found.values())), rel=1e-6)


def test_a_module_that_does_not_know_of_statistics_is_named(user, trained, monkeypatch):
    run = Run.bind(changed(user.shapes(), evaluation__statistics=3), user.Shapes().build(), make_mesh(MeshShape()))
    state, _ = run.open_to_score(trained[0], None)
    call = user.Net.__call__
    monkeypatch.setattr(user.Net, "__call__", lambda self, images, purpose: call(self, images, "evaluation"))
    with pytest.raises(UserError, match=r"evaluation.statistics: 'norm/mean' stays as it is .* 'statistics'"):
        run.score(state, "test")


def test_means_of_parts_are_warned_of(user):
    experiment = changed(user.shapes(), gradients__microbatch=4)
    with pytest.warns(UserWarning, match=r"norm/mean.*those of a part"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))


def test_parameters_begin_with_those_of_another_run(user, trained, tmp_path):
    experiment = changed(user.shapes(), init=str(trained[0]), steps=1, placement__mesh=MeshShape(fsdp=8))
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(MeshShape()))
    state, host = run.begin()
    there = stored(user.shapes(), trained[0])[0]
    for name, value in state.params.items():
        np.testing.assert_array_equal(np.asarray(value), there["params"][name])
    np.testing.assert_array_equal(np.asarray(state.variables["norm/mean"]), there["variables"]["norm/mean"])
    assert host.examples == 0
    wider = changed(experiment, model=user.NetConfig(width=4))
    run = Run.bind(wider, data, make_mesh(MeshShape()))
    with pytest.raises(UserError, match=r"init=.*does not fit the model: of other shapes: .*filters is \[3, 3, 1, 8\]"):
        run.begin()
    with pytest.raises(UserError, match="nowhere"):
        Run.bind(changed(experiment, init=str(tmp_path / "nowhere")), data, make_mesh(MeshShape())).begin()


@pytest.mark.parametrize(
    "strategy",
    [
        Fsdp(form="explicit"),
        pytest.param(Fsdp(), marks=pytest.mark.slow),
        pytest.param(Ddp(), marks=pytest.mark.slow),
    ],
    ids=["explicit", "implicit", "ddp"],
)
def test_a_skipped_step_leaves_running_means_as_they_were(user, strategy):
    scaling = LossScaling(initial=2.0**40, interval=100)
    half = {"precision": Precision(compute="float16"), "gradients__loss_scaling": scaling}
    experiment = changed(user.shapes(), **half, strategy=strategy)
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(MeshShape()))
    state = built.init()
    before = jax.tree.map(np.asarray, (state.variables, state.params))
    batch = convert.to_device(next(data.train_batches(start_example=0)), built)
    for number in range(1, 41):
        state, _ = built.train_step(state, batch)
        after = jax.tree.map(np.asarray, (state.variables, state.params))
        if int(state.loss_scale.skipped) < number:
            break
        jax.tree.map(np.testing.assert_array_equal, after, before)
    assert 4 < int(state.loss_scale.skipped) == number - 1
    assert all((after[0][name] != value).any() for name, value in before[0].items() if value.ndim)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"labels": np.zeros(8, np.int32), "weights": np.ones(8, np.float32)},
            "has no field 'images'.*labels, weights",
        ),
        ({"images": np.zeros((8, 8), np.float32)}, r"'images' must have the shape \(8, 8\) of an example; .* \(8,\)"),
        ({"images": np.zeros((8, 8, 8))}, "'images' must be of float32; the data has float64"),
    ],
)
def test_fields_that_do_not_fit_are_named(user, batch, message):
    experiment = user.shapes()
    built = binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))
    rest = {"labels": np.zeros(8, np.int32), "weights": np.ones(8, np.float32)} if "images" in batch else {}
    with pytest.raises(UserError, match=message):
        convert.to_device({**rest, **batch}, built)


@pytest.mark.slow
def test_arrays_are_shuffled_by_epoch_and_cut_over_processes():
    arrays = {"x": np.arange(10)}
    data = ArrayDataSet({"train": arrays, "test": arrays}, batch_size=4, seed=3)
    stream = data.train_batches(start_example=0)
    seen = np.concatenate([next(stream)["x"] for _ in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert list(seen[:10]) != list(seen[10:])
    later = next(data.train_batches(start_example=8))["x"]
    np.testing.assert_array_equal(later, seen[8:12])
    halves = [next(data.train_batches(start_example=8, process_index=p, process_count=2))["x"] for p in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), later)
    last = list(data.eval_batches("test"))[-1]
    np.testing.assert_array_equal(last["weights"], [1, 1, 0, 0])
    with pytest.raises(UserError, match="must have 'train'"):
        ArrayDataSet({"test": arrays}, batch_size=2)
