"""Wukong: a stack of factorization-machine layers that keeps improving as it is made larger.

    scalejax train wukong

Paper: B. Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation", ICML 2024 (arXiv 2403.02545).
Equations, in the order of the code (one example; X_i holds n_i vectors of width d):

    X_0     = d-vectors of the dense features, of the categorical ones, and of groups of unimportant ones  (section 3.2)
    F_i     = X_i X_i^T  |  X_i (X_i^T Y)  |  X_i (X_i^T Y(X_i))                      plain | lowrank | attentive FM
    A_i     = reshape(MLP(LN(flatten(F_i))), (n_F, d))                                FM block
    C_i     = W_L X_i                                                                 linear compression block, n_L rows
    R_i     = X_i if n_i = n_F + n_L else W_R X_i                                     residual
    X_{i+1} = LN(concat(A_i, C_i) + R_i)                                              LN over d
    logits  = MLP(flatten(X_l))

Layer i holds interactions of orders 1 .. 2^(i+1). `X X^T` is never formed by the low-rank kinds. With k < min(n, d) the
projection by Y loses information (the paper's "nothing is lost" needs k >= min(n, d)), and the published k are below.

What the paper leaves open, and what is done here: Y(X) = MLP(flatten(W_C X)) reshaped to (n, k), with
`attention_rows` rows in W_C and one hidden layer by default; weights as in `nn.scaled_normal`, biases zero; W_L, W_R,
W_C and Y have no bias; dropout after hidden activations of the FM blocks and of the head. The layers are unrolled: the
first has a shape of its own and the deepest published stack has 8, so a scan would save little compilation and cost a
copy of the weights.

Axes: B examples, n vectors of an example, d width of a vector, k rank, T tasks. Inside the stack X is stored [n, B, d]:
then every product from the left (W X, Y^T X) is one matrix product over B * d columns, without a transpose.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.errors import check_at_least, check_one_of
from scalejax.models.recsys.task import CtrTask, check_features, pooled_table
from scalejax.parallel.embedding.config import TableConfig

FmKind = Literal["lowrank", "plain", "attentive"]
Normalization = Literal["layer", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Important:
    """A feature with several d-vectors: its table is vectors * d wide."""

    feature: str
    vectors: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowGroup:
    """Unimportant features: `dim` wide rows, concatenated and mapped by an MLP to `vectors` d-vectors."""

    features: tuple[str, ...]
    dim: int
    vectors: int = 1
    hidden: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WukongConfig:
    """Architecture. The defaults are the member of the paper's Criteo Terabyte grid that comes nearest to its Table 3.

    There (13 dense and 26 categorical features) the defaults have 28,260,137 dense parameters and 172.99 MFLOP an
    example, against 28,009,121 and 173.73 published. No member of the grid matches exactly: some shape is not
    documented.

    Attributes:
      dim: d, width of every vector in the stack.
      layers: l.
      fm_outputs: n_F, vectors that each FM block adds.
      lcb_outputs: n_L, vectors that each linear compression block adds.
      fm: Kind of factorization machine; "plain" has cost n^2 d and ignores `rank`.
      rank: k, columns of Y.
      attention_rows: Rows of W_C, for fm="attentive".
      attention_hidden: Hidden widths of the MLP that makes Y, for fm="attentive".
      fmb_hidden: Hidden widths of the MLP in each FM block.
      head_hidden: Hidden widths of the MLP that makes the logits.
      bottom_hidden: Hidden widths of the MLP on the dense features.
      dense_vectors: d-vectors that the dense features become, all together.
      feature_vectors: d-vectors of each categorical feature that neither `important` nor `narrow` names; its table is
        feature_vectors * d wide.
      important: Features with several d-vectors.
      narrow: Groups of features with narrow tables.
      pooling: How the rows of a multi-hot feature become one.
      embedding_scale: Rows start uniform in [-embedding_scale, embedding_scale]; None = 1/sqrt(rows).
      dropout: After hidden activations of the FM blocks and of the head.
      embedding_dropout: On the elements of X_0.
      activation: Of every hidden layer; "linear" and normalization="none" make the stack a polynomial (tests use it).
      normalization: LayerNorm in the FM blocks and after the residual, or none.
    """

    dim: int = 128
    layers: int = 2
    fm_outputs: int = 16
    lcb_outputs: int = 16
    fm: FmKind = "lowrank"
    rank: int = 24
    attention_rows: int = 8
    attention_hidden: tuple[int, ...] = (256,)
    fmb_hidden: tuple[int, ...] = (2048, 2048)
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
    normalization: Normalization = "layer"

    def __post_init__(self) -> None:
        at_least_one = ("dim", "layers", "fm_outputs", "lcb_outputs", "rank", "attention_rows")
        for name in (*at_least_one, "dense_vectors", "feature_vectors"):
            check_at_least(f"WukongConfig: {name}", getattr(self, name), 1)
        for name in ("dropout", "embedding_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"WukongConfig: {name} must lie in [0, 1); got {getattr(self, name)}.")
        for name, choices in (("fm", FmKind), ("normalization", Normalization), ("activation", nn.Activation)):
            check_one_of(f"WukongConfig: {name}", getattr(self, name), get_args(choices))
        named = [i.feature for i in self.important] + [f for group in self.narrow for f in group.features]
        twice = sorted({f for f in named if named.count(f) > 1})
        if twice:
            raise ValueError(
                f"WukongConfig: a feature is important or in one narrow group; {', '.join(twice)} appear twice."
            )

    def task(self, schema: Schema) -> CtrTask:
        """Binds the model to the columns of a data set.

        Raises:
          UserError: `important` or `narrow` names a feature that the data lacks.
        """
        check_features("WukongConfig.important", [i.feature for i in self.important], schema)
        check_features("WukongConfig.narrow", [f for group in self.narrow for f in group.features], schema)
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

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "Wukong":
        return Wukong(self, schema, rngs, dtypes)

    def wide_features(self, schema: Schema) -> tuple[tuple[str, int], ...]:
        """(feature, number of d-vectors) for the features outside the narrow groups, in the order of the schema."""
        narrow = {f for group in self.narrow for f in group.features}
        vectors = {i.feature: i.vectors for i in self.important}
        return tuple((f, vectors.get(f, self.feature_vectors)) for f in schema.keys if f not in narrow)

    def input_vectors(self, schema: Schema) -> int:
        """n_0, the vectors that enter the first layer."""
        dense = self.dense_vectors if schema.dense else 0
        return dense + sum(m for _, m in self.wide_features(schema)) + sum(group.vectors for group in self.narrow)

    def mlps_before_stack(self, schema: Schema) -> dict[str, tuple[int, ...]]:
        """Sizes of the MLPs that make d-vectors: "bottom" (if there are dense features) and "narrow_<i>"."""
        sizes = {}
        if schema.dense:
            sizes["bottom"] = (len(schema.dense), *self.bottom_hidden, self.dense_vectors * self.dim)
        for i, group in enumerate(self.narrow):
            sizes[f"narrow_{i}"] = (len(group.features) * group.dim, *group.hidden, group.vectors * self.dim)
        return sizes

    def fmb_sizes(self, n: int) -> tuple[int, ...]:
        """Sizes of the MLP in an FM block whose layer has n input vectors."""
        return (n * (n if self.fm == "plain" else self.rank), *self.fmb_hidden, self.fm_outputs * self.dim)

    def attention_sizes(self, n: int) -> tuple[int, ...]:
        """Sizes of the MLP that makes Y in an attentive FM of n input vectors."""
        return (self.attention_rows * self.dim, *self.attention_hidden, n * self.rank)

    def head_sizes(self, schema: Schema) -> tuple[int, ...]:
        """Sizes of the MLP that makes the logits."""
        return ((self.fm_outputs + self.lcb_outputs) * self.dim, *self.head_hidden, len(schema.labels))

    def layer_inputs(self, schema: Schema) -> tuple[int, ...]:
        """n_i of each layer: n_0 first, n_F + n_L after it (the pyramid)."""
        return (self.input_vectors(schema), *(self.layers - 1) * (self.fm_outputs + self.lcb_outputs,))


_FLIGHTS = WukongConfig(
    dim=4,
    layers=2,
    fm_outputs=64,
    lcb_outputs=72,  # with fm_outputs 136, as many as go in (9 features, 7 bins, dense): the residual is the identity
    rank=12,
    fmb_hidden=(256,),
    head_hidden=(256, 128),
    bottom_hidden=(64,),
    dense_vectors=8,
    feature_vectors=8,
    normalization="none",
)

SIZES = {
    "S": dataclasses.replace(
        _FLIGHTS,
        fm_outputs=16,
        lcb_outputs=52,
        fmb_hidden=(128,),
        head_hidden=(128, 64),
        dense_vectors=4,
        feature_vectors=4,
    ),
    "M": _FLIGHTS,
    "L": dataclasses.replace(_FLIGHTS, dim=8, fm_outputs=32, lcb_outputs=36, rank=24, fmb_hidden=(512,)),
}
"""Sizes for small data (some ten features, some 10^5 examples). The published ones: `wukong_scaling.TABLE_5`.

