"""Logistic regression: the floor that every other click model has to clear.

    logits = b + w . dense + sum over features of the looked-up row        (one row entry per task)

The tables are as wide as there are tasks. Everything starts at zero, so the first prediction is 1/2.

Axes: B examples, D dense features, T tasks.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.models.recsys.task import CtrTask, pooled_table
from scalejax.parallel.embedding.config import TableConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticConfig:
    """Architecture.

    Attributes:
      pooling: How the rows of a multi-hot feature become one.
    """

    pooling: Literal["sum", "mean"] = "sum"

    def task(self, schema: Schema) -> CtrTask:
        """Binds the model to the columns of a data set."""
        return CtrTask(model=self, schema=schema)

    def tables(self, schema: Schema) -> tuple[TableConfig, ...]:
        tasks = len(schema.labels)
        return tuple(pooled_table(f, tasks, pooling=self.pooling, init_scale=0.0) for f in schema.categorical)

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "Logistic":
        del rngs  # nothing is drawn
        return Logistic(schema, dtypes)


class Logistic(nnx.Module):
    """Rows and dense features -> one logit per task. Computed in float32 or wider throughout: these are logits."""

    def __init__(self, schema: Schema, dtypes: nn.Dtypes):
        tasks = len(schema.labels)
        self.weight = nnx.Param(jnp.zeros((len(schema.dense), tasks), dtypes.params), logical_axes=("input", "hidden"))
        self.bias = nnx.Param(jnp.zeros(tasks, dtypes.params), logical_axes=("hidden",))
        self.features = schema.keys
        self.dtype = nn.wide(dtypes.params, dtypes.compute)

    def __call__(self, embedded: dict[str, jax.Array], dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, float32[B, T] (float64 where the model computes in float64)."""
        del key
        logits = (
            dense.astype(self.dtype) @ self.weight[...].astype(self.dtype) + self.bias[...].astype(self.dtype)[None]
        )
        return logits + sum((embedded[f].astype(self.dtype) for f in self.features), jnp.zeros_like(logits))
