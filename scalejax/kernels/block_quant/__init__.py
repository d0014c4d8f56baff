"""Rows of embedding tables in 8, 4 or 2 bits with a scale and a bias each, in the bytes of FBGEMM, or with codebooks,
a row's own or shared; lookups in them."""

from scalejax.kernels.block_quant.api import PackedRows as PackedRows
from scalejax.kernels.block_quant.api import book_bytes as book_bytes
from scalejax.kernels.block_quant.api import dequantize_rows as dequantize_rows
from scalejax.kernels.block_quant.api import fuse_rows as fuse_rows
from scalejax.kernels.block_quant.api import gather_quantized_rows as gather_quantized_rows
from scalejax.kernels.block_quant.api import nonfinite_rows as nonfinite_rows
from scalejax.kernels.block_quant.api import pack_lanes as pack_lanes
from scalejax.kernels.block_quant.api import quantize_rows as quantize_rows
from scalejax.kernels.block_quant.api import quantize_rows_kmeans as quantize_rows_kmeans
from scalejax.kernels.block_quant.api import quantized_bag as quantized_bag
from scalejax.kernels.block_quant.api import row_bytes as row_bytes
from scalejax.kernels.block_quant.api import share_codebooks as share_codebooks
from scalejax.kernels.block_quant.api import split_rows as split_rows
from scalejax.kernels.block_quant.api import table_bytes as table_bytes
from scalejax.kernels.block_quant.api import unpack_lanes as unpack_lanes
from scalejax.kernels.block_quant.codebook import CODEBOOK_FORMATS as CODEBOOK_FORMATS
from scalejax.kernels.block_quant.codebook import CodebookFormat as CodebookFormat
from scalejax.kernels.block_quant.codebook import CodebookRows as CodebookRows
from scalejax.kernels.block_quant.lanes import LaneRows as LaneRows
from scalejax.kernels.block_quant.scale_bias import ROW_FORMATS as ROW_FORMATS
from scalejax.kernels.block_quant.scale_bias import QuantizedRows as QuantizedRows
from scalejax.kernels.block_quant.scale_bias import RowFormat as RowFormat
from scalejax.kernels.block_quant.shared_codebook import SHARED_CODEBOOK_FORMATS as SHARED_CODEBOOK_FORMATS
from scalejax.kernels.block_quant.shared_codebook import SharedCodebookFormat as SharedCodebookFormat
from scalejax.kernels.block_quant.shared_codebook import SharedCodebookRows as SharedCodebookRows
