"""The frame of click models whose layers map vectors to vectors: features become vectors, layers, an MLP on top.

Wukong and DHEN share it. Inside the stack X is stored [n, B, d]: then every product from the left (W X, Y^T X) is one
matrix product over B * d columns, without a transpose.

Axes: B examples, n vectors of an example, d width of a vector, T tasks.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError, check_several, check_whole
from scalejax.models.recsys.task import CtrTask, check_features, pooled_table
from scalejax.parallel.embedding.config import TableConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Important:
    """A feature with several d-vectors: its table is vectors * d wide."""

    feature: str
    vectors: int = 2

    def __post_init__(self) -> None:
        check_whole("Important: vectors", self.vectors, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowGroup:
    """Unimportant features: `dim` wide rows, concatenated and mapped by an MLP to `vectors` d-vectors."""

    features: tuple[str, ...]
    dim: int
    vectors: int = 1
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dim", "vectors"):
            check_whole(f"NarrowGroup: {name}", getattr(self, name), 1)
        check_several("NarrowGroup: features", self.features, '"site"')
        if not self.features:
            raise UserError("NarrowGroup: features must name at least one feature; got none. Leave the group out.")
        nn.check_mlp("NarrowGroup", hidden=self.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig(abc.ABC):
    """What is before and after the layers.

    Attributes:
      dim: d, width of every vector in the stack.
      head_hidden: Hidden widths of the MLP that makes the logits.
      bottom_hidden: Hidden widths of the MLP on the dense features.
      dense_vectors: d-vectors that the dense features become, all together.
      feature_vectors: d-vectors of each categorical feature that neither `important` nor `narrow` names; its table is
        feature_vectors * d wide.
      important: Features with several d-vectors.
      narrow: Groups of features with narrow tables.
      pooling: How the rows of a multi-hot feature become one.
      embedding_scale: Rows start uniform in [-embedding_scale, embedding_scale]; None = 1/sqrt(rows).
      dropout: After hidden activations of the head.
      embedding_dropout: On the elements of X_0.
      activation: Of the hidden layers of the MLPs before the stack and of the head.
    """

    dim: int = 128
    head_hidden: tuple[int, ...] = (2048,)
    bottom_hidden: tuple[int, ...] = (512, 256)
    dense_vectors: int = 1
    feature_vectors: int = 1
    important: tuple[Important, ...] = ()
    narrow: tuple[NarrowGroup, ...] = ()
    pooling: Literal["sum", "mean"] = "sum"
    embedding_scale: float | None = None
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    activation: nn.Activation = "relu"

    FREE = ("embedding_scale", "dropout", "embedding_dropout")

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in ("dim", "dense_vectors", "feature_vectors"):
            check_whole(f"{name}: {field}", getattr(self, field), 1)
        nn.check_mlp(
            name,
            activation=self.activation,
            dropout=self.dropout,
            head_hidden=self.head_hidden,
            bottom_hidden=self.bottom_hidden,
        )
        if not 0.0 <= self.embedding_dropout < 1.0:
            raise UserError(f"{name}: embedding_dropout must lie in [0, 1); got {self.embedding_dropout}.")
        named = [i.feature for i in self.important] + [f for group in self.narrow for f in group.features]
        twice = sorted({f for f in named if named.count(f) > 1})
        if twice:
            raise UserError(f"{name}: a feature is important or in one narrow group; {', '.join(twice)} appear twice.")

    def task(self, schema: Schema) -> CtrTask:
        """Binds the model to the columns of a data set.

        Raises:
          UserError: `important` or `narrow` names a feature that the data lacks.
        """
        name = type(self).__name__
        check_features(f"{name}.important", [i.feature for i in self.important], schema)
        check_features(f"{name}.narrow", [f for group in self.narrow for f in group.features], schema)
        return CtrTask(model=self, schema=schema)

    def tables(self, schema: Schema) -> tuple[TableConfig, ...]:
        """One table per feature: as many times d wide as it has vectors, narrower in a narrow group."""
        narrow = {f: group.dim for group in self.narrow for f in group.features}
        wide = {f: vectors * self.dim for f, vectors in self.wide_features(schema)}
        return tuple(
            pooled_table(
                feature,
                narrow[feature.name] if feature.name in narrow else wide[feature.name],
                pooling=self.pooling,
                init_scale=self.embedding_scale,
            )
            for feature in schema.categorical
        )

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "InteractionStack":
        return InteractionStack(self, schema, rngs, dtypes)

    @abc.abstractmethod
    def build_layers(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> list[nnx.Module]:
        """The layers, each called as layer(x, dense, key=key), see `interactions.Interaction`."""

    @abc.abstractmethod
    def output_vectors(self, schema: Schema) -> int:
        """Vectors that the last layer returns."""

    def wide_features(self, schema: Schema) -> tuple[tuple[str, int], ...]:
        """(feature, number of d-vectors) for the features outside the narrow groups, in the order of the schema."""
        narrow = {f for group in self.narrow for f in group.features}
        vectors = {i.feature: i.vectors for i in self.important}
        return tuple((f, vectors.get(f, self.feature_vectors)) for f in schema.keys if f not in narrow)

    def vectors_of_dense(self, schema: Schema) -> int:
        """Vectors that the dense features become, the first ones of X_0; 0 = there are no dense features."""
        return self.dense_vectors if schema.dense else 0

    def input_vectors(self, schema: Schema) -> int:
        """n_0, the vectors that enter the first layer."""
        wide = sum(m for _, m in self.wide_features(schema))
        return self.vectors_of_dense(schema) + wide + sum(group.vectors for group in self.narrow)

    def mlps_before_stack(self, schema: Schema) -> dict[str, tuple[int, ...]]:
        """Sizes of the MLPs that make d-vectors: "bottom" (if there are dense features) and "narrow_<i>"."""
        sizes = {}
        if schema.dense:
            sizes["bottom"] = (len(schema.dense), *self.bottom_hidden, self.dense_vectors * self.dim)
        for i, group in enumerate(self.narrow):
            sizes[f"narrow_{i}"] = (len(group.features) * group.dim, *group.hidden, group.vectors * self.dim)
        return sizes

    def head_sizes(self, schema: Schema) -> tuple[int, ...]:
        """Sizes of the MLP that makes the logits."""
        return (self.output_vectors(schema) * self.dim, *self.head_hidden, len(schema.labels))


class InteractionStack(nnx.Module):
    """Embeddings and dense features -> one logit per task.

    The layers are unrolled: the first has a shape of its own and the deepest published stack has 8, so a scan would
    save little compilation and cost a copy of the weights.
    """

    def __init__(self, config: StackConfig, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.before = nnx.Dict(
            {
                name: nn.Mlp(sizes, rngs=rngs, activation=config.activation, dtypes=dtypes)
                for name, sizes in config.mlps_before_stack(schema).items()
            }
        )
        self.layers = nnx.List(config.build_layers(schema, rngs, dtypes))
        self.head = nn.Mlp(
            config.head_sizes(schema),
            rngs=rngs,
            activation=config.activation,
            dropout_rate=config.dropout,
            dtypes=dtypes,
            out_dtype=nn.wide(dtypes.params, dtypes.compute),
        )
        self.config, self.wide_features = config, config.wide_features(schema)
        self.vectors_of_dense = config.vectors_of_dense(schema)
        self.compute_dtype = dtypes.compute

    def embed(self, embedded: dict[str, jax.Array], dense: jax.Array) -> jax.Array:
        """X_0 in the order: dense features, wide features as in the schema, narrow groups.

        Args:
          embedded: float[B, dim of its table] per feature.
          dense: float[B, D].
        Returns:
          compute_dtype[n_0, B, d].
        """
        d, parts = self.config.dim, []
        if "bottom" in self.before:
            parts.append(vectors(self.before["bottom"](dense), d))
        parts += [vectors(embedded[f].astype(self.compute_dtype), d) for f, _ in self.wide_features]
        for i, group in enumerate(self.config.narrow):
            narrow = jnp.concatenate([embedded[f].astype(self.compute_dtype) for f in group.features], axis=1)
            parts.append(vectors(self.before[f"narrow_{i}"](narrow), d))
        return jnp.concatenate(parts)

    def interact(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """The layers: compute_dtype[n_0, B, d] -> compute_dtype[n, B, d]."""
        dense = x[: self.vectors_of_dense]
        layers: Sequence[Any] = self.layers
        for i, layer in enumerate(layers):
            x = layer(x, dense, key=None if key is None else jax.random.fold_in(key, i))
        return x

    def __call__(self, embedded: dict[str, jax.Array], dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, float32[B, T] (float64 where the model computes in float64)."""
        in_key, stack_key, head_key = (None, None, None) if key is None else jax.random.split(key, 3)
        x = nn.dropout(self.embed(embedded, dense), self.config.embedding_dropout, in_key)  # n_0 B d
        x = self.interact(x, key=stack_key)  # n B d
        return self.head(rows(x), key=head_key)  # B T


def rows(x: jax.Array) -> jax.Array:
    """Flattens each example's vectors: [n, B, d] -> [B, n * d]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def vectors(x: jax.Array, d: int) -> jax.Array:
    """The inverse of `rows`: [B, n * d] -> [n, B, d]."""
    return x.reshape(x.shape[0], -1, d).swapaxes(0, 1)
