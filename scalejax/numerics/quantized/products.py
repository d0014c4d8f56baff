"""Products whose operands are in number formats, forward and backward.

A scale can only leave a sum if it is the same for all that is added up, so blocks lie along the axis that a product
reduces, and the three products of a layer y = x W quantize three times:

    y  = Q_k(x) Q_k(W)          along k, the inputs             act_qtype, weight_qtype
    dx = Q_n(dy) Q_n(W)^T       along n, the outputs            bwd_qtype, weight_qtype
    dW = Q_b(x)^T Q_b(dy)       along b, the examples           act_qtype, bwd_qtype

Quantizing and transposing do not commute, so that every Q starts from the array itself. Where gradients have no format,
the backward products take what the forward product took, in full precision. Sums are in float32. All else of a model
(norms, softmax, residuals, products of activations with each other) stays as it is.

Source: Rouhani et al., "With Shared Microexponents, A Little Shifting Goes a Long Way", ISCA 2023, section V.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from scalejax import compat
from scalejax.errors import UnsupportedError, UserError, check_one_of
from scalejax.numerics import float8, formats, quantize
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.numerics.scales import ScaleRule

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
Side = Literal["lhs", "rhs"]

WEIGHTS, ACTIVATIONS = "quantized_weights", "quantized_activations"
"""Names of what forward products took, for rematerialisation policies (`jax.checkpoint_policies`)."""


class Encoded(Protocol):
    """Codes and scales as an implementation of its own keeps them; a pytree."""

    def decode(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """`quantize.dequantize`, to the bit."""
        ...


class BlockQuantizer(Protocol):
    """Makes codes and scales; its arguments are those of `quantize.quantize`, and so are its bits."""

    def __call__(
        self, x: jax.Array, format: BlockFormat, /, *, axis: int, scale_rule: ScaleRule | None, tail: quantize.Tail
    ) -> quantize.Quantized | Encoded: ...


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("held", "scale"), meta_fields=("dtype", "shape", "axes")
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of a product, as it is stored between passes.

    Attributes:
      held: The array itself; or its codes and scales, along one axis or along several as one; or its FP8 values.
      scale: Of FP8 values, float32 that broadcasts against them; else None.
      dtype: Of the array.
      shape: Of the array.
      axes: Those that were laid behind one another, to be the last, before it was quantized; None = none.
    """

    held: jax.Array | quantize.Quantized | Encoded
    scale: jax.Array | None = None
    dtype: jnp.dtype
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None

    @property
    def native(self) -> bool:
        """Whether it is FP8 values under scales."""
        return self.scale is not None

    def value(self) -> jax.Array:
        """The values that it stands for, in the dtype of the array."""
        if isinstance(self.held, jax.Array | np.ndarray):
            held = jnp.asarray(self.held)
            return held if self.scale is None else (held.astype(jnp.float32) * self.scale).astype(self.dtype)
        if isinstance(self.held, quantize.Quantized):
            value = quantize.dequantize(self.held, self.dtype)
        else:
            value = self.held.decode(self.dtype)
        return value if self.axes is None else _unflatten(value, self.shape, self.axes)

    def decoded(self) -> "Operand":
        """The same for a product that is taken again and again: codes and scales as the array they stand for."""
        return self if self.native else Operand(held=self.value(), dtype=self.dtype, shape=self.shape)


def operand(
    x: jax.Array,
    format: str | None,
    rule: QuantizationRule,
    *,
    axes: Sequence[int],
    where: str = "",
    dtype: jax.typing.DTypeLike | None = None,
    quantizer: BlockQuantizer = quantize.quantize,
) -> Operand:
    """Quantizes an array for a product that sums over `axes`.

    Args:
      x: float32, bfloat16 or float16; any dtype where format is None.
      format: Name of the format; None = x as it is.
      rule: What is said of it.
      axes: Not negative, in the order in which the other operand has them: blocks lie along all of them as one.
      where: Path of the module, for messages.
      dtype: In which the product takes it; None = that of x.
      quantizer: What makes the codes of blocks.

    Raises:
      UserError: the axes are no multiple of the block and rule.tail is "refuse", or x has another dtype.
    """
    axes, whole = tuple(axes), tuple(range(x.ndim))
    plain = functools.partial(Operand, dtype=jnp.dtype(dtype or x.dtype), shape=x.shape)
    if format is None:
        return plain(held=x)
    shared = whole if rule.scales == "tensor" else axes
    if rule.implementation == "native":
        codes, scale = float8.quantize(x, format, axes=shared)
        return plain(held=codes, scale=scale)
    kind = formats.find(format)
    if rule.scales != "blocks":
        length = max(math.prod(x.shape[axis] for axis in shared), 1)  # of an array without values, too
        kind = dataclasses.replace(kind, k1=length, k2=length)
    # Blocks that end with the last axis are those of all axes as one, and nothing need be laid out anew.
    if len(shared) == 1 or (shared and x.shape[shared[-1]] % kind.k1 == 0):
        flat, axis = None, shared[-1]
    else:
        x, flat, axis = _flatten(x, shared), shared, x.ndim - len(shared)
    if x.shape[axis] % kind.k1 and rule.tail == "refuse":
        raise UserError(
            f"quantization of {where or 'a product'}: it sums over {x.shape[axis]} values, no multiple of the blocks "
            f"of {kind.k1} that {kind.name} has. Say tail='pad' in its rule, which appends zeros, or put a rule "
            "without formats for it before."
        )
    scale_rule = rule.scale_rule if kind.scale == "exponent" else None
    held = quantizer(x, kind, axis=axis, scale_rule=scale_rule, tail=rule.tail)
    return plain(held=held, axes=flat)


