"""The id maps of a batch, over a whole mesh; `EmbeddingCollection` says how these functions are used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scalejax.parallel.embedding.exchange import through_maps
from scalejax.parallel.embedding.exchange.through_maps import Assignment, Maps
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.sharded_tables import ShardedTables, StackLeaves, State
from scalejax.parallel.embedding.stored import initial


def map_ids(
    sharded: ShardedTables, state: State, features: DeviceJagged, steps_ahead: int
) -> tuple[DeviceJagged, Assignment]:
    """Gives ids their rows, for a training step: see `EmbeddingCollection.map_ids`."""
    if not sharded.mapped_tables:
        return features, Assignment({}, {}, _no_faults(sharded))

    def local(maps: Maps, features: DeviceJagged, step: jax.Array) -> tuple[jax.Array, Assignment]:
        return through_maps.assign(sharded, maps, features, step)

    all_axes, ids = P(sharded.axes), dataclasses.replace(features, plans=None)
    mapped = sharded.everywhere(local, in_specs=(all_axes, all_axes, P()), out_specs=all_axes)
    values, assignment = mapped(state["maps"], ids, state["updates"] + steps_ahead)
    return dataclasses.replace(features, values=values, high=None), assignment


def find_ids(sharded: ShardedTables, state: State, features: DeviceJagged) -> tuple[DeviceJagged, jax.Array]:
    """As `map_ids`, for evaluation: see `EmbeddingCollection.find_ids`."""
    if not sharded.mapped_tables:
        return features, _no_faults(sharded)

    def local(maps: Maps, features: DeviceJagged) -> tuple[jax.Array, jax.Array]:
        return through_maps.find(sharded, maps, features)

    all_axes, ids = P(sharded.axes), dataclasses.replace(features, plans=None)
    values, faults = sharded.everywhere(local, in_specs=all_axes, out_specs=all_axes)(state["maps"], ids)
    return dataclasses.replace(features, values=values, high=None), faults


def admit(sharded: ShardedTables, state: State, assignment: Assignment) -> State:
    """The state with the maps of an assignment, and rows that lost their ids fresh: see `EmbeddingCollection.admit`."""
    if not sharded.mapped_tables:
        return state

    def local(stacks: StackLeaves, evicted: dict[str, jax.Array], key: jax.Array, update: jax.Array) -> StackLeaves:
        return initial.reset(sharded, stacks, evicted, jax.random.wrap_key_data(key), update)

    specs = sharded.stack_specs
    stacks = sharded.everywhere(local, in_specs=(specs, P(sharded.axes), P(), P()), out_specs=specs)(
        state["stacks"], assignment.evicted, state["key"], state["updates"] + 1
    )
    faults = state["faults"] + assignment.faults
    return {**state, "stacks": stacks, "maps": assignment.maps, "faults": faults}


def expire(sharded: ShardedTables, state: State) -> State:
    """The state without the ids that have expired: see `EmbeddingCollection.expire`."""
    if all(table.id_map is None or table.id_map.policy != "ttl" for table in sharded.mapped_tables):
        raise ValueError("expire: no table has an id map of policy 'ttl'; the ids of others do not expire.")

    def local(maps: Maps, step: jax.Array) -> tuple[Maps, dict[str, jax.Array]]:
        return through_maps.expire(sharded, maps, step)

    all_axes = P(sharded.axes)
    maps, evicted = sharded.everywhere(local, in_specs=(all_axes, P()), out_specs=all_axes)(
        state["maps"], state["updates"]
    )
    return admit(sharded, state, Assignment(maps, evicted, _no_faults(sharded)))


def id_totals(counts: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """The counters of `id_counts` as whole numbers: see `EmbeddingCollection.id_totals`."""
    found = {name: id_map.totals(np.asarray(words)[None]) for name, words in counts.items()}
    for totals in found.values():
        id_map.check_totals(totals)
    return found


def _no_faults(sharded: ShardedTables) -> jax.Array:
    return jnp.zeros((sharded.mesh.size, 2), jnp.int32)
