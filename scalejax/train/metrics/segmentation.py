"""Scores of segmented volumes: Dice, and distances between surfaces.

A case is a volume, of which the pictures of a split are slices: all pictures with one number in "cases", in the order
of the split. Scores are of each structure of each case, then the mean over cases of each structure, then the mean over
structures, as nnU-Net has them. A structure that is in neither truth nor prediction of a case does not count there.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scalejax.data.images import pictures
from scalejax.train.metrics import evaluation
from scalejax.train.metrics.protocol import Collected, MetricBase, Value
from scalejax.train.metrics.sums import Pair, add, pair_zeros

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch

_MOST = 8
"""Pictures of a split that a report draws."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeDice(MetricBase):
    """Dice = 2 |A and B| / (|A| + |B|) of each structure over all slices of a case.

    The loss gives "counts", float32[B, structures, 3]: pixels of both, predicted and true ones; host batches have
    "cases", int32[B]. In training windows there is `dice_pixels` instead, over all pixels of the window at once.

    Attributes:
      structures: Names of the classes but the background.
    """

    structures: tuple[str, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        unit = "of volumes, mean over cases"
        mean = Value(name="dice", title="Dice", unit=f"{unit} and structures", better="high", window="dice_pixels")
        if len(self.structures) == 1:
            return (mean,)
        return (
            mean,
            *(
                Value(name=f"dice/{name}", title=f"Dice of {name}", unit=unit, better="high", shown="table")
                for name in self.structures
            ),
        )

    @property
    def collects(self) -> tuple[str, ...]:
        return ("counts", "cases", "weights")

    def zeros(self) -> Pair:
        return pair_zeros(len(self.structures), 3)

    def update(self, sums: Pair, loss: "Loss", batch: "Batch") -> Pair:
        weights = (batch["weights"] > 0).astype(sums.value.dtype)
        return add(sums, (loss.outputs["counts"].astype(weights.dtype) * weights[:, None, None]).sum(0))

    def compute(self, sums: np.ndarray) -> dict[str, float]:
        return {"dice_pixels": _mean(dice(sums))}

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        del intervals
        cases, of = np.unique(collected["cases"], return_inverse=True)
        sums = np.zeros((len(cases), len(self.structures), 3))
        np.add.at(sums, of, collected["counts"].astype(np.float64))
        return _named("dice", self.structures, dice(sums)) | {"cases": len(cases)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surfaces(MetricBase):
    """HD95: the larger of two 95th percentiles, of the distances from each surface to the other.

    A surface is what an erosion by the voxels' faces takes away. Where a structure is in truth or in prediction alone
    there is no distance: such a case does not count in the mean but in `hd95_missed`.

    The loss gives "predicted", uint8[B, H, W]; host batches have "masks", int32[B, H, W], and "cases". Runs keep
    pictures of some of the first slices.

    Attributes:
      structures: Names of the classes but the background.
      spacing: Millimetres from one voxel to the next along H and W; None = distances are in pixels.
      between: Millimetres from one slice to the next; "by case": host batches have them as "slice_spacing", float32[B];
        None = each slice is a volume of its own.
    """

    structures: tuple[str, ...]
    spacing: tuple[float, float] | None = None
    between: float | Literal["by case"] | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        unit = f"{'pixels' if self.spacing is None else 'mm'}{' of slices' if self.between is None else ''}"
        return (
            Value(name="hd95", title="HD95", unit=f"{unit}, mean over cases and structures", better="low"),
            *(
                Value(name=f"hd95/{name}", title=f"HD95 of {name}", unit=unit, better="low", shown="table")
                for name in (self.structures if len(self.structures) > 1 else ())
            ),
        )

    @property
    def collects(self) -> tuple[str, ...]:
        distances = ("slice_spacing",) if self.between == "by case" else ()
        return ("predicted", "masks", "cases", "weights", *distances)

    @property
    def shows(self) -> tuple[str, ...]:
        return ("images",)

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        del intervals
        spacing = self.spacing or (1.0, 1.0)
        found, missed = [], 0
        for predicted, true, between in self._volumes(collected):
            pairs = [(predicted == label, true == label) for label in range(1, len(self.structures) + 1)]
            found.append([hausdorff(*pair, (*between, *spacing)) for pair in pairs])
            missed += sum(bool(a.any()) != bool(b.any()) for a, b in pairs)
        return _named("hd95", self.structures, np.array(found)) | {"hd95_missed": missed}

    def _volumes(self, collected: Collected) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[float, ...]]]:
        """Prediction and truth of each volume, and how far its slices are apart: () of a volume that is one slice."""
        if self.between is None:
            for predicted, true in zip(collected["predicted"], collected["masks"], strict=True):
                yield predicted, true, ()
            return
        for case in np.unique(collected["cases"]):
            rows = collected["cases"] == case
            between = collected["slice_spacing"][rows][0] if self.between == "by case" else self.between
            yield collected["predicted"][rows], collected["masks"][rows], (float(between),)

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: Any) -> None:
        del sums
        rows = np.flatnonzero((collected["masks"][: len(collected["images"])] > 0).any((1, 2)))
        if not rows.size:
            return
        rows = rows[np.linspace(0, rows.size - 1, min(_MOST, rows.size)).round().astype(int)]
        images, true, predicted = (collected[name][rows] for name in ("images", "masks", "predicted"))
        panels = [
            pictures.Panel(pixels=image, right=right, said=said)
            for image, right, said in zip(images, true, predicted, strict=True)
        ]
        picture = evaluation.Picture(
            split=split,
            name="masks",
            caption="Tints are masks that were predicted, lines the edges of the true ones.",
            svg=pictures.grid(panels),
        )
        evaluation.save_picture(folder, picture)


def dice(counts: np.ndarray) -> np.ndarray:
    """Counts [..., 3] of both, predicted and true pixels to Dice, NaN where there is nothing of either."""
    both, predicted, true = np.moveaxis(counts, -1, 0)
    with np.errstate(invalid="ignore"):
        return 2 * both / (predicted + true)


def hausdorff(first: np.ndarray, second: np.ndarray, spacing: tuple[float, ...], percentile: float = 95) -> float:
    """The larger of the percentiles of the distances from one surface to the other; NaN where either is empty.

    Args:
      first: bool[...], any number of axes.
      second: bool[...] of the same shape.
      spacing: Of each axis.
      percentile: 100 = the Hausdorff distance.
    """
    from scipy import ndimage

    if not first.any() or not second.any():
        return float("nan")
    surfaces = [mask & ~np.asarray(ndimage.binary_erosion(mask), bool) for mask in (first, second)]
    to = [np.asarray(ndimage.distance_transform_edt(~surface, sampling=spacing)) for surface in surfaces]
    ways = ((surfaces[0], to[1]), (surfaces[1], to[0]))
    return max(float(np.percentile(distances[surface], percentile)) for surface, distances in ways)


def _named(name: str, structures: tuple[str, ...], of_cases: np.ndarray) -> dict[str, float]:
    """{name: mean, name/structure: ...} of numbers [cases, structures], of which some may be NaN."""
    means = [_mean(column) for column in of_cases.T]
    return {name: _mean(np.array(means))} | (
        {f"{name}/{structure}": mean for structure, mean in zip(structures, means, strict=True)}
        if len(structures) > 1
        else {}
    )


def _mean(values: np.ndarray) -> float:
    """Of those that are not NaN; NaN where there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
