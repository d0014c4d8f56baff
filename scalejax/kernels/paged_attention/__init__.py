"""Attention of one new token a row to keys and values that lie in pages."""

from scalejax.kernels.paged_attention.api import paged_attention as paged_attention
