"""Pictures beside templates: which other picture of the training split stands beside a target.

A subject is what must not be its own template: a person, or, where slices of one person are all there is, a slice or a
slab. It is the number in "subjects", int[N], or where there is no such array in "cases".
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from scalejax.data.arrays import Arrays
from scalejax.data.images.augment import uniform
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.reading import check_start, share
from scalejax.errors import UserError

CHANNEL = 1
"""Of the augmentations of templates; those of targets are in channel 0."""
CELLS = 8
"""Rows and columns of cells over which pictures are averaged before they are compared."""
_PARTNER = 0x9A17


def subjects_of(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """int64[N], see the file; a number is one subject in all splits.

    Raises:
      UserError: the arrays have neither.
    """
    for name in ("subjects", "cases"):
        if name in arrays:
            return np.asarray(arrays[name], np.int64)
    raise UserError(
        f"Pairs need to know which pictures are of one subject; the data has {', '.join(arrays)}. Give it the array "
        "'subjects' or 'cases', integers [N]."
    )


def thumbnails(images: np.ndarray) -> np.ndarray:
    """Means over 8 x 8 cells of [N, H, W, C], less their mean, of length 1: float64[N, 64 C]."""
    x = images.astype(np.float64)
    for axis in (1, 2):
        edges = np.unique(np.linspace(0, x.shape[axis], CELLS + 1).round().astype(int))
        sizes = np.diff(edges).reshape((-1, *(1,) * (3 - axis)))
        x = np.add.reduceat(x, edges[:-1], axis) / sizes
    x = x.reshape(len(x), -1)
    x -= x.mean(1, keepdims=True)
    return x / np.maximum(np.sqrt(np.square(x).sum(1, keepdims=True)), 1e-12)


def alike(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """How much pictures are like others: correlations of their thumbnails, float64[N, M] of [N, ...] and [M, ...]."""
    return thumbnails(first) @ thumbnails(second).T


class Pairs:
    """Training batches with a template for each example, of another subject and augmented by itself.

    What template an example has follows from the seed of the data and its number in the stream.

    Args:
      data: Pictures with masks.
      alike: Templates are drawn among so many that are most like the target; None = among all of other subjects.

    Raises:
      UserError: all pictures are of one subject.
    """

    def __init__(self, data: ImageDataSet, *, alike: int | None = None) -> None:
        arrays = data.splits["train"]
        subjects, self._of = np.unique(subjects_of(arrays), return_inverse=True)
        if len(subjects) < 2:
            raise UserError(
                f"All {len(self._of)} training pictures are of subject {subjects[0]}, and a target must not be its own "
                "template. Give pictures of two or more subjects, or number slices or slabs in 'subjects'."
            )
        self.data = data
        self._order = np.argsort(self._of, kind="stable")
        self._counts = np.bincount(self._of)
        self._starts = np.cumsum(self._counts) - self._counts
        self._near = None if alike is None else self._nearest(arrays["images"], alike)

    def _nearest(self, images: np.ndarray, count: int) -> np.ndarray:
        """int64[N, count] of the most similar pictures of other subjects, fewer where some subject leaves fewer."""
        small = thumbnails(images)
        count = min(count, int(len(small) - self._counts.max()))
        found = np.empty((len(small), count), np.int64)
        for row, thumbnail in enumerate(small):
            likeness = np.where(self._of == self._of[row], -np.inf, small @ thumbnail)
            found[row] = np.argsort(-likeness, kind="stable")[:count]
        return found

    def partners(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows of the templates of examples, which are int64[M] rows at int64[M] positions of the training stream."""
        drawn = uniform(positions, 1, self.data.seed, _PARTNER)[:, 0]
        if self._near is not None:
            return self._near[rows, np.floor(drawn * self._near.shape[1]).astype(np.int64)]
        own = self._of[rows]
        others = len(self._of) - self._counts[own]
        place = np.floor(drawn * others).astype(np.int64)  # among those of other subjects, in order
        return self._order[np.where(place < self._starts[own], place, place + self._counts[own])]

    def train_batches(self, *, start_example: int, process_index: int = 0, process_count: int = 1) -> Iterator[Arrays]:
        """As `ImageDataSet.train_batches`, with "template_images" and "template_masks"."""
        check_start(start_example)
        data, own = self.data, share(self.data.batch_size, process_index, process_count)
        train = data.splits["train"]
        while True:
            positions = start_example + process_index * own + np.arange(own)
            rows = self.partners(data.rows_at(positions), positions)
            template = {name: train[name][rows] for name in ("images", "masks")}
            template = data.augment.apply(template, positions, seed=data.seed, channel=CHANNEL)
            yield data.seen(positions, channel=0) | {f"template_{name}": array for name, array in template.items()}
            start_example += data.batch_size


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Templates of evaluations, from the training split.

    Attributes:
      arrays: "images" [T, H, W, C] and "masks" int32[T, H, W].
      subjects: int64[T].
    """

    arrays: dict[str, np.ndarray]
    subjects: np.ndarray

    @classmethod
    def _of(cls, data: ImageDataSet, rows: np.ndarray) -> "Candidates":
        train = data.splits["train"]
        found = data.augment.middle({name: train[name][rows] for name in ("images", "masks")})
        return cls(found, subjects_of(train)[rows])

    @classmethod
    def first(cls, data: ImageDataSet, row: int | None) -> "Candidates":
        """One training picture, and another for targets of its own subject.

        Args:
          data: Pictures with masks.
          row: Of the one; None = that with the most classes, and then the most pixels of them.

        Raises:
          UserError: there is no such row, or all pictures are of one subject.
        """
        train = data.splits["train"]
        masks, subjects = train["masks"], subjects_of(train)
        if row is not None and not 0 <= row < len(masks):
            raise UserError(
                f"model.templates.row={row} is no picture of the training split, which has {len(masks)}; name one from "
                f"0 to {len(masks) - 1}."
            )
        classes = [(masks == label).any((1, 2)) for label in range(1, len(data.schema.classes))]
        order = np.lexsort((np.arange(len(masks)), -(masks > 0).sum((1, 2)), -np.sum(classes, 0)))
        if row is None:
            row = int(order[0])
        others = order[subjects[order] != subjects[row]]
        if not others.size:
            raise UserError("All training pictures are of one subject, and a target must not be its own template.")
        return cls._of(data, np.array([row, others[0]]))

    @classmethod
    def spaced(cls, data: ImageDataSet, count: int) -> "Candidates":
        """Evenly spaced pictures of the training split; where it has fewer, some are there more than once."""
        rows = np.linspace(0, data.num_examples("train") - 1, count).round().astype(np.int64)
        return cls._of(data, rows)

    def weights(self, batch: Mapping[str, np.ndarray], choose: Literal["one", "nearest", "ensemble"]) -> np.ndarray:
        """Shares that the candidates have in the masks of targets, float32[B, T]; none those of a target's subject.

        Args:
          batch: Targets.
          choose: One of them, or all.

        Raises:
          UserError: no candidate is of another subject.
        """
        images = batch["images"]
        allowed = subjects_of(batch)[:, None] != self.subjects
        if not allowed.any(1).all():
            raise UserError(
                "A target would be its own template: all candidates are of its subject. Raise model.templates.count, "
                "or number subjects over all splits."
            )
        if choose == "ensemble":
            return (allowed / allowed.sum(1, keepdims=True)).astype(np.float32)
        order = -np.arange(len(self.subjects))[None].astype(np.float64)
        likeness = alike(images, self.arrays["images"]) if choose == "nearest" else order
        best = np.where(allowed, likeness, -np.inf).argmax(1)
        return np.eye(len(self.subjects), dtype=np.float32)[best]
