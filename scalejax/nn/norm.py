"""Layers that normalise: LayerNorm, RMSNorm, BatchNorm and GroupNorm, with statistics in float32 or wider."""

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalejax import compat
from scalejax.nn.convolution import Conv
from scalejax.nn.linear import wide
from scalejax.numerics.dtypes import FLOAT32, Dtypes
from scalejax.parallel.mesh import manual_batch_axes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float


Purpose = Literal["training", "evaluation", "statistics"]
"""What a model is called for, see `BatchNorm`."""


class LayerNorm(nnx.Module):
    """y = (x - mean) / sqrt(var + eps) * scale + bias over the last axis (Ba et al., 2016).

    Starts with scale 1 and bias 0. Statistics are computed in float32 or wider, whatever the dtype of x.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, dtypes: Dtypes = FLOAT32):
        self.scale = nnx.Param(jnp.ones(features, dtypes.params), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(features, dtypes.params), logical_axes=("norm",))
        self.eps = eps
        self.compute_dtype = dtypes.compute

    def __call__(
        self, x: "Float[Array, '*batch features']", present: "Bool[Array, 'features'] | None" = None
    ) -> "Float[Array, '*batch features']":
        """x: float[..., features]. Returns compute_dtype[..., features], zero where a feature is not `present`."""
        dtype = wide(x.dtype, self.compute_dtype)
        scale, bias = (p[...].astype(dtype).reshape(*(1,) * (x.ndim - 1), -1) for p in (self.scale, self.bias))
        wider = x.astype(dtype)
        if present is None:
            y: jax.Array = layer_norm(wider, scale, bias, self.eps)
            return y.astype(self.compute_dtype)
        there = present.astype(dtype).reshape(scale.shape)
        centred = there * (wider - (there * wider).sum(-1, keepdims=True) / there.sum())
        normal = centred * jax.lax.rsqrt(jnp.square(centred).sum(-1, keepdims=True) / there.sum() + self.eps)
        return (normal * scale + there * bias).astype(self.compute_dtype)


@compat.custom_vjp(3)
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last axis: x float[..., D], scale and bias float[1, ..., D], all of the dtype of the result.

    The gradient is written out and keeps the normalised rows, for the CPU's sake: forward and backward of
    float32[16, 8192, 32] took 13.5 ms of CPU time instead of 18.5 (AMD EPYC, 2 shared cores, jax 0.10.2, 2026-11,
    memory reused between steps). Without the barrier it was no faster than autodiff, presumably because XLA then
    recomputes the normalised rows in each use. Leading axes are not merged: any of them may be sharded.
    """
    return _forward(x, scale, bias, eps)[0]


_Saved = tuple[jax.Array, jax.Array, jax.Array]
"""Normalised rows, inverse of their deviations, and the scale."""


def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> tuple[jax.Array, _Saved]:
    centred = x - x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
    normal, inverse = jax.lax.optimization_barrier((centred * inverse, inverse))
    return normal * scale + bias, (normal, inverse, scale)


def _backward(eps: float, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    del eps
    normal, inverse, scale = saved
    h = g * scale
    x = inverse * (h - h.mean(-1, keepdims=True) - normal * (h * normal).mean(-1, keepdims=True))
    rows = tuple(range(g.ndim - 1))
    return x, (g * normal).sum(rows, keepdims=True), g.sum(rows, keepdims=True)


layer_norm.defvjp(_forward, _backward)


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich, 2019).

    Normalised in float32 or wider, cast to the compute dtype, and only then multiplied by the scale in that dtype: the
    order of Llama, whose bfloat16 results differ in the other one.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        eps: float = 1e-5,
        dtypes: Dtypes = FLOAT32,
        logical_axes: tuple[str, ...] = ("norm",),
    ):
        """Starts with scale 1; `shape` is (features,), after the axes of stacked layers."""
        self.scale = nnx.Param(jnp.ones(shape, dtypes.params), logical_axes=logical_axes)
        self.eps = eps
        self.compute_dtype = dtypes.compute

    def __call__(self, x: "Float[Array, '*batch features']") -> "Float[Array, '*batch features']":
        """x: float[..., features]. Returns compute_dtype[..., features]."""
        return rms_norm(x, self.scale[...], self.eps, self.compute_dtype)


def rms_norm(
    x: "Float[Array, '*batch features']", scale: "Float[Array, 'features']", eps: float, compute_dtype: DTypeLike
) -> "Float[Array, '*batch features']":
    """RMSNorm of x, float[..., D], with scale float[D]; returns compute_dtype[..., D]."""
    wider = x.astype(wide(x.dtype, compute_dtype))
    normal = wider * jax.lax.rsqrt((wider * wider).mean(-1, keepdims=True) + eps)
    return normal.astype(compute_dtype) * scale.astype(compute_dtype).reshape(*(1,) * (x.ndim - 1), -1)


