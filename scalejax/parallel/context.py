"""Attention over a sequence that is cut over the mesh axis `context`.

Layout. A row is cut into 2 n chunks for n devices, and device i holds chunks i and 2 n - 1 - i (The Llama 3 Herd of
Models, arXiv 2407.21783, section 3.3.2): under a causal mask all devices then have the same number of visible pairs.
The layout is only that, a matter of balance. What a query sees follows from positions and segment ids, which travel
with keys and values; nothing here asks where a token lies.

Two methods, for each layer and device, with P the bytes of keys and values of all positions of the device's rows:

    all_gather   keys and values of all devices, then attention of the own queries to them: what Llama 3 did
                 sent: forward P (n - 1) / n; backward the sum of their gradients over devices, P' (n - 1) / n
                 held: P, until the backward pass unless it is recomputed
    ring         keys and values go round, one device further at each of n steps, while those at hand are attended to
                 (Liu et al. 2023, arXiv 2310.01889); partial results are merged by their log-sum-exp
                 sent: forward P (n - 1) / n; backward P (n - 1) / n once more, and P' (n - 1) / n of gradients
                 held: 2 P / n

P' is P in float32, in which gradients are added up over devices, and so are partial results of the ring.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import AxisType

from scalejax import compat
from scalejax.kernels.flash_attention import flash_attention, flash_attention_gradients
from scalejax.kernels.flash_attention.api import LSE_NAME, OUT_NAME, Implementation
from scalejax.parallel.attention import shard_attention
from scalejax.parallel.rules import LogicalAxes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, PyTree

    from scalejax.kernels.interpretation import Interpret

Method = Literal["all_gather", "ring"]
METHODS = ("all_gather", "ring")

_UNROLLED = 16
"""Steps of a ring up to which each stands in the program by itself, so that transfers hide behind any neighbour."""

_PADDING = np.iinfo(np.int32).min
"""The segment id of positions that `sharded_context_attention` adds."""

A = TypeVar("A")
Carry = TypeVar("Carry")
_Keys = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Keys, values, and positions and segments of them."""

_Result = tuple[jax.Array, jax.Array]
_Sums = tuple[_Keys, jax.Array, list[jax.Array]]
"""Keys on their way, the gradient of the queries, and those of keys and values on their way."""

Move = Callable[[A], A]


def chunk_order(ranks: int) -> tuple[int, ...]:
    """Which chunk of the row lies where: (0, 2n - 1, 1, 2n - 2, ...), two a device."""
    return tuple(chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank))


def padded_length(length: int, ranks: int) -> int:
    """Positions of a row in the layout: the next multiple of 2 n; `length` itself for one device."""
    return length if ranks == 1 else math.ceil(length / (2 * ranks)) * 2 * ranks


def zigzag(x: Any, ranks: int, *, axis: int = 1, fill: int = 0) -> Any:
    """Positions in the order in which they are cut over devices, NumPy to NumPy and jax to jax.

    Args:
      x: [..., S, ...]; on the device a permutation of positions that are sharded already moves them.
      ranks: Devices along `context`; for one, x comes back as it is.
      axis: That of the positions.
      fill: Value of the positions that fill up S to `padded_length`. They must be hidden from all others: by a segment
        of their own (0 in a `TokenBatch`), or by positions after all others.
    """
    if ranks == 1:
        return x
    numpy = np if isinstance(x, np.ndarray) else jnp
    more = padded_length(x.shape[axis], ranks) - x.shape[axis]
    if more:
        widths = [(0, more if dim == axis % x.ndim else 0) for dim in range(x.ndim)]
        x = numpy.pad(x, widths, constant_values=fill)
    chunks = numpy.split(x, 2 * ranks, axis=axis)
    return numpy.concatenate([chunks[chunk] for chunk in chunk_order(ranks)], axis=axis)


def unzigzag(x: Any, ranks: int, length: int, *, axis: int = 1) -> Any:
    """The inverse of `zigzag`: the first `length` positions in their own order."""
    if ranks == 1:
        return x
    numpy = np if isinstance(x, np.ndarray) else jnp
    chunks = numpy.split(x, 2 * ranks, axis=axis)
    x = numpy.concatenate([chunks[place] for place in np.argsort(chunk_order(ranks))], axis=axis)
    return x[(slice(None),) * (axis % x.ndim) + (slice(0, length),)]


