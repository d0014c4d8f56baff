"""The programs of an engine: they read pieces of prompts and generate blocks of tokens, into one cache of pages.

Both take the cache over, and no second one is ever made. Shapes come in buckets (rows and length of a piece, width of
the table of units), so that a few programs serve prompts of any length; how many tokens a block has, and how each row
chooses them, is no part of a shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from scalejax import nn
from scalejax.inference import packed_params
from scalejax.inference.pages import Places
from scalejax.inference.sampling import TOP, Likelihoods, Row, RowSampling, choose
from scalejax.models.llm.architecture import Cache, LanguageConfig, LanguageModule
from scalejax.nn.layers import Gather
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel import mesh as meshes
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.compression.quantized_gather import QuantizedGather
from scalejax.train.state import ModelShape, Params

if TYPE_CHECKING:
    from jaxtyping import PyTree

Tree = TypeVar("Tree")

BLOCK = 32
"""Tokens that one call of the decoding program can generate, at most."""

SCORED = 64
"""Tokens of prompts whose logits are there at once."""

_ORDERED = ("tpu",)
"""Platforms for which parameters are put into the order of `Programs.format`."""

STOPPED, BROKEN = 1, 2
"""Why a row ended in a block: it met a stop token, or its logits are not finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """Between two steps.

    Attributes:
      cache: What was read.
      logits: Of the next token of each slot, wide[B, V].
    """

    cache: Any
    logits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What a block generates for, row by row.

    Attributes:
      sampling: How tokens are chosen.
      made: int32[B], tokens that were generated before.
      positions: int32[B], of the next token; -1 = nobody is in this slot.
      stops: int32[B, n], ids that end a row; -1 = none.
      table: int32[B, W], units of each row.
      first: int32[B], the number in its row of the first of them, see `nn.Reading`.
      rotations: int32[B], the device along `context` that has the first token of a unit, see `inference.pages`.
    """

    sampling: RowSampling
    made: Row
    positions: Row
    stops: Row
    table: Row
    first: Row
    rotations: Row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBlock:
    """What a block generated.

    Attributes:
      tokens: int32[B, BLOCK], of which the first `count` were generated.
      count: int32[].
      ended: int32[B]: 0, or STOPPED or BROKEN in the last of them.
      likelihoods: Of the tokens, [B, BLOCK]; zeros, or None on the host, where nobody asked.
    """

    tokens: jax.Array
    count: jax.Array
    ended: jax.Array
    likelihoods: Likelihoods | None


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Those of a model on a mesh.

    Attributes:
      config: Architecture.
      shape: Structure of the model.
      mesh: The devices.
      choices: Ids below this may be generated; None = all.
      formats: {path of a module: the rule of its number formats}.
    """

    config: LanguageConfig
    shape: ModelShape
    mesh: Mesh
    choices: int | None
    formats: Mapping[str, QuantizationRule]

    @property
    def groups(self) -> int:
        """Groups of devices that have rows of a batch of their own."""
        return math.prod(self.mesh.shape[axis] for axis in meshes.BATCH_AXES)

    @property
    def ranks(self) -> int:
        """Devices of a group that have tokens of a row of their own, along `context`."""
        return self.mesh.shape["context"]

    def format(self, name: str, sharding: Sharding) -> Format | Sharding:
        """Where a parameter lies, and in which order.

        A product wants the dimension that it sums over next to last. In matrices of queries, keys and values heads are
        there, and a TPU's compiler would turn those of all layers around at the start of each block of tokens.
        """
        axes = self.shape.logical_axes[name]
        if self.mesh.devices.flat[0].platform not in _ORDERED or axes[-3:-2] != ("embed",) or axes[-1] != "head":
            return sharding
        last = len(axes)
        return Format(Layout((*range(last - 3), last - 2, last - 3, last - 1)), sharding)

    @functools.cached_property
    def cache(self) -> Callable[[nn.PageShape], "PyTree[jax.ShapeDtypeStruct]"]:
        """The arrays of a cache of a size."""

        @functools.cache
        def cache(pages: nn.PageShape) -> "PyTree[jax.ShapeDtypeStruct]":
            with self._on_mesh():
                return jax.eval_shape(lambda: self.model(self._shapes).cache(pages))

        return cache

    def cache_shardings(self, cache: "PyTree[jax.ShapeDtypeStruct]") -> "PyTree[NamedSharding]":
        """Where they lie."""

        def paged(part: nn.PagedCache) -> nn.PagedCache:
            return jax.tree.map(
                lambda array, axes: NamedSharding(self.mesh, ACTIVATIONS.spec(axes, array.shape, self.mesh)),
                part,
                part.axes(),
            )

        with self._on_mesh():
            return _on_caches(paged, cache)

    def empty(self, slots: int, pages: nn.PageShape) -> DecodingState:
        """Before anything was read."""
        return self._empty(slots, pages)()

    @functools.cached_property
    def _empty(self) -> Callable[[int, nn.PageShape], Callable[[], DecodingState]]:
        @functools.cache
        def program(slots: int, pages: nn.PageShape) -> Callable[[], DecodingState]:
            def empty() -> DecodingState:
                model = self.model(self._shapes)
                logits = jnp.zeros((slots, self.config.vocabulary or 0), nn.wide(model.compute_dtype))
                with self._on_mesh():
                    return DecodingState(model.cache(pages), logits)

            cache, logits = self.cache_shardings(self.cache(pages)), self.logits_sharding(slots)
            return jax.jit(empty, out_shardings=DecodingState(cache, logits))  # pyright: ignore[reportArgumentType]

        return program

    @functools.cached_property
    def read(self) -> Callable[[Params, Any, nn.Reading, Any, DecodingState], DecodingState]:
        """(parameters, tokens int32[R, S], where they lie, slots int32[R], state) -> state.

        Logits after the last token of row r go to slots[r]; of a number that is none, nowhere.
        """

        def read(
            params: Params, tokens: jax.Array, reading: nn.Reading, slots: jax.Array, state: DecodingState
        ) -> DecodingState:
            with self._on_mesh():
                logits, cache = self.model(params).extend(tokens, reading, state.cache, gather=self.gather)
                logits = self._by_slot(state.logits.at[slots].set(logits, mode="drop"))
                return DecodingState(self._laid_out(cache), logits)

        return jax.jit(read, donate_argnums=4)

    @functools.cached_property
    def decode(self) -> Callable[[Params, DecodingState, Slots, Any, Any], tuple[DecodingState, TokenBlock]]:
        """(parameters, state, slots, tokens at most int32[], whether likelihoods are asked for) -> state, block.

        It ends with the first row that ends.
        """

        def decode(
            params: Params, state: DecodingState, slots: Slots, limit: jax.Array, told: jax.Array
        ) -> tuple[DecodingState, TokenBlock]:
            rows = slots.positions.shape[0]
            keys = slots.sampling.keys()
            page = next(part.positions.shape[2] for part in jax.tree.leaves(state.cache, is_leaf=_is_cache))

            def places(positions: jax.Array) -> jax.Array | None:
                if self.ranks == 1:
                    return None
                offset = positions % (page * self.ranks)
                device = (offset + jnp.asarray(slots.rotations)) % self.ranks
                return (device * page + offset // self.ranks)[:, None]

            def unfinished(carry: tuple[DecodingState, TokenBlock]) -> jax.Array:
                block = carry[1]
                return (block.count < limit) & ~(block.ended > 0).any()

            def step(carry: tuple[DecodingState, TokenBlock]) -> tuple[DecodingState, TokenBlock]:
                state, block = carry
                i, logits = block.count, self._allowed(state.logits)
                live = slots.positions >= 0
                token = choose(logits, slots.sampling, keys, jnp.asarray(slots.made) + i)
                # An infinity wins a maximum; NaN may not, on a CPU (`numerics.bits.largest`).
                broken = live & (jnp.isnan(state.logits).any(-1) | ~jnp.isfinite(state.logits.max(-1)))
                stopped = live & (token[:, None] == slots.stops).any(-1)
                ended = jnp.where(broken, BROKEN, jnp.where(stopped, STOPPED, 0))
                likelihoods = jax.lax.cond(
                    told,
                    lambda: jax.tree.map(
                        lambda all, new: all.at[:, i].set(new), block.likelihoods, Likelihoods.of(logits, token)
                    ),
                    lambda: block.likelihoods,
                )
                positions = jnp.where(live & (ended == 0), slots.positions + i, -1)
                reading = nn.Reading(
                    positions[:, None],
                    jnp.asarray(slots.table),
                    jnp.zeros(rows, jnp.int32),
                    jnp.asarray(slots.first),
                    places(positions),
                )
                with self._on_mesh():
                    new, cache = self.model(params).extend(token[:, None], reading, state.cache, gather=self.gather)
                    state = DecodingState(
                        self._laid_out(cache), jnp.where((positions >= 0)[:, None], new, state.logits)
                    )
                return state, TokenBlock(block.tokens.at[:, i].set(token), i + 1, ended, likelihoods)

            # As long as the longest block, whatever the limit is: one program serves every number of tokens.
            top = min(TOP, state.logits.shape[1])
            empty = Likelihoods(
                jnp.zeros((rows, BLOCK), jnp.float32),
                jnp.zeros((rows, BLOCK, top), jnp.int32),
                jnp.zeros((rows, BLOCK, top), jnp.float32),
            )
            block = TokenBlock(jnp.zeros((rows, BLOCK), jnp.int32), jnp.int32(0), jnp.zeros(rows, jnp.int32), empty)
            state, block = jax.lax.while_loop(unfinished, step, (state, block))
            return DecodingState(state.cache, self._by_slot(state.logits)), self._whole(block)

        return jax.jit(decode, donate_argnums=1)

    @functools.cached_property
    def fork(self) -> Callable[[DecodingState, Any, Any, Any], DecodingState]:
        """(state, slots int32[2, n], units int32[groups, n], their copies int32[groups, n]) -> state.

        The logits of slots[0] go to slots[1], and units are copied; numbers that are none do nothing.
        """

        def fork(state: DecodingState, slots: jax.Array, source: jax.Array, target: jax.Array) -> DecodingState:
            with self._on_mesh():
                cache = _on_caches(lambda part: part.copied(source, target), state.cache)
            logits = self._by_slot(state.logits.at[slots[1]].set(state.logits[slots[0]], mode="drop"))
            return DecodingState(self._laid_out(cache), logits)

        return jax.jit(fork, donate_argnums=0)

    @functools.cached_property
    def forward(self) -> Callable[[Params, Any], jax.Array]:
        """(parameters, int32[B, S]) -> logits of all positions, wide[B, S, V]; each row is a document."""

        def forward(params: Params, tokens: jax.Array) -> jax.Array:
            with self._on_mesh():
                return self.model(params)(tokens, self._positions(tokens), jnp.ones_like(tokens), gather=self.gather)

        return jax.jit(forward)

    @functools.cached_property
    def likelihoods(self) -> Callable[[Params, Any], Likelihoods]:
        """(parameters, int32[B, S]) -> of each token but the first, [B, S - 1]; each row is a document.

        Logits are never there for more than SCORED tokens at once: all of them would take more than the cache.
        """

        def likelihoods(params: Params, tokens: jax.Array) -> Likelihoods:
            with self._on_mesh():
                model, places = self.model(params), self._positions(tokens)
                x, head = model.hidden(tokens, places, jnp.ones_like(tokens), gather=self.gather)
                block = math.gcd(SCORED, tokens.size)
                parts = x.reshape(-1, block, x.shape[-1]), jnp.roll(tokens, -1, axis=1).reshape(-1, block)

                def score(part: tuple[jax.Array, jax.Array]) -> Likelihoods:
                    return Likelihoods.of(self._allowed(model.logits(part[0], head)), part[1])

                found = jax.lax.map(score, parts)
                return self._whole(jax.tree.map(lambda a: a.reshape(*tokens.shape, *a.shape[2:])[:, :-1], found))

        return jax.jit(likelihoods)

    def likelihood_bytes(self, params: Params, rows: int, length: int) -> int:
        """What `likelihoods` takes on a device beside the parameters, as it is compiled.

        Raises:
          UserError: as `check_likelihoods`.
        """
        self.check_likelihoods()
        program: Any = self.likelihoods
        memory = program.lower(params, jax.ShapeDtypeStruct((rows, length), jnp.int32)).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def check_likelihoods(self) -> None:
        """Refuses what `likelihoods` cannot do, before anything waits for it.

        Raises:
          UserError: the model cannot read whole rows on this mesh.
        """
        if "likelihoods" not in self.__dict__:
            jax.eval_shape(self.forward, self.shape.params, jax.ShapeDtypeStruct((1, 32), jnp.int32))

    def calibrated(self, params: Params, state: DecodingState, tokens: "jax.typing.ArrayLike") -> DecodingState:
        """A state whose cache has the scales of float8 that tokens, int[1, S], ask for."""
        count, page = np.shape(tokens)[1], 64
        units = -(-count // (page * self.ranks))
        own = Places(page, self.ranks)
        places = own.next(0, count, 0)
        columns = own.columns(places, width := own.width(places))
        table = np.tile(np.arange(units, dtype=np.int32), (self.groups, 1))
        row, positions, at = (np.full((self.groups, width), fill, np.int32) for fill in (0, -1, 0))
        row[:, columns], positions[:, columns], at[:, columns] = tokens, np.arange(count), places

        def read(params: Params) -> Cache:
            with self._on_mesh():
                model = self.model(params)
                last = jnp.zeros(self.groups, jnp.int32)
                reading = nn.Reading(jnp.asarray(positions), jnp.asarray(table), last, places=jnp.asarray(at))
                cache = model.cache(nn.PageShape(self.groups * self.ranks * units, page))
                return model.extend(jnp.asarray(row), reading, cache, gather=self.gather)[1]

        with jax.set_mesh(self.mesh):
            found = jax.jit(read)(params)
        whole = jax.jit(lambda found: found, out_shardings=NamedSharding(self.mesh, P()))(found)
        paged = jax.tree.leaves(whole, is_leaf=_is_cache)
        leaves, structure = jax.tree.flatten(state.cache, is_leaf=_is_cache)
        scaled = [part.with_static_scales(other) for part, other in zip(leaves, paged, strict=True)]
        return dataclasses.replace(state, cache=jax.tree.unflatten(structure, scaled))

    def compiled(self) -> int:
        """Programs that were compiled so far."""
        return sum(
            program._cache_size()  # pyright: ignore[reportFunctionMemberAccess]
            for name in ("read", "decode", "fork", "forward", "likelihoods")
            if (program := self.__dict__.get(name)) is not None
        )

    def model(self, params: Mapping[str, object]) -> LanguageModule:
        """The model with these parameters."""
        return cast(LanguageModule, self.shape.merge(params))

    @functools.cached_property
    def compute_dtype(self) -> "jax.typing.DTypeLike":
        """Of activations, and of the keys and values that go from device to device."""
        return self.model(self._shapes).compute_dtype

    @property
    def gather(self) -> Gather:
        """How a program fetches parameters."""
        return QuantizedGather(packed_params.whole, self.formats) if self.formats else packed_params.whole

    @property
    def _shapes(self) -> Mapping[str, object]:
        return {**self.shape.params, **self.shape.variables}

    def _positions(self, tokens: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)

    def _laid_out(self, cache: Any) -> Any:
        return _on_caches(lambda part: jax.tree.map(nn.constrain, part, part.axes()), cache)

    def logits_sharding(self, slots: int) -> NamedSharding:
        """Where the logits of slots lie: with the devices that decode for them."""
        return NamedSharding(self.mesh, ACTIVATIONS.spec(("decoded", None), (slots, 1), self.mesh))

    def _by_slot(self, logits: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(logits, self.logits_sharding(logits.shape[0]))

    def _whole(self, tree: Tree) -> Tree:
        """The same on every device, so that each process has all of it."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

    def _allowed(self, logits: jax.Array) -> jax.Array:
        if self.choices is None:
            return logits
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        return jnp.where(ids < self.choices, logits, -jnp.inf)

    def _on_mesh(self) -> AbstractContextManager[object]:
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


def _is_cache(part: object) -> bool:
    return isinstance(part, nn.PagedCache)


def _on_caches(function: Callable[[nn.PagedCache], Any], cache: Any) -> Any:
    """Of each cache of pages in the cache of a model."""
    return jax.tree.map(function, cache, is_leaf=_is_cache)
