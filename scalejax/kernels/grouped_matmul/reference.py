"""The definitions in plain jax.numpy."""

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


def between(gate: jax.Array, up: jax.Array) -> jax.Array:
    """What a gated MLP has between its layers, of its two products in float32 or wider."""
    return jax.nn.silu(gate) * up


def between_gradients(gate: jax.Array, up: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`between`, and the gradients of gate and up for its cotangent g."""
    share = jax.nn.sigmoid(gate)
    # silu(a) = a s with s = sigmoid(a), and s' = s (1 - s).
    return gate * share * up, g * up * share * (1 + gate * (1 - share)), g * gate * share
