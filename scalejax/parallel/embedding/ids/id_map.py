"""Unbounded 64-bit ids -> rows of a table of fixed size: a set-associative map that lives on the devices.

    id (two uint32)  --hash-->  bucket  --compare with its ways-->  row = 1 + way * buckets + bucket

    bucket   way 0          way 1          ...   candidates: ids that wait for admission, with their sightings
      0      id, f, seen    id, f, seen          id, n, seen   id, n, seen  ...
      1      id, f, seen    (free)               ...

f = how often the id was seen, `seen` = the step at which it was last seen. `apply` takes the ids of a batch:

1. An id that has a way keeps it: its f grows by its occurrences, its `seen` becomes this step.
2. Any other id has sightings: its occurrences in this batch and those that its candidate entry counted before. With
   fewer than `admit_after` it waits (3). Otherwise it asks for a way; the ids of a bucket ask in ascending order (as
   unsigned 64-bit numbers), each takes the first free way, else the way with the lowest score that was not seen at
   this step, whose id is evicted. If there is none, it is rejected, and waits.
3. An id that waits enters its sightings among the candidates of its bucket, in the same order: in its own entry, else
   in a free one (those of ids just admitted are), else in that of the candidate that was seen longest ago, but not at
   this step; that one is forgotten. If there is none, its sightings of this batch are lost ("untracked").

Sightings are therefore exact as long as a bucket has no more than `candidate_ways` ids waiting; each entry lost beyond
that is counted. With `admit_after=1` nobody waits for sightings and there are no candidates.

Scores, lowest first; ties by position in the bucket:
  lfu   f, then `seen`
  lru   `seen`
  ttl   `seen`, and only a way not seen for more than `ttl_steps` steps can be taken. Until it is, its id still finds
        it; `expire` (`EmbeddingCollection.expire`) evicts all such ids at once.

Ids without a way get row 0, which is reserved for them, and are counted. The result depends on the set of occurrences
of a batch, not on their order. An evicted row and its optimizer state still hold the values of the old id: the caller
resets them (`Evicted.rows`) before the row is looked up.

The hash is fixed, since states are stored: h = mix(lo + mix(hi + 0x9e3779b9)) mod 2**32, bucket = h mod buckets, with
mix the finalizer of MurmurHash3 (`fmix32`, Austin Appleby, public domain).

Rows are counted way after way because tables are striped by rows: the first ways fill first, and what follows a
hash lies evenly on every number of devices.

Over several devices the buckets are cut into equal consecutive ranges (`owner_of` says where an id belongs), inside a
shard_map over dimension 0 of the state. Nothing but the counters then depends on the number of devices.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import IdMapConfig as IdMapConfig

State = dict[str, jax.Array]
"""Arrays, all with a leading dimension that can be sharded; the ways of a bucket lie next to each other:

key_hi, key_lo, frequency uint32, seen int32, each [buckets * ways]: frequency 0 = free.
candidate_hi, candidate_lo, sightings uint32, candidate_seen int32, each [buckets * candidate_ways]: sightings 0 = free.
Only with admit_after > 1.
counts uint32[shards, len(COUNTS), 2]: high and low word of each counter, see `totals`.

(Vectors: a TPU would pad [buckets, ways] to 128 ways where it gathers from it.)
"""

RESERVED_ROW = 0
"""The row of ids that have none of their own."""

COUNTS = (
    "hits",
    "misses",
    "unserved",
    "admitted",
    "rejected",
    "evicted",
    "forgotten",
    "untracked",
    "misplaced",
)
"""What is counted since the map was made.

