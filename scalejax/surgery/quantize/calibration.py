"""Scales of blocks, chosen by what they do to the values under them, and the codes under these scales.

max         from the largest magnitude, as `numerics.quantize` does: a direct cast
percentile  from the smallest magnitude that at least p % of the block do not exceed, or the largest where that is zero:
            what lies above saturates. Padding does not count.
            NVFP4: the tensor scale, from that magnitude among the largest of the blocks
mse         of several candidates the one of the least squared error
            exponents (MX): those of max, and one less and one more, for each block
            float32: max times 1, 0.98, ... 0.5, for each block
            NVFP4: the tensor scale of max times the same factors, for the whole weight
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError, check_one_of
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks, scales
from scalejax.numerics.blocks import EncodedBlocks
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantize import Quantized
from scalejax.numerics.quantized import static
from scalejax.numerics.scales import ScaleRule

Method = Literal["max", "percentile", "mse"]

FACTORS = tuple(1 - 0.02 * i for i in range(26))
"""Of the scale of max, which mse tries."""
_CHUNK = 2**22  # values that are looked at together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The rule by which scales are chosen; see above.

    Attributes:
      method: "max", "percentile" or "mse".
      percentile: p, above 0 and at most 100.
      scale_rule: For scales that are exponents, see `numerics.quantize`; None = floor.
    """

    method: Method = "max"
    percentile: float = 99.9
    scale_rule: ScaleRule | None = None

    def __post_init__(self) -> None:
        check_one_of("--calibrate", self.method, get_args(Method))
        if not 0 < self.percentile <= 100:
            raise UserError(f"--percentile must be above 0 and at most 100; got {self.percentile}.")

    def rule(self, format: BlockFormat) -> ScaleRule | None:
        """The scale rule for a format; None for those whose scales are no exponents."""
        return (self.scale_rule or "floor") if format.scale == "exponent" else None

    def check(self, used: Iterable[BlockFormat], inputs: static.Format | None = None) -> None:
        """Compares the scale rule and the percentile with the formats that will be written.

        Args:
          used: Of weights.
          inputs: Of activations that get static scales, whose percentile is over all of the text.

        Raises:
          UserError: there is no rule of that name, it is not defined for one of them, none has exponents as scales, or
            all blocks are so short that the percentile leaves nothing out.
        """
        used = list(used)
        if self.method == "percentile" and inputs is None and all(self._leaves_nothing_out(format) for format in used):
            longest = max(used, key=lambda format: format.k1)
            most = math.floor(1000 * (100 - 100 / longest.k1)) / 1000
            raise UserError(
                f"--percentile {self.percentile:g} leaves nothing out of the {longest.k1} values of a block of "
                f"{longest.name}. Give at most {most:g}, or another --calibrate."
            )
        if self.scale_rule is None:
            return
        exponents = [format for format in used if format.scale == "exponent"]
        for format in exponents:
            scales.threshold(format.element, self.scale_rule)  # raises
        if not exponents:
            raise UserError(
                f"--scale-rule {self.scale_rule}: no weight takes a format with exponents as scales. Leave it out."
            )

    def _leaves_nothing_out(self, format: BlockFormat) -> bool:
        """Whether the largest number of every block sets its scale; NVFP4 has its percentile over blocks."""
        return format.scale != "e4m3" and rank(format.k1, self.percentile) == format.k1 - 1


