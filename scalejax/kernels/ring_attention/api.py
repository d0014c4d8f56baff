"""Signature, checks and the choice of implementation.

`implementation` names one of

    reference    the definition, for tests
    pallas_tpu   one kernel that sends keys and values on to the next TPU while it attends to them (`pallas_tpu`)

The same by transfers of XLA and any kernel of `flash_attention` is `parallel.context_inference.pass_kv`, which takes
this one where `suits` says so.
"""

import importlib
import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax import compat
from scalejax.errors import UnsupportedError, check_one_of
from scalejax.kernels.ring_attention import reference

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "pallas_tpu"]
_IMPLEMENTATIONS = ("reference", "pallas_tpu")


def ring_attention(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    query_positions: "Int[Array, 'batch queries']",
    key_positions: "Int[Array, 'batch keys']",
    axis: str = "context",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation = "pallas_tpu",
    interpret: "Interpret" = False,
) -> tuple["Float[Array, 'batch queries heads head_dim']", "Float[Array, 'batch heads queries']"]:
    """Causal attention of the queries of this device to the keys of all devices along `axis`, and its log-sum-exp.

    For use inside a shard_map with check_vma=False in which all axes of the mesh are manual. A query sees the keys with
    a position at most its own and, with a window, above its own - window; one that sees nothing has out 0 and lse -inf.
    Query head h reads key/value head h // (H / K). Forward only.

    Args:
      q: float[B, s, H, D], the queries of this device; s is the same on all.
      k: [B, t, K, D] in the dtype of q, the keys of this device; t is the same on all, K divides H.
      v: [B, t, K, D].
      query_positions: int32[B, s]; -1 is padding.
      key_positions: int32[B, t]; 2**31 - 1 is an empty place.
      axis: The mesh axis over which tokens are spread.
      window: Positions, >= 1; None = all.
      scale: None = D ** -0.5.
      implementation: See the module; a name never falls back.
      interpret: For tests where there is no TPU: `pltpu.InterpretParams()`. True does not know other devices.

    Returns:
      (out [B, s, H, D] in the dtype of q, lse float32[B, H, s]); sums in float32.

    Raises:
      ValueError: an argument has a wrong rank, size, dtype or value.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "ring_attention"
    check_one_of(f"{op}: implementation", implementation, _IMPLEMENTATIONS)
    _check(op, q, k, v, query_positions, key_positions)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"{op}: window must be an int >= 1, a number of positions, or None; got {window!r}.")
    if isinstance(scale, jax.Array) or not (scale is None or math.isfinite(scale)):
        raise ValueError(f"{op}: scale must be a finite number that is known while tracing; got {scale}.")
    if min(*q.shape, *k.shape) == 0:
        return jnp.zeros_like(q), jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    positions = query_positions.astype(jnp.int32), key_positions.astype(jnp.int32)
    if implementation == "reference":
        return reference.attention(q, k, v, *positions, axis=axis, window=window, scale=factor)
    if missing := lacks(q, k, v, axis=axis):
        raise UnsupportedError(
            f'{op}: implementation="{implementation}" {missing} Take parallel.context_inference.pass_kv, which has '
            "every case."
        )
    # Pallas takes longer to import than all the rest, and programs on a CPU never need it.
    backend = importlib.import_module("scalejax.kernels.ring_attention.pallas_tpu")
    return backend.forward(q, k, v, *positions, axis=axis, window=window, scale=factor, interpret=interpret)


def lacks(q: jax.Array, k: jax.Array, v: jax.Array, *, axis: str) -> str | None:
    """Which part of a case the kernel lacks, or None."""
    ranks = lax.axis_size(axis)
    return importlib.import_module("scalejax.kernels.ring_attention.pallas_tpu").lacks(q, k, v, ranks)


def suits(q: jax.Array, k: jax.Array, v: jax.Array, *, axis: str) -> bool:
    """Whether the kernel is the choice for what is being compiled for: a TPU of one core, and a case that it has.

    A kernel that talks to other devices runs on one core. Where a device is two, as on v5p, half of its
    multiplications would be given away.
    """
    if compat.platform() != "tpu" or compat.cores() > 1:
        return False
    return min(*q.shape, *k.shape) > 0 and lacks(q, k, v, axis=axis) is None


def _check(
    op: str, q: jax.Array, k: jax.Array, v: jax.Array, query_positions: jax.Array, key_positions: jax.Array
) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{op}: {name} must have shape (B, s, heads, D); got {tuple(array.shape)}.")
        if array.dtype != q.dtype:
            raise ValueError(f"{op}: {name} must have the dtype of q, {q.dtype}; got {array.dtype}. Cast one of them.")
    if v.shape != k.shape:
        raise ValueError(f"{op}: v must have the shape of k, {tuple(k.shape)}; got {tuple(v.shape)}.")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or (k.shape[2] and q.shape[2] % k.shape[2]):
        raise ValueError(
            f"{op}: k must have B and D of q and K heads that divide H; got q {tuple(q.shape)}, k {tuple(k.shape)}."
        )
    for name, array, shape in (
        ("query_positions", query_positions, q.shape[:2]),
        ("key_positions", key_positions, k.shape[:2]),
    ):
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{op}: {name} must be integers of shape {shape}; got {array.dtype}{list(array.shape)}.")
