"""FBGEMM's row-wise quantization operators and ours: the same bytes, and the same numbers from them."""

import pytest

pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed; benchmarks/peers.sh installs it")

import jax.numpy as jnp
import numpy as np
import row_oracle
import torch

from scalejax.kernels import block_quant

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

OPS = torch.ops.fbgemm
DIM = 32
CASES = row_oracle.rows(DIM)


def theirs(table, format):
    rows = torch.from_numpy(table)
    if format == "int8":
        return OPS.FloatToFused8BitRowwiseQuantized(rows)
    return OPS.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, row_oracle.BITS[format])


@pytest.mark.parametrize("format", ["int8", "int4", "int2"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_bytes_are_equal(format, name):
    table = CASES[name]
    found = np.asarray(block_quant.fuse_rows(block_quant.quantize_rows(jnp.asarray(table), format)))
    assert np.array_equal(found, theirs(table, format).numpy())


@pytest.mark.parametrize("format", ["int8", "int4", "int2"])
def test_both_decode_the_same_numbers(format):
    table = np.concatenate([CASES["normal"], CASES["spread"], CASES["uniform"]])
    data = theirs(table, format)
    rows = block_quant.split_rows(jnp.asarray(data.numpy()), format, DIM)
    found = np.asarray(block_quant.dequantize_rows(rows))
    if format == "int8":
        wanted = OPS.Fused8BitRowwiseQuantizedToFloat(data).numpy()
        # They round the product and the sum together.
        largest = np.abs(table).max(axis=1, keepdims=True)
        assert (np.abs(found - wanted) <= 2 * np.spacing(largest)).all()
    else:
        wanted = OPS.FusedNBitRowwiseQuantizedSBHalfToFloat(data, row_oracle.BITS[format]).numpy()
        assert np.array_equal(found, wanted, equal_nan=True)


def test_rows_with_infinities_have_their_bytes():
    table = CASES["normal"][:2].copy()
    table[0, 3], table[1, 0] = np.inf, -np.inf
    for format in ("int8", "int4"):
        found = np.asarray(block_quant.fuse_rows(block_quant.quantize_rows(jnp.asarray(table), format)))
        assert np.array_equal(found, theirs(table, format).numpy())
