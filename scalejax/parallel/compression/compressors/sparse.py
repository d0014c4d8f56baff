"""A few values of a row: the k largest (top-k), or k random ones (random-k). The others decode to zeros."""

import dataclasses
import numbers
from typing import Literal

import jax
import jax.numpy as jnp

from scalejax.errors import UserError, check_one_of
from scalejax.parallel.compression.compressors import selection
from scalejax.parallel.compression.compressors.casts import from_float16, to_float16
from scalejax.parallel.compression.compressors.norms import finite
from scalejax.parallel.compression.compressors.protocol import (
    Compressor,
    Growth,
    Payload,
    Traits,
    check_count,
    check_key,
    check_values,
)

Values = Literal["float32", "float16"]
_BYTES = {"float32": 4, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKEntries:
    """The k values of largest magnitude and their places; of equal ones the first. ||C(x) - x||^2 <= (1 - k/n) ||x||^2.

    A pair takes 8 bytes, as the released encoder stores it even for float16 gradients, or 6 with values in float16, as
    the paper counts: at k = 0.1 % a 250th or a 333rd of float16. Beyond n / 4 pairs nothing is saved against float16.

    Attributes:
      k: Pairs, or a fraction of the row below 1: rounded down, at least one pair.
      values: What they travel as. Of float16 one that it has not makes the row NaN.
    """

    k: int | float = 0.001
    values: Values = "float32"

    def __post_init__(self) -> None:
        check_one_of("TopKEntries: values", self.values, tuple(_BYTES))
        object.__setattr__(self, "k", _whole_or_fraction("TopKEntries: k", self.k))

    @property
    def traits(self) -> Traits:
        """Biased."""
        return Traits(f"top-k, k={self.k}", "none", "biased")

    def check(self, n: int) -> None:
        """Refuses k > n."""
        _check_row(self, self.k, n)

    def payload_bytes(self, n: int) -> int:
        """8 or 6 a pair."""
        return _count(self.k, n) * (4 + _BYTES[self.values])

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"places": uint32[rows, k], ascending; "values": float32 or float16[rows, k]}."""
        check_values(self, x, key)
        places = selection.largest(x, _count(self.k, x.shape[1]))
        chosen = jnp.take_along_axis(x, places, axis=1)
        return {"places": places.astype(jnp.uint32), "values": _as(chosen, self.values)}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n]."""
        del key
        return _scatter(payload["places"].astype(jnp.int32), payload["values"], n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomKEntries:
    """k values of each row at places drawn from a key that all devices share, so that no places travel.

    Places are distinct, and the same in every row of a call. The released code draws with replacement, where a place
    drawn twice travels twice and counts once: scaled by n / k values are then too small on average, by about
    (k - 1) / 2n of them.

    Attributes:
      k: Values, or a fraction of the row below 1: rounded down, at least one.
      values: What they travel as. Of float16 one that it has not makes the row NaN.
      scale: "n/k" makes what comes back unbiased, for use without error feedback; with "none"
        E ||C(x) - x||^2 = (1 - k/n) ||x||^2, for use with it, and where sums at the same places travel on.
        "by_feedback" is what fits the error feedback of the `Compression` that it is part of; by itself "n/k".
    """

    k: int | float = 1 / 32
    values: Values = "float32"
    scale: Literal["by_feedback", "n/k", "none"] = "by_feedback"

    def __post_init__(self) -> None:
        check_one_of("RandomKEntries: values", self.values, tuple(_BYTES))
        object.__setattr__(self, "k", _whole_or_fraction("RandomKEntries: k", self.k))
        check_one_of("RandomKEntries: scale", self.scale, ("by_feedback", "n/k", "none"))

    @property
    def traits(self) -> Traits:
        """Unbiased if scaled; a key that all devices share."""
        growth, mean = None, "biased"
        if self.scale != "none":
            # E ||C(x) - x||^2 = (n/k - 1) ||x||^2.
            rows = 2 * self.k if isinstance(self.k, int) else 1
            growth, mean = Growth(rows, "values that are scaled by n/k overshoot", "scale", "none"), "unbiased"
        return Traits(f"random-k, k={self.k}", "shared", mean, growth)

    def check(self, n: int) -> None:
        """Refuses k > n."""
        _check_row(self, self.k, n)

    def payload_bytes(self, n: int) -> int:
        """4 or 2 a value."""
        return _count(self.k, n) * _BYTES[self.values]

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"values": float32 or float16[rows, k]}, in the order of places(n, key); NaN of a row that is not finite."""
        check_values(self, x, key)
        assert key is not None
        n = x.shape[1]
        chosen = x[:, self.places(n, key)]
        if self.scale != "none":
            chosen = chosen * jnp.float32(n / _count(self.k, n))
        return {"values": _as(jnp.where(finite(x)[:, None], chosen, jnp.nan), self.values)}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n]."""
        check_key(self, key)
        assert key is not None
        values = payload["values"]
        return _scatter(jnp.broadcast_to(self.places(n, key), values.shape), values, n)

    def places(self, n: int, key: jax.Array) -> jax.Array:
        """int32[k]: where the values of a row of n lie, for error feedback at these places alone."""
        return jnp.sort(selection.distinct(key, n, _count(self.k, n)))


def _count(k: int | float, n: int) -> int:
    """The pairs of a row. A fraction in decimals times n may lie below the whole number that it is."""
    return k if isinstance(k, int) else max(1, int(k * n + 1e-9))


def _whole_or_fraction(name: str, k: object) -> int | float:
    if not isinstance(k, bool) and isinstance(k, numbers.Integral) and int(k) >= 1:
        return int(k)
    if isinstance(k, numbers.Real) and 0 < float(k) < 1:
        return float(k)
    raise UserError(f"{name} must be a whole number of at least 1, or a fraction between 0 and 1; got {k!r}.")


def _check_row(compressor: Compressor, k: int | float, n: int) -> None:
    check_count(compressor, n)
    if _count(k, n) > n:
        raise UserError(
            f"{compressor.traits.name}: a row of {n} values has no {k}. Take a smaller k, or a fraction of rows."
        )


def _as(x: jax.Array, values: Values) -> jax.Array:
    return x if values == "float32" else to_float16(x)


def _scatter(places: jax.Array, values: jax.Array, n: int) -> jax.Array:
    """float32[rows, n], zeros elsewhere; NaN everywhere if a value is not finite."""
    values = values if values.dtype == jnp.float32 else from_float16(values)
    poisoned = ~jnp.all(jnp.isfinite(values), axis=1, keepdims=True)
    empty = jnp.broadcast_to(jnp.where(poisoned, jnp.nan, jnp.float32(0)), (values.shape[0], n))
    filled = jnp.where(poisoned, jnp.nan, values)
    row = jnp.arange(values.shape[0])[:, None]
    return empty.at[row, places].set(filled, indices_are_sorted=True, unique_indices=True)
