"""Attention that never holds all scores: output and log-sum-exp, forward and backward, one description of masks."""

from scalejax.kernels.flash_attention.api import flash_attention as flash_attention
from scalejax.kernels.flash_attention.api import flash_attention_gradients as flash_attention_gradients
