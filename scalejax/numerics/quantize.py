"""Arrays into formats of blocks and back.

    q = quantize(weights, "mxfp8_e4m3", axis=0, scale_rule="rceil")
    dequantize(q)                                   # float32, NaN where a block was poisoned
    cast(activations, "bdr_mx9", axis=-1)           # both at once, in the dtype of its input

Bit exact on every platform: see scalejax.numerics.bits. Blocks lie along one axis, which is the reduction axis of the
product that the array is for. Nothing moves in memory but for padding.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from scalejax.errors import UserError, check_one_of
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks, formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule, threshold

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32, Int32

Tail = Literal["refuse", "pad"]


class QuantizeCall(NamedTuple):
    """What is static in a call of `quantize`, checked: an axis counted from the front, and the rule that it takes."""

    format: BlockFormat
    axis: int
    rule: ScaleRule | None
    rounding: Rounding


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "sub_scales", "tensor_scale"),
    meta_fields=("format", "axis", "length"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """An array in a format of blocks, one code an entry: for computing with. scalejax.numerics.packing stores it.

    Attributes:
      codes: uint8 (uint16 for elements of more than 8 bits) of the array's shape; the block axis is padded to whole
        blocks.
      scales: one a block along the block axis. uint8 exponents plus their bias (E8M0 for 8 bits), uint8 codes of E4M3,
        or float32.
      sub_scales: uint8, one for k2 entries, or None: microexponents tau, or integer scales.
      tensor_scale: float32[] of NVFP4, or None. Of arrays that were quantized one by one and stacked in front, as
        under `jax.vmap`, one each.
      format: of the blocks.
      axis: of the blocks, counted from the end: arrays stacked in front, as scanned layers are, keep it.
      length: of the block axis, without padding.
    """

    codes: jax.Array
    scales: jax.Array
    sub_scales: jax.Array | None
    tensor_scale: jax.Array | None
    format: BlockFormat
    axis: int
    length: int


def quantize(
    x: "Float[Array, '*shape']",
    format: str | BlockFormat,
    *,
    axis: int,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "ties_to_even",
    key: jax.Array | None = None,
    tail: Tail = "refuse",
    tensor_scale: "Float32[Array, ''] | None" = None,
) -> Quantized:
    """The codes and scales of an array.

    Args:
      x: float32, bfloat16 or float16, any shape.
      format: a BlockFormat, or the name of one (scalejax.numerics.formats.FORMATS).
      axis: along which blocks lie.
      scale_rule: for formats with exponents as scales: "floor" (their default and OCP's), "rceil", "ceil", "even",
        "even_fbgemm" or "qwix". None for all others.
      rounding: of elements: "ties_to_even", "ties_away", "toward_zero", "stochastic".
      key: PRNG key for stochastic rounding; the same key gives the same result.
      tail: what happens to an axis that is no multiple of k1: "refuse" raises; "pad" appends zeros, which change no
        scale, and keeps the length.
      tensor_scale: float32[] for NVFP4, such as one from calibration; by default of x itself. One that is not positive,
        normal and finite poisons all blocks.

    Returns:
      The quantized array. Blocks with NaN or infinities are poisoned, see `poisoned_blocks`. Codes have no derivative,
      so that gradients through them are zero; those of `cast` pass straight through.

    Raises:
      UserError: another dtype, an unknown name, a rule or key that does not fit, an axis that k1 does not divide, or
        whose blocks would straddle shards.
    """
    format = formats.find(format)
    call = check_arguments(x, format, axis, scale_rule, rounding, key, tail, tensor_scale)
    return _quantized(x, key, tensor_scale, call)


@functools.partial(jax.jit, static_argnums=3)
def _quantized(x: jax.Array, key: jax.Array | None, tensor_scale: jax.Array | None, call: QuantizeCall) -> Quantized:
    format, axis, rule, rounding = call
    chance = None if key is None else blocks.split(jax.random.bits(key, x.shape, jnp.uint32), format, axis)
    split = blocks.split(float32.float_bits(x), format, axis)
    if format.scale == "e4m3" and tensor_scale is None:
        tensor_scale = blocks.tensor_scale_of(split, format, axis=axis + 1)
    encoded = blocks.encode_blocks(
        split, format, axis=axis + 1, rule=rule, rounding=rounding, chance=chance, tensor_scale=tensor_scale
    )
    dtype = jnp.uint8 if format.element.bits <= 8 else jnp.uint16
    return Quantized(
        codes=blocks.joined(encoded.codes.astype(dtype), axis),
        scales=blocks.joined(encoded.scales, axis),
        sub_scales=None if encoded.sub_scales is None else blocks.joined(encoded.sub_scales, axis),
        tensor_scale=tensor_scale,
        format=format,
        axis=axis - x.ndim,
        length=x.shape[axis],
    )


def dequantize(quantized: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> "Float[Array, '*shape']":
    """The values that codes and scales stand for, without padding; NaN in poisoned blocks.

    Args:
      quantized: the array.
      dtype: float32, or bfloat16 or float16, rounded from it to nearest, ties to even.

    Raises:
      UserError: another dtype.
    """
    if quantized.tensor_scale is not None and quantized.tensor_scale.ndim:
        return jax.vmap(lambda one: dequantize(one, dtype))(quantized)
    return _dequantized(quantized, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=1)
def _dequantized(quantized: Quantized, dtype: jnp.dtype) -> jax.Array:
    format = quantized.format
    axis = quantized.axis + quantized.codes.ndim
    encoded = blocks.EncodedBlocks(
        blocks.split(quantized.codes.astype(jnp.int32), format, axis),
        blocks.apart(quantized.scales, 1, 1, axis),
        None if quantized.sub_scales is None else blocks.apart(quantized.sub_scales, format.k1 // format.k2, 1, axis),
    )
    decoded = blocks.joined(blocks.decode_blocks(encoded, format, quantized.tensor_scale), axis)
    return float32.to_dtype(jax.lax.slice_in_dim(decoded, 0, quantized.length, axis=axis), dtype)


def cast(
    x: "Float[Array, '*shape']",
    format: str | BlockFormat,
    *,
    axis: int,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "ties_to_even",
    key: jax.Array | None = None,
    tail: Tail = "refuse",
    tensor_scale: "Float32[Array, ''] | None" = None,
) -> "Float[Array, '*shape']":
    """Quantizes and dequantizes: x as the format sees it, in its own dtype ("fake quantization").

    The derivative is that of the identity (straight through), also of values that saturate. Arguments and errors are
    those of `quantize`.
    """

    @jax.custom_jvp
    def through(x: jax.Array, key: jax.Array | None, tensor_scale: jax.Array | None) -> jax.Array:
        quantized = quantize(
            x,
            format,
            axis=axis,
            scale_rule=scale_rule,
            rounding=rounding,
            key=key,
            tail=tail,
            tensor_scale=tensor_scale,
        )
        return dequantize(quantized, x.dtype)

    @through.defjvp
    def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return through(*primals), tangents[0]

    return through(x, key, tensor_scale)


def poisoned_blocks(quantized: Quantized) -> "Int32[Array, '']":
    """int32[]: how many blocks held NaN or infinities and decode to NaN."""
    scales = quantized.scales
    if quantized.format.scale == "float32":
        poisoned = jnp.isnan(scales)
    else:
        code = scales & blocks.E4M3_NAN if quantized.format.scale == "e4m3" else scales
        poisoned = code == (blocks.E4M3_NAN if quantized.format.scale == "e4m3" else (1 << quantized.format.d1) - 1)
    return jnp.sum(poisoned, dtype=jnp.int32)


def check_arguments(
    x: jax.Array,
    format: BlockFormat,
    axis: int,
    scale_rule: ScaleRule | None,
    rounding: Rounding,
    key: jax.Array | None,
    tail: Tail,
    tensor_scale: jax.Array | None,
) -> QuantizeCall:
    """What `quantize` refuses, for kernels that do the same."""
    if not hasattr(x, "dtype"):
        raise UserError(f"quantize: x must be an array; got a {type(x).__name__}. Pass jnp.asarray(x, jnp.float32).")
    float32.check_dtype(x.dtype)  # before jax makes float32 of NumPy's float64
    if not -x.ndim <= axis < x.ndim:
        raise UserError(f"axis: x has {x.ndim} axes; got axis {axis}. Name one of them.")
    axis %= x.ndim
    length = x.shape[axis]
    check_one_of("tail", tail, ("refuse", "pad"))
    if length % format.k1 and tail == "refuse":
        raise UserError(
            f"quantize: {format.name} has blocks of {format.k1}, and axis {axis} of x{list(x.shape)} is no multiple of "
            "it. Pass tail='pad' to append zeros, take another axis, or dataclasses.replace the format's k1 and k2."
        )
    _check_shards(x, format, axis)
    if (key is None) == (rounding == "stochastic"):
        raise UserError(
            "key: stochastic rounding needs one, and no other rounding does; got "
            f"{'none' if key is None else 'one'} with rounding {rounding!r}."
        )
    if format.scale != "exponent" and scale_rule is not None:
        raise UserError(
            f"scale_rule: {format.name} scales by its largest magnitude and takes no rule; got {scale_rule!r}. "
            "Leave it out."
        )
    if format.scale != "e4m3" and tensor_scale is not None:
        raise UserError(f"tensor_scale: {format.name} has none. Leave it out.")
    if tensor_scale is not None:
        plain = isinstance(tensor_scale, (int, float))
        if plain or tensor_scale.dtype != jnp.float32 or tensor_scale.ndim:
            got = f"the number {tensor_scale}" if plain else f"{tensor_scale.dtype}{list(tensor_scale.shape)}"
            raise UserError(f"tensor_scale: must be float32[]; got {got}. Pass jnp.float32(...).")
    rule: ScaleRule | None = (scale_rule or "floor") if format.scale == "exponent" else None
    if rule is not None:
        threshold(format.element, rule)  # raises
    return QuantizeCall(format, axis, rule, rounding)


def _check_shards(x: jax.Array, format: BlockFormat, axis: int) -> None:
    """Refuses blocks that would lie on two devices, where the sharding is known: of arrays, and of explicit axes."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return
    # By the spec alone: inside a shard_map an array has no shape of shards, and its manual axes are not in its spec.
    entry = sharding.spec[axis] if axis < len(sharding.spec) else None
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    own = x.shape[axis] // math.prod(sharding.mesh.shape[name] for name in names)
    if own != x.shape[axis] and own % format.k1:
        most, tail = divmod(x.shape[axis], format.k1)
        way = f"Cut it into a number of shards that divides {most}" if not tail else "Fill up its last block before"
        raise UserError(
            f"quantize: {format.name} has blocks of {format.k1}, and axis {axis} of x{list(x.shape)} is cut into "
            f"shards of {own}: blocks would straddle devices. {way}, or shard another axis."
        )
