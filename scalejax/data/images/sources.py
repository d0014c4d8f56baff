"""Images with classes: the bundled Fashion-MNIST, scikit-learn's digits, IDX files, a folder of one's own.

A source is a frozen dataclass of plain values. Its `parts()` gives images of any size by the splits that it has, for
`LabelledImages`. The `read()` of some gives `GreyImages` of 28 x 28 pixels: an image of another size is cut to its
middle square and scaled by area, so that each pixel becomes the mean of what it covers.
"""

import collections
import dataclasses
import importlib
import importlib.resources
import pathlib
import zlib
from collections.abc import Collection, Iterator
from typing import ClassVar

import numpy as np

from scalejax.data import packed_files
from scalejax.data.images import files
from scalejax.errors import UserError

SIDE = 28
"""Pixels of a side of every image."""


@dataclasses.dataclass(frozen=True)
class GreyImages:
    """Images and their classes.

    Attributes:
      pixels: uint8[N, 28, 28]; 0 is black.
      labels: int64[N], numbers of classes.
      names: Of the classes.
      remarks: What a user should know of how they were read.
    """

    pixels: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.labels.size


@dataclasses.dataclass(frozen=True)
class LabelledParts:
    """Images and their classes, by the splits that a source has of its own: "train", maybe "validation" and "test".

    Attributes:
      images: uint8 or float32 [N, H, W, C] of each split.
      labels: int64[N] of each.
      names: Of the classes.
      remarks: What a user should know of how they were read.
    """

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    names: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FashionMnist:
    """5,000 pictures of clothes, 500 a class, that ship with the package (`bundled/README.md`)."""

    names: ClassVar[tuple[str, ...]] = (
        *("t-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )

    def read(self) -> GreyImages:
        """The 4,000 of the published training part, and then the 1,000 of its test part."""
        arrays = bundled_arrays("fashion_mnist_5000.npz")
        pixels = np.concatenate([arrays["train_images"], arrays["test_images"]])
        labels = np.concatenate([arrays["train_labels"], arrays["test_labels"]]).astype(np.int64)
        return GreyImages(pixels, labels, self.names)

    def parts(self, fit: files.Fit) -> LabelledParts:
        """The 4,000 for training and the 1,000 of the test."""
        return _parts_of(bundled_arrays("fashion_mnist_5000.npz"), fit, "FashionMnist()", self.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """scikit-learn's 1,797 digits of 8 x 8: each pixel becomes 3 x 3, with a black edge of 2 around them."""

    names: ClassVar[tuple[str, ...]] = (
        *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    )

    def read(self) -> GreyImages:
        """All of them.

        Raises:
          UserError: scikit-learn is not installed.
        """
        try:
            found = importlib.import_module("sklearn.datasets").load_digits()
        except ModuleNotFoundError as error:
            raise UserError(
                "data.images=Digits() needs the library scikit-learn, which is not installed: pip install "
                "scikit-learn. FashionMnist() needs none."
            ) from error
        grey = np.rint(found.images * (255 / 16)).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
        return GreyImages(np.pad(grey, ((0, 0), (2, 2), (2, 2))), found.target.astype(np.int64), self.names)

    def parts(self, fit: files.Fit) -> LabelledParts:
        """All of them for training, from which the other splits are taken."""
        found = self.read()
        return _parts_of({"images": found.pixels, "labels": found.labels}, fit, "Digits()", self.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdxFolder:
    """The files of MNIST and of what has its form: {train,t10k}-{images-idx3,labels-idx1}-ubyte, each maybe with .gz.

    Attributes:
      path: Their folder; that of Debian's package dataset-fashion-mnist (70,000 pictures) if nothing else is said.
      names: Of the classes, by number; () = their numbers.
    """

    path: str = "/usr/share/datasets/fashion-mnist"
    names: tuple[str, ...] = ()

    def parts(self, fit: files.Fit) -> LabelledParts:
        """The training and the test part.

        Raises:
          UserError: a file is missing, damaged, or does not go with the others.
        """
        arrays = {
            f"{split}_{kind}": read_idx(self._file(f"{prefix}-{kind}-idx{rank}-ubyte"), rank)
            for split, prefix in (("train", "train"), ("test", "t10k"))
            for kind, rank in (("images", 3), ("labels", 1))
        }
        return _parts_of(arrays, fit, self.path, self.names)

    def _file(self, name: str) -> pathlib.Path:
        for path in (pathlib.Path(self.path) / name, pathlib.Path(self.path) / f"{name}.gz"):
            if path.is_file():
                return path
        raise UserError(
            f"data.source.path: {self.path} has no file {name} or {name}.gz. Give the folder of the four files of "
            "MNIST's form; Debian's package dataset-fashion-mnist puts such into /usr/share/datasets/fashion-mnist."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Images of the user's: files in a folder for each class, whose name is the class and the caption, or one npz.

    `parts()` takes the formats of `files.FORMATS`, also below folders train/, validation/ (or val/) and test/, which
    then are the splits; and arrays of an npz that are called train_images, train_labels, test_images and so on.
    `read()` takes *.png (matplotlib reads them) and averages colours. Other files are left out, and a remark counts
    them; names that begin with a dot are no pictures.

    Attributes:
      path: A folder of folders of files of any size; or an .npz with images uint8[N, H, W] (or [N, H, W, C]) and labels
        integers[N].
      names: Of the classes of an npz, by number; () = their numbers.
    """

    path: str = "images"
    names: tuple[str, ...] = ()

    def read(self) -> GreyImages:
        """All of them, by class and name of file.

        Raises:
          UserError: there are none, or a file cannot be read.
        """
        path = pathlib.Path(self.path)
        return self._npz(path) if path.suffix == ".npz" else self._folders(path)

    def parts(self, fit: files.Fit) -> LabelledParts:
        """All of them, by class and name of file.

        Raises:
          UserError: a class has none, there is one class alone, or files cannot be read or are not alike.
        """
        path = pathlib.Path(self.path)
        if path.suffix == ".npz":
            return _parts_of(_read_npz(path, "data.source.path"), fit, path, self.names)
        splits = _class_folders(path)
        names: tuple[str, ...] = tuple(sorted(splits["train"]))
        for split, folders in splits.items():
            if beyond := sorted(set(folders) - set(names)):
                raise UserError(
                    f"data.source.path: {path} has the class {beyond[0]!r} in {split} and not in train, which has "
                    f"{', '.join(names)}. Give each class a folder in train."
                )
        if len(names) < 2:
            raise UserError(
                f"data.source.path: {path} has the class {''.join(names)!r} alone, and there is nothing to tell it "
                "from. Give a folder for each of two or more classes."
            )
        images = fit.stack(
            (files.read_picture(file), file)
            for folders in splits.values()
            for name in sorted(folders)
            for file in folders[name]
        )
        taken = [file for folders in splits.values() for those in folders.values() for file in those]
        found = LabelledParts({}, {}, names, _left_out(path, taken, files.SUFFIXES))
        start = 0
        for split, folders in splits.items():
            labels = [names.index(name) for name in sorted(folders) for _ in folders[name]]
            found.images[split] = images[start : start + len(labels)]
            found.labels[split] = np.array(labels, np.int64)
            start += len(labels)
        return found

    def _npz(self, path: pathlib.Path) -> GreyImages:
        arrays = _read_npz(path, "data.images.path")
        images, labels = arrays.get("images", np.zeros(0)), arrays.get("labels", np.zeros(0))
        if images.dtype != np.uint8 or images.ndim != 3 or labels.dtype.kind not in "iu" or not images.size:
            raise UserError(
                f"data.images.path: {path} must have images uint8[N, H, W] and labels integers[N]; got images "
                f"{images.dtype}{list(images.shape)} and labels {labels.dtype}{list(labels.shape)}."
            )
        classes = max(len(self.names), int(labels.max(initial=0)) + 1)
        if labels.shape != images.shape[:1] or labels.min() < 0 or (self.names and classes > len(self.names)):
            raise UserError(
                f"data.images.path: {path} has {len(images)} images and {labels.size} labels from {labels.min()} to "
                f"{labels.max()}. Give each image one, from 0 to below the {len(self.names) or classes} classes."
            )
        names = self.names or tuple(map(str, range(classes)))
        return GreyImages(np.stack([scaled(image) for image in images]), labels.astype(np.int64), names)

    def _folders(self, path: pathlib.Path) -> GreyImages:
        found = sorted(file for folder in _folders_in(path) for file in _pictures_in(folder, (".png",)))
        if not found:
            raise UserError(
                f"data.images.path: {path} has no folder with *.png files in it. Give a folder that has one for each "
                "class, named as the captions are to be, or an .npz."
            )
        names = tuple(sorted({file.parent.name for file in found}))
        labels = [names.index(file.parent.name) for file in found]
        pixels = np.stack([_png(file) for file in found])
        return GreyImages(pixels, np.array(labels, np.int64), names, _left_out(path, found, (".png",)))


AnyImages = FashionMnist | Digits | ImageFolder
"""What gives `GreyImages`."""
AnyLabelled = FashionMnist | Digits | IdxFolder | ImageFolder
"""What gives `LabelledParts`."""

_SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


def bundled_arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of an npz that ships with the package."""
    bundled = importlib.resources.files("scalejax.data") / "bundled" / name
    with importlib.resources.as_file(bundled) as path:
        return packed_files.read_npz(path)


def read_idx(path: pathlib.Path, rank: int) -> np.ndarray:
    """uint8[...] of `rank` axes from a file of MNIST's form: 0, 0, 8, rank, the sizes as big-endian int32, the bytes.

    Raises:
      UserError: it is none, or not whole.
    """
    try:
        with packed_files.open_unpacked(path) as file:
            head = file.read(4 + 4 * rank)
            sizes = np.frombuffer(head[4:], ">u4").astype(np.int64).tolist()
            if head[:4] != bytes((0, 0, 8, rank)) or len(sizes) != rank:
                raise ValueError(f"it begins with {head[:4].hex(' ')}, not with 00 00 08 {rank:02x} and {rank} sizes")
            wanted = int(np.prod(sizes))
            packed_files.check_ratio(wanted, path.stat().st_size)
            body = file.read(wanted + 1)
            if len(body) != wanted:
                more = "more" if len(body) > wanted else f"{len(body):,}"
                raise ValueError(f"{' x '.join(map(str, sizes))} bytes should follow the sizes, and {more} do")
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no whole IDX file of bytes ({error}). Get it again.") from error
    return np.frombuffer(body, np.uint8).reshape(sizes)


def _read_npz(path: pathlib.Path, argument: str) -> dict[str, np.ndarray]:
    try:
        return packed_files.read_npz(path)
    except (ValueError, OSError) as error:
        raise UserError(
            f"{argument}: {path} is no complete npz of plain numbers ({error}). Write it again with "
            "numpy.savez(path, images=..., labels=...)."
        ) from error


def _parts_of(arrays: dict[str, np.ndarray], fit: files.Fit, path: object, names: tuple[str, ...]) -> LabelledParts:
    """Arrays images and labels, or train_images, train_labels, test_images, ..."""
    if "images" in arrays:
        arrays = {f"train_{name}": array for name, array in arrays.items()}
    splits = [s for s in ("train", "validation", "test") if s == "train" or f"{s}_images" in arrays]
    largest = 0
    for split in splits:
        images, labels = (arrays.get(f"{split}_{name}", np.zeros(0)) for name in ("images", "labels"))
        if (
            images.ndim not in (3, 4)
            or labels.dtype.kind not in "iu"
            or not images.size
            or images.dtype.kind not in "iuf"
        ):
            raise UserError(
                f"data.source.path: {path} must have images, numbers [N, H, W] or [N, H, W, C], and labels, integers "
                f"[N] (or train_images, train_labels, test_images, ...); got {images.dtype}{list(images.shape)} and "
                f"{labels.dtype}{list(labels.shape)} for {split}."
            )
        if labels.shape != images.shape[:1] or labels.min() < 0 or (names and labels.max() >= len(names)):
            raise UserError(
                f"data.source.path: {path} has {len(images)} images and {labels.size} labels from {labels.min()} to "
                f"{labels.max()} for {split}. Give each image one, from 0 to below the number of classes"
                f"{f' ({len(names)})' if names else ''}."
            )
        largest = max(largest, int(labels.max()))
    if len(np.unique(arrays["train_labels"])) < 2:
        raise UserError(f"data.source.path: {path} has one class alone to learn from. Give labels of two or more.")
    first = arrays["train_images"].dtype
    for split in splits:
        files.check_bits(arrays[f"{split}_images"], f"{path}: {split}", first, "train")
    images = {split: fit.all(arrays[f"{split}_images"], path) for split in splits}
    height, width, channels = images["train"].shape[1:]
    for split, those in images.items():
        if those.shape[1:] != (height, width, channels):
            raise UserError(
                f"data.source.path: {path} has pictures {list(those.shape[1:])} (height, width, channels) in {split} "
                f"and {[height, width, channels]} in train. Make all alike: --set data.size={height},{width} and --set "
                "data.channels=1 or 3."
            )
    return LabelledParts(
        images,
        {split: arrays[f"{split}_labels"].astype(np.int64) for split in splits},
        names or tuple(map(str, range(largest + 1))),
    )


def _class_folders(path: pathlib.Path) -> dict[str, dict[str, list[pathlib.Path]]]:
    """Files of each class of each split; all are "train" where folders of splits are missing."""
    folders = list(_folders_in(path))
    by_split = {_SPLITS.get(folder.name, ""): folder for folder in folders}
    roots = by_split if "train" in by_split and "" not in by_split else {"train": path}
    if roots is by_split and len(folders) > len(roots):
        raise UserError(
            f"data.source.path: {path} has val and validation, which are one split. Put the pictures of both into one."
        )
    found: dict[str, dict[str, list[pathlib.Path]]] = {}
    for split in ("train", "validation", "test"):
        if split not in roots:
            continue
        found[split] = {folder.name: _pictures_in(folder, files.SUFFIXES) for folder in _folders_in(roots[split])}
        for name, pictures in found[split].items():
            if not pictures:
                raise UserError(
                    f"data.source.path: {roots[split] / name} has no picture ({', '.join(files.SUFFIXES)}). Remove the "
                    "folder, or put the pictures of that class into it."
                )
        if not found[split]:
            raise UserError(
                f"data.source.path: {roots[split]} has no folders. Give a folder that has one for each class, named as "
                "the class, or an .npz."
            )
    return found


def _folders_in(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if path.is_dir():
        yield from sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _pictures_in(folder: pathlib.Path, suffixes: Collection[str]) -> list[pathlib.Path]:
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in suffixes and not f.name.startswith("."))


def _left_out(path: pathlib.Path, taken: Collection[pathlib.Path], suffixes: Collection[str]) -> tuple[str, ...]:
    """A remark on the files below a folder that are none of those that were read; names with a dot before do not count.

    Args:
      path: The folder.
      taken: What was read.
      suffixes: Of what is read, directly in the folder of a class.
    """
    known = set(taken)
    others = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file() and file not in known]
    others = [file for file in others if not any(part.startswith(".") for part in file.parts)]
    if not others:
        return ()
    endings = collections.Counter(file.suffix.lower() or "no ending" for file in others).most_common()
    counted = ", ".join(f"{count} of {ending}" for ending, count in endings)
    return (
        f"{path}: {len(others)} file(s) were left out ({counted}), such as {', '.join(map(str, others[:3]))}. Read are "
        f"{', '.join(suffixes)} directly in the folder of a class.",
    )


def scaled(image: np.ndarray) -> np.ndarray:
    """The middle square of an image, number[H, W] from 0 to 255, scaled by area to uint8[28, 28]."""
    side = min(image.shape)
    top, left = ((size - side) // 2 for size in image.shape)
    square = image[top : top + side, left : left + side].astype(np.float64)
    if side == SIDE:
        return np.rint(square).astype(np.uint8)
    edges = np.arange(SIDE + 1) * (side / SIDE)
    pixel = np.arange(side)
    # covered[i, p]: how much of pixel p new pixel i covers, over its own width
    covered = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    covered = np.maximum(covered, 0) * (SIDE / side)
    return np.rint(covered @ square @ covered.T).astype(np.uint8)


def _png(file: pathlib.Path) -> np.ndarray:
    imread = importlib.import_module("matplotlib.image").imread
    try:
        read = imread(file)  # float32 from 0 to 1
    except Exception as error:  # the reader has several of its own, for damaged files and for far too large ones
        raise UserError(f"data.images.path: {file} is no PNG that can be read ({error}). Write it again.") from error
    colours = read if read.ndim == 2 else read[..., : 3 if read.shape[-1] > 2 else 1].mean(-1)
    return scaled(colours * 255.0)
