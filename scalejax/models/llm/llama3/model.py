"""The decoder of Llama 3 (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.2).

    h = x + Attention(RMSNorm(x));    y = h + W_down(silu(W_gate n) * (W_up n)),  n = RMSNorm(h)

Grouped-query attention: key and value head j serves query heads j G .. (j + 1) G - 1. No biases. RMSNorm and softmax
are computed in float32. A last RMSNorm, then the head. Several documents may share a row: a token attends within its
own, and positions say where in it the token stands (the report masks documents and does not say whether positions
restart; the data decides).

Axes: B rows, S positions, T keys, E model, H query heads, K key and value heads, D head, F gated MLP, V vocabulary,
L layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalejax import nn
from scalejax.models.llm.architecture import Cache
from scalejax.models.llm.llama3 import rope
from scalejax.models.llm.llama3.parts import CosSin, GatedMlp, Numbers, Room, RoutedMlp, RoutedMlpPart
from scalejax.nn import counts
from scalejax.nn.layers import Gather, apply_layers, scan_layers, split_params, whole
from scalejax.numerics.quantized import weights

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from scalejax.models.llm.llama3.config import LlamaConfig


class DecoderBlock(nnx.Module):
    """Attention, then the MLP, each after a norm and added to its input; all layers, used one at a time."""

    def __init__(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.attention_norm = config.norm.build(config, rngs, dtypes, layers=config.repeats)
        self.attention = config.self_attention.build(config, rngs, dtypes)
        self.mlp_norm = config.norm.build(config, rngs, dtypes, layers=config.repeats)
        self.mlp = config.mlp.build(config, rngs, dtypes)
        self.norm_place = getattr(config.norm, "place", "input")

    def __call__(
        self,
        x: jax.Array,
        cos_sin: CosSin,
        segment_ids: jax.Array,
        positions: jax.Array,
        prepared: "PyTree[jax.Array]" = None,
    ) -> jax.Array:
        """x [B, S, E] -> [B, S, E]; `prepared` is that of `parts.RoutedMlp`."""
        h = self._attend(x, cos_sin, segment_ids, positions)
        return self._feed(h, prepared)

    def with_numbers(
        self,
        x: jax.Array,
        numbers: Numbers,
        prepared: "PyTree[jax.Array]",
        cos_sin: CosSin,
        segment_ids: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        """The same with what the MLP adds to `numbers`, see `parts.RoutedMlp`."""
        h = self._attend(x, cos_sin, segment_ids, positions)
        if not isinstance(self.mlp, RoutedMlp):
            return self._feed(h), numbers
        y, numbers = self.mlp.with_numbers(self._into(self.mlp_norm, h), prepared, numbers)
        return self._add(h, y, self.mlp_norm), numbers

    def numbers(self, rows: int) -> Numbers:
        """Those before the first layer, see `parts.RoutedMlp`; {} where the MLP only computes."""
        return self.mlp.numbers(rows) if isinstance(self.mlp, RoutedMlp) else {}

    def prepare(
        self,
        real: jax.Array,
        tokens: jax.Array,
        modality: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        room: Room,
    ) -> "PyTree[jax.Array]":
        """What all layers want to know of the tokens, see `parts.RoutedMlp`; None where the MLP only computes."""
        return self.mlp.prepare(real, tokens, modality, keys, room=room) if isinstance(self.mlp, RoutedMlp) else None

    def _feed(self, h: jax.Array, prepared: "PyTree[jax.Array]" = None) -> jax.Array:
        mlp: Any = self.mlp
        read = self._into(self.mlp_norm, h)
        return self._add(h, mlp(read) if prepared is None else mlp.infer(read, prepared), self.mlp_norm)

    def _attend(self, x: jax.Array, cos_sin: CosSin, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        mixed = self.attention(self._into(self.attention_norm, x), cos_sin, segment_ids, positions)
        return self._add(x, mixed, self.attention_norm)

    def _into(self, norm: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """What attention or the MLP reads."""
        return norm(x) if self.norm_place == "input" else x

    def _add(self, x: jax.Array, y: jax.Array, norm: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The residual stream with what attention or the MLP wrote."""
        return nn.constrain(x + (norm(y) if self.norm_place == "output" else y), _STREAM)

    def cache(self, pages: nn.PageShape) -> Cache:
        """An empty one of all layers, see `parts.AttentionModule`."""
        return self.attention.cache(pages)

    def extend(
        self,
        x: jax.Array,
        cos_sin: CosSin,
        cache: Any,
        layer: jax.Array,
        reading: nn.Reading,
        prepared: "PyTree[jax.Array]" = None,
    ) -> tuple[jax.Array, Any]:
        """The same with a cache, see `parts.AttentionModule`."""
        mixed, cache = self.attention.extend(self._into(self.attention_norm, x), cos_sin, cache, layer, reading)
        return self._feed(self._add(x, mixed, self.attention_norm), prepared), cache

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Matrices by path, in the order in which tokens pass them; those of a stage share their input."""
        parts = {"attention": self.attention, "mlp": self.mlp}
        return tuple(
            tuple(f"{name}/{matrix}" for matrix in stage)
            for name, part in parts.items()
            for stage in getattr(part, "stages", ())
        )

    def inputs(
        self,
        stage: int,
        x: jax.Array,
        cos_sin: CosSin,
        segment_ids: jax.Array,
        positions: jax.Array,
        *expert: jax.Array,
    ) -> jax.Array:
        """What the matrices of a stage, or those of an expert in it, multiply, x [B, S, E] -> [B, S, ...]."""
        attention: Any = self.attention
        mlp: Any = self.mlp
        first = len(getattr(attention, "stages", ()))
        if stage < first:
            return attention.inputs(stage, self._into(self.attention_norm, x), cos_sin, segment_ids, positions)
        h = self._attend(x, cos_sin, segment_ids, positions)
        return mlp.inputs(stage - first, self._into(self.mlp_norm, h), *expert)


class Llama(nnx.Module):
    """Tokens -> the residual stream after the last norm; `logits` and the loss of the task apply the head."""

    def __init__(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        """Creates the parameters.

        Args:
          config: Architecture, with a vocabulary.
          rngs: Source of the "params" key.
          dtypes: Of the parameters, and of activations and the operands of matrix products.
        """
        if config.vocabulary is None:
            raise ValueError("Llama: config.vocabulary is None; take `config.bound(schema)`, or set it.")
        std = config.init_scale
        self.embed = _Matrix(rngs, (config.vocabulary, config.dim), ("vocabulary", "embed"), std, dtypes.params)
        self.layers: DecoderBlock = (
            DecoderBlock(config, rngs, dtypes) if config.depth is None else config.depth.build(config, rngs, dtypes)
        )
        self.final_norm = config.norm.build(config, rngs, dtypes, layers=None)
        self.head = (
            None
            if config.tie_embeddings
            else _Matrix(rngs, (config.dim, config.vocabulary), ("embed", "vocabulary"), std, dtypes.params)
        )
        self.config = config
        self.compute_dtype = dtypes.compute

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *, gather: Gather = whole
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the last norm, and the matrix of the head.

        Args:
          tokens: int32[B, S] in [0, V).
          positions: int32[B, S], rotary positions; they increase within a segment. Where a mesh cuts the sequence
            (`context`), tokens may lie in any order, and these say which of a segment are earlier.
          segment_ids: int32[B, S]; a token attends to earlier ones of equal id.
          gather: Fetches parameters, see `nn.layers`.

        Returns:
          compute_dtype[B, S, E], and [E, V] in the dtype of the parameters.

        Raises:
          UserError: the model cannot do without later tokens.
        """
        return self.hidden_with_numbers(tokens, positions, segment_ids, routing="causal", room="all", gather=gather)[:2]

    def hidden_with_numbers(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        modality: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        routing: Literal["batch", "causal"] = "batch",
        room: Room = "data",
        gather: Gather = whole,
    ) -> tuple[jax.Array, jax.Array, Numbers]:
        """The same, and what the MLPs of all layers found out of each row; {} where they only compute.

        Args:
          tokens: As of `hidden`, and so are positions, segment_ids and gather.
          modality: int8[B, S], see `data.text.tokens.TokenBatch`; None = it is known by the ids of tokens.
          keys: Keys of the rows, [B], for routers that draw; None = nothing is drawn.
          routing: Who sees which token: "batch" as in training, with what is dropped there, and where experts choose
            among the tokens of a batch; "causal" as in generation, without later tokens and without drops.
          room: See `parts.Room`; rows of the data are held to it before.
        """
        table = gather({"embed/weight": self.embed.weight[...]})["embed/weight"]
        x = nn.constrain(table[tokens].astype(self.compute_dtype), _STREAM)
        beside = (self._cos_sin(positions), segment_ids, positions)
        c = self.config
        options: dict[str, Any] = {"remat": c.remat, "gather": gather, "stage_parts": c.stage_parts, "unroll": c.unroll}
        data = None if keys is None else jax.random.key_data(keys)  # keys themselves do not go through a pipeline
        prepared = self.layers.prepare(segment_ids != 0, tokens, modality, data, room=room)
        numbers: Numbers = {}
        if routing == "causal":

            def inferred(layer: DecoderBlock, x: jax.Array, beside: tuple["PyTree[jax.Array]", _Beside]) -> jax.Array:
                return layer(x, *beside[1], beside[0])

            x = apply_layers(self.layers, inferred, x, (prepared, beside), **options)
        else:

            def with_numbers(
                layer: DecoderBlock, carry: tuple[jax.Array, Numbers], beside: tuple["PyTree[jax.Array]", _Beside]
            ) -> Any:
                return layer.with_numbers(*carry, beside[0], *beside[1])

            numbers = self.layers.numbers(tokens.shape[0])
            x, numbers = apply_layers(self.layers, with_numbers, (x, numbers), (prepared, beside), **options)
        return *self._finish(x, table, gather), numbers

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *, gather: Gather = whole
    ) -> jax.Array:
        """Logits of all positions, float32[B, S, V] (float64 where the model computes in float64); see `hidden`."""
        x, head = self.hidden(tokens, positions, segment_ids, gather=gather)
        return self.logits(x, head)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Matrices of a layer by path, in the order in which tokens pass them; those of a stage share their input."""
        return self.layers.stages

    def run_layer(self, layer: DecoderBlock, x: jax.Array, stage: int | None = None, *expert: jax.Array) -> jax.Array:
        """What comes behind a layer, or what the matrices of a stage of it multiply.

        Args:
          layer: `layers` with the parameters of one.
          x: float[B, S, E] before the layer; each row is a document.
          stage: A number of `stages`; None = behind the layer.
          expert: int32[], given where the matrices of the stage are those of experts: of this one.
        """
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
        beside = (self._cos_sin(positions), jnp.ones_like(positions), positions)
        return layer(x, *beside) if stage is None else layer.inputs(stage, x, *beside, *expert)

    def cache(self, pages: nn.PageShape) -> Cache:
        """An empty cache."""
        return self.layers.cache(pages)

    def extend(
        self, tokens: jax.Array, reading: nn.Reading, cache: Cache, *, gather: Gather = whole
    ) -> tuple[jax.Array, Cache]:
        """Reads tokens of rows, each behind those of its row that were read before.

        Args:
          tokens: int32[R, S].
          reading: Which of them are tokens, and where they and those before them lie.
          cache: What was read before.
          gather: Fetches parameters, see `nn.layers`.

        Returns:
          Logits after the token `reading.last` of each row, wide[R, V] (of no meaning where none is), and the cache.
        """
        cos_sin = self._cos_sin(jnp.maximum(reading.positions, 0))
        table = gather({"embed/weight": self.embed.weight[...]})["embed/weight"]
        x = nn.constrain(table[tokens].astype(self.compute_dtype), _STREAM)

        prepared = self.layers.prepare(reading.real, tokens, room="all")
        cache, seeing = cache.admit(reading)

        # The cache is carried from layer to layer and not stacked from their results: it is changed in place.
        def body(
            block: DecoderBlock, carry: tuple[jax.Array, Cache], layer: jax.Array
        ) -> tuple[tuple[jax.Array, Cache], None]:
            return block.extend(carry[0], cos_sin, carry[1], layer, seeing, prepared), None

        numbers = jnp.arange(self.config.repeats, dtype=jnp.int32)
        (x, cache), _ = scan_layers(self.layers, body, (x, cache), numbers, gather=gather)
        last = jnp.take_along_axis(x, reading.last[:, None, None], axis=1)  # R S E -> R 1 E
        return self.logits(*self._finish(last, table, gather))[:, 0], cache

    def _finish(self, x: jax.Array, table: jax.Array, gather: Gather) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the last norm, and the matrix of the head, which may be the turned `table`."""
        last, merge = split_params(self.final_norm, "final_norm")
        if self.head is not None:
            last["head/weight"] = self.head.weight[...]
        last = gather(last)
        return merge(last)(x), table.T if self.head is None else last["head/weight"]

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        c = self.config
        return rope.angles(positions, rope.frequencies(c.width, c.rope_theta, c.rope_scaling))

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        """Of the residual stream after the last norm, [..., E], with the matrix of the head: wide[..., V]."""
        return weights.dot(x, head.astype(self.compute_dtype), dtype=nn.wide(self.compute_dtype))  # B S E -> B S V


