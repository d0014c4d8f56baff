"""Checks of a host batch against tables and exchange: exact, vectorised, before anything travels."""

import math
from typing import Literal

import numpy as np

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel.embedding.exchange import through_hosts
from scalejax.parallel.embedding.exchange.routed import bucket_capacity
from scalejax.parallel.embedding.ids.jagged import DeviceJagged, FeatureLayout
from scalejax.parallel.embedding.ids.occurrences import Lookup, lookups
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.embedding.plan.stacks import Stack

_LARGEST_ROWS = 2**31 - 1


def check_ids(
    stacks: tuple[Stack, ...],
    features: KeyedJagged,
    layout: tuple[FeatureLayout, ...],
    *,
    bag: Literal["example", "distinct row"] = "example",
) -> None:
    """Looks at every id and weight of a host batch, or of the distinct rows of a group.

    Args:
      stacks: The tables.
      features: Host form.
      layout: The features that are looked up.
      bag: What a list of ids belongs to, for the messages.

    Raises:
      UserError: an id out of range, or a weight that is not a number.
    """
    check_sizes(features)
    if features.weights is not None and not np.isfinite(features.weights).all():
        wrong = np.flatnonzero(~np.isfinite(features.weights))
        which, number = np.unravel_index(_bag_of(int(wrong[0]), features.lengths.reshape(-1)), features.lengths.shape)
        raise UserError(
            f"Feature {features.keys[which]!r}: an id in {bag} {number} of the batch has the weight "
            f"{features.weights[wrong[0]]}; weights must be finite numbers ({wrong.size} of {features.weights.size} "
            "are not). Clean the column, or drop those ids."
        )
    ends = np.cumsum(features.lengths.sum(axis=1, dtype=np.int64))
    for stack in stacks:
        for look in lookups(stack, layout):
            any_id = look.member.config.id_map is not None
            if look.member.start == 0 and look.feature.name in features.keys and not any_id:
                which = features.keys.index(look.feature.name)
                lengths = features.lengths[which]
                begin = int(ends[which]) - int(lengths.sum(dtype=np.int64))
                _check_range(look, features.values[begin : ends[which]], lengths, bag)


def check_sizes(features: KeyedJagged) -> None:
    """Refuses ids that are no integers, and lengths that are negative or do not add up.

    Raises:
      UserError: they are.
    """
    for name, array in (("values", features.values), ("lengths", features.lengths)):
        if not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                f"The {name} of a batch are {array.dtype}; wanted integers. Convert the column when it is read, once "
                "its missing entries have an id of their own."
            )
    if features.lengths.size and features.lengths.min() < 0:
        which, example = np.unravel_index(int(features.lengths.argmin()), features.lengths.shape)
        raise UserError(
            f"Feature {features.keys[which]!r} has {features.lengths.min()} ids in example {example} of the batch; "
            "lengths must not be negative. Were offsets passed for lengths, or differences of unsorted offsets?"
        )
    total = int(features.lengths.sum(dtype=np.int64))
    if total != features.values.shape[0]:
        raise UserError(
            f"The lengths of a batch sum to {total}, but it has {features.values.shape[0]} ids. Pass one length per "
            f"feature and example, features in the order of keys: {', '.join(features.keys)}."
        )


def check_room(stacks: tuple[Stack, ...], packed: DeviceJagged, exchange: Exchange) -> None:
    """Counts the ids from each device to each other one, and between the two hops of a route those of all peers.

    The exchange itself counts those of tables with an id map, whose rows only the devices know, those of peers that
    other processes have, and all of them with `all_to_all="ragged"`, where room depends on what all devices send.

    Raises:
      UserError: more than an exchange has room for.
    """
    if exchange.overflow == "count" or exchange.all_to_all == "ragged":
        return
    for stack in stacks:
        found = lookups(stack, packed.layout)
        for channel, places in (("rows", packed.values.shape[0]), ("host", stack.in_host)):
            known = [look for look in found if look.channel == channel and look.member.config.id_map is None]
            loads = {look: _load(look, packed, stack.devices, places) for look in known}
            if loads:
                _check_load(stack, found, loads, exchange)


def _bag_of(place: int, lengths: np.ndarray) -> int:
    """The bag that holds the id at a place."""
    return int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), place, side="right"))


def _check_range(look: Lookup, ids: np.ndarray, lengths: np.ndarray, bag: str) -> None:
    rows = look.member.config.rows
    if ids.size and (ids.min() < 0 or ids.max() >= rows):
        wrong = np.flatnonzero((ids < 0) | (ids >= rows))
        advice = "Map or hash the column to that range, or give the feature more rows in the schema."
        if int(ids.max()) > _LARGEST_ROWS or int(ids.min()) < -_LARGEST_ROWS - 1:
            advice = (
                "The column holds ids as large as 64-bit hashes, not numbers of rows: map it when the file is prepared "
                "(data.coding has Hashed and Counted), or look it up through an id map (parallel.embedding.id_map)."
            )
        raise UserError(
            f"Feature {look.feature.name!r}: id {ids[wrong[0]]} in {bag} {_bag_of(int(wrong[0]), lengths)} of the "
            f"batch is outside [0, {rows}), the rows of table {look.member.config.name!r}; {wrong.size} of {ids.size} "
            f"ids are. {advice}"
        )


def _load(look: Lookup, packed: DeviceJagged, devices: int, places: int) -> np.ndarray:
    """int64[places, devices]: ids of one feature to each owner, from the shards of one number modulo `places`."""
    ids = np.asarray(packed.values[:, look.feature.slots])
    shards = ids.shape[0]
    counts = np.asarray(packed.lengths[:, look.feature.bag_slots]).sum(axis=1)
    ranks = np.asarray(look.member.ranks)
    place = (ids + np.int64(look.member.shift)) % len(ranks)
    device = place if (ranks == np.arange(len(ranks))).all() else ranks[place]
    owner = (np.arange(shards) % places)[:, None] * devices + device
    if (counts < ids.shape[1]).any():
        owner = owner[np.arange(ids.shape[1]) < counts[:, None]]
    return np.bincount(owner.reshape(-1), minlength=places * devices).reshape(places, devices)


def _check_load(stack: Stack, found: tuple[Lookup, ...], loads: dict[Lookup, np.ndarray], exchange: Exchange) -> None:
    total = np.asarray(sum(loads.values()))
    by_host = next(iter(loads)).channel == "host"
    capacity_of = through_hosts.capacity if by_host else bucket_capacity
    capacity = capacity_of(stack, found, exchange)
    most = int(total.max(initial=0))
    if most <= capacity:
        return
    shard, owner = np.unravel_index(int(total.argmax()), total.shape)
    worst = max(loads, key=lambda look: int(loads[look][shard, owner]))
    factor = exchange.capacity_factor
    while capacity_of(stack, found, Exchange(capacity_factor=factor)) < most:
        factor = math.floor(factor * 10 + 1) / 10
    where, there = ("Between the hops one", "device of its host") if by_host else ("One", "other device")
    raise UserError(
        f"{where} device has {most} ids for one {there}, but its exchange has room for {capacity} (capacity_factor "
        f"{exchange.capacity_factor:g}); feature {worst.feature.name!r} has the most of them, "
        f"{int(loads[worst][shard, owner])}. Its ids are unevenly spread: use "
        f"--set tables.exchange.capacity_factor={factor:g} or more."
    )
