"""Training click models on a table of the user's own: `scalejax train RECIPE --data FILE --label COLUMN`.

Settings that do well on tables of some thousand to some hundred thousand rows without a search
(`benchmarks/results/own_tables.md`). Four passes and no fewest number of steps: small tables overfit soon.
"""

import dataclasses

from scalejax import optim
from scalejax.configs.recsys import _common
from scalejax.data import TableData
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Tables
from scalejax.train.protocols import ModelConfig

EPOCHS = 4


def experiment(model: ModelConfig) -> Experiment:
    """`model` on a table, whose path, label and number of steps stand for those that the command fills in."""
    whole = _common.experiment(
        model=model,
        data=TableData(path="table.csv", label="label"),
        steps=1000,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=2e-3, warmup=0.05)),
        tables=Tables(
            optimizer=RowwiseAdagrad(learning_rate=0.05, weight_decay=1e-4),
            schedule=optim.WarmupCosine(peak=1.0, warmup=0.05),
        ),
    )
    return dataclasses.replace(
        whole,
        evaluation=Evaluation(every=250, final="best", patience=2),
        checkpoints=Checkpoints(every=250),
        log_every=25,
    )


def lengths(rows: int, batch_size: int) -> dict[str, int]:
    """Numbers of steps by their paths in the experiment, for so many rows of the training split."""
    every = max(1, round(rows / batch_size))
    steps = {"steps": EPOCHS * every, "evaluation.every": every, "checkpoints.every": every}
    return steps | {"log_every": max(1, every // 10)}
