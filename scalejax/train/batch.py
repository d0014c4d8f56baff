"""A batch as a loss sees it."""

import dataclasses
import functools
from typing import Any, Literal

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("fields", "embedded", "lengths", "constants", "progress"),
    meta_fields=("purpose",),
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch, or a part of one, as a loss sees it.

    Attributes:
      fields: {name: array [B, ...]} of scope "example", whole arrays of scope "step", [devices, ...] of scope "device".
      embedded: Rows of embedding tables, {feature: float[B, dim]}, [B, positions, dim] where they are not pooled;
        where the exchange stops at the towers of a host, a `HalfWay`.
      lengths: int32[B] of unpooled features: how many of the positions hold rows.
      constants: What `Task.constants` placed.
      purpose: Whether the model learns from it or is scored on it, or is to set its running means (`nnx.BatchStat`) to
        those of this batch alone: "statistics", see `Evaluation.statistics`.
      progress: float32[], the share of the steps of the run, or of its phase, that lie behind; None = no training.
    """

    fields: dict[str, Any]
    embedded: Any = dataclasses.field(default_factory=dict)
    lengths: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    constants: Any = None
    purpose: Literal["training", "evaluation", "statistics"] = "training"
    progress: jax.Array | None = None

    def __getitem__(self, name: str) -> jax.Array:
        """A field that is one array."""
        return self.fields[name]
