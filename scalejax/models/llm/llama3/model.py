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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.kernels.flash_attention.api import Implementation
from scalejax.models.llm.llama3 import rope
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.nn.layers import Gather, apply_layers, scan_layers, whole
from scalejax.nn.linear import DType
from scalejax.numerics import weights
from scalejax.parallel.context import Method


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of what a model has read.

    Attributes:
      keys: compute_dtype[L, B, T, K, D], rotated.
      values: compute_dtype[L, B, T, K, D].
      lengths: int32[B], tokens of each row so far; what lies beyond is not looked at.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array


class Attention(nnx.Module):
    """Grouped-query attention of all layers; used one layer at a time."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, *, param_dtype: DType, compute_dtype: DType):
        c, d = config, config.width
        normal = _Normal(rngs, c, param_dtype)
        self.query = normal((c.dim, c.heads, d), ("embed", "heads", "head"))
        self.key = normal((c.dim, c.kv_heads, d), ("embed", "kv_heads", "head"))
        self.value = normal((c.dim, c.kv_heads, d), ("embed", "kv_heads", "head"))
        self.out = normal((c.heads, d, c.dim), ("heads", "head", "embed"), shrink=(2 * config.layers) ** -0.5)
        self.implementation: Implementation | None = c.attention
        self.context_method: Method = c.context_method
        self.compute_dtype = jnp.dtype(compute_dtype)

    def project(self, x: jax.Array, turns: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, S, E] -> queries [B, S, H, D], keys and values [B, S, K, D], the first two rotated."""
        q, k, v = (
            nn.constrain(nn.project(x, p[...].astype(self.compute_dtype)), ("batch", "sequence", heads, None))
            for p, heads in ((self.query, "heads"), (self.key, "kv_heads"), (self.value, "kv_heads"))
        )
        return rope.rotate(q, *turns), rope.rotate(k, *turns), v

    def __call__(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array], segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """x [B, S, E], turns [B, S, D / 2] each, segment_ids and positions int32[B, S] -> [B, S, E]."""
        q, k, v = self.project(x, turns)
        mixed = nn.attend(
            q,
            k,
            v,
            positions=positions,
            segment_ids=segment_ids,
            implementation=self.implementation,
            context_method=self.context_method,
        )
        return self.combine(mixed)

    def extend(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array], cache: Cache, layer: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Attends to what this layer has in the cache, after writing the keys and values of x behind it."""
        q, k, v = self.project(x, turns)

        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        places = (layer, rows, cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :])
        keys, values = (
            old.at[places].set(new.astype(old.dtype), unique_indices=True, mode="promise_in_bounds")
            for old, new in ((cache.keys, k), (cache.values, v))
        )
        cache = Cache(keys, values, cache.lengths)
        mixed = nn.attend(q, keys[layer], values[layer], query_offset=cache.lengths, implementation=self.implementation)
        return self.combine(mixed), cache

    def combine(self, mixed: jax.Array) -> jax.Array:
        """[B, S, H, D] -> [B, S, E]."""
        return nn.project(mixed, self.out[...].astype(self.compute_dtype), contract=2)


class GatedMlp(nnx.Module):
    """W_down(silu(W_gate x) * (W_up x)) of all layers; used one layer at a time."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, *, param_dtype: DType, compute_dtype: DType):
        normal = _Normal(rngs, config, param_dtype)
        self.gate = normal((config.dim, config.ffn_dim), ("embed", "hidden"))
        self.up = normal((config.dim, config.ffn_dim), ("embed", "hidden"))
        self.down = normal((config.ffn_dim, config.dim), ("hidden", "embed"), shrink=(2 * config.layers) ** -0.5)
        self.compute_dtype = jnp.dtype(compute_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, S, E] -> [B, S, E]."""
        gate, up, down = (p[...].astype(self.compute_dtype) for p in (self.gate, self.up, self.down))
        hidden = jax.nn.silu(nn.project(x, gate)) * nn.project(x, up)
        return nn.project(nn.constrain(hidden, ("batch", "sequence", "hidden")), down)


class Block(nnx.Module):
    """Attention, then the gated MLP, each after a norm and added to its input; all layers, used one at a time."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, **dtypes: DType):
        def norm() -> nn.RMSNorm:
            shape = (config.layers, config.dim)
            return nn.RMSNorm(shape, eps=config.norm_eps, logical_axes=("layers", "norm"), **dtypes)

        self.attention_norm = norm()
        self.attention = Attention(config, rngs, **dtypes)
        self.mlp_norm = norm()
        self.mlp = GatedMlp(config, rngs, **dtypes)

    def __call__(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array], segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """x [B, S, E] -> [B, S, E]."""
        h = nn.constrain(x + self.attention(self.attention_norm(x), turns, segment_ids, positions), _STREAM)
        return nn.constrain(h + self.mlp(self.mlp_norm(h)), _STREAM)

    def extend(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array], cache: Cache, layer: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """The same with a cache, see `Attention.extend`."""
        mixed, cache = self.attention.extend(self.attention_norm(x), turns, cache, layer)
        h = nn.constrain(x + mixed, _STREAM)
        return nn.constrain(h + self.mlp(self.mlp_norm(h)), _STREAM), cache