def context_attention(
    q: "Float[Array, 'batch positions heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    positions: "Int[Array, 'batch positions']",
    key_positions: "Int[Array, 'batch keys'] | None" = None,
    segment_ids: "Int[Array, 'batch positions'] | None" = None,
    method: Method = "all_gather",
    axis: str = "context",
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> tuple["Float[Array, 'batch positions heads head_dim']", "Float[Array, 'batch heads positions']"]:
    """Attention of the positions of this device to those of all devices along `axis`.

    For use inside a shard_map with check_vma=False in which `axis` is manual; `sharded_context_attention` makes one.

    Args:
      q: float[B, s, H, D], the queries of this device; s is the same on all.
      k: [B, t, K, D], the keys of this device; t is the same on all, K divides H.
      v: [B, t, K, D].
      positions: int32[B, s], for the mask: they order the positions of a segment.
      key_positions: int32[B, t], those of the keys; None = `positions`.
      segment_ids: int32[B, s]; a position sees those of equal id. None = all are of one.
      method: See the module.
      axis: The mesh axis over which the sequence is cut.
      mask: As in `flash_attention`; so are window, scale, implementation and interpret.
      window: See mask.
      scale: See mask.
      implementation: See mask; "ring" has no derivative with "reference".
      interpret: See mask.

    Returns:
      (out [B, s, H, D] in the dtype of q, lse float32[B, H, s]), differentiable in q, k and v.

    Raises:
      ValueError: there is no such method, or what `flash_attention` refuses.
    """
    check_method(method)
    if key_positions is not None and segment_ids is not None:
        raise ValueError("context_attention: key_positions and segment_ids exclude each other; got both. Drop one.")
    call = _Call(axis=axis, mask=mask, window=window, scale=scale, implementation=implementation, interpret=interpret)
    run = _ring if method == "ring" else _gathered
    return run(call, q, k, v, positions, positions if key_positions is None else key_positions, segment_ids)


def sharded_context_attention(
    q: "Float[Array, 'batch positions heads head_dim']",
    k: "Float[Array, 'batch positions kv_heads head_dim']",
    v: "Float[Array, 'batch positions kv_heads head_dim']",
    *,
    positions: "Int[Array, 'batch positions']",
    segment_ids: "Int[Array, 'batch positions'] | None" = None,
    method: Method = "all_gather",
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> "Float[Array, 'batch positions heads head_dim']":
    """`context_attention` on whole arrays under jit and a mesh: rows over the batch axes, heads over `tensor`.

    The shard_map is over all axes of the mesh in force that are still automatic. Positions lie in any order; in that of
    `zigzag` all devices have the same work. A length that does not divide by twice the devices is filled up here, which
    moves what lies elsewhere then: fill the batch up where it is made. Where `context` is manual already, arrays are
    those of one device.

    Args:
      q: float[B, S, H, D].
      k: [B, S, K, D].
      v: [B, S, K, D].
      positions: int32[B, S].
      segment_ids: int32[B, S], or None; the smallest int32 is not theirs to use.
      method: See `context_attention`; so are mask, window, scale and implementation.
      mask: See method.
      window: See method.
      scale: See method.
      implementation: See method.

    Returns:
      [B, S, H, D] in the dtype of q, differentiable in q, k and v.
    """
    check_method(method)
    mesh = jax.sharding.get_abstract_mesh()
    length, more = q.shape[1], 0
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))["context"] != AxisType.Manual:
        more = padded_length(length, mesh.shape["context"]) - length
    # What fills up a row needs a segment of its own, and then all others need one too.
    if more and segment_ids is None:
        segment_ids = jnp.ones(positions.shape, jnp.int32)
    given: dict[str, jax.Array] = {"positions": positions}
    if segment_ids is not None:
        given["segment_ids"] = segment_ids
    if more:
        q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q, k, v))
        fills = {"positions": 0, "segment_ids": _PADDING}
        given = {name: jnp.pad(x, ((0, 0), (0, more)), constant_values=fills[name]) for name, x in given.items()}

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        return context_attention(
            q,
            k,
            v,
            positions=positions,
            segment_ids=segment_ids,
            method=method,
            mask=mask,
            window=window,
            scale=scale,
            implementation=implementation,
        )[0]

    axes: dict[str, LogicalAxes] = dict.fromkeys(given, ("batch", "sequence"))
    out = shard_attention(local, q, k, v, given, axes, sequence="sequence")
    return out[:, :length] if more else out


