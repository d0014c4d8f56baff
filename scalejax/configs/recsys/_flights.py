"""Training click models on the flights: equal columns, equal steps, equal regularisation.

Two epochs: in a third all models overfit. What helps all of them: the numbers also as 64 quantile bins, L2 on the rows
that a step touches (most rows of `tailnum` and `flight` are seen a few dozen times), a high learning rate of the rows,
and both rates falling to zero. Dropout in the hidden layers helps none. `benchmarks/results/quality.md` has the
numbers.
"""

import dataclasses
import functools
from typing import Any, Literal

from scalejax import optim
from scalejax.configs.recsys import _common
from scalejax.data import ByDate, FlightsData, LaterDays
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.towers import Partition
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Phase, Tables
from scalejax.train.protocols import ModelConfig

SCHEDULE_WARMUP = 0.05
TOWERS = Partition(
    towers=(
        ("carrier", "tailnum", "plane_model", "flight"),
        ("origin", "dest", "distance_bin", "hour"),
        ("month", "weekday", "wx_temp_bin", "wx_pressure_bin"),
        ("wx_humid_bin", "wx_wind_speed_bin", "wx_precip_bin", "wx_visib_bin"),
    )
)
"""Aircraft, route, season, weather."""
TWO_TOWERS = Partition(
    towers=(("carrier", "tailnum", "plane_model", "flight"), ("origin", "dest", "month", "weekday", "hour"))
)
"""Without bins."""


def experiment(model: ModelConfig, data: FlightsData | None = None, l2: float = 1e-4) -> Experiment:
    """Two epochs of `model` on the random split."""
    return _common.experiment(
        model=model,
        data=data or FlightsData(number_bins=64),
        steps=512,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=4e-3, warmup=SCHEDULE_WARMUP)),
        tables=Tables(
            optimizer=RowwiseAdagrad(learning_rate=0.3, weight_decay=l2),
            schedule=optim.WarmupCosine(peak=1.0, warmup=SCHEDULE_WARMUP),
        ),
        log_every=32,
        eval_every=256,
        save_every=256,
    )


def with_day(model: ModelConfig, l2: float = 1e-4) -> Experiment:
    """With the day of the year as a feature."""
    return experiment(model, FlightsData(number_bins=64, calendar_day="include"), l2)


def by_time(model: ModelConfig, order: Literal["shuffled", "time"] = "shuffled", l2: float = 1e-4) -> Experiment:
    """Trained on January to October, tested on December."""
    return experiment(model, FlightsData(number_bins=64, split="time", order=order), l2)


OFFLINE = ByDate()
"""January to June, scored on July."""
OFFLINE_STEPS = 312
_RECURRING = LaterDays(train=("2013-07-01", "2013-10-31"), validation=("2013-11-01", "2013-11-30"))
_RECURRING_BATCH, _RECURRING_STEPS = 512, 220


def offline(model: ModelConfig, steps: int = OFFLINE_STEPS) -> Experiment:
    """Two epochs of January to June, scored on July: what `day_by_day` follows."""
    whole = experiment(model, FlightsData(number_bins=64, split=OFFLINE))
    return dataclasses.replace(whole, steps=steps, evaluation=dataclasses.replace(whole.evaluation, every=0))


def held(experiment: Experiment) -> Experiment:
    """The same with rates that stay at their peaks but for the last 30 % of the steps: what grows late still learns."""
    optimizer: Any = experiment.optimizer
    schedule: Any = experiment.tables.schedule
    rates = functools.partial(optim.WarmupCosineAnneal, warmup=SCHEDULE_WARMUP, final=1.0, anneal=0.3)
    return dataclasses.replace(
        experiment,
        optimizer=dataclasses.replace(optimizer, learning_rate=rates(peak=optimizer.learning_rate.peak)),
        tables=dataclasses.replace(experiment.tables, schedule=rates(peak=schedule.peak)),
    )


def day_by_day(offline: Experiment, steps: int = _RECURRING_STEPS) -> Experiment:
    """A run that goes on from July to October, each day of which is scored before it is trained, once, at low rates.

    Its optimizer begins anew, with rates that stay. It is scored on November and December, of which it trains nothing.
    """
    changes = {
        "data.split": _RECURRING,
        "data.order": "time",
        "data.batch_size": _RECURRING_BATCH,
        "optimizer.learning_rate": optim.Constant(value=1e-3),
        "tables.schedule": optim.Constant(value=0.1),
        "evaluation.validation": "progressive",
    }
    return dataclasses.replace(offline, phases=(*offline.phases, Phase(name="recurring", steps=steps, changes=changes)))


def smoke(model: ModelConfig) -> Experiment:
    """A few steps."""
    return dataclasses.replace(
        experiment(model, FlightsData()),
        steps=12,
        log_every=4,
        evaluation=Evaluation(every=6),
        checkpoints=Checkpoints(every=6),
    )
