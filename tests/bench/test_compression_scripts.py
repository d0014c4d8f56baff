"""Scripts that measure few bits on the wire: what they would run, what they make of runs, bytes in closed form."""

import json
import pathlib
import shutil
import sys
from typing import Any

import pytest

from scalejax.plan.planner_machines import find_gpus

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs in a checkout")


def test_half_an_interval_is_that_of_student_s_t(scripts: Any) -> None:
    # Two-sided 95 % with 4 degrees of freedom: 2.776; standard deviation of 1 ... 5: sqrt(2.5).
    assert scripts("kept_runs").half_width([1, 2, 3, 4, 5]) == pytest.approx(2.776 * 2.5**0.5 / 5**0.5, rel=1e-3)


def test_rates_are_tried_once_and_the_best_is_taken_for_pairs(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    effect, made = scripts("compression_effect"), []
    worse = {"base": 0.0, "qW": 0.2}

    def train(arm: Any, seed: int) -> dict[str, Any]:
        made.append((arm.name, arm.rate, seed))
        loss = 2 + 0.1 * seed % 1 + worse[arm.name] + abs(arm.rate - 3e-3)
        return {"scores": {"loss": loss}, "errors": [], "sent": {"between": 600.0, "within": 0.0}, "parameters": 100}

    monkeypatch.setattr(effect, "train", train)
    common = ["--runs", str(tmp_path / "runs.jsonl"), "--studies", "sdp4bit"]
    for what in (["tune"], ["run", "--arms", "base", "qW"], ["run", "--arms", "base"], ["report"]):
        monkeypatch.setattr(sys, "argv", ["compression_effect.py", *what, *common])
        effect.main()
    trials = [("base", rate, effect.TUNING_SEED) for rate in (1.5e-3, 3e-3, 6e-3, 1.2e-2)]
    assert made == trials + [(arm, 3e-3, seed) for seed in range(1, 11) for arm in ("base", "qW")]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| qW |"))
    assert "+0.2000 ± 0.0000" in row
    assert row.endswith("| 6.000 | 0.000 |")


def test_rates_beyond_the_four_are_tried_until_one_is_worse(scripts: Any, tmp_path: pathlib.Path) -> None:
    effect = scripts("compression_effect")
    runs, four = scripts("kept_runs").KeptRuns(tmp_path / "runs.jsonl"), (1e-3, 3e-3, 6e-3, 1.2e-2)

    def add(rate: float, loss: float) -> None:
        key = effect.Arm("llama", "base", rate, 600)._asdict() | {"seed": effect.TUNING_SEED, "scored": "validation"}
        runs.append(key | {"scores": {"loss": loss}})

    for rate, loss in zip(four, (2.4, 2.2, 2.1, 2.0), strict=True):
        add(rate, loss)
    assert effect.rate_of(runs, "llama", "base", 600) is None  # one above the highest is to be tried
    add(0.024, 1.9)
    assert effect.rate_of(runs, "llama", "base", 600) is None
    add(0.048, float("inf"))
    assert effect.rate_of(runs, "llama", "base", 600) == 0.024
    assert sorted(effect.trials(runs, "llama", "base", 600)) == [*four, 0.024, 0.048]


def test_trials_are_scored_on_the_validation_split_and_no_run_is_taken_for_one(
    scripts: Any, tmp_path: pathlib.Path
) -> None:
    effect = scripts("compression_effect")
    assert [effect.scored("images", seed) for seed in (effect.TUNING_SEED, 1)] == ["validation", "test"]
    runs, arm = scripts("kept_runs").KeptRuns(tmp_path / "runs.jsonl"), effect.Arm("images", "base", 0.1, 560)
    runs.append(arm._asdict() | {"seed": effect.TUNING_SEED, "scored": "test", "scores": {"loss": 0.0}})
    assert effect.kept(runs, arm, effect.TUNING_SEED, make=False) is None


def test_missed_aims_are_named(scripts: Any) -> None:
    missed = scripts("compression_effect").missed
    good = {"qW": [14.0, 12.0, 6.0], "qWD": [0.0, 0.01, -0.01], "SDP4Bit": [0.3, 0.2, 0.25]}
    assert missed("sdp4bit", good) == []
    (found,) = missed("sdp4bit", {**good, "qW": [14.0, 12.0, 4.9]})
    assert "4.90 at least" in found
    (found,) = missed("sdp4bit", {**good, "qWD": [0.0, 0.2, -0.2]})  # the interval leaves the bound
    assert found.startswith("qWD is to lie within 0.1 %")
    gaps = {"one bit, no feedback": [4.0, 4.2, 3.8], "one bit, with feedback": [1.0, 1.1, 0.9]}
    assert missed("llama", gaps) == []
    (found,) = missed("images", {**gaps, "one bit, with feedback": [2.5, 2.4, 2.6]})
    assert "half of the gap of one bit: +4.00 % without, +2.50 with" in found


def test_every_arm_is_a_run_of_its_study(scripts: Any) -> None:
    effect = scripts("compression_effect")
    for study, of in effect.STUDIES.items():
        for name, strategy in of.arms.items():
            experiment = effect.experiment_of(effect.Arm(study, name, of.rates[0], 10), seed=3)
            assert (experiment.strategy, experiment.steps, experiment.data.seed) == (strategy, 10, 3)
            assert experiment.placement.mesh.replica == of.hosts


def test_bytes_of_sums_are_those_of_their_formats(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    scripts("compressed_exchange").main(["--mbit", "100"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Network namespaces with limited links are not permitted here: tc not found."
    # 2,048 x 2,048 numbers of 4 bytes there and back, three quarters of which go to others.
    assert said[2].split() == ["plain", "25.166", "MB", "a", "host", "2.013", "s"]
    by_name = {line[:20].strip(): float(line[20:].split()[0]) for line in said[2:]}
    assert by_name["two-way one bit"] == pytest.approx(25.166 / 32, rel=1e-3)
    assert by_name["two-way int4:128"] == pytest.approx(25.166 * 0.53125 / 4, rel=1e-3)
    assert by_name["SDP4Bit step"] == pytest.approx(0.75 * 4.194304 * (0.53125 + 0.501953), rel=1e-3)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sums_travel_between_namespaces_as_they_say(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    links, exchange = scripts("slow_links"), scripts("compressed_exchange")
    reason = "Linux alone has namespaces" if sys.platform != "linux" else links.not_permitted()
    if reason is not None:
        pytest.skip(f"network namespaces with limited links: {reason}")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    found = exchange.run(exchange.Task(mbit=200, turns=1, hosts=2, side=512), sys.executable)
    task = exchange.Task(mbit=200, turns=1, hosts=2, side=512)
    for name in exchange.OURS:
        assert 0.98 * task.sent(name) < found["sent"][name] < 1.3 * task.sent(name) + 50_000
    assert json.loads(json.dumps(found)) == found


def test_speeds_that_were_fitted_come_back(scripts: Any) -> None:
    plans = scripts("sdp4bit_plans")
    sizes = {"1.3B": 1.3e9, "2.7B": 2.7e9, "6.7B": 6.7e9, "13B": 13e9, "18B": 18e9}
    for name, runs in plans.CLUSTERS.items():
        cluster, first = find_gpus(name), runs[0]
        assert first.predicted(cluster, plans.Fit.of_plain(first, cluster))[0] == pytest.approx(first.plain)
        both = first.predicted(cluster, plans.Fit.of_both(first, cluster))
        assert both == pytest.approx((first.plain, first.ours, first.ours / first.plain), rel=0.01)
        for run in runs:
            assert run.parameters == pytest.approx(sizes[run.model], rel=0.05)
            assert run.between(cluster, plain=True) / run.between(cluster, plain=False) == pytest.approx(
                6 / (0.53125 + 0.501953), rel=0.04
            )
