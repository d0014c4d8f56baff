"""Bits against fidelity over the whole family of formats, and the points that no other beats in both.

The paper sweeps its family by hardware cost; storage is the cost here. Exponents with microexponents are measured for
all magnitudes and microexponents of one (k1, k2) in one program, since only constants differ; the others one by one.

Source: Rouhani et al., ISCA 2023, p. 7.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.errors import UserError
from scalejax.numerics import bits as float32
from scalejax.numerics import elements, formats, qsnr
from scalejax.numerics.formats import BlockFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A format with what it costs and reaches.

    Attributes:
      format: the format.
      bits: of storage per element.
      qsnr: dB.
    """

    format: BlockFormat
    bits: float
    qsnr: float


def family(
    *,
    k1: Sequence[int] = (8, 16, 32, 64, 128),
    k2: Sequence[int] = (1, 2, 4, 8),
    d2: Sequence[int] = (1, 2, 3),
    m: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
) -> list[BlockFormat]:
    """Members under exponents of 8 bits, with one level of scales and with two, then those with scales in software."""
    found = [formats.bdr(k1=one, d2=0, m=bits) for one in k1 for bits in m]
    found += [
        formats.bdr(k1=one, k2=two, d2=levels, m=bits)
        for one in k1
        for two in k2
        if two < one
        for levels in d2
        for bits in m
    ]
    found += [formats.FORMATS[name] for name in ("int8", "int4", "vsq8", "vsq6", "vsq4", "fp8_e4m3", "fp8_e5m2")]
    return found


def measure(members: Iterable[BlockFormat], vectors: np.ndarray) -> list[Point]:
    """The QSNR of formats on float32[vectors, length], ties to even, floor rule.

    Raises:
      UserError: the block of a format does not divide the length.
    """
    members = list(members)
    length = vectors.shape[1]
    for format in members:
        if length % format.k1:
            raise UserError(
                f"measure: {format.name} has blocks of {format.k1}, which do not divide vectors of {length} values. "
                "Take vectors whose length all blocks divide."
            )
    decibels: dict[BlockFormat, float] = {}
    together: dict[tuple[int, int, int], list[BlockFormat]] = {}
    for format in members:
        if _is_plain(format):
            together.setdefault((format.k1, format.k2, format.d1), []).append(format)
        else:
            decibels[format] = qsnr.study(format, vectors).overall
    # Next to 1, where squares are float32: powers of two change no ratio, if the range of scales is moved with them.
    largest = float(np.abs(vectors).max(initial=0))
    moved = int(np.clip(np.frexp(largest)[1], -126, 126)) if np.isfinite(largest) else 0
    vectors = np.ldexp(vectors, -moved)
    signal = (np.asarray(vectors, np.float64) ** 2).sum()
    for (k1, k2, d1), group in together.items():
        m = jnp.array([format.element.mantissa_bits + 1 for format in group], jnp.int32)
        beta = jnp.array([format.max_microexponent for format in group], jnp.int32)
        noise = _noise(jnp.asarray(vectors, jnp.float32), k1, k2, d1, m, beta, jnp.int32(moved))
        sums = np.asarray(noise, np.float64).sum(axis=-1)
        decibels.update((format, qsnr.decibel(one, signal)) for format, one in zip(group, sums, strict=True))
    return [Point(format=f, bits=f.bits_per_element, qsnr=decibels[f]) for f in members]


def pareto(points: Iterable[Point]) -> list[Point]:
    """Points that no other reaches with as few bits, by increasing bits."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, -p.qsnr)):
        if not front or point.qsnr > front[-1].qsnr:
            front.append(point)
    return front


def _is_plain(format: BlockFormat) -> bool:
    return format.scale == "exponent" and format.element == elements.signed_magnitude(format.element.bits - 1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _noise(x: jax.Array, k1: int, k2: int, d1: int, m: jax.Array, beta: jax.Array, moved: jax.Array) -> jax.Array:
    """float32[points, vectors]: squared error of each vector, 2^moved times less than given, under each m and beta."""
    bits = float32.float_bits(x).reshape(x.shape[0], -1, k1 // k2, k2)
    significand, exponent = float32.parts(bits)
    own = jnp.max(exponent, axis=3, keepdims=True)
    bias = (1 << (d1 - 1)) - 1
    shared = jnp.clip(jnp.max(own, axis=2, keepdims=True), -bias - moved, bias - moved)

    def one(point: tuple[jax.Array, jax.Array]) -> jax.Array:
        m, beta = point
        # An element type of traced widths: its formulas hold for them too.
        traced = cast(dict[str, int], {"mantissa_bits": m - 1, "max_code": (1 << m) - 1})
        element = dataclasses.replace(elements.signed_magnitude(2), **traced)
        scale = shared - jnp.clip(shared - own, 0, beta)
        code = elements.magnitude_code(significand, exponent - scale, element, "ties_to_even")
        count, step = elements.counts(code, element)
        value = lax.bitcast_convert_type(float32.compose(count, step + scale), jnp.float32)
        error = value - jnp.abs(x).reshape(value.shape)
        return jnp.sum(error * error, axis=(1, 2, 3))

    return lax.map(one, (m, beta))
