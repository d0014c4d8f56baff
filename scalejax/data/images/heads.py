"""Slices of two heads in one space: the average of 152 people that is bundled, and Colin27 with the labels of AAL.

Both lie in the space of the MNI, so that a voxel of one has the place of a voxel of the other: (i, j, k) of Colin at 1
mm is (i + 8, j + 9, k + 1) of ICBM 152. A template of the same height therefore is nearly the answer, unless target and
template are turned, scaled and shifted by themselves: leave `augment` on.

Two heads show whether a mechanism works, and nothing of a population. What is called a subject here, which is never its
own template, is a slice (`TwoHeads`) or a slab of slices (`TissueSlabs`) of one head.
"""

import dataclasses
import pathlib

import numpy as np

from scalejax.data import packed_files
from scalejax.data.images import volumes
from scalejax.data.images.augment import Augment
from scalejax.data.images.brain import icbm152
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.labelled import moments
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError, check_at_least

SPACING = 2.0
"""Millimetres from one pixel to the next."""
PAIRED = Augment(turn=20, scale=(0.85, 1.15), shift=8 / SPACING)
"""Of target and template, each by itself: degrees, factors, pixels."""
CHANGED = 2
"""Channel of what is done to test pictures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TissueSlabs:
    """Grey and white matter of axial slices of ICBM 152, bundled, at 2 mm.

    Nine slabs of six slices, 4 mm between one and the next: of six a model learns, one validates, two test. A slab is a
    case, whose Dice is that of a volume, and a subject.

    Attributes:
      batch_size: Global.
      seed: Of the order, of pairs and of augmentations.
      size: Height and width, cut or filled up about the middle; the head has 117 x 99.
      augment: Of training pictures.
      test_change: What is done to test pictures: noise, contrast, ...
    """

    batch_size: int = 8
    seed: int = 0
    size: tuple[int, int] = (112, 96)
    augment: Augment = PAIRED
    test_change: Augment = Augment()

    def schema(self) -> ImageSchema:
        """Of the slices."""
        return _schema(self._splits()["train"]["images"], ("background", "grey matter", "white matter"))

    def build(self) -> ImageDataSet:
        """Cuts the head."""
        splits = _changed(self._splits(), self.test_change, self.seed)
        return ImageDataSet(
            splits, batch_size=self.batch_size, schema=self.schema(), augment=self.augment, seed=self.seed
        )

    def _splits(self) -> dict[str, dict[str, np.ndarray]]:
        head = icbm152()
        images, masks = (_axial(x, self.size) for x in (head.t1, head.tissues()))
        slabs = {"train": (0, 1, 3, 5, 7, 8), "validation": (4,), "test": (2, 6)}
        found = {}
        for split, numbers in slabs.items():
            cases = np.repeat(np.array(numbers, np.int32), 6)
            rows = 4 + 8 * cases + np.tile(np.arange(6), len(numbers))
            found[split] = {"images": images[rows, ..., None], "masks": masks[rows], "cases": cases, "subjects": cases}
        return found


STRUCTURES = {"caudate": (71, 72), "putamen": (73, 74), "thalamus": (77, 78), "hippocampus": (37, 38)}
"""Labels of AAL, left and right."""
_LOWEST, _HIGHEST = 44, 98
"""Slices of Colin, of 1 mm, that have any of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHeads:
    """Deep structures: learnt from some axial slices of Colin27, tested on ICBM 152.

    Colin27 and AAL come with Debian's `mricron-data` and are read where it put them. AAL was drawn on Colin27; that its
    labels are those of ICBM 152 as well is what the common space says, and a limit of every number that is found here:
    what the two heads differ by at an edge counts as a mistake.

    Eight slices of Colin validate, the same ones whatever `slices` is; those of which a model learns are evenly spaced
    among the others and may lie 1 mm beside them. A slice is a subject. Each head is divided by the 99th percentile of
    its brain.

    Attributes:
      colin: Folder with ch2bet.nii.gz and aal.nii.gz.
      icbm: npz with "t1" at 1 mm, uint8[197, 233, 189], of which every slice is tested; None = the bundled head, with
        slices 2 mm apart.
      slices: Labelled slices, at most 46.
      batch_size: Global.
      seed: Of the order, of pairs and of augmentations.
      size: Height and width, cut about the middle of the heads, which are 108 x 91.
      augment: Of training pictures.
      test_change: What is done to test pictures: noise, contrast, ...
    """

    colin: str = "/usr/share/mricron/templates"
    icbm: str | None = None
    slices: int = 16
    batch_size: int = 8
    seed: int = 0
    size: tuple[int, int] = (64, 64)
    augment: Augment = PAIRED
    test_change: Augment = Augment()

    def schema(self) -> ImageSchema:
        """Of the slices; mean and deviation are those of all slices of Colin that have structures."""
        head = self._colin()[0]
        images = _axial(head[:, :, _LOWEST:_HIGHEST], self.size) / np.percentile(head[head > 0], 99)
        return _schema(
            images.astype(np.float32)[..., None], ("background", *STRUCTURES), SPACING if self.icbm is None else 1.0
        )

    def build(self) -> ImageDataSet:
        """Reads both heads.

        Raises:
          UserError: a file is missing, or of another grid.
        """
        splits = _changed(self._splits(), self.test_change, self.seed)
        return ImageDataSet(
            splits, batch_size=self.batch_size, schema=self.schema(), augment=self.augment, seed=self.seed
        )

    def _splits(self) -> dict[str, dict[str, np.ndarray]]:
        check_at_least("data.slices", self.slices, 2)
        t1, labels = self._colin()
        heights = np.arange(_LOWEST, _HIGHEST)
        validation = heights[3::7]
        others = np.setdiff1d(heights, validation)
        if self.slices > len(others):
            raise UserError(f"data.slices must be at most {len(others)}; got {self.slices}.")
        chosen = others[np.linspace(0, len(others) - 1, self.slices + 2).round().astype(int)[1:-1]]
        icbm, levels = self._icbm()
        found = {}
        for case, (split, head, heights_of) in enumerate(
            (("train", t1, chosen), ("validation", t1, validation), ("test", icbm, levels))
        ):
            bright = float(np.percentile(head[head > 0], 99))
            images = _axial(head[:, :, heights_of if split != "test" else slice(None)], self.size)
            found[split] = {
                "images": (images / bright).astype(np.float32)[..., None],
                "masks": _axial(labels[:, :, heights_of], self.size),
                "cases": np.full(len(heights_of), case, np.int32),
                "subjects": (100 * case + np.arange(len(heights_of))).astype(np.int32),
            }
        return found

    def _colin(self) -> tuple[np.ndarray, np.ndarray]:
        """The head and its labels, [91, 108, 181]: every second voxel, every slice."""
        found = []
        for name in ("ch2bet.nii.gz", "aal.nii.gz"):
            path = pathlib.Path(self.colin) / name
            if not path.exists():
                raise UserError(
                    f"data.colin: {path} is missing. Install Debian's mricron-data (apt-get install mricron-data), or "
                    "name the folder in which its templates are."
                )
            voxels = volumes.read_volume(path).voxels
            if voxels.shape != (181, 217, 181):
                raise UserError(
                    f"data.colin: {path} has voxels {list(voxels.shape)}; those of mricron-data are 181, 217, 181."
                )
            found.append(voxels[0::2, 1::2].astype(np.int32))
        labels = np.zeros(found[1].shape, np.int32)
        for label, ids in enumerate(STRUCTURES.values(), 1):
            labels[np.isin(found[1], ids)] = label
        return found[0], labels

    def _icbm(self) -> tuple[np.ndarray, np.ndarray]:
        """The head [91, 108, N] where the slices with structures are, and the heights of these in Colin."""
        if self.icbm is None:
            heights = np.arange(_LOWEST + 1, _HIGHEST, 2)
            return icbm152().t1[4:95, 5:113][:, :, (heights + 1) // 2], heights
        path = pathlib.Path(self.icbm)
        try:
            t1 = packed_files.read_npz(path)["t1"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"data.icbm: {path} cannot be read as an npz with 't1' ({error}).") from error
        if t1.shape != (197, 233, 189):
            raise UserError(
                f"data.icbm: 't1' of {path} must be [197, 233, 189], ICBM 152 at 1 mm; got {list(t1.shape)}."
            )
        heights = np.arange(_LOWEST, _HIGHEST)
        return t1[8:189:2, 10:226:2][:, :, heights + 1], heights


def _axial(voxels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Voxels [I, J, K] as pictures [K, height, width], front up."""
    return np.ascontiguousarray(volumes.fitted(volumes.Volume(voxels, np.eye(4)).slices("axial")[0], size, 0))


def _schema(images: np.ndarray, classes: tuple[str, ...], slice_spacing: float = SPACING) -> ImageSchema:
    mean, std = moments(images)
    return ImageSchema(
        height=images.shape[1],
        width=images.shape[2],
        channels=1,
        dtype="uint8" if images.dtype == np.uint8 else "float32",
        mean=mean,
        std=std,
        classes=classes,
        spacing=(SPACING, SPACING),
        slice_spacing=slice_spacing,
    )


def _changed(splits: dict[str, dict[str, np.ndarray]], change: Augment, seed: int) -> dict[str, dict[str, np.ndarray]]:
    test = splits["test"]
    return splits | {"test": change.apply(test, np.arange(len(test["images"])), seed=seed, channel=CHANGED)}
