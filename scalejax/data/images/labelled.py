"""Pictures with a class each: `LabelledImages`, and labels that are wrong on purpose."""

import dataclasses
import functools
from typing import Literal

import numpy as np

from scalejax.data.images import files
from scalejax.data.images.augment import Augment, uniform
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.data.images.sources import AnyLabelled, FashionMnist, LabelledParts
from scalejax.data.splits import Fractions
from scalejax.errors import UserError, check_one_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelNoise:
    """Wrong labels among those that a model is trained and selected with.

    Attributes:
      kind: "symmetric": another class, each of the others as likely; "pair": the class after it, that after the last
        one being the first.
      rate: Probability of a wrong label, in [0, 1). Papers that draw "symmetric" noise from all classes, the true
        one among them, have (C - 1) / C of it.
      seed: Of the draws; what becomes of an example follows from its number in its split.
    """

    kind: Literal["symmetric", "pair"] = "symmetric"
    rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_one_of("LabelNoise: kind", self.kind, ("symmetric", "pair"))
        if not 0 <= self.rate < 1:
            raise UserError(
                f"LabelNoise: rate must be at least 0 and less than 1, the share of wrong labels; got {self.rate}."
            )

    def apply(self, labels: np.ndarray, classes: int, split: int) -> np.ndarray:
        """Labels integers[N] of a split, by its number, with noise."""
        drawn = uniform(np.arange(len(labels)), 2, self.seed, split)
        steps = np.ones(len(labels), np.int64)
        if self.kind == "symmetric":
            steps += np.floor(drawn[:, 1] * (classes - 1)).astype(np.int64)
        return np.where(drawn[:, 0] < self.rate, (labels + steps) % classes, labels).astype(labels.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Pictures with a class each, in memory.

    Batches have "images" [B, H, W, C] as they are stored, "labels" int32[B], and "true_labels", which differ from them
    where there is noise. Noise is in training and validation, as a user would have no clean ones to select with, and
    not in the test.

    Attributes:
      source: Where pictures come from.
      batch_size: Global.
      seed: Of the order and of the augmentations.
      augment: Of training batches; where it cuts a window, the other splits show the middle of their pictures.
      size: (height, width) to which pictures are scaled; None = they must have one size.
      channels: 1 or 3, which pictures are made to have; None = they must have one number.
      window: Smallest and largest value that is kept; pictures of more than 8 bits need it.
      mean: Of each channel, with which pixels are standardised, in units of stored pixels: that of the pictures which a
        model was trained with before, see `init`. None = what is measured in the training pictures.
      std: Likewise.
      validation: Share of the training pictures that are set apart, where the source has no such split.
      test: Likewise.
      split_seed: Of what is set apart.
      noise: In labels.
    """

    source: AnyLabelled = FashionMnist()
    batch_size: int = 128
    seed: int = 0
    augment: Augment = Augment()
    size: tuple[int, int] | None = None
    channels: Literal[1, 3] | None = None
    window: tuple[float, float] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    validation: float = 0.1
    test: float = 0.1
    split_seed: int = 0
    noise: LabelNoise = LabelNoise()

    def schema(self) -> ImageSchema:
        """Of the pictures, which are read for it."""
        parts = self._parts()
        images = parts.images["train"]
        height, width = self.augment.shown(*images.shape[1:3])
        mean, std = moments(images)
        return ImageSchema(
            height=height,
            width=width,
            channels=images.shape[3],
            dtype="uint8" if images.dtype == np.uint8 else "float32",
            mean=self.mean or mean,
            std=self.std or std,
            classes=parts.names,
            window=self.window,
            batch_size=self.batch_size,
        )

    def build(self) -> ImageDataSet:
        """Reads the pictures.

        Raises:
          UserError: files are missing, damaged or not alike, or a split has no pictures.
        """
        parts, schema = self._parts(), self.schema()
        splits = {}
        for number, (split, images) in enumerate(parts.images.items()):
            true = parts.labels[split].astype(np.int32)
            noisy = true if split == "test" else self.noise.apply(true, len(parts.names), number)
            arrays = {"images": images, "labels": noisy, "true_labels": true}
            splits[split] = arrays if split == "train" else self.augment.middle(arrays)
        return ImageDataSet(
            splits,
            batch_size=self.batch_size,
            schema=schema,
            augment=self.augment,
            seed=self.seed,
            remarks=parts.remarks,
        )

    def _parts(self) -> LabelledParts:
        fit = files.Fit(size=self.size, channels=self.channels, window=self.window)
        return _split(self.source, fit, self.validation, self.test, self.split_seed, files.stamp(self.source))


@functools.lru_cache(maxsize=2)  # for schema() and build() of one config
def _split(
    source: AnyLabelled, fit: files.Fit, validation: float, test: float, seed: int, stamp: tuple[object, ...]
) -> LabelledParts:
    parts = source.parts(fit)
    rows = set_apart(
        len(parts.labels["train"]),
        validation=0.0 if "validation" in parts.labels else validation,
        test=0.0 if "test" in parts.labels else test,
        seed=seed,
        what="pictures",
    )
    images = {split: parts.images["train"][own] for split, own in rows.items()}
    labels = {split: parts.labels["train"][own] for split, own in rows.items()}
    for split in ("validation", "test"):
        if split in parts.labels:
            images[split], labels[split] = parts.images[split], parts.labels[split]
    return dataclasses.replace(parts, images=images, labels=labels)


def set_apart(count: int, *, validation: float, test: float, seed: int, what: str) -> dict[str, np.ndarray]:
    """Rows of "train", and of "validation" and "test" where their shares are not 0: seeded, as `Fractions` has them.

    Raises:
      UserError: a split that should have some has none.
    """
    for name, share in (("validation", validation), ("test", test)):
        if not 0 <= share < 1:
            raise UserError(f"data.{name} must be a share of the training {what}, from 0 to below 1; got {share}.")
    rows = Fractions(train=max(1 - validation - test, 0.0), validation=validation, seed=seed).assign(count)
    wanted = ["train", *(["validation"] if validation else []), *(["test"] if test else [])]
    for split in wanted:
        if not rows[split].size:
            raise UserError(
                f"data.validation={validation} and data.test={test} of {count} {what} leave none for {split}. Give "
                f"more {what}, other shares, or folders of splits."
            )
    return {split: rows[split] for split in wanted}


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of [N, H, W, C] to six digits; 1 in the place of a deviation of 0."""
    flat = images.reshape(-1, images.shape[-1])
    sums, squares = np.zeros(flat.shape[1]), np.zeros(flat.shape[1])
    for start in range(0, len(flat), 1 << 22):  # a copy of all in float64 would be eight times as large
        part = flat[start : start + (1 << 22)].astype(np.float64)
        sums, squares = sums + part.sum(0), squares + np.square(part).sum(0)
    mean = sums / len(flat)
    std = np.sqrt(np.maximum(squares / len(flat) - np.square(mean), 0))
    return tuple(float(f"{m:.6g}") for m in mean), tuple(float(f"{s:.6g}") or 1.0 for s in std)
