"""Kernels of others, where they have the case: jax's splash attention, cuDNN's, tokamax's.

They know fewer masks than `api.flash_attention` states, and `lacks` says which; what they have, they have as it is
meant here: out and lse of forward, a backward that takes both back, rows that see nothing. Where a library's own
functions are private they are reached through `compat`.

                offset   positions   segments   window   cotangent of lse   heads            lengths
    splash      int      no          yes        causal   yes                any              multiples of 128
    cudnn       no       no          no         causal   no                 <= 128, by 8s    S = T where causal
    tokamax     no       no          no         no       no                 by 128s on TPU   multiples of 128 on TPU
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalejax import compat
from scalejax.kernels.flash_attention import blocks
from scalejax.kernels.flash_attention.visibility import Visibility


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
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    correction: jax.Array,
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
        lse,
        d_out.swapaxes(1, 2),
        correction,
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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    scale: float,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    correction: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # It computes sum(out * d_out) itself, which is `correction` where lse has no cotangent.
    return compat.cudnn_attention_gradients(
        q, k, v, out, lse, d_out, causal=visibility.causal, window=visibility.window, scale=scale
    )


def _lacks_tokamax(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> str | None:
    if visibility.start or visibility.offset is not None or visibility.query_positions is not None:
        return "has no offset and no positions."
    if visibility.query_segments is not None or visibility.window is not None:
        return "has no segment ids and no windows."
    if visibility.causal and q.shape[1] != k.shape[1]:
        return f"is causal only where S = T; got {q.shape[1]} and {k.shape[1]}."
    if d_lse:
        return "has no place for a cotangent of lse."
    platform = compat.platform()
    if platform not in ("tpu", "gpu"):
        return f"has kernels for TPUs and GPUs; this is compiled for a {platform}."
    if platform == "tpu" and (q.shape[1] % 128 or k.shape[1] % 128 or q.shape[3] % 128):
        return f"needs S, T and D that are multiples of 128 on a TPU; got {q.shape[1]}, {k.shape[1]}, {q.shape[3]}."
    if q.dtype not in ((jnp.bfloat16, jnp.float32) if platform == "tpu" else (jnp.bfloat16, jnp.float16)):
        return f"does not compute in {q.dtype} on a {platform}."
    if not compat.has_tokamax():
        return "needs the package tokamax, which is not installed: pip install tokamax (Python 3.12)."
    return None


def _tokamax_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float
) -> tuple[jax.Array, jax.Array]:
    return compat.tokamax_attention(q, k, v, causal=visibility.causal, scale=scale)


def _tokamax_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    scale: float,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    correction: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # As with cuDNN.
    return compat.tokamax_attention_gradients(q, k, v, out, lse, d_out, causal=visibility.causal, scale=scale)


BACKENDS = {
    "tokamax": Library(_lacks_tokamax, _tokamax_forward, _tokamax_backward),
    "splash": Library(_lacks_splash, _splash_forward, _splash_backward),
    "cudnn": Library(_lacks_cudnn, _cudnn_forward, _cudnn_backward),
}
"""By the name of the implementation."""
