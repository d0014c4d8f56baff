"""Signatures, checks, derivatives and the choice of implementation.

Rows lie sorted by group: those of group 0 first, then those of group 1, and so on, with a matrix for each group. In a
layer of experts a group is what one expert was given, and this is its grouped GEMM. `implementation` names one of

    reference     each row gathers the matrix of its group; for tests of a few rows
    blocks        a loop over `block` rows at a time, each step one dense product; what None takes on a CPU
    pallas_tpu    kernels for a TPU (`pallas_tpu`); what None takes there
    pallas_gpu    Triton kernels (`pallas_gpu`); what None takes on a GPU
    ragged_dot    `jax.lax.ragged_dot`, with its own derivative; what None takes where the kernels lack the dtype
    megablox      jax's kernels for a TPU, with their own derivative
    tokamax       those of the package tokamax, with their own derivative

The kernels and the loop are the same few functions each, products forward and gradients of rows and of weights, with
one derivative around them. Compiled for a TPU, the weights' gradient of `ragged_dot` does the work of all groups on all
rows; `pallas_tpu` moves fewer bytes than `megablox`, which reads the rows of gate and up twice, and keeps no more
memory.
"""

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import compat
from scalejax.errors import UnsupportedError, check_one_of
from scalejax.kernels import gpu_choices
from scalejax.kernels.grouped_matmul import library, reference

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "blocks", "pallas_tpu", "pallas_gpu", "ragged_dot", "megablox", "tokamax"]
_OURS = ("blocks", "pallas_tpu", "pallas_gpu")
_IMPLEMENTATIONS = ("reference", *_OURS, *library.PRODUCTS)

_ELSEWHERE = {"cpu": "blocks", "tpu": "pallas_tpu"}
"""What None takes where there is no GPU; "ragged_dot" where that lacks the dtype."""


def grouped_matmul(
    x: "Float[Array, 'rows inner']",
    weights: "Float[Array, 'groups inner outer']",
    sizes: "Int[Array, 'groups']",
    *,
    block: int = 1,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'rows outer']":
    """y_r = x_r W_g for the rows r of each group g, summed in float32 or wider; zeros behind the last group.

    Gradients are summed alike: that of x is a grouped product, that of the weights sums over the rows of a group, and
    is zero for a group without rows.

    Args:
      x: float[R, K], sorted by group.
      weights: float[n, K, N] in the dtype of x.
      sizes: int32[n], rows of each group; their sum is at most R.
      block: A number that divides R and every size, where groups were padded to such multiples. "blocks" takes so many
        rows at a time, and with 1 it is as slow as one product a row; the others do not need it.
      implementation: See above; None picks.
      interpret: For tests of Pallas kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Returns:
      float[R, N] in the dtype of x.

    Raises:
      ValueError: shapes or dtypes do not go together, or R is no multiple of `block`.
      UnsupportedError: the named implementation does not have the dtype.
    """
    op = "grouped_matmul"
    check_one_of(f"{op}: implementation", implementation, (None, *_IMPLEMENTATIONS))
    shapes = "x, weights and sizes must be [R, K], [n, K, N]"
    _check(op, shapes, weights.ndim == 3, x, (weights,), sizes, block)
    call = _choose(op, x, block, implementation, interpret)
    if 0 in (*x.shape, *weights.shape):
        return jnp.zeros((x.shape[0], weights.shape[2]), x.dtype)
    sizes = sizes.astype(jnp.int32)
    if call.implementation == "reference":
        return reference.multiply(x, weights, sizes)
    if call.implementation in _OURS:
        return _multiply(call, x, weights, sizes)
    return library.PRODUCTS[call.implementation](x, weights, sizes, bool(interpret))