def multiply(
    a: Operand,
    b: Operand,
    dimension_numbers: DimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`lax.dot_general` of two operands, added up in float32 or wider.

    Args:
      a: One.
      b: The other.
      dimension_numbers: As `lax.dot_general` has them.
      precision: As `lax.dot_general` has it.
      dtype: Of the result; None = what the operands promote to.
    """
    dtype = dtype or jnp.promote_types(a.dtype, b.dtype)
    if a.native and b.native:
        assert a.scale is not None
        assert b.scale is not None
        sums = lax.platform_dependent(
            a.held, b.held, cpu=_through_float32(dimension_numbers), default=_float8_product(dimension_numbers)
        )
        sums = sums * _beside(a.scale, "lhs", a, b, dimension_numbers)
        return (sums * _beside(b.scale, "rhs", a, b, dimension_numbers)).astype(dtype)
    x, y = a.value(), b.value()
    common = jnp.promote_types(x.dtype, y.dtype)
    wide = jnp.promote_types(common, jnp.float32)
    sums = lax.dot_general(
        x.astype(common), y.astype(common), dimension_numbers, precision=precision, preferred_element_type=wide
    )
    return sums.astype(dtype)


def mx_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    rule: QuantizationRule,
    weight: Side = "rhs",
    where: str = "",
    out_sharding: object = None,
    quantizer: BlockQuantizer = quantize.quantize,
) -> jax.Array:
    """`lax.dot_general` in number formats; its gradient is in those of the rule, see above.

    Modules that take a `dot_general` take `functools.partial(mx_dot_general, rule=...)`.

    Args:
      lhs: float32, bfloat16 or float16.
      rhs: The same.
      dimension_numbers: ((contracting of lhs, of rhs), (batch of lhs, of rhs)).
      precision: As `lax.dot_general` has it; "native" products have none.
      preferred_element_type: Dtype of the result; None = what the operands promote to. Sums are in float32 or wider.
      rule: The formats. Its path is not looked at.
      weight: Which operand has the format of weights; the other has that of activations.
      where: Path of the module, for messages.
      out_sharding: None; modules of Flax pass it.
      quantizer: What makes the codes of blocks.

    Returns:
      What `lax.dot_general` returns for operands that were cast to their formats.

    Raises:
      UserError: a reduced axis is no multiple of the block (in the backward pass also the axes of results and of
        examples), or a dtype that has no formats.
      UnsupportedError: a sharding is asked of the result.
    """
    if out_sharding is not None:
        raise UnsupportedError(
            f"mx_dot_general: out_sharding must be None; got {out_sharding}. Put jax.lax.with_sharding_constraint, or "
            "jax.sharding.reshard on a mesh of explicit axes, around the product."
        )
    check_one_of("mx_dot_general: weight", weight, ("lhs", "rhs"))
    (lc, rc), (lb, rb) = dimension_numbers
    call = _Call(
        contract=(tuple(lc), tuple(rc)),
        batch=(tuple(lb), tuple(rb)),
        precision=precision,
        dtype=jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)),
        rule=rule,
        weight=weight,
        where=where,
        quantizer=quantizer,
    )
    return _dot(call, lhs, rhs)


def read_rows(
    rows: jax.Array, rule: QuantizationRule, *, where: str = "", quantizer: BlockQuantizer = quantize.quantize
) -> jax.Array:
    """Rows of an embedding table as the format of weights has them, one by one; their gradient passes straight through.

    Args:
      rows: float[..., D]; blocks lie along D. Scales that are not the format's own are one a row, and so is the float32
        that NVFP4 has for a tensor: which rows are read together, and where, changes none of them.
      rule: What is said of the table.
      where: Path of the table, for messages.
      quantizer: What makes the codes of blocks.
    """
    rule = dataclasses.replace(rule, scales="rows") if rule.scales == "tensor" else rule

    def read(rows: jax.Array) -> jax.Array:
        axes = (rows.ndim - 1,)
        return operand(rows, rule.weight_qtype, rule, axes=axes, where=where, quantizer=quantizer).value()

    @jax.custom_jvp
    def through(rows: jax.Array) -> jax.Array:
        if rule.weight_qtype is not None and formats.find(rule.weight_qtype).scale == "e4m3":
            return jax.vmap(read)(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
        return read(rows)

    @through.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return through(*primals), tangents[0]

    return through(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What a product knows before it has arrays."""

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    precision: lax.PrecisionLike
    dtype: jnp.dtype
    rule: QuantizationRule
    weight: Side
    where: str
    quantizer: BlockQuantizer

    def quantized(
        self, x: jax.Array, side: Side | None, axes: Sequence[int], dtype: jnp.dtype | None = None
    ) -> Operand:
        """An operand by its side; None = a gradient."""
        rule = self.rule
        format = rule.bwd_qtype if side is None else rule.weight_qtype if side == self.weight else rule.act_qtype
        return operand(x, format, rule, axes=axes, where=self.where, dtype=dtype, quantizer=self.quantizer)

    def name(self, x: Operand, side: Side) -> Operand:
        """Named for policies, if it was quantized at all."""
        if (self.rule.weight_qtype if side == self.weight else self.rule.act_qtype) is None:
            return x
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHTS if side == self.weight else ACTIVATIONS), x)


