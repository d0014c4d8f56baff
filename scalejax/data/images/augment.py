"""Random changes of pictures, and of the masks and points that belong to them.

Random numbers are hashes of (seed, number of the example, channel, which number): no state, any order, all examples of
a batch at once.
"""

import dataclasses
from typing import Literal

import numpy as np

from scalejax.data.arrays import Arrays
from scalejax.data.permutation import key_of, mix


def uniform(numbers: np.ndarray, count: int, *key: int) -> np.ndarray:
    """float64[M, count] in [0, 1) for int64[M] numbers of examples: hashes of a key, the example and the column."""
    base = np.uint64(key_of(*key))
    odd = np.uint64(0x9E3779B97F4A7C15)
    rows = mix(base + numbers.astype(np.uint64) * odd)[:, None]
    return (mix(rows + np.arange(1, count + 1, dtype=np.uint64)[None] * odd) >> np.uint64(11)) * 2.0**-53


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augment:
    """What happens to each training picture.

    Attributes:
      crop: Pixels of zeros around a picture, out of which a window of its own size is cut.
      flip: "horizontal": every other picture is mirrored, left to right.
    """

    crop: int = 0
    flip: Literal["none", "horizontal"] = "none"

    def apply(self, arrays: Arrays, numbers: np.ndarray, *, seed: int, channel: int) -> Arrays:
        """Arrays of examples [M, ...] by name, changed; `numbers` int64[M] are those of the examples in the stream."""
        drawn = uniform(numbers, 3, seed, channel)
        images = arrays["images"]
        if self.crop:
            height, width = images.shape[1:3]
            padded = np.pad(images, ((0, 0), (self.crop, self.crop), (self.crop, self.crop), (0, 0)))
            top, left = (np.floor(drawn[:, :2] * (2 * self.crop + 1)).astype(np.int64)).T
            rows, columns = top[:, None] + np.arange(height), left[:, None] + np.arange(width)
            images = padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
        if self.flip == "horizontal":
            images = np.where((drawn[:, 2] < 0.5).reshape(-1, 1, 1, 1), images[:, :, ::-1], images)
        return {**arrays, "images": images}
