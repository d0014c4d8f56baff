"""Embedding tables and their optimizers as data.

The optimizers are *row* optimizers: a step touches exactly the rows that the batch looked up. A row that occurs
several times gets one update with the sum of its gradients ("exact" in FBGEMM's vocabulary), so that the result equals
the same optimizer on the full table for SGD and the AdaGrad family. The others (momentum, Adam, LAMB) leave the moments
of rows that a batch does not touch as they are, where an optimizer on the full table would let them decay.

All take `weight_decay`, coupled ("l2": weight_decay * w joins the gradient, statistics included) or "decoupled" (w
shrinks by learning rate * weight_decay), and `max_norm`: rows that are longer after their update are scaled back to it.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

from scalejax.errors import UserError, check_at_least, check_one_of

if TYPE_CHECKING:
    from scalejax.numerics.quantized.rules import QuantizationRule

Pooling = Literal["sum", "mean", "none"]
WeightDecay = Literal["l2", "decoupled"]
Policy = Literal["lfu", "lru", "ttl"]

_MOST_ROWS = 1 << 30

GRANULE_COLUMNS = 16
"""Sums over the columns of a row are formed of blocks of this many, so that column slices can form them too; sums in
fixed point share a power of two within them (`kernels.embedding_bag.fixed_point.BLOCK`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """What all row optimizers share.

    Attributes:
      learning_rate: Times the factor that a step is given.
      weight_decay: 0 = none.
      weight_decay_mode: "l2" or "decoupled".
      max_norm: Longest row (2-norm) after an update; None = no limit.
    """

    learning_rate: float = 0.01
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecay = "l2"
    max_norm: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_one_of(f"{name}: weight_decay_mode", self.weight_decay_mode, ("l2", "decoupled"))
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"{name}: max_norm must be positive, or None for no limit; got {self.max_norm}.")

    @property
    def uses_row_norms(self) -> bool:
        """Whether an update needs the whole row at once."""
        return self.max_norm is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(_Row):
    """w -= lr * g."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(_Row):
    """v += g^2;  w -= lr * g / (sqrt(v) + eps).  State: float32[rows, dim]."""

    eps: float = 1e-8
    initial_accumulator: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(_Row):
    """v += mean(g^2);  w -= lr * g / (sqrt(v) + eps).  State: float32[rows].

    Source: the row-wise form of FBGEMM and TorchRec (EXACT_ROWWISE_ADAGRAD).

    Attributes:
      eps: Added outside the root.
      initial_accumulator: What v starts from.
      statistic: What the mean is over where a table is cut into columns. "row": the whole row, the same to the bit as
        without cuts, for an exchange of 4 bytes per block of 16 columns and id; "slice": each slice by itself, as
        FBGEMM and TorchRec do it: another optimizer, with one state a slice, whose checkpoints keep that number of
        slices.
    """

    eps: float = 1e-8
    initial_accumulator: float = 0.0
    statistic: Literal["row", "slice"] = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("RowwiseAdagrad: statistic", self.statistic, ("row", "slice"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(_Row):
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr * m' / (sqrt(v') + eps).

    m' = m / (1 - b1^t), v' = v / (1 - b2^t), where t counts the updates of the whole collection.
    State: two of float32[rows, dim].
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRowwiseAdam(_Row):
    """Adam whose v is the moving mean over the row of g^2.  State: float32[rows, dim] and float32[rows]."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def uses_row_norms(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lamb(_Row):
    """Adam's direction d = m' / (sqrt(v') + eps) + weight_decay w;  w -= lr * |w| / |d| * d, with norms of the row.

    The ratio is 1 where either norm is 0. `weight_decay_mode` is not read: LAMB has a place of its own for it.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def uses_row_norms(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRowwiseLamb(Lamb):
    """LAMB whose v is the moving mean over the row of g^2.  State: float32[rows, dim] and float32[rows]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LarsSgd(_Row):
    """rate = lr * eta * |w| / (|g| + weight_decay |w|);  m = momentum m + rate (g + weight_decay w);  w -= m.

    Norms are of the row; the rate is lr * eta where |w| is 0. State: float32[rows, dim]. `weight_decay_mode` is not
    read: LARS has a place of its own for it.
    """

    momentum: float = 0.9
    eta: float = 0.001

    @property
    def uses_row_norms(self) -> bool:
        return True


