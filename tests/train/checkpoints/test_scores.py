"""A checkpoint is saved before it is scored; its scores come afterwards, also where a run was killed in between."""

import dataclasses
import itertools

import pytest
import small_run
from covering import covering

from scalejax.train import loop
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints, Phase
from scalejax.train.runs.run import Run


class Killed(Exception):
    """In the place of a signal."""


def experiment(rows, **changes):
    given = {"checkpoints": Checkpoints(every=2, keep_last=2, keep_best=1), "steps": 8, "log_every": 2}
    return small_run.experiment(rows, **given | {"evaluation__every": 2} | changes)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("data") / "rows.parquet")


def phased(rows):
    cut = Phase(name="cut", steps=4, changes={"data.batch_size": 32})
    return dataclasses.replace(experiment(rows, steps=4), phases=(cut,))


EXPERIMENTS = {
    "full": experiment,
    "deltas": lambda rows: experiment(rows, tables__full_every=8),
    "best": lambda rows: experiment(rows, evaluation__final="best"),
    "phases": phased,
}


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """A function of a name: the folder of that run, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")

    def run(name):
        if not (folder / name).exists():
            loop.train(EXPERIMENTS[name](rows), workdir=folder / name)
        return folder / name

    return run


def said(run):
    """Lines of metrics, and of every checkpoint what its manifest and scores say."""
    folders = sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
    kept = {path.name: manifests.read(path) for path in folders}
    described = {name: (read.metrics, read.host, read.arrays, read.delta is None) for name, read in kept.items()}
    return (run / "metrics.jsonl").read_text(), described


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "kill"),
    covering([*itertools.product(EXPERIMENTS, (2, 4, 8), ("before the scores", "after the line", "after the scores"))]),
)
def test_an_evaluation_that_was_cut_off_is_made_again(rows, whole, tmp_path, monkeypatch, name, step, kill):
    evaluate, add_scores = Run.evaluate, Checkpointer.add_scores

    def killed(self, state, host, at, saved):
        if at == step and kill == "before the scores":
            raise Killed
        found = evaluate(self, state, host, at, saved)
        if at == step:
            raise Killed
        return found

    def lost(self, at, host, metrics):
        if at == step and kill == "after the line":
            raise Killed
        add_scores(self, at, host, metrics)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Run, "evaluate", killed)
        patched.setattr(Checkpointer, "add_scores", lost)
        loop.train(EXPERIMENTS[name](rows), workdir=tmp_path / "run")
    cut = manifests.read(tmp_path / "run" / "checkpoints" / str(step))
    assert (cut.metrics is None) == (kill != "after the scores")
    loop.train(EXPERIMENTS[name](rows), workdir=tmp_path / "run")
    assert said(tmp_path / "run") == said(whole(name))


@pytest.mark.slow
def test_damaged_scores_are_damage(rows, whole, tmp_path):
    path = next(iter((whole("full") / "checkpoints").glob("8/scores.json")))
    folder = tmp_path / "8"
    folder.mkdir()
    for name in ("manifest.json", "scores.json"):
        (folder / name).write_bytes((path.parent / name).read_bytes())
    assert manifests.read(folder).metrics
    (folder / "scores.json").write_text(path.read_text().replace('"logloss": 0', '"logloss": 1'))
    with pytest.raises(manifests.Damaged, match=r"8/scores\.json is damaged"):
        manifests.read(folder)
