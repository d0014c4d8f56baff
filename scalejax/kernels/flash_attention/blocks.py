"""Block sizes as data."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaChunks:
    """Sizes of the form in XLA.

    Attributes:
      queries: Most queries of a chunk.
      keys: Keys of a chunk where a row has so many; more, where queries are few.
      scores: Scores that are held at a time (4 bytes each), where one unit does not have more.
    """

    queries: int
    keys: int
    scores: int


XLA = XlaChunks(queries=256, keys=512, scores=2**20)
