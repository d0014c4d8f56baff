"""Attention on a GPU in Pallas Triton: a program per block of queries, or of keys, walks over what it sees.

    forward, d_q    one block of queries of one head stays in registers, blocks of keys pass by
    d_k, d_v        one block of keys of one key/value head stays, the blocks of queries of its G query heads pass by

A walk has three stretches (`visibility.stretches`): blocks that may be partly hidden, a run that is visible as a whole,
for which no mask is computed, and the rest. Nothing is added to what another program writes: no atomics, the same bits
every time. Operands stay [B, S, H, D] as they lie; a tile takes D values out of each row of H * D. Exponentials are
taken to base 2, with the scale of the scores and log2(e) in one factor.

jax 0.12 lowers these kernels with a warning that Triton will leave Pallas in some later version. They have
run on an H200 (benchmarks/results/gpu_kernels.md).
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax import compat
from scalejax.kernels.flash_attention import blocks
from scalejax.kernels.flash_attention.visibility import BackwardInputs, Visibility, stretches
from scalejax.kernels.types import Kernel, Number, Ref, Shapes

_LOG2_E = math.log2(math.e)
_FLOAT32_ON_GPU = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""No name for it on a CPU, where the kernels are interpreted."""


def lacks(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> str | None:
    """Which part of a case is missing here, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"computes in float32, bfloat16 and float16; got {q.dtype}."
    if q.shape[3] > 256:
        return f"holds heads of at most 256 values in registers; got {q.shape[3]}."
    return None


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """out [B, S, H, D] in the dtype of q, lse float32[B, H, S]; arguments as in `api.flash_attention`."""
    tiles = _Tiles(q, k, visibility, blocks.of_device(blocks.GPU, compat.device_kind()).forward)
    batch, length, heads, width = q.shape
    share = heads // k.shape[2]
    factor = scale * _LOG2_E

    def kernel(walks: Ref, starts: Ref, *refs: Ref) -> None:
        masks, (q, k, v, out, lse) = tiles.split(refs)
        # Later blocks of causal queries see more: they start first.
        block, head, row = tiles.query_blocks - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
        place, queries = tiles.queries(block), tiles.load_queries(q, row, head, block)
        look = tiles.of_queries(masks, starts, row, block)

        def step(is_whole: bool) -> Callable[[jax.Array, _Softmax], _Softmax]:
            def add(j: jax.Array, carry: _Softmax) -> _Softmax:
                highest, total, acc = carry
                keys, values = (tiles.load_keys(x, row, head // share, j, is_whole) for x in (k, v))
                scores = _dot(queries, keys, (1, 1)) * factor
                if not is_whole:
                    scores = jnp.where(look(j), scores, -jnp.inf)
                new = jnp.maximum(highest, scores.max(axis=1))
                # In a whole block each query has seen a key, so that its highest score is finite.
                shift = new if is_whole else jnp.where(new == -jnp.inf, 0.0, new)
                weights = jnp.exp2(scores - shift[:, None])
                decay = jnp.exp2(highest - shift)
                acc = acc * decay[:, None] + _dot(weights.astype(values.dtype), values, (1, 0))
                return new, total * decay + weights.sum(axis=1), acc

            return add

        start = (
            jnp.full((tiles.query_block,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.query_block,), jnp.float32),
            jnp.zeros((tiles.query_block, tiles.columns), jnp.float32),
        )
        highest, total, acc = tiles.walk(walks, row, block, step, start)
        sees_any = total > 0
        total = jnp.where(sees_any, total, 1.0)
        tiles.store(out, row * length + place, place < length, head, acc / total[:, None])
        value = jnp.where(sees_any, (highest + jnp.log2(total)) / _LOG2_E, -jnp.inf)
        plgpu.store(lse.at[row * heads + head, place], value, mask=place < length)

    out, lse = tiles.call(
        kernel,
        by="query",
        grid=(tiles.query_blocks, heads, batch),
        operands=[_rows(q), _rows(k), _rows(v)],
        out_shape=[
            jax.ShapeDtypeStruct((batch * length, heads * width), q.dtype),
            jax.ShapeDtypeStruct((batch * heads, length), jnp.float32),
        ],
        products=2,
        interpret=interpret,
        name="flash_attention_forward",
    )
    return out.reshape(q.shape), lse.reshape(batch, heads, length)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    scale: float,
    inputs: BackwardInputs,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v; arguments as in `xla.backward`."""
    batch, length, heads, _ = q.shape
    lse = (inputs.lse.astype(jnp.float32) * _LOG2_E).reshape(batch * heads, length)
    correction = inputs.correction.astype(jnp.float32).reshape(batch * heads, length)
    operands = [_rows(q), _rows(k), _rows(v), _rows(inputs.d_out), lse, correction]
    d_q = _query_gradient(q, k, visibility, scale, operands, interpret)
    d_k, d_v = _key_gradients(q, k, visibility, scale, operands, interpret)
    return d_q.reshape(q.shape), d_k.reshape(k.shape), d_v.reshape(v.shape)


def _query_gradient(
    q: jax.Array, k: jax.Array, visibility: Visibility, scale: float, operands: list[jax.Array], interpret: bool
) -> jax.Array:
    tiles = _Tiles(q, k, visibility, blocks.of_device(blocks.GPU, compat.device_kind()).query_gradient)
    batch, length, heads, _ = q.shape
    share = heads // k.shape[2]

    def kernel(walks: Ref, starts: Ref, *refs: Ref) -> None:
        masks, (q, k, v, d_out, lse, correction, d_q) = tiles.split(refs)
        block, head, row = tiles.query_blocks - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
        place = tiles.queries(block)
        queries, d_outs = (tiles.load_queries(x, row, head, block) for x in (q, d_out))
        lses, corrections = (tiles.load_row(x, row * heads + head, block) for x in (lse, correction))
        look = tiles.of_queries(masks, starts, row, block)

        def step(is_whole: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
            def add(j: jax.Array, acc: jax.Array) -> jax.Array:
                keys, values = (tiles.load_keys(x, row, head // share, j, is_whole) for x in (k, v))
                scores = _dot(queries, keys, (1, 1)) * (scale * _LOG2_E)
                if not is_whole:
                    scores = jnp.where(look(j), scores, -jnp.inf)
                weights = jnp.exp2(scores - lses[:, None])
                d_scores = weights * (_dot(d_outs, values, (1, 1)) - corrections[:, None])
                return acc + _dot(d_scores.astype(keys.dtype), keys, (1, 0))

            return add

        acc = tiles.walk(walks, row, block, step, jnp.zeros((tiles.query_block, tiles.columns), jnp.float32))
        tiles.store(d_q, row * length + place, place < length, head, acc * scale)

    return tiles.call(
        kernel,
        by="query",
        grid=(tiles.query_blocks, heads, batch),
        operands=operands,
        out_shape=jax.ShapeDtypeStruct(operands[0].shape, q.dtype),
        products=3,
        interpret=interpret,
        name="flash_attention_query_gradient",
    )


def _key_gradients(
    q: jax.Array, k: jax.Array, visibility: Visibility, scale: float, operands: list[jax.Array], interpret: bool
) -> tuple[jax.Array, jax.Array]:
    tiles = _Tiles(q, k, visibility, blocks.of_device(blocks.GPU, compat.device_kind()).key_gradients)
    batch, _, heads, _ = q.shape
    length, kv_heads = k.shape[1:3]
    share = heads // kv_heads

    def kernel(walks: Ref, starts: Ref, *refs: Ref) -> None:
        masks, (q, k, v, d_out, lse, correction, d_k, d_v) = tiles.split(refs)
        block, kv_head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        place = tiles.keys(block)
        keys, values = (tiles.load_keys(x, row, kv_head, block, False) for x in (k, v))
        look = tiles.of_keys(masks, starts, row, block)

        def of_head(number: jax.Array, sums: _Sums) -> _Sums:
            head = kv_head * share + number

            def step(is_whole: bool) -> Callable[[jax.Array, _Sums], _Sums]:
                def add(i: jax.Array, sums: _Sums) -> _Sums:
                    k_sum, v_sum = sums
                    queries, d_outs = (tiles.load_queries(x, row, head, i) for x in (q, d_out))
                    lses, corrections = (tiles.load_row(x, row * heads + head, i) for x in (lse, correction))
                    scores = _dot(keys, queries, (1, 1)) * (scale * _LOG2_E)  # keys x queries
                    if not is_whole:
                        scores = jnp.where(look(i), scores, -jnp.inf)
                    weights = jnp.exp2(scores - lses[None, :])
                    v_sum = v_sum + _dot(weights.astype(d_outs.dtype), d_outs, (1, 0))
                    d_scores = weights * (_dot(values, d_outs, (1, 1)) - corrections[None, :])
                    return k_sum + _dot(d_scores.astype(queries.dtype), queries, (1, 0)), v_sum

                return add

            return tiles.walk(walks, row, block, step, sums)

        zero = jnp.zeros((tiles.key_block, tiles.columns), jnp.float32)
        k_sum, v_sum = lax.fori_loop(0, share, of_head, (zero, zero))
        tiles.store(d_k, row * length + place, place < length, kv_head, k_sum * scale)
        tiles.store(d_v, row * length + place, place < length, kv_head, v_sum)

    return tiles.call(
        kernel,
        by="key",
        grid=(tiles.key_blocks, kv_heads, batch),
        operands=operands,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[1:3]],
        products=4,
        interpret=interpret,
        name="flash_attention_key_gradients",
    )


_Sums = tuple[jax.Array, jax.Array]
_Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Highest score, sum of weights and weighted sum so far of each query."""

Carry = TypeVar("Carry")


class _Tiles:
    """Blocks of one kernel: what is loaded for them, what is visible, the stretches of a walk."""

    def __init__(self, q: jax.Array, k: jax.Array, visibility: Visibility, sizes: blocks.GpuTiles):
        self.visibility = visibility
        self.sizes = sizes
        self.batch, self.length, _, self.width = q.shape
        self.key_length = k.shape[1]
        self.columns = max(16, pl.next_power_of_2(self.width))
        # Wide heads and wide values fill the registers and the shared memory with smaller blocks.
        fewer = pl.cdiv(self.columns * q.dtype.itemsize, 256)
        self.query_block, self.key_block = (
            min(max(16, most // fewer), max(16, pl.next_power_of_2(length)))
            for most, length in ((sizes.queries, self.length), (sizes.keys, self.key_length))
        )
        self.query_blocks = pl.cdiv(self.length, self.query_block)
        self.key_blocks = pl.cdiv(self.key_length, self.key_block)

    def call(
        self,
        kernel: Kernel,
        *,
        by: str,
        grid: tuple[int, int, int],
        operands: list[jax.Array],
        out_shape: Shapes,
        products: int,
        interpret: bool,
        name: str,
    ) -> Any:
        """The kernel on (walks, starts, masks, operands)."""
        given = self.visibility
        sees = given.pairs(self.length, self.key_length, self.query_block, self.key_block)
        walks = jnp.asarray(stretches(sees if by == "query" else sees.swapaxes(1, 2)))
        starts = jnp.full((self.batch,), given.start, jnp.int32) + (0 if given.offset is None else given.offset)
        masks = [x for x in self._mask_arrays() if x is not None]
        heads = operands[0].shape[1] // self.width
        scores = heads * int(given.most_pairs(self.length, self.key_length, self.query_block, self.key_block, by=by))
        scores *= self.batch * self.query_block * self.key_block
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=self.sizes.warps, num_stages=self.sizes.stages),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * scores * self.width,
                transcendentals=scores,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands + jax.tree.leaves(out_shape)),
            ),
            interpret=interpret,
            name=name,
        )(walks, starts, *masks, *operands)

    def _mask_arrays(self) -> tuple[jax.Array | None, ...]:
        given = self.visibility
        return given.query_positions, given.key_positions, given.query_segments, given.key_segments

    def split(self, refs: tuple[Ref, ...]) -> tuple[list[Ref | None], tuple[Ref, ...]]:
        """(positions and segments of queries and keys, None where there is no array; the other refs)."""
        rest = list(refs)
        masks = [None if array is None else rest.pop(0) for array in self._mask_arrays()]
        return masks, tuple(rest)

    def queries(self, block: Number) -> jax.Array:
        return block * self.query_block + lax.iota(jnp.int32, self.query_block)

    def keys(self, block: Number) -> jax.Array:
        return block * self.key_block + lax.iota(jnp.int32, self.key_block)

    def load_queries(self, ref: Ref, row: Number, head: Number, block: Number) -> jax.Array:
        """[queries of a block, D], zeros past the end."""
        place = self.queries(block)
        inside = None if self.length % self.query_block == 0 else place < self.length
        return self._load(ref, row * self.length + place, inside, head)

    def load_keys(self, ref: Ref, row: Number, head: Number, block: Number, is_whole: bool) -> jax.Array:
        """[keys of a block, D], zeros past the end, where a whole block does not reach."""
        place = self.keys(block)
        inside = None if is_whole or self.key_length % self.key_block == 0 else place < self.key_length
        return self._load(ref, row * self.key_length + place, inside, head)

    def load_row(self, ref: Ref, row: Number, block: Number) -> jax.Array:
        """[queries of a block] of [rows, S]."""
        place = self.queries(block)
        # Zeros will do past the end, for lse as well: d_out and correction are zero there, and so is what they add.
        return plgpu.load(ref.at[row, place], mask=place < self.length, other=0)

    def _load(self, ref: Ref, rows: jax.Array, inside: jax.Array | None, head: Number) -> jax.Array:
        at, mask = self._tile(ref, rows, inside, head)
        return plgpu.load(at, mask=mask, other=None if mask is None else 0)

    def store(self, ref: Ref, rows: jax.Array, inside: jax.Array, head: Number, value: jax.Array) -> None:
        at, mask = self._tile(ref, rows, inside, head)
        plgpu.store(at, value.astype(ref.dtype), mask=mask)

    def _tile(self, ref: Ref, rows: jax.Array, inside: jax.Array | None, head: Number) -> tuple[Any, jax.Array | None]:
        column = lax.iota(jnp.int32, self.columns)
        mask = None if inside is None else inside[:, None]
        if self.columns != self.width:
            of_head = (column < self.width)[None, :]
            mask = of_head if mask is None else mask & of_head
        if mask is not None:
            mask = jnp.broadcast_to(mask, (rows.shape[0], self.columns))
        return ref.at[rows[:, None], (head * self.width + column)[None, :]], mask

    def walk(
        self,
        walks: Ref,
        row: Number,
        block: Number,
        step: Callable[[bool], Callable[[jax.Array, Carry], Carry]],
        carry: Carry,
    ) -> Carry:
        """Over what a block sees: step(is_whole) is the body of a loop over blocks."""
        at = 0 if self.visibility.is_same_for_all_rows else row
        first, begin, end, last = (walks[at, block, n] for n in range(4))
        if not self.visibility.sees_all or self.key_length % self.key_block:
            carry = lax.fori_loop(first, begin, step(False), carry)
        carry = lax.fori_loop(begin, end, step(True), carry)
        if not self.visibility.sees_all or self.key_length % self.key_block:
            carry = lax.fori_loop(end, last, step(False), carry)
        return carry

    def of_queries(
        self, masks: list[Ref | None], starts: Ref, row: Number, block: Number
    ) -> Callable[[Number], jax.Array]:
        """A function of a block of keys: which of them these queries see, [queries, keys]."""
        return self._look(masks, starts, row, block, by="query")

    def of_keys(
        self, masks: list[Ref | None], starts: Ref, row: Number, block: Number
    ) -> Callable[[Number], jax.Array]:
        """A function of a block of queries: which of them see these keys, [keys, queries]."""
        return self._look(masks, starts, row, block, by="key")

    def _look(
        self, masks: list[Ref | None], starts: Ref, row: Number, block: Number, *, by: str
    ) -> Callable[[Number], jax.Array]:
        by_queries = by == "query"
        start = starts[row]

        def query_side(block: Number) -> tuple[jax.Array, jax.Array | None]:
            place = self.queries(block)
            inside = place < self.length
            position = start + place if masks[0] is None else plgpu.load(masks[0].at[row, place], mask=inside, other=0)
            return position, None if masks[2] is None else plgpu.load(masks[2].at[row, place], mask=inside, other=0)

        def key_side(block: Number) -> tuple[jax.Array, jax.Array | None]:
            place = self.keys(block)
            inside = place < self.key_length
            position = place if masks[1] is None else plgpu.load(masks[1].at[row, place], mask=inside, other=0)
            return position, None if masks[3] is None else plgpu.load(masks[3].at[row, place], mask=inside, other=0)

        mine = query_side(block) if by_queries else key_side(block)

        def look(other: Number) -> jax.Array:
            theirs = key_side(other) if by_queries else query_side(other)
            mine_ = tuple(None if x is None else x[:, None] for x in mine)
            theirs_ = tuple(None if x is None else x[None, :] for x in theirs)
            (query, query_segment), (key, key_segment) = (mine_, theirs_) if by_queries else (theirs_, mine_)
            assert query is not None
            assert key is not None
            visible = self.visibility.compare(query, key, query_segment, key_segment)
            if self.key_length % self.key_block:
                place = self.keys(other if by_queries else block)
                is_key = (place < self.key_length)[None, :] if by_queries else (place < self.key_length)[:, None]
                visible = is_key if visible is None else visible & is_key
            assert visible is not None  # else the walk has no such stretch
            shape = (self.query_block, self.key_block) if by_queries else (self.key_block, self.query_block)
            return jnp.broadcast_to(visible, shape)

        return look


def _rows(x: jax.Array) -> jax.Array:
    """[B, N, heads, D] -> [B * N, heads * D], as it lies."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3])


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product summed in float32; of float32 operands by three products of tensor cores, which is nearly exact."""
    precision: lax.PrecisionLike = lax.Precision.DEFAULT
    if a.dtype == jnp.float32:
        precision = _FLOAT32_ON_GPU if compat.platform() == "gpu" else lax.Precision.HIGHEST
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
