"""Groups of values as integers of 4 or 8 bits under a float32 scale, for what travels between devices (SDP4Bit)."""

from scalejax.kernels.group_quantize.api import (
    TRANSFORM,
    IntGroups,
    QuantizedGroups,
    dequantize,
    from_bytes,
    hadamard,
    quantize,
    to_bytes,
)

__all__ = ["TRANSFORM", "IntGroups", "QuantizedGroups", "dequantize", "from_bytes", "hadamard", "quantize", "to_bytes"]
