"""The parts of a decoder block, as configs: attention, MLP and norm.

    LlamaConfig(..., self_attention=GroupedQueryAttention(), mlp=GatedMlp(), norm=RmsNorm())

A part is a frozen dataclass whose `build` makes the module of all layers: any that has the method of one of the
protocols below. It takes sizes from the config of the model, and has fields for what is its own. Every parameter of the
module has a leading axis of layers, named "layers" (`StackedNormal` makes such weights); the module is called with
those of one layer.

A module with `stages` and `inputs` can be quantized with the activations of a text: `stages` are tuples of its
matrices, in the order in which tokens pass them, of which those of a tuple share their input; `inputs(stage, ...)`
computes it, where the matrices have an axis of experts `inputs(stage, ..., expert)`.

Axes: B rows, S positions, T keys, E model, H query heads, K key and value heads, D head, F gated MLP, L layers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.typing import DTypeLike

from scalejax import nn
from scalejax.models.llm.llama3 import rope
from scalejax.train.metrics.protocol import Metric

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from scalejax.models.llm.llama3.config import LlamaConfig

CosSin = tuple[jax.Array, jax.Array]
"""Cosines and sines of rotary angles, float32[B, S, D / 2] each."""


Numbers = dict[str, jax.Array]
"""What layers find out of each row, by name, [B] or [B, ...]; layers add to it, one after another."""


Room = Literal["data", "all"]
"""For how many tokens of a modality a row has room: as many as rows of the data have ("data"), or for all tokens."""


class MlpPart(Protocol):
    """Works on each position by itself."""

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Callable[[jax.Array], jax.Array]:
        """A module of all layers; with the parameters of one, compute_dtype[B, S, E] -> [B, S, E]."""
        ...


@runtime_checkable
class RoutedPart(Protocol):
    """What sends tokens to some of its parameters, and finds something out of them besides."""

    @property
    def generates(self) -> bool:
        """Whether a token can be computed without those after it, see `RoutedMlp.infer`."""
        ...

    @property
    def sees_later_tokens(self) -> bool:
        """Whether in training a token is computed with those after it, so that the loss is too good."""
        ...

    @property
    def draws(self) -> bool:
        """Whether training wants keys."""
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """Settings of the model by name with which trained parameters go: a run with others is refused to go on."""
        ...

    def losses(self, numbers: Numbers) -> jax.Array:
        """wide[]: what is added to the sum of the losses of the targets."""
        ...

    def sums(self, numbers: Numbers) -> dict[str, jax.Array]:
        """Sums over all rows, which `metrics` read."""
        ...

    def metrics(self, layers: int) -> tuple[Metric, ...]:
        """What is measured of a model of so many layers."""
        ...


@runtime_checkable
class RoutedMlpPart(RoutedPart, MlpPart, Protocol):
    """An `MlpPart` whose module is a `RoutedMlp`."""

    def macs(self, config: "LlamaConfig") -> int:
        """Multiply-accumulates of a token in one layer, forward."""
        ...


class DepthPart(Protocol):
    """Says which layers see which tokens; the block that is repeated then holds several layers."""

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Any:
        """A module of all layers with the methods of `model.DecoderBlock`."""
        ...

    def repeats(self, layers: int) -> int:
        """How often the block stands, in a model of so many layers."""
        ...

    def routed(self, mlp: MlpPart) -> RoutedPart:
        """What a model with such an MLP finds out."""
        ...

    def check(self, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
        """Refuses meshes that it does not run on."""
        ...

    def macs(self, layers: int, layer: int, pairs: int, dim: int) -> tuple[int, int]:
        """Multiply-accumulates of a token in `layers` layers, and of its attention to one position.

        Args:
          layers: L.
          layer: Those of the matrices of a layer that sees all tokens.
          pairs: And of its attention to one position.
          dim: E.
        """
        ...


@runtime_checkable
class RoutedMlp(Protocol):
    """The module of an MLP that finds something out of its tokens besides: where they went, how evenly."""

    def numbers(self, rows: int) -> Numbers:
        """Those of `rows` rows before the first layer."""
        ...

    def prepare(
        self,
        real: jax.Array,
        tokens: jax.Array,
        modality: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        room: Room,
    ) -> "PyTree[jax.Array]":
        """What all layers want to know of the tokens, made once: a pytree of arrays [B, ...].

        Args:
          real: bool[B, S], False = padding.
          tokens: int32[B, S].
          modality: int8[B, S], see `data.text.tokens.TokenBatch`; None = it is known by the ids of tokens.
          keys: uint32[B, ...], data of a key for each row; None = nothing is drawn.
          room: See `Room`.
        """
        ...

    def infer(self, x: jax.Array, prepared: "PyTree[jax.Array]") -> jax.Array:
        """x [B, S, E] -> [B, S, E], each token by itself and those before it; nothing is dropped.

        Raises:
          UserError: the model cannot do without later tokens.
        """
        ...

    def with_numbers(self, x: jax.Array, prepared: "PyTree[jax.Array]", numbers: Numbers) -> tuple[jax.Array, Numbers]:
        """x [B, S, E] and what `prepare` made -> [B, S, E], and the numbers with those of this layer."""
        ...


class NormPart(Protocol):
    """Normalises the last axis of what attention and MLP read; with a `place` of "output" of what they write."""

    def build(
        self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes, *, layers: int | None
    ) -> Callable[[jax.Array], jax.Array]:
        """A module of `layers` layers, or of none that are stacked (None): [B, S, E] -> compute_dtype[B, S, E]."""
        ...


class AttentionPart(Protocol):
    """Mixes positions."""

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "AttentionModule":
        """A module of all layers."""
        ...


class AttentionModule(Protocol):
    """Attention with the parameters of one layer, and the cache of all."""

    def __call__(self, x: jax.Array, cos_sin: CosSin, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """x compute_dtype[B, S, E], segment_ids and positions int32[B, S] -> [B, S, E]."""
        ...

    def cache(self, pages: nn.PageShape) -> nn.PagedCache:
        """An empty one of this size."""
        ...

    def extend(
        self, x: jax.Array, cos_sin: CosSin, cache: nn.PagedCache, layer: jax.Array, reading: nn.Reading
    ) -> tuple[jax.Array, nn.PagedCache]:
        """Attends to what this layer has in the cache of the rows, after storing what it keeps of x."""
        ...


@dataclasses.dataclass(frozen=True)
class StackedNormal:
    """Makes weights of all layers, normal with the standard deviation `init_scale` of the config.

    Attributes:
      config: Of the model.
      rngs: Source of the "params" key.
      dtype: Of the weights.
    """

    config: "LlamaConfig"
    rngs: nnx.Rngs
    dtype: DTypeLike

    def __call__(self, shape: tuple[int, ...], axes: tuple[str, ...], *, shrink: float = 1.0) -> nnx.Param[jax.Array]:
        """A weight of this shape in each layer, times `shrink`."""
        stack = (self.config.repeats, *shape)
        weight = self.config.init_scale * shrink * jax.random.normal(self.rngs.params(), stack, self.dtype)
        return nnx.Param(weight, logical_axes=("layers", *axes))

    def to_stream(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param[jax.Array]:
        """The same for a matrix that writes to the residual stream: smaller by 1 / sqrt(2 L)."""
        return self(shape, axes, shrink=(2 * self.config.layers) ** -0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """RMSNorm with the `norm_eps` of the config, of what attention and MLP read: y = x + MLP(norm(x))."""

    @property
    def place(self) -> Literal["input", "output"]:
        return "input"

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes, *, layers: int | None) -> nn.RMSNorm:
        """See `NormPart`."""
        del rngs  # nothing is drawn
        stack = () if layers is None else (layers,)
        return nn.RMSNorm(
            (*stack, config.dim),
            eps=config.norm_eps,
            dtypes=dtypes,
            logical_axes=("norm",) if layers is None else ("layers", "norm"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputRmsNorm(RmsNorm):
    """The same of what they write, before it is added: y = x + norm(MLP(x)) (Swin Transformer v2, arXiv 2111.09883)."""

    @property
    def place(self) -> Literal["input", "output"]:
        return "output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """W_down(silu(W_gate x) * (W_up x)), `ffn_dim` of the config wide."""

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "GatedMlpLayers":
        """See `MlpPart`."""
        return GatedMlpLayers(config, rngs, dtypes)


class GatedMlpLayers(nnx.Module):
    """The gated MLP of all layers; used one layer at a time."""

    stages = (("gate", "up"), ("down",))

    def __init__(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        normal = StackedNormal(config, rngs, dtypes.params)
        self.gate = normal((config.dim, config.ffn_dim), ("embed", "hidden"))
        self.up = normal((config.dim, config.ffn_dim), ("embed", "hidden"))
        self.down = normal.to_stream((config.ffn_dim, config.dim), ("hidden", "embed"))
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, S, E] -> [B, S, E]."""
        gate, up, down = (p[...].astype(self.compute_dtype) for p in (self.gate, self.up, self.down))
        return nn.project(nn.constrain(_gated(x, gate, up), ("batch", "sequence", "hidden")), down)

    def inputs(self, stage: int, x: jax.Array) -> jax.Array:
        """What the matrices of a stage multiply."""
        gate, up = (p[...].astype(self.compute_dtype) for p in (self.gate, self.up))
        return _gated(x, gate, up) if stage else x


