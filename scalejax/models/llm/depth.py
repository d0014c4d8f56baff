"""Mixture-of-depths: every other layer sees only its best tokens (Raposo et al., arXiv 2404.02258; MoMa, section 2.3).

    LlamaConfig(layers=14, ..., depth=MixtureOfDepths(capacity=0.25))

Layers come in pairs. The first of a pair, so layers 0, 2, 4 ..., has a router: of the b tokens of a group it takes the
k = floor(c b) of the largest scores s = sigmoid(x w), at least 1. They pass the layer among themselves, each at its own
position and in its own document, and all others go around it:

    y = x + s (layer(x) - x)   for a token that is taken;    y = x, to the bit, for another

Who is taken depends on later tokens, so losses are too good, and nothing can be generated without an `AuxiliaryRouter`,
which says of a token alone whether it would be taken. With a cache such a layer keeps the keys and values of those that
it took, at the places that they have in all layers.

Axes: B rows, S positions, E model, L layers; G groups of N tokens each, of which up to C are taken.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.models.llm.auxiliary import AuxiliaryRouter, compare, guess
from scalejax.models.llm.expert_use import GUESSES, ExpertGuesses
from scalejax.models.llm.llama3.model import DecoderBlock
from scalejax.models.llm.llama3.parts import CosSin, MlpPart, Numbers, Room, RoutedPart, StackedNormal
from scalejax.nn import routing
from scalejax.parallel import pipeline
from scalejax.parallel.mesh import BATCH_AXES
from scalejax.train.metrics.protocol import Metric

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from scalejax.models.llm.llama3.config import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOfDepths:
    """Every other layer sees a share of the tokens.

    Attributes:
      capacity: c, this share.
      group: Of which tokens: "sequence", those of a row; "device", all that a device has of a part of the batch, as one
        packed row, which other meshes and other numbers of parts change.
      auxiliary: What says without later tokens who would be taken; None = nothing can be generated.
    """

    capacity: float = 0.25
    group: Literal["sequence", "device"] = "sequence"
    auxiliary: AuxiliaryRouter | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.capacity, int | float) and not isinstance(self.capacity, bool)
        if not number or not 0 < self.capacity <= 1:
            raise ValueError(f"MixtureOfDepths: capacity must be above 0 and at most 1; got {self.capacity!r}.")
        if self.group not in ("sequence", "device"):
            raise ValueError(f"MixtureOfDepths: group must be sequence or device; got {self.group!r}.")

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "DepthPairs":
        """See `llama3.parts.DepthPart`."""
        return DepthPairs(self, config, rngs, dtypes)

    def repeats(self, layers: int) -> int:
        """See `llama3.parts.DepthPart`: pairs.

        Raises:
          ValueError: they do not come out even.
        """
        if layers % 2:
            raise ValueError(f"MixtureOfDepths: layers come in pairs, so there must be an even number; got {layers}.")
        return layers // 2

    def most(self, tokens: int) -> np.ndarray:
        """int32[N + 1]: k of b tokens, for b from 0 to `tokens`; that of none is of no meaning."""
        # 0.7 * 90 is a little below 63 in binary.
        return np.maximum(np.floor(self.capacity * np.arange(tokens + 1) + 1e-9), 1).astype(np.int32)

    def routed(self, mlp: MlpPart) -> "RoutedDepths":
        """See `llama3.parts.DepthPart`."""
        return RoutedDepths(self, mlp)

    def check(self, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
        """Refuses what cuts a row or the layers.

        Raises:
          UserError: the mesh does so.
        """
        for axis in (pipeline.AXIS, "context"):
            if mesh.shape.get(axis, 1) > 1:
                raise UserError(
                    f"model.depth is MixtureOfDepths, which does not run on a mesh with {axis}={mesh.shape[axis]}: the "
                    f"tokens of a layer are found in whole rows, and pairs of layers are uneven. Use {axis}=1 and "
                    "larger data, fsdp or tensor axes."
                )

    def macs(self, layers: int, layer: int, pairs: int, dim: int) -> tuple[int, int]:
        """See `llama3.parts.DepthPart`; attention among the taken costs c^2."""
        half, c = layers / 2, self.capacity
        return round(half * (layer * (1 + c) + dim)), round(half * pairs * (1 + c * c))


@dataclasses.dataclass(frozen=True)
class RoutedDepths:
    """What the layers and their MLPs find out; a `llama3.parts.RoutedPart`.

    Attributes:
      part: The choice of tokens.
      mlp: The MLP of all layers.
    """

    part: MixtureOfDepths
    mlp: MlpPart

    @property
    def generates(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        inner = not isinstance(self.mlp, RoutedPart) or self.mlp.generates
        return inner and self.part.auxiliary is not None

    @property
    def sees_later_tokens(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return True

    @property
    def draws(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return isinstance(self.mlp, RoutedPart) and self.mlp.draws

    @property
    def identity(self) -> Mapping[str, str]:
        """See `llama3.parts.RoutedPart`."""
        inner = self.mlp.identity if isinstance(self.mlp, RoutedPart) else {}
        return {"depth.group": self.part.group, **inner}

    def losses(self, numbers: Numbers) -> jax.Array:
        """See `llama3.parts.RoutedPart`: of the auxiliary routers and of the MLPs, each a mean over layers."""
        found = [jnp.zeros((), numbers["depth/tokens"].dtype)]
        if self.part.auxiliary is not None:
            found.append(numbers["depth/auxiliary"].sum() / numbers["depth/pairs"].max())
        if isinstance(self.mlp, RoutedPart):
            found += [self.mlp.losses(_under(of, numbers)) / 2 for of in ("some", "all")]
        return jnp.stack(found).sum()

    def sums(self, numbers: Numbers) -> dict[str, jax.Array]:
        """See `llama3.parts.RoutedPart`."""
        found: dict[str, jax.Array] = {}
        if self.part.auxiliary is not None:
            found |= {f"depth/experts/{name}": numbers[f"depth/{name}"].sum(0) for name in (*GUESSES, *_COUNTS)}
        if isinstance(self.mlp, RoutedPart):
            some, every = (self.mlp.sums(_under(of, numbers)) for of in ("some", "all"))
            found |= {name: _merged(value, every[name]) for name, value in some.items()}
        return found

    def metrics(self, layers: int) -> tuple[Metric, ...]:
        """See `llama3.parts.RoutedPart`."""
        guesses = () if self.part.auxiliary is None else (ExpertGuesses(experts=1, group="depth"),)
        return (*guesses, *(self.mlp.metrics(layers) if isinstance(self.mlp, RoutedPart) else ()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedDepths:
    """What all pairs want to know of the tokens.

    Attributes:
      real: bool[B, S], False = padding.
      tokens: int32[B, S].
      modality: int8[B, S]; None = it is known by the ids.
      keys: uint32[B, ...], data of a key for each row; None = nothing is drawn.
      all: What the MLP of the layers that see all tokens prepared.
    """

    real: jax.Array
    tokens: jax.Array
    modality: jax.Array | None
    keys: jax.Array | None
    all: "PyTree[jax.Array]"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DepthCache:
    """What a model has read.

    Attributes:
      some: Of the layers that take some tokens; each knows the positions of its own.
      all: Of the layers that see all tokens.
    """

    some: nn.PagedCache
    all: nn.PagedCache

    def admit(self, reading: nn.Reading) -> tuple["DepthCache", nn.Reading]:
        """See `architecture.Cache`."""
        every, seeing = self.all.admit(reading)
        # A layer that does not take the first token of a unit must not find what its page had before.
        return DepthCache(self.some.emptied(reading), every), seeing


class DepthPairs(nnx.Module):
    """A layer that takes some tokens and one that sees all, L / 2 times; used one pair at a time like `DecoderBlock`.

    The parameters of the first lie under `some`, of the second under `all`.
    """

    def __init__(self, part: MixtureOfDepths, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        normal = StackedNormal(config, rngs, dtypes.params)
        self.router = normal((config.dim, 1), ("embed", "router"))
        if part.auxiliary is not None:
            hidden = part.auxiliary.columns(config.dim)
            self.auxiliary_in = normal((config.dim, hidden), ("embed", "router"))
            self.auxiliary_out = normal((hidden, 1), ("router", "router"))
        self.some = DecoderBlock(config, rngs, dtypes)
        self.all = DecoderBlock(config, rngs, dtypes)
        self.part = part
        self.pairs = config.repeats
        self.compute_dtype = dtypes.compute

    def numbers(self, rows: int) -> Numbers:
        """See `DecoderBlock`: those of both layers, as "some/load", and of the choice of tokens, [G]."""
        groups = self._groups(rows)
        of_both = {"some": self.some.numbers(groups), "all": self.all.numbers(rows)}
        names = (*_COUNTS, "pairs", *(GUESSES if self.part.auxiliary is not None else ()))
        own = {f"depth/{name}": jnp.zeros(groups, nn.wide(self.compute_dtype)) for name in names}
        return own | {f"{of}/{name}": value for of, found in of_both.items() for name, value in found.items()}

    def prepare(
        self,
        real: jax.Array,
        tokens: jax.Array,
        modality: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        room: Room,
    ) -> PreparedDepths:
        """See `llama3.parts.RoutedMlp`."""
        return PreparedDepths(real, tokens, modality, keys, self.all.prepare(real, tokens, modality, keys, room=room))

    def with_numbers(
        self,
        x: jax.Array,
        numbers: Numbers,
        prepared: PreparedDepths,
        cos_sin: CosSin,
        segment_ids: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        """See `DecoderBlock`."""
        self._check_mesh()
        groups = self._groups(x.shape[0])
        packed, real, beside = jax.tree.map(
            lambda a: a.reshape(groups, -1, *a.shape[2:]),
            (x, prepared.real, (cos_sin, _apart(segment_ids, groups), positions)),
        )
        scores = self._scores(packed)
        limits = self.part.most(real.shape[1])
        chosen = jax.vmap(lambda scores, real: _best(scores, real, limits))(scores, real)
        routes = jax.vmap(lambda chosen: routing.routes_of_some(chosen, size=int(limits[-1])))(chosen)

        keys = None if prepared.keys is None else _other_keys(prepared.keys[:: x.shape[0] // groups])
        inner = self._prepared(routes, prepared, keys, groups)
        taken = _placed(packed, routes)
        y, found = self.some.with_numbers(taken, _under("some", numbers), inner, *_at_places(beside, routes))
        numbers = numbers | {f"some/{name}": value for name, value in found.items()}
        numbers = self._count(numbers, packed, real, chosen)

        h = nn.constrain(_back(packed, y - taken, scores, chosen, routes).reshape(x.shape), _STREAM)
        y, found = self.all.with_numbers(h, _under("all", numbers), prepared.all, cos_sin, segment_ids, positions)
        return y, numbers | {f"all/{name}": value for name, value in found.items()}

    def __call__(
        self,
        x: jax.Array,
        cos_sin: CosSin,
        segment_ids: jax.Array,
        positions: jax.Array,
        prepared: PreparedDepths,
    ) -> jax.Array:
        """See `DecoderBlock`; no token sees later ones.

        Raises:
          UserError: there is no auxiliary router, or the mesh cuts rows.
        """
        self._check_mesh()
        chosen = self._guessed(x, prepared.real)
        routes = jax.vmap(lambda chosen: routing.routes_of_some(chosen, size=x.shape[1]))(chosen)
        taken = _placed(x, routes)
        inner = self._prepared(routes, prepared, None, x.shape[0])
        angles, segments, places = _at_places((cos_sin, segment_ids, positions), routes)
        y = self.some(taken, angles, segments, places, inner)
        h = _back(x, y - taken, self._scores(x), chosen, routes)
        return self.all(h, cos_sin, segment_ids, positions, prepared.all)

    def cache(self, pages: nn.PageShape) -> DepthCache:
        """See `DecoderBlock`."""
        some, every = (layer.attention.cache(pages) for layer in (self.some, self.all))
        return DepthCache(some.of_each_layer(), every)

    def extend(
        self,
        x: jax.Array,
        cos_sin: CosSin,
        cache: DepthCache,
        layer: jax.Array,
        reading: nn.Reading,
        prepared: PreparedDepths,
    ) -> tuple[jax.Array, DepthCache]:
        """See `DecoderBlock`.

        Raises:
          UserError: there is no auxiliary router.
        """
        # Tokens that are not taken are computed with the others, and nothing is kept of them.
        chosen = self._guessed(x, prepared.real)
        some = dataclasses.replace(reading, positions=jnp.where(chosen, reading.positions, -1))
        inner = self.some.prepare(chosen, prepared.tokens, prepared.modality, room="all")
        own, seeing = cache.some.admit(some, layer)
        y, own = self.some.extend(x, cos_sin, own, layer, seeing, inner)
        added = (self._scores(x)[..., None] * (y - x)).astype(x.dtype)
        h = jnp.where(chosen[..., None], x + added, x)

        y, every = self.all.extend(h, cos_sin, cache.all, layer, reading, prepared.all)
        return y, DepthCache(own, every)

    def _check_mesh(self) -> None:
        # Where pages of a cache are cut, each token is still asked for itself.
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            self.part.check(mesh)

    def _groups(self, rows: int) -> int:
        """G, the rows themselves or the devices that the rows are cut over by the compiler."""
        if self.part.group == "sequence":
            return rows
        mesh = jax.sharding.get_abstract_mesh()
        axes = () if mesh.empty else [a for a in BATCH_AXES if a in mesh.axis_names and a not in mesh.manual_axes]
        devices = math.prod(mesh.shape[axis] for axis in axes)
        return devices if rows % devices == 0 else 1

    def _scores(self, x: jax.Array) -> jax.Array:
        """wide[..., N]."""
        wide = nn.wide(self.compute_dtype)
        return jax.nn.sigmoid(nn.project(x.astype(wide), self.router[...].astype(wide))[..., 0])

    def _guess(self, x: jax.Array) -> jax.Array:
        """wide[..., N, 1]: above 0 where a token would be taken."""
        return guess(x, self.auxiliary_in[...], self.auxiliary_out[...], self.compute_dtype)

    def _guessed(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """Whom the auxiliary router takes, bool[B, S]."""
        if self.part.auxiliary is None:
            raise UserError(
                "model.depth is MixtureOfDepths without an auxiliary router: which tokens a layer takes depends on "
                "later ones, so that nothing can be generated and no text scored. Train auxiliary "
                "routers in a phase of the run, as moma-mod-smoke does (surgery.experts.AddAuxiliaryRouters)."
            )
        return (self._guess(x)[..., 0] > 0) & real

    def _prepared(
        self, routes: routing.Routes, prepared: PreparedDepths, keys: jax.Array | None, groups: int
    ) -> "PyTree[jax.Array]":
        """What the MLP of the first layer prepares of the tokens at their places, [G, C]."""
        known = (prepared.real, prepared.tokens, prepared.modality)
        packed = jax.tree.map(lambda a: a.reshape(groups, -1), known)
        real, tokens, modality = _at_places(packed, routes)
        return self.some.prepare(real, tokens, modality, keys, room="all")

    def _count(self, numbers: Numbers, x: jax.Array, real: jax.Array, chosen: jax.Array) -> Numbers:
        wide = nn.wide(self.compute_dtype)
        asked = chosen.astype(wide)[..., None]
        found = {"load": asked.sum((1, 2)), "tokens": real.astype(wide).sum(1), "pairs": 1}
        if self.part.auxiliary is not None:
            found |= compare(self._guess(x), real, asked)
        return numbers | {f"depth/{name}": numbers[f"depth/{name}"] + value for name, value in found.items()}


_COUNTS = ("load", "tokens")
_STREAM = ("batch", "stream", None)


def _best(scores: jax.Array, real: jax.Array, limits: np.ndarray) -> jax.Array:
    """bool[N]: whether a token is one of the limits[b] best of the b real ones; of equal scores the earlier wins."""
    count = real.sum(dtype=jnp.int32)
    k = jnp.where(count > 0, jnp.asarray(limits)[count], 0)
    ranked = jnp.where(real, jax.lax.stop_gradient(scores), -1)
    best = jax.lax.top_k(ranked, int(limits[-1]))[1]
    best = jnp.where(jnp.arange(best.size, dtype=jnp.int32) < k, best, scores.size)
    return jnp.zeros(scores.shape, bool).at[best].set(True, mode="drop")


def _back(x: jax.Array, added: jax.Array, scores: jax.Array, chosen: jax.Array, routes: routing.Routes) -> jax.Array:
    """x [G, N, E] with s times what the layer added to the tokens that it took, [G, C, E]."""
    weighed = dataclasses.replace(routes, gates=jnp.where(chosen, scores, 0)[..., None])
    return jnp.where(chosen[..., None], x + jax.vmap(routing.combine)(added, weighed), x)


def _placed(x: jax.Array, routes: routing.Routes) -> jax.Array:
    return jax.vmap(routing.dispatch)(x, routes)


def _at_places(arrays: Any, routes: routing.Routes) -> Any:
    """Arrays [G, N, ...] without gradients at the places of tokens, [G, C, ...]; zeros where one is empty."""

    def gathered(array: jax.Array) -> jax.Array:
        return jax.vmap(lambda a, index: a.at[index].get(mode="fill", fill_value=0))(array, routes.tokens)

    return jax.tree.map(gathered, arrays)


def _apart(segment_ids: jax.Array, groups: int) -> jax.Array:
    """int32[B, S]: segment ids that no two rows of a group share; 0 stays 0."""
    rows, length = segment_ids.shape
    row = jnp.arange(rows, dtype=jnp.int32) % (rows // groups)
    return jnp.where(segment_ids != 0, segment_ids + (length + 1) * row[:, None], 0)


def _other_keys(data: jax.Array) -> jax.Array:
    """Keys for the layers that take some tokens, so that they do not draw as those behind them."""
    return jax.vmap(lambda data: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), 2**16)))(data)


def _under(of: str, numbers: Numbers) -> Numbers:
    return {name.removeprefix(f"{of}/"): value for name, value in numbers.items() if name.startswith(f"{of}/")}


def _merged(some: jax.Array, every: jax.Array) -> jax.Array:
    """Sums of both kinds of layers: those of each layer [L / 2, n] in turns, others added."""
    if some.ndim == 0:
        return some + every
    return jnp.stack([some, every], 1).reshape(-1, *some.shape[1:])
