"""Settings that all recipes of language models share."""

from scalejax import optim
from scalejax.parallel.fsdp import Fsdp, Strategy
from scalejax.parallel.rules import LLM
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Gradients, Placement
from scalejax.train.protocols import DataConfig, ModelConfig

SUMS_IN_FLOAT32 = Fsdp(form="explicit", reduce_dtype="float32")
"""Gradients are summed in float32, by reduce-scatters.

In the implicit form the compiler sums them in the dtype of the matrix product, bfloat16, and gives every device the
whole sum.
"""


def experiment(
    *,
    model: ModelConfig,
    data: DataConfig,
    steps: int,
    optimizer: optim.Optimizer,
    strategy: Strategy | None = None,
    log_every: int = 10,
    eval_every: int = 0,
    save_every: int = 1000,
) -> Experiment:
    """A run of a language model, scored on the validation split."""
    return Experiment(
        model=model,
        data=data,
        steps=steps,
        optimizer=optimizer,
        strategy=strategy or SUMS_IN_FLOAT32,
        gradients=Gradients(clip=1.0),
        placement=Placement(rules=LLM),
        evaluation=Evaluation(every=eval_every, split="validation", final_split="validation"),
        checkpoints=Checkpoints(every=save_every),
        xla_flags=("cpu-plain-products",),
        log_every=log_every,
    )
