"""Attention with its log-sum-exp."""

from scalejax.kernels.flash_attention.api import flash_attention as flash_attention
