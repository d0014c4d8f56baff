"""The schema of a table of examples: categorical features, dense features, labels and an optional group.

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
      max_length: Most ids that an example of a jagged feature may have (max_sequence_length in FBGEMM and TensorFlow);
        an example with more is an error wherever it is met. Tables with pooling "none" need it: it is the number of
        positions that their rows come in. None = any number.
      capacity: Ids per example that the device form has room for, on average over one device's share of a batch.
        None = `length` or `max_length`. Required where both are None.
    """

    name: str
    rows: int | None
    length: int | None = 1
    max_length: int | None = None
    capacity: float | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(
                f"Categorical {self.name!r}: rows must be at least 1, or None for any 64-bit id; got {self.rows}."
            )
        if self.length is not None and self.length < 1:
            raise ValueError(f"Categorical {self.name!r}: length must be at least 1, or None; got {self.length}.")
        if self.max_length is not None:
            self._check_max_length(self.max_length)
        if self.length is None and self.capacity is None and self.max_length is None:
            raise ValueError(
                f"Categorical {self.name!r}: a jagged feature (length=None) needs capacity, the mean number of ids "
                "per example that a device's share of a batch has room for, or max_length, the largest number."
            )

    def _check_max_length(self, most: int) -> None:
        if self.length is not None:
            raise ValueError(
                f"Categorical {self.name!r}: max_length is for jagged features; got max_length={most} beside "
                f"length={self.length}, the number of ids of every example. Set length=None, or leave max_length out."
            )
        if most < 1:
            raise ValueError(f"Categorical {self.name!r}: max_length must be at least 1, or None; got {most}.")
        if self.capacity is not None and self.capacity > most:
            raise ValueError(
                f"Categorical {self.name!r}: capacity must be at most max_length={most}, for no example has more ids; "
                f"got {self.capacity}. Lower it, or leave it out to have room for {most} ids in every example."
            )

    @property
    def room_per_example(self) -> float:
        """Ids per example that the device form has room for, on average over one device's share of a batch."""
        for room in (self.length, self.capacity, self.max_length):
            if room is not None:
                return float(room)
        raise AssertionError  # __post_init__ refuses the rest

    def capacity_for(self, examples: int) -> int:
        """Slots that the device form reserves for this feature in `examples` examples."""
        return max(1, int(-(-self.room_per_example * examples // 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns of a data set, in the order in which batches hold them.

    Attributes:
      categorical: Sparse features; `Batch.features` has these keys in this order.
      dense: Names of the float32 columns of `Batch.dense`.
      labels: Names of the columns of `Batch.labels`, one per task, each in {0, 1}.
      group: Name of the column behind `Batch.groups` (GAUC), or None.
      weight: Name of the column behind `Batch.weights`, or None: every example weighs 1.
    """

    categorical: tuple[Categorical, ...]
    dense: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    group: str | None = None
    weight: str | None = dataclasses.field(default=None, repr=False)  # fingerprints of old runs are made of the repr

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
