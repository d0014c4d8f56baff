"""Synthetic logs of sessions, with dials for what deduplication lives on.

A session is one visit: S samples, between which most user-side features keep their value. In time order, as a log is
written, samples of many sessions are interleaved.

  user-side   groups of features that change together. A group keeps its lists from the previous sample of the session
              with probability d, else all its lists are drawn anew.
  item-side   features that are drawn anew for every sample.

Expectations, for S samples a session and lists long enough that drawing anew gives other lists:

  distinct rows of a session  1 + (S - 1)(1 - d)
  dedup factor                S / (1 + (S - 1)(1 - d))                                        (`dedup_factor`)

Both hold for the *mean* number of samples where sessions differ. They also hold for the part of each session that a
batch of B consecutive rows of a log in time order has, with its mean number of samples in the place of S; with C
sessions open at a time and exponential gaps between the samples of a session, each B (S - 1) / (C S) mean gaps long,

  samples of a session in a batch  S x / (x + (S - 1)(1 - e^-x)),  x = B (S - 1) / (C S)

which is near 1 as long as a batch is short beside C S: without clustering by session there is nothing to deduplicate.

A click has the log-odds log(1/9) + `signal` z. Every id of the first feature of a group, and of every item-side
feature, has an effect of its own (uniform, variance 1, by a hash); z is the sum over those features of the mean effect
of a list, shifted and scaled to mean 0 and variance 1 over the log.

After Zhao et al., RecD (MLSys 2023, arXiv 2211.05239); lists that shift by a few ids between samples are not modelled.
"""

import dataclasses
import math
import os
import pathlib
from typing import TYPE_CHECKING, Literal

import numpy as np

from scalejax.data.examples.dedup import Groups
from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.examples.records import Ragged
from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

# Mean time between two samples of a session, in the unit of the timestamps (microseconds).
_GAP = 1_000_000


