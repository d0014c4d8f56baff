"""Continues token sequences with a language model: prompts are read in pieces, then one token a step is added.

Prompts of a batch may differ in length: each fills its row of the cache from the left, and what lies behind is never
looked at. Shapes come in buckets (rows, length of a piece, length of the cache), so that two programs serve prompts of
many lengths: one reads a piece, the other generates up to a number of tokens that is no part of its shape. Both take
the cache over, and no second one is ever made.

A run that was trained under rules for number formats is served under them: its products and rows are those of its
evaluation. A folder with static scales of activations is served with activations that are quantized under these.

On a mesh, parameters lie as the rules say (heads, hidden features and vocabulary over `tensor`), rows of the batch over
the batch axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from scalejax import nn, units
from scalejax.errors import UserError, check_at_least
from scalejax.inference import packed_params, static_inputs
from scalejax.inference import sampling as samplings
from scalejax.inference.sampling import GREEDY, TokenSampling
from scalejax.models.llm import loading
from scalejax.models.llm.architecture import LanguageConfig, LanguageModule
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.nn import counts
from scalejax.nn.layers import Gather
from scalejax.numerics.quantized.rules import QuantizationRule, assign
from scalejax.numerics.quantized.weights import weights_of
from scalejax.parallel import mesh as meshes
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.compression.quantized_gather import QuantizedGather
from scalejax.parallel.rules import LLM, LogicalAxes, Rules
from scalejax.train.state import ModelShape, Params

if TYPE_CHECKING:
    from jaxtyping import PyTree

PIECE = 512
"""Positions of a prompt that are read at once, at most."""

_LEAST_PIECE = 32
_LEAST_CACHE = 128
_CACHE_STEP = 1024
_BLOCK = 32  # tokens that one call of the decoding program can generate

Ended = Literal["stop", "length"]
Weights = Literal["packed", "decoded"]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What was generated for one prompt.

    Attributes:
      tokens: The new tokens, without the one that ended them.
      ended: "stop": by a stop token; "length": there were as many as asked for.
    """

    tokens: tuple[int, ...]
    ended: Ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """Between two steps.

    Attributes:
      cache: What was read, see `LanguageModule.cache`.
      logits: Of each row's next token, wide[B, V].
      done: bool[B], rows that have met a stop token or are only there to fill up.
      broken: bool[B], rows whose token was chosen by logits that are not finite.
    """

    cache: "PyTree[jax.Array]"
    logits: jax.Array
    done: jax.Array
    broken: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """A model on devices that continues sequences.

    Attributes:
      config: Architecture.
      shape: Structure of the model.
      params: Its parameters by path; quantized ones may be packed, see `packed_params`, and know the static scales of
        what they multiply, see `static_inputs`.
      mesh: The devices.
      choices: Ids below this may be generated; None = all. A table may have more rows than the tokenizer has ids.
      formats: {path of a module: the rule of its number formats}.
    """

    config: LanguageConfig
    shape: ModelShape
    params: Params
    mesh: Mesh
    choices: int | None = None
    formats: Mapping[str, QuantizationRule] = dataclasses.field(default_factory=dict)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: TokenSampling = GREEDY,
        stop: Sequence[int] = (),
        samples: Sequence[int] | None = None,
        progress: Callable[[list[list[int]]], bool] | None = None,
    ) -> list[Continuation]:
        """Continues each prompt.

        Which tokens a prompt is continued with depends on it, the sampling and its sample number; on the rest of the
        batch only so far as the size of a batch and its cache, which choose the programs, may change the last bit of
        a logit.

        Args:
          prompts: Token ids, at least one each.
          max_tokens: New tokens of each, at most.
          sampling: How they are chosen.
          stop: A row ends where one of these comes, which is not part of the result.
          samples: A number for each prompt; draws of different numbers are independent. None = 0 for all.
          progress: Told the new tokens of all rows so far, after each step; returns whether to go on. Without it steps
            run in blocks.

        Raises:
          UserError: a prompt is empty, holds an id outside the vocabulary, or is longer, with what is to come, than the
            model is meant for; the cache does not fit; or logits are not finite.
        """
        if not prompts:
            return []
        self.check(prompts, max_tokens)
        numbers = [0] * len(prompts) if samples is None else list(samples)
        if len(numbers) != len(prompts):
            raise ValueError(f"generate: samples must have one number a prompt, {len(prompts)}; got {len(numbers)}.")
        rows = self._rows(len(prompts))
        longest = max(map(len, prompts))
        piece = _bucket(min(longest, PIECE), _LEAST_PIECE)
        pieces = -(-longest // piece)
        positions = _cache_length(max(pieces * piece, longest + max_tokens))
        self.check_fits(rows, positions)
        state = self._read(prompts, rows, piece, pieces, positions)
        spare = [0] * (rows - len(prompts))
        digests = np.asarray([*map(samplings.digest, prompts), *spare], np.uint32)
        keys = samplings.keys(sampling, jnp.asarray(digests), jnp.asarray([*numbers, *spare], jnp.int32))
        stops = np.asarray(sorted(set(stop)), np.int32)
        out: list[list[int]] = [[] for _ in prompts]
        ended: list[Ended | None] = [None] * len(prompts)
        for tokens in self._steps(state, keys, stops, sampling, max_tokens, 1 if progress else _BLOCK):
            for row in range(len(prompts)):
                if ended[row] is None:
                    ended[row] = _take(out[row], tokens[row], stops)
            if progress is not None and not progress(out):
                break
            if all(ended):
                break
        return [Continuation(tuple(new), end or "length") for new, end in zip(out, ended, strict=True)]

    def logits(self, tokens: np.ndarray) -> jax.Array:
        """Of the next token at every position: int32[B, S] -> wide[B, S, V]; each row is a document.

        Raises:
          UserError: rows are longer than the model is meant for.
        """
        if tokens.shape[1] > self.config.max_positions:
            raise UserError(
                f"a row has {tokens.shape[1]:,} tokens, but the model is meant for at most "
                f"{self.config.max_positions:,} positions. Cut the text into shorter rows."
            )
        return self._forward(self.params, np.asarray(tokens, np.int32))

    def score(self, params: Params, tokens: jax.Array, counts: jax.Array | None = None) -> jax.Array:
        """The same inside a program, of its parameters: wide[B, S, V], or wide[B, V] after the first counts[b] tokens.

        Args:
          params: In the place of those of this.
          tokens: int32[B, S].
          counts: int32[B], at least 1; None = of all positions.

        Raises:
          UserError: the model cannot do without later tokens.
        """
        model = self._model(params)
        if counts is not None:
            return model.extend(tokens, counts, model.cache(*tokens.shape), gather=self._gather)[0]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        return model(tokens, positions, jnp.ones_like(tokens), gather=self._gather)

    def check_fits(self, rows: int, positions: int) -> None:
        """Refuses a cache that cannot be beside the parameters, before anything is compiled.

        Raises:
          UserError: says what would be needed and what there is.
        """
        held = sum(_device_bytes(p, p.sharding) for p in jax.tree.leaves(self.params))
        needed = held + self._cache_bytes(rows, positions)
        _check_memory(self.mesh, needed, f"the parameters and a cache of {rows} x {positions:,} positions")

    def check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Refuses prompts that `generate` would refuse, whatever the batch.

        Raises:
          UserError: names the first by its number, from 1.
        """
        check_at_least("max_tokens", max_tokens, 1)
        vocabulary = self.config.vocabulary
        assert vocabulary is not None
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(
                    f"prompt {number + 1} is empty, and its tokenizer has no token to begin with. Add text."
                )
            outside = [token for token in prompt if not 0 <= token < vocabulary]
            if outside:
                raise UserError(
                    f"prompt {number + 1} has token {outside[0]}, but the model's vocabulary is 0 to {vocabulary - 1}. "
                    "Take the tokenizer that belongs to the model."
                )
            if len(prompt) + max_tokens > self.config.max_positions:
                raise UserError(
                    f"prompt {number + 1} has {len(prompt):,} tokens, and {max_tokens:,} more make "
                    f"{len(prompt) + max_tokens:,}: the model is meant for at most {self.config.max_positions:,} "
                    "positions. Shorten the prompt, or ask for fewer tokens."
                )

    def _rows(self, prompts: int) -> int:
        shards = math.prod(self.mesh.shape[axis] for axis in meshes.BATCH_AXES)
        return shards * _bucket(-(-prompts // shards), 1)

    def _cache_bytes(self, rows: int, positions: int) -> int:
        cache = jax.eval_shape(lambda: self._model(self._shapes).cache(rows, positions))
        return sum(jax.tree.leaves(jax.tree.map(_device_bytes, cache, self._cache_shardings(cache))))

    def _cache_shardings(self, cache: "PyTree[jax.ShapeDtypeStruct]") -> "PyTree[NamedSharding]":
        def sharding(array: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
            return NamedSharding(self.mesh, ACTIVATIONS.spec(axes, array.shape, self.mesh))

        return jax.tree.map(sharding, cache, self._cache_axes)

    @functools.cached_property
    def _cache_axes(self) -> "PyTree[LogicalAxes]":
        return self._model(self._shapes).cache_axes()

    # The programs.

    def _read(self, prompts: Sequence[Sequence[int]], rows: int, piece: int, pieces: int, positions: int) -> _State:
        lengths = np.asarray([*map(len, prompts), *[1] * (rows - len(prompts))], np.int32)
        tokens = np.zeros((rows, pieces * piece), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = np.asarray(prompt, np.int32)
        state = self._empty(rows, positions, len(prompts))
        for start in range(0, pieces * piece, piece):
            counts = np.clip(lengths - start, 0, piece).astype(np.int32)
            state = self._read_piece(self.params, tokens[:, start : start + piece], counts, state)
        return state

    def _empty(self, rows: int, positions: int, prompts: int) -> _State:
        def empty() -> _State:
            model = self._model(self._shapes)
            logits = jnp.zeros((rows, self.config.vocabulary or 0), nn.wide(model.compute_dtype))
            filling = jnp.arange(rows) >= prompts
            return _State(model.cache(rows, positions), logits, filling, jnp.zeros(rows, bool))

        whole = NamedSharding(self.mesh, P())
        cache = self._cache_shardings(jax.eval_shape(empty).cache)
        return jax.jit(empty, out_shardings=_State(cache, whole, whole, whole))()  # pyright: ignore[reportArgumentType]

    @functools.cached_property
    def _forward(self) -> Callable[[Params, jax.typing.ArrayLike], jax.Array]:
        def forward(params: Params, tokens: jax.Array) -> jax.Array:
            with self._on_mesh():
                return self.score(params, tokens)

        return jax.jit(forward)

    @functools.cached_property
    def _read_piece(self) -> Callable[[Params, np.ndarray, np.ndarray, _State], _State]:
        def read(params: Params, tokens: jax.Array, counts: jax.Array, state: _State) -> _State:
            with self._on_mesh():
                logits, cache = self._model(params).extend(tokens, counts, state.cache, gather=self._gather)
                # A prompt that ended in an earlier piece keeps the logits of its last token.
                logits = jnp.where(counts[:, None] > 0, logits, state.logits)
                return dataclasses.replace(state, cache=self._laid_out(cache), logits=logits)

        return jax.jit(read, donate_argnums=3)

    def _steps(
        self, state: _State, keys: jax.Array, stops: np.ndarray, sampling: TokenSampling, max_tokens: int, block: int
    ) -> Iterator[np.ndarray]:
        """Blocks of new tokens, int32[B, n]."""
        sampling = dataclasses.replace(sampling, seed=0)  # which the keys have: another seed is no other program
        made = 0
        while made < max_tokens:
            limit = min(block, max_tokens - made)
            state, tokens = self._decode(self.params, state, keys, stops, jnp.int32(made), jnp.int32(limit), sampling)
            if (broken := np.flatnonzero(np.asarray(state.broken))).size:
                raise UserError(
                    f"prompt {broken[0] + 1}: the model's logits are not finite, so no token can be chosen. In float16 "
                    "activations of many models overflow: choose --dtype bfloat16 or float32."
                )
            yield np.asarray(tokens)[:, :limit]
            made += limit

    @functools.cached_property
    def _decode(self) -> Callable[..., tuple[_State, jax.Array]]:
        def decode(
            params: Params,
            state: _State,
            keys: jax.Array,
            stops: jax.Array,
            made: jax.Array,
            limit: jax.Array,
            sampling: TokenSampling,
        ) -> tuple[_State, jax.Array]:
            def unfinished(carry: tuple[jax.Array, _State, jax.Array]) -> jax.Array:
                i, state, _ = carry
                return (i < limit) & ~state.done.all()

            def step(carry: tuple[jax.Array, _State, jax.Array]) -> tuple[jax.Array, _State, jax.Array]:
                i, state, out = carry
                with self._on_mesh():
                    token = samplings.choose(self._allowed(state.logits), keys, made + i, sampling)
                    # NaN and infinity each win a maximum. Rows that are done go on and may overflow, which is no error.
                    broken = state.broken | (~state.done & ~jnp.isfinite(state.logits.max(-1)))
                    out = out.at[:, i].set(token)
                    done = state.done | (token[:, None] == stops[None, :]).any(-1)
                    ones = jnp.ones_like(token)
                    model = self._model(params)
                    logits, cache = model.extend(token[:, None], ones, state.cache, gather=self._gather)
                    return i + 1, _State(self._laid_out(cache), logits, done, broken), out

            # As long as the longest block, whatever the limit is: one program serves every number of tokens.
            out = jnp.zeros((state.done.shape[0], _BLOCK), jnp.int32)
            _, state, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, out))
            return state, out

        return jax.jit(decode, static_argnums=6, donate_argnums=1)

    def _laid_out(self, cache: "PyTree[jax.Array]") -> "PyTree[jax.Array]":
        return jax.tree.map(nn.constrain, cache, self._cache_axes)

    def _allowed(self, logits: jax.Array) -> jax.Array:
        if self.choices is None:
            return logits
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        return jnp.where(ids < self.choices, logits, -jnp.inf)

    @property
    def _gather(self) -> Gather:
        return QuantizedGather(packed_params.whole, self.formats) if self.formats else packed_params.whole

    @property
    def _shapes(self) -> Mapping[str, object]:
        return {**self.shape.params, **self.shape.variables}

    def _model(self, params: Mapping[str, object]) -> LanguageModule:
        return cast(LanguageModule, self.shape.merge(params))

    def _on_mesh(self) -> AbstractContextManager[object]:
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


def load(
    model: LanguageModel,
    mesh: Mesh,
    *,
    dtype: DTypeLike | None = None,
    weights: Weights = "packed",
    rules: Rules = LLM,
    choices: int | None = None,
    loaded: Callable[[int], None] = lambda _: None,
) -> Engine:
    """Puts a model on the devices of a mesh.

    Args:
      model: Opened.
      mesh: The devices.
      dtype: Of the parameters, activations and products; None = that of the parameters as stored.
      weights: What becomes of quantized ones: "packed" = they stay so where they can (see `packed_params`) and are
        decoded each time that they are used; "decoded" = once, when they are loaded.
      rules: Logical axis of a parameter -> mesh axes.
      choices: See `Engine`.
      loaded: Told the bytes of every tensor that is loaded.

    Raises:
      UserError: it does not fit the devices, cannot be read, or the mesh cuts sequences or layers.
    """
    for axis in ("context", "stage"):
        if mesh.shape[axis] > 1:
            raise UserError(
                f"mesh: generation spreads over tensor, fsdp, replica and expert, not over {axis}={mesh.shape[axis]}. "
                f"Give these devices to tensor: --mesh tensor={mesh.shape[axis]}."
            )
    dtype = model.dtype if dtype is None else dtype
    family = model.architecture
    abstract = counts.abstract(family.build, model.config, dtypes=nn.Dtypes(dtype, dtype))
    assert isinstance(abstract, nnx.Module)
    shape = ModelShape.of(abstract)
    formats = assign(model.quantization, weights_of(shape.logical_axes))
    shardings = shape.shardings(mesh, rules)
    targets = {
        name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[name]) for name, p in shape.params.items()
    }
    for name, v in shape.variables.items():  # whole on every device, as in training
        targets[name] = jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, P()))
    packed = packed_params.choose_packed(model.source, targets) if weights == "packed" else {}
    needed = sum(_device_bytes(p, p.sharding) for name, p in targets.items() if name not in packed)
    needed += sum(packed_params.nbytes(parts) for _, parts in packed.values())
    _check_memory(mesh, needed, "the parameters")
    params: dict[str, Any] = {}  # arrays, and weights in the place of some
    if packed:
        params, targets = packed_params.load(model.source, targets, loaded=loaded)
    params |= loading.load(model.source, targets, loaded=loaded)
    if model.inputs:
        entries = {entry.path: entry for entry in family.entries(model.config)}
        params = static_inputs.attach(params, entries, family.sizes(model.config), model.inputs, mesh)
    return Engine(model.config, shape, params, mesh, choices, formats)


def _device_bytes(array: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> int:
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _check_memory(mesh: Mesh, needed: int, what: str) -> None:
    limit = meshes.device_memory_bytes(mesh)
    if limit is not None and needed > limit:
        raise UserError(
            f"{what} need {units.size(needed)} on each device, and it has {units.size(limit)}. Spread the model over "
            "more devices (--mesh tensor=N), choose a narrower --dtype, or generate fewer rows or tokens at a time."
        )


def _bucket(count: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


def _cache_length(positions: int) -> int:
    return _bucket(positions, _LEAST_CACHE) if positions <= _CACHE_STEP else -(-positions // _CACHE_STEP) * _CACHE_STEP


def _take(out: list[int], new: np.ndarray, stops: np.ndarray) -> Ended | None:
    """Appends tokens up to a stop token; says whether there was one."""
    for token in new.tolist():
        if token in stops:
            return "stop"
        out.append(token)
    return None
