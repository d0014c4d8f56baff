"""Evaluation of a split: its metrics, and its files."""

import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.train.metrics import bootstrap, evaluation, exact


def scores(tasks=1, size=200, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1.2, (size, tasks))
    labels = (rng.random((size, tasks)) < exact.sigmoid(logits)).astype(np.float32)
    return exact.sigmoid(logits), labels, rng.choice([1.0, 2.0], size)


def test_gathers_every_metric_of_one_task():
    p, y, w = scores()
    groups = np.arange(200) % 9
    got = evaluation.evaluate(p, y, w, groups=groups, names=["late"])
    assert got == {
        "examples": 200,
        "logloss": exact.logloss(y[:, 0], p[:, 0], w),
        "logloss_base": exact.base_logloss(y[:, 0], w),
        "ne": exact.normalized_entropy(y[:, 0], p[:, 0], w),
        "auc": exact.auc(y[:, 0], p[:, 0], w),
        "gauc": exact.grouped_auc(y[:, 0], p[:, 0], groups, w).value,
        "calibration": exact.calibration(y[:, 0], p[:, 0], w),
        "base_rate": exact.base_rate(y[:, 0], w),
    }


def test_names_the_tasks_when_there_are_several():
    p, y, w = scores(tasks=2)
    got = evaluation.evaluate(p, y, w, names=["click", "buy"], intervals="bootstrap", resamples=20)
    assert got["auc/buy"] == exact.auc(y[:, 1], p[:, 1], w)
    assert got["auc_low/buy"] == bootstrap.intervals(y[:, 1], p[:, 1], w, resamples=20)["auc"].low
    assert got["ne_low/click"] < got["ne/click"] < got["ne_high/click"]
    assert "auc" not in got
    with pytest.raises(ValueError, match="2 tasks"):
        evaluation.evaluate(p, y, w)


def test_files_bring_back_what_was_scored(tmp_path):
    p, y, w = scores(tasks=2)
    evaluation.save_diagrams(tmp_path, "test", p, y, w, names=["click", "buy"])
    evaluation.save_diagrams(tmp_path, "days", p, y, w, names=["click", "buy"])
    days, test = evaluation.read_diagrams(tmp_path)
    assert (days["split"], test["split"], test["examples"]) == ("days", "test", 200)
    assert [task["name"] for task in test["tasks"]] == ["click", "buy"]
    np.testing.assert_array_equal(
        test["tasks"][1]["reliability"]["observed"], exact.reliability(y[:, 1], p[:, 1], w).observed
    )
    assert sum(test["tasks"][0]["histogram"]["positive"]) == pytest.approx(w @ y[:, 0])
    back = evaluation.read_predictions(tmp_path, "test")
    assert back is not None
    np.testing.assert_array_equal(back.predictions, p)
    other = evaluation.read_predictions(tmp_path, "days")
    assert other is not None
    assert back.same_examples(other)
    assert evaluation.read_predictions(tmp_path, "validation") is None


def test_equal_scores_give_equal_files(tmp_path):
    p, y, w = scores()
    for name in ("a", "b"):
        evaluation.save_diagrams(tmp_path / name, "test", p, y, w)
    for file in ("test.json", "test.npz"):
        first, second = ((tmp_path / name / "evaluation" / file).read_bytes() for name in ("a", "b"))
        assert first == second


def test_large_splits_keep_no_predictions(tmp_path, monkeypatch):
    p, y, w = scores()
    evaluation.save_diagrams(tmp_path, "test", p, y, w)
    monkeypatch.setattr(evaluation, "MOST_EXAMPLES", 100)
    evaluation.save_diagrams(tmp_path, "test", p, y, w)
    assert evaluation.read_predictions(tmp_path, "test") is None


def test_damaged_files_are_named(tmp_path):
    p, y, w = scores()
    evaluation.save_diagrams(tmp_path, "test", p, y, w)
    arrays, diagrams = (tmp_path / "evaluation" / f"test.{end}" for end in ("npz", "json"))
    arrays.write_bytes(arrays.read_bytes()[:300])
    with pytest.raises(UserError, match=r"test\.npz is damaged"):
        evaluation.read_predictions(tmp_path, "test")
    diagrams.write_text('{"format": 9}')
    with pytest.raises(UserError, match="format 9"):
        evaluation.read_diagrams(tmp_path)
    diagrams.write_text("{")
    with pytest.raises(UserError, match=r"test\.json is damaged"):
        evaluation.read_diagrams(tmp_path)