hits, misses: occurrences of ids that had, had not, a row before the batch. unserved: of the misses, those that got row
0. admitted: ids that got a row. rejected: ids with enough sightings for which a batch had no way. evicted: ids that
lost their row. forgotten, untracked: candidates whose sightings were displaced, or not kept. misplaced: occurrences
that came to a device which does not own their bucket, a mistake of the caller (they get row 0).
"""

_FREE, _TAKEABLE, _PROTECTED = 0, 1, 2
_NEVER = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evicted:
    """Ids that lost their rows in a batch of N occurrences; the filled places may lie anywhere.

    Attributes:
      rows: int32[N], the row that was taken away (its values are still those of the old id); `config.rows` where there
        is none, which `array.at[rows].set(fresh, mode="drop")` leaves out.
      hi: uint32[N], high words of the evicted ids; 0 where there is none.
      lo: uint32[N], low words.
    """

    rows: jax.Array
    hi: jax.Array
    lo: jax.Array


def split_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integer ids of any width, on the host -> high and low words, uint32 of the same shape.

    Every 64-bit value is legal, negative hashes too; -1 and 2**64 - 1 are the same id. Narrower integers are widened
    with their sign.

    Raises:
      UserError: the ids are not integers.
    """
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"split_ids: ids must be integers; got {ids.dtype}. Numbers above 2**53 do not survive as floats: keep "
            "hashes as int64 or uint64 from the file on."
        )
    words = ids if ids.dtype == np.uint64 else ids.astype(np.int64).view(np.uint64)
    return (words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32)


def bucket_of(config: IdMapConfig, hi: jax.Array, lo: jax.Array) -> jax.Array:
    """int32[N] bucket of each id, in [0, config.buckets); the hash is in the module. NumPy in, NumPy out."""
    hashed = _mix(lo + _mix(hi + np.uint32(0x9E3779B9)))
    return (hashed % np.uint32(config.buckets)).astype(np.int32)


def owner_of(config: IdMapConfig, hi: jax.Array, lo: jax.Array, shards: int) -> jax.Array:
    """int32[N] in [0, shards): which of `shards` equal consecutive ranges of buckets each id belongs to.

    Raises:
      UserError: the buckets do not divide over the shards.
    """
    return bucket_of(config, hi, lo) // buckets_per_shard(config, shards)


def buckets_per_shard(config: IdMapConfig, shards: int) -> int:
    """Buckets of each of `shards` devices.

    Raises:
      UserError: the buckets do not divide over the shards.
    """
    if (why := config.refusal(shards)) is not None:
        raise UserError(f"The id map {why}")
    return config.buckets // shards


def init(config: IdMapConfig, shards: int = 1) -> State:
    """An empty map.

    Args:
      config: The map.
      shards: Devices over which dimension 0 will be sharded.

    Raises:
      UserError: the buckets do not divide over the shards.
    """
    buckets_per_shard(config, shards)

    def table(ways: int, *names: str) -> State:
        hi, lo, number, seen = names
        size = config.buckets * ways
        words = {name: jnp.zeros(size, jnp.uint32) for name in (hi, lo, number)}
        return words | {seen: jnp.full(size, _NEVER, jnp.int32)}

    state = table(config.ways, "key_hi", "key_lo", "frequency", "seen")
    if config.admit_after > 1:
        state |= table(config.candidate_ways, "candidate_hi", "candidate_lo", "sightings", "candidate_seen")
    return state | {"counts": jnp.zeros((shards, len(COUNTS), 2), jnp.uint32)}


