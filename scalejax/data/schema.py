"""What a table of examples holds: its categorical features, numbers, labels and optional group.

A `Schema` is plain data. It is the only thing that a model and a data source must agree on.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Categorical:
    """One categorical feature: each example holds zero or more ids.

    Attributes:
      name: Feature name, unique in a schema.
      rows: Number of distinct ids; an id outside [0, rows) is an error wherever it is met. None = any 64-bit integer
        is an id (hashes, for instance; -1 and 2**64 - 1 are the same one), for tables with an id map.
      length: Ids per example when every example has the same number (1 = one-hot); None = jagged (multi-hot).
      capacity: Ids per example that the device form has room for, on average over one device's share of a batch.
        None = `length`. Required where `length` is None.
    """

    name: str
    rows: int | None
    length: int | None = 1
    capacity: float | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(
                f"Categorical {self.name!r}: rows must be at least 1, or None for any 64-bit id; got {self.rows}."
            )
        if self.length is not None and self.length < 1:
            raise ValueError(f"Categorical {self.name!r}: length must be at least 1, or None; got {self.length}.")
        if self.length is None and self.capacity is None:
            raise ValueError(
                f"Categorical {self.name!r}: a jagged feature (length=None) needs capacity, the mean number of ids "
                "per example that a device's share of a batch has room for."
            )

    def capacity_for(self, examples: int) -> int:
        """Slots that the device form reserves for this feature in `examples` examples."""
        if self.length is not None:
            return self.length * examples
        assert self.capacity is not None  # __post_init__ refuses the rest
        return max(1, int(-(-self.capacity * examples // 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns of a data set, in the order in which batches hold them.

    Attributes:
      categorical: Sparse features; `Batch.features` has these keys in this order.
      dense: Names of the float32 columns of `Batch.dense`.
      labels: Names of the columns of `Batch.labels`, one per task, each in {0, 1}.
      group: Name of the column behind `Batch.groups` (GAUC), or None.
    """

    categorical: tuple[Categorical, ...]
    dense: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    group: str | None = None

    def __post_init__(self) -> None:
        names = [c.name for c in self.categorical]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"Schema: feature names must be unique; {', '.join(twice)} appear more than once.")

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the categorical features, in order."""
        return tuple(c.name for c in self.categorical)

    def __getitem__(self, name: str) -> Categorical:
        for feature in self.categorical:
            if feature.name == name:
                return feature
        raise KeyError(f"Schema: no categorical feature {name!r}; there are {', '.join(self.keys)}.")
