"""Which document lies in which row, on disk beside the tokens: fitted once, window by window, then mapped.

A folder holds the arrays of `packing.FittedRows` (13 bytes a piece and 8 a row) and about with their sizes.
"""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Literal

import numpy as np

from scalejax.data.packing import FittedRows, Spans, fit
from scalejax.data.token_corpus import damaged, kept, map_array

_FORMAT = 2


def fitted(
    spans: Callable[[], Spans],
    length: int,
    packing: Literal["first-fit", "best-fit"],
    window: int,
    *,
    folder: pathlib.Path,
    key: str,
) -> FittedRows:
    """The rows of some spans, which are fitted if this is the first use.

    Args:
      spans: Gives them in the order in which they are laid; called only if they are not fitted yet.
      length: Positions of a row.
      packing: How.
      window: Spans that may share rows.
      folder: Where rows are kept.
      key: Says which spans these are.
    Raises:
      UserError: the folder cannot be written, or what it holds is damaged.
    """
    name = hashlib.sha256(repr((_FORMAT, key, length, packing, window)).encode()).hexdigest()[:24]
    path = kept(folder, f"rows-{name}", lambda path: _write(path, spans(), length, packing, window))
    try:
        about = json.loads((path / "about").read_text())
        rows, pieces = about["rows"], about["pieces"]
        return FittedRows(
            map_array(path / "offsets", "int64", rows + 1),
            map_array(path / "begin", "int64", pieces),
            map_array(path / "length", "int32", pieces),
            map_array(path / "more", "bool", pieces),
        )
    except (OSError, ValueError, KeyError) as error:
        raise damaged(path, error) from error


def _write(
    path: pathlib.Path, spans: Spans, length: int, packing: Literal["first-fit", "best-fit"], window: int
) -> None:
    rows = pieces = 0
    with contextlib.ExitStack() as stack:
        names = ("offsets", "begin", "length", "more")
        out = {name: stack.enter_context(open(path / name, "wb")) for name in names}
        out["offsets"].write(np.zeros(1, np.int64).tobytes())
        for part in fit(spans, length, packing, window):
            out["offsets"].write((part.offsets[1:] + pieces).tobytes())
            for name in names[1:]:
                out[name].write(getattr(part, name).tobytes())
            rows, pieces = rows + len(part), pieces + part.begin.size
    (path / "about").write_text(json.dumps({"format": _FORMAT, "rows": rows, "pieces": pieces}))
