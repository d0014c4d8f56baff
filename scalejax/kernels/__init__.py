"""Operations on arrays: no mesh, no Flax, usable on their own; importing this package costs an import of jax at most.

    block_quant       rows of embedding tables in 8, 4 or 2 bits or with codebooks, and lookups in them
    embedding_bag     rows of a table looked up and pooled, their gradients by row, updates of the touched rows
    flash_attention   attention that never holds all scores, forward and backward
    group_quantize    groups of values as integers under a scale, and a Hadamard transform before (SDP4Bit)
    grouped_matmul    rows sorted by group, each times the matrix of its group, or through its gated MLP (experts)
    mx                arrays in packed blocks (MX, NVFP4 and their family): there, back and multiplied
    paged_attention   one new token a row attends to keys and values in pages
    ring_attention    attention to the keys and values of several TPUs, which go round in one kernel
    sampled_spmm      sparse times dense for graphs, exact or over sampled edges

Each loads on first use: `scalejax.kernels.flash_attention.flash_attention(q, k, v)`. One folder per operation: `api.py`
(signature, checks, choice of implementation), `reference.py` (the definition in plain jax.numpy) and one file per
implementation.
"""

import importlib
from typing import TYPE_CHECKING, Any

_KERNELS = (
    "block_quant", "embedding_bag", "flash_attention", "group_quantize", "grouped_matmul", "mx", "paged_attention",
    "ring_attention", "sampled_spmm",
)  # fmt: skip

__all__ = [*_KERNELS]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from scalejax.kernels import block_quant as block_quant
    from scalejax.kernels import embedding_bag as embedding_bag
    from scalejax.kernels import flash_attention as flash_attention
    from scalejax.kernels import group_quantize as group_quantize
    from scalejax.kernels import grouped_matmul as grouped_matmul
    from scalejax.kernels import mx as mx
    from scalejax.kernels import paged_attention as paged_attention
    from scalejax.kernels import ring_attention as ring_attention
    from scalejax.kernels import sampled_spmm as sampled_spmm


def __getattr__(name: str) -> Any:
    if name in _KERNELS:
        return importlib.import_module(f"scalejax.kernels.{name}")
    raise AttributeError(f"module 'scalejax.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
