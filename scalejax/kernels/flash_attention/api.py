"""Signature, checks, derivative and the choice of implementation.

`implementation` names one of

    reference    the definition, for tests
    xla          chunks by XLA's matrix products (`xla`)
    pallas_tpu   kernels for a TPU (`pallas_tpu`)
    pallas_gpu   Triton kernels (`pallas_gpu`)
    splash       jax's own TPU kernels, where they have the case (`library`)
    cudnn        NVIDIA's, through jax (`library`)

All of them are a forward function that gives (out, lse) and a backward function of (q, k, v, out, lse) and cotangents,
so that any backward can follow any forward. A name never falls back: what it lacks is an UnsupportedError that says
so. None takes the fastest that has the case on the platform of the mesh in force, or else of jax's first device.

The cotangent of lse needs no pass of its own. With p = e^(s - lse), ds = p * (dp - sum(out * d_out) + d_lse): every
backward is handed the difference of the last two, `correction`.
"""

import dataclasses
import functools
import importlib
import math
import types
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from scalejax import compat
from scalejax.errors import UnsupportedError, check_one_of
from scalejax.kernels import gpu_choices
from scalejax.kernels.flash_attention import reference
from scalejax.kernels.flash_attention.visibility import BackwardInputs, Visibility

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu", "splash", "cudnn"]
_IMPLEMENTATIONS = ("reference", "xla", "pallas_tpu", "pallas_gpu", "splash", "cudnn")

OUT_NAME, LSE_NAME = "flash_attention_out", "flash_attention_lse"
"""Names of what the backward pass needs besides its inputs, for `jax.checkpoint_policies.save_only_these_names`."""


