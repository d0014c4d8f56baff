"""Attention on whatever mesh there is: how heads, rows and positions are handed to each device."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.rules import LogicalAxes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def shard_attention(
    local: Callable[..., jax.Array],
    q: "Float[Array, 'batch positions heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    given: dict[str, jax.Array],
    axes: dict[str, LogicalAxes],
    *,
    rows: str = "batch",
    sequence: str | None = None,
    keys: str | None = None,
) -> "Float[Array, 'batch positions heads head_dim']":
    """local(q, k, v, **given) on each device's rows and heads, under the mesh in force.

    Query heads of a group stay with their key and value head. Where the mesh has more devices along `tensor` than there
    are such heads, each is repeated, so that every device has those of its queries.

    Args:
      local: Arrays as below, parts of them -> [B, S, H, D].
      q: [B, S, H, D].
      k: [B, T, K, D].
      v: [B, T, K, D].
      given: Further arrays by name.
      axes: Logical axes of each of them.
      rows: Logical axis of the rows of q and the result; those of k and v are "batch".
      sequence: Logical axis of the positions of q and the result; None = each device has all.
      keys: Logical axis of the positions of k and v; None = `sequence`.
    """
    b, positions, heads, width = q.shape
    groups = k.shape[2]
    if groups % jax.sharding.get_abstract_mesh().shape.get("tensor", 1):
        k, v, groups = jnp.repeat(k, heads // groups, axis=2), jnp.repeat(v, heads // groups, axis=2), heads

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        rows = q.reshape(*q.shape[:2], -1, width)  # b S K/n G D -> b S H/n D
        return local(rows, k, v, **dict(zip(given, rest, strict=True))).reshape(q.shape)

    by_group: LogicalAxes = (rows, sequence, "kv_heads", None, None)
    of_keys: LogicalAxes = ("batch", keys or sequence, "kv_heads", None)
    sharded = shard_kernel(
        run,
        in_axes=(by_group, of_keys, of_keys, *(axes[name] for name in given)),
        out_axes=by_group,
        rules=ACTIVATIONS,
    )
    q = q.reshape(b, positions, groups, heads // groups, width)
    return sharded(q, k, v, *given.values()).reshape(b, positions, heads, width)
