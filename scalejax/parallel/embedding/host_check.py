"""Checks of a host batch against tables and exchange: exact, vectorised, before anything travels."""

import math

import numpy as np

from scalejax.data.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel.embedding.exchange import bucket_capacity
from scalejax.parallel.embedding.jagged import FeatureLayout, feature_index
from scalejax.parallel.embedding.occurrences import Lookup, lookups
from scalejax.parallel.embedding.plan import Exchange
from scalejax.parallel.embedding.stacks import Stack


def check(
    stacks: tuple[Stack, ...],
    features: KeyedJagged,
    shards: int,
    layout: tuple[FeatureLayout, ...],
    exchange: Exchange,
) -> None:
    """Raises UserError for what the device would have to drop: see `EmbeddingCollection.check_on_host`."""
    if features.weights is not None and not np.isfinite(features.weights).all():
        where = int(np.flatnonzero(~np.isfinite(features.weights))[0])
        raise UserError(
            f"Weight {where} of the ids of a batch is {features.weights[where]}; weights must be finite numbers. Clean "
            "the column, or drop those ids."
        )
    ends = np.cumsum(features.lengths.sum(axis=1, dtype=np.int64))
    for stack in stacks:
        found = lookups(stack, layout, features.lengths.shape[1] // shards)
        loads = {}
        for look in found:
            which = feature_index(features, look.feature.name)
            lengths = features.lengths[which]
            begin = int(ends[which]) - int(lengths.sum(dtype=np.int64))
            ids = features.values[begin : ends[which]]
            if look.member.start == 0:
                _check_range(look, ids, lengths)
            if look.channel == "rows":
                loads[look] = _load(look, ids, lengths, shards, stack.devices)
        if loads and exchange.spill == "fail":
            _check_load(stack, found, loads, exchange)


def _check_range(look: Lookup, ids: np.ndarray, lengths: np.ndarray) -> None:
    rows = look.member.config.rows
    if ids.size and (ids.min() < 0 or ids.max() >= rows):
        wrong = np.flatnonzero((ids < 0) | (ids >= rows))
        example = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        raise UserError(
            f"Feature {look.feature.name!r}: id {ids[wrong[0]]} in example {example} of the batch is outside "
            f"[0, {rows}), the rows of table {look.member.config.name!r}; {wrong.size} of {ids.size} ids are. Map or "
            "hash the column to that range, or give the feature more rows in the schema."
        )


def _load(look: Lookup, ids: np.ndarray, lengths: np.ndarray, shards: int, devices: int) -> np.ndarray:
    """int64[shards, devices]: ids of one feature from each shard to each owner."""
    per_shard = lengths.reshape(shards, -1).sum(axis=1)
    ranks = np.asarray(look.member.ranks)
    owner = ranks[(ids.astype(np.int64) + look.member.shift) % len(ranks)]
    shard = np.repeat(np.arange(shards), per_shard)
    return np.bincount(shard * devices + owner, minlength=shards * devices).reshape(shards, devices)


def _check_load(
    stack: Stack, found: tuple[Lookup, ...], loads: dict[Lookup, np.ndarray], exchange: Exchange
) -> None:
    total = sum(loads.values())
    assert isinstance(total, np.ndarray)
    capacity = bucket_capacity(stack, found, exchange)
    most = int(total.max(initial=0))
    if most <= capacity:
        return
    shard, owner = np.unravel_index(int(total.argmax()), total.shape)
    worst = max(loads, key=lambda look: int(loads[look][shard, owner]))
    factor = exchange.capacity_factor
    while bucket_capacity(stack, found, Exchange(capacity_factor=factor)) < most:
        factor = math.floor(factor * 10 + 1) / 10
    raise UserError(
        f"One device has {most} ids for one other device, but its exchange has room for {capacity} (capacity_factor "
        f"{exchange.capacity_factor:g}); feature {worst.feature.name!r} has the most of them, "
        f"{int(loads[worst][shard, owner])}. Its ids are unevenly spread: use "
        f"--set exchange.capacity_factor={factor:g} or more."
    )
