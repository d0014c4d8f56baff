"""Whole runs over a small graph: they learn, resume to the same bits, and say what they cannot do."""

import dataclasses
import itertools
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from changes import changed
from small_graph_run import CLASSES, bind, gcn, scores_of, write_graph

from scalejax import optim
from scalejax.data import graphs
from scalejax.errors import UserError
from scalejax.models.graph import GcnConfig, GraphSageConfig, Sampling
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.train import loop
from scalejax.train.batches.convert import to_device
from scalejax.train.experiment import Checkpoints, Experiment, Precision
from scalejax.train.runs import scoring


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_graph(tmp_path_factory.mktemp("graph") / "graph.npz")


def _sampled(path: str, **changes: Any) -> Experiment:
    data = graphs.NodeData(
        path=path, features="as-is", self_loops="keep", normalization="none", fanouts=(3, 2), batch_size=12
    )
    return gcn(path, data=data, model=GraphSageConfig(hidden=8), optimizer=optim.Adam(), **changes)


def _lines(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


EVERY = Checkpoints(every=12, keep_last=3, best_metric="accuracy")


@pytest.fixture(scope="module")
def whole(path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run from beginning to end, which several tests look at."""
    return loop.train(gcn(path, checkpoints=EVERY), workdir=tmp_path_factory.mktemp("whole"), recipe="gcn")


@pytest.mark.slow
def test_a_gcn_learns_what_features_alone_do_not_say(whole: dict[str, Any]) -> None:
    closing, folder = whole, pathlib.Path(whole["run_folder"])
    assert closing["test_accuracy"] > 0.8
    assert closing["val_loss"] < np.log(CLASSES)
    records = _lines(folder)
    scores = {r["step"]: r["accuracy"] for r in records if r["kind"] == "evaluation" and r["split"] == "validation"}
    assert closing["best_val_accuracy"] == max(scores.values())
    assert closing["best_step"] == min(step for step, value in scores.items() if value == max(scores.values()))
    windows = [r for r in records if r["kind"] == "window"]
    assert windows[-1]["loss"] < windows[0]["loss"]
    assert windows[-1]["examples_seen"] == 24 * 30
    assert "accuracy" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_the_final_split_is_scored_where_validation_is_better_than_before(
    whole: dict[str, Any], path: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[tuple[int, str]] = []
    plain = scoring.score

    def counted(program: Any, state: Any, batches: Any, *, of: str, **more: Any) -> scoring.Scores:
        scored.append((int(state.step), of))
        return plain(program, state, batches, of=of, **more)

    monkeypatch.setattr(scoring, "score", counted)
    # Its last step is the best one of the run that `whole` is: no schedule depends on how many there are.
    closing = loop.train(gcn(path, steps=whole["best_step"]), workdir=tmp_path)
    assert closing["test_accuracy"] == whole["test_accuracy_at_best"] == closing["test_accuracy_at_best"]
    records = [r for r in _lines(tmp_path) if r["kind"] == "evaluation"]
    best, better = -1.0, []
    for step, value in ((r["step"], r["accuracy"]) for r in records if r["split"] == "validation"):
        if value > best:
            best = value
            better.append(step)
    assert [step for step, of in scored if of == "split 'test'"] == better  # and the end is one of them
    assert [r["step"] for r in records if r["split"] == "test"] == [closing["steps"]]
    assert len(scored) == len(set(scored))  # nothing is scored twice


def _same_end(parts: dict[str, Any], whole: dict[str, Any]) -> None:
    for name in ("test_loss", "val_loss", "test_accuracy", "best_step", "test_accuracy_at_best", "examples"):
        assert parts[name] == whole[name], name
    folders = [pathlib.Path(run["run_folder"]) for run in (parts, whole)]
    last = [[r for r in _lines(folder) if r["step"] == whole["steps"]] for folder in folders]
    assert last[0] == last[1]


def test_a_run_in_two_parts_ends_at_the_same_numbers(whole: dict[str, Any], path: str, tmp_path: pathlib.Path) -> None:
    # As if the run had stopped after its first checkpoint.
    shutil.copytree(whole["run_folder"], tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "24")
    parts = loop.train(gcn(path, checkpoints=EVERY), workdir=tmp_path / "parts", recipe="gcn", resume="must")
    _same_end(parts, whole)


def test_mini_batches_in_two_parts_end_at_the_same_numbers(path: str, tmp_path: pathlib.Path) -> None:
    every = Checkpoints(every=4, best_metric="accuracy")
    whole = loop.train(_sampled(path, steps=8, checkpoints=every), workdir=tmp_path / "whole")
    loop.train(_sampled(path, steps=4, checkpoints=every), workdir=tmp_path / "parts")
    parts = loop.train(_sampled(path, steps=8, checkpoints=every), workdir=tmp_path / "parts", resume="must")
    _same_end(parts, whole)


def test_training_is_that_of_the_equations_in_numpy(path: str) -> None:
    experiment = gcn(path, model=GcnConfig(hidden=8, dropout=0.0))
    nodes = experiment.data.build()
    program = bind(experiment, nodes)
    state = program.init()
    names = ("layers/0/kernel", "layers/0/bias", "layers/1/kernel", "layers/1/bias")
    params = [np.asarray(state.params[name], np.float64) for name in names]
    losses, wanted = [], []
    batch = to_device(nodes.whole("train"), program)
    for _ in range(6):
        state, loss = program.train_step(state, batch)
        losses.append(float(loss))
    graph, train = nodes.graph, nodes.graph.splits["train"]
    a, edges, labels = np.zeros((90, 90)), graph.adjacency, np.asarray(graph.labels)[train]
    np.add.at(a, (edges.rows, edges.indices), edges.weights())
    x = np.asarray(graph.features, np.float64)
    first, second = ([np.zeros_like(p) for p in params] for _ in range(2))
    for step in range(1, 7):
        w1, b1, w2, b2 = params
        h = np.maximum(a @ x @ w1 + b1, 0)
        shares = np.exp(a @ h @ w2 + b2)[train]
        shares /= shares.sum(1, keepdims=True)
        right = np.arange(train.size), labels
        wanted.append(-np.log(shares[right]).mean())
        shares[right] -= 1
        d_logits = np.zeros((90, CLASSES))
        d_logits[train] = shares / train.size
        d_inner = (a.T @ d_logits @ w2.T) * (h > 0)
        grads = [(a @ x).T @ d_inner, d_inner.sum(0), (a @ h).T @ d_logits, d_logits.sum(0)]
        for n, (p, grad) in enumerate(zip(params, grads, strict=True)):
            grad = grad + 5e-4 * p if n < 2 else grad  # the first layer alone decays
            first[n] += 0.1 * (grad - first[n])
            second[n] += 0.001 * (grad * grad - second[n])
            p -= 0.02 * (first[n] / (1 - 0.9**step)) / (np.sqrt(second[n] / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for name, p in zip(names, params, strict=True):
        # Steps of 0.02, where Adam divides what float32 rounds to 1e-7 by numbers as small as 1e-4.
        np.testing.assert_allclose(state.params[name], p, atol=1e-4)


@pytest.mark.slow
def test_mini_batches_learn(path: str) -> None:
    experiment = _sampled(path)
    data = experiment.data.build()
    program = bind(experiment, data)
    state, losses = program.init(), []
    for batch in itertools.islice(data.train_batches(), 24):
        state, loss = program.train_step(state, to_device(batch, program))
        losses.append(float(loss))
    assert np.mean(losses[-6:]) < np.mean(losses[:6])


def test_eight_devices_train_as_one(whole: dict[str, Any], path: str) -> None:
    # Dropout is drawn for the whole graph, whatever device a node is on.
    experiment = gcn(path, placement__mesh=MeshShape(fsdp=8), steps=4)
    data = experiment.data.build()
    losses = []
    for run in (experiment, gcn(path, steps=4)):
        program = bind(run, data)
        state, batch = program.init(), to_device(data.whole("train"), program)
        for _ in range(4):
            state, loss = program.train_step(state, batch)
            losses.append(float(loss))
    np.testing.assert_allclose(losses[:4], losses[4:], rtol=1e-5)


def _first_losses(experiment: Experiment) -> list[float]:
    """Of three steps."""
    nodes = experiment.data.build()
    program = bind(experiment, nodes)
    state, losses = program.init(), []
    for batch in itertools.islice(nodes.train_batches(parts=program.mesh.size), 3):
        state, loss = program.train_step(state, to_device(batch, program))
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        GcnConfig(layers=1, dropout=0.0),
        GcnConfig(hidden=8, dropout=0.0),
        GraphSageConfig(hidden=8, dropout=0.0),
    ],
)
def test_mini_batches_over_eight_devices_are_those_of_one(model: Any, path: str) -> None:
    normalization = "symmetric" if isinstance(model, GcnConfig) else "none"
    data = graphs.NodeData(path=path, features="as-is", normalization=normalization, fanouts=(3, 2), batch_size=16)
    data = dataclasses.replace(data, fanouts=data.fanouts[: model.layers])
    one, eight = (
        _first_losses(gcn(path, data=data, model=model, placement__mesh=mesh))
        for mesh in (None, MeshShape(fsdp=4, tensor=2))
    )
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_mini_batches_must_divide_over_the_devices(path: str) -> None:
    experiment = _sampled(path, placement__mesh=MeshShape(fsdp=8))  # 12 nodes
    with pytest.raises(UserError, match=r"batch_size 12 does not divide.*8 or 16"):
        bind(experiment, experiment.data.build())


@pytest.mark.slow
def test_a_run_scored_only_at_its_end_is_best_there(path: str, tmp_path: pathlib.Path) -> None:
    closing = loop.train(gcn(path, steps=3, evaluation__every=0), workdir=tmp_path)
    assert closing["best_step"] == 3
    assert closing["best_val_accuracy"] == closing["val_accuracy"]
    assert closing["test_accuracy_at_best"] == closing["test_accuracy"]


@pytest.mark.slow
def test_mini_batches_over_devices_in_two_parts_end_at_the_same_numbers(path: str, tmp_path: pathlib.Path) -> None:
    every = Checkpoints(every=4, best_metric="accuracy")
    run = changed(_sampled(path, steps=8, checkpoints=every), data__batch_size=16, placement__mesh=MeshShape())
    whole = loop.train(run, workdir=tmp_path / "whole")
    loop.train(dataclasses.replace(run, steps=4), workdir=tmp_path / "parts")
    _same_end(loop.train(run, workdir=tmp_path / "parts", resume="must"), whole)


def test_a_checkpoint_scores_as_its_run_did(whole: dict[str, Any], path: str) -> None:
    again = loop.evaluate(gcn(path), workdir=pathlib.Path(whole["run_folder"]), split="test")
    assert again["test_loss"] == whole["test_loss"]
    assert again["test_accuracy"] == whole["test_accuracy"]


@pytest.mark.slow
def test_scoring_may_read_fewer_edges_than_training(path: str) -> None:
    model = GcnConfig(hidden=8, eval_sampling=Sampling(width=2))
    data = gcn(path).data.build()
    exact, fewer = (bind(gcn(path, model=m), data) for m in (GcnConfig(hidden=8), model))
    state = exact.init()
    batch = data.whole("test")
    scores = [scores_of(p, state, data, "test")["loss"] for p in (exact, fewer)]
    assert scores[0] != scores[1]
    first, second = (p.train_step(p.init(), to_device(batch, p))[1] for p in (exact, fewer))
    assert first == second


@pytest.fixture(scope="module")
def tasks_path(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same graph; is a node of class 0, of class 1, of class 0 or 1, where a fifth of that is not known."""
    graph = graphs.read_npz(path)
    classes = np.asarray(graph.labels)
    labels = np.stack([classes == 0, classes == 1, classes < 2], axis=1).astype(np.int32)
    labels[np.arange(90) % 5 == 0, 2] = -1
    file = tmp_path_factory.mktemp("tasks") / "tasks.npz"
    graphs.write_npz(file, dataclasses.replace(graph, labels=labels))
    return str(file)


OF_TASKS = Checkpoints(every=12, keep_last=3, best_metric="auc")


def test_tasks_are_learnt_and_scored_by_their_mean_auc(tasks_path: str) -> None:
    experiment = gcn(tasks_path, model=GcnConfig(layers=1, dropout=0.0), checkpoints=OF_TASKS)
    data = experiment.data.build()
    program = bind(experiment, data)
    state, batch, losses = program.init(), to_device(data.whole("train"), program), []
    for _ in range(24):
        state, loss = program.train_step(state, batch)
        losses.append(float(loss))
    found = {split: scores_of(program, state, data, split) for split in ("train", "test")}
    # The score in NumPy, of all pairs of a positive and a negative.
    edges, x = data.graph.adjacency, np.asarray(data.graph.features, np.float64)
    a = np.zeros((90, 90))
    np.add.at(a, (edges.rows, edges.indices), edges.weights())
    logits = a @ x @ np.asarray(state.params["layers/0/kernel"]) + np.asarray(state.params["layers/0/bias"])
    for split, values in found.items():
        nodes = data.graph.splits[split]
        labels, scores = np.asarray(data.graph.labels)[nodes], logits[nodes]
        known = labels >= 0
        assert values["weight"] == known.sum()
        wanted = np.log1p(np.exp(np.where(labels == 1, -scores, scores)))[known].mean()
        assert values["loss"] == pytest.approx(wanted, rel=1e-5)
        pairs = [np.sign(np.subtract.outer(s[y == 1], s[y == 0])) for y, s in zip(labels.T, scores.T, strict=True)]
        assert values["auc"] == pytest.approx(np.mean([(p.mean() + 1) / 2 for p in pairs]), abs=1e-9)
    assert found["train"]["loss"] < losses[0] < 2 * np.log(2)
    assert found["test"]["auc"] > 0.75


@pytest.mark.slow
def test_a_run_of_tasks_in_two_parts_ends_at_the_same_numbers(tasks_path: str, tmp_path: pathlib.Path) -> None:
    run = gcn(tasks_path, checkpoints=OF_TASKS)
    whole = loop.train(run, workdir=tmp_path / "whole")
    assert whole["test_auc"] > 0.8
    assert whole["best_val_auc"] >= whole["val_auc"]
    assert "test_accuracy" not in whole
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "24")
    parts = loop.train(run, workdir=tmp_path / "parts", resume="must")
    for name in ("test_loss", "test_auc", "best_step", "test_auc_at_best"):
        assert parts[name] == whole[name], name
    report = (tmp_path / "whole" / "report.html").read_text()
    assert "AUC at step" in report
    again = loop.evaluate(run, workdir=tmp_path / "whole", split="test")
    assert again["test_auc"] == whole["test_auc"]


@pytest.mark.slow
def test_mini_batches_of_tasks_over_eight_devices_are_those_of_one(tasks_path: str) -> None:
    data = graphs.NodeData(path=tasks_path, features="as-is", normalization="none", fanouts=(3, 2), batch_size=16)
    options = {"data": data, "model": GraphSageConfig(hidden=8, dropout=0.0), "checkpoints": OF_TASKS}
    one, eight = (_first_losses(gcn(tasks_path, placement__mesh=mesh, **options)) for mesh in (None, MeshShape()))
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_a_metric_that_labels_do_not_have_is_refused(path: str, tasks_path: str, tmp_path: pathlib.Path) -> None:
    classes, tasks = gcn(path).data.build(), gcn(tasks_path).data.build()
    message = r"checkpoints\.best_metric is 'auc', but this model is scored by accuracy, loss\..*best_metric=accuracy"
    with pytest.raises(UserError, match=message):
        bind(gcn(path, checkpoints=OF_TASKS), classes)
    with pytest.raises(UserError, match=r"is 'accuracy', but this model is scored by auc, loss\..*best_metric=auc"):
        bind(gcn(tasks_path, checkpoints=EVERY), tasks)
    graph = tasks.graph
    one_sided = np.where(np.asarray(graph.labels) == 0, -1, 1)
    one_sided[:, 0] = 1
    one_sided[graph.splits["train"][0]] = 0
    with pytest.raises(UserError, match=r"evaluation\.split: split 'validation' has no task with a positive and"):
        bind(
            gcn(tasks_path, checkpoints=OF_TASKS),
            graphs.NodeDataSet(dataclasses.replace(graph, labels=one_sided.astype(np.int32))),
        )


def test_another_graph_does_not_resume(whole: dict[str, Any], path: str, tmp_path: pathlib.Path) -> None:
    shutil.copytree(whole["run_folder"], tmp_path / "run")
    other = graphs.NodeData(path=path, features="as-is", normalization="right")
    with pytest.raises(UserError, match="data"):
        loop.train(gcn(path, steps=48, data=other), workdir=tmp_path / "run", resume="must")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"checkpoints": Checkpoints(best_metric="ne")},
            "best_metric is 'ne', but this model is scored by accuracy, loss",
        ),
        (
            {"precision": Precision(compute="float16")},
            r"precision\.compute is float16.*gradients\.loss_scaling=LossScaling",
        ),
        ({"tables__dtype": "bfloat16"}, r"tables\.dtype is 'bfloat16', but GcnConfig has no embedding tables"),
        ({"tables__pipeline": "ids"}, r"tables\.pipeline is 'ids', but GcnConfig has no embedding tables"),
        (
            {"strategy": Fsdp(form="explicit")},
            r"strategy=Fsdp in its explicit form.*Use strategy=Fsdp\(form='implicit'\)",
        ),
        ({"strategy": Ddp()}, "strategy=Ddp in its explicit form cuts examples.*GcnConfig reads a graph"),
        ({"gradients__microbatch": 8}, r"gradients\.microbatch=8 cuts batches into parts.*set data\.fanouts"),
        (
            {"gradients__microbatch": "cache"},
            r"gradients\.microbatch is 'cache', but GcnConfig has no embedding tables",
        ),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_says_what_is_wrong_with_a_run(path: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        bind(gcn(path, **changes), gcn(path).data.build())


@pytest.mark.slow
def test_optimizer_names_a_layer_that_is_there(path: str) -> None:
    wrong = optim.AdamL2(only="layer/0/")
    with pytest.raises(UserError, match=r"no parameter begins with 'layer/0/'; there are layers/0/bias"):
        bind(gcn(path, optimizer=wrong), gcn(path).data.build()).abstract_state()
