"""Wukong (arXiv 2403.02545).

scalejax train wukong
scalejax train wukong --set model.layers=4 --set steps=1000
"""

import dataclasses

from scalejax import optim
from scalejax.data import FlightsData
from scalejax.models.recsys import wukong
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.train.experiment import Checkpoints, Experiment


def flights() -> Experiment:
    """Wukong on the bundled New York flights; a minute on two cores."""
    return Experiment(
        model=wukong.SIZES["S"],
        data=FlightsData(batch_size=1024),
        steps=512,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=2e-3, warmup=0.05)),
        row_optimizer=RowwiseAdagrad(learning_rate=0.1),
        row_schedule=optim.WarmupCosine(peak=1.0, warmup=0.05),
        log_every=32,
        eval_every=256,
        checkpoints=Checkpoints(every=256),
    )


def smoke() -> Experiment:
    """A few steps of a tiny Wukong."""
    model = wukong.WukongConfig(
        dim=8, layers=2, fm_outputs=4, lcb_outputs=4, rank=4, fmb_hidden=(16,), head_hidden=(16,), bottom_hidden=(16,)
    )
    return dataclasses.replace(
        flights(), model=model, steps=12, log_every=4, eval_every=6, checkpoints=Checkpoints(every=6)
    )
