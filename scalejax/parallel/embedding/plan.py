"""Where the rows of each table live, and how much room an exchange has."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Room in the routed all_to_all.

    Attributes:
      capacity_factor: Slots per destination, as a multiple of what evenly spread ids would need.
    """

    capacity_factor: float = 2.0