def split(x: jax.Array, format: BlockFormat) -> jax.Array:
    """float32[rows, columns] -> int32[rows, blocks, k1 / k2, k2], bits, padded with zeros."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % format.k1)))
    return float32.float_bits(padded).reshape(x.shape[0], -1, format.k1 // format.k2, format.k2)


def ranks(columns: int, format: BlockFormat, calibration: Calibration) -> jax.Array:
    """int32[blocks]: where in a block in ascending order, zeros of padding first, its percentile is."""
    k1 = format.k1
    held = [min(k1, columns - start) for start in range(0, columns, k1)]
    return jnp.asarray([k1 - count + rank(count, calibration.percentile) for count in held], jnp.int32)


def choose_scales(
    bits: jax.Array,
    format: BlockFormat,
    calibration: Calibration,
    tensor_scale: jax.Array | None,
    percentiles: jax.Array,
) -> EncodedBlocks:
    """Codes and scales of blocks; the tensor scale of NVFP4 has been chosen before.

    Args:
      bits: int32[rows, blocks, k1 / k2, k2].
      format: Of the blocks.
      calibration: How scales are chosen.
      tensor_scale: float32[] for NVFP4, see `choose_tensor_scale`.
      percentiles: int32[blocks], see `ranks`.
    """
    encode = functools.partial(
        blocks.encode_blocks,
        format=format,
        axis=2,
        rule=calibration.rule(format),
        rounding="ties_to_even",
        tensor_scale=tensor_scale,
    )
    found = encode(bits)
    if calibration.method == "max" or format.scale == "e4m3":
        return found
    if calibration.method == "percentile":
        magnitude = bits & float32.MAGNITUDE
        flat = jnp.sort(magnitude.reshape(*bits.shape[:2], format.k1), axis=-1)
        top = jnp.take_along_axis(flat, jnp.broadcast_to(percentiles[:, None], (*flat.shape[:2], 1)), axis=-1)
        top = jnp.where(top > 0, top, flat[..., -1:])[..., None]
        below = jnp.minimum(magnitude, top)  # bits of magnitudes are ordered as they are
        found = encode(below)
        return found._replace(codes=_under(bits, found, format, tensor_scale))
    exponents = format.scale == "exponent"
    moves = jnp.asarray((-1, 1) if exponents else FACTORS[1:], jnp.int32 if exponents else jnp.float32)

    def compare(best: tuple[EncodedBlocks, jax.Array], move: jax.Array) -> tuple[tuple[EncodedBlocks, jax.Array], None]:
        candidate = (
            _moved(bits, found, format, calibration, move) if exponents else found._replace(scales=found.scales * move)
        )
        candidate = candidate._replace(codes=_under(bits, candidate, format, tensor_scale))
        own = _error(bits, candidate, format, tensor_scale, axes=(2, 3))
        better = own < best[1]
        return jax.tree.map(lambda old, new: jnp.where(better, new, old), best, (candidate, own)), None

    # A scan, as the program of one candidate is long.
    start = (found, _error(bits, found, format, tensor_scale, axes=(2, 3)))
    return jax.lax.scan(compare, start, moves)[0][0]


def choose_tensor_scale(x: jax.Array, format: BlockFormat, calibration: Calibration) -> jax.Array | None:
    """float32[], the tensor scale of NVFP4 for a weight float32[rows, columns]; None for formats without one."""
    if format.scale != "e4m3":
        return None
    bits = _chunked(_largest, x, format)
    if calibration.method == "percentile":
        found = jnp.sort(bits)[rank(bits.size, calibration.percentile)]
        largest = jnp.where(found > 0, found, jnp.max(bits))
    else:
        largest = jnp.max(bits)
    scale = blocks.tensor_scale_of(largest.reshape(1, 1), format, axis=0)
    if calibration.method != "mse":
        return scale
    errors = [
        float(jnp.sum(_chunked(functools.partial(_cast_error, scale=scale * jnp.float32(f)), x, format)))
        for f in FACTORS
    ]
    return scale * jnp.float32(FACTORS[int(np.argmin(errors))])


def encode(
    x: jax.Array, format: BlockFormat, calibration: Calibration, tensor_scale: jax.Array | None = None
) -> Quantized:
    """A weight in a format, blocks along its columns; a last block is padded with zeros.

    Args:
      x: float32[rows, columns], finite.
      format: Its format.
      calibration: How scales are chosen.
      tensor_scale: float32[] for NVFP4; None = chosen.
    """
    scale = choose_tensor_scale(x, format, calibration) if tensor_scale is None else tensor_scale
    parts = [_encode(part, scale, format, calibration) for part in _chunks(x)]
    return join(parts, format, x.shape[1], scale)


def join(parts: list[EncodedBlocks], format: BlockFormat, length: int, tensor_scale: jax.Array | None) -> Quantized:
    """Rows one below the other."""

    def flat(arrays: list[jax.Array]) -> jax.Array:
        whole = jnp.concatenate(arrays)
        return whole.reshape(whole.shape[0], -1)

    dtype = jnp.uint8 if format.element.bits <= 8 else jnp.uint16
    subs = [part.sub_scales for part in parts if part.sub_scales is not None]
    return Quantized(
        codes=flat([part.codes for part in parts]).astype(dtype),
        scales=flat([part.scales for part in parts]),
        sub_scales=flat(subs) if subs else None,
        tensor_scale=tensor_scale,
        format=format,
        axis=-1,
        length=length,
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _encode(
    x: jax.Array, tensor_scale: jax.Array | None, format: BlockFormat, calibration: Calibration
) -> EncodedBlocks:
    return choose_scales(split(x, format), format, calibration, tensor_scale, ranks(x.shape[1], format, calibration))


@functools.partial(jax.jit, static_argnums=1)
def _largest(x: jax.Array, format: BlockFormat) -> jax.Array:
    return jnp.max(split(x, format) & float32.MAGNITUDE, axis=(2, 3)).reshape(-1)


@functools.partial(jax.jit, static_argnums=1)
def _cast_error(x: jax.Array, format: BlockFormat, *, scale: jax.Array) -> jax.Array:
    bits = split(x, format)
    found = blocks.encode_blocks(bits, format, axis=2, rule=None, rounding="ties_to_even", tensor_scale=scale)
    return _error(bits, found, format, scale, axes=(1, 2, 3)).reshape(-1)


def _chunks(x: jax.Array) -> list[jax.Array]:
    rows = max(1, _CHUNK // max(1, x.shape[1]))
    return [x[start : start + rows] for start in range(0, x.shape[0], rows)]


def _chunked(function: Callable[[jax.Array, BlockFormat], jax.Array], x: jax.Array, format: BlockFormat) -> jax.Array:
    return jnp.concatenate([function(part, format) for part in _chunks(x)])


def rank(count: int, percentile: float) -> int:
    """The place, among `count` sorted values, of the first that at least so many per cent do not exceed."""
    return max(0, math.ceil(percentile * count / 100) - 1)


def _under(bits: jax.Array, found: EncodedBlocks, format: BlockFormat, tensor_scale: jax.Array | None) -> jax.Array:
    return blocks.encode_under(bits, found, format, rounding="ties_to_even", tensor_scale=tensor_scale)


def _error(
    bits: jax.Array, found: EncodedBlocks, format: BlockFormat, tensor_scale: jax.Array | None, axes: tuple[int, ...]
) -> jax.Array:
    """Squared, summed."""
    decoded = blocks.decode_blocks(found, format, tensor_scale)
    exact, inexact = (jax.lax.bitcast_convert_type(words, jnp.float32) for words in (bits, decoded))
    return jnp.sum((inexact - exact) ** 2, axis=axes, keepdims=True)


def _moved(
    bits: jax.Array, found: EncodedBlocks, format: BlockFormat, calibration: Calibration, step: jax.Array
) -> EncodedBlocks:
    """The exponents of all blocks moved, as far as they can be stored, and microexponents that go with them."""
    low, high = scales.exponent_range(format.d1)
    rule = calibration.rule(format)
    assert rule is not None
    exponent, _ = scales.load_exponent(found.scales, format.d1)
    exponent = jnp.clip(exponent + step, low, high)
    stored = scales.store_exponent(exponent, jnp.zeros_like(exponent, bool), format.d1)
    if found.sub_scales is None:
        return found._replace(scales=stored)
    largest = jnp.max(bits & float32.MAGNITUDE, axis=3, keepdims=True)
    tau = jnp.clip(exponent - scales.scale_exponent(largest, format.element, rule), 0, format.max_microexponent)
    return found._replace(scales=stored, sub_scales=tau.astype(jnp.uint8))
