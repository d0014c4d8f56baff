"""Cora, Citeseer and their like with the split of Planetoid (Yang et al., 2016); Cora is bundled."""

import importlib.resources
import pathlib

from scalejax.data.graphs import npz
from scalejax.data.graphs.graph import NodeGraph
from scalejax.errors import UserError

_PICKLED = ("x", "y", "tx", "ty", "allx", "ally", "graph")


def read_planetoid(path: str | pathlib.Path | None = None) -> NodeGraph:
    """Reads a citation graph: 0/1 features as they are, an edge in both directions, the public split.

    The files of the original repository (`ind.cora.x` and so on) are Python pickles, which run code when they are read,
    and so they are refused; `data.bundled.make_planetoid` turns them into an npz and runs nothing.

    Args:
      path: An npz as `graphs.npz` describes; None = the bundled Cora.
    Raises:
      UserError: missing or damaged, without features, labels or splits, or the original pickles.
    """
    if path is None:
        with importlib.resources.as_file(importlib.resources.files("scalejax.data") / "bundled" / "cora.npz") as file:
            return npz.read_npz(file)
    place = pathlib.Path(path)
    if (pickled := _pickle_in(place)) is not None:
        raise UserError(
            f"{pickled}: is a Python pickle, which could run code of others while it is read. Turn the files of "
            f"Planetoid into an npz once, which runs nothing: `python -m scalejax.data.bundled.make_planetoid "
            f"{pickled.parent} {pickled.name.split('.')[1]} {pickled.name.split('.')[1]}.npz`, and set data.path to it "
            "(docs/graphs.md); Cora is bundled (data.path=none)."
        )
    graph = npz.read_npz(place)
    for name, found in (("features", graph.features), ("labels", graph.labels), ("splits", graph.splits or None)):
        if found is None:
            raise UserError(f"{path}: has no {name}. Write them into the npz as well (docs/graphs.md).")
    return graph


def _pickle_in(place: pathlib.Path) -> pathlib.Path | None:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    for file in files:
        parts = file.name.split(".")
        if len(parts) == 3 and parts[0] in ("ind", "trans") and parts[2] in _PICKLED:
            return file
    return None
