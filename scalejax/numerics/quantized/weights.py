"""Weights that know the format of their products, in the place of plain arrays: models know of no formats.

A model reads a parameter, casts it, reshapes or transposes it, and multiplies it (`@`, `weights.dot`) or looks rows up
in it (`[ids]`). These are what `FormattedWeight` can do; anything else is an error, never a product without a format.
`StaticWeight`, for inference, can be multiplied from the left.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import EllipsisType
from typing import Self, overload

import jax
import jax.numpy as jnp

from scalejax.numerics import quantize
from scalejax.numerics.quantized import products, static
from scalejax.numerics.quantized.rules import QuantizationRule, module_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Weight:
    """What arrays and weights in their place have in common.

    Attributes:
      array: float[...].
      path: Of its module, for messages.
    """

    array: jax.Array
    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype

    def astype(self, dtype: jax.typing.DTypeLike) -> Self:
        return dataclasses.replace(self, array=self.array.astype(dtype))

    def reshape(self, *shape: int) -> Self:
        return dataclasses.replace(self, array=self.array.reshape(*shape))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("rule", "path", "quantizer"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class FormattedWeight(_Weight):
    """A matrix, or a table of embeddings, with the rule for it; its array is not quantized.

    Attributes:
      rule: Its formats.
      quantizer: What makes the codes of blocks, for it and for what it is multiplied with.
    """

    rule: QuantizationRule
    quantizer: products.BlockQuantizer = quantize.quantize

    @property
    def T(self) -> "FormattedWeight":
        return dataclasses.replace(self, array=self.array.T)

    @overload
    def __getitem__(self, index: EllipsisType) -> Self: ...

    @overload
    def __getitem__(self, index: jax.Array) -> jax.Array: ...

    def __getitem__(self, index: EllipsisType | jax.Array) -> Self | jax.Array:
        """`[...]` is the weight itself, as modules read a parameter; `[ids]` are rows in the format of weights."""
        if isinstance(index, EllipsisType):
            return self
        if not (hasattr(index, "dtype") and jnp.issubdtype(index.dtype, jnp.integer)):
            raise TypeError(
                f"FormattedWeight: {self.path} can be read whole ([...]) or by rows (an array of ids); got {index!r}. "
                "Put a rule without formats for it before."
            )
        return products.read_rows(self.array[index], self.rule, where=self.path, quantizer=self.quantizer)

    def __matmul__(self, x: jax.Array) -> jax.Array:
        """W x for matrices."""
        self._check_matrices(self, x)
        dimensions = (((self.ndim - 1,), (0,)), ((), ()))
        return products.mx_dot_general(
            self.array, x, dimensions, rule=self.rule, weight="lhs", where=self.path, quantizer=self.quantizer
        )

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """x W for a matrix W."""
        self._check_matrices(self)
        return dot(x, self)

    def _check_matrices(self, *operands: "jax.Array | FormattedWeight") -> None:
        """Refuses more than two axes, where `@` is many products: `mx_dot_general` has batch axes for them."""
        if any(operand.ndim != 2 for operand in operands):
            shapes = " and ".join(str(operand.shape) for operand in operands)
            raise TypeError(f"FormattedWeight: @ with {self.path} needs matrices; got {shapes}. Use `weights.dot`.")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array", "scale"), meta_fields=("format", "path"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticWeight(_Weight):
    """A matrix whose left operand is quantized under a scale that was found beforehand; not differentiated.

    Attributes:
      scale: float32[], of the matrices of experts float32[n]; 0 = the operand stays as it is.
      format: Of the operand, see `numerics.quantized.static`.
    """

    scale: jax.Array
    format: static.Format

    def __getitem__(self, index: object) -> "StaticWeight":
        """`[...]` is the weight itself, as modules read a parameter."""
        if index is Ellipsis:
            return self
        raise TypeError(f"StaticWeight: {self.path} can be read whole ([...]); got {index!r}.")

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """x W for a matrix W."""
        return dot(x, self)


def dot(
    x: jax.Array,
    weight: "jax.Array | FormattedWeight | StaticWeight",
    *,
    contract: int = 1,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """x times a weight: the last `contract` axes of x against the first of `weight`.

    Args:
      x: float[..., ...].
      weight: float[..., ...], with a format or without.
      contract: Axes that are summed over.
      dtype: In which sums are kept and returned; None = what the operands promote to.
    """
    dimensions = ((tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))), ((), ()))
    if isinstance(weight, FormattedWeight):
        return products.mx_dot_general(
            x, weight.array, dimensions, preferred_element_type=dtype, rule=weight.rule, where=weight.path,
            quantizer=weight.quantizer,
        )  # fmt: skip
    if isinstance(weight, StaticWeight):
        return _static_dot(x, weight, contract, dtype)
    return jax.lax.dot_general(x, weight, dimensions, preferred_element_type=dtype)


def _static_dot(x: jax.Array, weight: StaticWeight, contract: int, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """The product of codes, and the scale times their sums in float32."""
    inner, free = weight.shape[:contract], weight.shape[contract:]
    flat = x.reshape(*x.shape[: x.ndim - contract], math.prod(inner))  # blocks lie along all that is summed over
    # One program serves all layers, of which some may have no scale: they take their inputs as they are, times 1.
    given = weight.scale > 0
    scale = jnp.where(given, weight.scale, 1)
    operand = jnp.where(given, static.encode(flat, scale, weight.format), flat)
    matrix = weight.array.reshape(math.prod(inner), *free)
    sums = jax.lax.dot_general(
        operand, matrix, (((flat.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return (sums * scale).astype(dtype or jnp.promote_types(x.dtype, weight.dtype))


def formatted(
    params: Mapping[str, jax.Array],
    rules: Mapping[str, QuantizationRule],
    quantizer: products.BlockQuantizer = quantize.quantize,
) -> dict[str, jax.Array | FormattedWeight]:
    """Parameters by path, those of the modules that rules name as `FormattedWeight`.

    Args:
      params: {path: array}.
      rules: {path of a module: its rule}, see `rules.assign`. A rule without formats leaves its module as it is.
      quantizer: What makes the codes of blocks.
    """
    return {path: _formatted(array, module_of(path), rules, quantizer) for path, array in params.items()}


def _formatted(
    array: jax.Array, module: str, rules: Mapping[str, QuantizationRule], quantizer: products.BlockQuantizer
) -> jax.Array | FormattedWeight:
    rule = rules.get(module)
    if rule is None or (rule.weight_qtype, rule.act_qtype, rule.bwd_qtype) == (None, None, None):
        return array
    return FormattedWeight(array=array, rule=rule, path=module, quantizer=quantizer)


def weights_of(logical_axes: Mapping[str, tuple[str | None, ...]]) -> dict[str, str]:
    """{path of a module: path of its weight} for the parameters that are matrices or tables, layer by layer.

    Args:
      logical_axes: {path of a parameter: its axes}; "layers" is that of scanned layers, "towers" that of towers beside
        each other, and ("heads", "head") alone are vectors, one a head, which multiply no matrix.
    """
    own = {
        path: tuple(axis for axis in axes if axis not in ("layers", "towers")) for path, axes in logical_axes.items()
    }
    return {module_of(path): path for path, axes in own.items() if len(axes) > 1 and axes != ("heads", "head")}
