"""Images as codes: patches of 4 x 4 pixels, each the number of its nearest centre, found by k-means.

All of it is integer arithmetic, in float32 where a product of matrices is faster and still exact (below 2^24): equal
images and seeds give equal codes on every machine.
"""

import dataclasses
import hashlib
import io
import pathlib

import numpy as np

from scalejax.data import packed_files
from scalejax.data.images.sources import SIDE
from scalejax.data.permutation import key_of
from scalejax.errors import UserError

PATCH = 4
"""Pixels of a side of a patch."""
PATCHES = (SIDE // PATCH) ** 2
"""Patches of an image, row after row: 49."""

_SEEDS = 0xC0DE
_AT_ONCE = 16_384


def to_patches(images: np.ndarray) -> np.ndarray:
    """uint8[N, 28, 28] -> uint8[N, 49, 16]: patches row after row, and so the pixels of each."""
    cut = images.reshape(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    return cut.transpose(0, 1, 3, 2, 4).reshape(-1, PATCHES, PATCH * PATCH)


def from_patches(patches: np.ndarray) -> np.ndarray:
    """The inverse of `to_patches`."""
    cut = patches.reshape(-1, SIDE // PATCH, SIDE // PATCH, PATCH, PATCH)
    return cut.transpose(0, 1, 3, 2, 4).reshape(-1, SIDE, SIDE)


@dataclasses.dataclass(frozen=True, eq=False)
class PatchCodebook:
    """K patches, each of which stands for those that are nearest to it.

    Attributes:
      centres: uint8[K, 16].
    """

    centres: np.ndarray

    def __len__(self) -> int:
        return self.centres.shape[0]

    def encode(self, images: np.ndarray) -> np.ndarray:
        """uint8[N, 28, 28] -> int32[N, 49]: of each patch the nearest centre, the first where several are."""
        flat = to_patches(images).reshape(-1, PATCH * PATCH).astype(np.float32)
        return _nearest(flat, self.centres).reshape(-1, PATCHES).astype(np.int32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """int[N, 49] -> uint8[N, 28, 28]: the picture of the centres.

        Raises:
          UserError: the codes have another shape, or there is no such centre.
        """
        codes = np.asarray(codes)
        if codes.ndim != 2 or codes.shape[1] != PATCHES or codes.dtype.kind not in "iu":
            raise UserError(
                f"decode: codes must be integers[N, {PATCHES}], those of whole images; got {codes.dtype}"
                f"{list(codes.shape)}."
            )
        outside = np.argwhere((codes < 0) | (codes >= len(self)))
        if outside.size:
            image, patch = outside[0].tolist()
            raise UserError(
                f"decode: codes must lie in [0, {len(self)}); got {int(codes[image, patch])} for patch {patch} of "
                f"image {image}. Take the id of the first code off the ids of tokens, or take their own codebook."
            )
        return from_patches(self.centres[codes])

    def error(self, images: np.ndarray) -> float:
        """Mean squared error of the pixels, 0 to 255, of images that are encoded and decoded."""
        difference = self.decode(self.encode(images)).astype(np.int64) - images
        return float((difference**2).mean())

    def digest(self) -> str:
        """Hex digest of the centres."""
        return hashlib.sha256(self.centres.tobytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """An npz of the centres, which `read` takes."""
        data = io.BytesIO()
        np.savez_compressed(data, centres=self.centres)
        return data.getvalue()

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "PatchCodebook":
        """The codebook of a file, `codebook.npz` of a run folder.

        Raises:
          UserError: it is missing or damaged.
        """
        try:
            centres = packed_files.read_npz(pathlib.Path(path))["centres"]
            if centres.dtype != np.uint8 or centres.ndim != 2 or centres.shape[1] != PATCH * PATCH:
                raise ValueError(f"centres are {centres.dtype}{list(centres.shape)}, not uint8[K, {PATCH * PATCH}]")
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{path} is no codebook ({error}). Name the codebook.npz of a run that was trained on images."
            ) from error
        return cls(centres)


def train_codebook(images: np.ndarray, codes: int, *, seed: int = 0, iterations: int = 25) -> PatchCodebook:
    """Lloyd's algorithm from the seeds of k-means++ (Arthur and Vassilvitskii, 2007), on distinct patches with counts.

    Centres are rounded to whole grey values in each iteration, and it ends when none moves.

    Args:
      images: uint8[N, 28, 28].
      codes: K.
      seed: Of the first centres.
      iterations: At most.
    Raises:
      UserError: there are fewer distinct patches than codes.
    """
    patches, counts = np.unique(to_patches(images).reshape(-1, PATCH * PATCH), axis=0, return_counts=True)
    if len(patches) < codes:
        raise UserError(
            f"data.codes={codes}: the training images have {len(patches)} distinct patches, and each code stands for "
            "at least one. Ask for fewer codes, or give more images."
        )
    flat = patches.astype(np.float32)
    centres = patches[_first_centres(flat, counts, codes, seed)]
    for _ in range(iterations):
        nearest = _nearest(flat, centres)
        # Sums of whole numbers below 2^53 are exact in float64, in any order.
        sums = [np.bincount(nearest, counts * patches[:, i], minlength=codes) for i in range(PATCH * PATCH)]
        total = np.bincount(nearest, counts, minlength=codes).astype(np.int64)[:, None]
        means = (2 * np.stack(sums, axis=1).astype(np.int64) + total) // np.maximum(2 * total, 1)
        moved = np.where(total > 0, means, centres).astype(np.uint8)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return PatchCodebook(centres)


def _first_centres(patches: np.ndarray, counts: np.ndarray, codes: int, seed: int) -> list[int]:
    """Numbers of patches: each is drawn with a chance of its squared distance to those before it."""
    chosen: list[int] = []
    norms = (patches * patches).sum(1)
    distances = np.ones(len(patches), np.int64)
    for number in range(codes):
        mass = np.cumsum(counts * distances)
        pick = int(np.searchsorted(mass, key_of(_SEEDS, seed, number) % int(mass[-1]), side="right"))
        new = (norms - 2 * (patches @ patches[pick]) + norms[pick]).astype(np.int64)
        distances = np.minimum(distances, new) if number else new
        chosen.append(pick)
    return chosen


def _nearest(patches: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Of each patch, float32[M, 16], the nearest of uint8[K, 16]: int64[M]."""
    matrix = centres.astype(np.float32).T
    norms = (matrix * matrix).sum(0)
    parts = (patches[a : a + _AT_ONCE] @ matrix for a in range(0, len(patches), _AT_ONCE))
    nearest = [np.argmin(norms - 2 * products, axis=1) for products in parts]
    return np.concatenate([np.zeros(0, np.int64), *nearest])  # of no patches, too: a split may have no images