def flash_attention(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    mask: Literal["causal", "full"] = "causal",
    segment_ids: "Int[Array, 'batch queries'] | None" = None,
    kv_segment_ids: "Int[Array, 'batch keys'] | None" = None,
    window: int | None = None,
    query_offset: "int | Int[Array, ''] | Int[Array, 'batch'] | None" = None,
    query_positions: "Int[Array, 'batch queries'] | None" = None,
    key_positions: "Int[Array, 'batch keys'] | None" = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> tuple["Float[Array, 'batch queries heads head_dim']", "Float[Array, 'batch heads queries']"]:
    """out[i] = sum over visible j of softmax_j(scale * q[i] . k[j]) v[j], and the log-sum-exp of each row.

    Query i sees key j if (causal) key_position[j] <= query_position[i], (window) query_position[i] - key_position[j] <
    window, (segments) their segment ids are equal. A row that sees nothing has out 0, lse -inf and gradients 0, so that
    parts of a sequence merge by their lse. Query head h reads key/value head h // (H / K).

    Differentiable in q, k and v, through both results. Under `jax.checkpoint`, saving the names `api.OUT_NAME` and
    `api.LSE_NAME` spares the backward pass the forward one.

    Args:
      q: float[B, S, H, D]: float32, bfloat16 or float16; float64 for "xla" and "reference".
      k: [B, T, K, D] in the dtype of q; K divides H.
      v: [B, T, K, D] in the dtype of q.
      mask: "causal" hides keys after the query, "full" hides none by themselves.
      segment_ids: int[B, S], documents of packed rows; None = one. 0 is an id like any other.
      kv_segment_ids: int[B, T]; None = segment_ids, if S == T.
      window: Positions, >= 1: a query sees itself and the window - 1 keys before it (with "full", those after it too).
      query_offset: Position of query 0 among the keys: int, int[] or int[B] (one per row); None = 0.
      query_positions: int[B, S], instead of query_offset + 0 ... S - 1 where a sequence is permuted.
      key_positions: int[B, T], instead of 0 ... T - 1.
      scale: None = D ** -0.5.
      implementation: None picks; a name never falls back.
      interpret: For tests of Pallas kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Returns:
      (out [B, S, H, D] in the dtype of q, lse float32[B, H, S]); sums in float32, or float64 for float64.

    Raises:
      ValueError: an argument has a wrong rank, size, dtype or value, or two that exclude each other are given.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "flash_attention"
    visibility = _visibility(
        op, q, k, v, mask, segment_ids, kv_segment_ids, window, query_offset, query_positions, key_positions
    )
    call = _Call(_scale(op, scale, q), _name(op, implementation), interpret)
    if min(*q.shape, *k.shape) == 0:
        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, reference.sum_dtype(q.dtype))
        return jnp.zeros_like(q), lse
    if call.implementation == "reference":
        return reference.attention(q, k, v, visibility, call.scale)
    return _attend(call, q, k, v, visibility)


def flash_attention_gradients(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    out: "Float[Array, 'batch queries heads head_dim']",
    lse: "Float[Array, 'batch heads queries']",
    d_out: "Float[Array, 'batch queries heads head_dim']",
    d_lse: "Float[Array, 'batch heads queries'] | None" = None,
    *,
    mask: Literal["causal", "full"] = "causal",
    segment_ids: "Int[Array, 'batch queries'] | None" = None,
    kv_segment_ids: "Int[Array, 'batch keys'] | None" = None,
    window: int | None = None,
    query_offset: "int | Int[Array, ''] | Int[Array, 'batch'] | None" = None,
    query_positions: "Int[Array, 'batch queries'] | None" = None,
    key_positions: "Int[Array, 'batch keys'] | None" = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> tuple[
    "Float[Array, 'batch queries heads head_dim']",
    "Float[Array, 'batch keys kv_heads head_dim']",
    "Float[Array, 'batch keys kv_heads head_dim']",
]:
    """Gradients of q, k and v from a result that is known, possibly of more keys than are given here.

    For sequences whose keys lie in several places: with `out` and `lse` of the whole row, the gradients of each part of
    the keys are exact, those of q a sum over the parts.

    Args:
      q: As in `flash_attention`; so are k, v and everything that is not named here.
      out: [B, S, H, D] in the dtype of q.
      lse: float32[B, H, S] (float64 for float64).
      d_out: Cotangent of out, in its shape and dtype.
      d_lse: Cotangent of lse; None = 0.

    Returns:
      Gradients in the shapes and dtypes of q, k and v.

    Raises:
      ValueError: as in `flash_attention`.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "flash_attention_gradients"
    visibility = _visibility(
        op, q, k, v, mask, segment_ids, kv_segment_ids, window, query_offset, query_positions, key_positions
    )
    for name, array, shape in (
        ("out", out, q.shape),
        ("d_out", d_out, q.shape),
        ("lse", lse, (q.shape[0], q.shape[2], q.shape[1])),
        ("d_lse", lse if d_lse is None else d_lse, (q.shape[0], q.shape[2], q.shape[1])),
    ):
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must have the shape {shape}; got {array.shape}.")
    call = _Call(_scale(op, scale, q), _name(op, implementation), interpret)
    if min(*q.shape, *k.shape) == 0:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    if call.implementation == "reference":
        raise UnsupportedError(
            f'{op}: "reference" is differentiated by jax and takes no known result. Name "xla" (in a recipe '
            '--set model.attention=xla), or use jax.vjp of flash_attention(implementation="reference").'
        )
    return _gradients(call, q, k, v, visibility, out, lse, d_out, d_lse)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static: the scale, the implementation that was named, how Pallas kernels run."""

    scale: float
    implementation: str | None
    interpret: "Interpret"


_Saved = tuple[jax.Array, jax.Array, jax.Array, Visibility, jax.Array, jax.Array]
"""q, k, v, what is visible, out and lse."""


@compat.custom_vjp(0)
def _attend(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility
) -> tuple[jax.Array, jax.Array]:
    chosen = _choose(call, q, k, v, visibility, d_lse=False)
    return _run("forward", chosen, q, k, v, visibility)


def _attend_forward(call: _Call, *args: CustomVJPPrimal | None) -> tuple[tuple[jax.Array, jax.Array], "_Saved"]:
    q, k, v, visibility = jax.tree.map(lambda x: x.value, args, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    out, lse = _attend(call, q, k, v, visibility)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, visibility, out, lse)


def _attend_backward(
    call: _Call, saved: "_Saved", cotangents: tuple[jax.Array | SymbolicZero, ...]
) -> tuple[jax.Array | None, ...]:
    q, k, v, visibility, out, lse = saved
    d_out, d_lse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    if d_out is None:
        d_out = jnp.zeros_like(out)
    return *_gradients(call, q, k, v, visibility, out, lse, d_out, d_lse), None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _gradients(
    call: _Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    correction = jnp.einsum("bshd,bshd->bhs", out, d_out, preferred_element_type=lse.dtype)
    if d_lse is not None:
        correction = correction - d_lse
    # e^(s - inf) = 0: rows that see nothing get gradients 0 from any cotangent.
    sees_none = lse == -jnp.inf
    lse, correction = jnp.where(sees_none, jnp.inf, lse), jnp.where(sees_none, 0, correction)
    chosen = _choose(call, q, k, v, visibility, d_lse=d_lse is not None)
    return _run("backward", chosen, q, k, v, visibility, BackwardInputs(out, lse, d_out, correction))


# Compiled on its own where nothing around it is: loops and kernels run op by op would be very slow.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    direction: str,
    call: "_Call",
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    *inputs: BackwardInputs,
) -> Any:
    assert call.implementation is not None
    backend = _load(call.implementation)
    interpreted = {"interpret": call.interpret} if call.implementation in _INTERPRETABLE else {}
    return getattr(backend, direction)(q, k, v, visibility, call.scale, *inputs, **interpreted)


def _choose(call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> _Call:
    """The call with an implementation: the one that was named, or the first that has the case.

    Raises:
      UnsupportedError: the one that was named does not have it.
    """
    if call.implementation is not None:
        lacks = _load(call.implementation).lacks(q, k, v, visibility, d_lse=d_lse)
        if lacks:
            raise UnsupportedError(
                f'flash_attention: implementation="{call.implementation}" {lacks} Take implementation=None (in a '
                "recipe --set model.attention=none), which is the fastest that has the case."
            )
        return call
    for name in _order()[:-1]:
        if not _load(name).lacks(q, k, v, visibility, d_lse=d_lse):
            return dataclasses.replace(call, implementation=name)
    return dataclasses.replace(call, implementation="xla")


_INTERPRETABLE = ("pallas_tpu", "pallas_gpu", "splash")


def _order() -> tuple[str, ...]:
    """What None tries, best first; "xla", the last, has every case."""
    platform = compat.platform()
    if platform == "gpu":
        return gpu_choices.order("flash_attention", "flash_attention")
    return ("splash", "pallas_tpu", "xla") if platform == "tpu" else ("xla",)


def _load(name: str) -> types.ModuleType:
    # Pallas takes longer to import than all the rest, and programs on a CPU never need it.
    if name in ("splash", "cudnn"):
        return importlib.import_module("scalejax.kernels.flash_attention.library").BACKENDS[name]
    return importlib.import_module(f"scalejax.kernels.flash_attention.{name}")


def _name(op: str, implementation: str | None) -> str | None:
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        names = ", ".join(f'"{name}"' for name in _IMPLEMENTATIONS)
        raise ValueError(f"{op}: implementation must be None or one of {names}; got {implementation!r}.")
    return implementation


def _scale(op: str, scale: float | None, q: jax.Array) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    if isinstance(scale, jax.Array) or not math.isfinite(scale):
        raise ValueError(f"{op}: scale must be a finite number that is known while tracing; got {scale}.")
    return float(scale)


def _visibility(
    op: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: str,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    window: int | None,
    query_offset: int | jax.Array | None,
    query_positions: jax.Array | None,
    key_positions: jax.Array | None,
) -> Visibility:
    """The masks, checked."""
    _check_operands(op, q, k, v)
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    check_one_of(f"{op}: mask", mask, ("causal", "full"))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"{op}: window must be an int >= 1, a number of positions, or None; got {window!r}.")
    if kv_segment_ids is not None and segment_ids is None:
        raise ValueError(f"{op}: kv_segment_ids are given without segment_ids. Give both, or segment_ids alone.")
    if segment_ids is not None and kv_segment_ids is None:
        if queries != keys:
            raise ValueError(
                f"{op}: kv_segment_ids must be given where S != T; got S = {queries}, T = {keys} and segment_ids alone."
            )
        kv_segment_ids = segment_ids
    if query_positions is not None and query_offset is not None:
        raise ValueError(f"{op}: query_offset and query_positions exclude each other; got both. Add the offset.")
    start, offset = _offset(op, query_offset, batch)
    found = Visibility(
        causal=mask == "causal",
        window=None if window is None else int(window),
        start=start,
        offset=offset,
        query_positions=_row_integers(op, "query_positions", query_positions, (batch, queries)),
        key_positions=_row_integers(op, "key_positions", key_positions, (batch, keys)),
        query_segments=_row_integers(op, "segment_ids", segment_ids, (batch, queries)),
        key_segments=_row_integers(op, "kv_segment_ids", kv_segment_ids, (batch, keys)),
    )
    if not found.uses_positions:
        return dataclasses.replace(found, start=0, offset=None, query_positions=None, key_positions=None)
    if (found.query_positions is None) == (found.key_positions is None):
        return found
    query, key = dataclasses.replace(found, query_positions=None, key_positions=None).positions(queries, keys)
    return dataclasses.replace(
        found,
        start=0,
        offset=None,
        query_positions=jnp.broadcast_to(query, (batch, queries))
        if found.query_positions is None
        else found.query_positions,
        key_positions=jnp.broadcast_to(key, (batch, keys)) if found.key_positions is None else found.key_positions,
    )


def _check_operands(op: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"{op}: q must have shape (B, S, H, D) and k (B, T, K, D); got {tuple(q.shape)} and {tuple(k.shape)}."
        )
    if v.shape != k.shape:
        raise ValueError(f"{op}: v must have the shape of k, {tuple(k.shape)}; got {tuple(v.shape)}.")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{op}: k must have the rows and the head dim of q, B = {q.shape[0]} and D = {q.shape[3]}; got B = "
            f"{k.shape[0]} and D = {k.shape[3]}."
        )
    if (k.shape[2] == 0) != (q.shape[2] == 0) or (k.shape[2] and q.shape[2] % k.shape[2]):
        raise ValueError(
            f"{op}: the heads of k must divide those of q; got {k.shape[2]} for {q.shape[2]}. Repeat or pad heads."
        )
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise ValueError(f"{op}: q must be float32, bfloat16, float16 or float64; got {q.dtype}. Cast it.")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise ValueError(f"{op}: {name} must have the dtype of q, {q.dtype}; got {array.dtype}. Cast one of them.")


def _offset(op: str, offset: int | jax.Array | None, batch: int) -> tuple[int, jax.Array | None]:
    """(what is known of the offset, int32[B] of what is not)."""
    if offset is None:
        return 0, None
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        return int(offset), None
    shape, dtype = jnp.shape(offset), jnp.result_type(offset)
    if shape not in ((), (batch,)) or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{op}: query_offset must be an int, or integers of shape () or (B,) = ({batch},); got "
            f"{dtype}{list(shape)}."
        )
    return 0, jnp.broadcast_to(jnp.asarray(offset, jnp.int32), (batch,))


def _row_integers(op: str, name: str, array: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    if array is None:
        return None
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} must be integers of shape {shape}; got {array.dtype}{list(array.shape)}.")
    return jnp.asarray(array, jnp.int32)
