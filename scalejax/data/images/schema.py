"""What a model must know of pictures."""

import dataclasses
import math
from typing import Literal

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSchema:
    """Sizes, classes and units of the pictures of a data set, [H, W, C].

    Models get pictures as they are stored and make them (x - mean) / std themselves: what a checkpoint was trained
    with is part of its identity, and uint8 is a quarter of what float32 is on the way to the devices.

    Attributes:
      height: Pixels.
      width: Pixels.
      channels: 1 of grey pictures, 3 of red, green and blue, slices of a scan.
      dtype: Of stored pixels.
      mean: Of each channel over the training pictures, in units of stored pixels.
      std: Likewise.
      classes: Names, by label; of masks with that of the background first.
      window: Smallest and largest value that is kept of what files have (Hounsfield units of CT); what is stored is
        cut to it. None = files are stored as they are.
      standardized: Whether each channel of each case was brought to mean 0 and standard deviation 1 before.
      batch_size: Examples of a training batch, for what waits from one batch to the next; None = it is not known.
      spacing: Millimetres from one pixel to the next, along H and W; None = they are not known.
      slice_spacing: Millimetres from one picture of a case to the next; "by case" = cases differ, and batches have it
        as "slice_spacing"; None = they are no slices of a volume, or it is not known.
    """

    height: int
    width: int
    channels: int
    dtype: Literal["uint8", "float32"] = "uint8"
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    window: tuple[float, float] | None = None
    standardized: bool = False
    batch_size: int | None = None
    spacing: tuple[float, float] | None = None
    slice_spacing: float | Literal["by case"] | None = None

    def __post_init__(self) -> None:
        counts = {len(self.mean), len(self.std)}
        if counts != {self.channels} or not all(0 < deviation < math.inf for deviation in self.std):
            raise UserError(
                f"ImageSchema: mean and std must have a number for each of {self.channels} channel(s), those of std "
                f"above 0; got mean={self.mean} and std={self.std}. `data.images.labelled.moments` measures both."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """[H, W, C]."""
        return self.height, self.width, self.channels

    def identity(self) -> dict[str, str]:
        """What parameters go with although their shapes need not tell, see `train.task.Task.identity`."""
        return {
            "data.mean": repr(self.mean),
            "data.std": repr(self.std),
            "data.window": repr(self.window),
            **({"data.standardized": "by case"} if self.standardized else {}),
            "data.classes": ", ".join(self.classes),
        }
