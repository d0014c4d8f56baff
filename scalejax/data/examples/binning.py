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


def value_bins(column: np.ndarray, train: np.ndarray, bins: int) -> tuple[np.ndarray, int]:
    """Bin of every value, in which a value that many examples share does not swallow the edges of the others.

    Where the training values are at most `bins` different ones, each has a bin of its own; another value has that of
    the next below it, or the first. Else every value that holds more than 1/bins of the training examples has a bin of
    its own, and the others have quantile bins (`quantile_bins`) whose edges are quantiles of the others alone.

    Args:
      column: number[N]; NaN = missing.
      train: int[M]. Rows of the training split; nothing else is read.
      bins: Number of bins, at least 2.

    Returns:
      int32[N] ids, the last of which stands for a missing value, and how many ids there are.

    Raises:
      UserError: fewer than 2 bins.
    """
    x = column.astype(np.float64)
    known = x[train]
    values, inverse, counts = np.unique(known[~np.isnan(known)], return_inverse=True, return_counts=True)
    if values.size <= bins:
        found = np.maximum(np.searchsorted(values, x, side="right") - 1, 0)
        missing = max(values.size, 1)
        return np.where(np.isnan(x), missing, found).astype(np.int32), missing + 1
    heavy = values[counts * bins > inverse.size]
    at = np.minimum(np.searchsorted(heavy, x), max(heavy.size - 1, 0))
    is_heavy = heavy[at] == x if heavy.size else np.zeros(x.shape, bool)
    rest = np.where(is_heavy, np.nan, x)
    found = np.where(is_heavy, bins + at, quantile_bins(rest, train, bins))
    return np.where(np.isnan(x), bins + heavy.size, found).astype(np.int32), bins + int(heavy.size) + 1
