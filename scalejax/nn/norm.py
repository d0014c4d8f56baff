"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.nn.linear import DType, wide


class LayerNorm(nnx.Module):
    """y = (x - mean) / sqrt(var + eps) * scale + bias over the last axis (Ba et al., 2016).

    Starts with scale 1 and bias 0. Statistics are computed in float32 or wider, whatever the dtype of x.
    """

    def __init__(
        self, features: int, *, eps: float = 1e-5, param_dtype: DType = jnp.float32, compute_dtype: DType = jnp.float32
    ):
        self.scale = nnx.Param(jnp.ones(features, param_dtype), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(features, param_dtype), logical_axes=("norm",))
        self.eps = eps
        self.compute_dtype = jnp.dtype(compute_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: float[..., features]. Returns compute_dtype[..., features]."""
        dtype = wide(x.dtype, self.compute_dtype)
        x = x.astype(dtype)
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        expand = (*(1,) * (x.ndim - 1), -1)
        scale, bias = (p[...].astype(dtype).reshape(expand) for p in (self.scale, self.bias))
        return (centred * jax.lax.rsqrt(variance + self.eps) * scale + bias).astype(self.compute_dtype)
