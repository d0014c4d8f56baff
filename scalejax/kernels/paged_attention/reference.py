"""The definition: the pages of each row gathered, then attention."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.flash_attention import flash_attention


def attention(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    key_positions: jax.Array,
    query_positions: jax.Array,
    used: jax.Array,
    window: int | None,
    scale: float,
    *,
    implementation: Literal["reference", "xla"],
) -> tuple[jax.Array, jax.Array]:
    """As `api.paged_attention`, by the implementation of `flash_attention` of the same name."""
    batch, _, width = q.shape
    rows = pages[table]  # B W page 2K D
    rows = rows.reshape(batch, -1, pages.shape[2] // 2, 2, width)  # B T K 2 D
    out, lse = flash_attention(
        q[:, None],
        rows[:, :, :, 0],
        rows[:, :, :, 1],
        query_positions=query_positions[:, None],
        key_positions=positions_of_rows(key_positions, table, used).reshape(batch, -1),
        window=window,
        scale=scale,
        implementation=implementation,
    )
    return out[:, 0], lse[:, :, 0]


def positions_of_rows(key_positions: jax.Array, table: jax.Array, used: jax.Array) -> jax.Array:
    """int32[B, W, page]: positions of the keys of each row, hidden in entries that it does not use."""
    of_row = np.arange(table.shape[1])[None] < used[:, None]
    return jnp.where(of_row[..., None], key_positions[table], np.iinfo(np.int32).max)


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out float32[B, S, H, D], lse float32[B, S, H]) of S sets of keys -> [B, H, D], [B, H] of all."""
    highest = lse.max(axis=1, keepdims=True)
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)  # where no set has a key for it: -inf - -inf is NaN
    weights = jnp.exp(lse - shift)
    total = weights.sum(axis=1)
    sees_any = total > 0
    out = (out * weights[..., None]).sum(axis=1) / jnp.where(sees_any, total, 1.0)[..., None]
    return out, jnp.where(sees_any, jnp.log(jnp.where(sees_any, total, 1.0)) + shift[:, 0], -jnp.inf)