class BatchNorm(nnx.Module):
    """y = (x - m) / sqrt(v + eps) * scale + bias, mean m and variance v of each feature over the batch.

    Ioffe and Szegedy, 2015. In training they are those of the *global* batch: the compiler sums over devices in the
    implicit form of a step, and where data axes are manual, as in the explicit one, the means are taken over them here.
    With microbatches they are those of a part. Running means, for evaluation, are variables of the model: `mean` and
    `variance`, which a step hands on and checkpoints keep. With the purpose "statistics" they become those of the
    batch.
    """

    def __init__(self, features: int, *, momentum: float = 0.9, eps: float = 1e-5, dtypes: Dtypes = FLOAT32):
        """Starts with scale 1, bias 0, and running means of 0 and 1; they keep `momentum` of what they were."""
        self.scale = nnx.Param(jnp.ones(features, dtypes.params), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(features, dtypes.params), logical_axes=("norm",))
        self.mean = nnx.BatchStat(jnp.zeros(features, dtypes.params), logical_axes=("norm",))
        self.variance = nnx.BatchStat(jnp.ones(features, dtypes.params), logical_axes=("norm",))
        self.momentum, self.eps = momentum, eps
        self.compute_dtype = dtypes.compute

    def __call__(self, x: "Float[Array, '*batch features']", purpose: Purpose) -> "Float[Array, '*batch features']":
        """x: float[..., features]. Returns compute_dtype[..., features]; training changes the running means."""
        wider = x.astype(wide(x.dtype, self.compute_dtype))
        mean, variance = self.mean[...], self.variance[...]
        if purpose != "evaluation":
            keep = self.momentum if purpose == "training" else 0.0
            over = tuple(range(x.ndim - 1))
            # Two passes over devices, not E[x^2] - E[x]^2, which cancels where the mean is far from 0.
            mean = _over_data(wider.mean(over))
            variance = _over_data(jnp.square(wider - _like(mean, x)).mean(over))
            for running, now in ((self.mean, mean), (self.variance, variance)):
                kept, now = running[...], jax.lax.stop_gradient(now)
                running[...] = kept + (1 - keep) * (now.astype(kept.dtype) - kept)
        normal = (wider - _like(mean, x)) * jax.lax.rsqrt(_like(variance, x) + self.eps)
        scale, bias = (_like(p[...].astype(normal.dtype), x) for p in (self.scale, self.bias))
        return (normal * scale + bias).astype(self.compute_dtype)


class ConvNorm(nnx.Module):
    """BatchNorm of a convolution without a bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        rngs: nnx.Rngs,
        dtypes: Dtypes = FLOAT32,
    ):
        """See `Conv`."""
        self.conv = Conv(in_features, out_features, kernel=kernel, stride=stride, rngs=rngs, dtypes=dtypes)
        self.norm = BatchNorm(out_features, dtypes=dtypes)

    def __call__(
        self, x: "Float[Array, 'batch height width inputs']", purpose: Purpose
    ) -> "Float[Array, 'batch rows columns outputs']":
        """x: float[B, H, W, in_features]. Returns compute_dtype[B, ceil(H / stride), ..., out_features]."""
        return self.norm(self.conv(x), purpose)


class GroupNorm(nnx.Module):
    """y = (x - m) / sqrt(v + eps) * scale + bias, m and v over the pixels of an example and a group of its channels.

    Wu and He, 2018. Channels of a group lie side by side, as in PyTorch.
    """

    def __init__(self, features: int, *, groups: int, eps: float = 1e-5, dtypes: Dtypes = FLOAT32):
        """Starts with scale 1 and bias 0."""
        if groups < 1 or features % groups:
            raise ValueError(f"GroupNorm: groups must divide the {features} features; got {groups}.")
        self.scale = nnx.Param(jnp.ones(features, dtypes.params), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(features, dtypes.params), logical_axes=("norm",))
        self.groups, self.eps = groups, eps
        self.compute_dtype = dtypes.compute

    def __call__(self, x: "Float[Array, 'batch *space features']") -> "Float[Array, 'batch *space features']":
        """x: float[B, ..., features]. Returns compute_dtype[B, ..., features]."""
        wider = x.astype(wide(x.dtype, self.compute_dtype)).reshape(*x.shape[:-1], self.groups, -1)
        over = (*range(1, x.ndim - 1), x.ndim)
        centred = wider - wider.mean(over, keepdims=True)
        normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(over, keepdims=True) + self.eps)
        scale, bias = (_like(p[...].astype(normal.dtype), x) for p in (self.scale, self.bias))
        return (normal.reshape(x.shape) * scale + bias).astype(self.compute_dtype)


def _like(of_features: jax.Array, x: jax.Array) -> jax.Array:
    return of_features.reshape(*(1,) * (x.ndim - 1), -1)


def _over_data(mean: jax.Array) -> jax.Array:
    """Means of equally many examples, averaged over the data axes that are manual here."""
    axes = manual_batch_axes()
    return jax.lax.pmean(mean, axes) if axes else mean