_Beside = tuple[CosSin, jax.Array, jax.Array]
"""Rotary angles, segment ids and positions."""

_STREAM = ("batch", "stream", None)
"""Axes of the residual stream."""


class _Matrix(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float, dtype: DTypeLike):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype), logical_axes=axes)


@functools.lru_cache(maxsize=64)
def count_parameters(config: "LlamaConfig") -> int:
    """Of the model of a config."""
    return counts.parameters(counts.abstract(Llama, config))


@functools.lru_cache(maxsize=64)
def count_macs(config: "LlamaConfig") -> tuple[int, int]:
    """Multiply-accumulates of a token's forward pass: (matrices, attention to one position).

    They are what rows of two lengths cost whose tokens attend to all positions, so that a row of S costs
    S * matrices + S * S * attention. Of an MLP that sends tokens to some of its matrices those count that a token
    meets, and neither places that stay empty nor tokens that find none.
    """
    if config.depth is not None:
        matrices, pairs = count_macs(dataclasses.replace(config, depth=None))
        assert config.vocabulary is not None
        head, layers = config.dim * config.vocabulary, config.layers
        own, pairs = config.depth.macs(layers, (matrices - head) // layers, pairs // layers, config.dim)
        return head + own, pairs
    if isinstance(config.mlp, RoutedMlpPart):
        own, gated = config.mlp.macs(config), 3 * config.dim * config.ffn_dim
        matrices, pairs = count_macs(dataclasses.replace(config, mlp=GatedMlp()))
        return matrices + config.layers * (own - gated), pairs
    model, length = counts.abstract(Llama, dataclasses.replace(config, attention="reference")), 64
    row, two = (
        counts.macs(model, *3 * (jax.ShapeDtypeStruct((1, positions), jnp.int32),))
        for positions in (length, 2 * length)
    )
    pairs = (two - 2 * row) // (2 * length**2)
    return row // length - pairs * length, pairs
