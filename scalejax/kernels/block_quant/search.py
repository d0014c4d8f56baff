"""Greedy search for the range of a row of least squared error.

From [min, max], both ends are moved in by a 200th of it in turn on trial; the one that leaves the smaller error stays,
until 16 % of the range is left. Of all ranges on the way the best is taken, the first one included, so that no row gets
worse. Errors are those of the decoded values, scales and biases rounded to float16 as they will be stored.

Source: H. Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019 (arXiv 1911.02079), which stops
where the error no longer falls; going on costs time and finds at least as good a range.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.block_quant import xla
from scalejax.numerics import bits as floats

STEPS = 200
"""Steps that the range of a row is cut into."""
LEAST_WIDTH = 0.16
"""Share of the range at which the search ends."""
_ROWS = 2048
"""Rows that are searched together: their values stay in the caches of a CPU."""


def quantize(table: jax.Array, bits: int, scale_dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `xla.quantize`, with the range of each row searched for.

    A loop over blocks of one shape, which tables of all lengths share: for a table at rest, not for a jitted step.
    """
    count = table.shape[0]
    padded = jnp.pad(table, ((0, -count % _ROWS), (0, 0)))
    made = [_quantize(padded[i : i + _ROWS], bits, scale_dtype) for i in range(0, max(count, 1), _ROWS)]
    codes, scales, biases = (jnp.concatenate(parts)[:count] for parts in zip(*made, strict=True))
    return codes, scales, biases


@functools.partial(jax.jit, static_argnames=("bits", "scale_dtype"))
def _quantize(table: jax.Array, bits: int, scale_dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    low, high, broken = xla.extremes(table)
    first, last = (lax.bitcast_convert_type(x, jnp.float32) for x in (low, high))
    step = (last - first) * jnp.float32(1 / STEPS)

    def made(bottom: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        ends = floats.float_bits(bottom), floats.float_bits(top)
        scales, biases = xla.parameters(*ends, bits, scale_dtype)
        codes = xla.encode(table, *ends, scales, biases, bits)
        decoded = codes.astype(jnp.float32) * scales.astype(jnp.float32)[:, None] + biases.astype(jnp.float32)[:, None]
        error = jnp.square(decoded - table).sum(axis=1)
        return codes, scales, biases, jnp.where(jnp.isnan(error), jnp.inf, error)

    def shrink(carry: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
        bottom, top, best_bottom, best_top, best = carry
        higher, lower = made(bottom + step, top)[3], made(bottom, top - step)[3]
        left = higher < lower
        bottom, top = jnp.where(left, bottom + step, bottom), jnp.where(left, top, top - step)
        error = jnp.minimum(higher, lower)
        better = error < best
        best_bottom, best_top = jnp.where(better, bottom, best_bottom), jnp.where(better, top, best_top)
        return (bottom, top, best_bottom, best_top, jnp.minimum(error, best)), None

    start = (first, last, first, last, made(first, last)[3])
    (_, _, bottom, top, best), _ = lax.scan(shrink, start, length=round(STEPS * (1 - LEAST_WIDTH)))
    # Where nothing is better the ends are taken as bits, in which subnormal numbers survive.
    same = (bottom == first) & (top == last) | ~jnp.isfinite(best)
    low, high = (jnp.where(same, given, floats.float_bits(found)) for given, found in ((low, bottom), (high, top)))
    scales, biases = xla.parameters(low, high, bits, scale_dtype)
    scales, biases = (jnp.where(broken, jnp.nan, x).astype(scale_dtype) for x in (scales, biases))
    return xla.packed(xla.encode(table, low, high, scales, biases, bits), bits), scales, biases
