"""Deduplicated training on a log of sessions (RecD, arXiv 2211.05239).

scalejax train recd-sessions
scalejax train recd-sessions --set data.lists=plain --set tables.dedup=()     without deduplication: the same to the bit
"""

import dataclasses
import math

from scalejax import optim
from scalejax.configs.recsys import _common
from scalejax.data import SessionData, SessionLog
from scalejax.data.splits import ByTime
from scalejax.models.recsys import dlrm
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Tables

_LOG = SessionLog(
    sessions=8_000,
    samples=16,
    repeat=0.9,
    user_groups=(4, 4),
    user_ids=10.0,
    item_features=2,
    item_ids=2.0,
    rows=2_000,
    zipf=1.1,
    concurrent=1_000,
    signal=2.0,
)
_DATA = SessionData(log=_LOG, rows=10_000, batch_size=2048)
_MODEL = dlrm.DlrmConfig(dim=16, bottom_hidden=(32,), top_hidden=(128, 64))
_SECOND = 1_000_000  # of its timestamps, which span 145 seconds


def sessions() -> Experiment:
    """DLRM on deduplicated batches of a synthetic log, made on first use; a minute on two cores, test AUC 0.80."""
    return _experiment(_DATA, _MODEL)


def sessions_time() -> Experiment:
    """The same divided by time, so that shuffling rows instead (data.shuffle=rows) trains and scores the same rows."""
    split = ByTime(column="timestamp", validation_from=103 * _SECOND, test_from=116 * _SECOND)
    whole = sessions()
    return dataclasses.replace(
        whole,
        data=dataclasses.replace(_DATA, split=split),
        tables=dataclasses.replace(whole.tables, accumulate="ordered"),
        evaluation=Evaluation(),
    )


def smoke() -> Experiment:
    """A few steps on a small log."""
    log = dataclasses.replace(_LOG, sessions=300, user_groups=(2, 1), user_ids=4.0, item_features=1, concurrent=50)
    data = SessionData(log=log, rows=10_000, capacity=4.0, batch_size=256)
    small = _experiment(data, dlrm.DlrmConfig(dim=8, bottom_hidden=(16,), top_hidden=(16,)))
    return dataclasses.replace(
        small, steps=12, log_every=4, evaluation=Evaluation(every=6), checkpoints=Checkpoints(every=6)
    )


def _experiment(data: SessionData, model: dlrm.DlrmConfig) -> Experiment:
    share = _share_of_distinct_rows(data.log, data.batch_size)
    return _common.experiment(
        model=model,
        data=data,
        steps=100,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=2e-3, warmup=0.05)),
        tables=Tables(
            optimizer=RowwiseAdagrad(learning_rate=0.02),
            schedule=optim.WarmupCosine(peak=1.0, warmup=0.05),
            accumulate="exact",
            dedup=tuple(DedupGroup(features=group, rows_per_example=share) for group in data.log.groups),
        ),
        log_every=20,
        eval_every=50,
        save_every=0,
    )


def _share_of_distinct_rows(log: SessionLog, batch_size: int) -> float:
    """Room for the distinct rows of a batch of whole sessions: their mean, and five standard deviations more."""
    sessions = batch_size / log.samples
    repeats = sessions * (log.samples - 1)
    mean = sessions + repeats * (1 - log.repeat)
    return min(1.0, (mean + 5 * math.sqrt(repeats * log.repeat * (1 - log.repeat)) + 1) / batch_size)
