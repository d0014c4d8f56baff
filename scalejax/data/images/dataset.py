"""Data sets of pictures in memory, whose training batches are augmented."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from scalejax.data.arrays import ArrayDataSet, Arrays
from scalejax.data.images.augment import Augment
from scalejax.data.images.crosses import check_crosses
from scalejax.data.images.files import check_finite
from scalejax.data.images.schema import ImageSchema
from scalejax.data.reading import check_start, share
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Fields that training batches have besides their own, `PREFIX` before their names.

    Attributes:
      prefix: "other_" gives "other_images", ...
      channel: Which stream of augmentations: 0 is that of the batch itself.
      ahead: Batches further on in the training stream; -1 = the batch before. Before the first batch lies the last one
        of an epoch -1.
    """

    prefix: str
    channel: int
    ahead: int = 0


class ImageDataSet(ArrayDataSet):
    """Pictures and what belongs to them.

    Arrays have the names that `augment` knows: "images" [N, H, W, C], "masks" [N, H, W], "points" [N, objects, K, 2];
    others ("labels", "cases") are left as they are. What an example of the training stream looks like follows from the
    seed, its number in the stream and the channel alone: it is the same after a resume and for any number of processes.

    Args:
      splits: See `ArrayDataSet`.
      batch_size: Global.
      schema: Of the pictures, as batches have them; those of the training split are larger where `augment` cuts a
        window out of them.
      augment: Of training batches.
      seed: Of the order and of the augmentations.
      remarks: What is said of the pictures when a run begins.

    Raises:
      UserError: what a split gives has another shape or dtype than the schema says, pixels are no numbers, labels or
        masks have numbers that are no classes of it, points lie outside of their pictures or are there in part, or four
        ends are no cross.
    """

    schema: ImageSchema

    def __init__(
        self,
        splits: Mapping[str, Mapping[str, np.ndarray]],
        *,
        batch_size: int,
        schema: ImageSchema,
        augment: Augment,
        seed: int = 0,
        remarks: tuple[str, ...] = (),
    ) -> None:
        super().__init__(splits, batch_size=batch_size, seed=seed, schema=schema)
        self.augment, self.remarks = augment, remarks
        for split, arrays in self.splits.items():
            images = arrays.get("images", np.zeros(0))
            if images.ndim != 4:
                shapes = {name: list(array.shape) for name, array in arrays.items()}
                raise UserError(f"ImageDataSet: split {split!r} must have images [N, H, W, C]; it has {shapes}.")
            if split == "train" and images.shape[1:3] == schema.shape[:2]:
                augment.check_whole(*schema.shape[:2])
            size = augment.shown(*images.shape[1:3]) if split == "train" else images.shape[1:3]
            if (*size, *images.shape[3:]) != schema.shape or images.dtype != schema.dtype:
                raise UserError(
                    f"ImageDataSet: images of split {split!r} must be {schema.dtype}{list(schema.shape)}, as the "
                    f"schema says; got {images.dtype}{[*size, *images.shape[3:]]}. Give all splits one size, such as "
                    "`size=` of a config."
                )
            _check(arrays, schema, f"ImageDataSet: split {split!r}")

    def fingerprint(self) -> str:
        """Of all arrays, the order and the augmentations."""
        return f"{super().fingerprint()} {self.augment}"

    def train_batches(
        self, *, start_example: int, process_index: int = 0, process_count: int = 1, views: tuple[View, ...] = ()
    ) -> Iterator[Arrays]:
        """This process's contiguous slice of each global batch from a position of the stream, without end."""
        check_start(start_example)
        own = share(self.batch_size, process_index, process_count)
        while True:
            positions = start_example + process_index * own + np.arange(own)
            batch = self.seen(positions, channel=0)
            for view in views:
                other = self.seen(positions + view.ahead * self.batch_size, channel=view.channel)
                batch |= {view.prefix + name: array for name, array in other.items()}
            yield batch
            start_example += self.batch_size

    def seen(self, positions: np.ndarray, *, channel: int) -> Arrays:
        """Examples of the training stream, int64[M] positions, as a channel of augmentations shows them."""
        rows = self.rows_at(positions)
        arrays = {name: array[rows] for name, array in self.splits["train"].items()}
        return self.augment.apply(arrays, positions, seed=self.seed, channel=channel)


def _check(arrays: Arrays, schema: ImageSchema, what: str) -> None:
    shape = arrays["images"].shape[:3]
    check_finite(arrays["images"], f"{what}: images")
    for name in ("masks", "instances"):
        if name in arrays and arrays[name].shape != shape:
            raise UserError(
                f"{what} has {name} {list(arrays[name].shape)} for images {list(shape)}. Give each picture one of "
                "its size."
            )
    between = arrays.get("slice_spacing", np.zeros(1))
    if schema.slice_spacing == "by case" and not (between > 0).all():
        raise UserError(
            f"{what} must have the array slice_spacing, millimetres above 0 for each picture: by the schema it is "
            "by case. Add it, or give the schema the number that all cases have."
        )
    for name in ("labels", "masks"):
        if schema.classes and name in arrays and arrays[name].dtype.kind in "iu":
            outside = (arrays[name] < 0) | (arrays[name] >= len(schema.classes))
            if outside.any():
                raise UserError(
                    f"{what}: {name} of example {np.argwhere(outside)[0, 0]} has {arrays[name][outside][0]}, and the "
                    f"schema has the classes 0 to {len(schema.classes) - 1} ({', '.join(schema.classes)}). Number "
                    "classes from 0, or name all of them."
                )
    edges = np.array([shape[2], shape[1]]) - 0.5
    for name, counts in (("points", (4, 5)), ("ends", ())):
        if name in arrays:
            points = arrays[name]
            if points.ndim != 4 or points.shape[3] != 2 or (counts and points.shape[2] not in counts):
                raise UserError(
                    f"{what}: {name} must be [N, objects, {' or '.join(map(str, counts)) or 'K'}, 2], x and y of the "
                    f"points of each object; got {list(points.shape)}. Give one object an axis of 1."
                )
            gone = np.isnan(points)
            half = gone.any((2, 3)) & ~gone.all((2, 3))
            if half.any():
                example, number = np.argwhere(half)[0].tolist()
                raise UserError(
                    f"{what}: {name} of example {example}, object {number} are NaN in part "
                    f"({points[example, number].tolist()}). Give all of its points, or NaN alone for what is not there."
                )
            outside = ((arrays[name] < -0.5) | (arrays[name] > edges)).any(-1)  # NaN is not there
            if outside.any():
                raise UserError(
                    f"{what}: {name} of example {np.argwhere(outside)[0, 0]} has x, y = "
                    f"{', '.join(f'{v:g}' for v in arrays[name][outside][0])}, outside of a picture that is {shape[2]} "
                    f"wide and {shape[1]} high. Give pixels, x before y, and NaN for what is not there."
                )
    if "ends" in arrays and arrays["ends"].shape[2] == 4:
        check_crosses(arrays["ends"], shape[1], shape[2], f"{what}: ends of example {{}}, object {{}}")
