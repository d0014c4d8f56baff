"""Rules that keep some edges of a row: no random numbers, the same on host and device to the bit.

Of a row of n edges, slot k = 0 ... slots - 1 takes the edge at this position, with a width of S:

    strategy            slots           position
    bucket              min(n, S)       k
    fastrand            min(n, S)       k if n < S, else (prime * k) mod n
    quadratic_residue   min(n, S)       k if n < S, else q(k) mod n
    rate                ceil(n * rate)  q(k) mod n
    rate_stride         ceil(n * rate)  floor(k / rate)

    q(k) = r if k <= 10883 else 21767 - r, where r = (k^2 + seed) mod 21767

A rate is the nearest fraction with a denominator of at most 10,000, and all arithmetic is exact; a rate's slots end at
S too. k is counted within the row. (Published code counts from the beginning of all edges: it leaves int32, and the
row, from edge 46,341 on.)

`bucket` depends on the order of edges in a row. `fastrand` takes fewer distinct edges where prime and n have a common
divisor (n = 577: one edge, again and again); `quadratic_residue` does so often, even at n = S.
"""

import dataclasses
import fractions
import functools
from types import ModuleType
from typing import Literal, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from scalejax.errors import UserError, check_one_of
from scalejax.kernels.sampled_spmm.csr import Csr, Stored, index_dtype
from scalejax.kernels.types import AnyArray

Strategy = Literal["bucket", "fastrand", "quadratic_residue", "rate", "rate_stride"]
STRATEGIES = ("bucket", "fastrand", "quadratic_residue", "rate", "rate_stride")
PRIMES = (577, 769, 983, 1193, 1429, 1619, 1871, 2089, 2339, 2579)
"""Of "fastrand" with `prime=None`: the one at seed mod 10."""

A = TypeVar("A", np.ndarray, jax.Array)

