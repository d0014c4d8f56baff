"""Rows that lie sorted by group, each multiplied by the matrix of its group: the experts of a token-choice layer."""

from scalejax.kernels.grouped_matmul.api import grouped_gated_mlp as grouped_gated_mlp
from scalejax.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
