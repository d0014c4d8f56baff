"""Attention by loops in NumPy, and the comparison of an implementation with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.flash_attention.reference import sum_dtype


def by_loops(q, k, v, *, mask, window=None, segment_ids=None, kv_segment_ids=None, query_offset=None,
             query_positions=None, key_positions=None, scale=None):  # fmt: skip
    """out and lse in float64, one query at a time, from the definition."""
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    out, lse = np.zeros(q.shape), np.full((batch, heads, queries), -np.inf)
    for b in range(batch):
        offset = 0 if query_offset is None else np.broadcast_to(query_offset, (batch,))[b]
        for i in range(queries):
            position = offset + i if query_positions is None else query_positions[b, i]
            seen = []
            for j in range(keys):
                at = j if key_positions is None else key_positions[b, j]
                if mask == "causal" and at > position:
                    continue
                if window is not None and position - at >= window:
                    continue
                if segment_ids is not None and segment_ids[b, i] != kv_segment_ids[b, j]:
                    continue
                seen.append(j)
            if not seen:
                continue
            for h in range(heads):
                scores = scale * k[b, seen, h // (heads // kv_heads)] @ q[b, i, h]
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights @ v[b, seen, h // (heads // kv_heads)] / weights.sum()
                lse[b, h, i] = np.log(weights.sum()) + scores.max()
    return out, lse


def arrays(case, dtype):
    masks = {n: jnp.asarray(m) if isinstance(m, np.ndarray) else m for n, m in case.masks().items()}
    return tuple(jnp.asarray(x, dtype) for x in case.operands()), masks


def value_and_pull(implementation, operands, masks, d_out, d_lse, **more):
    """(out, lse), (d_q, d_k, d_v) of one program."""
    traced = {n: m for n, m in masks.items() if isinstance(m, jax.Array)}
    fixed = {n: m for n, m in masks.items() if n not in traced}

    @jax.jit
    def run(q, k, v, traced, d_out, d_lse):
        def call(q, k, v):
            return flash_attention(q, k, v, **traced, **fixed, implementation=implementation, **more)

        value, pull = jax.vjp(call, q, k, v)
        return value, pull((d_out, d_lse))

    return run(*operands, traced, d_out, d_lse)


def cotangents(case, dtype):
    random = np.random.default_rng(3)
    d_out = random.normal(size=(case.batch, case.queries, case.heads, case.width))
    d_lse = random.normal(size=(case.batch, case.heads, case.queries))
    return jnp.asarray(d_out, dtype), jnp.asarray(d_lse, sum_dtype(dtype))


@functools.cache
def of_reference(case):
    """float64 results of the reference, as NumPy arrays."""
    with jax.enable_x64(True):
        operands, masks = arrays(case, jnp.float64)
        value, grads = value_and_pull("reference", operands, masks, *cotangents(case, jnp.float64))
        return jax.tree.map(np.asarray, (value, grads))


def assert_matches_reference(implementation, case, dtype=jnp.float32, rtol=2e-5, **more):
    """Differences are judged by the largest number of each result: float32 sums of a few hundred terms."""
    operands, masks = arrays(case, dtype)
    (out, lse), grads = value_and_pull(implementation, operands, masks, *cotangents(case, dtype), **more)
    (wanted_out, wanted_lse), wanted_grads = of_reference(case)
    assert out.dtype == dtype
    assert lse.dtype == sum_dtype(dtype)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
    finite = np.isfinite(wanted_lse)
    for got, wanted in zip(
        (out, np.where(finite, lse, 0), *grads), (wanted_out, np.where(finite, wanted_lse, 0), *wanted_grads),
        strict=True,
    ):  # fmt: skip
        assert got.shape == wanted.shape
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, rtol=0, atol=rtol * max(1e-30, np.abs(wanted).max())
        )
    unseen = np.isneginf(wanted_lse)  # B H S
    assert not np.swapaxes(np.asarray(out, np.float64), 1, 2)[unseen].any()
    assert not np.swapaxes(np.asarray(grads[0], np.float64), 1, 2)[unseen].any()
