"""A synthetic log of sessions as a data set: made at a seed and clustered on first use, then kept in a cache folder.

What is kept is the clustered log that leaves repeats out (`clustering.cluster_by_session`), one folder for each set of
fields of the log. It appears by one rename when it is complete, so that processes that begin together may all make it:
the first one's is used, and all are equal.
"""

import dataclasses
import hashlib
import os
import pathlib
import tempfile
from typing import Literal

from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.row_transforms import HashIds
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.sessions.generate import SessionLog
from scalejax.data.splits import EIGHTY_TEN_TEN, Split
from scalejax.data.tables.parquet import ParquetData
from scalejax.errors import UserError

_FORMAT = 1
_ROW_GROUP = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionData:
    """Examples of a `SessionLog`, ids hashed into tables of one size.

    Attributes:
      log: What to make.
      rows: Rows of each feature.
      capacity: Room for ids per example and feature, as a multiple of the mean. A batch of few sessions needs more:
        its lists repeat, so their number of ids varies as that of fewer lists.
      lists: "distinct" = batches hold the lists of each group of user-side features once per row of lists
        (`ParquetData.dedup`); "plain" = every list of every row.
      shuffle: "sessions" = sessions are shuffled and a batch holds whole ones; "rows" = rows are shuffled one by one
        (and, by `Fractions`, divided one by one).
      split: How examples are divided; columns session_id and timestamp are there.
      access: As in `ParquetData`.
      window: As in `ParquetData`.
      folder: Where logs are kept; None = scalejax/data in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).
      batch_size: Global batch size.
      seed: Of the order of training (the log has its own).
      threads: Reading threads.
    """

    log: SessionLog
    rows: int = 100_000
    capacity: float = 1.6
    lists: Literal["distinct", "plain"] = "distinct"
    shuffle: Literal["sessions", "rows"] = "sessions"
    split: Split = EIGHTY_TEN_TEN
    access: Literal["memory", "windows"] = "memory"
    window: int = 4
    folder: str | None = None
    batch_size: int = 2048
    seed: int = 0
    threads: int = 2

    def schema(self) -> Schema:
        """What batches hold; does no I/O."""
        log = self.log
        items = {name: log.item_ids for name in log.item_names}
        return Schema(
            categorical=tuple(
                Categorical(
                    name=name,
                    rows=self.rows,
                    length=None,
                    capacity=max(1.0, self.capacity * items.get(name, log.user_ids)),
                )
                for name in log.names
            ),
            dense=log.dense_names,
        )

    def build(self) -> BatchedDataSet:
        """Opens the log, which is made if this is its first use.

        Raises:
          UserError: it cannot be kept in the folder, or what is kept there is damaged.
        """
        schema = self.schema()
        return ParquetData(
            path=str(self._kept()),
            categorical=schema.categorical,
            dense=schema.dense,
            split=self.split,
            access=self.access,
            window=self.window,
            session="session_id" if self.shuffle == "sessions" else None,
            dedup=self.log.groups if self.lists == "distinct" else (),
            transforms=tuple((name, HashIds(rows=self.rows, seed=f)) for f, name in enumerate(self.log.names)),
            batch_size=self.batch_size,
            seed=self.seed,
            threads=self.threads,
        ).build()

    def _kept(self) -> pathlib.Path:
        from scalejax.data.sessions.clustering import cluster_by_session

        folder = _cache_folder() if self.folder is None else pathlib.Path(self.folder)
        name = hashlib.sha256(repr((_FORMAT, _ROW_GROUP, self.log)).encode()).hexdigest()[:16]
        target = folder / f"sessions-{name}"
        if target.exists():
            return target
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as made:
                source, clustered = pathlib.Path(made) / "log.parquet", pathlib.Path(made) / "clustered"
                self.log.write(source, row_group=_ROW_GROUP)
                cluster_by_session(source, clustered, row_group=_ROW_GROUP, groups=self.log.groups)
                try:
                    os.rename(clustered, target)
                except OSError:
                    if not target.exists():  # else another process was first
                        raise
        except OSError as error:
            raise UserError(
                f"{folder}: the log of sessions cannot be kept there ({error.strerror}). Set data.folder to a folder "
                "that can be written."
            ) from error
        return target


def _cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return pathlib.Path(base) / "scalejax" / "data"
