"""The bundled picture of 125 nuclei, cut to tiles: `NucleiTiles`."""

import dataclasses

import numpy as np

from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.labelled import moments
from scalejax.data.images.schema import ImageSchema
from scalejax.data.images.sources import bundled_arrays

TILE = 128
"""Pixels of a side of what is scored."""
TRAIN_CORNERS = ((0, 0), (0, 128), (0, 256), (128, 0))
"""Upper left corners of the training pictures, which overlap."""


def nuclei() -> tuple[np.ndarray, np.ndarray]:
    """The picture, uint8[512, 512], and the number of each pixel's nucleus, int32[512, 512], 0 = none (125 are there).

    Numbers are those of the file, from 1 to 183 with gaps.
    """
    arrays = bundled_arrays("nuclei.npz")
    return arrays["image"].astype(np.uint8), arrays["instances"].astype(np.int32)  # of 16 bits, with 0 to 235


def nuclei_regions() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pictures uint8[N, H, W] and instances int32[N, H, W] of each split.

    The lower right quadrant is the test, four tiles of 128 pixels. Validation are the two tiles at the bottom of the
    lower left one. Training pictures are 256 x 256, cut from all the rest, and are to be looked at through windows.
    """
    picture, instances = nuclei()

    def cut(corners: tuple[tuple[int, int], ...], side: int) -> tuple[np.ndarray, np.ndarray]:
        places = [(slice(top, top + side), slice(left, left + side)) for top, left in corners]
        return np.stack([picture[place] for place in places]), np.stack([instances[place] for place in places])

    return {
        "train": cut(TRAIN_CORNERS, 2 * TILE),
        "validation": cut(((384, 0), (384, 128)), TILE),
        "test": cut(((256, 256), (256, 384), (384, 256), (384, 384)), TILE),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class NucleiTiles:
    """Tiles of 128 x 128 of the bundled picture: "images" uint8[B, 128, 128, 1] and "instances" int32[B, 128, 128].

    Attributes:
      batch_size: Global.
      seed: Of the order and of the augmentations.
      augment: Of training batches; its window must be 128 x 128.
    """

    batch_size: int = 6
    seed: int = 0
    augment: Augment = Augment(window=(TILE, TILE), flip="both", quarter_turns=True)

    def schema(self) -> ImageSchema:
        """Of the tiles."""
        mean, std = moments(nuclei_regions()["train"][0][..., None])
        return ImageSchema(
            height=TILE,
            width=TILE,
            channels=1,
            mean=mean,
            std=std,
            classes=("background", "nucleus"),
            batch_size=self.batch_size,
        )

    def build(self) -> ImageDataSet:
        """Cuts them."""
        splits = {
            split: {"images": pictures[..., None], "instances": instances}
            for split, (pictures, instances) in nuclei_regions().items()
        }
        return ImageDataSet(
            splits, batch_size=self.batch_size, schema=self.schema(), augment=self.augment, seed=self.seed
        )
