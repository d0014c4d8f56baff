"""What `implementation=None` takes on a GPU, of every operation that has a kernel there.

A line is an operation, or one of its formats, and the implementations that are tried in this order; the last one has
every case. `TIMED` is what benchmarks/results/gpu_kernels.md says is faster: in every row of an operation there the
kernel takes no longer than what XLA or a library makes of the same. tests/kernels/test_gpu_choices.py reads that file,
and fails where a time in it contradicts a line. Of `NOT_TIMED` no time stands beside another, and the reason is given.
"""

from collections.abc import Mapping

from scalejax import compat

_Choices = dict[tuple[str, ...], tuple[str, ...]]

TIMED: _Choices = {
    ("embedding_bag", "embedding_bag"): ("pallas_gpu", "xla"),
    ("flash_attention", "flash_attention"): ("cudnn", "pallas_gpu", "xla"),
    ("group_quantize", "quantize"): ("pallas_gpu", "xla"),
    ("group_quantize", "dequantize_sum"): ("pallas_gpu", "xla"),
    ("group_quantize", "requantize"): ("pallas_gpu", "xla"),
    ("group_quantize", "dequantize_add"): ("xla",),
    ("mx", "quantize_blocks", "mxfp8_e4m3"): ("pallas_gpu", "xla"),
    ("mx", "quantize_blocks", "mxfp6_e2m3"): ("pallas_gpu", "xla"),
    ("mx", "quantize_blocks", "mxfp4_e2m1"): ("pallas_gpu", "xla"),
    ("mx", "quantize_blocks", "nvfp4"): ("xla",),
    ("mx", "quantize_blocks", "bdr_mx9"): ("pallas_gpu", "xla"),
    ("mx", "quantize_blocks", "bdr_mx6"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks", "mxfp8_e4m3"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks", "mxfp6_e2m3"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks", "mxfp4_e2m1"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks", "nvfp4"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks", "bdr_mx9"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks", "bdr_mx6"): ("pallas_gpu", "xla"),
}

NOT_TIMED: _Choices = {
    # The rows of a lookup that was timed, without their sums: with one id a bag it runs at .82 of a copy.
    ("embedding_bag", "gather_rows"): ("pallas_gpu", "xla"),
    ("embedding_bag", "gather_and_pool_rows"): ("pallas_gpu", "xla"),
    # Nobody has timed an update. Of given rows a sum of the kernel would have another order than one of XLA.
    ("embedding_bag", "pool_rows"): ("xla",),
    ("embedding_bag", "sum_by_row"): ("xla",),
    ("embedding_bag", "update_rows"): ("xla",),
    # Decodes as adding does, for which XLA is faster.
    ("group_quantize", "dequantize"): ("xla",),
    # The same kernels with other constants.
    ("mx", "quantize_blocks"): ("pallas_gpu", "xla"),
    ("mx", "dequantize_blocks"): ("pallas_gpu", "xla"),
    # Timed beside weights of bfloat16 alone; XLA would decode all of the packed ones to memory.
    ("mx", "matmul"): ("pallas_gpu", "xla"),
    # They read the pages and rows of a batch, where others gather all that there might be, or multiply by all groups.
    ("paged_attention", "paged_attention"): ("pallas_gpu", "xla"),
    ("grouped_matmul", "grouped_matmul"): ("pallas_gpu", "ragged_dot"),
    # Right on an H200, and no faster than XLA or cuSPARSE as far as anybody knows.
    ("sampled_spmm", "sampled_spmm"): ("cusparse", "xla"),
    ("block_quant", "quantized_bag"): ("xla",),
}


def order(kernel: str, operation: str, format: str = "") -> tuple[str, ...]:
    """Implementations for a GPU: the first that has the case is taken. A format without a line is as others are."""
    for choices, line in ((TIMED, (kernel, operation, format)), (TIMED, (kernel, operation))):
        if line in choices:
            return choices[line]
    return NOT_TIMED[kernel, operation]


def first(kernel: str, operation: str, format: str = "", *, elsewhere: Mapping[str, str]) -> str:
    """The implementation that None tries first for what is being compiled for.

    Args:
      kernel: The folder of the operation.
      operation: Its name.
      format: Of numbers, where it has lines of its own.
      elsewhere: Platform but for GPUs -> implementation; of one that is missing it is "xla".
    """
    platform = compat.platform()
    return order(kernel, operation, format)[0] if platform == "gpu" else elsewhere.get(platform, "xla")
