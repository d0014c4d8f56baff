"""Groups of values as small integers under a scale, and the Hadamard transform that evens them out before.

    format = IntGroups(bits=4, size=128)
    groups = quantize(x, format, seed, transform="hadamard")    # float32[..., n] -> uint8[..., n / 2] and scales
    dequantize_sum(arrived, format, transform="hadamard")       # [devices, ...] -> float32[..., n], H / 32 of the sum

A group of values has the scale max |x| / (2^(bits - 1) - 1), and each value the integer level nearest to x / scale, or
stochastically one of the two around it, which is unbiased. Levels are symmetric, -7 to 7 or -127 to 127: all 16
converged worse at the end of training in the released code of SDP4Bit.

Of 4 bits element i of a group and element i + size / 2 share a byte, the first in the low half: on a TPU neighbours in
one byte would need strided slices, which Mosaic does not have.

Chance comes from a hash of the seed and the place of the value in the array, so that it needs no memory and is the same
on every platform. The transform is sums of two in a fixed order, where a product by the matrix is summed in another
order on every platform; on a CPU it takes as long.

`implementation` names one of

    xla          passes over memory for the transform, the maxima and the levels; every case and platform
    pallas_tpu   one pass (`pallas_tpu`)
    pallas_gpu   one pass, in Triton (`pallas_gpu`)

All of them give the same bits. A name never falls back: what it lacks is an UnsupportedError that says so. None takes
the Pallas kernels of the platform of the mesh in force, or else of jax's first device, where they have the case and, on
GPUs, are no slower (`gpu_choices`), and "xla" otherwise. Pallas kernels are not partitioned by the compiler: over
several devices call them inside `jax.shard_map` with check_vma=False, or name "xla".

Source: Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training",
NeurIPS 2024.
"""

import importlib
import math
import types
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from scalejax.errors import UnsupportedError, UserError, check_one_of
from scalejax.kernels import gpu_choices
from scalejax.kernels.group_quantize import values, xla
from scalejax.kernels.group_quantize.groups import IntGroups, QuantizedGroups
from scalejax.kernels.group_quantize.values import TRANSFORM

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32, UInt32

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]
Transform = Literal["hadamard", "none"]