def apply(
    config: IdMapConfig,
    state: State,
    hi: jax.Array,
    lo: jax.Array,
    valid: jax.Array,
    step: jax.typing.ArrayLike,
    first_bucket: jax.typing.ArrayLike = 0,
    times: jax.Array | None = None,
) -> tuple[jax.Array, State, Evicted]:
    """Rows for the ids of a batch, and the map after it; jittable, and made for use inside a shard_map.

    Args:
      config: The whole map.
      state: The map, or this device's range of it: buckets [first_bucket, first_bucket + n) and one row of counts.
      hi: uint32[N], high words of the ids.
      lo: uint32[N], low words.
      valid: bool[N]; False = not an id, gets row 0 and counts nowhere.
      step: int32 scalar, at least 0, never smaller than in the call before. Several calls in one step protect one
        another's ids from eviction.
      first_bucket: First bucket of this device.
      times: uint32[N], at least 1: how many occurrences each entry stands for; None = one.

    Returns:
      int32[N] rows of the whole table, all occurrences of an id the same; the new state; what was evicted.
    """
    step = jnp.asarray(step, jnp.int32)
    ids = _sorted(config, state, hi, lo, valid, first_bucket, times)

    ways = _Ways(state, ("key_hi", "key_lo", "frequency", "seen"), config.ways)
    found, way = ways.find(ids)
    hit = found & ids.first
    known = ways.take("frequency", ids, way)
    # Before any newcomer asks: with this step in `seen` nobody can take their ways.
    ways = ways.put(hit, ids, way, frequency=_saturating_add(known, ids.occurrences), seen=step)

    misses = ids.first & ~hit
    candidates, entered, entry, sightings = None, misses, way, ids.occurrences
    if config.admit_after > 1:
        names = ("candidate_hi", "candidate_lo", "sightings", "candidate_seen")
        candidates = _Ways(state, names, config.candidate_ways)
        found, entry = candidates.find(ids)
        entered = found & misses
        before = jnp.where(entered, candidates.take("sightings", ids, entry), 0)
        sightings = _saturating_add(before, ids.occurrences)

    asks = misses & (sightings >= config.admit_after)
    admitted, new_way, evicts = ways.choose(ids, asks, *_eviction_order(config, ways, ids, step))
    evicted = Evicted(
        rows=jnp.where(evicts, _row(config, ids.bucket + first_bucket, new_way), config.rows),
        hi=jnp.where(evicts, ways.take("key_hi", ids, new_way), 0),
        lo=jnp.where(evicts, ways.take("key_lo", ids, new_way), 0),
    )
    ways = ways.put(admitted, ids, new_way, key_hi=ids.hi, key_lo=ids.lo, frequency=sightings, seen=step)
    state = state | ways.arrays

    forgets = untracked = jnp.zeros_like(hit)
    if candidates is not None:
        nobody = jnp.zeros_like(sightings)
        leaves = {"candidate_hi": nobody, "candidate_lo": nobody, "sightings": nobody}
        # Those just admitted leave their entries first, for the ones that wait.
        candidates = candidates.put(admitted & entered, ids, entry, **leaves, candidate_seen=jnp.int32(_NEVER))
        waits = misses & ~admitted
        candidates = candidates.put(waits & entered, ids, entry, sightings=sightings, candidate_seen=step)
        enters = waits & ~entered
        seen = candidates.gather("candidate_seen", ids)
        kept, entry, forgets = candidates.choose(ids, enters, seen != step, (seen,))
        candidates = candidates.put(
            kept, ids, entry, candidate_hi=ids.hi, candidate_lo=ids.lo, sightings=sightings, candidate_seen=step
        )
        untracked = enters & ~kept
        state = state | candidates.arrays

    served = hit | admitted
    of_occurrences = (hit, misses, ids.first & ~served)
    of_ids = (admitted, asks & ~admitted, evicts, forgets, untracked)
    amounts = [jnp.where(flags, ids.occurrences, 0).sum(dtype=jnp.uint32) for flags in of_occurrences]
    amounts += [flags.sum(dtype=jnp.uint32) for flags in of_ids]
    state = state | {"counts": _add(state["counts"], [*amounts, ids.misplaced])}

    row = _row(config, ids.bucket + first_bucket, jnp.where(hit, way, new_way))
    return ids.spread(jnp.where(served, row, RESERVED_ROW)), state, evicted


def find(
    config: IdMapConfig,
    state: State,
    hi: jax.Array,
    lo: jax.Array,
    valid: jax.Array,
    first_bucket: jax.typing.ArrayLike = 0,
) -> jax.Array:
    """int32[N] rows of ids, as `apply` takes them; row 0 for those that have none. Changes and counts nothing."""
    ids = _Asked(_own_bucket(config, state, hi, lo, valid, first_bucket), hi, lo)
    found, way = _Ways(state, ("key_hi", "key_lo", "frequency", "seen"), config.ways).find(ids)
    return jnp.where(found, _row(config, ids.bucket + first_bucket, way), RESERVED_ROW)


