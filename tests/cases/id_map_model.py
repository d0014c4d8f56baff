"""The policy of `parallel.embedding.ids.id_map` in plain Python, one id after another."""

import dataclasses

import numpy as np

from scalejax.parallel.embedding.ids.id_map import COUNTS, IdMapConfig

MOST = 2**32 - 1


def mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MOST
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MOST
    return x ^ (x >> 16)


def bucket_of(config: IdMapConfig, id_: int) -> int:
    """`id_` is an unsigned 64-bit number."""
    hi, lo = id_ >> 32, id_ & MOST
    return mix((lo + mix((hi + 0x9E3779B9) & MOST)) & MOST) % config.buckets


@dataclasses.dataclass
class Entry:
    id: int
    number: int
    seen: int


class Model:
    """Buckets are lists of ways, a way is an `Entry` or None."""

    def __init__(self, config: IdMapConfig) -> None:
        self.config = config
        self.ways: list[list[Entry | None]] = [[None] * config.ways for _ in range(config.buckets)]
        candidates = config.candidate_ways if config.admit_after > 1 else 0
        self.candidates: list[list[Entry | None]] = [[None] * candidates for _ in range(config.buckets)]
        self.counts = dict.fromkeys(COUNTS, 0)

    def row(self, bucket: int, way: int) -> int:
        return 1 + way * self.config.buckets + bucket

    def where(self, entries: list[Entry | None], id_: int) -> int | None:
        for way, entry in enumerate(entries):
            if entry is not None and entry.id == id_:
                return way
        return None

    def score(self, entry: Entry) -> tuple[int, ...]:
        return (entry.number, entry.seen) if self.config.policy == "lfu" else (entry.seen,)

    def may_go(self, entry: Entry, step: int) -> bool:
        if self.config.policy == "ttl":
            return step - entry.seen > self.config.ttl_steps
        return entry.seen != step

    def pick(self, entries, taken, may_go, score) -> int | None:
        """First way in the order of preference that is not `taken` in this batch."""
        free = [way for way, entry in enumerate(entries) if entry is None]
        old = [way for way, entry in enumerate(entries) if entry is not None and may_go(entry)]
        old.sort(key=lambda way: (*score(entries[way]), way))
        return next((way for way in free + old if way not in taken), None)

    def apply(self, ids: list[int], step: int) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Unsigned ids of a batch -> (id -> row, [(row, evicted id)])."""
        occurrences: dict[int, int] = {}
        for id_ in ids:
            occurrences[id_] = occurrences.get(id_, 0) + 1
        rows, evicted = {}, []
        by_bucket: dict[int, list[int]] = {}
        for id_ in sorted(occurrences):
            by_bucket.setdefault(bucket_of(self.config, id_), []).append(id_)
        for bucket, here in by_bucket.items():
            ways, candidates = self.ways[bucket], self.candidates[bucket]
            new = []
            for id_ in here:
                way = self.where(ways, id_)
                if way is None:
                    new.append(id_)
                    self.counts["misses"] += occurrences[id_]
                else:
                    ways[way].number = min(MOST, ways[way].number + occurrences[id_])
                    ways[way].seen = step
                    rows[id_] = self.row(bucket, way)
                    self.counts["hits"] += occurrences[id_]
            waiting, taken, sightings = [], set(), {}
            leaving = []
            for id_ in new:
                place = self.where(candidates, id_)
                before = 0 if place is None else candidates[place].number
                sightings[id_] = min(MOST, before + occurrences[id_])
                if sightings[id_] < self.config.admit_after:
                    waiting.append(id_)
                    continue
                way = self.pick(ways, taken, lambda entry: self.may_go(entry, step), self.score)
                if way is None:
                    self.counts["rejected"] += 1
                    waiting.append(id_)
                    continue
                taken.add(way)
                if ways[way] is not None:
                    evicted.append((self.row(bucket, way), ways[way].id))
                    self.counts["evicted"] += 1
                ways[way] = Entry(id_, sightings[id_], step)
                rows[id_] = self.row(bucket, way)
                self.counts["admitted"] += 1
                if place is not None:
                    leaving.append(place)
            for place in leaving:
                candidates[place] = None
            for id_ in waiting:
                rows[id_] = 0
                self.counts["unserved"] += occurrences[id_]
            if self.config.admit_after > 1:
                self.wait(candidates, waiting, sightings, step)
        return rows, evicted

    def wait(self, candidates, waiting, sightings, step) -> None:
        entering = []
        for id_ in waiting:
            place = self.where(candidates, id_)
            if place is None:
                entering.append(id_)
            else:
                candidates[place].number, candidates[place].seen = sightings[id_], step
        taken: set[int] = set()
        for id_ in entering:
            place = self.pick(candidates, taken, lambda entry: entry.seen != step, lambda entry: (entry.seen,))
            if place is None:
                self.counts["untracked"] += 1
                continue
            taken.add(place)
            self.counts["forgotten"] += candidates[place] is not None
            candidates[place] = Entry(id_, sightings[id_], step)

    def expire(self, step: int) -> list[int]:
        gone = []
        for bucket, ways in enumerate(self.ways):
            for way, entry in enumerate(ways):
                if entry is not None and step - entry.seen > self.config.ttl_steps:
                    ways[way] = None
                    gone.append(self.row(bucket, way))
        self.counts["evicted"] += len(gone)
        return gone

    def arrays(self) -> dict[str, np.ndarray]:
        """The tables as the map stores them, without the counters."""

        def table(buckets, names):
            hi, lo, number, seen = names
            flat = [entry or Entry(0, 0, -1) for ways in buckets for entry in ways]
            return {
                hi: np.array([e.id >> 32 for e in flat], np.uint32),
                lo: np.array([e.id & MOST for e in flat], np.uint32),
                number: np.array([e.number for e in flat], np.uint32),
                seen: np.array([e.seen for e in flat], np.int32),
            }

        found = table(self.ways, ("key_hi", "key_lo", "frequency", "seen"))
        if self.config.admit_after > 1:
            found |= table(self.candidates, ("candidate_hi", "candidate_lo", "sightings", "candidate_seen"))
        return found
