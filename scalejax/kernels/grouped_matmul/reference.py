"""The definition in plain jax.numpy."""

import jax
import jax.numpy as jnp


def multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Every row gathers its matrix."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0])
    group = (rows[:, None] >= ends[None, :]).sum(1)
    own = weights.at[group].get(mode="fill", fill_value=0)
    return jnp.einsum("rk,rkn->rn", x, own, preferred_element_type=wide).astype(x.dtype)