def expire(
    config: IdMapConfig, state: State, step: jax.typing.ArrayLike, first_bucket: jax.typing.ArrayLike = 0
) -> tuple[State, jax.Array]:
    """Evicts every id not seen for more than `ttl_steps` steps; policy "ttl" only.

    Args:
      config: The whole map.
      state: The map, or this device's range of it.
      step: int32 scalar.
      first_bucket: First bucket of this device.

    Returns:
      The new state, and int32[n] the rows of these ways that were taken away, `config.rows` where there is none, to
      be reset as those of `Evicted`.

    Raises:
      ValueError: the policy is another one.
    """
    if config.ttl_steps is None:
        raise ValueError(f"expire: the policy must be 'ttl'; got {config.policy!r}, whose ids do not expire.")
    old = (state["frequency"] > 0) & _expired(config, state["seen"], jnp.asarray(step, jnp.int32))
    place = lax.iota(jnp.int32, old.shape[0])
    rows = _row(config, jnp.asarray(first_bucket, jnp.int32) + place // config.ways, place % config.ways)
    cleared = {name: jnp.where(old, 0, state[name]) for name in ("key_hi", "key_lo", "frequency")}
    nothing = jnp.zeros((), jnp.uint32)
    counts = _add(state["counts"], [old.sum(dtype=jnp.uint32) if name == "evicted" else nothing for name in COUNTS])
    seen = jnp.where(old, _NEVER, state["seen"])
    return state | cleared | {"seen": seen, "counts": counts}, jnp.where(old, rows, config.rows)


def totals(counts: np.ndarray) -> dict[str, int]:
    """`state["counts"]`, on the host -> each of `COUNTS`, summed over the devices."""
    words = np.asarray(counts)
    sums = [sum((int(high) << 32) + int(low) for high, low in words[:, c]) for c in range(len(COUNTS))]
    return dict(zip(COUNTS, sums, strict=True))


def merged_counts(counts: jax.Array) -> jax.Array:
    """uint32[shards, len(COUNTS), 2] -> uint32[len(COUNTS), 2], the sum over the devices."""

    def add(sums: jax.Array, more: jax.Array) -> tuple[jax.Array, None]:
        low = sums[:, 1] + more[:, 1]
        return jnp.stack([sums[:, 0] + more[:, 0] + (low < more[:, 1]).astype(jnp.uint32), low], axis=-1), None

    return lax.scan(add, jnp.zeros_like(counts[0]), counts)[0]


def summed_counts(maps: Mapping[str, State]) -> dict[str, jax.Array]:
    """{table: uint32[len(COUNTS), 2]}: the counters of each map, summed over the devices."""
    return {name: merged_counts(leaves["counts"]) for name, leaves in maps.items()}


def check_totals(found: dict[str, int]) -> None:
    """Refuses a map that was given ids of another device.

    Raises:
      UserError: naming the number.
    """
    if found["misplaced"]:
        raise UserError(
            f"id map: {found['misplaced']} ids came to a device that does not own their buckets, and got row "
            f"{RESERVED_ROW}. Send ids to owner_of(config, hi, lo, shards) before apply."
        )


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Ids that are looked for.

    Attributes:
      bucket: int32[N] bucket on this device; their number for what is not an id of this device.
      hi: uint32[N].
      lo: uint32[N].
    """

    bucket: jax.Array
    hi: jax.Array
    lo: jax.Array


@dataclasses.dataclass(frozen=True)
class _Ids(_Asked):
    """The ids of a batch in ascending order of bucket and id; every id is represented by its first occurrence.

    Attributes:
      first: bool[N], the representatives.
      occurrences: uint32[N], of each representative; 0 elsewhere.
      leads: bool[N], the representatives and everything that is not an id of this device.
      new_bucket: bool[N], where another bucket begins.
      order: int32[N], place in the batch.
      misplaced: uint32 scalar, valid ids of other devices.
    """

    first: jax.Array
    occurrences: jax.Array
    leads: jax.Array
    new_bucket: jax.Array
    order: jax.Array
    misplaced: jax.Array

    def rank(self, chosen: jax.Array) -> jax.Array:
        """int32[N]: how many chosen ids of the same bucket come before."""
        flags = chosen.astype(jnp.int32)
        before = jnp.cumsum(flags) - flags
        return before - lax.cummax(jnp.where(self.new_bucket, before, 0))

    def spread(self, of_id: jax.Array) -> jax.Array:
        """[N] of the representatives -> [N] of all occurrences, in the order of the batch."""
        index = lax.iota(jnp.int32, self.leads.shape[0])
        representative = lax.cummax(jnp.where(self.leads, index, 0))
        return jnp.zeros_like(of_id).at[self.order].set(of_id[representative], unique_indices=True)


def _sorted(
    config: IdMapConfig,
    state: State,
    hi: jax.Array,
    lo: jax.Array,
    valid: jax.Array,
    first_bucket: jax.typing.ArrayLike,
    times: jax.Array | None,
) -> _Ids:
    buckets = state["key_hi"].shape[0] // config.ways
    bucket = _own_bucket(config, state, hi, lo, valid, first_bucket)
    elsewhere = valid & (bucket == buckets)
    misplaced = (elsewhere if times is None else jnp.where(elsewhere, times, 0)).sum(dtype=jnp.uint32)
    index = lax.iota(jnp.int32, hi.shape[0])
    # It need not be stable: occurrences of one id are alike, and all of them get its row.
    bucket, hi, lo, order = lax.sort((bucket, hi, lo, index), num_keys=3, is_stable=False)
    present, new_bucket = bucket < buckets, changes(bucket)
    leads = new_bucket | changes(hi) | changes(lo) | ~present
    first = leads & present
    runs = _run_lengths(leads).astype(jnp.uint32) if times is None else _run_sums(leads, times[order])
    occurrences = jnp.where(first, runs, 0)
    return _Ids(bucket, hi, lo, first, occurrences, leads, new_bucket, order, misplaced)


def _own_bucket(
    config: IdMapConfig,
    state: State,
    hi: jax.Array,
    lo: jax.Array,
    valid: jax.Array,
    first_bucket: jax.typing.ArrayLike,
) -> jax.Array:
    """int32[N] bucket on this device; their number for what is not an id of this device."""
    buckets = state["key_hi"].shape[0] // config.ways
    bucket = bucket_of(config, hi, lo) - first_bucket
    return jnp.where(valid & (bucket >= 0) & (bucket < buckets), bucket, buckets)


class _Ways:
    """Four arrays [buckets * ways]: high words, low words, a number that is 0 in a free way, and when it was seen."""

    def __init__(self, state: State, names: tuple[str, str, str, str], ways: int) -> None:
        self.arrays = {name: state[name] for name in names}
        self._names, self._ways = names, ways

    def gather(self, name: str, ids: _Asked) -> jax.Array:
        """[N, ways] of each id's bucket; 0 where it has none."""
        place = ids.bucket[:, None] * self._ways + lax.iota(jnp.int32, self._ways)[None, :]
        return self.arrays[name].at[place].get(mode="fill", fill_value=0)

    def take(self, name: str, ids: _Asked, way: jax.Array) -> jax.Array:
        """[N], one way of each id's bucket."""
        return self.arrays[name].at[ids.bucket * self._ways + way].get(mode="fill", fill_value=0)

    def find(self, ids: _Asked) -> tuple[jax.Array, jax.Array]:
        """bool[N] whether an id is here, and int32[N] in which way."""
        hi, lo, number, _ = self._names
        same = (self.gather(hi, ids) == ids.hi[:, None]) & (self.gather(lo, ids) == ids.lo[:, None])
        same = same & (self.gather(number, ids) > 0)
        return same.any(axis=1), same.argmax(axis=1).astype(jnp.int32)

    def put(self, chosen: jax.Array, ids: _Ids, way: jax.Array, **values: jax.Array) -> "_Ways":
        """Writes one value per name where `chosen`; no two of these places are equal."""
        # The others get places outside that differ as well: the scatter is promised unique indices.
        outside = self.arrays[self._names[0]].shape[0] + lax.iota(jnp.int32, chosen.shape[0])
        place = jnp.where(chosen, ids.bucket * self._ways + way, outside)
        new = dict(self.arrays)
        for name, value in values.items():
            value = jnp.broadcast_to(value, chosen.shape)
            new[name] = new[name].at[place].set(value, mode="drop", unique_indices=True)
        return _Ways(new, self._names, self._ways)

    def choose(
        self, ids: _Ids, chosen: jax.Array, takeable: jax.Array, scores: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A way for each `chosen` id: the n-th of a bucket takes the n-th way in the order free, then by scores.

        Args:
          ids: The batch.
          chosen: bool[N].
          takeable: bool[N, ways], of the occupied ways those that may be taken.
          scores: [N, ways] each, the most important first; lowest first, ties by position.

        Returns:
          bool[N] whether it gets one, int32[N] which, bool[N] whether that is taken from another id.
        """
        occupied = self.gather(self._names[2], ids) > 0
        kind = jnp.where(occupied, jnp.where(takeable, _TAKEABLE, _PROTECTED), _FREE)
        # A sort of a few numbers by pairwise comparison: vectorises where a sort of many short rows does not.
        position = lax.iota(jnp.int32, kind.shape[1])
        before = position[:, None] < position[None, :]
        before = jnp.broadcast_to(before[None], (kind.shape[0], *before.shape))
        for key in (*reversed([jnp.where(occupied, score, 0) for score in scores]), kind):
            one, other = key[:, :, None], key[:, None, :]
            before = (one < other) | ((one == other) & before)
        place = before.sum(axis=1, dtype=jnp.int32)
        its = (place == ids.rank(chosen)[:, None]) & (kind != _PROTECTED) & chosen[:, None]
        return its.any(axis=1), its.argmax(axis=1).astype(jnp.int32), (its & occupied).any(axis=1)


def _eviction_order(
    config: IdMapConfig, ways: _Ways, ids: _Ids, step: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Which ways may be taken, and their scores."""
    seen = ways.gather("seen", ids)
    if config.policy == "lfu":
        return seen != step, (ways.gather("frequency", ids), seen)
    if config.policy == "lru":
        return seen != step, (seen,)
    return _expired(config, seen, step), (seen,)


def _expired(config: IdMapConfig, seen: jax.Array, step: jax.Array) -> jax.Array:
    assert config.ttl_steps is not None
    return step - seen > config.ttl_steps


def _row(config: IdMapConfig, bucket: jax.Array, way: jax.Array) -> jax.Array:
    return 1 + way * config.buckets + bucket


def _mix(x: jax.Array) -> jax.Array:
    """uint32[N] -> uint32[N], a bijection: fmix32 of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def changes(x: jax.Array) -> jax.Array:
    """bool[N]: the first element, and those that differ from the one before."""
    return jnp.concatenate([jnp.ones(min(1, x.shape[0]), bool), x[1:] != x[:-1]])


def _run_lengths(leads: jax.Array) -> jax.Array:
    """int32[N]: from each element to the next one that leads."""
    count = leads.shape[0]
    index = lax.iota(jnp.int32, count)
    nearest = lax.cummin(jnp.where(leads, index, count), reverse=True)
    return jnp.concatenate([nearest[1:], jnp.full(min(1, count), count, jnp.int32)]) - index


def _run_sums(leads: jax.Array, x: jax.Array) -> jax.Array:
    """uint32[N]: the sum of x from each element that leads to the next one."""
    after = jnp.cumsum(x, dtype=jnp.uint32)
    end = lax.iota(jnp.int32, x.shape[0]) + _run_lengths(leads) - 1
    return after[end] - (after - x)


def _saturating_add(x: jax.Array, more: jax.Array) -> jax.Array:
    """uint32 sums that stay at 2**32 - 1."""
    total = x + more
    return jnp.where(total < x, jnp.uint32(0xFFFFFFFF), total)


def _add(counts: jax.Array, amounts: list[jax.Array]) -> jax.Array:
    """Adds one uint32 per counter to the 64-bit counters of one device, uint32[1, len(COUNTS), 2]."""
    high, low = counts[0, :, 0], counts[0, :, 1]
    total = low + jnp.stack(amounts)
    return jnp.stack([high + (total < low).astype(jnp.uint32), total], axis=-1)[None]
