"""A served copy of a model in NumPy, brought up to date by checkpoints of touched rows.

    served = publish.load(run / "checkpoints", step=1000)             # a full checkpoint, and what was built on it
    served = publish.apply(served, pathlib.Path("arrived/1100"))      # a folder that was copied here
    served.tables["user"], served.params["over/mlp/0/kernel"]

Tables with an id map (`TableConfig(id_map=...)`) come with it, and with its config 64-bit ids find their rows:

    served.tables["item"][publish.rows_of(served, "item", ids, config)]

Row states of optimizers are left out. Every file is compared with its digest before anything of the copy is changed.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import IdMapConfig
from scalejax.parallel.embedding.ids import id_map
from scalejax.train.checkpoints import chain, trained
from scalejax.train.checkpoints.array_store import AnyArray
from scalejax.train.checkpoints.trained import Checkpoint, Trained

_CHECKED = 4096
"""Ways of a map whose ids are looked at to see whether a config is that of the map."""


@dataclasses.dataclass(frozen=True)
class Served:
    """Tables and dense parameters of one checkpoint.

    Attributes:
      step: Of the checkpoint.
      digest: Of its manifest.
      tables: Name -> rows [V, dim] in their dtype at rest.
      params: Path -> dense parameter.
      maps: Name of a table with an id map -> the arrays of the map, as in `id_map.State` (its counters are left out).
    """

    step: int
    digest: str
    tables: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    maps: dict[str, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)


def load(folder: pathlib.Path, step: int) -> Served:
    """Reads a checkpoint, with those that it builds on.

    Args:
      folder: Of all checkpoints of a run.
      step: Which.

    Raises:
      UserError: It, or one that it needs, is missing, damaged or another than the one it was built on.
    """
    return _in_memory(trained.open_checkpoints(folder, step))


def apply(served: Served, folder: pathlib.Path) -> Served:
    """Brings a copy from the checkpoint before to this one.

    Args:
      served: The copy. Its tables are written in place and belong to the result.
      folder: A checkpoint of touched rows, anywhere.

    Raises:
      UserError: It is a full checkpoint, is of other tables, builds on another checkpoint than the copy's, or is
        damaged. The copy is as it was.
    """
    link = Checkpoint.read(folder)
    delta = chain.delta_of(link.manifest)
    if delta is None:
        raise UserError(f"apply: {folder} is a full checkpoint. Read it with load.")
    if link.manifest.step <= served.step:
        raise UserError(f"apply: {folder} is step {link.manifest.step}, and the copy is at step {served.step} already.")
    if delta.base_step != served.step:
        raise UserError(
            f"apply: {folder} goes with step {delta.base_step}, but the copy is at step {served.step}. Apply the "
            "checkpoints in between first, in the order of their steps, or load a full one."
        )
    _check_tables(served, link)
    if delta.base_digest != served.digest:
        raise UserError(
            f"apply: {folder} was made from another checkpoint of step {served.step} than the copy: they are of "
            "different runs. Load a full checkpoint of the same run."
        )
    link.check()
    arrived = _in_memory(trained.merge([link]))
    for rows in link.rows():
        if "rows" in rows.leaves:
            columns, values = rows.leaves["rows"]
            served.tables[rows.table][rows.numbers, slice(*columns) if columns else slice(None)] = values
    # Parameters that are not trained do not come again.
    return dataclasses.replace(arrived, tables=served.tables | arrived.tables, params=served.params | arrived.params)


def rows_of(served: Served, table: str, ids: np.ndarray, config: IdMapConfig) -> np.ndarray:
    """Rows of 64-bit ids in a table with an id map, as evaluation finds them (`id_map.find`).

    Args:
      served: The copy.
      table: Name.
      ids: int64[N] or uint64[N].
      config: Of the table's map, that of the run.

    Returns:
      int64[N]; 0, the row that all of these share, for ids that have none of their own.

    Raises:
      UserError: The table has no map, or one of other sizes.
    """
    if table not in served.maps:
        known = ", ".join(served.maps) or "none"
        raise UserError(f"rows_of: table {table!r} has no id map; with one: {known}. Its ids are its rows.")
    leaves = served.maps[table]
    held = np.flatnonzero(leaves["frequency"][:_CHECKED])
    own = _bucket_of(config, leaves["key_hi"][held], leaves["key_lo"][held])
    if config.rows != len(served.tables[table]) or not np.array_equal(own, held // config.ways):
        raise UserError(
            f"rows_of: config is of {config.rows} rows in {config.ways} ways, and the map of table {table!r} was made "
            f"with others ({len(served.tables[table])} rows). Give the config that the run was trained with."
        )
    hi, lo = id_map.split_ids(ids)
    bucket = _bucket_of(config, hi, lo)
    place = bucket[:, None] * config.ways + np.arange(config.ways)
    same = (leaves["key_hi"][place] == hi[:, None]) & (leaves["key_lo"][place] == lo[:, None])
    same &= leaves["frequency"][place] > 0  # 0: a free way
    row = 1 + same.argmax(axis=1) * config.buckets + bucket
    return np.where(same.any(axis=1), row, id_map.RESERVED_ROW)


def _bucket_of(config: IdMapConfig, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    return np.asarray(id_map.bucket_of(config, cast(Any, hi), cast(Any, lo)), np.int64)


def _check_tables(served: Served, link: Checkpoint) -> None:
    theirs: dict[str, tuple[int, str]] = {}
    for table, parts in trained.parts_of_tables(link.manifest.arrays).items():
        described = [link.manifest.arrays[part] for part in parts]
        rows = sum(one["shape"][0] for one in described)
        theirs[table] = (rows, f"{described[0]['dtype']} x {described[0]['shape'][1]}")
    ours = {name: (array.shape[0], f"{array.dtype} x {array.shape[1]}") for name, array in served.tables.items()}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise UserError(
                f"apply: table {name!r} is {_said(theirs.get(name))} in {link.folder} and {_said(ours.get(name))} in "
                "the copy: they are of different models. Load a full checkpoint of the same run."
            )


def _said(shape: tuple[int, str] | None) -> str:
    return "absent" if shape is None else f"{shape[0]} rows of {shape[1]}"


def _in_memory(model: Trained) -> Served:
    maps = {table: _read(leaves) for table, leaves in model.maps.items()}
    return Served(model.step, model.digest, _read(model.tables), _read(model.params), maps)


def _read(arrays: Mapping[str, AnyArray]) -> dict[str, np.ndarray]:
    return {name: array[...] for name, array in arrays.items()}
