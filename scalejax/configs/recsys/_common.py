"""Settings that all recipes of click models share.

Parameters of the dense part are few beside the tables and lie whole on every device.
"""

from scalejax import optim
from scalejax.parallel.fsdp import Fsdp
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Gradients, Tables
from scalejax.train.protocols import DataConfig, ModelConfig


def experiment(
    *,
    model: ModelConfig,
    data: DataConfig,
    steps: int,
    optimizer: optim.Optimizer,
    tables: Tables,
    log_every: int = 100,
    eval_every: int = 0,
    save_every: int = 1000,
) -> Experiment:
    """A run of a click model, scored on the test split at its end."""
    return Experiment(
        model=model,
        data=data,
        steps=steps,
        optimizer=optimizer,
        strategy=Fsdp(sharding="NO_SHARD"),
        tables=tables,
        gradients=Gradients(microbatch="cache"),
        evaluation=Evaluation(every=eval_every, split="validation", final_split="test"),
        checkpoints=Checkpoints(every=save_every),
        xla_flags=("tpu-async-all-to-all",),
        log_every=log_every,
    )
