"""Signatures, checks, derivative and the choice of implementation.

`implementation` names one of

    reference    the definition: scalejax.numerics.quantize and packing
    xla          two passes over memory (`xla`); every format, axis, rounding and platform
    pallas_tpu   one pass, kernels for a TPU (`pallas_tpu`); products decode their tile of weights
    pallas_gpu   one pass, Triton kernels (`pallas_gpu`); products decode their tile of weights
    native       products by jax.nn.scaled_matmul (`native`), where jax has it: MXFP8 and NVFP4, both operands packed

All of them give the same bits of codes, scales and values; products differ by the order of their float32 sums. A name
never falls back: what it lacks is an UnsupportedError that says so. None takes the Pallas kernels of the platform of
the mesh in force, or else of jax's first device, where they have the case and, on GPUs, are no slower (`gpu_choices`),
and "xla" otherwise. Pallas kernels are not partitioned by the compiler: over several devices call them inside
`jax.shard_map` with check_vma=False, or name "xla".
"""

import dataclasses
import importlib
import math
import types
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax import compat
from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels import gpu_choices
from scalejax.kernels.mx import reference
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import Tail, check_arguments
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu", "native"]
Operation = Literal["quantize_blocks", "dequantize_blocks", "matmul"]
_OF_BLOCKS = ("reference", "xla", "pallas_tpu", "pallas_gpu")
_OF_PRODUCTS = (*_OF_BLOCKS, "native")


