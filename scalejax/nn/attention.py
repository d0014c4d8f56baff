"""Attention on whatever mesh there is: each device computes the rows, heads and positions that it has."""

from typing import TYPE_CHECKING

import jax

from scalejax import compat
from scalejax.errors import UserError
from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.flash_attention.api import Implementation
from scalejax.parallel.activations import constrain as constrain
from scalejax.parallel.attention import shard_attention
from scalejax.parallel.context import Method, sharded_context_attention

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_RUNS_ON = {"splash": "tpu", "pallas_tpu": "tpu", "cudnn": "gpu", "pallas_gpu": "gpu"}
"""Platforms of implementations that have one."""


def attend(
    q: "Float[Array, 'batch queries heads head_dim']",
    k: "Float[Array, 'batch keys kv_heads head_dim']",
    v: "Float[Array, 'batch keys kv_heads head_dim']",
    *,
    positions: "Int[Array, 'batch queries'] | None" = None,
    segment_ids: "Int[Array, 'batch queries'] | None" = None,
    window: int | None = None,
    implementation: Implementation | None = None,
    context_method: Method = "all_gather",
) -> "Float[Array, 'batch queries heads head_dim']":
    """Causal attention of q [B, S, H, D] to k and v [B, T, K, D] -> [B, S, H, D]; see `kernels.flash_attention`.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      positions: int32[B, S] where T = S, increasing within a segment in the order of its tokens. On a mesh whose axis
        `context` cuts the sequence they say what a token sees, in whatever order tokens lie; elsewhere tokens lie in
        their order, and positions are not looked at. None = a sequence is not cut.
      segment_ids: int32[B, S] where T = S: a query sees keys of its own segment. None = one segment.
      window: A query sees itself and the window - 1 keys before it; None = all before it.
      implementation: See `kernels.flash_attention`.
      context_method: How keys and values reach the queries of other devices, see `parallel.context`.

    Raises:
      UserError: the named implementation is for another platform.
      UnsupportedError: it does not have the case.
    """
    here = compat.platform()
    if implementation is not None and _RUNS_ON.get(implementation, here) != here:
        raise UserError(
            f"model.attention={implementation} is for a {_RUNS_ON[implementation].upper()}, and this is compiled for a "
            f"{here.upper()}. Take --set model.attention=none, which takes the fastest that there is."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if positions is not None and mesh.shape.get("context", 1) > 1:
        return sharded_context_attention(
            q,
            k,
            v,
            positions=positions,
            segment_ids=segment_ids,
            method=context_method,
            window=window,
            implementation=implementation,
        )
    given = {} if segment_ids is None else {"segment_ids": segment_ids}

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        return flash_attention(q, k, v, segment_ids=segment_ids, window=window, implementation=implementation)[0]

    if mesh.empty or mesh.size == 1:
        return local(q, k, v, **given)
    return shard_attention(local, q, k, v, given, {"segment_ids": ("batch", None)})
