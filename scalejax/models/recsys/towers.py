"""Click models over towers: groups of features interact among themselves first, and what they give interacts then.

    scalejax train dlrm-flights_towers

Paper: L. Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling Technique for Efficient Large-Scale
Recommendation", MLSys 2024 (arXiv 2403.00877), listings of the tower modules. For a tower whose F features have vectors
of width N, X in R^(F x N):

    none        U = X
    DlrmTower   U = concat(reshape(W_1 flatten(X) + b_1, (p, D)),            p + c F vectors of width D
                           reshape(X W_2 + b_2, (c F, D)))
    DcnTower    U = reshape(W CrossNet(flatten(X)) + b, (F, D))              F vectors of width D
    LinearCompression, FactorizationMachine (`interactions`), or several side by side
    logits    = base model over [dense features, U of tower 0, U of tower 1, ...]

Every parameter of the towers has a leading axis of towers, "towers", so that each host can hold its own. With
tables.exchange.route=towers it does: the modules run there, on a `HalfWay` in the place of embedded features. Towers
with fewer features than the largest have zero vectors in their place: these change neither what a tower gives nor its
gradients, and cost its FLOPs. Parameters start as in the largest tower.

Axes: B examples, T towers, F features of the largest, N and D widths.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError, check_several, check_whole
from scalejax.models.recsys.dcnv2 import Cross, DcnV2Config
from scalejax.models.recsys.dhen import DhenConfig
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import (
    FactorizationMachine,
    Interaction,
    LayerInputs,
    LinearCompression,
    check_returned,
)
from scalejax.models.recsys.stack import StackConfig, rows, vectors
from scalejax.models.recsys.task import CtrTask, OneVectorConfig
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.nn.layers import split_params
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.half_way import HalfWay
from scalejax.parallel.towers import Partition


class TowerModule(Protocol):
    """Describes a module of a tower, a frozen dataclass of plain values.

    What `build` returns is called as module(x, key=key, present=present) with compute_dtype[F, B, N], of which the last
    are zero in a tower with fewer features than the largest; bool[F] `present` says which are not, for norms and means
    over features. key drives dropout, None = none. It returns compute_dtype[outputs_of(F), B, dim], first the
    `outputs_of` its own features where there are fewer. `inputs` is what the largest tower has.
    """

    @property
    def dim(self) -> int:
        """D."""
        ...

    def outputs_of(self, features: int) -> int:
        """Vectors that it returns for a tower of so many features."""
        ...

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> nnx.Module: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmTower:
    """The tower module of DLRM.

    Attributes:
      dim: D, width of the vectors that it returns.
      each: c, vectors for each feature, from it alone.
      mixed: p, vectors from all features of the tower.
    """

    dim: int
    each: int = 1
    mixed: int = 0

    def __post_init__(self) -> None:
        check_whole("DlrmTower: dim", self.dim, 1)
        check_whole("DlrmTower: each", self.each, 0)
        check_whole("DlrmTower: mixed", self.mixed, 0)
        check_whole("DlrmTower: each + mixed", self.each + self.mixed, 1)

    def outputs_of(self, features: int) -> int:
        return self.mixed + self.each * features

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "DlrmTowerModule":
        return DlrmTowerModule(self, inputs, rngs=rngs, dtypes=dtypes)


class DlrmTowerModule(nnx.Module):
    """See `DlrmTower`."""

    def __init__(self, config: DlrmTower, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        def linear(size: int, outputs: int) -> nn.Linear | None:
            return nn.Linear(size, outputs * config.dim, rngs=rngs, dtypes=dtypes) if outputs else None

        self.mixed, self.each = linear(inputs.n * inputs.d, config.mixed), linear(inputs.d, config.each)
        self.config = config

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None, present: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[F, B, N] -> compute_dtype[p + c F, B, D]."""
        del key, present
        (n, b, width), c, d = x.shape, self.config.each, self.config.dim
        parts = [] if self.mixed is None else [vectors(self.mixed(rows(x)), d)]  # p B D
        if self.each is not None:
            # Examples outermost: they are cut over devices, and merged behind features they would have to be gathered.
            own = self.each(x.swapaxes(0, 1).reshape(b * n, width)).reshape(b, n, c, d)
            parts.append(own.transpose(1, 2, 0, 3).reshape(n * c, b, d))
        return jnp.concatenate(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcnTower:
    """The tower module of DCNv2: a cross network over the tower, then a linear map to a vector for each feature.

    Attributes:
      dim: D, width of the vectors that it returns.
      cross_layers: Cross layers; the paper does not say how many.
      cross_rank: Rank of each; None = full.
    """

    dim: int
    cross_layers: int = 1
    cross_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "cross_layers"):
            check_whole(f"DcnTower: {name}", getattr(self, name), 1)
        if self.cross_rank is not None:
            check_whole("DcnTower: cross_rank", self.cross_rank, 1)

    def outputs_of(self, features: int) -> int:
        return features

    def build(self, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "DcnTowerModule":
        return DcnTowerModule(self, inputs, rngs=rngs, dtypes=dtypes)


class DcnTowerModule(nnx.Module):
    """See `DcnTower`."""

    def __init__(self, config: DcnTower, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        width = inputs.n * inputs.d
        self.crosses = nnx.List(
            [Cross(width, config.cross_rank, rngs=rngs, dtypes=dtypes) for _ in range(config.cross_layers)]
        )
        self.out = nn.Linear(width, inputs.n * config.dim, rngs=rngs, dtypes=dtypes)
        self.dim = config.dim

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None, present: jax.Array | None = None) -> jax.Array:
        """x: compute_dtype[F, B, N] -> compute_dtype[F, B, D]."""
        del key, present
        x0 = flat = rows(x)
        for cross in self.crosses:
            flat = cross(x0, flat)
        return vectors(self.out(flat), self.dim)


_MIXES = (LinearCompression, FactorizationMachine)
"""Interactions to which zero vectors, with `present`, are no features."""
_TOWER_MODULE = ("dim", "outputs_of", "build")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Architecture.

    Attributes:
      base: The flat model, whose width is N, that of the tables. Over towers its vectors have the width D of the
        modules.
      towers: Which features each tower has: names, or a file of `scalejax towers --save`.
      modules: Side by side in every tower, each with its own parameters in each; () = none: the vectors pass as they
        are, in the order of the data, and the model is the flat one.
    """

    base: DlrmConfig | DcnV2Config | WukongConfig | DhenConfig
    towers: Partition
    modules: tuple[DlrmTower | DcnTower | LinearCompression | FactorizationMachine | TowerModule, ...] = (
        dataclasses.field(default=(), metadata={"stacked": True})
    )

    def __post_init__(self) -> None:
        if not isinstance(self.base, OneVectorConfig | StackConfig):
            raise UserError(
                "TowersConfig: base must be a model over vectors, DlrmConfig, DcnV2Config, WukongConfig or DhenConfig; "
                f"got {self.base!r}."
            )
        if not isinstance(self.towers, Partition):
            raise UserError(
                "TowersConfig: towers must be a Partition; got "
                f"{self.towers!r}. Write Partition(towers=(('a', 'b'), ('c',)))."
            )
        check_several("TowersConfig: modules", self.modules, "DlrmTower(...)")
        for module in self.modules:
            if not isinstance(module, _MIXES) and not all(hasattr(module, name) for name in _TOWER_MODULE):
                raise UserError(
                    "TowersConfig: modules must be DlrmTower, DcnTower, LinearCompression, FactorizationMachine or one "
                    f"of your own with `dim`, `outputs_of` and `build` (TowerModule); got {module!r}."
                )
        widths = [self.width_of(module) for module in self.modules]
        if len(set(widths)) > 1:
            named = [f"{type(module).__name__} {width}" for module, width in zip(self.modules, widths, strict=True)]
            raise UserError(
                f"TowersConfig: modules side by side must return vectors of one width; got {', '.join(named)}. Give "
                f"them one dim; that of LinearCompression and FactorizationMachine is the tables', {self.table_dim}."
            )
        if isinstance(self.base, StackConfig) and (self.base.important or self.base.narrow):
            raise UserError(
                "TowersConfig: all features must have tables of one width; got base.important or base.narrow. Leave "
                "them out."
            )
        if self.base.dim * self.dim % self.table_dim:
            raise UserError(
                f"TowersConfig: the modules make {self.dim} of a width of {self.table_dim}, which does not go into "
                f"vectors of {self.base.dim} evenly. Take another dim."
            )

    @property
    def table_dim(self) -> int:
        """N."""
        return self.base.dim * (self.base.feature_vectors if isinstance(self.base, StackConfig) else 1)

    @property
    def dim(self) -> int:
        """D."""
        return self.width_of(self.modules[0]) if self.modules else self.table_dim

    @property
    def compression(self) -> float:
        """CR, how many times fewer numbers leave the towers than enter them."""
        sizes = [len(tower) for tower in self.towers.towers]
        return sum(sizes) * self.table_dim / (self.dim * sum(sum(self.outputs_of(size)) for size in sizes))

    @property
    def sent_compression(self) -> float:
        """How many times fewer numbers cross between hosts than enter the towers: smaller ones send as the largest."""
        sizes = [len(tower) for tower in self.towers.towers]
        return sum(sizes) * self.table_dim / (self.dim * len(sizes) * sum(self.outputs_of(max(sizes))))

    def width_of(self, module: object) -> int:
        """Width of the vectors that a module returns."""
        return self.table_dim if isinstance(module, _MIXES) else cast(TowerModule, module).dim

    def outputs_of(self, features: int) -> tuple[int, ...]:
        """Vectors that leave each module of a tower of so many features."""
        return tuple(
            module.outputs if isinstance(module, _MIXES) else module.outputs_of(features) for module in self.modules
        ) or (features,)

    def task(self, schema: Schema) -> CtrTask:
        """Binds the model to the columns of a data set.

        Raises:
          UserError: the towers have other features.
        """
        self.towers.check(schema.keys)
        return CtrTask(model=self, schema=schema, towers=self.towers)

    def tables(self, schema: Schema) -> tuple[TableConfig, ...]:
        return self.base.tables(schema)

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "Towers":
        return Towers(self, schema, rngs, dtypes)

    def places(self) -> dict[str, tuple[int, int]]:
        """The vectors that leave the towers, by name: (tower, position), see `Towers.interact`."""
        starts = np.cumsum([0, *self.outputs_of(max(map(len, self.towers.towers)))])
        found: dict[str, tuple[int, int]] = {}
        for t, tower in enumerate(self.towers.towers):
            at = [
                int(start) + i for start, n in zip(starts, self.outputs_of(len(tower)), strict=False) for i in range(n)
            ]
            names = [f"tower {t}, {i}" for i in range(len(at))] if self.modules else tower
            found |= {name: (t, i) for name, i in zip(names, at, strict=True)}
        return found


class Towers(nnx.Module):
    """Embeddings and dense features -> one logit per task."""

    def __init__(self, config: TowersConfig, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        towers = config.towers.towers
        room = max(map(len, towers))
        inputs = LayerInputs(n=room, d=config.table_dim)
        self.modules = nnx.List(
            [_stacked(module, inputs, len(towers), rngs=rngs, dtypes=dtypes) for module in config.modules]
        )
        places = config.places()
        names = schema.keys if not config.modules else tuple(places)
        outputs = tuple(Categorical(name=name, rows=1) for name in names)
        over = dataclasses.replace(config.base, dim=config.base.dim * config.dim // config.table_dim)
        self.over = over.build(dataclasses.replace(schema, categorical=outputs), rngs, dtypes)
        self.config, self.features, self.places, self.room = config, towers, tuple(places.items()), room
        self.compute_dtype = dtypes.compute

    def gather(self, embedded: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """float[B, N] of each feature -> compute_dtype[T, F, B, N], zero where a tower has none, and bool[T, F]."""
        zero = jnp.zeros_like(embedded[self.features[0][0]])
        towers = [[embedded[name] for name in tower] + [zero] * (self.room - len(tower)) for tower in self.features]
        present = np.arange(self.room) < np.array([[len(tower)] for tower in self.features])
        return jnp.stack([jnp.stack(tower) for tower in towers]).astype(self.compute_dtype), jnp.asarray(present)

    def interact(self, x: jax.Array, present: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """The modules of as many towers as the parameters are of: what `gather` gives -> compute_dtype[T, O, B, D].

        Vectors of a smaller tower beyond its own outputs are undefined.
        """
        modules: Sequence[Any] = self.modules
        keys = None if key is None else jax.random.split(key, (len(modules), len(x)))
        parts, counts = [], self.config.outputs_of(self.room)
        for i, (module, config) in enumerate(zip(modules, self.config.modules, strict=True)):
            parts.append(_apply(module, x, present, None if keys is None else keys[i]))
            wanted = counts[i], x.shape[2], self.config.dim
            check_returned(config, parts[i].shape[1:], wanted, f"`dim` and `outputs_of({self.room})`")
        return jnp.concatenate(parts, axis=1) if parts else x

    def __call__(
        self, embedded: dict[str, jax.Array] | HalfWay, dense: jax.Array, *, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns logits, float32[B, T] (float64 where the model computes in float64)."""
        x, present = embedded.by_tower() if isinstance(embedded, HalfWay) else self.gather(embedded)
        x = self.interact(
            x.astype(self.compute_dtype), present, key=None if key is None else jax.random.fold_in(key, 1)
        )
        if isinstance(embedded, HalfWay):
            x = embedded.to_examples(x)
        return self.over({name: x[place] for name, place in self.places}, dense, key=key)


def _stacked(
    config: TowerModule | Interaction, inputs: LayerInputs, towers: int, *, rngs: nnx.Rngs, dtypes: nn.Dtypes
) -> nnx.Module:
    """A module whose parameters have a leading axis of towers; each tower's are drawn by themselves."""
    each = [nnx.split(config.build(inputs, rngs=rngs, dtypes=dtypes)) for _ in range(towers)]
    states = [nnx.to_flat_state(state) for _, state in each]
    stacked = []
    for same in zip(*states, strict=True):
        path, first = same[0]
        values = jnp.stack([variable.get_value() for _, variable in same])
        own = first.get_metadata().get("logical_axes", (None,) * (values.ndim - 1))
        stacked.append((path, first.copy(values, logical_axes=("towers", *own))))
    return nnx.merge(each[0][0], nnx.from_flat_state(stacked))


def _apply(module: nnx.Module, x: jax.Array, present: jax.Array, keys: jax.Array | None) -> jax.Array:
    """A stacked module, tower by tower: [T, F, B, N], bool[T, F] -> [T, O, B, D]."""
    params, merge = split_params(module, "")

    def one(params: dict[str, jax.Array], x: jax.Array, present: jax.Array, key: jax.Array | None) -> jax.Array:
        tower: Any = merge(params)
        return tower(x, key=key, present=present)

    return jax.vmap(one)(params, x, present, keys)
