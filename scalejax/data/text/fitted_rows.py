"""Rows of fitted documents on disk beside the tokens: fitted once, window by window, then mapped.

A folder holds the arrays of `packing.FittedRows`: 13 bytes a piece and 8 a row (`kept_arrays.py`).
"""

import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from scalejax.data.kept_arrays import ArrayWriter, Verify, kept, open_arrays
from scalejax.data.text.packing import FittedRows, Spans, fit

_FORMAT = 3
_DTYPES = {"offsets": np.int64, "begin": np.int64, "length": np.int32, "more": np.bool_}


def fitted(
    spans: Callable[[], Spans],
    length: int,
    packing: Literal["first-fit", "best-fit"],
    window: int,
    *,
    lay: Callable[[Spans], Iterator[FittedRows]] | None = None,
    folder: pathlib.Path,
    key: str,
    verify: Verify = "checksums",
) -> FittedRows:
    """The rows of some spans, which are fitted if this is the first use.

    Args:
      spans: Gives them in the order in which they are laid; called only if they are not fitted yet.
      length: Positions of a row.
      packing: How.
      window: Spans that may share rows.
      lay: What lays spans in its own way, which `key` says; None = `packing.fit`.
      folder: Where rows are kept.
      key: Says which spans these are.
      verify: How what is kept there is checked (`kept_arrays.open_arrays`).
    Raises:
      UserError: the folder cannot be written, or what it holds is damaged.
    """
    name = hashlib.sha256(repr((_FORMAT, key, length, packing, window)).encode()).hexdigest()[:24]

    def make(path: pathlib.Path) -> None:
        out = ArrayWriter(path, _DTYPES)
        out.append("offsets", [0])
        for part in fit(spans(), length, packing, window) if lay is None else lay(spans()):
            out.append("offsets", part.offsets[1:] + out.sizes["begin"])
            for column in ("begin", "length", "more"):
                out.append(column, getattr(part, column))
        out.finish(format=_FORMAT)

    arrays, _ = open_arrays(kept(folder, f"rows-{name}", make), verify)
    return FittedRows(**arrays)
