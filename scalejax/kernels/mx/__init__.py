"""Arrays in packed blocks: MX formats of both kinds, NVFP4 and the rest of the family, there, back and multiplied."""

from scalejax.kernels.mx.api import dequantize_blocks as dequantize_blocks
from scalejax.kernels.mx.api import matmul as matmul
from scalejax.kernels.mx.api import quantize_blocks as quantize_blocks