def _gated(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(nn.project(x, gate)) * nn.project(x, up)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Causal attention of `heads` heads, of which groups share each of `kv_heads` keys and values, in the `window`."""

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "AttentionLayers":
        """See `AttentionPart`."""
        return AttentionLayers(config, rngs, dtypes)


class AttentionLayers(nnx.Module):
    """Grouped-query attention of all layers; used one layer at a time."""

    stages = (("query", "key", "value"), ("out",))

    def __init__(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        c, d = config, config.width
        normal = StackedNormal(c, rngs, dtypes.params)
        self.query = normal((c.dim, c.heads, d), ("embed", "heads", "head"))
        self.key = normal((c.dim, c.kv_heads, d), ("embed", "kv_heads", "head"))
        self.value = normal((c.dim, c.kv_heads, d), ("embed", "kv_heads", "head"))
        self.out = normal.to_stream((c.heads, d, c.dim), ("heads", "head", "embed"))
        self.config = config
        self.compute_dtype = dtypes.compute

    def project(self, x: jax.Array, cos_sin: CosSin) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, S, E] -> queries [B, S, H, D], keys and values [B, S, K, D], the first two rotated."""
        q, k, v = (
            nn.constrain(nn.project(x, p[...].astype(self.compute_dtype)), ("batch", "sequence", heads, None))
            for p, heads in ((self.query, "heads"), (self.key, "kv_heads"), (self.value, "kv_heads"))
        )
        return rope.rotate(q, *cos_sin), rope.rotate(k, *cos_sin), v

    def mix(self, x: jax.Array, cos_sin: CosSin, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """x [B, S, E] -> mixed values [B, S, H, D]."""
        q, k, v = self.project(x, cos_sin)
        return nn.attend(
            q,
            k,
            v,
            positions=positions,
            segment_ids=segment_ids,
            window=self.config.window,
            implementation=self.config.attention,
            context_method=self.config.context_method,
        )

    def combine(self, mixed: jax.Array) -> jax.Array:
        """[B, S, H, D] -> [B, S, E]."""
        return nn.project(mixed, self.out[...].astype(self.compute_dtype), contract=2)

    def __call__(self, x: jax.Array, cos_sin: CosSin, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """See `AttentionModule`."""
        return self.combine(self.mix(x, cos_sin, segment_ids, positions))

    def inputs(
        self, stage: int, x: jax.Array, cos_sin: CosSin, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """What the matrices of a stage multiply."""
        if stage == 0:
            return x
        mixed = self.mix(x, cos_sin, segment_ids, positions)
        return mixed.reshape(*mixed.shape[:2], -1)

    def cache(self, pages: nn.PageShape) -> nn.PagedCache:
        """See `AttentionModule`."""
        c = self.config
        return nn.PagedCache.empty(
            pages, layers=c.repeats, kv_heads=c.kv_heads, width=c.width, dtype=self.compute_dtype
        )

    def extend(
        self, x: jax.Array, cos_sin: CosSin, cache: nn.PagedCache, layer: jax.Array, reading: nn.Reading
    ) -> tuple[jax.Array, nn.PagedCache]:
        """See `AttentionModule`."""
        q, k, v = self.project(x, cos_sin)
        mixed, cache = cache.extend(
            layer, q, k, v, reading, window=self.config.window, implementation=self.config.attention
        )
        return self.combine(mixed), cache
