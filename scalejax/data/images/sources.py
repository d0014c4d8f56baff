"""Grey images of 28 x 28 pixels with classes: the bundled Fashion-MNIST, scikit-learn's digits, a folder of one's own.

A source is a frozen dataclass of plain values whose `read()` gives `GreyImages`. An image of another size is cut to its
middle square and scaled by area: each pixel becomes the mean of what it covers.
"""

import dataclasses
import importlib
import importlib.resources
import pathlib
from typing import ClassVar

import numpy as np

from scalejax.data import packed_files
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
    """

    pixels: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.labels.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class FashionMnist:
    """5,000 pictures of clothes, 500 a class, that ship with the package (`bundled/README.md`)."""

    names: ClassVar[tuple[str, ...]] = (
        *("t-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )

    def read(self) -> GreyImages:
        """The 4,000 of the published training part, and then the 1,000 of its test part."""
        bundled = importlib.resources.files("scalejax.data") / "bundled" / "fashion_mnist_5000.npz"
        with importlib.resources.as_file(bundled) as path:
            arrays = packed_files.read_npz(path)
        pixels = np.concatenate([arrays["train_images"], arrays["test_images"]])
        labels = np.concatenate([arrays["train_labels"], arrays["test_labels"]]).astype(np.int64)
        return GreyImages(pixels, labels, self.names)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Images of the user's: PNG files in a folder for each class, whose name is the caption, or one npz.

    Attributes:
      path: A folder of folders with *.png, of any size, colours being averaged (matplotlib reads them); or an .npz with
        images uint8[N, H, W] and labels integers[N].
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

    def _npz(self, path: pathlib.Path) -> GreyImages:
        try:
            arrays = packed_files.read_npz(path)
        except (ValueError, OSError) as error:
            raise UserError(
                f"data.images.path: {path} is no complete npz of plain numbers ({error}). Write it again with "
                "numpy.savez(path, images=..., labels=...)."
            ) from error
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
        files = sorted(path.glob("*/*.png"))
        if not files:
            raise UserError(
                f"data.images.path: {path} has no folder with *.png files in it. Give a folder that has one for each "
                "class, named as the captions are to be, or an .npz."
            )
        names = tuple(sorted({file.parent.name for file in files}))
        labels = [names.index(file.parent.name) for file in files]
        return GreyImages(np.stack([_png(file) for file in files]), np.array(labels, np.int64), names)


AnyImages = FashionMnist | Digits | ImageFolder


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
