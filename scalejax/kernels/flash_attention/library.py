"""Kernels of others, where they have the case: jax's splash attention and cuDNN's.

They know fewer masks than `api.flash_attention` states, and `lacks` says which; what they have, they have as it is
meant here: out and lse of forward, a backward that takes both back, rows that see nothing. Where a library's own
functions are private they are reached through `compat`.

                offset   positions   segments   window   cotangent of lse   heads            lengths
    splash      int      no          yes        causal   yes                any              multiples of 128
    cudnn       no       no          no         causal   no                 <= 128, by 8s    S = T where causal
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalejax import compat
from scalejax.kernels.flash_attention import blocks
from scalejax.kernels.flash_attention.visibility import BackwardInputs, Visibility


@dataclasses.dataclass(frozen=True)
class Library:
    """One library's attention, with the three functions that a module of this folder has."""

    lacks: Callable[..., str | None]
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def _lacks_splash(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> str | None:
    if visibility.offset is not None or visibility.query_positions is not None:
        return "needs an offset that is an int, and no positions: it lists visible blocks before it is traced."
    if q.shape[1] % 128 or k.shape[1] % 128:
        return f"needs S and T that are multiples of 128; got {q.shape[1]} and {k.shape[1]}."
    if visibility.window is not None and not visibility.causal:
        return 'has windows of mask "causal" only.'
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16; got {q.dtype}."
    return None


def _splash_kernel(q: jax.Array, k: jax.Array, visibility: Visibility, interpret: bool) -> Any:
    most = blocks.SPLASH
    query_block, key_block = (
        max(n for n in (128, 256, 512, 1024) if n <= most and x.shape[1] % n == 0) for x in (q, k)
    )
    return compat.splash_kernel(
        (q.shape[1], k.shape[1]),
        heads=q.shape[2],
        causal=visibility.causal,
        window=visibility.window,
        offset=visibility.start,
        query_block=query_block,
        key_block=key_block,
        interpret=interpret,
    )


_SPLASH_UNSEEN = -1e38
"""Splash replaces hidden scores by a number below; a row that sees nothing has such a log-sum-exp."""


def _splash_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    kernel = _splash_kernel(q, k, visibility, interpret)
    out, lse = compat.splash_forward(
        kernel,
        (q * scale).swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        visibility.query_segments,
        visibility.key_segments,
    )
    unseen = ~(lse > _SPLASH_UNSEEN)
    out, lse = jnp.where(unseen[..., None], 0, out), jnp.where(unseen, -jnp.inf, lse)
    return out.swapaxes(1, 2), lse


def _splash_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    scale: float,
    inputs: BackwardInputs,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel = _splash_kernel(q, k, visibility, interpret)
    d_q, d_k, d_v = compat.splash_backward(
        kernel,
        (q * scale).swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        visibility.query_segments,
        visibility.key_segments,
        inputs.lse,
        inputs.d_out.swapaxes(1, 2),
        inputs.correction,
    )
    return d_q.swapaxes(1, 2) * scale, d_k.swapaxes(1, 2), d_v.swapaxes(1, 2)


def _lacks_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> str | None:
    if visibility.start or visibility.offset is not None or visibility.query_positions is not None:
        return "has no offset and no positions."
    if visibility.query_segments is not None:
        return "has no segment ids."
    if visibility.window is not None and not visibility.causal:
        return 'has windows of mask "causal" only.'
    if visibility.causal and q.shape[1] != k.shape[1]:
        return f"is causal only where S = T; got {q.shape[1]} and {k.shape[1]}."
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 and float16; got {q.dtype}."
    if q.shape[3] > 128 or q.shape[3] % 8:
        return f"takes heads of at most 128 values, a multiple of 8; got {q.shape[3]}."
    if d_lse:
        return "has no place for a cotangent of lse."
    if compat.cudnn_version() is None:
        return "needs an NVIDIA GPU with cuDNN; jax finds none here."
    return None


def _cudnn_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float
) -> tuple[jax.Array, jax.Array]:
    return compat.cudnn_attention(q, k, v, causal=visibility.causal, window=visibility.window, scale=scale)


def _cudnn_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float, inputs: BackwardInputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # It computes sum(out * d_out) itself, which is `correction` where lse has no cotangent.
    return compat.cudnn_attention_gradients(
        q, k, v, inputs.out, inputs.lse, inputs.d_out, causal=visibility.causal, window=visibility.window, scale=scale
    )


BACKENDS = {
    "splash": Library(_lacks_splash, _splash_forward, _splash_backward),
    "cudnn": Library(_lacks_cudnn, _cudnn_forward, _cudnn_backward),
}
"""By the name of the implementation."""