On the flights many short vectors did better than one long vector in a table as wide, and the stack did better without
LayerNorm, which takes the length of such vectors away (benchmarks/results/quality.md).
"""


class Mix(nnx.Module):
    """W X: `rows` linear combinations of the n vectors of an example. W ~ scaled_normal with fan-in n; no bias."""

    def __init__(self, rows: int, n: int, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.weight = nnx.Param(
            nn.scaled_normal(rngs.params(), (rows, n), fan_in=n, dtype=dtypes.params), logical_axes=("vectors", "mixed")
        )
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[rows, B, d]."""
        return mix(self.weight[...].astype(self.compute_dtype), x)


def mix(weight: jax.Array, x: jax.Array) -> jax.Array:
    """float[rows, n], float[n, B, d] -> float[rows, B, d], as one matrix product."""
    n, b, d = x.shape
    return (weight @ x.reshape(n, b * d)).reshape(-1, b, d)


class PlainFm(nnx.Module):
    """F = X X^T."""

    def __init__(self, n: int, config: WukongConfig, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        del n, config, rngs, dtypes

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> wide[B, n, n]."""
        del key
        return nn.products(x, x)


class LowRankFm(nnx.Module):
    """F = X (X^T Y), Y learned; equals (X X^T) Y at k/n of its cost."""

    def __init__(self, n: int, config: WukongConfig, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.y = nnx.Param(
            nn.scaled_normal(rngs.params(), (n, config.rank), fan_in=n, dtype=dtypes.params),
            logical_axes=("mixed", "rank"),
        )
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> wide[B, n, k]."""
        del key
        return nn.products(x, mix(self.y[...].astype(self.compute_dtype).T, x))


class AttentiveFm(nnx.Module):
    """F = X (X^T Y(X)), Y(X) an MLP of W_C X: the columns of Y depend on the example."""

    def __init__(self, n: int, config: WukongConfig, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.compress = Mix(config.attention_rows, n, rngs=rngs, dtypes=dtypes)
        self.mlp = nn.Mlp(
            config.attention_sizes(n),
            rngs=rngs,
            activation=config.activation,
            dropout_rate=config.dropout,
            dtypes=dtypes,
        )
        self.rank = config.rank

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> wide[B, n, k]."""
        n, b, _ = x.shape
        y = self.mlp(rows(self.compress(x)), key=key).reshape(b, n, self.rank)  # B n k
        y = y * (1 / n) ** 0.5  # so that X^T Y starts at the scale of X, as with the learned Y
        return nn.products(x, jnp.einsum("nbd,bnk->kbd", x, y))


_FM = {"plain": PlainFm, "lowrank": LowRankFm, "attentive": AttentiveFm}


def rows(x: jax.Array) -> jax.Array:
    """Flattens each example's vectors: [n, B, d] -> [B, n * d]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def vectors(x: jax.Array, d: int) -> jax.Array:
    """The inverse of `rows`: [B, n * d] -> [n, B, d]."""
    return x.reshape(x.shape[0], -1, d).swapaxes(0, 1)


class WukongLayer(nnx.Module):
    """X_{i+1} = LN(concat(FMB(X_i), LCB(X_i)) + R_i)."""

    def __init__(self, n: int, config: WukongConfig, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        out = config.fm_outputs + config.lcb_outputs
        self.fm = _FM[config.fm](n, config, rngs=rngs, dtypes=dtypes)
        self.mlp = nn.Mlp(
            config.fmb_sizes(n),
            rngs=rngs,
            activation=config.activation,
            dropout_rate=config.dropout,
            dtypes=dtypes,
        )
        self.lcb = Mix(config.lcb_outputs, n, rngs=rngs, dtypes=dtypes)
        self.residual = None if n == out else Mix(out, n, rngs=rngs, dtypes=dtypes)
        self.fm_norm, self.norm = (
            nn.LayerNorm(width, dtypes=dtypes) if config.normalization == "layer" else None
            for width in (config.fmb_sizes(n)[0], config.dim)
        )
        self.compute_dtype = dtypes.compute

    def fm_block(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[n_F, B, d]."""
        fm_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        f = self.fm(x, key=fm_key)  # B n k
        f = f.reshape(f.shape[0], -1)  # B nk
        f = f.astype(self.compute_dtype) if self.fm_norm is None else self.fm_norm(f)
        return vectors(self.mlp(f, key=mlp_key), x.shape[-1])  # n_F B d

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[n_F + n_L, B, d]."""
        mixed = jnp.concatenate([self.fm_block(x, key=key), self.lcb(x)])
        mixed = mixed + (x if self.residual is None else self.residual(x))
        return mixed if self.norm is None else self.norm(mixed)


class Wukong(nnx.Module):
    """Embeddings and dense features -> one logit per task."""

    def __init__(self, config: WukongConfig, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.before = nnx.Dict(
            {
                name: nn.Mlp(sizes, rngs=rngs, activation=config.activation, dtypes=dtypes)
                for name, sizes in config.mlps_before_stack(schema).items()
            }
        )
        self.layers = nnx.List([WukongLayer(n, config, rngs=rngs, dtypes=dtypes) for n in config.layer_inputs(schema)])
        self.head = nn.Mlp(
            config.head_sizes(schema),
            rngs=rngs,
            activation=config.activation,
            dropout_rate=config.dropout,
            dtypes=dtypes,
            out_dtype=nn.wide(dtypes.params, dtypes.compute),
        )
        self.config, self.wide_features = config, config.wide_features(schema)
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
        """The stack: compute_dtype[n_0, B, d] -> compute_dtype[n_F + n_L, B, d]."""
        for i, layer in enumerate(self.layers):
            x = layer(x, key=None if key is None else jax.random.fold_in(key, i))
        return x

    def __call__(self, embedded: dict[str, jax.Array], dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, float32[B, T] (float64 where the model computes in float64)."""
        in_key, stack_key, head_key = (None, None, None) if key is None else jax.random.split(key, 3)
        x = nn.dropout(self.embed(embedded, dense), self.config.embedding_dropout, in_key)  # n_0 B d
        x = self.interact(x, key=stack_key)  # n B d
        return self.head(rows(x), key=head_key)  # B T
