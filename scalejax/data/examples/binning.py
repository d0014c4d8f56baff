"""Numbers as categories: bins that hold equally many training examples."""

import numpy as np

from scalejax.errors import UserError


def quantile_bins(column: np.ndarray, train: np.ndarray, bins: int) -> np.ndarray:
    """Bin of every value; the edges are the quantiles i/bins of the training values, 0 < i < bins.

    A value on an edge belongs to the upper bin. Equal edges, which come from a value that many examples share, count
    once, so that fewer than `bins` ids may occur.

    Args:
      column: number[N]; NaN = missing.
      train: int[M]. Rows of the training split; nothing else is read to place the edges.
      bins: Number of bins, at least 2.

    Returns:
      int32[N] in [0, bins]: the bin, or `bins` where the value is missing. A table needs bins + 1 rows.

    Raises:
      UserError: fewer than 2 bins.
    """
    if bins < 2:
        raise UserError(f"data.number_bins must be 0 (off) or at least 2; got {bins}.")
    x = column.astype(np.float64)
    known = x[train]
    known = known[~np.isnan(known)]
    edges = np.unique(np.quantile(known, np.arange(1, bins) / bins)) if known.size else np.zeros(0)
    found = np.searchsorted(edges, x, side="right")
    return np.where(np.isnan(x), bins, found).astype(np.int32)
