"""The task of click models: the loss, and what training and planning see."""

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError, check_whole
from scalejax.nn import counts
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.towers import Partition
from scalejax.train.metrics.click import ClickQuality
from scalejax.train.task import Batch, Field, Gather, Keys, Loss, TaskBase, Work


class ClickModel(Protocol):
    """A config of an architecture that turns embeddings and dense features into one logit per task.

    The module that `build` returns is called as `model(embedded, dense, key=key)` and returns logits, float32[B, T] or
    wider.
    """

    def tables(self, schema: Schema) -> tuple[TableConfig, ...]: ...

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtrTask(TaskBase):
    """A click model bound to a schema; a `train.task.Task`.

    Attributes:
      model: Architecture.
      schema: Columns; one task for each of `schema.labels`.
      towers: Its features by tower, where the model takes a `HalfWay` too in the place of embedded features.
    """

    model: ClickModel
    schema: Schema
    towers: Partition | None = None

    def fields(self) -> dict[str, Field]:
        """Dense features, labels and weights of the examples; ids are features of the tables."""
        return {
            "dense": Field(shape=(len(self.schema.dense),), dtype="float32"),
            "labels": Field(shape=(len(self.schema.labels),), dtype="float32"),
            "weights": Field(shape=(), dtype="float32"),
        }

    def identity(self) -> dict[str, str]:
        """The features of each tower, in the order in which parameters of towers lie."""
        return {} if self.towers is None else {"model.towers": json.dumps(self.towers.towers)}

    def tables(self) -> tuple[TableConfig, ...]:
        """The embedding tables that the model looks up."""
        return self.model.tables(self.schema)

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        """Builds the dense part."""
        return self.model.build(self.schema, rngs, dtypes)

    def loss(self, model: Any, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """Binary cross-entropy; with several tasks, the mean over the tasks of each example.

        Args:
          model: What `init` returned, its parameters whole.
          batch: Dense features, labels and weights, and float[B, dim] of each feature.
          keys: Drive dropout; None = evaluation.
          gather: Not used: the step fetches parameters.
        Returns:
          sum_b w_b mean_t bce_bt and sum_b w_b, both float32 (float64 where the model computes in float64), and the
          output "logits", float32[B, T].
        """
        del gather
        logits = model(batch.embedded, batch["dense"], key=None if keys is None else keys.examples)  # B T
        per_example = bce_with_logits(logits, batch["labels"].astype(logits.dtype)).mean(-1)  # B T -> B
        weights = batch["weights"].astype(logits.dtype)
        return Loss((per_example * weights).sum(), weights.sum(), outputs={"logits": logits.astype(jnp.float32)})

    def metrics(self) -> tuple[ClickQuality, ...]:
        """Quality of the predicted probabilities of each task."""
        return (ClickQuality(tasks=self.schema.labels),)

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """FLOPs of the dense part."""
        rows = shapes["labels"][0]
        return Work(flops=rows * self.flops_per_example(), count=rows)

    def describe(self, data: Any) -> dict[str, object]:
        """FLOPs of an example."""
        del data
        return {"flops_per_example": self.flops_per_example()}

    def flops_per_example(self) -> int:
        """FLOPs of forward and backward of the dense part, 6 a multiply-accumulate."""
        return self._flops

    def dense_parameters(self) -> int:
        """Parameters outside the embedding tables."""
        return counts.parameters(self._abstract)

    @functools.cached_property
    def _abstract(self) -> nnx.Module:
        return counts.abstract(self.model.build, self.schema)

    @functools.cached_property
    def _flops(self) -> int:
        embedded = {
            name: jax.ShapeDtypeStruct((1, table.dim), jnp.float32)
            for table in self.tables()
            for name in table.features
        }
        dense = jax.ShapeDtypeStruct((1, len(self.schema.dense)), jnp.float32)
        return 6 * counts.macs(self._abstract, embedded, dense)


def bce_with_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-y log p - (1 - y) log(1 - p) for p = sigmoid(logits), elementwise; finite for every finite logit."""
    # Not softplus(z) - y z: that cancels where a confident prediction is right.
    return labels * jax.nn.softplus(-logits) + (1 - labels) * jax.nn.softplus(logits)


def pooled_table(
    feature: Categorical,
    dim: int,
    *,
    pooling: Literal["sum", "mean"] = "sum",
    init_scale: float | None = None,
) -> TableConfig:
    """A table of its own for one feature; the rows of an example are pooled to float[B, dim].

    Raises:
      UserError: the feature has ids of any 64 bits; an experiment with id maps gives the model their rows instead.
    """
    if feature.rows is None:
        raise UserError(
            f"Feature {feature.name!r} has ids of any 64 bits (rows=None); a table needs a number of rows. Give the "
            "experiment an id map for it (Tables.id_maps)."
        )
    return TableConfig(
        name=feature.name,
        rows=feature.rows,
        dim=dim,
        features=(feature.name,),
        pooling=pooling,
        init_scale=init_scale,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneVectorConfig:
    """The part of an architecture in which every feature is one vector of one width, and the dense ones make another.

    Attributes:
      dim: d.
      bottom_hidden: Hidden widths of the MLP on the dense features; its output is d wide.
      pooling: How the rows of a multi-hot feature become one.
      embedding_scale: Rows start uniform in [-embedding_scale, embedding_scale]; None = 1/sqrt(rows).
      dropout: After hidden activations of the MLP that makes the logits.
    """

    dim: int = 128
    bottom_hidden: tuple[int, ...] = (512, 256)
    pooling: Literal["sum", "mean"] = "sum"
    embedding_scale: float | None = None
    dropout: float = 0.0

    FREE = ("embedding_scale", "dropout")

    def __post_init__(self) -> None:
        check_whole(f"{type(self).__name__}: dim", self.dim, 1)
        nn.check_mlp(type(self).__name__, dropout=self.dropout, bottom_hidden=self.bottom_hidden)

    def tables(self, schema: Schema) -> tuple[TableConfig, ...]:
        return tuple(
            pooled_table(f, self.dim, pooling=self.pooling, init_scale=self.embedding_scale) for f in schema.categorical
        )

    def input_vectors(self, schema: Schema) -> int:
        """n: one vector a categorical feature, one for the dense ones."""
        return len(schema.categorical) + bool(schema.dense)

    def bottom_sizes(self, schema: Schema) -> dict[str, tuple[int, ...]]:
        """Sizes of the MLP "bottom", if there are dense features."""
        return {"bottom": (len(schema.dense), *self.bottom_hidden, self.dim)} if schema.dense else {}


def check_features(where: str, names: Iterable[str], schema: Schema) -> None:
    """Raises UserError if a config names a categorical feature that the schema lacks."""
    for name in names:
        if name not in schema.keys:
            near = difflib.get_close_matches(name, schema.keys, n=3, cutoff=0.0)
            raise UserError(
                f"{where}: {name!r} is not one of the {len(schema.keys)} categorical features of the data; the nearest "
                f"are {', '.join(near)}. Change the model's config, or the columns of the data."
            )
