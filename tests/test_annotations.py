"""What the annotations of public functions say of shapes and dtypes is so, in calls with both checked by jaxtyping."""

import importlib
import inspect
import types
import typing

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from scalejax import nn
from scalejax.kernels import block_quant, embedding_bag, mx, sampled_spmm
from scalejax.kernels.flash_attention import flash_attention, flash_attention_gradients
from scalejax.kernels.grouped_matmul import grouped_gated_mlp, grouped_matmul
from scalejax.kernels.interpretation import Interpret
from scalejax.nn import routing
from scalejax.numerics import bits, float8, packing, quantize, scales, stochastic
from scalejax.numerics.elements import E4M3
from scalejax.parallel import ddp
from scalejax.parallel.compression import codec
from scalejax.parallel.gradients import scaling

random = np.random.default_rng(3)


def checked(function):
    """The function with its annotations checked in every call; names that only type checkers import are added."""
    function = inspect.unwrap(function)
    module = importlib.import_module(function.__module__)
    copy = types.FunctionType(
        function.__code__, vars(module), function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    names = vars(jaxtyping) | {"Array": jax.Array, "Interpret": Interpret}
    copy.__annotations__ = typing.get_type_hints(function, localns=names)
    return jaxtyping.jaxtyped(copy, typechecker=beartype.beartype)


def floats(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.float32)


def integers(values):
    return jnp.asarray(values, jnp.int32)


TABLE, IDS, LENGTHS = floats(6, 4), integers([1, 5, 0, 1, 3]), integers([2, 0, 3])
PLAN = embedding_bag.plan_rows(IDS, num_rows=6, capacity=4)
QUERIES, KEYS = floats(2, 8, 4, 16), floats(2, 8, 2, 16)
GRAPH = sampled_spmm.sparse_plan(
    sampled_spmm.Csr.from_edges(np.array([0, 2, 1, 2]), np.array([0, 0, 2, 2]), shape=(3, 4))
)
ROWS = block_quant.quantize_rows(TABLE, "int8")
BLOCKS = quantize.quantize(floats(4, 32), "mxfp8_e4m3", axis=1)
CHOSEN = routing.choose_experts(floats(3, 4), jnp.ones(3, bool), k=2)
ROUTES = routing.routes_with_capacity(CHOSEN.experts, CHOSEN.gates, count=4, capacity=2)
BYTES = jnp.arange(8, dtype=jnp.uint8)

CALLS = {
    "embedding_bag": (embedding_bag.embedding_bag, (TABLE, IDS, LENGTHS), {"weights": floats(5)}),
    "embedding_bag of packed rows": (
        embedding_bag.embedding_bag,
        (embedding_bag.pack_rows(TABLE.astype(jnp.bfloat16)), IDS, LENGTHS),
        {},
    ),
    "pack_rows": (embedding_bag.pack_rows, (TABLE,), {}),
    "unpack_rows": (embedding_bag.unpack_rows, (embedding_bag.pack_rows(TABLE),), {}),
    "gather_rows": (embedding_bag.gather_rows, (TABLE, IDS), {}),
    "slot_bags": (embedding_bag.slot_bags, (LENGTHS, 5), {}),
    "pool_rows": (embedding_bag.pool_rows, (floats(5, 4), integers([0, 0, 2, 2, 2]), 3), {}),
    "plan_rows": (embedding_bag.plan_rows, (IDS,), {"num_rows": 6, "capacity": 4}),
    "sum_by_row": (embedding_bag.sum_by_row, (floats(5, 4), PLAN), {}),
    "update_rows": (
        embedding_bag.update_rows,
        ((TABLE, floats(6)), PLAN, floats(4, 4), lambda arrays, sums: (arrays[0] - sums, arrays[1] + 1)),
        {},
    ),
    "flash_attention": (flash_attention, (QUERIES, KEYS, KEYS), {"segment_ids": jnp.ones((2, 8), jnp.int32)}),
    "flash_attention_gradients": (
        flash_attention_gradients,
        (QUERIES, KEYS, KEYS, *flash_attention(QUERIES, KEYS, KEYS), QUERIES),
        {},
    ),
    "grouped_matmul": (grouped_matmul, (floats(6, 4), floats(3, 4, 5), integers([2, 0, 4])), {}),
    "grouped_gated_mlp": (
        grouped_gated_mlp,
        (floats(6, 4), floats(3, 4, 5), floats(3, 4, 5), floats(3, 5, 4), integers([2, 0, 4])),
        {},
    ),
    "dispatch": (routing.dispatch, (floats(3, 4), ROUTES), {}),
    "combine": (routing.combine, (floats(8, 4), ROUTES), {}),
    "choose_experts": (routing.choose_experts, (floats(3, 4), jnp.ones(3, bool)), {"k": 2}),
    "choose_tokens": (routing.choose_tokens, (floats(8, 4), jnp.ones(8, bool)), {"capacity": 2}),
    "quantize_blocks": (mx.quantize_blocks, (floats(4, 32), "mxfp8_e4m3"), {"axis": 1}),
    "dequantize_blocks": (mx.dequantize_blocks, (mx.quantize_blocks(floats(4, 32), "mxfp8_e4m3", axis=1),), {}),
    "matmul": (mx.matmul, (floats(2, 3, 32), mx.quantize_blocks(floats(32, 8), "mxfp8_e4m3", axis=0)), {}),
    "quantize_rows": (block_quant.quantize_rows, (TABLE, "int8"), {}),
    "quantize_rows_kmeans": (block_quant.quantize_rows_kmeans, (TABLE, "kmeans4"), {}),
    "dequantize_rows": (block_quant.dequantize_rows, (ROWS,), {}),
    "quantized_bag": (block_quant.quantized_bag, (ROWS, IDS, LENGTHS), {"weights": floats(5)}),
    "gather_quantized_rows": (block_quant.gather_quantized_rows, (ROWS, IDS), {}),
    "nonfinite_rows": (block_quant.nonfinite_rows, (ROWS,), {}),
    "fuse_rows": (block_quant.fuse_rows, (ROWS,), {}),
    "split_rows": (block_quant.split_rows, (block_quant.fuse_rows(ROWS), "int8", 4), {}),
    "spmm": (sampled_spmm.spmm, (GRAPH, floats(4, 5)), {"values": floats(4)}),
    "sddmm": (sampled_spmm.sddmm, (GRAPH, floats(3, 5), floats(4, 5)), {}),
    "sampled_spmm": (sampled_spmm.sampled_spmm, (GRAPH.csr, floats(4, 5), 2), {"values": floats(4)}),
    "segment_softmax": (sampled_spmm.segment_softmax, (GRAPH, floats(4, 2)), {}),
    "quantize": (quantize.quantize, (floats(4, 32), "mxfp8_e4m3"), {"axis": 1}),
    "dequantize": (quantize.dequantize, (BLOCKS,), {}),
    "cast": (quantize.cast, (floats(4, 32), "mxfp8_e4m3"), {"axis": 1}),
    "poisoned_blocks": (quantize.poisoned_blocks, (BLOCKS,), {}),
    "quantize to 8-bit floats": (float8.quantize, (TABLE, "fp8_e4m3"), {"axes": (1,)}),
    "stochastic_round": (stochastic.stochastic_round, (TABLE, jnp.bfloat16, jnp.zeros(TABLE.shape, jnp.uint32)), {}),
    "pack_bits": (packing.pack_bits, (integers([1, 2, 3, 4]), 4), {"axis": 0}),
    "unpack_bits": (packing.unpack_bits, (BYTES, 4), {"axis": 0}),
    "pack_blocks": (packing.pack_blocks, (BLOCKS,), {}),
    "unpack_blocks": (packing.unpack_blocks, (packing.pack_blocks(BLOCKS), "mxfp8_e4m3"), {"axis": 1, "length": 32}),
    "float_bits": (bits.float_bits, (TABLE.astype(jnp.float16),), {}),
    "parts of bits": (bits.parts, (bits.float_bits(TABLE),), {}),
    "compose": (bits.compose, bits.parts(bits.float_bits(TABLE)), {}),
    "to_dtype": (bits.to_dtype, (bits.float_bits(TABLE), jnp.bfloat16), {}),
    "scale_exponent": (scales.scale_exponent, (bits.float_bits(TABLE), E4M3, "floor"), {}),
    "store_exponent": (scales.store_exponent, (IDS, IDS > 3), {}),
    "load_exponent": (scales.load_exponent, (BYTES,), {}),
    "encode": (codec.encode, (TABLE, "bdr_mx9"), {}),
    "decode": (codec.decode, (codec.encode(TABLE, "bdr_mx9"), "bdr_mx9"), {"length": 4}),
    "clip_by_global_norm": (scaling.clip_by_global_norm, ({"w": TABLE}, 1.0), {}),
    "all_finite": (scaling.all_finite, ({"w": TABLE},), {}),
    "checksum": (ddp.checksum, (TABLE,), {}),
    "attend": (nn.attend, (QUERIES, KEYS, KEYS), {"segment_ids": jnp.ones((2, 8), jnp.int32)}),
    "linear_cross_entropy": (
        nn.linear_cross_entropy,
        (floats(2, 3, 4), floats(4, 5), jnp.ones((2, 3), jnp.int32), floats(2, 3)),
        {},
    ),
    "dropout": (nn.dropout, (TABLE, 0.5, jax.random.key(0)), {}),
    "products": (nn.products, (floats(2, 6, 4), floats(3, 6, 4)), {}),
    "project": (nn.project, (floats(2, 3, 4), floats(4, 5, 6)), {}),
    "rms_norm": (nn.rms_norm, (TABLE, floats(4), 1e-5, jnp.bfloat16), {}),
}


@pytest.mark.default_cases(first=25)
@pytest.mark.parametrize("name", CALLS)
def test_shapes_and_dtypes_are_those_of_the_annotations(name):
    function, args, options = CALLS[name]
    assert any("Array" in str(said) or "Rows" in str(said) for said in inspect.get_annotations(function).values())
    jax.eval_shape(lambda: checked(function)(*args, **options))  # traced, as compiling is what takes time


@pytest.mark.parametrize("package", [block_quant, embedding_bag, mx, sampled_spmm], ids=lambda p: p.__name__)
def test_every_public_function_of_kernels_states_the_shapes_of_its_arrays(package):
    for name, function in vars(package).items():
        if not name.startswith("_") and inspect.isfunction(function):
            plain = {a for a, said in inspect.get_annotations(function).items() if "jax.Array" in str(said)}
            plain -= {"key", "step"}  # keys of both kinds, and a function
            assert not plain, f"{name}: {plain}"


def test_a_wrong_shape_is_named():
    with pytest.raises(jaxtyping.TypeCheckError, match="lengths"):
        checked(embedding_bag.embedding_bag)(TABLE, IDS, LENGTHS[:, None])