_Saved = tuple[Operand, Operand] | tuple[jax.Array, jax.Array]
"""Both operands: as they were multiplied, or, where gradients have a format, as they were given."""


@compat.custom_vjp(0)
def _dot(call: _Call, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _dot_forward(call, lhs, rhs)[0]


def _dot_forward(call: _Call, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, _Saved]:
    a = call.name(call.quantized(lhs, "lhs", call.contract[0]), "lhs")
    b = call.name(call.quantized(rhs, "rhs", call.contract[1]), "rhs")
    y = multiply(a, b, (call.contract, call.batch), precision=call.precision, dtype=call.dtype)
    return y, (a, b) if call.rule.bwd_qtype is None else (lhs, rhs)


def _dot_backward(call: _Call, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = saved
    (lc, rc), (lb, rb) = call.contract, call.batch
    lf = tuple(axis for axis in range(len(lhs.shape)) if axis not in lc + lb)
    rf = tuple(axis for axis in range(len(rhs.shape)) if axis not in rc + rb)
    gb = tuple(range(len(lb)))
    of_lhs = tuple(range(len(lb), len(lb) + len(lf)))
    of_rhs = tuple(range(len(lb) + len(lf), g.ndim))

    def against(
        x: jax.Array | Operand, side: Side, summed: tuple[int, ...], own: tuple[int, ...], batch: tuple[int, ...]
    ) -> jax.Array:
        """sum over axes `own` of x and `summed` of g: [batch, the other axes of g, the other axes of x]."""
        if isinstance(x, Operand):
            y, cotangent = x, Operand(held=g, dtype=g.dtype, shape=g.shape)
        else:
            y, cotangent = call.quantized(x, side, own), call.quantized(g, None, summed, dtype=x.dtype)
        return multiply(cotangent, y, ((summed, own), (gb, batch)), precision=call.precision, dtype=y.dtype)

    d_lhs = against(rhs, "rhs", of_rhs, rf, rb)
    d_rhs = against(lhs, "lhs", of_lhs, lf, lb)
    # What is left of x comes in its order, and has the partners of these axes.
    d_lhs = d_lhs.transpose(np.argsort([*lb, *lf, *np.take(lc, np.argsort(rc))]))
    d_rhs = d_rhs.transpose(np.argsort([*rb, *rf, *np.take(rc, np.argsort(lc))]))
    return d_lhs.astype(lhs.dtype), d_rhs.astype(rhs.dtype)


_dot.defvjp(_dot_forward, _dot_backward)


def _float8_product(dimension_numbers: DimensionNumbers) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, dimension_numbers, preferred_element_type=jnp.float32)

    return product


def _through_float32(dimension_numbers: DimensionNumbers) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The same values: CPUs have no product of 8-bit floats."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dimension_numbers)

    return product


def _beside(scale: jax.Array, side: Side, a: Operand, b: Operand, dimension_numbers: DimensionNumbers) -> jax.Array:
    """A scale as it meets the result of a product, [batch, free axes of lhs, free axes of rhs]."""
    index = ("lhs", "rhs").index(side)
    contract, batch = dimension_numbers[0][index], dimension_numbers[1][index]
    free = [axis for axis in range(scale.ndim) if axis not in (*contract, *batch)]
    lengths = [scale.shape[axis] for axis in (*batch, *free)]
    other = b if side == "lhs" else a
    ones = [1] * (len(other.shape) - len(contract) - len(batch))
    shape = lengths + ones if side == "lhs" else lengths[: len(batch)] + ones + lengths[len(batch) :]
    return scale.transpose((*batch, *free, *contract)).reshape(shape)


def _flatten(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """[...] -> [other axes, axes as one]."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    length = math.prod(x.shape[axis] for axis in axes)
    return x.transpose((*others, *axes)).reshape(*(x.shape[axis] for axis in others), length)


def _unflatten(flat: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """The inverse of `_flatten`."""
    others = [axis for axis in range(len(shape)) if axis not in axes]
    order = (*others, *axes)
    return flat.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
