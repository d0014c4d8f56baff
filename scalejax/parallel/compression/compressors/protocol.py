"""The interface of a compressor. A user's own needs nothing else, and inherits nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from scalejax.errors import UserError

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, UInt32

Keys = Literal["none", "shared", "own"]
"""Which keys a compressor takes: none; the same on all devices, in `encode` and in `decode`; each device its own, in
`encode` alone."""

Payload = Mapping[str, jax.Array]
"""The message: arrays [rows, ...]. Row r is the encoding of row r of the values."""

MOST_VALUES = 2**30
"""Of a row: places are int32, padding included."""


class Growth(NamedTuple):
    """Why residuals can grow without bound under error feedback: C(x) - x is no shorter than x, in any norm.

    Attributes:
      rows: Of so many values and more.
      why: The reason, for messages.
      field, value: The setting of the compressor with which it has a bound.
    """

    rows: int
    why: str
    field: str
    value: str | int


class Traits(NamedTuple):
    """What an exchange reads before it compresses.

    Attributes:
      name: For messages and reports.
      keys: Which keys `encode` and `decode` want.
      mean: Whether decoded values are unbiased over keys, up to float32 roundings; "biased" compressors need error
        feedback.
      growth: Why it cannot have error feedback; None = it can, for ||C(x) - x|| <= q ||x|| with a q < 1, on average or
        always, so that residuals are never longer than q / (1 - q) of the longest gradient.
    """

    name: str
    keys: Keys
    mean: Literal["biased", "unbiased"]
    growth: Growth | None = None


class Compressor(Protocol):
    """Rows of float32 as fewer bytes. Rows are chunks: each may travel to another device and is decoded there.

    Everything runs under jit with static shapes, on a row as on many, and no row depends on another.
    """

    @property
    def traits(self) -> Traits:
        """Its name, the keys it wants, and whether it is biased."""
        ...

    def check(self, n: int) -> None:
        """Refuses rows of n values that it cannot compress.

        Raises:
          UserError: says why.
        """
        ...

    def payload_bytes(self, n: int) -> int:
        """Bytes of one row of the payload: those of its arrays."""
        ...

    def encode(self, x: "Float32[Array, 'rows n']", key: "UInt32[Array, '2'] | None" = None) -> Payload:
        """float32[rows, n] -> the payload.

        Args:
          x: float32[rows, n].
          key: uint32[2], another one each time; None where traits.keys == "none".

        Raises:
          UserError: another dtype or number of axes, n that `check` refuses, no key where one is wanted.
        """
        ...

    def decode(self, payload: Payload, n: int, key: "UInt32[Array, '2'] | None" = None) -> "Float32[Array, 'rows {n}']":
        """The payload -> float32[rows, n].

        Args:
          payload: From `encode`; rows may come from different devices.
          n: Values of a row.
          key: Where traits.keys == "shared", that of `encode`; not looked at elsewhere.
        """
        ...


def check_values(compressor: Compressor, x: jax.Array, key: jax.Array | None) -> None:
    """Refuses what `Compressor.encode` does.

    Raises:
      UserError: see there.
    """
    if x.dtype != jnp.float32 or x.ndim != 2:
        raise UserError(
            f"{compressor.traits.name}: values must be float32[rows, n]; got {x.dtype}{list(x.shape)}. Cast them and "
            "give them two axes."
        )
    compressor.check(x.shape[1])
    check_key(compressor, key)


def check_key(compressor: Compressor, key: jax.Array | None) -> None:
    """Refuses no key where one is wanted, and one that is no uint32[2]."""
    if compressor.traits.keys != "none" and (key is None or key.dtype != jnp.uint32 or key.shape != (2,)):
        got = "none" if key is None else f"{key.dtype}{list(key.shape)}"
        whose = "the same on all devices" if compressor.traits.keys == "shared" else "another one on every device"
        raise UserError(
            f"{compressor.traits.name}: key must be uint32[2], {whose}, and another one in every step; got {got}."
        )


def check_count(compressor: Compressor, n: int) -> None:
    """Refuses empty rows, and those whose places int32 cannot count."""
    if not 1 <= n <= MOST_VALUES:
        raise UserError(
            f"{compressor.traits.name}: a row must have 1 to {MOST_VALUES} values; got {n}. Leave empty arrays out, "
            "and cut large ones."
        )
