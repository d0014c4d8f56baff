"""Logical axis of a parameter -> mesh axes."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """A table from logical axis names to mesh axes; what is not named is replicated."""

    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()


REPLICATED = Rules()
