"""Rows under a scale and a bias of their own; `xla` and `search` quantize them."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.block_quant import formats, xla
from scalejax.kernels.block_quant.formats import ENCODINGS, Encoding

RowFormat = Literal["int8", "int8_half", "int4", "int2"]
ROW_FORMATS: tuple[RowFormat, ...] = ("int8", "int8_half", "int4", "int2")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """A quantized table of V rows of D values.

    Attributes:
      codes: uint8[V, ceil(D * bits / 8)].
      scales: float32[V] for int8, else float16[V].
      biases: as `scales`.
      format: of the rows.
      dim: D.
    """

    codes: jax.Array
    scales: jax.Array
    biases: jax.Array
    format: RowFormat = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.codes.shape[0] * ENCODINGS[self.format].row_bytes(self.dim)

    def dequantize(self) -> jax.Array:
        """See `api.dequantize_rows`."""
        return xla.dequantize(self.codes, self.scales, self.biases, ENCODINGS[self.format].bits, self.dim)

    def gather(self, ids: jax.Array) -> jax.Array:
        """See `api.gather_quantized_rows`."""
        return jax.tree.map(formats.taker(ids, self.codes.shape[0])[1], self).dequantize()

    def nonfinite_rows(self) -> jax.Array:
        """See `api.nonfinite_rows`."""
        finite = jnp.isfinite(self.scales) & jnp.isfinite(self.biases)
        return jnp.sum(~finite, dtype=jnp.int32)


def scale_dtype(format: str) -> np.dtype:
    """The dtype of scales and biases."""
    return np.dtype(np.float32 if format == "int8" else np.float16)


for _format, _bits in zip(ROW_FORMATS, (8, 8, 4, 2), strict=True):
    ENCODINGS[_format] = Encoding(bits=_bits, beside=2 * scale_dtype(_format).itemsize, in_lanes=QuantizedRows)
