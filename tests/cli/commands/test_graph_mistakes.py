"""What can be wrong with a run over a graph is said in one message, before anything is compiled."""

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("recipe", "sets", "words"),
    [
        ("gcn", ["model.hidden=0"], "hidden must be at least 1; got 0"),
        ("gcn", ["model.eval_sampling=Sampling", "model.eval_sampling.strategy=buckets"], "fastrand"),
        ("gcn", ["data.normalization=none"], "Set data.normalization to symmetric or right"),
        ("graphsage", ["data.fanouts=[3]"], "one number for each of the 2 layers"),
        ("gcn", ["data.path=bad.npz"], "features must be finite; those of node 2 are not"),
        ("gcn", ["data.path=."], "holds 2 files, and a graph is one"),
        ("gcn", ["data.path=tasks.npz", "checkpoints.best_metric=accuracy"], "Set --set checkpoints.best_metric=auc"),
    ],
)
def test_a_run_that_cannot_begin(invoke, tmp_path, monkeypatch, recipe, sets, words):
    monkeypatch.chdir(tmp_path)
    features = np.ones((3, 2))
    features[2, 0] = np.nan
    for name in ("bad.npz", "other.npz"):
        np.savez(tmp_path / name, edge_src=[0], edge_dst=[1], features=features, labels=[0, 1, 0], train_idx=[0])
    if "tasks" in "".join(sets):
        splits = {name: np.array([0, 1]) for name in ("train_idx", "val_idx", "test_idx")}
        labels = np.array([[0, 1], [1, -1], [1, 0]])
        np.savez(tmp_path / "tasks.npz", edge_src=[0], edge_dst=[1], features=np.ones((3, 2)), labels=labels, **splits)
    result = invoke("train", recipe, *(f"--set={text}" for text in sets))
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