RowOptimizer = Sgd | Adagrad | RowwiseAdagrad | Adam | PartialRowwiseAdam | Lamb | PartialRowwiseLamb | LarsSgd

Leaf = Literal["element", "row"]
"""Whether a row state has one number per element or per row."""


def row_states(optimizer: RowOptimizer) -> dict[str, Leaf]:
    """The row states of an optimizer, in the order in which its step takes them."""
    match optimizer:
        case Sgd():
            return {}
        case Adagrad():
            return {"accumulator": "element"}
        case RowwiseAdagrad():
            return {"accumulator": "row"}
        case PartialRowwiseAdam() | PartialRowwiseLamb():
            return {"moment1": "element", "moment2": "row"}
        case Adam() | Lamb():
            return {"moment1": "element", "moment2": "element"}
        case LarsSgd():
            return {"momentum": "element"}


def row_state_bytes(optimizer: RowOptimizer, dim: int) -> int:
    """Bytes of the float32 states of one row."""
    return sum(4 * (dim if kind == "element" else 1) for kind in row_states(optimizer).values())


MOST_ROWS = 2**31 - 2**24
"""Rows of a table, and of a stack on one device, that int32 can number. Fillers of an update, and the padding of tables
that are striped, need numbers above the last row."""

UPDATED = "updated"
"""Name of the row state of tracked tables: int32[rows], the number of the update that last touched a row; 0 = none."""


