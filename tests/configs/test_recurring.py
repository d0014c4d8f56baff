"""Runs that go on day by day behind an offline stage in which their model shrinks and grows."""

import dataclasses

import killed_run
import numpy as np
import pytest

from scalejax import optim
from scalejax.configs import overrides
from scalejax.configs.recsys import _flights, dlrm
from scalejax.data import FlightsData
from scalejax.errors import UserError
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.surgery.alternation import alternate
from scalejax.surgery.units import ResizeUnits
from scalejax.train import loop, phases
from scalejax.train.checkpoints import trained
from scalejax.train.experiment import Checkpoints
from scalejax.train.run_folder import read_lines

OFFLINE, DAYS = ((3, 1.0), (2, 0.5), (2, 1.0)), 6


def recurring():
    model = DlrmConfig(dim=4, bottom_hidden=(8,), top_hidden=(16,))
    data = FlightsData(split=_flights.OFFLINE, batch_size=512)
    base = dataclasses.replace(
        _flights.offline(model), data=data, log_every=2, checkpoints=Checkpoints(every=4, keep_last=9, keep_best=0)
    )
    return _flights.day_by_day(alternate(base, OFFLINE, multiple=8), steps=DAYS)


@pytest.mark.parametrize("recipe", [dlrm.flights_alternate, dlrm.flights_recurring_alternate])
def test_while_a_recipe_shrinks_and_grows_its_rates_stay(recipe) -> None:
    found = [phase for phase in phases.resolved(recipe()) if phase.optimizer_from == 0]
    assert [phase.surgery for phase in found] == [None] + [ResizeUnits(score="taylor")] * 4
    first = found[0].experiment
    for schedule, peak in ((first.optimizer.learning_rate, 4e-3), (first.tables.schedule, 1.0)):
        rate = schedule.build(first.steps)
        held = [float(rate(int(first.steps * share))) for share in (0.06, 0.3, 0.69)]
        assert held == pytest.approx([peak] * 3)
        assert float(rate(first.steps)) == 0
        assert {phase.experiment.optimizer.learning_rate for phase in found} == {first.optimizer.learning_rate}


def test_the_rates_of_the_days_begin_anew_and_stay() -> None:
    *offline, last = phases.resolved(recurring())
    assert [p.optimizer_from for p in (*offline, last)] == [0, 0, 0, 7]
    assert [p.experiment.steps for p in (*offline, last)] == [7, 7, 7, DAYS]
    assert last.experiment.model == offline[0].experiment.model
    assert isinstance(last.experiment.optimizer.learning_rate, optim.Constant)
    assert last.experiment.optimizer.counts == offline[0].experiment.optimizer.counts == "each"
    data = [p.experiment.data.split for p in (offline[0], last)]
    assert data[1].numbers == data[0].train


def test_what_is_set_of_the_data_and_the_optimizer_holds_day_by_day() -> None:
    sets = ["data.seed=7", "data.threads=3", "optimizer.weight_decay=0.02"]
    last = phases.resolved(overrides.apply(recurring(), sets))[-1].experiment
    assert (last.data.seed, last.data.threads, last.optimizer.weight_decay) == (7, 3, 0.02)
    assert last.data.order == "time"


def test_other_days_offline_bin_numbers_of_the_days_after_them_too() -> None:
    sets = ["data.split.train=2013-01-01,2013-05-31", "data.split.test=2013-12-10,2013-12-20"]
    *offline, last = phases.resolved(overrides.apply(recurring(), sets))
    split = last.experiment.data.split
    assert split.numbers == offline[0].experiment.data.split.train == ("2013-01-01", "2013-05-31")
    assert split.test == ("2013-12-10", "2013-12-20")
    assert split.train == ("2013-07-01", "2013-10-31")
    named = overrides.apply(recurring(), [*sets, "data.split.numbers=2013-01-01,2013-03-31"])
    assert phases.resolved(named)[-1].experiment.data.split.numbers == ("2013-01-01", "2013-03-31")
    with pytest.raises(UserError, match=r"'recurring' changes data\.split: LaterDays: data\.split must be by dates"):
        phases.resolved(overrides.apply(recurring(), ["data.split=time"]))


@pytest.mark.slow
def test_each_day_is_scored_before_it_is_trained_and_a_kill_changes_nothing(tmp_path) -> None:
    experiment = recurring()
    summary = loop.train(experiment, workdir=tmp_path / "whole")
    lines = [r for r in read_lines(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "evaluation"]
    data = phases.resolved(experiment)[-1].experiment.data.build()
    wanted = [(name, 7 + first // 512) for name, first, _ in data.days() if first < DAYS * 512]
    days = [r for r in lines if r["split"].startswith("2013-")]
    assert [(r["split"], r["step"]) for r in days] == wanted
    assert len(wanted) >= 3
    # NE after both stages.
    scored = {(r["split"], r["step"]): r["ne"] for r in lines}
    assert [p["val_ne"] for p in summary["phases"]] == [scored["validation", step] for step in (3, 5, 7, 13)]
    assert summary["test_ne"] == scored["test", 13]
    total = sum(r["examples"] for r in days)
    assert summary["progressive_examples"] == total
    mean = sum(r["examples"] * r["logloss"] for r in days) / total
    assert summary["progressive_logloss"] == pytest.approx(mean, rel=1e-6)
    # The first day is predicted by the model with which the offline stage ends.
    split = dataclasses.replace(_flights.OFFLINE, validation=("2013-07-01", "2013-07-01"))
    offline = dataclasses.replace(trained.open_run(tmp_path / "whole", 7), identity={}, averages={}, record={})
    trained.write_run(tmp_path / "offline", offline)
    alone = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, split=split), phases=())
    scores = loop.evaluate(alone, workdir=tmp_path / "offline", split="validation")
    assert days[0]["logloss"] == pytest.approx(scores["val_logloss"], rel=1e-6)
    for at in (6, 9):
        folder = tmp_path / f"killed{at}"
        again = killed_run.train(experiment, folder, at=at)
        assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
        assert again["progressive_ne"] == summary["progressive_ne"]
        one, two = (trained.open_dense(tmp_path / name, 13) for name in ("whole", f"killed{at}"))
        for name, array in one.items():
            np.testing.assert_array_equal(array[...], two[name][...], err_msg=name)