def dedup_factor(samples: float, repeat: float) -> float:
    """Expected examples per distinct row, S / (1 + (S - 1)(1 - d)).

    Args:
      samples: S, mean samples of a session (or of the part of it that a batch holds), at least 1.
      repeat: d, probability of keeping the value of the previous sample.
    """
    return samples / (1 + (samples - 1) * (1 - repeat))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionLog:
    """A log to generate, in memory; equal fields give equal rows.

    Columns: session_id int64 (unrelated numbers), timestamp int64 (microseconds, ascending), label int8, then
    `dense_<i>` float32, `user_<group>_<i>` and `item_<i>` list<int64>.

    Attributes:
      sessions: Number of sessions.
      samples: Samples of a session; the mean number where `session_length` is "geometric".
      session_length: "fixed", or "geometric" = 1, 2, ... with that mean.
      repeat: d, probability that a group of user-side features keeps its value from the previous sample.
      user_groups: Number of features of each group that changes together.
      user_ids: Mean ids in a list of a user-side feature; lengths are Poisson, so some lists are empty.
      item_features: Number of item-side features.
      item_ids: Mean ids in a list of an item-side feature.
      rows: Different ids of each feature.
      zipf: Id of rank k has probability proportional to k^-zipf; 0 = uniform.
      ids: "ranks" = ids in [0, rows), the most frequent first; "hashed" = 63-bit numbers, as raw logs have them.
      dense: Number columns, unrelated to clicks.
      concurrent: Mean number of sessions that are open at a time (away from the ends of the log, hence meant for far
        fewer than `sessions`).
      signal: Weight of the ids in the log-odds of a click; 0 = a tenth of all rows are clicks, by chance alone.
      seed: Of everything.
    """

    sessions: int
    samples: float = 16
    session_length: Literal["fixed", "geometric"] = "fixed"
    repeat: float = 0.9
    user_groups: tuple[int, ...] = (4, 4)
    user_ids: float = 10.0
    item_features: int = 2
    item_ids: float = 2.0
    rows: int = 1_000_000
    zipf: float = 1.2
    ids: Literal["ranks", "hashed"] = "hashed"
    dense: int = 4
    concurrent: float = 10_000
    signal: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {
            "sessions": (self.sessions >= 1, "at least 1"),
            "samples": (
                self.samples >= 1 and (self.session_length == "geometric" or float(self.samples).is_integer()),
                'at least 1, and whole unless session_length="geometric"',
            ),
            "repeat": (0 <= self.repeat <= 1, "a probability"),
            "user_groups": (all(count >= 1 for count in self.user_groups), "at least 1 feature in each"),
            "user_ids": (self.user_ids >= 0, "0 or more"),
            "item_ids": (self.item_ids >= 0, "0 or more"),
            "item_features": (self.item_features >= 0, "0 or more"),
            "dense": (self.dense >= 0, "0 or more"),
            "rows": (self.rows >= 1, "at least 1"),
            "zipf": (self.zipf >= 0, "0 or more"),
            "concurrent": (self.concurrent > 0, "more than 0"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (good, text) in wanted.items():
            if not good:
                raise UserError(f"SessionLog: {name} must be {text}; got {getattr(self, name)}. Change it.")

    @property
    def groups(self) -> Groups:
        """Names of the user-side features that change together."""
        return tuple(tuple(f"user_{g}_{i}" for i in range(count)) for g, count in enumerate(self.user_groups))

    @property
    def item_names(self) -> tuple[str, ...]:
        """Names of the item-side features."""
        return tuple(f"item_{i}" for i in range(self.item_features))

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the number columns."""
        return tuple(f"dense_{i}" for i in range(self.dense))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all features, user-side first."""
        return (*(name for group in self.groups for name in group), *self.item_names)

    def columns(self) -> "dict[str, np.ndarray | Ragged]":
        """All rows in time order, by column; a list column is a `Ragged` with int64 values."""
        streams = iter(np.random.SeedSequence(self.seed).spawn(3 + self.dense + len(self.names) + len(self.groups)))
        shape = np.random.Generator(np.random.PCG64(next(streams)))
        lengths = self._lengths(shape)
        firsts = lengths_to_offsets(lengths)
        count = int(firsts[-1])
        session = np.repeat(np.arange(self.sessions), lengths)
        time = self._times(shape, firsts, session)
        order = np.argsort(time, kind="stable")  # row of the log -> sample, session after session
        click = np.random.Generator(np.random.PCG64(next(streams))).random(count)
        ids = mix(np.uint64(key_of(self.seed, 0x5E551011)) + np.arange(self.sessions, dtype=np.uint64))
        out: dict[str, np.ndarray | Ragged] = {
            "session_id": ids.view(np.int64)[session[order]],
            "timestamp": time[order],
            "label": (click < 0.1).astype(np.int8),
        }
        for name in self.dense_names:
            numbers = np.random.Generator(np.random.PCG64(next(streams)))
            out[name] = numbers.standard_normal(count, np.float32)
        cumulated = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -self.zipf)
        score = np.zeros(count)
        feature = 0
        for group in self.groups:
            changes = np.random.Generator(np.random.PCG64(next(streams))).random(count) >= self.repeat
            changes[firsts[:-1]] = True
            version = (np.cumsum(changes) - 1)[order]
            for name in group:
                lists = self._draw(next(streams), int(changes.sum()), self.user_ids, cumulated, feature)
                out[name] = lists.take(version)
                if name == group[0] and self.signal:
                    score += _mean_effect(lists, key_of(self.seed, 0xEFFEC7, feature))[version]
                feature += 1
        for name in self.item_names:
            lists = self._draw(next(streams), count, self.item_ids, cumulated, feature)
            out[name] = lists
            if self.signal:
                score += _mean_effect(lists, key_of(self.seed, 0xEFFEC7, feature))
            feature += 1
        if self.signal:
            z = (score - score.mean()) / max(float(score.std()), 1e-12)
            out["label"] = (click < 1 / (1 + 9 * np.exp(-self.signal * z))).astype(np.int8)
        return out

    def table(self) -> "pa.Table":
        """All rows in time order as an Arrow table."""
        import pyarrow as pa

        return pa.table({name: _to_arrow(column) for name, column in self.columns().items()})

    def write(
        self,
        path: str | pathlib.Path,
        *,
        row_group: int = 65_536,
        compression: Literal["zstd", "snappy", "lz4", "none"] = "zstd",
        encoding: Literal["plain", "dictionary"] = "plain",
    ) -> None:
        """Writes the log as one Parquet file; it appears when it is complete.

        Args:
          path: The file.
          row_group: Rows of a row group.
          compression: Codec of every column.
          encoding: "plain", or "dictionary" where pyarrow finds it worth while (its default).
        """
        import pyarrow.parquet as pq

        path = pathlib.Path(path)
        partial = path.with_name(path.name + ".partial")
        pq.write_table(
            self.table(),
            partial,
            row_group_size=row_group,
            compression=compression,
            use_dictionary=encoding == "dictionary",
            write_page_checksum=True,
        )
        os.replace(partial, path)

    def _lengths(self, rng: np.random.Generator) -> np.ndarray:
        """int64[sessions] samples of each session."""
        if self.session_length == "geometric":
            return rng.geometric(1 / self.samples, self.sessions)
        return np.full(self.sessions, int(self.samples))

    def _times(self, rng: np.random.Generator, firsts: np.ndarray, session: np.ndarray) -> np.ndarray:
        """int64[N] microseconds of each sample; ascending inside a session."""
        # Sessions begin at such a rate that `concurrent` are open on average: each lasts (S - 1) mean gaps.
        span = self.sessions * max(self.samples - 1, 1) * _GAP / self.concurrent
        gaps = rng.exponential(_GAP, session.size)
        gaps[firsts[:-1]] = rng.random(self.sessions) * span
        time = np.cumsum(gaps)
        before = np.concatenate([[0.0], time])[firsts[:-1]]
        return (time - before[session]).astype(np.int64)

    def _draw(
        self, stream: np.random.SeedSequence, lists: int, mean: float, cumulated: np.ndarray, feature: int
    ) -> Ragged:
        rng = np.random.Generator(np.random.PCG64(stream))
        offsets = lengths_to_offsets(rng.poisson(mean, lists))
        ranks = np.searchsorted(cumulated, rng.random(int(offsets[-1])) * cumulated[-1], side="right")
        ranks = np.minimum(ranks, self.rows - 1)
        if self.ids == "ranks":
            return Ragged(offsets, ranks)
        key = np.uint64(key_of(self.seed, 0x1D, feature))
        return Ragged(offsets, (mix(ranks.astype(np.uint64) + key) >> np.uint64(1)).astype(np.int64))


def _mean_effect(lists: Ragged, key: int) -> np.ndarray:
    """float64[N] mean over each list of the effects of its ids; 0 of an empty one."""
    bits = mix(lists.values.astype(np.int64).view(np.uint64) + np.uint64(key))
    effects = (bits >> np.uint64(11)) * 2.0**-53 * math.sqrt(12) - math.sqrt(3)
    sums = np.concatenate([[0.0], np.cumsum(effects)])[lists.offsets]
    return np.diff(sums) / np.maximum(lists.lengths, 1)


def _to_arrow(column: "np.ndarray | Ragged") -> "pa.Array":
    import pyarrow as pa

    if not isinstance(column, Ragged):
        return pa.array(column)
    if column.offsets[-1] >= 2**31:
        raise UserError(
            f"SessionLog: a feature has {column.offsets[-1]} ids, more than an Arrow list column takes. Write several "
            "logs with fewer sessions and other seeds."
        )
    return pa.ListArray.from_arrays(pa.array(column.offsets.astype(np.int32)), pa.array(column.values))
