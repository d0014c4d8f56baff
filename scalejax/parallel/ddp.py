"""Stand-in."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ddp:
    """Stand-in."""

    bucket_bytes: int = 25 * 2**20
