"""RECIST crosses: the longest diameter of a lesion and the longest one perpendicular to it, in three forms.

    crosses(instances)        from masks, numbers of objects [H, W]
    DeepLesion(path=...)      from radiologists' marks in DL_info.csv, with the slices of Images_png
    ordered(points)           from four points in any order

A cross is float[4, 2]: x and y of the ends of the long diameter, then of the short one, in pixels; whole numbers are
the middles of pixels, and y grows downwards. In arrays of batches it is called "ends", NaN where there is no object.

`NucleiCrosses` has those of the bundled nuclei, for trying detectors without any download.
"""

import csv
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from scalejax.data.arrays import Arrays
from scalejax.data.images.augment import Augment
from scalejax.data.images.crosses import check_crosses
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.files import read_picture
from scalejax.data.images.nuclei import NucleiTiles
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError, check_at_least, check_one_of

Unsound = Literal["refuse", "drop"]
PADDING = 5.0
"""Pixels around the marks that belong to a box of DeepLesion."""


def cross(mask: np.ndarray) -> np.ndarray:
    """The cross of one object, bool[H, W] with a pixel at least: float64[4, 2].

    The long diameter is the longest chord of the convex hull, whose corners are the middles of the outer sides of
    pixels; the short one is the hull's longest chord perpendicular to it, which the long one always meets.
    """
    rows, columns = np.nonzero(mask)
    return _cross_of_pixels(columns, rows)


def _cross_of_pixels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    hull = _hull(_outline(x, y))
    away = np.square(hull[:, None] - hull[None]).sum(-1)
    first, second = np.unravel_index(away.argmax(), away.shape)
    a, b = hull[first], hull[second]
    along = (b - a) / np.linalg.norm(b - a)
    across = np.array([-along[1], along[0]])
    # Over s, the place along the long diameter, the hull lies between two chains, t(s) below and above: their distance
    # is concave and linear between corners, so that it is largest at one.
    s, t = (hull - a) @ along, (hull - a) @ across
    chains = []
    for side in (1, -1):
        chain = np.flatnonzero((side * t >= 0) | (np.arange(len(s)) == first) | (np.arange(len(s)) == second))
        chain = chain[np.argsort(s[chain], kind="stable")]
        chains.append(np.interp(s, s[chain], t[chain]))
    widest = (chains[0] - chains[1]).argmax()
    foot = a + s[widest] * along
    return np.stack([a, b, foot + chains[0][widest] * across, foot + chains[1][widest] * across])


