"""Attention of new tokens to cached and new ones that lie anywhere along the mesh axis `context`.

Context Parallelism for Scalable Million-Token Inference (Yang et al. 2025, arXiv 2411.01783), section 3. Each of n
devices has queries of new tokens, and keys and values of cached and new tokens, in any order: positions say what a
query sees, nothing else does.

    pass-KV   keys, values and their positions go round the ring while those at hand are attended to (Algorithm 2)
              sent: n - 1 transfers of 2 t K D elements and t positions
    pass-Q    queries and their positions go round, keys stay; results go back by one all-to-all (Algorithm 3)
              sent: n - 1 transfers of s H D elements and s positions, and (n - 1) s H (D + 1) float32
    decode    pass-Q where each device has the queries of rows of its own: what a device attends a query to are the keys
              that it holds of that row (Algorithm 4)

t and s are the keys and queries of a device. Every transfer is stated before the attention behind which it hides, and
none waits for one. Partial results are merged by their log-sum-exp in float32; kernels round the output of each part to
the dtype of q, as in training. `context_choice` says which of the two is faster.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from scalejax.errors import UserError, check_one_of
from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.flash_attention.api import Implementation
from scalejax.kernels.ring_attention import ring_attention
from scalejax.kernels.ring_attention.api import suits
from scalejax.parallel.attention import shard_attention
from scalejax.parallel.context import Move, context_attention, go_round, merge, pass_on
from scalejax.parallel.mesh import BATCH_AXES
from scalejax.parallel.rules import LogicalAxes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from scalejax.kernels.interpretation import Interpret

NO_QUERY = -1
"""The position of a query that is padding: it sees nothing, and its output is 0."""

NO_KEY = np.iinfo(np.int32).max
"""The position of a place without a key, which causality hides from every query."""

Ring = Literal["kernel", "permutes"]
"""How pass-KV goes round: in one kernel of a TPU, which sends and attends (`kernels.ring_attention`), or by transfers
of XLA between calls of `flash_attention`."""

KeysOf = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""Index of a device, int32[] -> (k, v, key_positions) that this device holds for the rows of that device's queries."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(q [B, s, H, D], query_positions int32[B, s], index of the device that they are of, int32[]) -> what the keys of this
device give them: (out [B, s, H, D], lse float32[B, H, s])."""


def pass_kv(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    query_positions: "Int[Array, 'batch queries']",
    key_positions: "Int[Array, 'batch keys']",
    axis: str = "context",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    ring: Ring | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'batch queries heads head_dim']":
    """Causal attention of the queries of this device to the keys of all devices: keys and values go round.

    For use inside a shard_map with check_vma=False in which `axis` is manual; `sharded_pass_kv` makes one. Forward only
    where the ring is a kernel.

    Args:
      q: float[B, s, H, D], the new queries of this device; s is the same on all.
      k: [B, t, K, D], cached and new keys of this device in any order; t is the same on all, K divides H.
      v: [B, t, K, D].
      query_positions: int32[B, s]; `NO_QUERY` is padding.
      key_positions: int32[B, t]; `NO_KEY` is an empty place.
      axis: The mesh axis over which tokens are spread.
      window: As in `flash_attention`; so are scale, implementation and interpret.
      scale: See window.
      implementation: See window; where it is given the ring is "permutes".
      ring: See `Ring`; None picks the kernel where it suits (`kernels.ring_attention.api.suits`). A name never falls
        back.
      interpret: See window.

    Returns:
      [B, s, H, D] in the dtype of q; 0 where a query sees nothing.

    Raises:
      ValueError: what `flash_attention` refuses, or an implementation of it for a ring that is a kernel.
      UnsupportedError: the ring "kernel" does not have the case.
    """
    check_one_of("pass_kv: ring", ring, (None, *get_args(Ring)))
    if ring == "kernel" and implementation is not None:
        raise ValueError(
            f'pass_kv: implementation must be None for ring="kernel", which attends by itself; got {implementation!r}. '
            "Drop one of them."
        )
    if ring is None:
        ring = "kernel" if implementation is None and suits(q, k, v, axis=axis) else "permutes"
    if ring == "kernel":
        return ring_attention(
            q,
            k,
            v,
            query_positions=query_positions,
            key_positions=key_positions,
            axis=axis,
            window=window,
            scale=scale,
            interpret=interpret,
        )[0]
    return context_attention(
        q,
        k,
        v,
        positions=query_positions,
        key_positions=key_positions,
        method="ring",
        axis=axis,
        window=window,
        scale=scale,
        implementation=implementation,
        interpret=interpret,
    )[0]