_MODULUS = 21767
_DENOMINATOR = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeSampling:
    """A rule; static. Its methods take NumPy or JAX arrays of int32 that broadcast, and kernels may call them.

    Attributes:
      strategy: As in the table above.
      prime: Of "fastrand"; None = `PRIMES` by seed.
      seed: >= 0: of `q`, and of the choice of prime.
      rate: In [0.0001, 1], for the two strategies that have one, else None.

    Raises:
      UserError: a value is out of range, or the strategy is unknown or does not fit the rate.
    """

    strategy: Strategy = "bucket"
    prime: int | None = 577
    seed: int = 0
    rate: float | None = None

    def __post_init__(self):
        check_one_of("Sampling: strategy", self.strategy, STRATEGIES)
        if self.prime is not None and not (_is_whole(self.prime) and self.prime >= 1):
            raise UserError(
                f"Sampling: prime must be at least 1, a whole number, or None for a prime by seed; got {self.prime!r}."
            )
        if not (_is_whole(self.seed) and self.seed >= 0):
            raise UserError(f"Sampling: seed must be at least 0, a whole number; got {self.seed!r}.")
        if self.by_rate and (self.rate is None or not 1 / _DENOMINATOR <= self.rate <= 1.0):
            raise UserError(f'Sampling: strategy "{self.strategy}" wants a rate in [0.0001, 1]; got {self.rate}.')
        if not self.by_rate and self.rate is not None:
            raise UserError(
                f'Sampling: strategy "{self.strategy}" has no rate; got {self.rate}. Leave it out, or name "rate".'
            )

    @property
    def by_rate(self) -> bool:
        """Whether the rate says how many edges a row keeps."""
        return self.strategy in ("rate", "rate_stride")

    def slots(self, degrees: A, width: int) -> A:
        """Edges that rows keep: int32, like `degrees`."""
        numpy = _module(degrees)
        if self.by_rate:
            above, below = self._fraction()
            whole, rest = degrees // below, degrees % below  # degrees * above may leave int32
            return numpy.minimum(whole * above + (rest * above + below - 1) // below, width)
        return numpy.minimum(degrees, width)

    def positions(self, slot: A, degrees: A, width: int) -> A:
        """Position inside the row, int32, for each slot below `slots(degrees, width)`; anything in the row beyond."""
        numpy = _module(degrees)
        degrees = numpy.maximum(degrees, 1)
        if self.strategy == "bucket":
            return numpy.minimum(slot, degrees - 1)
        if self.strategy == "rate_stride":
            above, below = self._fraction()
            return numpy.minimum(slot // above * below + slot % above * below // above, degrees - 1)
        hashed = self._fastrand(slot, width) if self.strategy == "fastrand" else self._residue(slot, numpy)
        hashed = hashed % degrees
        if self.strategy == "rate":
            return hashed
        return numpy.where(degrees < width, numpy.minimum(slot, degrees - 1), hashed)

    def _fraction(self) -> tuple[np.int32, np.int32]:
        # Division of floats is a product with the inverse in some compiled programs, and then differs by a position.
        assert self.rate is not None
        fraction = fractions.Fraction(self.rate).limit_denominator(_DENOMINATOR)
        return np.int32(fraction.numerator), np.int32(fraction.denominator)

    def _fastrand(self, slot: A, width: int) -> A:
        prime = PRIMES[self.seed % len(PRIMES)] if self.prime is None else self.prime
        if prime * (width - 1) >= 2**31:
            raise UserError(
                f"Sampling: prime * (width - 1) must stay below 2^31; got {prime} and {width}. Take a smaller prime."
            )
        return slot * np.int32(prime)

    def _residue(self, slot: A, numpy: ModuleType) -> A:
        reduced = slot % np.int32(_MODULUS)  # its square stays within int32
        residue = (reduced * reduced + np.int32(self.seed % _MODULUS)) % np.int32(_MODULUS)
        return numpy.where(slot <= _MODULUS // 2, residue, _MODULUS - residue)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ell:
    """The picked edges, S slots a row, filled from the front.

    Attributes:
      indices: int[N, S], columns; 0 in slots without an edge.
      edges: int[N, S], their positions in the CSR; 0 in slots without an edge.
      counts: int32[N], filled slots.
      degrees: int32[N], edges of the row in the CSR.
      values: [N, S], values of the CSR at the picked edges (0 in slots without one); None = all ones.
      shape: (N, M).
      csr_nnz: Edges of the CSR; None = not known, and then the length of `values` is not checked.
    """

    indices: Stored
    edges: Stored
    counts: Stored
    degrees: Stored
    values: Stored = None
    shape: tuple[int, int] = dataclasses.field(kw_only=True, metadata={"static": True})
    csr_nnz: int | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    @property
    def width(self) -> int:
        """S, the slots of a row."""
        return self.indices.shape[1]

    def filled(self) -> Stored:
        """bool[N, S]: which slots hold an edge."""
        slots = _module(self.counts).arange(self.width, dtype=np.int32)
        return slots[None, :] < self.counts[:, None]

    def check_form(self) -> "Ell":
        """The same picks, once the shapes of their arrays are looked through, which may be traced.

        Raises:
          UserError: one of them does not fit.
        """
        rows = (self.shape[0],)
        slots = rows + self.indices.shape[1:]
        wanted = {"indices": slots, "edges": slots, "counts": rows, "degrees": rows, "values": slots}
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array is not None and (array.shape != shape or len(slots) != 2):
                raise UserError(
                    f"Ell: {name} must have the shape ({', '.join(('N', 'S')[: len(shape)])}) with N = {rows[0]}; "
                    f"got {list(array.shape)}. Make it with presample."
                )
        return self

    def to_csr(self) -> Csr:
        """The picked edges alone as a CSR, on the host; those of a row in the order of the slots.

        Raises:
          UserError: it is traced, or not well formed.
        """
        self.check_form()
        if any(isinstance(array, Tracer) for array in jax.tree.leaves(self)):
            raise UserError("Ell.to_csr: picks must have values; got traced ones. Plan them outside of jax.jit.")
        filled, counts = np.asarray(self.filled()), np.asarray(self.counts)
        indices = np.asarray(self.indices)[filled]
        indptr = np.zeros(self.shape[0] + 1, indices.dtype)
        np.cumsum(counts, out=indptr[1:])
        values = None if self.values is None else np.asarray(self.values)[filled]
        return Csr(indptr, indices, values, shape=self.shape)


def presample(
    csr: Csr,
    width: int | None = None,
    *,
    strategy: Strategy = "bucket",
    prime: int | None = 577,
    seed: int = 0,
    rate: float | None = None,
) -> Ell:
    """Picks the edges of every row once: on the host where `csr` holds NumPy arrays, else on the device, under jit too.

    Args:
      csr: The graph; of one with JAX arrays only shapes and dtypes are checked.
      width: S, at least 1: the most edges that a row keeps. None (for NumPy arrays and a rate) = all that the rate asks
        for.
      strategy: Which rule, see the table of this module.
      prime: Of "fastrand"; None = the prime of `PRIMES` at seed mod 10.
      seed: At least 0.
      rate: In [0.0001, 1], for the strategies "rate" and "rate_stride".

    Raises:
      UserError: an argument is out of range, or does not fit the strategy, or the graph is not well formed.
    """
    sampling = EdgeSampling(strategy=strategy, prime=prime, seed=seed, rate=rate)
    if not isinstance(csr, Csr):
        raise UserError(f"presample: csr must be a Csr; got {type(csr).__name__}. Pass the one that you would plan.")
    on_host = isinstance(csr.indptr, np.ndarray) and isinstance(csr.indices, np.ndarray)
    csr = csr.check() if on_host else csr.check_form()
    return pick(csr, _width(csr, width, sampling, on_host), sampling, np if on_host else jnp)


def pick(csr: Csr, width: int, sampling: EdgeSampling, numpy: ModuleType = jnp) -> Ell:
    """`presample` by a rule, in NumPy or JAX."""
    dtype = index_dtype(csr.nnz, csr.shape)
    indptr, indices = (array.astype(dtype, copy=False) for array in (csr.indptr, csr.indices))
    degrees = (indptr[1:] - indptr[:-1]).astype(np.int32)
    slot = numpy.arange(width, dtype=np.int32)[None, :]
    counts = sampling.slots(degrees, width).astype(np.int32)
    positions = sampling.positions(slot, degrees[:, None], width).astype(dtype)
    filled = slot < counts[:, None]
    ell = functools.partial(Ell, shape=csr.shape, csr_nnz=csr.nnz)
    if not csr.nnz:
        nothing = numpy.zeros(filled.shape, dtype)
        values = None if csr.values is None else nothing.astype(csr.values.dtype)
        return ell(nothing, nothing, counts, degrees, values)
    edges = numpy.where(filled, indptr[:-1, None] + positions, 0)
    values = None
    if csr.values is not None:
        values = numpy.where(filled, csr.values[edges], csr.values.dtype.type(0))
    return ell(numpy.where(filled, indices[edges], 0), edges, counts, degrees, values)


def sampling_rate(csr: Csr, width: int) -> float:
    """Share of the edges that are kept with at most `width` a row: sum of min(n, S) / nnz; 1 for a graph without any.

    Raises:
      UserError: width is below 1.
    """
    check_width("sampling_rate", width)
    if not csr.nnz:
        return 1.0
    degrees = np.diff(np.asarray(csr.indptr))
    return float(np.minimum(degrees, width).sum() / csr.nnz)


def check_width(op: str, width: object) -> None:
    if not _is_whole(width) or width < 1:
        raise UserError(f"{op}: width must be a whole number of edges, at least 1; got {width!r}.")


def _is_whole(number: object) -> TypeGuard[int]:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _width(csr: Csr, width: int | None, sampling: EdgeSampling, on_host: bool) -> int:
    if width is None and sampling.by_rate and on_host:
        degrees = np.diff(csr.indptr).astype(np.int32)
        return max(1, int(sampling.slots(degrees, 2**31 - 1).max(initial=0)))
    check_width("presample", width)
    assert width is not None
    return int(width)


def _module(array: AnyArray) -> ModuleType:
    return jnp if isinstance(array, jax.Array) else np
