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
    x = column.astype(np.float64)
    known = x[train]
    found = np.searchsorted(_edges(known[~np.isnan(known)], bins), x, side="right")
    return np.where(np.isnan(x), bins, found).astype(np.int32)


def _edges(known: np.ndarray, bins: int) -> np.ndarray:
    """The different quantiles i/bins, 0 < i < bins; of integers the next of them below."""
    if bins < 2:
        raise UserError(f"data.number_bins must be 0 (off) or at least 2; got {bins}.")
    if not known.size:
        return known
    if known.dtype.kind in "iu":
        return np.unique(np.sort(known)[np.arange(1, bins) * (known.size - 1) // bins])
    return np.unique(np.quantile(known, np.arange(1, bins) / bins))


def value_bins(column: np.ndarray, train: np.ndarray, bins: int) -> tuple[np.ndarray, int]:
    """Bin of every value, in which a value that many examples share does not swallow the edges of the others.

    Where the training values are at most `bins` different ones, each has a bin of its own; another value has that of
    the next below it, or the first. Else every value that holds more than 1/bins of the training examples has a bin of
    its own, and the others have quantile bins (`quantile_bins`) whose edges are quantiles of the others alone.

    Integers that float64 does not hold, beyond 2^53, are compared as they are, and the edges are some of them.

    Args:
      column: number[N]; NaN = missing.
      train: int[M]. Rows of the training split; nothing else is read.
      bins: Number of bins, at least 2.

    Returns:
      int32[N] ids, the last of which stands for a missing value, and how many ids there are.

    Raises:
      UserError: fewer than 2 bins.
    """
    exact = column.dtype.kind in "iu" and column.size and (column.min() < -(2**53) or column.max() > 2**53)
    x = column if exact else column.astype(np.float64)
    missing, known = np.isnan(x), x[train]
    values, inverse, counts = np.unique(known[~np.isnan(known)], return_inverse=True, return_counts=True)
    if values.size <= bins:
        found = np.maximum(np.searchsorted(values, x, side="right") - 1, 0)
        num_values = max(values.size, 1)
        return np.where(missing, num_values, found).astype(np.int32), num_values + 1
    heavy = counts * bins > inverse.size
    frequent = values[heavy]
    at = np.minimum(np.searchsorted(frequent, x), max(frequent.size - 1, 0))
    is_frequent = frequent[at] == x if frequent.size else np.zeros(x.shape, bool)
    edges = _edges(values[inverse][~heavy[inverse]], bins)
    found = np.where(is_frequent, bins + at, np.searchsorted(edges, x, side="right"))
    return np.where(missing, bins + frequent.size, found).astype(np.int32), bins + int(frequent.size) + 1
