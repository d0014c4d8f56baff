"""Random graphs with the rows that go wrong, and the rules of sampling as literal loops."""

import math
from fractions import Fraction

import numpy as np

from scalejax.kernels.sampled_spmm import PRIMES, Csr

DEGREES = (0, 1, 3, 7, 8, 9, 0, 40, 64, 100, 577, 1154, 0, 3000, 257, 256, 5, 0)
"""Empty rows, some at both sides of a width of 8 and of 256, multiples of 577 and a giant."""


def random_csr(seed, *, degrees=DEGREES, columns=50, weighted=True):
    """A graph with these degrees; columns come in no order and more than once."""
    rng = np.random.default_rng(seed)
    degrees = np.asarray(degrees)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    indices = rng.integers(0, columns, indptr[-1]).astype(np.int32)
    values = rng.standard_normal(indptr[-1]).astype(np.float32) if weighted else None
    return Csr(indptr, indices, values, shape=(degrees.size, columns))


def literal_picks(csr, width, strategy, *, prime=577, seed=0, rate=None):
    """Positions in the CSR of the picked edges of every row, by Python's integers."""
    picks = []
    for row in range(csr.shape[0]):
        begin, n = int(csr.indptr[row]), int(csr.indptr[row + 1] - csr.indptr[row])
        if rate is None:
            slots = min(n, width)
        else:
            slots = min(math.ceil(n * Fraction(rate).limit_denominator(10_000)), width)
        picks.append([begin + _position(k, n, width, strategy, prime, seed, rate) for k in range(slots)])
    return picks


def _position(k, n, width, strategy, prime, seed, rate):
    if strategy == "bucket":
        return k
    if strategy == "rate_stride":
        return math.floor(k / Fraction(rate).limit_denominator(10_000))
    if strategy != "rate" and n < width:
        return k
    if strategy == "fastrand":
        return (PRIMES[seed % 10] if prime is None else prime) * k % n
    r = (k * k + seed) % 21767
    return (r if k <= 21767 // 2 else 21767 - r) % n
