"""Groups of values as integers of 4 or 8 bits under a float32 scale, for what travels between devices (SDP4Bit)."""

from scalejax.kernels.group_quantize.api import (
    Transform,
    dequantize,
    dequantize_add,
    dequantize_sum,
    hadamard,
    quantize,
    requantize,
)
from scalejax.kernels.group_quantize.groups import (
    IntGroups,
    QuantizedGroups,
    check_group_size,
    from_bytes,
    to_bytes,
)
from scalejax.kernels.group_quantize.values import TRANSFORM

__all__ = [
    "TRANSFORM",
    "IntGroups",
    "QuantizedGroups",
    "Transform",
    "check_group_size",
    "dequantize",
    "dequantize_add",
    "dequantize_sum",
    "from_bytes",
    "hadamard",
    "quantize",
    "requantize",
    "to_bytes",
]
