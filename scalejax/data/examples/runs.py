"""Runs of rows that stay together: the sessions of a log that is clustered by session.

The order of training permutes sessions; the rows of a session keep their places side by side, in file order. Batches
are cut from that order B rows at a time, and every row appears once in an epoch. A session is therefore cut where the
end of a batch falls inside it (its other rows begin the next batch), where the slices of two processes of one batch
meet, and nowhere else.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalejax.data.examples.jagged import gather_runs, lengths_to_offsets
from scalejax.data.permutation import Permutation
from scalejax.data.splits import ByPosition
from scalejax.errors import UserError


class RunOrder:
    """A permutation of range(sum(lengths)) that permutes runs of given lengths; position -> element.

    Args:
      lengths: int64[M] of the runs, in the order of the elements.
      key: Integers that choose the permutation of the runs, `Permutation(M, *key)`.
    """

    def __init__(self, lengths: np.ndarray, *key: int) -> None:
        order = Permutation(lengths.size, *key)(np.arange(lengths.size))
        self._firsts = lengths_to_offsets(lengths)[order]
        self._places = lengths_to_offsets(lengths[order])

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """int64[N] positions in [0, sum(lengths)) -> int64[N] elements."""
        run = np.searchsorted(self._places, positions, side="right") - 1
        return self._firsts[run] + positions - self._places[run]


@dataclasses.dataclass(frozen=True)
class SessionRuns:
    """The sessions of a part of a log, in file order.

    Attributes:
      sessions: int[M] session of each run.
      lengths: int64[M] rows of each run.
    """

    sessions: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, session: np.ndarray, name: str, where: str) -> "SessionRuns":
        """The runs of equal values of a column, int[N].

        Args:
          session: The column.
          name: Of the column, for messages.
          where: Where it comes from, for messages.
        Raises:
          UserError: sessions are missing or not integers.
        """
        if not np.issubdtype(session.dtype, np.integer):
            raise UserError(
                f"{where}: session column {name!r} must hold an integer in every row; got {session.dtype}. Code "
                "sessions as integers, and leave out rows that have none, when the file is prepared."
            )
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, session.size), bool), session[1:] != session[:-1]]))
        return cls(session[starts], np.diff(np.append(starts, session.size)))

    def rows(self, chosen: np.ndarray) -> np.ndarray:
        """int64[R]: the rows of the runs number `chosen`, run after run."""
        starts = lengths_to_offsets(self.lengths)[:-1]
        return gather_runs(np.arange(int(self.lengths.sum())), starts[chosen], self.lengths[chosen])

    def lengths_among(self, rows: np.ndarray) -> np.ndarray:
        """int64[K]: how many of `rows`, int[R] ascending, each run has that has any."""
        owner = np.repeat(np.arange(self.lengths.size), self.lengths)[rows]
        counts = np.bincount(owner, minlength=self.lengths.size)
        return counts[counts > 0]


def check_whole(parts: Sequence[SessionRuns], name: str, where: Sequence[str]) -> None:
    """Refuses a log of which a session has rows in more than one place.

    Args:
      parts: Runs of each part of the log; a session must not continue in another part.
      name: Column, for messages.
      where: Names of the parts, for messages.
    Raises:
      UserError: naming the session and two places.
    """
    ids = np.concatenate([part.sessions for part in parts])
    places = np.repeat(np.arange(len(parts)), [part.sessions.size for part in parts])
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if again.size:
        session = ids[order[again[0]]]
        first, second = (where[p] for p in places[order[again[0] : again[0] + 2]].tolist())
        raise UserError(
            f"{first}: session {session} of column {name!r} has rows in more than one place (again in {second}), so "
            "they cannot stay together. Cluster the log first: scalejax.data.sessions.clustering.cluster_by_session."
        )


def check_divides(split: object) -> None:
    """Refuses a split by numbers of rows, which would cut a session in two.

    Raises:
      UserError: it is one.
    """
    if isinstance(split, ByPosition):
        raise UserError(
            "split: ByPosition numbers rows, and a session could lie in two splits; with session=... use "
            'Fractions(by="position"), which divides sessions, or ByTime.'
        )
