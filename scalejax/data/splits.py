"""Splits of examples into train, validation and test."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from scalejax.data.permutation import Permutation
from scalejax.errors import UserError

SPLITS = ("train", "validation", "test")

# Keeps the permutation of a split apart from those of the training order.
_KEY = 0x5B1175


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fractions:
    """A share of the examples for each split; what train and validation leave is the test split.

    Attributes:
      train: Share of the training split.
      validation: Share of the validation split.
      by: "random" = seeded; "position" = the first examples train, the last test (a time split of a file in time
        order).
      seed: Seed of "random", in [0, 2**32); the order of training has its own.
    """

    train: float = 0.8
    validation: float = 0.1
    by: Literal["random", "position"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:  # what numpy.random.RandomState takes
            raise ValueError(f"Fractions: seed must be at least 0 and less than 2**32; got {self.seed}.")

    def assign(self, examples: int) -> dict[str, np.ndarray]:
        """Rows of each split, int64, ascending.

        "random" cuts `numpy.random.RandomState(seed).permutation(examples)`, whose values NumPy has frozen.
        """
        order = np.arange(examples)
        if self.by == "random":
            order = np.random.RandomState(self.seed).permutation(examples)
        a, b = self._bounds(examples)
        return dict(zip(SPLITS, (np.sort(order[:a]), np.sort(order[a:b]), np.sort(order[b:])), strict=True))

    def bounds(self, examples: int) -> dict[str, tuple[int, int]]:
        """(start, stop) of each split in file order, which is what by="position" means."""
        a, b = self._bounds(examples)
        return {"train": (0, a), "validation": (a, b), "test": (b, examples)}

    def assign_group(self, group: int, size: int, split: str) -> np.ndarray:
        """Rows of one split inside row group `group`, int64, ascending: random fractions of a streamed file.

        The shares hold in every row group up to rounding, so that sizes are known from the file's footer alone.
        """
        positions = np.arange(*self.bounds(size)[split])
        return np.sort(Permutation(size, _KEY, self.seed, group)(positions))

    def group_sizes(self, size: int) -> dict[str, int]:
        """Examples of each split in a row group of `size`."""
        a, b = self._bounds(size)
        return {"train": a, "validation": b - a, "test": size - b}

    def _bounds(self, examples: int) -> tuple[int, int]:
        shares = (self.train, self.validation)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise UserError(
                f"Fractions: train={self.train} and validation={self.validation} must not be negative and must not "
                "add up to more than 1 (the rest is the test split)."
            )
        # 1e-9: 10 * (0.7 + 0.1) is 7.999..., which means 8.
        a, b = (int(examples * share + 1e-9) for share in (self.train, self.train + self.validation))
        return a, min(b, examples)


EIGHTY_TEN_TEN = Fractions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByTime:
    """Train before `validation_from`, validation before `test_from`, test from there on.

    Attributes:
      column: Numeric column with the time of each example; not a feature unless it is listed as one.
      validation_from: First time of the validation split.
      test_from: First time of the test split.
    """

    column: str
    validation_from: float
    test_from: float

    def assign(self, time: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of each split, int64, ascending; `time` is number[N]."""
        if self.test_from < self.validation_from:
            raise UserError(
                f"ByTime: test_from={self.test_from} must not lie before validation_from={self.validation_from}."
            )
        codes = (time >= self.validation_from).astype(np.uint8) + (time >= self.test_from)
        return {split: np.flatnonzero(codes == s) for s, split in enumerate(SPLITS)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPosition:
    """The first examples train, those from `validation_from` on validate, those from `test_from` on test.

    Attributes:
      validation_from: Number of the first example of the validation split.
      test_from: Number of the first example of the test split.
    """

    validation_from: int
    test_from: int

    def bounds(self, examples: int) -> dict[str, tuple[int, int]]:
        """(start, stop) of each split.

        Raises:
          UserError: the numbers are not in order.
        """
        edges = (0, self.validation_from, self.test_from, examples)
        if list(edges) != sorted(edges):
            raise UserError(
                f"ByPosition: 0 <= validation_from <= test_from <= number of examples must hold; got validation_from="
                f"{self.validation_from}, test_from={self.test_from} and {examples} examples."
            )
        return {split: (edges[s], edges[s + 1]) for s, split in enumerate(SPLITS)}

    def assign(self, examples: int) -> dict[str, np.ndarray]:
        """Rows of each split, int64, ascending."""
        return {split: np.arange(*bounds) for split, bounds in self.bounds(examples).items()}


Split = Fractions | ByTime | ByPosition


def rows_of(splits: Mapping[str, np.ndarray], split: str) -> np.ndarray:
    """The rows of a split.

    Raises:
      UserError: there is no such split.
    """
    if split not in splits:
        raise UserError(f"split {split!r} does not exist; choose one of {', '.join(splits)}.")
    return splits[split]
