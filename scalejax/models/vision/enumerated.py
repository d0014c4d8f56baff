"""What `keypoints.group` computes, by its definition: every one of K^4 groups is looked at. NumPy, one picture."""

import numpy as np

from scalejax.models.vision.keypoints import Grouping


def enumerated(
    scores: np.ndarray, cells: np.ndarray, centres: np.ndarray, how: Grouping
) -> tuple[np.ndarray, np.ndarray]:
    """All groups that fit.

    Args:
      scores: float[4, K], heights of the peaks of tops, lefts, bottoms and rights.
      cells: int[4, K, 2], x and y.
      centres: float[h, w].
      how: Thresholds.
    Returns:
      int64[n, 4] numbers of peaks and float[n] scores.
    """
    count = scores.shape[1]
    t, l, b, r = (np.expand_dims(np.arange(count), [axis for axis in range(4) if axis != own]) for own in range(4))
    (tx, lx, bx, rx), (ty, ly, by, ry) = (
        [cells[n, which, axis] for n, which in enumerate((t, l, b, r))] for axis in (0, 1)
    )
    st, sl, sb, sr = (scores[n, which] for n, which in enumerate((t, l, b, r)))
    centre = centres[(2 * (ty + by) + 1) // 4, (2 * (lx + rx) + 1) // 4]  # floor((y + y + .5) / 2) of integers
    fits = (ty <= ly) & (ty <= by) & (ty <= ry)
    fits &= (by >= ty) & (by >= ly) & (by >= ry)
    fits &= (lx <= tx) & (lx <= bx) & (lx <= rx)
    fits &= (rx >= tx) & (rx >= lx) & (rx >= bx)
    fits &= (st >= how.threshold) & (sl >= how.threshold) & (sb >= how.threshold) & (sr >= how.threshold)
    fits &= centre >= how.centre_threshold
    total = ((st + sb) + (sl + sr) + 2 * centre) / 6
    return np.argwhere(fits), np.broadcast_to(total, fits.shape)[fits]
