"""Whether four points are a cross: the ends of a long diameter and of a short one that it meets."""

import numpy as np

from scalejax.errors import UserError


def check_crosses(ends: np.ndarray, height: int, width: int, what: str, slack: float = 1.0) -> None:
    """Refuses crosses that no lesion of a picture has.

    Args:
      ends: float[..., 4, 2]; NaN = no object.
      height: Of the picture, pixels.
      width: Likewise.
      what: What they are, for messages; each "{}" stands for a number of the first one that is refused, for each axis
        before the last two.
      slack: Pixels by which diameters may miss each other.

    Raises:
      UserError: a point is outside of the picture, or the diameters of a cross do not meet.
    """
    outside = (ends < -0.5 - 1e-6) | (ends > np.array([width, height]) - 0.5 + 1e-6)
    if outside.any():
        first = tuple(np.argwhere(outside)[0].tolist()[:-2])
        point = ends[first][outside[first].any(-1)][0]
        raise UserError(
            f"{what.format(*first)}: the point ({point[0]:g}, {point[1]:g}) is outside of the picture, which is "
            f"{width} pixels wide and {height} high. Points are x and y in pixels of this picture; mend or drop it."
        )
    apart = ~_meet(ends, slack) & np.isfinite(ends).all((-2, -1))
    if apart.any():
        first = tuple(np.argwhere(apart)[0].tolist())
        text = ", ".join(f"{value:g}" for value in ends[first].ravel())
        raise UserError(
            f"{what.format(*first)}: its diameters do not meet ({text}). A cross is x and y of both ends of the long "
            "diameter and then of the short one; mend or drop it, or order four points with `recist.ordered`."
        )


def _meet(ends: np.ndarray, slack: float) -> np.ndarray:
    """bool[...]: whether the diameters, each longer by `slack` at both ends, meet."""
    half = (ends[..., 1::2, :] - ends[..., ::2, :]) / 2
    middle = (ends[..., 1::2, :] + ends[..., ::2, :]) / 2
    size = np.linalg.norm(half, axis=-1, keepdims=True)
    half = half * (1 + slack / np.maximum(size, 1e-9))
    (u, v), between = np.moveaxis(half, -2, 0), middle[..., 1, :] - middle[..., 0, :]

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]

    area = product(u, v)
    parallel = abs(area) < 1e-9
    safe = np.where(parallel, 1, area)
    return ~parallel & (abs(product(between, v) / safe) <= 1) & (abs(product(between, u) / safe) <= 1)
