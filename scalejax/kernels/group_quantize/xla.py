"""By XLA: loops over the values of a group, which lie together in memory, become vector instructions."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from scalejax import compat
from scalejax.kernels.group_quantize import values
from scalejax.kernels.group_quantize.groups import IntGroups
from scalejax.numerics import bits as float32

_IN_CACHE = 2**14
"""Values that a CPU transforms at a time: all five stages then take no longer than one product by the matrix."""


@functools.partial(jax.jit, static_argnames=("format", "transform"))
def quantize(
    x: jax.Array, seed: jax.Array | None, *, format: IntGroups, transform: bool
) -> tuple[jax.Array, jax.Array]:
    """uint8[n bits / 8] and float32[n / size] of float32[n]; `seed` is uint32[]."""
    groups = (hadamard(x) if transform else x).reshape(-1, format.size)
    scales, factor = values.scale_and_factor(float32.largest_of_rows(groups)[:, None], format.bits)
    drawn = None
    if seed is not None:
        drawn = values.chance(seed, lax.iota(jnp.uint32, x.size).reshape(groups.shape))
    level = values.level(groups, factor, format.bits, drawn)
    if format.bits == 4:
        level = values.in_bytes(level.reshape(-1, 2, format.size // 2))
    return level.astype(jnp.uint8).reshape(-1), scales[:, 0]


@functools.partial(jax.jit, static_argnames=("format", "transform", "to"))
def combine(
    codes: jax.Array,
    scales: jax.Array,
    base: jax.Array | None,
    seed: jax.Array | None,
    *,
    format: IntGroups,
    transform: bool,
    to: IntGroups | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The sum of quantized rows, [rows, ...], one after the other, and what becomes of it.

    Args:
      codes, scales: uint8[rows, n bits / 8], float32[rows, n / size].
      base: float[n] that they are added to, or None. The result has its dtype.
      seed: uint32[] of `to`.
      format: Of the rows.
      transform: Whether the sum is transformed and divided by 32.
      to: What it is quantized to, or None.
    """

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _decode(*row, format), None

    # One decoded row exists at a time.
    first, rest = (codes[0], scales[0]), (codes[1:], scales[1:])
    start = _decode(*first, format)
    if base is not None:
        start = base.astype(jnp.float32) + start
    total, _ = lax.scan(add, start, rest)
    if transform:
        total = hadamard(total) * (1 / values.TRANSFORM)
    if to is not None:
        return quantize(total, seed, format=to, transform=False)
    return total if base is None else total.astype(base.dtype)


@jax.jit
def hadamard(x: jax.Array) -> jax.Array:
    """`api.hadamard`, in sums of two, so that their order is that of every implementation."""
    flat = x.reshape(-1)
    if compat.platform() == "cpu" and flat.size > _IN_CACHE:
        filled = jnp.pad(flat, (0, -flat.size % _IN_CACHE)).reshape(-1, _IN_CACHE)
        return lax.map(_butterfly, filled).reshape(-1)[: flat.size].reshape(x.shape)
    return _butterfly(flat).reshape(x.shape)


def _decode(codes: jax.Array, scales: jax.Array, format: IntGroups) -> jax.Array:
    apart = codes.reshape(-1, 1, format.size * format.bits // 8).astype(jnp.int32)
    level = values.from_bytes(apart[:, 0]) if format.bits == 4 else values.signed(apart, 8)
    return values.value(level, scales[:, None, None]).reshape(-1)


def _butterfly(x: jax.Array) -> jax.Array:
    for half in values.HALVES:
        pairs = x.reshape(-1, 2, half)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
    return x.reshape(-1)
