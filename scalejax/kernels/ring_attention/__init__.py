"""Attention to the keys and values of all devices along a mesh axis, which go round while a kernel runs."""

from scalejax.kernels.ring_attention.api import ring_attention as ring_attention
