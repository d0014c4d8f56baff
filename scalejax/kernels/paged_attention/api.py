"""Signature, checks and the choice of implementation.

`implementation` names one of

    reference    the definition, for tests
    xla          the pages of each row gathered, then `flash_attention` in XLA
    pallas_tpu   a kernel that reads the pages of the table alone (`pallas_tpu`)
    pallas_gpu   likewise, in Triton (`pallas_gpu`)

A name never falls back: what it lacks is an UnsupportedError that says so. None takes the kernel of the platform of the
mesh in force, or else of jax's first device, where it has the case, and "xla" otherwise.
"""

import importlib
import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UnsupportedError
from scalejax.kernels import gpu_choices
from scalejax.kernels.paged_attention import reference
from scalejax.kernels.paged_attention.pages import PagedKeys, PageLayout

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Shaped

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
_IMPLEMENTATIONS = ("reference", "xla", "pallas_tpu", "pallas_gpu")


def paged_attention(
    q: "Float[Array, 'batch heads head_dim']",
    pages: "Shaped[Array, 'pages *page head_dim']",
    table: "Int[Array, 'batch width']",
    key_positions: "Int[Array, 'positioned page_size']",
    query_positions: "Int[Array, 'batch']",
    *,
    used: "Int[Array, 'batch'] | None" = None,
    scales: "Float[Array, 'pages *page'] | None" = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> tuple["Float[Array, 'batch heads head_dim']", "Float[Array, 'batch heads']"]:
    """out[b] = sum over visible keys j of softmax_j(scale * q[b] . k[j]) v[j], and the log-sum-exp of each head.

    The keys of row b are those of the pages table[b]; a row sees those with a position at most its own and, with a
    window, above query_position - window. A row that sees nothing has out 0 and lse -inf, so that parts of a sequence
    merge by their lse. Query head h reads key/value head h // (H / K). Forward only.

    Args:
      q: float[B, H, D]: float32 or bfloat16; float16 and, but for kernels, float64 too.
      pages: [P, page, 2 K, D], where head 2 j has the keys of head j and head 2 j + 1 its values; or
        [P, 2, K, page, D], keys before values. In the dtype of q, int8 with scales, or float8_e4m3fn.
      table: int32[B, W], pages of each row in any order; every entry is in [0, P).
      key_positions: int32[P', page], where P' divides P and page p has those of p mod P', as layers behind one another
        have the same; 2**31 - 1 where there is no key.
      query_positions: int32[B]; -1 for a row that is padding.
      used: int32[B], entries of the table that are the row's, the first ones; the others are not read. None = all, and
        then an entry too many must name a page without keys.
      scales: float32 in the shape of pages without D: a key or a value is its numbers times its scale. None = 1. One
        scale for all keys or all values of a layer can be left to q and out.
      window: Positions, >= 1: a query sees itself and the window - 1 keys before it.
      scale: None = D ** -0.5.
      implementation: None picks; a name never falls back.
      interpret: For tests of Pallas kernels where their chip is not.

    Returns:
      (out [B, H, D] in the dtype of q, lse float32[B, H]); sums in float32 (float64 for float64).

    Raises:
      ValueError: an argument has a wrong rank, size, dtype or value.
      UnsupportedError: the named implementation does not have the case.
    """
    op = "paged_attention"
    layout = PageLayout.of(op, pages)
    _check(op, q, pages, table, key_positions, query_positions, used, scales, layout)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"{op}: window must be an int >= 1, a number of positions, or None; got {window!r}.")
    if isinstance(scale, jax.Array) or not (scale is None or math.isfinite(scale)):
        raise ValueError(f"{op}: scale must be a finite number that is known while tracing; got {scale}.")
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        names = ", ".join(f'"{name}"' for name in _IMPLEMENTATIONS)
        raise ValueError(f"{op}: implementation must be None or one of {names}; got {implementation!r}.")
    if min(*q.shape, *pages.shape, *table.shape) == 0:
        return jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    table, key_positions, query_positions = (x.astype(jnp.int32) for x in (table, key_positions, query_positions))
    used = jnp.full(q.shape[:1], table.shape[1], jnp.int32) if used is None else used.astype(jnp.int32)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    name = _choose(op, implementation, q, pages, layout)
    keys = PagedKeys(pages, layout, table, key_positions, used, scales)
    if name in ("reference", "xla"):
        return reference.attention(q, keys, query_positions, window, factor, implementation=name)
    backend = importlib.import_module(f"scalejax.kernels.paged_attention.{name}")
    return backend.forward(q, keys, query_positions, window, factor, interpret=interpret)


def _choose(op: str, implementation: str | None, q: jax.Array, pages: jax.Array, layout: PageLayout) -> str:
    if implementation in ("reference", "xla"):
        return implementation
    name = implementation or gpu_choices.first("paged_attention", op, elsewhere={"tpu": "pallas_tpu"})
    if name == "xla":
        return "xla"
    # Pallas takes longer to import than all the rest, and programs on a CPU never need it.
    lacks = importlib.import_module(f"scalejax.kernels.paged_attention.{name}").lacks(q, pages, layout)
    if lacks and implementation is not None:
        raise UnsupportedError(
            f'{op}: implementation="{implementation}" {lacks} Take implementation=None, which is the fastest that has '
            "the case."
        )
    return "xla" if lacks else name


def _check(
    op: str,
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    key_positions: jax.Array,
    query_positions: jax.Array,
    used: jax.Array | None,
    scales: jax.Array | None,
    layout: PageLayout,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"{op}: q must have shape (B, H, D); got {tuple(q.shape)}.")
    batch, heads, width = q.shape
    if pages.shape[-1] != width:
        raise ValueError(f"{op}: pages must have the head dim of q, D = {width}; got {pages.shape[-1]}.")
    if layout.kv_heads and heads % layout.kv_heads:
        raise ValueError(f"{op}: pages must have K heads that divide H = {heads}; got K = {layout.kv_heads}.")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise ValueError(f"{op}: q must be float32, bfloat16, float16 or float64; got {q.dtype}. Cast it.")
    if pages.dtype not in (q.dtype, jnp.int8, jnp.float8_e4m3fn):
        raise ValueError(
            f"{op}: pages must have the dtype of q, {q.dtype}, or be int8 or float8_e4m3fn; got {pages.dtype}. Cast "
            "one of them."
        )
    if scales is None and pages.dtype == jnp.int8:
        raise ValueError(f"{op}: scales must be given for pages of int8; got None.")
    if scales is not None and (scales.shape != pages.shape[:-1] or scales.dtype != jnp.float32):
        raise ValueError(
            f"{op}: scales must be float32 of shape {tuple(pages.shape[:-1])}; got {scales.dtype}{list(scales.shape)}."
        )
    # Of a number of pages that divides theirs.
    positioned = key_positions.shape[0] if key_positions.ndim == 2 else pages.shape[0]
    if positioned == 0 or pages.shape[0] % positioned:
        positioned = pages.shape[0]
    given = [
        ("table", table, (batch, table.shape[-1] if table.ndim else 0)),
        ("key_positions", key_positions, (positioned, layout.page)),
        ("query_positions", query_positions, (batch,)),
    ] + ([] if used is None else [("used", used, (batch,))])
    for name, array, shape in given:
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{op}: {name} must be integers of shape {shape}; got {array.dtype}{list(array.shape)}.")
