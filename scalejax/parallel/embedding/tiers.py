"""Which tables rest outside of the devices, and the stores that hold them; `row_cache` moves their rows.

Source: MTrainS (arXiv 2305.01515), whose further tiers are stores.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError, check_at_least
from scalejax.parallel.embedding.config import TableConfig

Leaves = dict[str, np.ndarray]
"""Rows of a table and their optimizer states: {"rows": [n, dim], "accumulator": [n], ...}."""


class Store(Protocol):
    """Where all rows of a table rest. Only the thread that trains calls it."""

    def read(self, rows: np.ndarray) -> Leaves:
        """Rows by number, int64[n]."""
        ...

    def write(self, rows: np.ndarray, leaves: Leaves) -> None:
        """Sets rows by number, int64[n], distinct."""
        ...


@runtime_checkable
class StoreConfig(Protocol):
    """Builds a store; a frozen dataclass of plain values."""

    def build(self, table: str, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Store:
        """An empty store.

        Args:
          table: Its name.
          leaves: Its whole arrays, [rows, ...].
        """
        ...


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Rows in the memory of the host."""

    def build(self, table: str, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Store:
        del table
        return ArrayRows({name: np.zeros(x.shape, x.dtype) for name, x in leaves.items()})


class ArrayRows:
    """A store of NumPy arrays, in memory or mapped from files."""

    def __init__(self, arrays: Leaves) -> None:
        self._arrays = arrays

    def read(self, rows: np.ndarray) -> Leaves:
        return {name: array[rows] for name, array in self._arrays.items()}

    def write(self, rows: np.ndarray, leaves: Leaves) -> None:
        for name, values in leaves.items():
            self._arrays[name][rows] = values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """Features whose tables rest outside of the devices.

    Attributes:
      features: Their names; each table that looks some of them up has a store and a cache of its own.
      slots: Rows of the cache on the devices: at least the distinct ids of a global batch.
      store: Where all rows rest.
    """

    features: tuple[str, ...]
    slots: int
    store: StoreConfig = HostMemory()

    def __post_init__(self) -> None:
        if not self.features or not isinstance(self.features, tuple):
            raise UserError(f"Tier: features must be a tuple of at least one feature; got {self.features!r}.")
        if not isinstance(self.store, StoreConfig):
            raise UserError(
                f"Tier: store must be a dataclass with build(table, leaves), such as HostMemory(); got {self.store!r}."
            )
        check_at_least("Tier: slots", self.slots, 1)


def tier_of(table: TableConfig, tiers: tuple[Tier, ...]) -> Tier | None:
    """The tier of a table, or None.

    Raises:
      UserError: its features are in several, or what the table is set to do has no meaning for cached rows.
    """
    found = [tier for tier in tiers if set(tier.features) & set(table.features)]
    if not found:
        return None
    name = f"tables.tiers: table {table.name!r}"
    if len(found) > 1 or not set(table.features) <= set(found[0].features):
        raise UserError(
            f"{name} is looked up by {', '.join(table.features)}, which share a cache: name all of them in one Tier."
        )
    if table.id_map is not None:
        raise UserError(
            f"{name} has an id map (tables.id_maps), which gives ids rows on the devices. Leave its features out of "
            "one of the two."
        )
    if table.track != "nothing":
        raise UserError(
            f"{name} rests outside of the devices, and tables.full_every keeps track of rows on them. Set --set "
            "tables.full_every=None, or leave the table out of tables.tiers."
        )
    if table.dtype in ("bfloat16", "float16") and table.rounding == "stochastic":
        raise UserError(
            f"{name} is of {table.dtype}, which updates round stochastically, and the draw depends on where a row is. "
            "Set --set tables.dtype=float32, or leave the table out of tables.tiers."
        )
    return found[0]


def cached(tables: tuple[TableConfig, ...], tiers: tuple[Tier, ...]) -> tuple[TableConfig, ...]:
    """The tables as the devices have them.

    Raises:
      UserError: as `tier_of`, or a tier names a feature that no table looks up.
    """
    known = [feature for table in tables for feature in table.features]
    for name in (name for tier in tiers for name in tier.features):
        if name not in known:
            raise UserError(f"tables.tiers: no table looks up the feature {name!r}; there are {', '.join(known)}.")
    found = []
    for table in tables:
        tier = tier_of(table, tiers)
        # A table that would fit its cache needs no more than its own rows.
        found.append(table if tier is None else dataclasses.replace(table, rows=min(tier.slots, table.rows)))
    return tuple(found)


def cached_schema(schema: Schema, tables: tuple[TableConfig, ...]) -> Schema:
    """The schema of batches whose ids are slots; `tables` are those that `cached` gave."""
    rows = {feature: table.rows for table in tables for feature in table.features}
    features = [
        dataclasses.replace(f, rows=min(f.rows, rows[f.name])) if f.rows is not None and f.name in rows else f
        for f in schema.categorical
    ]
    return dataclasses.replace(schema, categorical=tuple(features))
