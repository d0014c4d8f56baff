"""Codings of a column's values as ids, in both of which id 0 stands for a missing value:

  Hashed   id = 1 + hash(column, value) % (rows - 1); needs no pass over the data, different values may share an id.
  Counted  values seen at least `min_count` times get the ids 2, 3, ... from the most frequent on (ties by value), at
           most `max_values` of them; the others share id 1; needs one more pass, counts over all lines of the files.

Values are 64-bit integers. The hash is the finalizer of splitmix64 over value + a key of the column's number.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from scalejax.data.examples.vocabulary import FEWEST_BYTES, MISSING, ValueCounter, Vocabulary
from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hashed:
    """Hashes every feature into `rows` ids (id 0 = missing).

    Attributes:
      rows: Ids of each feature, or of all of them: one number, or one per feature.
    """

    rows: int | tuple[int, ...] = 1_000_000

    def rows_of(self, names: Sequence[str]) -> dict[str, int]:
        """Ids of each feature.

        Raises:
          UserError: not one number per feature, or a number out of range.
        """
        if isinstance(self.rows, tuple) and len(self.rows) != len(names):
            raise UserError(
                f"Hashed: rows must be one number, or one for each of the {len(names)} features {names[0]} to "
                f"{names[-1]}; got {len(self.rows)}."
            )
        each = self.rows if isinstance(self.rows, tuple) else (self.rows,) * len(names)
        for name, rows in zip(names, each, strict=True):
            if not 2 <= rows <= _INT32_MAX:
                raise UserError(
                    f"Hashed: rows must be at least 2 (id 0 stands for missing) and below 2**31; got {rows} for {name}."
                )
        return dict(zip(names, each, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """A vocabulary per feature of the values seen at least `min_count` times (id 0 = missing, 1 = rarer).

    Attributes:
      min_count: Occurrences from which on a value has an id of its own.
      max_values: Keep only so many, the most frequent; None = all.
      memory_bytes: For the counts of all features together; beyond it they are spilled to disk and stay exact.
      spill_folder: Where to; None = where temporary files go.
    """

    min_count: int = 10
    max_values: int | None = None
    memory_bytes: int = 4 << 30
    spill_folder: str | None = None


Coding = Hashed | Counted
MILLION = Hashed()
Known = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Name -> int64[N] values and bool[N] which of them are there."""


class Coder:
    """Columns of values -> columns of ids.

    Args:
      names: The features, in the order that numbers them for the hash.
      rows: Ids of each.
      vocabularies: Of `Counted`; None = hash.
    """

    def __init__(self, names: Sequence[str], rows: dict[str, int], vocabularies: dict[str, Vocabulary] | None) -> None:
        self.names, self.rows, self._vocabularies = tuple(names), rows, vocabularies

    @classmethod
    def fit(cls, coding: Coding, names: Sequence[str], chunks: Iterable[Known]) -> "Coder":
        """Counts where the coding needs counts; else reads none of the chunks."""
        if isinstance(coding, Hashed):
            return cls(names, coding.rows_of(names), None)
        memory_bytes = coding.memory_bytes // len(names)
        if memory_bytes < FEWEST_BYTES:
            raise UserError(
                f"Counted: memory_bytes must be at least {FEWEST_BYTES} for each of {len(names)} features; got "
                f"{coding.memory_bytes}."
            )
        with contextlib.ExitStack() as stack:
            counters = {
                name: stack.enter_context(ValueCounter(memory_bytes=memory_bytes, folder=coding.spill_folder))
                for name in names
            }
            for chunk in chunks:
                for name, counter in counters.items():
                    values, present = chunk[name]
                    counter.add(values[present])
            vocabularies = {
                name: counter.vocabulary(min_count=coding.min_count, max_values=coding.max_values)
                for name, counter in counters.items()
            }
        return cls(names, {name: vocabulary.rows for name, vocabulary in vocabularies.items()}, vocabularies)

    def __call__(self, chunk: Known) -> dict[str, np.ndarray]:
        """int32[N] ids per name."""
        coded = {}
        for number, name in enumerate(self.names):
            values, present = chunk[name]
            if self._vocabularies is None:
                spread = mix(values.view(np.uint64) + np.uint64(key_of(number)))
                ids = 1 + (spread % np.uint64(self.rows[name] - 1)).astype(np.int64)
            else:
                ids = self._vocabularies[name](values)
            coded[name] = np.where(present, ids, MISSING).astype(np.int32)
        return coded

    @property
    def counted(self) -> tuple[str, ...]:
        """Names whose ids are ranks in the values that were counted."""
        return () if self._vocabularies is None else tuple(self.names)

    def digest(self) -> str:
        """Tells codings apart that differ for some value."""
        digest = hashlib.sha256(repr((self.names, self.rows)).encode())
        for vocabulary in (self._vocabularies or {}).values():
            digest.update(vocabulary.values.tobytes() + vocabulary.ids.tobytes())
        return digest.hexdigest()
