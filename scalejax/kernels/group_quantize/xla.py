"""By XLA: loops over the values of a group, which lie together in memory, become vector instructions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.numerics.stochastic import hash_bits


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize(x: jax.Array, bits: int, size: int, seed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`api.quantize`: codes and scales."""
    levels = 2 ** (bits - 1) - 1
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    largest = jnp.abs(groups).max(axis=-1, keepdims=True)
    scales = jnp.where(jnp.isfinite(largest), largest / levels, jnp.nan)
    # A subnormal scale is 0 on some devices, and its inverse is infinite: such a group is one of zeros.
    scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
    y = groups * jnp.where(scales > 0, levels / largest, 0)
    if seed is None:
        level = jnp.round(y)
    else:
        level = jnp.floor(y + _uniform(groups.shape, seed))
    level = jnp.clip(level, -levels, levels).astype(jnp.int32)
    if bits == 8:
        codes = level.astype(jnp.int8).view(jnp.uint8)
    else:
        low, high = level[..., : size // 2], level[..., size // 2 :]
        codes = ((low & 15) | ((high & 15) << 4)).astype(jnp.uint8)
    return codes.reshape(*x.shape[:-1], x.shape[-1] * bits // 8), scales[..., 0]


@functools.partial(jax.jit, static_argnums=(2, 3))
def dequantize(codes: jax.Array, scales: jax.Array, bits: int, size: int) -> jax.Array:
    """`api.dequantize`."""
    apart = codes.reshape(*scales.shape, size * bits // 8)
    if bits == 8:
        levels = apart.view(jnp.int8)
    else:
        signed = apart.view(jnp.int8)
        levels = jnp.concatenate([(signed << 4) >> 4, signed >> 4], axis=-1)
    values = levels.astype(jnp.float32) * scales[..., None]
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * size)


@functools.partial(jax.jit, static_argnums=1)
def hadamard(x: jax.Array, order: int) -> jax.Array:
    """`api.hadamard`."""
    blocks = x.reshape(-1, order)
    product = jnp.dot(blocks, walsh_hadamard(order), precision="highest")
    return product.reshape(x.shape)


def walsh_hadamard(order: int) -> np.ndarray:
    """float32[order, order] of +-1, by Sylvester's construction; order is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _uniform(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """float32 in [0, 1) in steps of 2^-24, by place."""
    place = jnp.zeros(shape, jnp.uint32)
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(step % 2**32)
        step *= shape[axis]
    # No more than one round of the hash a value: the seed is mixed once.
    return (hash_bits(hash_bits(seed[0], seed[1]), place) >> 8).astype(jnp.float32) * 2.0**-24