def _outline(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Middles of the outermost sides of each row and column of pixels: float64[n, 2]."""
    points = []
    for of, along, swap in ((y, x, False), (x, y, True)):
        lines, inverse = np.unique(of, return_inverse=True)
        low, high = np.full(len(lines), np.inf), np.full(len(lines), -np.inf)
        np.minimum.at(low, inverse, along)
        np.maximum.at(high, inverse, along)
        for edge in (low - 0.5, high + 0.5):
            points.append(np.stack([lines, edge] if swap else [edge, lines], -1))
    return np.concatenate(points)


def _hull(points: np.ndarray) -> np.ndarray:
    """The corners of the convex hull, by Andrew's monotone chain."""
    ordered_ = sorted(set(map(tuple, points.tolist())))

    def chain(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        kept: list[tuple[float, float]] = []
        for x, y in points:
            while len(kept) > 1:
                (ax, ay), (bx, by) = kept[-2:]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                kept.pop()
            kept.append((x, y))
        return kept[:-1]

    return np.array(chain(ordered_) + chain(ordered_[::-1]))


def crosses(instances: np.ndarray, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The crosses of all objects of a picture.

    Args:
      instances: integers[H, W], numbers of objects; 0 = none.
      least: Pixels that an object has at least; smaller ones are left out.
    Returns:
      int64[N] numbers of the objects, rising, and float64[N, 4, 2].
    """
    rows, columns = np.nonzero(instances)
    numbers = instances[rows, columns].astype(np.int64)
    order = np.argsort(numbers, kind="stable")
    names, starts = np.unique(numbers[order], return_index=True)
    found: list[np.ndarray] = []
    kept: list[int] = []
    for name, start, behind in zip(names.tolist(), starts, [*starts[1:], len(order)], strict=False):
        pixels = order[start:behind]
        if len(pixels) >= least:
            kept.append(name)
            found.append(_cross_of_pixels(columns[pixels], rows[pixels]))
    return np.array(kept, np.int64), np.array(found).reshape(-1, 4, 2)


def ordered(points: np.ndarray) -> np.ndarray:
    """Crosses of four points in any order, float[..., 4, 2]: paired so that the diameters come nearest to crossing at
    right angles, the longer one first.

    Of the three ways to pair them it is the one whose lengths have the largest product times the sine between them: of
    four corners of a convex shape that is the pair of diagonals.
    """
    points = np.asarray(points, np.float64)
    ways = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]])
    paired = points[..., ways, :]  # ... 3 4 2
    u, v = paired[..., 1, :] - paired[..., 0, :], paired[..., 3, :] - paired[..., 2, :]
    best = abs(u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]).argmax(-1)
    found = np.take_along_axis(paired, best[..., None, None, None], axis=-3)[..., 0, :, :]
    longer = np.linalg.norm(found[..., 1, :] - found[..., 0, :], axis=-1)
    shorter = np.linalg.norm(found[..., 3, :] - found[..., 2, :], axis=-1)
    return np.where((longer >= shorter)[..., None, None], found, found[..., [2, 3, 0, 1], :])


def lengths(ends: np.ndarray) -> np.ndarray:
    """Pixels of the diameters of crosses: float[..., 4, 2] to float[..., 2], the long one first."""
    return np.linalg.norm(ends[..., ::2, :] - ends[..., 1::2, :], axis=-1)


def filled(found: list[np.ndarray], objects: int, field: str) -> np.ndarray:
    """Crosses of each picture, float[n, 4, 2], as float32[N, objects, 4, 2] with NaN where there is no object.

    Raises:
      UserError: a picture has more; names the field.
    """
    most = max((len(one) for one in found), default=0)
    if most > objects:
        raise UserError(f"{field}={objects}: a picture has {most} objects. Set {field} to {most} or more.")
    rows = np.full((len(found), objects, 4, 2), np.nan, np.float32)
    for row, one in zip(rows, found, strict=True):
        row[: len(one)] = one
    return rows


@dataclasses.dataclass(frozen=True)
class Marks:
    """Rows of DL_info.csv.

    Attributes:
      files: Path of each row's slice below Images_png.
      ends: float64[N, 4, 2], the cross.
      boxes: float64[N, 4], left, top, right and bottom: of the marks, and 5 pixels on each side.
      lengths: float64[N, 2], pixels of the diameters, as the file has them.
      windows: float64[N, 2], lowest and highest Hounsfield unit that the radiologist saw.
      spacing: float64[N, 3], mm: across, down, and between slices.
      split: "train", "validation" or "test" of each row: the official one, by patient.
    """

    files: tuple[str, ...]
    ends: np.ndarray
    boxes: np.ndarray
    lengths: np.ndarray
    windows: np.ndarray
    spacing: np.ndarray
    split: tuple[str, ...]


_SPLITS = {"1": "train", "2": "validation", "3": "test"}
_COLUMNS = {
    "Measurement_coordinates": 8,
    "Bounding_boxes": 4,
    "Lesion_diameters_Pixel_": 2,
    "DICOM_windows": 2,
    "Spacing_mm_px_": 3,
    "Image_size": 2,
}


def read_marks(path: pathlib.Path, *, unsound: Unsound = "refuse") -> Marks:
    """Reads DL_info.csv of DeepLesion.

    Args:
      path: The file.
      unsound: Of rows whose cross is none, or that are "Possibly_noisy": "refuse" (the noisy ones stay), or "drop".

    Raises:
      UserError: columns are missing, a number cannot be read, or a cross is none; names the line.
    """
    wanted = ("File_name", "Train_Val_Test", *_COLUMNS)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark before the first name
            reader = csv.DictReader(file)
            missing = [name for name in wanted if name not in (reader.fieldnames or ())]
            rows = [] if missing else list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path} cannot be read as a table in UTF-8 ({error}). Give the folder that has DL_info.csv of DeepLesion."
        ) from error
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}. Give DL_info.csv as DeepLesion has it.")
    numbers = {name: np.zeros((len(rows), count)) for name, count in _COLUMNS.items()}
    files, splits, kept = [], [], np.ones(len(rows), bool)
    for n, row in enumerate(rows):
        for name, count in _COLUMNS.items():
            try:
                numbers[name][n] = [float(part) for part in row[name].split(",")]
                if not np.isfinite(numbers[name][n]).all():
                    raise ValueError("NaN and infinities are no places")
            except (ValueError, AttributeError) as error:
                raise UserError(
                    f"{path}, line {n + 2}: {name} must be {count} numbers, parted by commas; got {row[name]!r}."
                ) from error
        split = (row["Train_Val_Test"] or "").strip()
        if split not in _SPLITS:
            raise UserError(f"{path}, line {n + 2}: Train_Val_Test must be 1, 2 or 3; got {split!r}.")
        name = re.fullmatch(r"(\w[\w.-]*)_(\d+\.\w+)", row["File_name"] or "")
        if name is None:
            raise UserError(
                f"{path}, line {n + 2}: File_name must be a series and the number of a slice, such as "
                f"000001_01_01_109.png; got {row['File_name']!r}."
            )
        files.append(f"{name[1]}/{name[2]}")
        splits.append(_SPLITS[split])
        ends = numbers["Measurement_coordinates"][n].reshape(1, 4, 2)
        width, height = numbers["Image_size"][n].astype(int).tolist()
        try:
            check_crosses(ends, height, width, f"{path}, line {n + 2}")
        except UserError as error:
            if unsound == "refuse":
                raise UserError(f'{error} Or set data.unsound="drop".') from error
            kept[n] = False
        if unsound == "drop" and (row.get("Possibly_noisy") or "0").strip() == "1":
            kept[n] = False
    which = np.flatnonzero(kept).tolist()
    return Marks(
        files=tuple(files[n] for n in which),
        ends=numbers["Measurement_coordinates"][kept].reshape(-1, 4, 2),
        boxes=numbers["Bounding_boxes"][kept],
        lengths=numbers["Lesion_diameters_Pixel_"][kept],
        windows=numbers["DICOM_windows"][kept],
        spacing=numbers["Spacing_mm_px_"][kept],
        split=tuple(splits[n] for n in which),
    )


def read_slice(path: pathlib.Path, window: tuple[float, float]) -> np.ndarray:
    """A slice of Images_png, 16 bits with 32768 added to Hounsfield units, as uint8[H, W]: the window from 0 to 255.

    Raises:
      UserError: it cannot be read, or has no 16 bits.
    """
    stored = read_picture(path)
    if stored.ndim != 2 or stored.dtype.kind not in "iu" or stored.dtype.itemsize < 2:
        raise UserError(
            f"{path} must be grey with 16 bits, as DeepLesion stores it; got {stored.dtype}{list(stored.shape)}."
        )
    low, high = window
    return np.rint(np.clip((stored.astype(np.float64) - 32768 - low) / (high - low), 0, 1) * 255).astype(np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepLesion:
    """DeepLesion (NIH; Yan et al., 2018) as it is unpacked: DL_info.csv, and Images_png with a folder a series.

    All slices are held in memory, a byte a pixel and channel: the 32,120 key slices of 512 x 512 are 8.4 GB, and three
    times as much with their neighbours.

    Attributes:
      path: The folder.
      batch_size: Global.
      window: Lowest and highest Hounsfield unit that is kept.
      slices: 1, or 3: the neighbours above and below as channels; where one is missing the key slice stands for it.
      size: Pixels of a side; slices of another size are refused.
      objects: Room for lesions of a slice.
      most: Slices of each split that are read; None = all.
      unsound: See `read_marks`.
      augment: Of training batches.
      seed: Of the order and of the augmentations.
    """

    path: str = "DeepLesion"
    batch_size: int = 16
    window: tuple[float, float] = (-175.0, 275.0)
    slices: int = 3
    size: int = 512
    objects: int = 32
    most: int | None = None
    unsound: Unsound = "refuse"
    augment: Augment = Augment()
    seed: int = 0

    def schema(self) -> ImageSchema:
        """Of slices in a window. Mean and deviation are those of its middle and of a quarter of it."""
        check_one_of("data.unsound", self.unsound, ("refuse", "drop"))
        if self.slices not in (1, 3):
            raise UserError(f"data.slices must be 1 or 3; got {self.slices}.")
        if not self.window[0] < self.window[1]:
            raise UserError(f"data.window must be a lowest and a highest Hounsfield unit; got {self.window}.")
        self.augment.check_whole(self.size, self.size)
        return ImageSchema(
            height=self.size,
            width=self.size,
            channels=self.slices,
            mean=(127.5,) * self.slices,
            std=(64.0,) * self.slices,
            classes=("background", "lesion"),
            window=self.window,
            batch_size=self.batch_size,
        )

    def build(self) -> ImageDataSet:
        """Reads marks and slices.

        Raises:
          UserError: as `read_marks`; a slice is missing, of another size, or cannot be read.
        """
        schema, root = self.schema(), pathlib.Path(self.path)
        marks = read_marks(root / "DL_info.csv", unsound=self.unsound)
        splits: dict[str, Arrays] = {}
        for split in _SPLITS.values():
            rows: dict[str, list[int]] = {}
            for n, (file, of) in enumerate(zip(marks.files, marks.split, strict=True)):
                if of == split:
                    rows.setdefault(file, []).append(n)
            chosen = dict(itertools.islice(rows.items(), self.most))
            if not chosen:
                continue
            images = np.empty((len(chosen), *schema.shape), np.uint8)
            for image, file in zip(images, chosen, strict=True):
                image[:] = self._slices(root / "Images_png" / file)
            crosses_of = [marks.ends[which] for which in chosen.values()]
            splits[split] = {"images": images, "ends": filled(crosses_of, self.objects, "data.objects")}
        return ImageDataSet(splits, batch_size=self.batch_size, schema=schema, augment=self.augment, seed=self.seed)

    def _slices(self, key: pathlib.Path) -> np.ndarray:
        if not key.exists():
            raise UserError(f"{key} is not there. Unpack Images_png of DeepLesion beside DL_info.csv.")
        found = []
        for step in (0,) if self.slices == 1 else (-1, 0, 1):
            beside = key.with_name(f"{int(key.stem) + step:03d}{key.suffix}")
            found.append(read_slice(beside if beside.exists() else key, self.window))
        if any(one.shape != (self.size, self.size) for one in found):
            raise UserError(
                f"{key} is {found[0].shape[0]} x {found[0].shape[1]} pixels, and data.size={self.size}. Leave such "
                "slices out, or scale them and their marks first."
            )
        return np.stack(found, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NucleiCrosses(NucleiTiles):
    """`NucleiTiles` with "ends": the crosses of what a tile shows of each nucleus.

    Attributes:
      objects: Room for nuclei of a tile.
      least: Pixels that a piece of a nucleus has at least, which the edge of a tile cuts; smaller ones are left out.
    """

    objects: int = 32
    least: int = 25

    def build(self) -> "CrossDataSet":
        """Cuts the tiles."""
        check_at_least("data.least", self.least, 1)
        tiles = super().build()
        return CrossDataSet(
            tiles.splits,
            batch_size=self.batch_size,
            schema=tiles.schema,
            augment=self.augment,
            seed=self.seed,
            objects=self.objects,
            least=self.least,
        )


class CrossDataSet(ImageDataSet):
    """An `ImageDataSet` with "instances" whose batches have "ends": crosses are measured after the augmentations, so
    that they are those of what is seen, however it was cut and turned.

    Args:
      splits: See `ImageDataSet`.
      batch_size: Global.
      schema: Of the pictures.
      augment: Of training batches.
      seed: Of the order and of the augmentations.
      objects: Room for objects of a picture.
      least: Pixels that an object has at least.
    """

    def __init__(
        self,
        splits: Mapping[str, Mapping[str, np.ndarray]],
        *,
        batch_size: int,
        schema: ImageSchema,
        augment: Augment,
        seed: int,
        objects: int,
        least: int,
    ) -> None:
        super().__init__(splits, batch_size=batch_size, schema=schema, augment=augment, seed=seed)
        self.objects, self.least = objects, least

    def fingerprint(self) -> str:
        """Of all arrays, the order, the augmentations, and which objects count."""
        return f"{super().fingerprint()} {self.objects} {self.least}"

    def seen(self, positions: np.ndarray, *, channel: int) -> Arrays:
        """Examples of the training stream as a channel of augmentations shows them, with their crosses."""
        return self._measured(super().seen(positions, channel=channel))

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[Arrays]:
        """One pass over a split, with crosses; see `ArrayDataSet.eval_batches`."""
        for batch in super().eval_batches(split, process_index=process_index, process_count=process_count):
            yield self._measured(batch)

    def _measured(self, batch: Arrays) -> Arrays:
        found = [crosses(one, self.least)[1] for one in batch["instances"]]
        return batch | {"ends": filled(found, self.objects, "data.objects")}