def check_method(method: str) -> None:
    """Refuses what is no method.

    Raises:
      ValueError: names those that there are.
    """
    if method not in METHODS:
        names = " or ".join(f'"{name}"' for name in METHODS)
        raise ValueError(f"context_attention: method must be {names}; got {method!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments that are static."""

    axis: str
    mask: Literal["causal", "full"]
    window: int | None
    scale: float | None
    implementation: Implementation | None
    interpret: "Interpret"

    def options(
        self, positions: jax.Array, segments: jax.Array | None, key_positions: jax.Array, key_segments: jax.Array | None
    ) -> dict[str, Any]:
        """Keyword arguments of the kernels."""
        return {
            "mask": self.mask,
            "window": self.window,
            "scale": self.scale,
            "implementation": self.implementation,
            "interpret": self.interpret,
            "query_positions": positions,
            "key_positions": key_positions,
            "segment_ids": segments,
            "kv_segment_ids": key_segments,
        }


def _gathered(
    call: _Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    key_positions: jax.Array,
    segments: jax.Array | None,
) -> _Result:
    keys = _gather(call.axis, k)
    values = _gather(call.axis, v)
    key_positions, key_segments = jax.tree.map(functools.partial(_all, call.axis), (key_positions, segments))
    return flash_attention(q, keys, values, **call.options(positions, segments, key_positions, key_segments))


@compat.custom_vjp(0)
def _gather(axis: str, x: jax.Array) -> jax.Array:
    return _all(axis, x)


def _gather_forward(axis: str, x: jax.Array) -> tuple[jax.Array, None]:
    return _all(axis, x), None


def _gather_backward(axis: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = _ranked(gradient, lax.axis_size(axis))
    summed = lax.psum_scatter(gradient.astype(_wide(gradient)), axis, scatter_dimension=1, tiled=True)
    return (summed.astype(gradient.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def _all(axis: str, x: jax.Array) -> jax.Array:
    """[B, s, ...] of each device -> [B, S, ...] in the order that a zigzag layout was made of.

    Kernels skip blocks of keys that a block of queries does not see. In this order those that it sees are neighbours.
    """
    return _ordered(lax.all_gather(x, axis, axis=1, tiled=True), lax.axis_size(axis))


def _ordered(x: jax.Array, ranks: int) -> jax.Array:
    even = x.shape[1] % (2 * ranks) == 0  # a layout that is not ours
    return unzigzag(x, ranks, x.shape[1]) if even else x


def _ranked(x: jax.Array, ranks: int) -> jax.Array:
    """The inverse of `_ordered`."""
    even = x.shape[1] % (2 * ranks) == 0
    return zigzag(x, ranks) if even else x


# Written out for the ring as a whole. Gradients of the parts alone would need the weights of the parts, that is the
# cotangents of their log-sum-exps, and all keys and values kept; with the result of the whole row each part of the
# gradients is exact.
@compat.custom_vjp(0)
def _ring(
    call: _Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    key_positions: jax.Array,
    segments: jax.Array | None,
) -> _Result:
    def attend(held: _Keys) -> _Result:
        keys, values, key_positions, key_segments = held
        out, lse = flash_attention(q, keys, values, **call.options(positions, segments, key_positions, key_segments))
        return out.astype(lse.dtype), lse

    def step(carry: tuple[_Keys, _Result], move: Move[_Keys]) -> tuple[_Keys, _Result]:
        # A compiler would else send all keys and values round before the first of them is attended to.
        (k, v, key_positions, key_segments), result = carry
        k, v, result = lax.optimization_barrier((k, v, result))
        held = (k, v, key_positions, key_segments)
        arriving = move(held)  # stated first: it has the time of what follows
        return arriving, merge(result, attend(held))

    own = (k, v, key_positions, segments)
    ranks = lax.axis_size(call.axis)
    move = functools.partial(pass_on, call.axis, ranks)
    arriving = move(own) if ranks > 1 else own
    result = attend(own)
    if ranks > 1:
        _, result = go_round(step, (arriving, result), ranks, move)
    out, lse = result
    return out.astype(q.dtype), lse


def _ring_forward(call: _Call, *args: "PyTree") -> tuple[_Result, tuple[jax.Array | None, ...]]:
    args = jax.tree.map(lambda x: x.value, args, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    out, lse = _ring(call, *args)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (*args, out, lse)


def _ring_backward(
    call: _Call, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array | SymbolicZero, ...]
) -> tuple[jax.Array | None, ...]:
    q, k, v, positions, key_positions, segments, out, lse = saved
    d_out, d_lse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    if d_out is None:
        d_out = jnp.zeros_like(out)
    # Where both passes stand in one program, a compiler would find that the same keys and values go round twice, and
    # keep those of all devices from one pass to the other.
    held = (k, v, positions, key_positions, segments, d_out)
    k, v, positions, key_positions, segments, d_out = lax.optimization_barrier(held)

    def gradients(held: _Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys, values, key_positions, key_segments = held
        options = call.options(positions, segments, key_positions, key_segments)
        parts = flash_attention_gradients(q, keys, values, out, lse, d_out, d_lse, **options)
        d_q, d_k, d_v = (part.astype(_wide(part)) for part in parts)
        return d_q, d_k, d_v

    ranks = lax.axis_size(call.axis)
    move = functools.partial(pass_on, call.axis, ranks)

    def step(carry: _Sums, forward: Move[_Keys]) -> _Sums:
        held, d_q, sums = carry
        arriving = forward(held)
        d_q_part, *parts = gradients(held)
        # The sums leave after their keys and values did, and arrive while the next part is computed.
        return arriving, d_q + d_q_part, move(jax.tree.map(jnp.add, sums, parts))

    own = (k, v, key_positions, segments)
    arriving = move(own) if ranks > 1 else own
    d_q, *parts = gradients(own)
    if ranks > 1:
        # What the own queries add to the own keys waits here; the sums of the others come round in n - 1 steps.
        zeros = jax.tree.map(jnp.zeros_like, parts)
        _, d_q, sums = go_round(step, (arriving, d_q, zeros), ranks, move)
        parts = jax.tree.map(jnp.add, parts, sums)
    return d_q.astype(q.dtype), parts[0].astype(k.dtype), parts[1].astype(v.dtype), None, None, None


_ring.defvjp(_ring_forward, _ring_backward, symbolic_zeros=True)


def go_round(step: Callable[[Carry, Move[A]], Carry], carry: Carry, ranks: int, move: Move[A]) -> Carry:
    """n - 1 steps(carry, move), the last of which gets a `move` that passes nothing on."""

    def one(carry: Carry, _: None) -> tuple[Carry, None]:
        return step(carry, move), None

    steps = ranks - 2
    carry, _ = lax.scan(one, carry, None, length=steps, unroll=max(steps, 1) if ranks <= _UNROLLED else 1)
    return step(carry, lambda held: held)


def pass_on(axis: str, ranks: int, tree: A) -> A:
    """What the device before this one has, of each array of a tree: one transfer each."""
    to_next = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, to_next), tree)


def merge(one: _Result, other: _Result) -> _Result:
    """(out [B, S, H, D], lse [B, H, S]) of two sets of keys -> that of both, in their dtypes.

    A set of which a row sees nothing has lse -inf and changes nothing.
    """
    lse = jnp.logaddexp(one[1], other[1])
    # A row that sees nothing in either set would have -inf - -inf, which is NaN, where its weight is 0.
    shift = jnp.where(lse == -jnp.inf, 0, lse)

    def weighted(part: _Result) -> jax.Array:
        out, part_lse = part
        return out * jnp.exp(part_lse - shift).swapaxes(1, 2)[..., None]  # B H S -> B S H 1

    return weighted(one) + weighted(other), lse


def _wide(x: jax.Array) -> jax.typing.DTypeLike:
    return jnp.promote_types(x.dtype, jnp.float32)
