"""Lookups in packed rows beside lookups in float32 and float16: lookups/s, bytes/s, share of a copy's bandwidth.

python benchmarks/row_lookup.py [--json FILE] [--seconds 120]     # any device; on a GPU the tables are large
python benchmarks/row_lookup.py --smoke                           # tiny sizes

One JSON object a line. Before anything is timed, lookups in packed rows must equal those in the decoded table, to the
bit by XLA, to 1e-5 by the GPU's kernel, which is timed on a GPU beside XLA. Bytes are N * (bytes of a row + 4 of its
id) read and B * D * 4 written; "speedup" is the time of float32 by XLA over this one, of neighbouring turns.
"""

import functools
import itertools
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from gpu_embedding import draw
from gpu_report import Report, copy, options, timed

from scalejax.kernels import block_quant, embedding_bag
from scalejax.kernels.block_quant import RowFormat

FORMATS: tuple[RowFormat, ...] = ("int8", "int4")


def main() -> int:
    arguments = options(__doc__, seconds=120).parse_args()
    report = Report("row_lookup", arguments.json, arguments.seconds, smoke=arguments.smoke)
    copy(report, smoke=arguments.smoke)
    gpu = jax.devices()[0].platform == "gpu"
    num_rows, count = (1000, 320) if arguments.smoke else (2_000_000, 2**21) if gpu else (200_000, 81_920)
    for dim in (32, 64, 128):
        table = jax.random.normal(jax.random.key(dim), (num_rows, dim))
        packed = {f: block_quant.quantize_rows(table, f) for f in FORMATS}
        tables: dict[str, Any] = {"float32": table, "float16": table.astype(jnp.float16), **packed}
        for pooling in (1, 20, 80):
            if not report.has_time_for(f"D {dim}, {pooling} ids a bag", 5):
                continue
            bags = count // pooling
            ids = jnp.asarray(draw("zipf", num_rows, bags * pooling))
            lengths = jnp.full(bags, pooling, jnp.int32)
            for name, rows in packed.items():
                decoded = block_quant.dequantize_rows(rows)
                wanted = embedding_bag.embedding_bag(decoded, ids, lengths)
                np.testing.assert_array_equal(block_quant.quantized_bag(rows, ids, lengths), wanted, err_msg=name)
                if gpu or arguments.smoke:
                    how: dict[str, Any] = {"implementation": "pallas_gpu", "interpret": not gpu}
                    found = block_quant.quantized_bag(rows, ids, lengths, **how)
                    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{name} by the kernel")
            times(report, tables, ids, lengths, dim, pooling, ("xla", "pallas_gpu") if gpu else ("xla",))
    return 0


def times(
    report: Report,
    tables: dict[str, Any],
    ids: jax.Array,
    lengths: jax.Array,
    dim: int,
    pooling: int,
    implementations: tuple[Literal["xla", "pallas_gpu"], ...],
) -> None:
    """One line a kind of table; of packed ones, one a kind and implementation."""

    @functools.partial(jax.jit, static_argnums=3)
    def run(table: Any, ids: jax.Array, lengths: jax.Array, implementation: Any) -> jax.Array:
        if isinstance(table, block_quant.QuantizedRows):
            return block_quant.quantized_bag(table, ids, lengths, implementation=implementation)
        return embedding_bag.embedding_bag(table, ids, lengths, implementation=implementation).astype(jnp.float32)

    widths = {"float32": 4 * dim, "float16": 2 * dim} | {f: block_quant.row_bytes(f, dim) for f in FORMATS}
    for name, how in itertools.product(tables, implementations):
        wide, seconds = [], []
        for _ in range(5):
            wide.append(timed(lambda: run(tables["float32"], ids, lengths, "xla"), turns=1))
            seconds.append(timed(lambda name=name, how=how: run(tables[name], ids, lengths, how), turns=1))
        median = float(np.median(seconds))
        moved = len(ids) * (widths[name] + 4) + len(lengths) * dim * 4
        ratio = float(np.median(np.array(wide) / np.array(seconds)))
        formula = "N * (bytes of a row + 4) + B * D * 4"
        case = f"D {dim}, {pooling} ids a bag, {name}"
        report.timing(case, how, median, moved, formula, speedup=ratio, lookups_per_s=len(ids) / median)


if __name__ == "__main__":
    sys.exit(main())