def grouped_gated_mlp(
    x: "Float[Array, 'rows model']",
    gate: "Float[Array, 'groups model hidden']",
    up: "Float[Array, 'groups model hidden']",
    down: "Float[Array, 'groups hidden model']",
    sizes: "Int[Array, 'groups']",
    *,
    block: int = 1,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'rows model']":
    """(silu(x_r gate_g) * (x_r up_g)) down_g for the rows r of each group g; zeros behind the last group.

    The products with gate and up are one pass over the rows, and silu is taken of sums in float32 or wider: what is
    between the layers is rounded once, to the dtype of x. For the gradient both products are kept, in that dtype, and
    what is between the layers is made again from them. "ragged_dot", "megablox" and "tokamax" are three products apart.

    Args:
      x: float[R, E], sorted by group.
      gate: float[n, E, F] in the dtype of x.
      up: The same.
      down: float[n, F, E] in the dtype of x.
      sizes: As in `grouped_matmul`; so is everything else.

    Returns:
      float[R, E] in the dtype of x.

    Raises:
      ValueError: as in `grouped_matmul`.
      UnsupportedError: the named implementation does not have the dtype.
    """
    op = "grouped_gated_mlp"
    check_one_of(f"{op}: implementation", implementation, (None, *_IMPLEMENTATIONS))
    shapes = "x, gate, up, down and sizes must be [R, E], [n, E, F], [n, E, F], [n, F, E]"
    fit = gate.ndim == 3 and up.shape == gate.shape and down.shape == (gate.shape[0], gate.shape[2], gate.shape[1])
    _check(op, shapes, fit, x, (gate, up, down), sizes, block)
    call = _choose(op, x, block, implementation, interpret)
    if 0 in (*x.shape, *gate.shape):
        return jnp.zeros(x.shape, x.dtype)
    sizes = sizes.astype(jnp.int32)
    if call.implementation in _OURS:
        return _mlp(call, x, gate, up, down, sizes)
    run = functools.partial(
        grouped_matmul, sizes=sizes, block=block, implementation=implementation, interpret=interpret
    )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    products = [run(x, w).astype(wide) for w in (gate, up)]
    return run(reference.between(*products).astype(x.dtype), down)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static."""

    implementation: str
    block: int
    interpret: "Interpret"

    def run(self, name: str, *operands: Any) -> Any:
        """A function of the module of one of our own implementations."""
        given = {"block": self.block} if self.implementation == "blocks" else {"interpret": self.interpret}
        return getattr(_load(self.implementation), name)(*operands, **given)


_No = np.ndarray
"""The cotangent of integers."""


@compat.custom_vjp(0)
def _multiply(call: _Call, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _run(call, "multiply", x, weights, sizes)


_Saved = tuple[jax.Array, jax.Array, jax.Array]


def _multiply_forward(call: _Call, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, _Saved]:
    return _multiply(call, x, weights, sizes), (x, weights, sizes)


def _multiply_backward(call: _Call, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, _No]:
    x, weights, sizes = saved
    (to_weights,) = _run(call, "weight_gradients", x, (g,), sizes)
    return _run(call, "multiply_transposed", (g,), (weights,), sizes), to_weights, _none(sizes)


_multiply.defvjp(_multiply_forward, _multiply_backward)


@compat.custom_vjp(0)
def _mlp(call: _Call, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    return _run(call, "multiply", _run(call, "gated", x, (gate, up), sizes), down, sizes)


_SavedMlp = tuple[jax.Array, ...]


def _mlp_forward(
    call: _Call, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, _SavedMlp]:
    hidden, x_gate, x_up = _run(call, "gated_with_products", x, (gate, up), sizes)
    return _run(call, "multiply", hidden, down, sizes), (x, gate, up, down, sizes, x_gate, x_up)


def _mlp_backward(
    call: _Call, saved: _SavedMlp, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, _No]:
    x, gate, up, down, sizes, x_gate, x_up = saved
    hidden, *grads = _run(call, "gate_gradients", g, down, (x_gate, x_up), sizes)
    (to_down,) = _run(call, "weight_gradients", hidden, (g,), sizes)
    to_gate, to_up = _run(call, "weight_gradients", x, tuple(grads), sizes)
    to_x = _run(call, "multiply_transposed", tuple(grads), (gate, up), sizes)
    return to_x, to_gate, to_up, to_down, _none(sizes)


_mlp.defvjp(_mlp_forward, _mlp_backward)


# Compiled on its own where nothing around it is: loops and kernels run op by op would be very slow.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(call: _Call, name: str, *operands: Any) -> Any:
    return call.run(name, *operands)


def _none(sizes: jax.Array) -> _No:
    return np.zeros(sizes.shape, jax.dtypes.float0)


def _choose(op: str, x: jax.Array, block: int, implementation: Implementation | None, interpret: "Interpret") -> _Call:
    """The call with an implementation: the one that was named, or the one of the platform.

    Raises:
      UnsupportedError: the one that was named lacks the dtype.
    """
    name = implementation or gpu_choices.first("grouped_matmul", "grouped_matmul", elsewhere=_ELSEWHERE)
    lacks = _load(name).lacks(x.dtype) if name in _OURS else None
    if lacks and implementation:
        raise UnsupportedError(f'{op}: implementation="{name}" {lacks} Take implementation=None.')
    return _Call("ragged_dot" if lacks else name, block, interpret)


def _load(name: str) -> Any:
    # Pallas takes longer to import than all the rest, and programs on a CPU never need it.
    return importlib.import_module(f"scalejax.kernels.grouped_matmul.{name}")


def _check(
    op: str, shapes: str, fit: bool, x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array, block: int
) -> None:
    if not fit or x.ndim != 2 or weights[0].shape[:2] != (*sizes.shape, x.shape[1]):
        found = ", ".join(str(a.shape) for a in (x, *weights))
        raise ValueError(f"{op}: {shapes} and [n]; got {found} and {sizes.shape}.")
    if any(w.dtype != x.dtype for w in weights) or not jnp.issubdtype(x.dtype, jnp.floating):
        found = ", ".join(str(w.dtype) for w in weights)
        raise ValueError(f"{op}: x and weights must be of one float dtype; got {x.dtype} and {found}.")
    if block < 1 or x.shape[0] % block:
        raise ValueError(f"{op}: block must divide the {x.shape[0]} rows of x; got {block}.")
