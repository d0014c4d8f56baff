"""The bundled average of 152 heads (ICBM 152, 2009a) at 2 mm."""

import dataclasses

import numpy as np

from scalejax.data.images.sources import bundled_arrays


@dataclasses.dataclass(frozen=True)
class Brain:
    """Voxel (i, j, k) counts from left to right, back to front and bottom to top.

    Attributes:
      t1: uint8[99, 117, 95], the picture.
      grey: uint8 likewise, probability of grey matter times 255.
      white: Of white matter.
      spacing: Millimetres from one voxel to the next, along each axis.
      affine: float64[4, 4], voxels to millimetres of the MNI space.
    """

    t1: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    spacing: tuple[float, float, float]
    affine: np.ndarray

    def tissues(self) -> np.ndarray:
        """int32[99, 117, 95]: 0 where neither has 128 (of 255), else the larger of 1 grey and 2 white matter."""
        tissue = np.where(self.white > self.grey, 2, 1)
        return np.where(np.maximum(self.grey, self.white) < 128, 0, tissue).astype(np.int32)


def icbm152() -> Brain:
    """Every second voxel of the published volumes of 1 mm."""
    arrays = bundled_arrays("icbm152_2mm.npz")
    affine = np.diag((2.0, 2.0, 2.0, 1.0))
    affine[:3, 3] = (-98.0, -134.0, -72.0)
    return Brain(arrays["t1"], arrays["gm"], arrays["wm"], (2.0, 2.0, 2.0), affine)
