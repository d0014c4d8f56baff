"""Settings that all recipes of graph networks share."""

from scalejax import optim
from scalejax.data.graphs import NodeData
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Placement
from scalejax.train.protocols import ModelConfig


def scored(every: int) -> Evaluation:
    """Scores every so many steps; the test split counts where the validation split is best."""
    return Evaluation(every=every, split="validation", final_split="test", final="best")


def experiment(
    *,
    model: ModelConfig,
    data: NodeData,
    steps: int,
    optimizer: optim.Optimizer,
    eval_every: int = 1,
) -> Experiment:
    """A run over one graph on one device."""
    return Experiment(
        model=model,
        data=data,
        steps=steps,
        optimizer=optimizer,
        placement=Placement(mesh=None),
        evaluation=scored(eval_every),
        checkpoints=Checkpoints(every=0),
        log_every=10,
    )
