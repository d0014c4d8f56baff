"""What every click model shares: the loss, and the task that training and planning see."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.data.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel.embedding.config import RowOptimizer, TableConfig
from scalejax.parallel.embedding.jagged import DeviceBatch


class ClickModel(Protocol):
    """A config of an architecture that turns embeddings and numbers into one logit per task.

    The module that `build` returns is called as `model(embedded, dense, key=key)` and returns logits, float32[B, T] or
    wider.
    """

    def tables(self, schema: Schema, row_optimizer: RowOptimizer) -> tuple[TableConfig, ...]: ...

    def build(self, schema: Schema, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> nnx.Module: ...

    def macs_per_example(self, schema: Schema) -> int:
        """Multiply-accumulates of one example's forward pass in the dense part."""
        ...

    def dense_parameters(self, schema: Schema) -> int:
        """Parameters outside the embedding tables."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtrTask:
    """A click model bound to a schema; implements `train.protocols.Task`.

    Attributes:
      model: Architecture.
      schema: Columns; one task for each of `schema.labels`.
      row_optimizer: Optimizer of every table.
    """

    model: ClickModel
    schema: Schema
    row_optimizer: RowOptimizer

    def tables(self) -> tuple[TableConfig, ...]:
        """The embedding tables that the model looks up."""
        return self.model.tables(self.schema, self.row_optimizer)

    def init(self, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> nnx.Module:
        """Builds the dense part."""
        return self.model.build(self.schema, rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)

    def loss(
        self, model: nnx.Module, embedded: dict[str, jax.Array], batch: DeviceBatch, *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Binary cross-entropy; with several tasks, the mean over the tasks of each example.

        Args:
          model: What `init` returned.
          embedded: float[B, dim] per feature.
          batch: Numbers, labels and weights; its ids are not read.
          key: Drives dropout; None = evaluation.
        Returns:
          sum_b w_b mean_t bce_bt and sum_b w_b, both float32 (float64 where the model computes in float64), and
          {"logits": float32[B, T]}.
        """
        logits = model(embedded, batch.dense, key=key)  # pyright: ignore[reportCallIssue]  # B T
        per_example = bce_with_logits(logits, batch.labels.astype(logits.dtype)).mean(-1)  # B T -> B
        weights = batch.weights.astype(logits.dtype)
        return (per_example * weights).sum(), weights.sum(), {"logits": logits.astype(jnp.float32)}

    def flops_per_example(self) -> int:
        """FLOPs of forward and backward of the dense part, 6 a multiply-accumulate."""
        return 6 * self.model.macs_per_example(self.schema)

    def dense_parameters(self) -> int:
        """Parameters outside the embedding tables, by plain arithmetic."""
        return self.model.dense_parameters(self.schema)


def bce_with_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-y log p - (1 - y) log(1 - p) for p = sigmoid(logits), elementwise; finite for every finite logit."""
    # Not softplus(z) - y z: that cancels where a confident prediction is right.
    return labels * jax.nn.softplus(-logits) + (1 - labels) * jax.nn.softplus(logits)


def pooled_table(
    feature: Categorical,
    dim: int,
    *,
    row_optimizer: RowOptimizer,
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
            "experiment an id map for it (Experiment.id_maps)."
        )
    return TableConfig(
        name=feature.name,
        rows=feature.rows,
        dim=dim,
        features=(feature.name,),
        pooling=pooling,
        optimizer=row_optimizer,
        init_scale=init_scale,
    )


def check_features(where: str, names: Iterable[str], schema: Schema) -> None:
    """Raises UserError if a config names a categorical feature that the schema lacks."""
    for name in names:
        if name not in schema.keys:
            near = difflib.get_close_matches(name, schema.keys, n=3, cutoff=0.0)
            raise UserError(
                f"{where}: {name!r} is not one of the {len(schema.keys)} categorical features of the data; the nearest "
                f"are {', '.join(near)}. Change the model's config, or the columns of the data."
            )
