"""Values of the right type that no run can have are refused when they are set, not by a failure in the run."""

import pytest

from scalejax import configs, optim
from scalejax.errors import UserError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps=0", "Experiment: steps must be at least 1 and less than 2**31; got 0"),
        ("steps=2147483648", "Experiment: steps must be at least 1 and less than 2**31"),
        ("gradients.microbatch=0", "Gradients: microbatch must be at least 1, 'cache' or None; got 0"),
        ("seed=-1", "Experiment: seed must be at least 0 and less than 2**32; got -1"),
        ("seed=99999999999999999999", "Experiment: seed must be at least 0 and less than 2**32"),
        ("log_every=0", "Experiment: log_every must be at least 1; got 0"),
        ("evaluation.every=-1", "Evaluation: every must be at least 1, or 0 for only the end; got -1"),
        ("gradients.clip=0", "Gradients: clip must be above 0, or None; got 0"),
        ("tables.full_every=1500", "Experiment: tables.full_every must be a multiple of checkpoints.every, 0"),
        ("checkpoints.every=-1", "Checkpoints: every must be at least 1, or 0 for only the last step; got -1"),
        ("optimizer.learning_rate.warmup=1", "WarmupCosine: warmup must be a fraction of the run in [0, 1); got 1"),
        ("tables.schedule.warmup=-0.1", "WarmupCosine: warmup must be a fraction of the run in [0, 1); got -0.1"),
        ("data.split.seed=-1", "Fractions: seed must be at least 0 and less than 2**32; got -1"),
        ("model.dropout=1.5", "WukongConfig: dropout must lie in [0, 1); got 1.5"),
        ("model.embedding_dropout=-0.1", "WukongConfig: embedding_dropout must lie in [0, 1); got -0.1"),
    ],
)
def test_impossible_values_are_refused(text, words):
    with pytest.raises(UserError) as caught:
        configs.load("wukong-movielens", [text])
    assert str(caught.value).startswith(f"--set {text}: {words}")


@pytest.mark.parametrize(("recipe", "name"), [("dlrm-smoke", "DlrmConfig"), ("dcnv2-smoke", "DcnV2Config")])
def test_dropout_of_the_baselines_is_a_probability_below_one(recipe, name):
    with pytest.raises(UserError, match=rf"{name}: dropout must lie in \[0, 1\); got 1.0"):
        configs.load(recipe, ["model.dropout=1"])


def test_the_limits_themselves_are_accepted():
    sets = [
        "steps=1",
        "gradients.microbatch=1",
        "seed=4294967295",
        "log_every=1",
        "evaluation.every=0",
        "checkpoints.every=0",
    ]
    experiment = configs.load("wukong-movielens", [*sets, "tables.schedule.warmup=0", "data.split.seed=0"])
    assert (experiment.seed, experiment.tables.schedule) == (2**32 - 1, optim.WarmupCosine(warmup=0.0))
