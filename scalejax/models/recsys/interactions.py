"""Modules that map the vectors of an example to others: what layers of click models are made of.

A module is described by a frozen dataclass (an `Interaction`), which a config holds, and which builds it for the number
and the width of the vectors that it will see. A file of your own may have others.

    LinearCompression     U = W X
    FactorizationMachine  U = MLP(LN(flatten(F))),  F = X X^T  |  X (X^T Y)  |  X (X^T Y(X))
    DotProduct            U = MLP(dense features, products of all pairs of W X)
    FeatureCross          U = W (x * (V x + b)),    x = flatten(X)          equation 7 of DHEN, read as DCN has it
    SecondMoment          U = W (X^T X) / n + b                             equation 7 of DHEN, read as it is printed
    SelfAttention         U = W TransformerEncoderLayer(X)
    Convolution           U = W Conv2d(X)
    MlpExperts            U = sum_e softmax(G x)_e MLP_e(x)

Papers: B. Zhang et al., "DHEN", arXiv 2203.11014, equations 3 to 7; B. Zhang et al., "Wukong", ICML 2024 (arXiv
2403.02545), sections 3.3 and 3.4. X X^T is never formed by the low-rank kinds of factorization machine. With k < min(n,
d) the projection by Y loses information (the Wukong paper's "nothing is lost" needs k >= min(n, d)).

Axes: B examples, n vectors of an example, l vectors that a module returns, d width of a vector, k rank. X is stored
[n, B, d], see `stack`.
"""

import dataclasses
from typing import Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError, check_one_of, check_whole
from scalejax.models.recsys.stack import rows, vectors