_SHOWN = 4
"""Numbers of devices that a message names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdMapConfig:
    """A map of 64-bit ids to the rows of one table, see `id_map`.

    Attributes:
      rows: Rows of the table, row 0 included: 1 + buckets * `ways`, where the number of devices divides the buckets.
      ways: Rows among which an id can be placed. More ways waste fewer rows before the map is full and cost more
        comparisons.
      policy: Who is evicted, see `id_map`.
      admit_after: Sightings (occurrences) after which an id gets a row; 1 = at once.
      candidate_ways: Ids per bucket whose sightings are counted while they wait (with `admit_after` > 1).
      ttl_steps: With policy "ttl": steps after which an id that is not seen can be evicted. None otherwise.
    """

    rows: int
    ways: int = 8
    policy: Policy = "lfu"
    admit_after: int = 1
    candidate_ways: int = 8
    ttl_steps: int | None = None

    def __post_init__(self) -> None:
        check_at_least("IdMapConfig: ways", self.ways, 1)
        if self.rows < 1 + self.ways or (self.rows - 1) % self.ways:
            below = 1 + max(1, (self.rows - 1) // self.ways) * self.ways
            raise UserError(
                f"IdMapConfig: rows must be 1 (row 0 is for ids without a row) + a multiple of ways={self.ways}; got "
                f"{self.rows}. The nearest that fit: {below} and {below + self.ways}."
            )
        if self.rows > _MOST_ROWS:
            raise UserError(f"IdMapConfig: rows must be at most 2**30 = {_MOST_ROWS}; got {self.rows}.")
        check_one_of("IdMapConfig: policy", self.policy, ("lfu", "lru", "ttl"))
        if self.admit_after < 1:
            raise UserError(
                f"IdMapConfig: admit_after must be at least 1 (an id is admitted when first seen); got "
                f"{self.admit_after}."
            )
        check_at_least("IdMapConfig: candidate_ways", self.candidate_ways, 1)
        if (self.policy == "ttl") != (self.ttl_steps is not None) or (self.ttl_steps or 0) < 0:
            raise UserError(
                f"IdMapConfig: ttl_steps must be a number of steps, at least 0, with policy 'ttl', and None with the "
                f"others; got ttl_steps={self.ttl_steps} with policy {self.policy!r}."
            )

    @property
    def buckets(self) -> int:
        """Buckets of the whole map."""
        return (self.rows - 1) // self.ways

    def device_bytes(self, devices: int) -> int:
        """Bytes of the map on each of so many devices: id, count and last step (16) of every way and candidate."""
        entries = self.ways + (self.candidate_ways if self.admit_after > 1 else 0)
        return 16 * entries * -(-self.buckets // devices)

    def refusal(self, devices: int) -> str | None:
        """Why the map cannot be cut over so many devices, as the end of a sentence about it; None if it can."""
        if self.buckets % devices == 0:
            return None
        fewer = [number for number in range(devices, 0, -1) if self.buckets % number == 0][:_SHOWN]
        more = [number for number in range(devices, 4 * devices + 1) if self.buckets % number == 0][:1]
        step = devices * self.ways
        return (
            f"has {self.buckets} buckets of {self.ways} ways, which do not divide over {devices} devices. A map with "
            f"ids in it keeps its buckets: it can be on {', '.join(map(str, sorted(fewer + more)))} devices or another "
            f"divisor of {self.buckets}. A new one can have rows={1 + -(-self.buckets // devices) * step}, or another "
            f"1 + multiple of {step}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedFeatures:
    """Features whose ids are any 64-bit integers.

    Attributes:
      features: Their names; each table that looks some of them up gets a map of its own.
      id_map: The map, and with it the rows of the table.
    """

    features: tuple[str, ...]
    id_map: IdMapConfig

    def __post_init__(self) -> None:
        if not self.features:
            raise UserError("MappedFeatures: features must name at least one feature; got none.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table.

    Attributes:
      name: Unique in a collection.
      rows: Number of rows, at most `MOST_ROWS`; ids of its features lie in [0, rows).
      dim: Width of a row.
      features: Names of the features that look rows up here (several features may share a table).
      pooling: How the rows of one example become one vector: "sum" or "mean" (zeros for an empty bag), or "none": the
        rows in order, [B, length, dim] for features of fixed length and [B, max_length, dim] for jagged ones, whose
        positions behind the last row are zeros (`EmbeddingCollection.lengths` says where they begin).
      dtype: Dtype of the rows at rest.
      optimizer: The row optimizer.
      init_scale: Rows start uniform in [-init_scale, init_scale]; None = 1/sqrt(rows), the DLRM convention.
      rounding: How updated rows become bfloat16 or float16. "stochastic" rounds up or down in proportion, so
        that updates below half a unit in the last place add up; the draw is a function of table, row, column and
        step, the same on every mesh.
      id_map: None = ids are row numbers; otherwise ids are any 64-bit integers, and a map on the devices gives them
        rows. It has as many as the table.
      track: "updates" keeps with every row the number of the update that last touched it (4 bytes a row), which is what
        checkpoints of touched rows are made from.
      reads: The number format that rows are read in: of its rule, that of weights. They rest and are updated as they
        are. None = as they are.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling = "sum"
    dtype: str = "float32"
    optimizer: RowOptimizer = RowwiseAdagrad()
    init_scale: float | None = None
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    id_map: IdMapConfig | None = None
    track: Literal["nothing", "updates"] = "nothing"
    reads: "QuantizationRule | None" = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise ValueError(
                f"TableConfig {self.name!r}: rows and dim must be at least 1; got {self.rows}, {self.dim}."
            )
        if self.rows > MOST_ROWS:
            raise UserError(
                f"TableConfig {self.name!r}: rows must be at most {MOST_ROWS:,}, what int32 can number with room for "
                f"the padding above; got {self.rows:,}. Give it an id map, which has rows for the ids in use alone "
                "(id_map=IdMapConfig(...)), or split its ids over several tables."
            )
        if not self.features:
            raise ValueError(f"TableConfig {self.name!r}: features must name at least one feature; got none.")
        check_one_of(f"TableConfig {self.name!r}: pooling", self.pooling, ("sum", "mean", "none"))
        check_one_of(f"TableConfig {self.name!r}: rounding", self.rounding, ("stochastic", "nearest"))
        if self.id_map is not None and self.id_map.rows != self.rows:
            raise UserError(
                f"TableConfig {self.name!r}: rows must be those of its id map, {self.id_map.rows}; got {self.rows}. "
                "Set rows=id_map.rows."
            )
        check_one_of(f"TableConfig {self.name!r}: track", self.track, ("nothing", "updates"))