class Llama(nnx.Module):
    """Tokens -> the residual stream after the last norm; `logits` and the loss of the task apply the head."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, *, param_dtype: DType, compute_dtype: DType):
        """Creates the parameters.

        Args:
          config: Architecture, with a vocabulary.
          rngs: Source of the "params" key.
          param_dtype: Dtype of the parameters.
          compute_dtype: Dtype of activations and of the operands of matrix products.
        """
        if config.vocabulary is None:
            raise ValueError("Llama: config.vocabulary is None; take `config.bound(schema)`, or set it.")
        dtypes = {"param_dtype": param_dtype, "compute_dtype": compute_dtype}
        std = config.init_scale
        self.embed = _Matrix(rngs, (config.vocabulary, config.dim), ("vocabulary", "embed"), std, param_dtype)
        self.layers = Block(config, rngs, **dtypes)
        self.final_norm = nn.RMSNorm((config.dim,), eps=config.norm_eps, **dtypes)
        self.head = (
            None
            if config.tie_embeddings
            else _Matrix(rngs, (config.dim, config.vocabulary), ("embed", "vocabulary"), std, param_dtype)
        )
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)

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
          compute_dtype[B, S, E] and param_dtype[E, V].
        """
        table = gather({"embed/weight": self.embed.weight[...]})["embed/weight"]
        x = nn.constrain(table[tokens].astype(self.compute_dtype), _STREAM)
        turns = self._turns(positions)

        def body(layer: Any, x: jax.Array, beside: Any) -> jax.Array:
            return layer(x, *beside)

        c = self.config
        x = apply_layers(
            self.layers,
            body,
            x,
            (turns, segment_ids, positions),
            remat=c.remat,
            gather=gather,
            stage_parts=c.stage_parts,
            unroll=c.unroll,
        )
        return self._finish(x, table, gather)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *, gather: Gather = whole
    ) -> jax.Array:
        """Logits of all positions, float32[B, S, V] (float64 where the model computes in float64); see `hidden`."""
        x, head = self.hidden(tokens, positions, segment_ids, gather=gather)
        return self._logits(x, head)

    def cache(self, rows: int, positions: int) -> Cache:
        """An empty cache for `rows` sequences of at most `positions` tokens."""
        c = self.config
        shape = (c.layers, rows, positions, c.kv_heads, c.width)
        # Two arrays: a cache is donated.
        return Cache(
            jnp.zeros(shape, self.compute_dtype), jnp.zeros(shape, self.compute_dtype), jnp.zeros(rows, jnp.int32)
        )

    def extend(
        self, tokens: jax.Array, counts: jax.Array, cache: Cache, *, gather: Gather = whole
    ) -> tuple[jax.Array, Cache]:
        """Reads the next tokens of every row.

        Args:
          tokens: int32[B, S]; of row b the first counts[b] are read. There must be room for all S in the cache.
          counts: int32[B] in [0, S].
          cache: What was read before.
          gather: Fetches parameters, see `nn.layers`.

        Returns:
          Logits after the last token read of each row, wide[B, V] (of no meaning where none is), and the cache.
        """
        offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        turns = self._turns(cache.lengths[:, None] + offsets[None, :])
        table = gather({"embed/weight": self.embed.weight[...]})["embed/weight"]
        x = nn.constrain(table[tokens].astype(self.compute_dtype), _STREAM)

        # The cache is carried from layer to layer and not stacked from their results: it is changed in place.
        def body(block: Any, carry: tuple[jax.Array, Cache], layer: jax.Array) -> Any:
            return block.extend(carry[0], turns, carry[1], layer), None

        numbers = jnp.arange(self.config.layers, dtype=jnp.int32)
        (x, cache), _ = scan_layers(self.layers, body, (x, cache), numbers, gather=gather)
        last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)  # B S E -> B 1 E
        logits = self._logits(*self._finish(last, table, gather))[:, 0]
        return logits, dataclasses.replace(cache, lengths=cache.lengths + counts)

    def _finish(self, x: jax.Array, table: jax.Array, gather: Gather) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the last norm, and the matrix of the head, which may be the turned `table`."""
        last = {"final_norm/scale": self.final_norm.scale[...]}
        if self.head is not None:
            last["head/weight"] = self.head.weight[...]
        last = gather(last)
        x = nn.rms_norm(x, last["final_norm/scale"], self.config.norm_eps, self.compute_dtype)
        return x, table.T if self.head is None else last["head/weight"]

    def _turns(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rope.angles(positions, rope.frequencies(c.width, c.rope_theta, c.rope_scaling))

    def _logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        return weights.dot(x, head.astype(self.compute_dtype), dtype=nn.wide(self.compute_dtype))  # B S E -> B S V


_STREAM = ("batch", "stream", None)
"""Axes of the residual stream."""


class _Matrix(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float, dtype: DType):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype), logical_axes=axes)


@dataclasses.dataclass(frozen=True)
class _Normal:
    """Makes the stacked weights of all layers."""

    rngs: nnx.Rngs
    config: LlamaConfig
    dtype: DType

    def __call__(self, shape: tuple[int, ...], axes: tuple[str, ...], *, shrink: float = 1.0) -> nnx.Param[Any]:
        layers = self.config.layers
        weight = self.config.init_scale * shrink * jax.random.normal(self.rngs.params(), (layers, *shape), self.dtype)
        return nnx.Param(weight, logical_axes=("layers", *axes))