def quantize(
    x: "Float32[Array, '*rows n']",
    format: IntGroups,
    seed: "UInt32[Array, '2'] | None" = None,
    *,
    transform: Transform = "none",
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> QuantizedGroups:
    """Values as codes and scales.

    Args:
      x: float32[..., n], n a multiple of the group size.
      format: Of the groups.
      seed: uint32[2] for stochastic rounding; None rounds to nearest, ties to even.
      transform: What is quantized: `hadamard(x)`, or x.
      implementation: None picks; a name never falls back.
      interpret: For tests of Pallas kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Raises:
      UserError: another dtype, or n does not divide.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "quantize"
    if x.dtype != jnp.float32:
        raise UserError(f"{op}: x must be float32; got {x.dtype}. Cast it.")
    _check_divides(op, f"x{list(x.shape)}", x.shape[-1], format)
    check_one_of(f"{op}: transform", transform, ("hadamard", "none"))
    backend, how = _choose(op, implementation, interpret, x.size, format)
    codes, scales = backend.quantize(
        x.reshape(-1), _mixed(seed), format=format, transform=transform == "hadamard", **how
    )
    return _in_rows(codes, scales, x.shape[:-1])


def dequantize(
    groups: QuantizedGroups,
    format: IntGroups,
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float32[Array, '*rows n']":
    """float32[..., n] of what `quantize` gave; NaN in groups whose scale is.

    Raises:
      UnsupportedError: the named implementation does not have the case.
    """
    one = QuantizedGroups(groups.codes[None], groups.scales[None])
    return _sum("dequantize", one, format, "none", implementation, interpret)


def dequantize_sum(
    groups: QuantizedGroups,
    format: IntGroups,
    *,
    transform: Transform = "none",
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float32[Array, '*rows n']":
    """The sum along the first axis, one after the other, of what was quantized.

    Args:
      groups: [devices, ..., n].
      format: Of the groups.
      transform: "hadamard" transforms the sum and divides it by 32, so that what was transformed before it was
        quantized is what it was.
      implementation: None picks; a name never falls back.
      interpret: As in `quantize`.

    Raises:
      UnsupportedError: the named implementation does not have the case.
    """
    return _sum("dequantize_sum", groups, format, transform, implementation, interpret)


def _sum(
    op: str,
    groups: QuantizedGroups,
    format: IntGroups,
    transform: Transform,
    implementation: Implementation | None,
    interpret: "Interpret",
) -> jax.Array:
    check_one_of(f"{op}: transform", transform, ("hadamard", "none"))
    backend, how = _choose(op, implementation, interpret, groups.codes.size, format)
    total = backend.combine(
        *_in_one_row(groups), None, None, format=format, transform=transform == "hadamard", to=None, **how
    )
    return total.reshape(*groups.scales.shape[1:-1], groups.scales.shape[-1] * format.size)


def requantize(
    groups: QuantizedGroups,
    format: IntGroups,
    to: IntGroups,
    seed: "UInt32[Array, '2'] | None" = None,
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> QuantizedGroups:
    """`quantize(dequantize_sum(groups, format), to, seed)`, for a sum that travels on.

    Args:
      groups: [devices, ..., n], n a multiple of the size of `to` as well.
      format: Of these groups.
      to: Of the result.
      seed: As in `quantize`.
      implementation: None picks; a name never falls back.
      interpret: As in `quantize`.

    Raises:
      UserError: n does not divide.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "requantize"
    _check_divides(op, "the sum", groups.scales.shape[-1] * format.size, to)
    backend, how = _choose(op, implementation, interpret, groups.codes.size, format, to)
    codes, scales = backend.combine(
        *_in_one_row(groups), None, _mixed(seed), format=format, transform=False, to=to, **how
    )
    return _in_rows(codes, scales, groups.scales.shape[1:-1])


def dequantize_add(
    base: "Float[Array, '*rows n']",
    groups: QuantizedGroups,
    format: IntGroups,
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, '*rows n']":
    """base + `dequantize(groups, format)`, added in float32 and rounded to the dtype of base.

    Args:
      base: float32 or bfloat16 [..., n].
      groups: [..., n].
      format: Of the groups.
      implementation: None picks; a name never falls back.
      interpret: As in `quantize`.

    Raises:
      UserError: another dtype, or another shape.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "dequantize_add"
    shape = (*groups.scales.shape[:-1], groups.scales.shape[-1] * format.size)
    if base.dtype not in (jnp.float32, jnp.bfloat16) or base.shape != shape:
        raise UserError(
            f"{op}: base must be float32 or bfloat16 of the shape of what is added, {list(shape)}; got "
            f"{base.dtype}{list(base.shape)}. Cast it, and fill it up with zeros."
        )
    backend, how = _choose(op, implementation, interpret, base.size, format)
    arrays = groups.codes.reshape(1, -1), groups.scales.reshape(1, -1)
    total = backend.combine(*arrays, base.reshape(-1), None, format=format, transform=False, to=None, **how)
    return total.reshape(shape)


def hadamard(x: "Float32[Array, '*rows n']") -> "Float32[Array, '*rows n']":
    """Each 32 values times the Walsh-Hadamard matrix H of +-1, not normalised: H H = 32 I. By XLA.

    Raises:
      UserError: n is no multiple of 32.
    """
    if x.shape[-1] % TRANSFORM:
        raise UserError(
            f"hadamard: blocks have {TRANSFORM} values; got a last axis of {x.shape[-1]}. Fill it up with zeros."
        )
    return xla.hadamard(x)


def _choose(
    op: str, implementation: str | None, interpret: "Interpret", size: int, *formats: IntGroups
) -> tuple[types.ModuleType, dict[str, Any]]:
    """The implementation that was named, or the one for the platform, and what its functions take besides.

    Raises:
      UserError: there is none of this name.
      UnsupportedError: it does not have the case.
    """
    if implementation is not None:
        check_one_of(f"{op}: implementation", implementation, ("xla", "pallas_tpu", "pallas_gpu"))
    chosen = implementation or gpu_choices.first("group_quantize", op, elsewhere={"tpu": "pallas_tpu"})
    # Kernels have no empty grids; the result is empty by any way.
    if chosen == "xla" or not size:
        return xla, {}
    # Pallas takes longer to import than all the rest, and programs on a CPU never need it.
    backend = importlib.import_module(f"scalejax.kernels.group_quantize.{chosen}")
    lacks = backend.lacks(*formats)
    if lacks is None:
        return backend, {"interpret": interpret}
    if implementation is None:
        return xla, {}
    raise UnsupportedError(
        f'{op}: implementation="{chosen}" {lacks} Take implementation=None, which picks one that has the case.'
    )


def _mixed(seed: jax.Array | None) -> jax.Array | None:
    return None if seed is None else values.mixed_seed(seed)


def _in_one_row(groups: QuantizedGroups) -> tuple[jax.Array, jax.Array]:
    """Codes and scales [devices, all]."""
    count = groups.scales.shape[0]
    return groups.codes.reshape(count, -1), groups.scales.reshape(count, -1)


def _in_rows(codes: jax.Array, scales: jax.Array, rows: tuple[int, ...]) -> QuantizedGroups:
    count = max(1, math.prod(rows))
    return QuantizedGroups(codes.reshape(*rows, codes.size // count), scales.reshape(*rows, scales.size // count))


def _check_divides(op: str, what: str, n: int, format: IntGroups) -> None:
    if n % format.size:
        raise UserError(
            f"{op}: groups have {format.size} values, and the last axis of {what} is no multiple of it: {n}. Fill it "
            "up with zeros, which change no scale."
        )
