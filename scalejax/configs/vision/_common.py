"""Settings that all recipes of models of pictures share."""

import dataclasses

from scalejax import optim
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment
from scalejax.train.protocols import DataConfig, ModelConfig


def experiment(
    *, model: ModelConfig, data: DataConfig, steps: int, optimizer: optim.Optimizer, every: int
) -> Experiment:
    """A run that is scored and saved every so many steps; the test split counts where the validation split is best."""
    return Experiment(
        model=model,
        data=data,
        steps=steps,
        optimizer=optimizer,
        evaluation=Evaluation(every=every, final="best"),
        checkpoints=Checkpoints(every=every),
        log_every=10,
    )


def sgd(*, peak: float, weight_decay: float = 5e-4, warmup: float = 0.0) -> optim.Sgd:
    """SGD with momentum 0.9 and a cosine down to 0."""
    schedule = optim.WarmupCosine(peak=peak, warmup=warmup, final=0.0)
    return optim.Sgd(learning_rate=schedule, momentum=0.9, weight_decay=weight_decay)


def shortened(whole: Experiment, *, steps: int, every: int) -> Experiment:
    """The same for so many steps, scored and saved every so many."""
    return dataclasses.replace(
        whole,
        steps=steps,
        evaluation=dataclasses.replace(whole.evaluation, every=every),
        checkpoints=dataclasses.replace(whole.checkpoints, every=every),
    )