FmKind = Literal["lowrank", "plain", "attentive"]
Normalization = Literal["layer", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What a module sees.

    Attributes:
      n: Vectors of an example.
      d: Their width.
      dense: Vectors that the dense features became; 0 = there are no dense features.
    """

    n: int
    d: int
    dense: int = 0


class Interaction(Protocol):
    """Describes a module.

    What `build` returns is called as module(x, dense, key=key) with compute_dtype[n, B, d] and the vectors of the dense
    features before the first layer, compute_dtype[inputs.dense, B, d]; key drives dropout, None = none. It returns
    compute_dtype[outputs, B, d].
    """

    @property
    def outputs(self) -> int: ...

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> nnx.Module: ...


def check_returned(config: object, shape: tuple[int, ...], wanted: tuple[int, ...], says: str) -> None:
    """Raises UserError if a module returned another shape than its config says; `says` names what says it there."""
    if tuple(shape) != wanted:
        raise UserError(
            f"{type(config).__name__}: its module returned {list(shape)}, and vectors, examples and their width should "
            f"be {list(wanted)}. Mend what it returns, or {says} of {config!r}."
        )


class Mix(nnx.Module):
    """W X: `rows` linear combinations of the n vectors of an example. W ~ scaled_normal with fan-in n; no bias."""

    def __init__(self, rows: int, n: int, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.weight = nnx.Param(
            nn.scaled_normal(rngs.params(), (rows, n), fan_in=n, dtype=dtypes.params), logical_axes=("vectors", "mixed")
        )
        self.compute_dtype = dtypes.compute

    def __call__(
        self,
        x: jax.Array,
        dense: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        present: jax.Array | None = None,
    ) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[rows, B, d]."""
        del dense, key, present
        return mix(self.weight[...].astype(self.compute_dtype), x)


def mix(weight: jax.Array, x: jax.Array) -> jax.Array:
    """float[rows, n], float[n, B, d] -> float[rows, B, d], as one matrix product."""
    n, b, d = x.shape
    return (weight @ x.reshape(n, b * d)).reshape(-1, b, d)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCompression:
    """`outputs` linear combinations of the vectors; Wukong's linear compression block."""

    outputs: int

    def __post_init__(self) -> None:
        check_whole("LinearCompression: outputs", self.outputs, 1)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Mix:
        return Mix(self.outputs, inputs.n, rngs=rngs, dtypes=dtypes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorizationMachine:
    """Wukong's FM block: inner products of all vectors, a norm and an MLP.

    The papers leave open, and here: Y(X) = MLP(flatten(W_C X)) reshaped to (n, k), with `attention_rows` rows in W_C
    and one hidden layer by default; weights as in `nn.scaled_normal`, biases zero; W_C and Y have no bias; dropout
    after hidden activations.

    Attributes:
      outputs: n_F, vectors that it returns.
      kind: Of the factorization machine; "plain" has cost n^2 d and ignores `rank`.
      rank: k, columns of Y.
      hidden: Hidden widths of the MLP.
      attention_rows: Rows of W_C, for kind="attentive".
      attention_hidden: Hidden widths of the MLP that makes Y, for kind="attentive".
      normalization: LayerNorm before the MLP, or none.
      activation: Of the hidden layers.
      dropout: After hidden activations.
    """

    outputs: int
    kind: FmKind = "lowrank"
    rank: int = 24
    hidden: tuple[int, ...] = (2048, 2048)
    attention_rows: int = 8
    attention_hidden: tuple[int, ...] = (256,)
    normalization: Normalization = "layer"
    activation: nn.Activation = "relu"
    dropout: float = 0.0

    FREE = ("dropout",)

    def __post_init__(self) -> None:
        for name in ("outputs", "rank", "attention_rows"):
            check_whole(f"FactorizationMachine: {name}", getattr(self, name), 1)
        check_one_of("FactorizationMachine: kind", self.kind, get_args(FmKind))
        check_one_of("FactorizationMachine: normalization", self.normalization, get_args(Normalization))
        nn.check_mlp(
            "FactorizationMachine",
            activation=self.activation,
            dropout=self.dropout,
            hidden=self.hidden,
            attention_hidden=self.attention_hidden,
        )

    def sizes(self, inputs: LayerInputs) -> tuple[int, ...]:
        """Sizes of the MLP."""
        entries = inputs.n * (inputs.n if self.kind == "plain" else self.rank)
        return (entries, *self.hidden, self.outputs * inputs.d)

    def attention_sizes(self, inputs: LayerInputs) -> tuple[int, ...]:
        """Sizes of the MLP that makes Y in an attentive one."""
        return (self.attention_rows * inputs.d, *self.attention_hidden, inputs.n * self.rank)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "FmBlock":
        return FmBlock(self, inputs, rngs=rngs, dtypes=dtypes)


class PlainFm(nnx.Module):
    """F = X X^T."""

    def __init__(self, config: FactorizationMachine, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        del config, inputs, rngs, dtypes

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> wide[B, n, n]."""
        del key
        return nn.products(x, x)


class LowRankFm(nnx.Module):
    """F = X (X^T Y), Y learned; equals (X X^T) Y at k/n of its cost."""

    def __init__(self, config: FactorizationMachine, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.y = nnx.Param(
            nn.scaled_normal(rngs.params(), (inputs.n, config.rank), fan_in=inputs.n, dtype=dtypes.params),
            logical_axes=("mixed", "rank"),
        )
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> wide[B, n, k]."""
        del key
        return nn.products(x, mix(self.y[...].astype(self.compute_dtype).T, x))


class AttentiveFm(nnx.Module):
    """F = X (X^T Y(X)), Y(X) an MLP of W_C X: the columns of Y depend on the example."""

    def __init__(self, config: FactorizationMachine, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.compress = Mix(config.attention_rows, inputs.n, rngs=rngs, dtypes=dtypes)
        self.mlp = nn.Mlp(
            config.attention_sizes(inputs),
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


class FmBlock(nnx.Module):
    """See `FactorizationMachine`."""

    def __init__(self, config: FactorizationMachine, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.fm = _FM[config.kind](config, inputs, rngs=rngs, dtypes=dtypes)
        self.kind: FmKind = config.kind
        sizes = config.sizes(inputs)
        self.mlp = nn.Mlp(sizes, rngs=rngs, activation=config.activation, dropout_rate=config.dropout, dtypes=dtypes)
        self.fm_norm = nn.LayerNorm(sizes[0], dtypes=dtypes) if config.normalization == "layer" else None
        self.compute_dtype = dtypes.compute

    def __call__(
        self,
        x: jax.Array,
        dense: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        present: jax.Array | None = None,
    ) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[n_F, B, d]; where bool[n] `present` is false, x is zero."""
        del dense
        fm_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        f = self.fm(x, key=fm_key)  # B n k
        if present is not None:
            columns = present if self.kind == "plain" else jnp.ones(f.shape[2], bool)
            present = (present[:, None] & columns[None]).reshape(-1)
        f = f.reshape(f.shape[0], -1)  # B nk
        f = f.astype(self.compute_dtype) if self.fm_norm is None else self.fm_norm(f, present)
        return vectors(self.mlp(f, key=mlp_key), x.shape[-1])  # n_F B d


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotProduct:
    """Products of all pairs of vectors with the dense features beside them, then an MLP.

    It stands in for the AdvancedDLRM of the DHEN paper, which is not published and is described by these words. So that
    many vectors do not become their number squared, the pairs are those of `mixed` linear combinations.

    Attributes:
      outputs: Vectors that it returns.
      mixed: Linear combinations of the vectors whose products are taken; None = the vectors themselves.
      hidden: Hidden widths of the MLP.
      activation: Of the hidden layers.
      dropout: After hidden activations.
    """

    outputs: int
    mixed: int | None = None
    hidden: tuple[int, ...] = (256,)
    activation: nn.Activation = "relu"
    dropout: float = 0.0

    FREE = ("dropout",)

    def __post_init__(self) -> None:
        check_whole("DotProduct: outputs", self.outputs, 1)
        if self.mixed is not None:
            check_whole("DotProduct: mixed", self.mixed, 2)
        nn.check_mlp("DotProduct", activation=self.activation, dropout=self.dropout, hidden=self.hidden)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "DotProducts":
        if self.mixed is None and inputs.n < 2 and not inputs.dense:
            raise UserError(
                f"DotProduct: its input needs two vectors or dense features; got {inputs.n} and no dense ones. Give "
                "the layer before it more outputs, or set mixed=2."
            )
        return DotProducts(self, inputs, rngs=rngs, dtypes=dtypes)


class DotProducts(nnx.Module):
    """See `DotProduct`."""

    def __init__(self, config: DotProduct, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        m = inputs.n if config.mixed is None else config.mixed
        self.mix = None if config.mixed is None else Mix(m, inputs.n, rngs=rngs, dtypes=dtypes)
        sizes = (inputs.dense * inputs.d + m * (m - 1) // 2, *config.hidden, config.outputs * inputs.d)
        self.mlp = nn.Mlp(sizes, rngs=rngs, activation=config.activation, dropout_rate=config.dropout, dtypes=dtypes)
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array, dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """compute_dtype[n, B, d] and [dense, B, d] -> compute_dtype[outputs, B, d]."""
        z = x if self.mix is None else self.mix(x)
        i, j = jnp.triu_indices(len(z), 1)
        pairs = nn.products(z, z)[:, i, j].astype(self.compute_dtype)  # B m(m-1)/2
        return vectors(self.mlp(jnp.concatenate([rows(dense), pairs], axis=1), key=key), x.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureCross:
    """DCN's cross layer on the flattened vectors, mixed to `outputs` vectors.

    DCN's own "+ x" is left away: the shortcut of the layer supplies it.

    Attributes:
      outputs: Vectors that it returns.
      rank: Of V; None = full.
    """

    outputs: int
    rank: int | None = None

    def __post_init__(self) -> None:
        check_whole("FeatureCross: outputs", self.outputs, 1)
        if self.rank is not None:
            check_whole("FeatureCross: rank", self.rank, 1)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "Crosses":
        return Crosses(self, inputs, rngs=rngs, dtypes=dtypes)


class Crosses(nnx.Module):
    """See `FeatureCross`."""

    def __init__(self, config: FeatureCross, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        width = inputs.n * inputs.d
        self.down = (
            None
            if config.rank is None
            else nnx.Param(
                nn.scaled_normal(rngs.params(), (width, config.rank), fan_in=width, dtype=dtypes.params),
                logical_axes=("input", "rank"),
            )
        )
        self.affine = nn.Linear(config.rank or width, width, rngs=rngs, dtypes=dtypes)
        self.mix = Mix(config.outputs, inputs.n, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: jax.Array, dense: jax.Array | None = None, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[outputs, B, d]."""
        del dense, key
        flat = rows(x)  # B nd
        inner = flat if self.down is None else flat @ self.down[...].astype(flat.dtype)
        return self.mix(vectors(flat * self.affine(inner), x.shape[-1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondMoment:
    """The d x d matrix of an example's products over its vectors, mapped to `outputs` vectors.

    Equation 7 of DHEN prints W (X_n X_n^T) + b with the vectors as columns: every product of two places of a vector,
    summed over the vectors. Divided by n, so that it starts at the scale of squares.
    """

    outputs: int

    def __post_init__(self) -> None:
        check_whole("SecondMoment: outputs", self.outputs, 1)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "SecondMoments":
        return SecondMoments(self, inputs, rngs=rngs, dtypes=dtypes)


class SecondMoments(nnx.Module):
    """See `SecondMoment`."""

    def __init__(self, config: SecondMoment, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        shape = (config.outputs, inputs.d)
        self.mix = Mix(*shape, rngs=rngs, dtypes=dtypes)
        self.bias = nnx.Param(jnp.zeros(shape, dtypes.params), logical_axes=("vectors", "norm"))
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array, dense: jax.Array | None = None, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[outputs, B, d]."""
        del dense, key
        moments = jnp.einsum("nbd,nbe->dbe", x, x) / len(x)  # d B d
        return self.mix(moments) + self.bias[...].astype(self.compute_dtype)[:, None, :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """One layer of a Transformer's encoder over the vectors (no order, no mask), mixed to `outputs` vectors.

    As in Vaswani et al., 2017, each norm after its addition; queries, keys and values have no bias (that of keys would
    change nothing). The DHEN paper states no sizes.

    Attributes:
      outputs: Vectors that it returns.
      heads: Heads; they must divide d.
      hidden: Width of the feed-forward part; None = 4 d.
      activation: Of the feed-forward part.
      dropout: After the hidden activation.
    """

    outputs: int
    heads: int = 1
    hidden: int | None = dataclasses.field(default=None, metadata={"of_dim": 4})
    activation: nn.Activation = "relu"
    dropout: float = 0.0

    FREE = ("dropout",)

    def __post_init__(self) -> None:
        for name in ("outputs", "heads"):
            check_whole(f"SelfAttention: {name}", getattr(self, name), 1)
        if self.hidden is not None:
            check_whole("SelfAttention: hidden", self.hidden, 1)
        nn.check_mlp("SelfAttention", activation=self.activation, dropout=self.dropout)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "EncoderLayer":
        if inputs.d % self.heads:
            fitting = [n for n in range(1, inputs.d + 1) if inputs.d % n == 0]
            raise UserError(
                f"SelfAttention: heads must divide the width {inputs.d} of a vector; got {self.heads}. Take "
                f"{' or '.join(map(str, fitting))}."
            )
        return EncoderLayer(self, inputs, rngs=rngs, dtypes=dtypes)


class EncoderLayer(nnx.Module):
    """See `SelfAttention`."""

    def __init__(self, config: SelfAttention, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        d = inputs.d
        self.qkv = nnx.Param(
            nn.scaled_normal(rngs.params(), (d, 3 * d), fan_in=d, dtype=dtypes.params),
            logical_axes=("input", "hidden"),
        )
        self.out = nn.Linear(d, d, rngs=rngs, dtypes=dtypes)
        sizes = (d, 4 * d if config.hidden is None else config.hidden, d)
        self.mlp = nn.Mlp(sizes, rngs=rngs, activation=config.activation, dropout_rate=config.dropout, dtypes=dtypes)
        self.norms = nnx.List([nn.LayerNorm(d, dtypes=dtypes) for _ in range(2)])
        self.mix = Mix(config.outputs, inputs.n, rngs=rngs, dtypes=dtypes)
        self.heads = config.heads

    def __call__(self, x: jax.Array, dense: jax.Array | None = None, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[outputs, B, d]."""
        del dense
        n, b, d = x.shape
        flat = x.reshape(n * b, d)
        q, k, v = jnp.split(
            (flat @ self.qkv[...].astype(flat.dtype)).reshape(n, b, self.heads, 3 * d // self.heads), 3, axis=-1
        )  # n B h e
        q, k, v = (part.transpose(1, 2, 0, 3) for part in (q, k, v))  # B h n e
        # The sum of the shares divides the values, not the shares: two passes less over n * n numbers an example.
        scores = jnp.einsum("bhne,bhme->bhnm", q, k, preferred_element_type=nn.wide(x.dtype))
        most = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        shares = jnp.exp((scores - most) * (d / self.heads) ** -0.5)
        seen = jnp.einsum("bhnm,bhme->bhne", shares.astype(x.dtype), v, preferred_element_type=nn.wide(x.dtype))
        seen = (seen / shares.sum(axis=-1, keepdims=True)).astype(x.dtype).transpose(2, 0, 1, 3)
        flat = self.norms[0](flat + self.out(seen.reshape(n * b, d)))
        flat = self.norms[1](flat + self.mlp(flat, key=key))
        return self.mix(flat.reshape(n, b, d))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """The vectors as an image of n x d pixels, convolved, and mixed to `outputs` vectors; it depends on their order.

    Attributes:
      outputs: Vectors that it returns.
      channels: Of the convolution; the vectors of all channels are mixed. Sizes are not published.
      kernel: Side of its filters, an odd number.
      activation: After it; equation 5 has none.
    """

    outputs: int
    channels: int = 4
    kernel: int = 3
    activation: nn.Activation = "linear"

    def __post_init__(self) -> None:
        for name in ("outputs", "channels", "kernel"):
            check_whole(f"Convolution: {name}", getattr(self, name), 1)
        if self.kernel % 2 == 0:
            raise UserError(
                f"Convolution: kernel must be odd, so that filters have a middle; got {self.kernel}. Take "
                f"{self.kernel - 1} or {self.kernel + 1}."
            )
        nn.check_mlp("Convolution", activation=self.activation)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "ImageOfVectors":
        return ImageOfVectors(self, inputs, rngs=rngs, dtypes=dtypes)


class ImageOfVectors(nnx.Module):
    """See `Convolution`."""

    def __init__(self, config: Convolution, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        gain = 1.0 if config.activation == "linear" else 2.0
        # The variance that `nn.Conv` starts with counts what leaves a filter; here what enters it should count.
        self.conv = nn.Conv(
            1,
            config.channels,
            kernel=config.kernel,
            bias=0.0,
            gain=gain * config.channels,
            rngs=rngs,
            dtypes=dtypes,
        )
        self.mix = Mix(config.outputs, config.channels * inputs.n, rngs=rngs, dtypes=dtypes)
        self.activation: nn.Activation = config.activation

    def __call__(self, x: jax.Array, dense: jax.Array | None = None, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[outputs, B, d]."""
        del dense, key
        _, b, d = x.shape
        y = self.conv(x.swapaxes(0, 1)[..., None])  # B n d channels
        y = nn.activate(y, self.activation)
        return self.mix(y.transpose(3, 1, 0, 2).reshape(-1, b, d))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpExperts:
    """An MLP of the flattened vectors, or several whose results are averaged by a softmax gate.

    Attributes:
      outputs: Vectors that it returns.
      experts: MLPs; every example passes all of them.
      hidden: Hidden widths of each.
      activation: Of the hidden layers.
      dropout: After hidden activations.
    """

    outputs: int
    experts: int = 1
    hidden: tuple[int, ...] = (256,)
    activation: nn.Activation = "relu"
    dropout: float = 0.0

    FREE = ("dropout",)

    def __post_init__(self) -> None:
        for name in ("outputs", "experts"):
            check_whole(f"MlpExperts: {name}", getattr(self, name), 1)
        nn.check_mlp("MlpExperts", activation=self.activation, dropout=self.dropout, hidden=self.hidden)

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "GatedMlps":
        return GatedMlps(self, inputs, rngs=rngs, dtypes=dtypes)


class GatedMlps(nnx.Module):
    """See `MlpExperts`."""

    def __init__(self, config: MlpExperts, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        sizes = (inputs.n * inputs.d, *config.hidden, config.outputs * inputs.d)
        self.mlps = nnx.List(
            [
                nn.Mlp(sizes, rngs=rngs, activation=config.activation, dropout_rate=config.dropout, dtypes=dtypes)
                for _ in range(config.experts)
            ]
        )
        self.gate = nn.Linear(sizes[0], config.experts, rngs=rngs, dtypes=dtypes) if config.experts > 1 else None

    def __call__(self, x: jax.Array, dense: jax.Array | None = None, *, key: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[outputs, B, d]."""
        del dense
        flat = rows(x)
        keys = [None] * len(self.mlps) if key is None else list(jax.random.split(key, len(self.mlps)))
        results = [mlp(flat, key=each) for mlp, each in zip(self.mlps, keys, strict=True)]
        if self.gate is None:
            return vectors(results[0], x.shape[-1])
        shares = jax.nn.softmax(self.gate(flat), axis=-1)  # B experts
        together = jnp.einsum("be,ebf->bf", shares, jnp.stack(results))
        return vectors(together, x.shape[-1])
