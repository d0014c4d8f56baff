"""Pictures in files: PNG, JPEG, TIFF, BMP, GIF and WebP, read by Pillow."""

import dataclasses
import importlib
import pathlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from scalejax.errors import UserError

FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
}
"""Pillow's names of what is read, and the endings of such files. What a file holds decides, whatever it is called, and
Pillow is told these names: for some others it would start a program, such as Ghostscript for EPS."""
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)


def library(module: str, package: str, what: str) -> Any:
    """A module of a library that the package can do without.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} needs the library {package}, which is not installed: pip install {package}, or all that read "
            "pictures: pip install 'scalejax[images]'."
        ) from error


def read_picture(path: pathlib.Path, *, masks: bool = False) -> np.ndarray:
    """The pixels of a file, as it has them.

    Args:
      path: One of `FORMATS`; of a JPEG of several pictures, as phones write them, the first.
      masks: Whether pixels are numbers of classes: those of a palette stay numbers, and colours are refused.
    Returns:
      uint8, uint16, int32 or float32 [H, W] where it is grey, uint8[H, W, 3] where it has colours; transparency is left
      out, and a photograph stands as its camera was held.
    Raises:
      UserError: it cannot be read, is damaged, has several pages or moves, or has colours of 16 bits.
    Warns:
      UserWarning: its EXIF block is damaged, so that nobody knows how the camera was held.
    """
    image_module = library("PIL.Image", "Pillow", f"reading {path}")
    try:
        with warnings.catch_warnings(record=True) as damage:
            warnings.simplefilter("error")  # of far too many pixels, and of damaged tags
            warnings.filterwarnings("always", "(possibly )?corrupt exif data")
            warnings.filterwarnings("ignore", "image appears to be a malformed mpo file")  # it has a first picture
            with image_module.open(path, formats=tuple(FORMATS)) as image:
                pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
                cut = len(image.getbands()) > 1 and re.search(r";16[BLN]", str(image.tile))  # Pillow makes 8 bits of it
                image.load()
                if masks:
                    shown = image
                else:
                    shown = _upright(image)
                    if shown.mode == "P":
                        shown = shown.convert("RGBA")  # RGB is not made of shades of transparency without a warning
                    plain = {"1": "L", "LA": "L", "La": "L"}.get(shown.mode)
                    if plain or (shown.mode not in ("L", "RGB", "I", "F") and not shown.mode.startswith("I;16")):
                        shown = shown.convert(plain or "RGB")
                pixels = np.array(shown)
                if damage and image.format == "TIFF":  # its tags are those of the picture
                    raise ValueError(damage[0].message)
    except Exception as error:  # Pillow has several of its own, for damaged files and for far too large ones
        raise UserError(
            f"{path} is no picture that can be read ({str(error) or type(error).__name__}). Copy or write it again; "
            f"files are {', '.join(SUFFIXES)}."
        ) from error
    if damage:
        warnings.warn(
            f"{path} has a damaged EXIF block ({str(damage[0].message).strip()}): the picture may be turned, since "
            "that block says how the camera was held.",
            stacklevel=2,
        )
    if cut:
        raise UserError(
            f"{path} has colours of 16 bits, of which Pillow reads 8. Convert it to colours of 8 bits, or to one grey "
            "channel of 16."
        )
    if pages > 1:
        raise UserError(f"{path} has {pages} pages. Write each as a file of its own, or a volume as NIfTI (.nii.gz).")
    if masks and pixels.ndim != 2:
        raise UserError(
            f"{path} has {pixels.shape[2]} colours; a mask has one number a pixel, that of its class. Write it as a "
            "grey picture of 8 bits."
        )
    if pixels.dtype.kind == "b":
        pixels = pixels.astype(np.uint8)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _upright(image: Any) -> Any:
    """A picture of Pillow's as its camera was held, with a warning where its EXIF block cannot be read."""
    try:
        return importlib.import_module("PIL.ImageOps").exif_transpose(image)
    except Exception as error:
        if image.format == "TIFF":
            raise
        warnings.warn(f"corrupt EXIF data: {error or type(error).__name__}", stacklevel=2)
        return image


def resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 or float32[H, W, C] scaled to (height, width) by Pillow, bilinear, antialiased where it gets smaller."""
    image_module = library("PIL.Image", "Pillow", f"data.size={size[0]},{size[1]}")
    if pixels.shape[:2] == size:
        return pixels
    planes = [
        np.array(image_module.fromarray(np.ascontiguousarray(pixels[..., c])).resize(size[::-1], image_module.BILINEAR))
        for c in range(pixels.shape[2])
    ]
    return np.stack(planes, -1)


def windowed(
    pixels: np.ndarray, window: tuple[float, float] | None, path: object, argument: str = "data.window"
) -> np.ndarray:
    """Pixels as they are stored: uint8 as they are, all others float32, cut to the window.

    Raises:
      UserError: they are not 8 bits and there is no window, the window is empty, or a pixel is no number.
    """
    check_finite(pixels, path)
    if window is None:
        if pixels.dtype == np.uint8:
            return pixels
        low, high = (f"{value:g}" for value in (np.min(pixels), np.max(pixels)))
        raise UserError(
            f"{path} has pixels of {pixels.dtype} from {low} to {high}, of which a window must be chosen: the "
            f"smallest and the largest value that is kept, for example --set {argument}={low},{high}."
        )
    if not window[0] < window[1]:
        raise UserError(f"{argument} must be a smaller and a larger value; got {window[0]},{window[1]}.")
    return pixels.astype(np.float32).clip(np.float32(window[0]), np.float32(window[1]))


def check_bits(pixels: np.ndarray, path: object, others: np.dtype, first: object) -> None:
    """Refuses pictures of 8 bits beside such of more: there is no window for both.

    Args:
      pixels: Of a file.
      path: Which.
      others: Of another file of the same data set.
      first: Which.

    Raises:
      UserError: one has 8 bits, the other has not.
    """
    if (pixels.dtype == np.uint8) != (others == np.uint8):
        raise UserError(
            f"{path} has pixels of {pixels.dtype}, {first} of {others}: a window that suits the one makes the other "
            "black or white. Write all with 8 bits, or all with more, in the same units."
        )


def stamp(source: object) -> tuple[object, ...]:
    """Changes if a file of a source with a `path` does: their names, sizes and times."""
    path = pathlib.Path(getattr(source, "path", ""))
    found = [path, *path.rglob("*")] if hasattr(source, "path") else []
    return tuple((str(file), s.st_size, s.st_mtime_ns) for file in found if file.is_file() and (s := file.stat()))


def check_finite(pixels: np.ndarray, path: object) -> None:
    """Refuses NaN and infinities."""
    if pixels.dtype.kind == "f" and pixels.size and not np.isfinite([pixels.min(), pixels.max()]).all():
        finite = np.isfinite(pixels)
        raise UserError(
            f"{path} has {int((~finite).sum()):,} pixels that are NaN or infinite, the first at "
            f"{np.argwhere(~finite)[0].tolist()}. Write a number there, such as the smallest one."
        )


def check_size(name: str, size: tuple[int, ...]) -> None:
    """Refuses what is no height and width."""
    if len(size) != 2 or min(size) < 1:
        raise UserError(f"{name} must be a height and a width in pixels, each at least 1; got {size}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """How pictures of any kind become those of one data set, uint8 or float32 [H, W, C].

    Attributes:
      size: (height, width), see `resized`; None = they must have one.
      channels: 1 = colours become grey (as ITU-R 601-2 weighs them), 3 = grey becomes three equal colours; None = they
        must have one number of them.
      window: See `windowed`.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            check_size("data.size", self.size)

    def __call__(self, pixels: np.ndarray, path: object) -> np.ndarray:
        """number[H, W] or [H, W, C] of a file."""
        pixels = windowed(pixels if pixels.ndim == 3 else pixels[..., None], self.window, path)
        if self.channels not in (None, pixels.shape[2]):
            if (self.channels, pixels.shape[2]) == (1, 3):
                grey = pixels.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
                pixels = (np.rint(grey) if pixels.dtype == np.uint8 else grey).astype(pixels.dtype)[..., None]
            elif (self.channels, pixels.shape[2]) == (3, 1):
                pixels = pixels.repeat(3, axis=2)
            else:
                raise UserError(
                    f"data.channels={self.channels}: {path} has {pixels.shape[2]}. Grey pictures become three equal "
                    "colours (3) and colours grey (1); nothing else is made."
                )
        return pixels if self.size is None else resized(pixels, self.size)

    def all(self, images: np.ndarray, path: object) -> np.ndarray:
        """number[N, H, W] or [N, H, W, C] of an array."""
        whole = images if images.ndim == 4 else images[..., None]
        if self.size in (None, whole.shape[1:3]) and self.channels in (None, whole.shape[3]):
            return windowed(whole, self.window, path)
        return self.stack((image, path) for image in images)

    def stack(self, pictures: Iterable[tuple[np.ndarray, object]]) -> np.ndarray:
        """All pictures of a data set, each with where it is from: [N, H, W, C].

        Raises:
          UserError: they differ in size or channels, or some have 8 bits and others more.
        """
        found: list[np.ndarray] = []
        first, dtype = object(), np.dtype(np.uint8)
        for pixels, path in pictures:
            first, dtype = (first, dtype) if found else (path, pixels.dtype)
            check_bits(pixels, path, dtype, first)
            picture = self(pixels, path)
            if found and picture.shape != found[0].shape:
                (h, w, c), (wanted_h, wanted_w, wanted_c) = picture.shape, found[0].shape
                change = (
                    f"size={wanted_h},{wanted_w}" if c == wanted_c else "channels=1 (grey) or --set data.channels=3"
                )
                raise UserError(
                    f"{path} has {h} x {w} pixels and {c} channel(s), {first} has {wanted_h} x {wanted_w} and "
                    f"{wanted_c}. All must be alike: --set data.{change} makes them so."
                )
            found.append(picture)
        return np.stack(found)
