"""A user's file: a policy learns which of two texts is preferred, beside a frozen copy of what it was (DPO).

scalejax train preferences.py
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import optim
from scalejax.data.arrays import ArrayDataSet
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import add, pair_zeros, ratio
from scalejax.train.task import Batch, Field, Loss, TaskBase

WORDS, LENGTH = 16, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """Two texts of random words each; the one with more words of the upper half is preferred."""

    batch_size: int = 32

    def schema(self) -> dict[str, Any]:
        return {"words": WORDS, "length": LENGTH}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)

        def split(count: int) -> dict[str, np.ndarray]:
            texts = rng.integers(0, WORDS, (count, 2, LENGTH)).astype(np.int32)
            best = (texts >= WORDS // 2).sum(2).argmax(1)
            rows = np.arange(count)
            return {"preferred": texts[rows, best], "other": texts[rows, 1 - best]}

        splits = {"train": split(1024), "validation": split(44), "test": split(44)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Writer(nnx.Module):
    """The log-probability of each next word from the one before it."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, dtypes.params) / 4

        self.embedding = nnx.Param(normal(WORDS, width), logical_axes=(None, "embed"))
        self.head = nnx.Param(normal(width, WORDS), logical_axes=("embed", None))

    def __call__(self, texts: jax.Array) -> jax.Array:
        said = jax.nn.log_softmax(self.embedding[...][texts[:, :-1]] @ self.head[...])
        return jnp.take_along_axis(said, texts[:, 1:, None], 2).sum((1, 2))


class Pair(nnx.Module):
    """The policy, and the same as it was at first."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        self.policy = Writer(width, rngs, dtypes)
        self.reference = nnx.clone(self.policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement(MetricBase):
    """Share of the pairs whose preferred text has become more probable than the other one, next to the reference."""

    @property
    def values(self) -> tuple[Value, ...]:
        return (Value(name="agreement", title="agreement", unit="share of pairs", better="high", base=0.5),)

    def zeros(self) -> Any:
        return {"right": pair_zeros(), "all": pair_zeros()}

    def update(self, sums: Any, loss: Any, batch: Any) -> Any:
        right = ((loss.outputs["margins"] > 0) * batch["weights"]).sum()
        return {"right": add(sums["right"], right), "all": add(sums["all"], batch["weights"].sum())}

    def compute(self, sums: Any) -> dict[str, float]:
        return {"agreement": ratio(sums["right"], sums["all"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceTask(TaskBase):
    """-log sigmoid of how much more the policy prefers what is preferred than the reference (Rafailov et al., 2023)."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        texts = Field(shape=(self.schema["length"],), dtype="int32")
        return {"preferred": texts, "other": texts, "weights": Field(shape=(), dtype="float32")}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Pair:
        return Pair(self.width, rngs, dtypes)

    def loss(self, model: Pair, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        policy, reference = (of(batch["preferred"]) - of(batch["other"]) for of in (model.policy, model.reference))
        margins = 0.5 * (policy - reference)
        losses = -jax.nn.log_sigmoid(margins)
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"margins": margins})

    def metrics(self) -> tuple[Any, ...]:
        return (Agreement(), MeanLoss(unit="pairs"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> PreferenceTask:
        return PreferenceTask(width=self.width, schema=schema)


def preferences() -> Experiment:
    """Which of two texts is preferred."""
    return Experiment(
        model=PairConfig(),
        data=Choices(),
        steps=40,
        trainable="policy/.*",
        averages=(optim.Average(decay=0.9),),
        optimizer=optim.Adam(learning_rate=optim.Constant(value=2e-2)),
        evaluation=Evaluation(average="ema"),
        checkpoints=Checkpoints(every=20),
    )
