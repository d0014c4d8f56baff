"""Folders of the layout of nnU-Net v2, and pictures with masks of them: `NnUnetFolder`, `MaskedImages`.

    dataset.json                         channel_names, labels, file_ending, numTraining
    imagesTr/ID_0000.nii.gz              channel 0 of the case ID; ID_0001.nii.gz channel 1, ...
    labelsTr/ID.nii.gz                   its mask
    imagesTs/, labelsTs/                 likewise, maybe: the test split

Files are PNG, TIFF or BMP (all of one slice), or NIfTI; the picture of a NIfTI mask may also be a folder ID_0000 with
the DICOM files of one series. A PNG of three colours is three channels. Volumes are cut to slices.
"""

import dataclasses
import functools
import pathlib
import re
from typing import Any, Literal

import numpy as np

from scalejax import json_reading
from scalejax.data.images import files, volumes
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.labelled import moments, set_apart
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError

ENDINGS = (".png", ".tif", ".tiff", ".bmp", *volumes.NIFTI)


@dataclasses.dataclass(frozen=True)
class MaskedCases:
    """Slices of cases with their masks.

    Attributes:
      images: uint8 or float32 [N, H, W, C].
      masks: int32[N, H, W], numbers of classes.
      cases: int32[N], the number of each slice's case in `names`; slices of a case follow each other in its order.
      names: Of the cases.
      test: Numbers of those that are the test split by their folder.
      classes: Names of the classes.
      spacing: Millimetres from one pixel to the next, down and across; None = not known.
      slice_spacing: Millimetres from one slice of each case to the next; None = not known.
    """

    images: np.ndarray
    masks: np.ndarray
    cases: np.ndarray
    names: tuple[str, ...]
    test: tuple[int, ...]
    classes: tuple[str, ...]
    spacing: tuple[float, float] | None
    slice_spacing: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnUnetFolder:
    """Cases in the layout of nnU-Net v2.

    Attributes:
      path: The folder with dataset.json.
      axis: Across which volumes are cut to slices, after they are turned to one orientation.
      spacing: Millimetres from one pixel to the next, down and across, to which slices are brought (linearly, without
        smoothing before; in masks by the largest share); three numbers: from one slice to the next, down and across.
        None = as they are, which must be alike. Of how far slices are apart each case keeps its own, unless it is set.
      size: (height, width) to which slices are cut or filled up about their middle; None = as they are.
      window: Smallest and largest value that is kept, such as -160,240 Hounsfield units.
      standardize: "case": each channel of each case is brought to mean 0 and standard deviation 1, as suits MRI. What
        is not of 8 bits needs this or a window.
    """

    path: str = "dataset"
    axis: volumes.Axis = "axial"
    spacing: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None
    window: tuple[float, float] | None = None
    standardize: Literal["no", "case"] = "no"

    def __post_init__(self) -> None:
        if self.spacing is not None and not (len(self.spacing) in (2, 3) and min(self.spacing) > 0):
            raise UserError(
                "NnUnetFolder: spacing must be millimetres above 0, down and across, or from slice to slice, down and "
                f"across; got {self.spacing}."
            )
        if self.size is not None:
            files.check_size("NnUnetFolder: size", self.size)

    def read(self) -> MaskedCases:
        """All cases that have a mask.

        Raises:
          UserError: dataset.json and the files do not say the same, or a file cannot be read or is unlike the others.
        """
        told = _described(pathlib.Path(self.path))
        images: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        names: list[str] = []
        test: list[int] = []
        between: list[float] = []
        first: tuple[tuple[int, ...], tuple[float, float] | None, str] | None = None
        seen: dict[int, tuple[np.dtype, pathlib.Path]] = {}
        for folder in ("Tr", "Ts"):
            for case, channels in _cases(told, folder).items():
                if case in names:
                    raise UserError(
                        f"{told.path}: case {case} is in imagesTr and in imagesTs, and what is learnt from must not be "
                        "tested. Remove it from one of them, or rename one if they are two cases."
                    )
                picture, mask, distances = self._read_case(told, channels, told.path / f"labels{folder}", case, seen)
                shape, spacing = picture.shape[1:], None if distances is None else distances[1:]
                first = first or (shape, spacing, case)
                if shape != first[0] or not _alike(spacing, first[1]):
                    raise UserError(
                        f"{told.path}: slices of case {case} are {list(shape)} (height, width, channels) with "
                        f"pixels of {_millimetres(spacing)}, those of {first[2]} {list(first[0])} with "
                        f"{_millimetres(first[1])}. Bring all to one: --set data.source.spacing=1,1 for pixels of 1 "
                        f"mm, and --set data.source.size={first[0][0]},{first[0][1]} cuts and fills up."
                    )
                if folder == "Ts":
                    test.append(len(names))
                images.append(picture)
                masks.append(mask)
                names.append(case)
                between += [] if distances is None else [distances[0]]
        assert first is not None  # `_cases` refuses a folder without any
        cases = np.concatenate([np.full(len(mask), n, np.int32) for n, mask in enumerate(masks)])
        return MaskedCases(
            images=np.concatenate(images),
            masks=np.concatenate(masks),
            cases=cases,
            names=tuple(names),
            test=tuple(test),
            classes=told.classes,
            spacing=first[1],
            slice_spacing=tuple(between) if first[1] is not None else None,
        )

    def _read_case(
        self,
        told: "_Described",
        channels: list[pathlib.Path],
        labels: pathlib.Path,
        case: str,
        seen: dict[int, tuple[np.dtype, pathlib.Path]],
    ) -> tuple[np.ndarray, np.ndarray, volumes.Distances | None]:
        """Pictures [N, H, W, C] of a case, its masks int32[N, H, W], and how far slices and pixels are apart.

        `seen` has dtype and path of each channel's first file, and is filled.
        """
        file = labels / f"{case}{told.ending}"
        if not file.exists():
            raise UserError(
                f"{file} is missing: case {case} has pictures and no mask. Add it, or move the pictures out of "
                f"{channels[0].parent.name}."
            )
        mask, grid = self._read_file(file, masks=True)
        if mask.dtype.kind == "f" and (np.rint(mask) != mask).any():  # NaN is no number of a class either
            raise UserError(f"{file} has values that are no whole numbers. A mask has the number of a class a pixel.")
        wrong = (mask < 0) | (mask >= len(told.classes))
        if wrong.any():
            hint = (
                " White is often written as 255: write the number of the class." if (mask[wrong] == 255).all() else ""
            )
            raise UserError(
                f"{file} has the label {mask[wrong][0]:g} in {int(wrong.sum()):,} pixels; dataset.json has "
                f"{', '.join(f'{n} ({name})' for n, name in enumerate(told.classes))}.{hint} Mend one of the two."
            )
        mask = mask[..., 0].astype(np.int32)
        pictures: list[np.ndarray] = []
        for number, path in enumerate(channels):
            picture, own = self._read_file(path, masks=False)
            if self.standardize == "no":
                files.check_bits(picture, path, *seen.setdefault(number, (picture.dtype, path)))
            if picture.shape[:3] != mask.shape:
                raise UserError(
                    f"{path} has {_sized(picture)} and its mask {file.name} {_sized(mask)}. Write both on one grid."
                )
            if own is not None and grid is not None:
                _check_same_place(own, grid, f"{path} and its mask {file.name}")
            files.check_finite(picture, path)
            if self.window is None and self.standardize == "no" and picture.dtype != np.uint8:
                low, high = (f"{value:g}" for value in (picture.min(), picture.max()))
                raise UserError(
                    f"{path} has pixels of {picture.dtype} from {low} to {high}. Say what is kept of them: --set "
                    f"data.source.window={low},{high}, or -160,240 for soft tissue in CT, or --set "
                    "data.source.standardize=case for MRI."
                )
            if self.window is not None:
                picture = files.windowed(picture, self.window, path, argument="data.source.window")
            pictures.append(picture)
        whole = np.concatenate(pictures, -1)
        if whole.shape[-1] != len(told.channels):
            raise UserError(
                f"{channels[0]}: case {case} has {whole.shape[-1]} channel(s), and dataset.json names "
                f"{len(told.channels)} ({', '.join(told.channels)}). Add files _0001, ..., or mend channel_names."
            )
        if self.standardize == "case":
            mean, std = (np.array(values, np.float32) for values in moments(whole))
            whole = (whole.astype(np.float32) - mean) / std
        distances = None if grid is None else (grid.between(self.axis), *grid.slices(self.axis)[1])
        if self.spacing is not None:
            if distances is None:
                raise UserError(
                    f"data.source.spacing={','.join(map(str, self.spacing))}: {file} does not say how far its pixels "
                    "lie apart. Leave it out, and give a size."
                )
            slices, down, across = (*distances[: 3 - len(self.spacing)], *self.spacing)
            wanted = slices, down, across
            channel = [volumes.resampled(c, distances, wanted) for c in np.moveaxis(whole, -1, 0)]
            whole, mask = np.stack(channel, -1), volumes.resampled_masks(mask, distances, wanted)
            distances = wanted
        if self.size is not None:
            kept = volumes.fitted(mask, self.size, 0)
            if (lost := int((mask > 0).sum() - (kept > 0).sum())) > 0:
                raise UserError(
                    f"data.source.size={self.size[0]},{self.size[1]} would cut {lost:,} pixels of classes off case "
                    f"{case}, whose slices are {mask.shape[1]} x {mask.shape[2]}. Give a larger size, or a coarser "
                    "spacing."
                )
            edges = [self.window[0] if self.window else c.min() for c in np.moveaxis(whole, -1, 0)]
            channel = [volumes.fitted(c, self.size, e) for c, e in zip(np.moveaxis(whole, -1, 0), edges, strict=True)]
            whole, mask = np.stack(channel, -1), kept
        return whole, mask, distances

    def _read_file(self, path: pathlib.Path, *, masks: bool) -> tuple[np.ndarray, volumes.Volume | None]:
        """[N, H, W, C] of a file or of a series, and the volume that they are of."""
        if path.is_dir() or path.name.endswith(volumes.NIFTI):
            volume = volumes.read_volume(path)
            return volume.slices(self.axis)[0][..., None], volume
        pixels = files.read_picture(path, masks=masks)
        return (pixels if pixels.ndim == 3 else pixels[..., None])[None], None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedImages:
    """Slices with masks, in memory.

    Batches have "images" [B, H, W, C], "masks" int32[B, H, W] and "cases" int32[B], the number of the case that a slice
    is of, by which scores of volumes are put together, and where cases differ in it "slice_spacing" float32[B]. No case
    is in two splits.

    Attributes:
      source: Where they come from.
      batch_size: Global.
      seed: Of the order and of the augmentations.
      augment: Of training batches; where it cuts a window, the other splits show the middle of their slices.
      slices: "labelled": of the training slices those alone that have a class besides the background.
      validation: Share of the training cases that are set apart.
      test: Likewise, where the source has no test cases with masks.
      split_seed: Of what is set apart.
    """

    source: NnUnetFolder = NnUnetFolder()
    batch_size: int = 8
    seed: int = 0
    augment: Augment = Augment()
    slices: Literal["all", "labelled"] = "all"
    validation: float = 0.2
    test: float = 0.2
    split_seed: int = 0

    def schema(self) -> ImageSchema:
        """Of the slices, which are read for it."""
        found, rows = self._rows()
        images = found.images[rows["train"]]
        height, width = self.augment.shown(*images.shape[1:3])
        mean, std = moments(images)
        return ImageSchema(
            height=height,
            width=width,
            channels=images.shape[3],
            dtype="uint8" if images.dtype == np.uint8 else "float32",
            mean=mean,
            std=std,
            classes=found.classes,
            window=self.source.window,
            standardized=self.source.standardize == "case",
            batch_size=self.batch_size,
            spacing=found.spacing,
            slice_spacing=_one_or_by_case(found.slice_spacing),
        )

    def build(self) -> ImageDataSet:
        """Reads the slices.

        Raises:
          UserError: files are missing, damaged or not alike, or there are too few cases for the splits.
        """
        found, rows = self._rows()
        arrays = {"images": found.images, "masks": found.masks, "cases": found.cases}
        if _one_or_by_case(found.slice_spacing) == "by case":
            arrays["slice_spacing"] = np.array(found.slice_spacing, np.float32)[found.cases]
        splits = {split: {name: array[own] for name, array in arrays.items()} for split, own in rows.items()}
        splits = {split: a if split == "train" else self.augment.middle(a) for split, a in splits.items()}
        return ImageDataSet(
            splits, batch_size=self.batch_size, schema=self.schema(), augment=self.augment, seed=self.seed
        )

    def _rows(self) -> tuple[MaskedCases, dict[str, np.ndarray]]:
        found = _read(self.source, files.stamp(self.source))
        train = np.setdiff1d(np.arange(len(found.names)), found.test)
        by_split = set_apart(
            len(train),
            validation=self.validation,
            test=0.0 if found.test else self.test,
            seed=self.split_seed,
            what="cases",
        )
        rows = {split: np.flatnonzero(np.isin(found.cases, train[own])) for split, own in by_split.items()}
        if found.test:
            rows["test"] = np.flatnonzero(np.isin(found.cases, found.test))
        if self.slices == "labelled":
            rows["train"] = rows["train"][(found.masks[rows["train"]] > 0).any((1, 2))]
            if not rows["train"].size:
                raise UserError("data.slices=labelled: no training slice has a class. Give data.slices=all.")
        return found, rows


