"""torchao's quantizer of MX formats on a CPU, op by op or compiled."""

import numpy as np
import torch
from torch._inductor.codegen import cpp_utils
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

_ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}

# The generator of C++ has no name for E8M0, in which `to_mx` returns its scales, and fails without one: a byte.
cpp_utils.DTYPE_TO_CPP.setdefault(torch.float8_e8m0fnu, "uint8_t")


class Quantizer:
    """`to_mx` of one matrix, blocks of 32 along its rows, scale rule "floor".

    Args:
      numbers: float32[rows, columns].
      format: One of the OCP formats by our name.
      dtype: "float32" or "bfloat16", in which the numbers are given.
      compiled: Whether through torch.compile.
      threads: CPU threads.
    """

    def __init__(self, numbers: np.ndarray, format: str, dtype: str, compiled: bool, threads: int) -> None:
        torch.set_num_threads(threads)
        self._x = torch.from_numpy(numbers).to(getattr(torch, dtype))
        element = _ELEMENTS[format]

        def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return to_mx(x, element, 32, ScaleCalculationMode.FLOOR)

        self._quantize = torch.compile(quantize, dynamic=False) if compiled else quantize

    def run(self) -> None:
        """One call."""
        with torch.no_grad():
            self._quantize(self._x)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """uint8 codes (4-bit ones two in a byte, 6-bit ones a byte each) and scales."""
        with torch.no_grad():
            scales, codes = self._quantize(self._x)
        found = codes.view(torch.uint8).numpy()
        if codes.dtype == torch.float8_e5m2:
            # Compiled, it leaves out the saturation before the cast, which makes infinities of what is too large.
            found = np.where(found & 0x7F == 0x7C, found - 1, found)
        return found, scales.view(torch.uint8).numpy()
