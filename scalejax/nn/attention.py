"""Attention on whatever mesh there is: each device computes the rows and heads that it has."""

from typing import Any

import jax
import jax.numpy as jnp

from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.flash_attention.api import Implementation
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.activations import constrain as constrain
from scalejax.parallel.kernel_sharding import shard_kernel


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    query_offset: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of q [B, S, H, D] to k and v [B, T, K, D] -> [B, S, H, D]; see `kernels.flash_attention`.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segment_ids: int32[B, S] where T = S: a query sees keys of its own segment. None = one segment.
      query_offset: int32[B], the position of each row's first query among the keys. None = 0.
      implementation: See `kernels.flash_attention`.
    """
    given: dict[str, Any] = {"segment_ids": segment_ids, "query_offset": query_offset}
    given = {name: array for name, array in given.items() if array is not None}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return flash_attention(q, k, v, **given, implementation=implementation)[0]
    # Query heads of a group stay with their key and value head. Where a mesh has more devices along `tensor` than there
    # are such heads, each is repeated, so that every device has those of its queries.
    b, positions, heads, width = q.shape
    groups = k.shape[2]
    if groups % mesh.shape.get("tensor", 1):
        k, v, groups = jnp.repeat(k, heads // groups, axis=2), jnp.repeat(v, heads // groups, axis=2), heads
    axes = {"segment_ids": ("batch", None), "query_offset": ("batch",)}

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        rows = q.reshape(*q.shape[:2], -1, width)  # b S K/n G D -> b S H/n D
        more: dict[str, Any] = dict(zip(given, rest, strict=True))
        return flash_attention(rows, k, v, **more, implementation=implementation)[0].reshape(q.shape)

    run = shard_kernel(
        local,
        in_axes=(
            ("batch", None, "kv_heads", None, None),
            ("batch", None, "kv_heads", None),
            ("batch", None, "kv_heads", None),
            *(axes[name] for name in given),
        ),
        out_axes=("batch", None, "kv_heads", None, None),
        rules=ACTIVATIONS,
    )
    q = q.reshape(b, positions, groups, heads // groups, width)
    return run(q, k, v, *given.values()).reshape(b, positions, heads, width)