@functools.lru_cache(maxsize=2)  # for schema() and build() of one config
def _read(source: NnUnetFolder, stamp: tuple[object, ...]) -> MaskedCases:
    return source.read()


@dataclasses.dataclass(frozen=True)
class _Described:
    """What dataset.json says."""

    path: pathlib.Path
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    ending: str
    training: int


def _described(path: pathlib.Path) -> _Described:
    file = path / "dataset.json"
    try:
        content: Any = json_reading.read(file)
    except (ValueError, OSError) as error:
        raise UserError(
            f"data.source.path: {path} has no dataset.json that can be read ({error}). Give the folder of a data set "
            "in the layout of nnU-Net v2, in which it lies beside imagesTr and labelsTr."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must be an object with channel_names, labels, file_ending and numTraining.")
    wanted = {"channel_names": dict, "labels": dict, "file_ending": str, "numTraining": int}
    for name, kind in wanted.items():
        if not isinstance(content.get(name), kind) or isinstance(content.get(name), bool):
            of_v1 = (
                " It looks like a file of nnU-Net v1: 'modality' is called channel_names now."
                if "modality" in content
                else ""
            )
            raise UserError(f"{file} needs {name!r}, {_KINDS[kind]}; got {content.get(name)!r}.{of_v1}")
    channels = content["channel_names"]
    if sorted(channels) != sorted(map(str, range(len(channels)))) or not channels:
        raise UserError(f'{file}: channel_names must be numbered from 0, {{"0": "CT", "1": ...}}; got {channels}.')
    ending = content["file_ending"]
    if ending not in ENDINGS:
        raise UserError(
            f"{file}: file_ending {ending!r} cannot be read. Convert the files to NIfTI (.nii.gz), or slices to .png; "
            f"read are {', '.join(ENDINGS)}."
        )
    return _Described(
        path,
        tuple(str(channels[str(n)]) for n in range(len(channels))),
        _classes(file, content),
        ending,
        content["numTraining"],
    )


_KINDS = {dict: "an object", str: "a text", int: "a number"}


def _classes(file: pathlib.Path, content: dict[str, Any]) -> tuple[str, ...]:
    labels: dict[str, Any] = content["labels"]
    if "regions_class_order" in content or any(isinstance(value, list) for value in labels.values()):
        raise UserError(
            f"{file}: labels are regions (several numbers a class), which are not supported. Give each class one "
            "number, and put regions together where you score them."
        )
    if "ignore" in labels:
        raise UserError(
            f"{file}: the label 'ignore' is not supported. Leave out the cases that have it, or give it a class."
        )
    numbers = list(labels.values())
    if all(isinstance(value, str) for value in numbers):
        raise UserError(f'{file}: labels must be {{"background": 0, "name": 1, ...}}, names first; got {labels}.')
    whole = all(type(value) is int for value in numbers)
    if not whole or sorted(numbers) != list(range(len(numbers))) or labels.get("background") != 0:
        raise UserError(
            f'{file}: labels must be numbered 0, 1, 2, ... with "background": 0; got {labels}. Write the masks anew '
            "with such numbers."
        )
    if len(labels) < 2:
        raise UserError(f"{file}: labels has the background alone; there must be something to find.")
    return tuple(sorted(labels, key=labels.__getitem__))


def _cases(told: _Described, folder: str) -> dict[str, list[pathlib.Path]]:
    """Files of the channels of each case in imagesTr, or of imagesTs if there are masks of them."""
    images, labels = told.path / f"images{folder}", told.path / f"labels{folder}"
    if folder == "Ts" and not labels.is_dir():
        return {}
    found: dict[str, dict[int, pathlib.Path]] = {}
    for path in sorted(images.iterdir()) if images.is_dir() else ():
        if path.name.startswith("."):
            continue
        name = path.name if path.is_dir() else path.name.removesuffix(told.ending)
        match = re.fullmatch(r"(.+)_(\d{4})", name)
        if match is None or not (path.is_dir() or path.name.endswith(told.ending)):
            raise UserError(
                f"{path} is not called ID_0000{told.ending}, as pictures of channel 0 are (file_ending and "
                "channel_names of dataset.json). Rename or remove it."
            )
        if int(match[2]) >= len(told.channels):
            raise UserError(
                f"{path} is of channel {int(match[2])}, and dataset.json names {len(told.channels)} "
                f"({', '.join(told.channels)}). Mend channel_names, or remove it."
            )
        found.setdefault(match[1], {})[int(match[2])] = path
    colours = len(told.channels) == 3 and told.ending not in volumes.NIFTI
    for case, by_channel in found.items():
        missing = [n for n in range(len(told.channels)) if n not in by_channel]
        if missing and not (colours and list(by_channel) == [0]):
            raise UserError(
                f"{images / f'{case}_{missing[0]:04d}{told.ending}'} is missing: channel {missing[0]} "
                f"({told.channels[missing[0]]}) of case {case}. Add it, or remove the case."
            )
    for path in sorted(labels.glob(f"*{told.ending}")):
        if not path.name.startswith(".") and path.name.removesuffix(told.ending) not in found:
            raise UserError(
                f"{path} is the mask of no case: there is no {images.name}/{path.name.removesuffix(told.ending)}_0000"
                f"{told.ending}. Add the pictures, or remove the mask."
            )
    if folder == "Tr" and len(found) != told.training:
        raise UserError(
            f"{told.path}: dataset.json says numTraining={told.training}, and imagesTr has {len(found)} cases. Copy "
            "the rest, or mend the number."
        )
    if not found:
        raise UserError(
            f"{images} has no pictures ID_0000{told.ending}. Put them there, and their masks into {labels}."
        )
    return {case: [by_channel[n] for n in sorted(by_channel)] for case, by_channel in found.items()}


def _alike(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a == b or (a is not None and b is not None and bool(np.allclose(a, b, rtol=1e-3)))


def _check_same_place(a: volumes.Volume, b: volumes.Volume, what: str) -> None:
    """Refuses volumes of one shape whose corners lie more than a tenth of a voxel apart."""
    apart = np.linalg.norm(a.corners() - b.corners(), axis=1).max()
    if apart > 0.1 * min(b.spacing):
        raise UserError(
            f"{what} lie elsewhere in the scanner: their corners are up to {apart:.3g} mm apart. Write both on one "
            "grid; where they were written on one, give the mask the affine of the picture."
        )


def _one_or_by_case(spacing: tuple[float, ...] | None) -> float | Literal["by case"] | None:
    """See `ImageSchema.slice_spacing`."""
    if spacing is None:
        return None
    return spacing[0] if np.allclose(spacing, spacing[0], rtol=1e-3, atol=0) else "by case"


def _millimetres(spacing: tuple[float, float] | None) -> str:
    return "unknown size" if spacing is None else f"{spacing[0]:.4g} x {spacing[1]:.4g} mm"


def _sized(array: np.ndarray) -> str:
    return f"{array.shape[0]} slice(s) of {array.shape[1]} x {array.shape[2]}"