def quantize_blocks(
    x: "Float[Array, '*shape']",
    format: str | BlockFormat,
    *,
    axis: int,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "ties_to_even",
    key: jax.Array | None = None,
    tail: Tail = "refuse",
    tensor_scale: "Float32[Array, ''] | None" = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> Packed:
    """An array as packed codes and scales: `numerics.packing.pack(numerics.quantize.quantize(x, ...))` to the bit.

    Args:
      x: float32, bfloat16 or float16, any shape.
      format: a BlockFormat, or the name of one (scalejax.numerics.formats.FORMATS).
      axis: along which blocks lie: the one that a product is to sum over.
      scale_rule: as in `numerics.quantize.quantize`; so are `rounding`, `key` and `tensor_scale`.
      tail: what happens to an axis that is no multiple of the block: "refuse" raises; "pad" appends zeros, which change
        no scale, and keeps the length.
      implementation: None picks; a name never falls back.
      interpret: For tests of Pallas kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Returns:
      Codes (of 8 bits a byte each, of 6 bits four in three bytes, of 4 bits two in a byte), second scales and scales,
      each an array along the same axis. Blocks with NaN or infinities are poisoned: their scale is NaN.

    Raises:
      UserError: what `numerics.quantize.quantize` and `numerics.packing.pack` refuse.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "quantize_blocks"
    _check_name(op, implementation, _OF_BLOCKS)
    format = formats.find(format)
    call = check_arguments(x, format, axis, scale_rule, rounding, key, tail, tensor_scale)
    chosen = _choose(op, implementation, format, x.size)
    return _load(chosen).quantize(x, key, tensor_scale, call, **_interpreted(chosen, interpret))


def dequantize_blocks(
    packed: Packed,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, '*shape']":
    """The values that packed codes and scales stand for, without padding; NaN in poisoned blocks.

    `numerics.quantize.dequantize(numerics.packing.unpack(packed), dtype)` to the bit.

    Args:
      packed: From `quantize_blocks` or `numerics.packing.pack`.
      dtype: float32, or bfloat16 or float16, rounded from it to nearest, ties to even.
      implementation: None picks; a name never falls back.
      interpret: As in `quantize_blocks`.

    Raises:
      UserError: another dtype, or codes and scales that are not those of the format and length.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "dequantize_blocks"
    _check_name(op, implementation, _OF_BLOCKS)
    _check_packed(op, packed)
    wanted = jnp.dtype(dtype)
    if wanted not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise UserError(f"{op}: dtype must be float32, bfloat16 or float16; got {wanted}. Convert the float32 result.")
    if packed.tensor_scale is not None and packed.tensor_scale.ndim:
        # Arrays that were quantized one by one and stacked in front.
        return jax.vmap(lambda one: dequantize_blocks(one, wanted, implementation=implementation, interpret=interpret))(
            packed
        )
    chosen = _choose(op, implementation, packed.format, packed.codes.size)
    return _load(chosen).dequantize(packed, wanted, **_interpreted(chosen, interpret))


def matmul(
    x: "Float[Array, '*batch contracted'] | Packed",
    weights: Packed,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, '*batch columns']":
    """out[..., n] = sum over k of x[..., k] * weights[k, n], over the axis of the weights' blocks, in float32.

    With x an array only the weights are quantized. They are decoded tile by tile, to bfloat16 where x is bfloat16 and
    to float32 otherwise, and multiplied by x in that dtype. Elements with at most 8 significant bits under scales that
    are powers of two lose nothing in bfloat16, but for values below 2^-126. The float32 of a whole NVFP4 tensor
    multiplies the sums. float32 products are made as exact as the platform offers.

    With x packed too, x is decoded in the same way first, unless the implementation is "native".

    Differentiable with respect to an array x: its gradient is the product of the cotangent, in the dtype of the
    operands, with the decoded weights, by XLA.

    Args:
      x: float32, bfloat16 or float16 [..., K]; or packed [..., K] with blocks along the last axis.
      weights: packed [K, N] with blocks along axis 0 (-2), or [N, K] with blocks along axis 1 (-1), K without padding.
      dtype: of the result; None = that of x, or float32 for packed x.
      implementation: None picks; a name never falls back.
      interpret: As in `quantize_blocks`.

    Returns:
      `dtype`[..., N].

    Raises:
      UserError: shapes that do not fit each other or the format, blocks along another axis of x, another dtype of x.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "matmul"
    _check_name(op, implementation, _OF_PRODUCTS)
    _check_operands(op, x, weights)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"{op}: dtype must be of floating point; got {jnp.dtype(dtype)}. Convert the float32 result.")
    if implementation == "native":
        native = _load("native")
        lacks = native.lacks(x, weights)
        if lacks:
            raise _unsupported(op, "native", lacks)
        return native.matmul(x, weights, jnp.dtype(dtype or jnp.float32))
    if isinstance(x, Packed):
        both = exact_in_bfloat16(x.format) and exact_in_bfloat16(weights.format)
        operands, result = jnp.dtype(jnp.bfloat16 if both else jnp.float32), jnp.dtype(dtype or jnp.float32)
        factor, whole = _without_tensor_scale(x)
        x = dequantize_blocks(whole, operands, implementation=implementation, interpret=interpret)
    else:
        operands = jnp.dtype(jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32)
        factor, result = None, jnp.dtype(dtype or x.dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(operands)
    chosen = _choose(op, implementation, weights.format, rows.size * weights.codes.size)
    weight_factor, weights = _without_tensor_scale(weights)
    sums = _products(_Call(chosen, interpret), rows, weights)
    for scale in (factor, weight_factor):
        if scale is not None:
            sums = sums * scale
    return sums.astype(result).reshape(*x.shape[:-1], sums.shape[1])


def exact_in_bfloat16(format: BlockFormat) -> bool:
    """Whether decoded values without the scale of a tensor are bfloat16, down to 2^-126."""
    bits = format.element.mantissa_bits + 1
    return (format.scale == "exponent" and bits <= 8) or (format.scale == "e4m3" and bits + 4 <= 8)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static: the implementation, how Pallas kernels run."""

    implementation: str
    interpret: "Interpret"


@compat.custom_vjp(0)
def _products(call: _Call, x: jax.Array, weights: Packed) -> jax.Array:
    backend = _load(call.implementation)
    return backend.matmul(x, weights, **_interpreted(call.implementation, call.interpret))


def _products_forward(call: _Call, x: jax.Array, weights: Packed) -> tuple[jax.Array, tuple[Packed, jax.Array]]:
    return _products(call, x, weights), (weights, jnp.zeros(0, x.dtype))


def _products_backward(call: _Call, saved: tuple[Packed, jax.Array], d_out: jax.Array) -> tuple[jax.Array, None]:
    del call
    weights, like_x = saved
    decoded = _load("xla").dequantize(weights, like_x.dtype)
    return reference.product(d_out.astype(like_x.dtype), decoded, -1 - weights.axis).astype(like_x.dtype), None


_products.defvjp(_products_forward, _products_backward)


def _without_tensor_scale(packed: Packed) -> tuple[jax.Array | None, Packed]:
    """(the float32 that multiplies the whole tensor, the rest)."""
    if packed.tensor_scale is None:
        return None, packed
    return packed.tensor_scale, dataclasses.replace(packed, tensor_scale=jnp.float32(1))


def preferred(op: Operation, format: BlockFormat) -> str:
    """The implementation that None takes for what is being compiled for."""
    chosen = gpu_choices.first("mx", op, format.name, elsewhere={"tpu": "pallas_tpu"})
    return "xla" if chosen == "xla" or _lacks(chosen, op, format) else chosen


def _choose(op: Operation, implementation: str | None, format: BlockFormat, size: int) -> str:
    """The implementation that was named, or the one for the platform.

    Raises:
      UnsupportedError: the one that was named does not have the case.
    """
    chosen = preferred(op, format) if implementation is None else implementation
    if chosen in ("reference", "xla"):
        return chosen
    lacks = _lacks(chosen, op, format)
    if lacks:
        raise _unsupported(op, chosen, lacks)
    # Kernels have no empty grids; the result is empty by any way.
    return chosen if size else "xla"


def _lacks(implementation: str, op: Operation, format: BlockFormat) -> str | None:
    backend = _load(implementation)
    return backend.lacks_products(format) if op == "matmul" else backend.lacks_blocks(format)


def _unsupported(op: str, name: str, lacks: str) -> UnsupportedError:
    return UnsupportedError(
        f'{op}: implementation="{name}" {lacks} Take implementation=None, which picks one that has the case.'
    )


def _load(name: str) -> types.ModuleType:
    # Pallas takes longer to import than all the rest, and programs on a CPU never need it.
    return importlib.import_module(f"scalejax.kernels.mx.{name}")


def _interpreted(implementation: str, interpret: "Interpret") -> dict[str, "Interpret"]:
    return {"interpret": interpret} if implementation.startswith("pallas") else {}


def _check_name(op: str, implementation: str | None, known: tuple[str, ...]) -> None:
    if implementation is not None and implementation not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise UserError(f"{op}: implementation must be None or one of {names}; got {implementation!r}.")


def _check_packed(op: str, packed: Packed) -> None:
    format, blocks = packed.format, -(-packed.length // packed.format.k1)
    wanted = {"codes": blocks * format.k1 * format.element.bits // 8, "scales": blocks}
    if format.sub_scale != "none":
        wanted["sub_scales"] = blocks * (format.k1 // format.k2) * format.d2 // 8
    arrays = {name: getattr(packed, name) for name in ("codes", "scales", "sub_scales")}
    found = {name: array.shape[packed.axis] for name, array in arrays.items() if array is not None}
    if found != wanted:
        raise UserError(
            f"{op}: {packed.length} values of {format.name} have {_listed(wanted)} along their axis; got "
            f"{_listed(found)}. Was it packed in another format? Inside a shard_map that cuts this axis, say with "
            "dataclasses.replace what length a device holds."
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _check_operands(op: str, x: jax.Array | Packed, weights: Packed) -> None:
    if not isinstance(weights, Packed) or weights.codes.ndim != 2:
        got = f"{weights.codes.ndim} axes" if isinstance(weights, Packed) else type(weights).__name__
        raise UserError(f"{op}: weights must be packed with two axes; got {got}. Use quantize_blocks, jax.vmap.")
    for operand in (x, weights):
        if isinstance(operand, Packed):
            _check_packed(op, operand)
    if any(isinstance(p, Packed) and p.tensor_scale is not None and p.tensor_scale.ndim for p in (x, weights)):
        raise UserError(f"{op}: an operand is a stack of tensors, each with a tensor_scale of its own. Use jax.vmap.")
    if isinstance(x, Packed):
        if x.axis != -1:
            raise UserError(
                f"{op}: blocks of x must lie along its last axis, which is summed over; got axis {x.axis}. Quantize "
                "it along axis -1."
            )
        length = x.length
    else:
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise UserError(f"{op}: x must be float32, bfloat16 or float16; got {x.dtype}. Cast it.")
        if x.ndim == 0:
            raise UserError(f"{op}: x must have an axis to sum over; got x[]. Reshape it to [1, K].")
        length = x.shape[-1]
    if length != weights.length:
        shape = list(x.codes.shape if isinstance(x, Packed) else x.shape)
        raise UserError(
            f"{op}: the last axis of x has {length} values (x{shape}), the axis of blocks of the weights, "
            f"{weights.axis}, {weights.length}. Quantize weights along the axis that is summed over."
        )
