"""Training click models on MovieLens 100K."""

from scalejax import optim
from scalejax.configs.recsys import _common
from scalejax.data import MovielensData
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.train.experiment import Experiment, Tables
from scalejax.train.protocols import ModelConfig

WHEEL = "recbole-1.2.1-py3-none-any.whl"


def experiment(model: ModelConfig) -> Experiment:
    """Four epochs of `model`; the wheel is looked for in the working directory."""
    return _common.experiment(
        model=model,
        data=MovielensData(path=WHEEL, batch_size=512),
        steps=625,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=1e-3, warmup=0.05)),
        tables=Tables(
            optimizer=RowwiseAdagrad(learning_rate=0.1, weight_decay=1e-4),
            schedule=optim.WarmupCosine(peak=1.0, warmup=0.05),
        ),
        log_every=50,
        eval_every=156,
        save_every=0,
    )
