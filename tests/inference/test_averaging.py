"""The mean of the checkpoints of a run."""

import dataclasses
import pathlib

import numpy as np
import pytest
import small_language_run as small

from scalejax.errors import UserError
from scalejax.inference import run_model
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.train import loop
from scalejax.train.experiment import Checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    texts = small.write(tmp_path_factory.mktemp("texts") / "documents")
    checkpoints = Checkpoints(every=1, keep_last=3, best_metric="loss")
    experiment = small.experiment(texts, steps=3, checkpoints=checkpoints)
    folder = tmp_path_factory.mktemp("run")
    loop.train(experiment, workdir=folder)
    return folder, experiment


@pytest.mark.slow
@pytest.mark.parametrize(("path", "layer"), [("embed/weight", None), ("layers/mlp/up", 1)])
def test_the_average_is_the_mean_of_the_last_checkpoints(run, path, layer):
    each = [run_model.open_run(*run, step=step).source.read(path, layer) for step in (2, 3)]
    averaged = run_model.open_run(*run, average=2)
    want = ((each[0].astype(np.float64) + each[1]) / 2).astype(np.float32)
    assert (want != each[1]).any()
    np.testing.assert_array_equal(averaged.source.read(path, layer), want)
    index = (slice(1, 3), slice(0, 2))
    np.testing.assert_array_equal(averaged.source.read(path, layer, index), want[index])
    assert averaged.remarks == ("mean of steps 2, 3 of the run",)


@pytest.mark.slow
def test_a_run_opens_by_a_path_from_here(run, monkeypatch):
    folder, experiment = run
    monkeypatch.chdir(folder.parent)
    opened = run_model.open_run(pathlib.Path(folder.name), experiment)
    assert np.isfinite(opened.source.read("embed/weight", None)).all()


@pytest.mark.slow
def test_a_run_brings_its_rules_for_number_formats(run):
    folder, experiment = run
    rules = (QuantizationRule(weight_qtype="bdr_mx6"),)
    opened = run_model.open_run(folder, dataclasses.replace(experiment, quantization=rules))
    assert opened.quantization == rules
    assert "the master parameters" in opened.remarks[1]
    assert run_model.open_run(*run).quantization == ()


@pytest.mark.slow
def test_too_few_checkpoints_are_refused(run):
    with pytest.raises(UserError, match=r"--average 3: .* has 2 checkpoints up to there \(1, 2\)"):
        run_model.open_run(*run, step=2, average=3)
    with pytest.raises(UserError, match="--average must be at least 1; got 0"):
        run_model.open_run(*run, average=0)