def pass_q(
    q: "Float[Array, 'batch queries heads head_dim']",
    keys_of: KeysOf,
    *,
    query_positions: "Int[Array, 'batch queries']",
    axis: str = "context",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'batch queries heads head_dim']":
    """Causal attention of the queries of this device to the keys of all devices: queries go round.

    For use like `pass_kv`; `sharded_pass_q` and `sharded_decode` make the shard_map.

    Args:
      q: float[B, s, H, D], the new queries of this device; the shape is the same on all.
      keys_of: The keys of this device for the queries of device `source`: (k [B, t, K, D], v [B, t, K, D],
        key_positions int32[B, t]), where `NO_KEY` is an empty place. In a prefill the rows of all devices are the same
        and it returns the same for every source; in a decode every device has rows of its own, and it returns what this
        one holds of the rows of `source`.
      query_positions: int32[B, s]; `NO_QUERY` is padding.
      axis: The mesh axis over which tokens are spread.
      window: As in `flash_attention`; so are scale, implementation and interpret.
      scale: See window.
      implementation: See window.
      interpret: See window.

    Returns:
      [B, s, H, D] in the dtype of q; 0 where a query sees nothing.

    Raises:
      ValueError: what `flash_attention` refuses.
    """

    def attend(q: jax.Array, query_positions: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v, key_positions = keys_of(source)
        return flash_attention(
            q,
            k,
            v,
            query_positions=query_positions,
            key_positions=key_positions,
            window=window,
            scale=scale,
            implementation=implementation,
            interpret=interpret,
        )

    return pass_q_to(attend, q, query_positions=query_positions, axis=axis)


def pass_q_to(
    attend: Attend,
    q: "Float[Array, 'batch queries heads head_dim']",
    *,
    query_positions: "Int[Array, 'batch queries']",
    axis: str = "context",
) -> "Float[Array, 'batch queries heads head_dim']":
    """`pass_q` where the caller attends, for instance to pages by a kernel that gives a log-sum-exp.

    Args:
      attend: See `Attend`.
      q: As in `pass_q`; so are query_positions, axis and the result.
      query_positions: See q.
      axis: See q.
    """
    ranks = lax.axis_size(axis)
    rank = lax.axis_index(axis)

    def part(held: _Queries, source: jax.Array) -> jax.Array:
        out, lse = attend(*held, source)
        # They travel together, laid end to end: D + 1 beside each other would fill two tiles of a TPU for D = 128.
        return jnp.concatenate([out.astype(lse.dtype).reshape(-1), lse.reshape(-1)])

    def apart(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, queries, heads, _ = q.shape
        return part[: q.size].reshape(q.shape), part[q.size :].reshape(batch, heads, queries)

    def step(carry: _Parts, move: Move[_Queries]) -> _Parts:
        held, source, parts = carry
        arriving = move(held)  # stated first: it has the time of what follows
        parts = lax.dynamic_update_index_in_dim(parts, part(held, source), source, 0)
        return arriving, (source - 1) % ranks, parts

    own = (q, query_positions)
    move = functools.partial(pass_on, axis, ranks)
    arriving = move(own) if ranks > 1 else own
    first = part(own, rank)
    if ranks > 1:
        parts = lax.dynamic_update_index_in_dim(jnp.zeros((ranks, *first.shape), first.dtype), first, rank, 0)
        *_, parts = go_round(step, (arriving, (rank - 1) % ranks, parts), ranks, move)
        returned = lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True)
    else:
        returned = first[None]
    out, _ = functools.reduce(merge, [apart(part) for part in returned])
    return out.astype(q.dtype)


_Queries = tuple[jax.Array, jax.Array]
"""Queries and their positions, on their way."""

_Parts = tuple[_Queries, jax.Array, jax.Array]
"""Queries on their way, the index of their device, and float32[n, B s H (D + 1)]: what is known of each device's."""


def sharded_pass_kv(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    query_positions: "Int[Array, 'batch queries']",
    key_positions: "Int[Array, 'batch keys']",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    ring: Ring | None = None,
) -> "Float[Array, 'batch queries heads head_dim']":
    """`pass_kv` on whole arrays under jit and a mesh: tokens over `context`, rows over the batch axes, heads over
    `tensor`.

    The shard_map is over all axes of the mesh in force that are still automatic. Numbers of queries or keys that do not
    divide are filled up here, which moves what lies elsewhere then: fill up where arrays are made.

    Args:
      q: float[B, S, H, D], in any order.
      k: [B, T, K, D], in any order.
      v: [B, T, K, D].
      query_positions: int32[B, S]; `NO_QUERY` is padding.
      key_positions: int32[B, T]; `NO_KEY` is an empty place.
      window: As in `flash_attention`; so are scale and implementation.
      scale: See window.
      implementation: See window.
      ring: As in `pass_kv`.

    Returns:
      [B, S, H, D] in the dtype of q.
    """
    attend = functools.partial(pass_kv, window=window, scale=scale, implementation=implementation, ring=ring)
    return _prefill(attend, q, k, v, query_positions, key_positions)


def sharded_pass_q(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    query_positions: "Int[Array, 'batch queries']",
    key_positions: "Int[Array, 'batch keys']",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> "Float[Array, 'batch queries heads head_dim']":
    """`pass_q` of a prefill on whole arrays: arguments and result as in `sharded_pass_kv`.

    Args:
      q: See `sharded_pass_kv`; so is everything here.
      k: See q.
      v: See q.
      query_positions: See q.
      key_positions: See q.
      window: See q.
      scale: See q.
      implementation: See q.
    """

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, *, query_positions: jax.Array, key_positions: jax.Array
    ) -> jax.Array:
        return pass_q(
            q,
            lambda source: (k, v, key_positions),
            query_positions=query_positions,
            window=window,
            scale=scale,
            implementation=implementation,
        )

    return _prefill(local, q, k, v, query_positions, key_positions)


def sharded_decode(
    q: "Float[Array, 'batch 1 heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    query_positions: "Int[Array, 'batch 1']",
    key_positions: "Int[Array, 'batch keys']",
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> "Float[Array, 'batch 1 heads head_dim']":
    """`pass_q` of a decode on whole arrays: the rows of queries are cut over the batch axes and `context`.

    Rows that do not divide are filled up here, keys too, which copies them: keep as many rows as divide. One row among
    n devices is n rows of work (the paper's own weakness, section 3.6).

    Args:
      q: float[B, 1, H, D], or several new tokens of each row.
      k: As in `sharded_pass_kv`; so are the others.
      v: See k.
      query_positions: See k.
      key_positions: See k.
      window: See k.
      scale: See k.
      implementation: See k.

    Returns:
      [B, 1, H, D] in the dtype of q.
    """
    rows = q.shape[0]
    divisor = _devices(*BATCH_AXES, "context") if "context" in _free_axes() else _devices(*BATCH_AXES)
    q, k, v = (_fill_up(x, divisor, 0, 0) for x in (q, k, v))
    query_positions = _fill_up(query_positions, divisor, 0, NO_QUERY)
    key_positions = _fill_up(key_positions, divisor, 0, NO_KEY)

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, *, query_positions: jax.Array, key_positions: jax.Array
    ) -> jax.Array:
        count = q.shape[0]

        def keys_of(source: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            start = source * count
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=count)
            return cut(k), cut(v), cut(key_positions)

        return pass_q(
            q, keys_of, query_positions=query_positions, window=window, scale=scale, implementation=implementation
        )

    axes: dict[str, LogicalAxes] = {"query_positions": ("decoded", None), "key_positions": ("batch", "keys")}
    return _sharded(local, q, k, v, query_positions, key_positions, axes, rows="decoded", sequence=None)[:rows]


def zigzag_devices(counts: Sequence[int]) -> np.ndarray:
    """The device of each new token of a row, in their order: ascending devices, then descending, without padding.

    The two runs give every device equally many tokens, and equal work under a causal mask. What a device gets beyond
    that, to level what devices already hold, comes before them, where a token sees least.

    Args:
      counts: New tokens of each device.

    Returns:
      int32[sum of counts].
    """
    devices = np.arange(len(counts), dtype=np.int32)
    run = min(counts, default=0) // 2
    more = np.asarray(counts, np.int64) - 2 * run
    return np.concatenate([np.repeat(devices, more), np.repeat(devices, run), np.repeat(devices[::-1], run)])


def _prefill(
    local: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
) -> jax.Array:
    queries = q.shape[1]
    ranks = _devices("context") if "context" in _free_axes() else 1
    q, k, v = (_fill_up(x, ranks, 1, 0) for x in (q, k, v))
    query_positions = _fill_up(query_positions, ranks, 1, NO_QUERY)
    key_positions = _fill_up(key_positions, ranks, 1, NO_KEY)
    axes: dict[str, LogicalAxes] = {"query_positions": ("batch", "sequence"), "key_positions": ("batch", "keys")}
    out = _sharded(local, q, k, v, query_positions, key_positions, axes, rows="batch", sequence="sequence")
    return out[:, :queries]


def _sharded(
    local: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    axes: dict[str, LogicalAxes],
    *,
    rows: str,
    sequence: str | None,
) -> jax.Array:
    given = {"query_positions": query_positions, "key_positions": key_positions}
    return shard_attention(local, q, k, v, given, axes, rows=rows, sequence=sequence, keys="keys")


def _free_axes() -> set[str]:
    """Axes of the mesh in force that are still automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    if "context" not in mesh.axis_names:
        raise UserError(
            "context_inference: the mesh in force must have the axis context; got "
            f"{', '.join(map(str, mesh.axis_names)) or 'no mesh'}. Call under jax.set_mesh(make_mesh(MeshShape(...)))."
        )
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}


def _devices(*axes: str) -> int:
    """Devices along those of the axes that are still automatic."""
    free, mesh = _free_axes(), jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes if axis in free)


def _fill_up(x: jax.Array, divisor: int, axis: int, fill: int) -> jax.Array:
    more = -x.shape[axis] % divisor
    if not more:
        return x
    return jnp.pad(x, [(0, more if dim == axis else 0) for dim in range(x.ndim)], constant_values=fill)
