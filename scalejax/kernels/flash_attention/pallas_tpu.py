"""Attention on a TPU's core: blocks of queries pass over the blocks of keys that they may see, and over no others.

What is visible is known by pairs of blocks before a kernel starts (`Visibility.pairs`). The pairs that are not hidden
are listed in scalar memory and the grid walks along the list:

    keys      0    1    2    3                      forward, d_q: by queries        d_k, d_v: by keys
    queries 0 partly                                0,0 | 1,0 1,1 | 2,1 2,2 | 3,2 3,3   0,0 1,0 | 1,1 2,1 | ...
            1 whole partly                          sums stay in vector memory from the first pair of a block to its
            2       whole partly                    last, where they are written
            3             whole partly              (a window of causal attention)

A block that sees nothing has one pair all the same, in which it gets its zeros. Lists differ by row where documents or
offsets do; their length is the most that the shapes allow, and steps past the pairs of a row repeat its last blocks,
which moves nothing. Inside a pair, masks are computed only where it is partly visible.

The kernel for d_k and d_v works on transposed scores [keys, queries]: products then need no transposition, and what
belongs to a query (lse, its correction, position, segment) is a row, as it lies in memory. Heads of queries that share
a head of keys follow each other, and add up in the same sums.

Compiled for every chip and interpreted in the tests; it has not run on a TPU.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.kernels.flash_attention import blocks
from scalejax.kernels.flash_attention.visibility import HIDDEN, PARTLY, WHOLE, BackwardInputs, Visibility
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.types import Kernel, Number, Ref, Shapes

LANES = 128
_MOST_BLOCKS = 2**14
"""Of queries or keys in a row: a pair is one number of 14 + 14 + 2 bits."""
_MOST_PAIRS = 2**17
"""Pairs of all rows: 4 bytes each in scalar memory."""


def lacks(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> str | None:
    """Which part of a case is missing here, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16; got {q.dtype}."
    if q.shape[3] > 512:
        return f"holds heads of at most 512 values in vector memory; got {q.shape[3]}."
    plan = Plan(q, k, visibility)
    most = max(plan.most_pairs.values())
    rows = 1 if visibility.is_same_for_all_rows else q.shape[0]
    if max(plan.query_blocks, plan.key_blocks) > _MOST_BLOCKS or rows * most > _MOST_PAIRS:
        return (
            f"lists pairs of blocks in scalar memory, at most {_MOST_PAIRS}; S = {q.shape[1]}, T = {k.shape[1]} with "
            f"{rows} different rows have {rows * most}. Cut the batch or the sequence."
        )
    return None


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float, *, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """out [B, S, H, D] in the dtype of q, lse float32[B, H, S]; arguments as in `api.flash_attention`."""
    plan = Plan(q, k, visibility)
    batch, _, heads, width = q.shape
    share = heads // k.shape[2]
    queries, keys = plan.query_block, plan.key_block

    def kernel(*refs: Ref) -> None:
        pairs, starts, masks, (q, k, v, out, lse, *scratch) = plan.split(refs)
        pair = BlockPair.read(pairs, starts, plan, by="query")
        sums = Sums(*scratch)

        @pl.when(pair.is_first)
        def _() -> None:
            sums.clear()

        @pair.each_kind
        def _(is_whole: bool) -> None:
            scores = dot(q[0, 0], k[0, 0], (1, 1)) * scale
            if not is_whole:
                scores = jnp.where(plan.visible(pair, masks, keys_first=False), scores, -jnp.inf)
            sums.add(scores, v[0, 0])

        @pl.when(pair.is_last)
        def _() -> None:
            mixed, lse[0, 0] = sums.result()
            out[0, 0] = mixed.astype(out.dtype)

    by_query = plan.spec("query", (1, 1, queries, width), lambda b, h, i, j: (b, h, i, 0))
    by_key = plan.spec("query", (1, 1, keys, width), lambda b, h, i, j: (b, h // share, j, 0))
    out, lse = plan.call(
        kernel,
        by="query",
        grid=(batch, heads),
        operands=[plan.pad_queries(q), plan.pad_keys(k), plan.pad_keys(v)],
        in_specs=[by_query, by_key, by_key],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, plan.padded_queries, width), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, plan.padded_queries), jnp.float32),
        ],
        out_specs=[by_query, plan.spec("query", (1, 1, 1, queries), lambda b, h, i, j: (b, h, 0, i))],
        scratch_shapes=Sums.shapes(queries, width),
        products=2,
        interpret=interpret,
        name="flash_attention_forward",
    )
    return out[:, :, : q.shape[1]].swapaxes(1, 2), lse[:, :, 0, : q.shape[1]]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    scale: float,
    inputs: BackwardInputs,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v; arguments as in `xla.backward`."""
    plan = Plan(q, k, visibility)
    operands = [
        plan.pad_queries(q),
        plan.pad_keys(k),
        plan.pad_keys(v),
        plan.pad_queries(inputs.d_out),
        # e^(s - inf) = 0: queries that fill up the last block add nothing to the gradients of keys.
        plan.pad_row(inputs.lse, jnp.inf),
        plan.pad_row(inputs.correction, 0.0),
    ]
    d_q = _query_gradient(plan, operands, scale, interpret)
    d_k, d_v = _key_gradients(plan, operands, scale, interpret)
    return (
        d_q[:, :, : q.shape[1]].swapaxes(1, 2),
        d_k[:, :, : k.shape[1]].swapaxes(1, 2),
        d_v[:, :, : k.shape[1]].swapaxes(1, 2),
    )


def _query_gradient(plan: "Plan", operands: list[jax.Array], scale: float, interpret: Interpret) -> jax.Array:
    batch, heads, _, width = operands[0].shape
    share = heads // operands[1].shape[1]

    def kernel(*refs: Ref) -> None:
        pairs, starts, masks, (q, k, v, d_out, lse, correction, d_q, acc) = plan.split(refs)
        pair = BlockPair.read(pairs, starts, plan, by="query")

        @pl.when(pair.is_first)
        def _() -> None:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)

        @pair.each_kind
        def _(is_whole: bool) -> None:
            scores = dot(q[0, 0], k[0, 0], (1, 1)) * scale
            if not is_whole:
                scores = jnp.where(plan.visible(pair, masks, keys_first=False), scores, -jnp.inf)
            weights = jnp.exp(scores - _as_column(lse[0, 0]))
            d_weights = dot(d_out[0, 0], v[0, 0], (1, 1))
            d_scores = weights * (d_weights - _as_column(correction[0, 0]))
            acc[...] += dot(d_scores.astype(k.dtype), k[0, 0], (1, 0))

        @pl.when(pair.is_last)
        def _() -> None:
            d_q[0, 0] = (acc[...] * scale).astype(d_q.dtype)

    by_query = plan.spec("query", (1, 1, plan.query_block, width), lambda b, h, i, j: (b, h, i, 0))
    by_key = plan.spec("query", (1, 1, plan.key_block, width), lambda b, h, i, j: (b, h // share, j, 0))
    row = plan.spec("query", (1, 1, 1, plan.query_block), lambda b, h, i, j: (b, h, 0, i))
    return plan.call(
        kernel,
        by="query",
        grid=(batch, heads),
        operands=operands,
        in_specs=[by_query, by_key, by_key, by_query, row, row],
        out_shape=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        out_specs=by_query,
        scratch_shapes=[pltpu.VMEM((plan.query_block, width), jnp.float32)],
        products=3,
        interpret=interpret,
        name="flash_attention_query_gradient",
    )


def _key_gradients(
    plan: "Plan", operands: list[jax.Array], scale: float, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    batch, kv_heads, _, width = operands[1].shape
    share = operands[0].shape[1] // kv_heads

    def kernel(*refs: Ref) -> None:
        pairs, starts, masks, (q, k, v, d_out, lse, correction, d_k, d_v, k_sum, v_sum) = plan.split(refs)
        pair = BlockPair.read(pairs, starts, plan, by="key")
        head = pl.program_id(3)

        @pl.when(pair.is_first & (head == 0))
        def _() -> None:
            k_sum[...] = jnp.zeros(k_sum.shape, jnp.float32)
            v_sum[...] = jnp.zeros(v_sum.shape, jnp.float32)

        @pair.each_kind
        def _(is_whole: bool) -> None:
            scores = dot(k[0, 0], q[0, 0], (1, 1)) * scale  # keys x queries
            if not is_whole:
                scores = jnp.where(plan.visible(pair, masks, keys_first=True), scores, -jnp.inf)
            weights = jnp.exp(scores - lse[0, 0])
            v_sum[...] += dot(weights.astype(d_out.dtype), d_out[0, 0], (1, 0))
            d_weights = dot(v[0, 0], d_out[0, 0], (1, 1))
            d_scores = weights * (d_weights - correction[0, 0])
            k_sum[...] += dot(d_scores.astype(q.dtype), q[0, 0], (1, 0))

        @pl.when(pair.is_last & (head == share - 1))
        def _() -> None:
            d_k[0, 0] = (k_sum[...] * scale).astype(d_k.dtype)
            d_v[0, 0] = v_sum[...].astype(d_v.dtype)

    def of_head(make: _BlockIndex) -> _BlockIndex:
        return lambda b, n, i, j, g: make(b, n * share + g, i, j)

    by_query = plan.spec("key", (1, 1, plan.query_block, width), of_head(lambda b, h, i, j: (b, h, i, 0)))
    by_key = plan.spec("key", (1, 1, plan.key_block, width), lambda b, n, i, j, g: (b, n, j, 0))
    row = plan.spec("key", (1, 1, 1, plan.query_block), of_head(lambda b, h, i, j: (b, h, 0, i)))
    return plan.call(
        kernel,
        by="key",
        grid=(batch, kv_heads),
        inner=(share,),
        operands=operands,
        in_specs=[by_query, by_key, by_key, by_query, row, row],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[1:3]],
        out_specs=[by_key, by_key],
        scratch_shapes=[pltpu.VMEM((plan.key_block, width), jnp.float32)] * 2,
        products=4,
        interpret=interpret,
        name="flash_attention_key_gradients",
    )


_BlockIndex = Callable[..., tuple[Number, ...]]
"""(row, head, block of queries, block of keys, inner...) -> the block of an operand."""


class Sums(NamedTuple):
    """What is known of a block of queries while blocks of keys pass.

    Attributes:
      highest: float32[queries, 128], the highest score of each query.
      total: float32[queries, 128], the sum of its weights, e^(score - highest).
      acc: float32[queries, D], values by these weights.
    """

    highest: Ref
    total: Ref
    acc: Ref

    @staticmethod
    def shapes(queries: int, width: int) -> list[pl.MemoryRef]:
        """Of the scratch memory."""
        return [pltpu.VMEM((queries, size), jnp.float32) for size in (LANES, LANES, width)]

    def clear(self) -> None:
        """No key has been seen."""
        self.highest[...] = jnp.full(self.highest.shape, -jnp.inf, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def resume(self, out: jax.Array, lse: jax.Array) -> None:
        """Other keys have been seen, with this result."""
        highest = _as_column(lse)
        self.highest[...] = jnp.broadcast_to(highest, self.highest.shape)
        self.total[...] = jnp.broadcast_to(jnp.where(highest == -jnp.inf, 0.0, 1.0), self.total.shape)
        self.acc[...] = out

    def add(self, scores: jax.Array, v: jax.Array) -> None:
        """Scores [queries, keys], -inf where hidden, of keys with these values."""
        before = self.highest[:, :1]
        after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        # A query that has seen no key yet would have -inf - -inf, which is NaN, where its weights are 0.
        shift = jnp.where(after == -jnp.inf, 0.0, after)
        weights = jnp.exp(scores - shift)
        decay = jnp.exp(before - shift)
        self.highest[...] = jnp.broadcast_to(after, self.highest.shape)
        added = self.total[:, :1] * decay + weights.sum(axis=1, keepdims=True)
        self.total[...] = jnp.broadcast_to(added, self.total.shape)
        self.acc[...] = self.acc[...] * decay + dot(weights.astype(v.dtype), v, (1, 0))

    def result(self) -> tuple[jax.Array, jax.Array]:
        """(out float32[queries, D], lse float32[1, queries])."""
        sees_any = self.total[...] > 0
        divisor = jnp.where(sees_any, self.total[...], 1.0)
        lse = jnp.where(sees_any, self.highest[...] + jnp.log(divisor), -jnp.inf)
        return self.acc[...] / divisor[:, :1], lse.T[:1]


class Plan:
    """Blocks of a call, the pairs of them that a grid walks along, and what the three kernels share of their calls."""

    def __init__(self, q: jax.Array, k: jax.Array, visibility: Visibility):
        sizes = blocks.of_device(blocks.TPU, compat.device_kind())
        self.visibility = visibility
        self.queries, self.keys = q.shape[1], k.shape[1]
        # One block of all of them may have any size that the tiles allow; several are tiles of 128 lanes.
        self.query_block = _round_up(self.queries, 16) if self.queries <= sizes.queries else sizes.queries
        self.key_block = min(_round_up(self.keys, LANES), sizes.keys)
        self.query_blocks = pl.cdiv(self.queries, self.query_block)
        self.key_blocks = pl.cdiv(self.keys, self.key_block)
        self.padded_queries = self.query_blocks * self.query_block
        self.padded_keys = self.key_blocks * self.key_block
        self.vmem_bytes = sizes.vmem_bytes
        self.blocks = (self.queries, self.keys, self.query_block, self.key_block)
        self.most_pairs = {by: visibility.most_pairs(*self.blocks, by=by) for by in ("query", "key")}

    def pairs(self, by: str) -> jax.Array:
        """int32[rows, pairs]: the pairs of each row that are not hidden, in the order of its blocks of queries or keys.

        A pair is block of queries * 2^16 + block of keys * 2^2 + what it sees.
        """
        sees = jnp.asarray(self.visibility.pairs(*self.blocks))  # rows, blocks of queries, blocks of keys
        query = lax.broadcasted_iota(jnp.int32, sees.shape, 1)
        key = lax.broadcasted_iota(jnp.int32, sees.shape, 2)
        numbers = (query << 16) | (key << 2) | sees
        if by == "key":
            sees, numbers = sees.swapaxes(1, 2), numbers.swapaxes(1, 2)
        wanted = sees != HIDDEN
        empty = ~wanted.any(axis=2, keepdims=True)
        wanted = wanted | (empty & (jnp.arange(wanted.shape[2]) == 0)[None, None])
        rows = sees.shape[0]
        wanted, numbers = wanted.reshape(rows, -1), numbers.reshape(rows, -1)
        # The wanted ones first, in their order; then the last of them again, as hidden.
        most = self.most_pairs[by]
        place = jnp.where(wanted, jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1, most)
        row = lax.broadcasted_iota(jnp.int32, place.shape, 0)
        found = jnp.full((rows, most), -1, jnp.int32).at[row, place].set(numbers, mode="drop")
        last = jnp.take_along_axis(found, wanted.sum(axis=1, keepdims=True, dtype=jnp.int32) - 1, axis=1)
        return jnp.where(found < 0, (last >> 2) << 2, found)

    def spec(self, by: str, shape: tuple[int, ...], place: _BlockIndex) -> pl.BlockSpec:
        """A block of an operand, at place(row, head, block of queries, block of keys, inner...)."""

        def index(row: Number, head: Number, step: Number, *rest: "Ref") -> tuple[Number, ...]:
            *inner, pairs, _ = rest
            number = pairs[self.place(by, row, step)]
            return place(row, head, query_block_of(number), key_block_of(number), *inner)

        return pl.BlockSpec(shape, index)

    def place(self, by: str, row: Number, step: Number) -> Number:
        """Where the pair of a step is in the flat list."""
        return step if self.visibility.is_same_for_all_rows else row * self.most_pairs[by] + step

    def call(
        self,
        kernel: Kernel,
        *,
        by: str,
        grid: tuple[int, int],
        operands: list[jax.Array],
        in_specs: list[pl.BlockSpec],
        out_shape: Shapes,
        out_specs: pl.BlockSpec | list[pl.BlockSpec],
        scratch_shapes: Sequence[pl.MemoryRef | pltpu.SemaphoreType],
        products: int,
        interpret: Interpret,
        name: str,
        inner: tuple[int, ...] = (),
        in_place: dict[int, int] | None = None,
        parameters: pltpu.CompilerParams | None = None,
    ) -> Any:
        """The kernel over all pairs; its refs are what `split` takes apart.

        Where rows of the grid are more than those of the first operand, or the kernel writes to an operand, its caller
        says so: `in_place` has the numbers of such operands and of the results that they are.
        """
        rows, width = grid[0], operands[0].shape[3]
        starts = jnp.broadcast_to(
            jnp.int32(self.visibility.start) + (0 if self.visibility.offset is None else self.visibility.offset),
            (rows,),
        )
        masks, mask_specs = self._mask_operands(by)
        steps = (*grid, self.most_pairs[by], *inner)
        scores = math.prod(steps) * self.query_block * self.key_block
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=steps,
                in_specs=[*mask_specs, *in_specs],
                out_specs=out_specs,
                scratch_shapes=scratch_shapes,
            ),
            out_shape=out_shape,
            input_output_aliases={2 + len(masks) + number: result for number, result in (in_place or {}).items()},
            compiler_params=parameters
            or pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel") + ("arbitrary",) * (1 + len(inner)),
                vmem_limit_bytes=self.vmem_bytes,
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * scores * width,
                transcendentals=scores,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands + jax.tree.leaves(out_shape)),
            ),
            interpret=interpret,
            name=name,
        )(self.pairs(by).reshape(-1), starts, *masks, *operands)

    def _mask_operands(self, by: str) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
        """Positions and segments, where they are arrays: [B, 1, padded], by blocks."""
        found, specs = [], []
        for by_query, array in (
            (True, self.visibility.query_positions),
            (False, self.visibility.key_positions),
            (True, self.visibility.query_segments),
            (False, self.visibility.key_segments),
        ):
            if array is None:
                continue
            length, block = (self.padded_queries, self.query_block) if by_query else (self.padded_keys, self.key_block)
            found.append(jnp.pad(array, ((0, 0), (0, length - array.shape[1])))[:, None])

            def place(
                b: Number, h: Number, i: Number, j: Number, *rest: Number, by_query: bool = by_query
            ) -> tuple[Number, ...]:
                return (b, 0, i if by_query else j)

            specs.append(self.spec(by, (1, 1, block), place))
        return found, specs

    def split(self, refs: tuple[Ref, ...]) -> tuple[Ref, Ref, list[Ref | None], tuple[Ref, ...]]:
        """(pairs, position of query 0 of each row, the mask operands or None for each, the other refs)."""
        pairs, starts, *rest = refs
        given = self.visibility
        masks = [
            None if array is None else rest.pop(0)
            for array in (given.query_positions, given.key_positions, given.query_segments, given.key_segments)
        ]
        return pairs, starts, masks, tuple(rest)

    def visible(self, pair: "BlockPair", masks: list[Ref | None], *, keys_first: bool) -> jax.Array:
        """bool of the scores of a pair, [queries, keys] or transposed."""
        shape = (self.key_block, self.query_block) if keys_first else (self.query_block, self.key_block)
        query_axis, key_axis = (1, 0) if keys_first else (0, 1)

        def along(ref: Ref | None, axis: int) -> jax.Array:
            assert ref is not None  # both sides have positions and segments, or neither
            row = ref[0]
            return row if axis == 1 else _as_column(row)

        key_place = pair.key_block * self.key_block + lax.broadcasted_iota(jnp.int32, shape, key_axis)
        if masks[0] is not None:
            query, key = along(masks[0], query_axis), along(masks[1], key_axis)
        else:
            first = pair.start + pair.query_block * self.query_block
            query, key = first + lax.broadcasted_iota(jnp.int32, shape, query_axis), key_place
        segments = (None, None)
        if masks[2] is not None:
            segments = along(masks[2], query_axis), along(masks[3], key_axis)
        visible = self.visibility.compare(query, key, *segments)
        if self.keys % self.key_block:
            is_key = key_place < self.keys
            visible = is_key if visible is None else visible & is_key
        # Where nothing hides a key every pair is whole, and nobody takes this branch.
        return jnp.full(shape, True) if visible is None else jnp.broadcast_to(visible, shape)

    def pad_queries(self, x: jax.Array) -> jax.Array:
        """[B, S, H, D] -> [B, H, padded, D]."""
        return jnp.pad(x, ((0, 0), (0, self.padded_queries - self.queries), (0, 0), (0, 0))).swapaxes(1, 2)

    def pad_keys(self, x: jax.Array) -> jax.Array:
        """[B, T, K, D] -> [B, K, padded, D]."""
        return jnp.pad(x, ((0, 0), (0, self.padded_keys - self.keys), (0, 0), (0, 0))).swapaxes(1, 2)

    def pad_row(self, x: jax.Array, fill: float) -> jax.Array:
        """[B, H, S] -> float32[B, H, 1, padded]."""
        pad = ((0, 0), (0, 0), (0, self.padded_queries - self.queries))
        return jnp.pad(x.astype(jnp.float32), pad, constant_values=fill)[:, :, None]


class BlockPair:
    """The pair of blocks of a step of the grid."""

    def __init__(self, number: jax.Array, start: jax.Array, is_first: jax.Array, is_last: jax.Array):
        self.start = start
        self.query_block = query_block_of(number)
        self.key_block = key_block_of(number)
        self.sees = sees_of(number)
        self.is_first = is_first
        self.is_last = is_last

    @classmethod
    def read(cls, pairs: Ref, starts: Ref, plan: Plan, *, by: str) -> "BlockPair":
        row, step, steps = pl.program_id(0), pl.program_id(2), plan.most_pairs[by]

        def block(step: Number) -> jax.Array:
            number = pairs[plan.place(by, row, step)]
            return query_block_of(number) if by == "query" else key_block_of(number)

        here = block(step)
        is_first = (step == 0) | (block(jnp.maximum(step - 1, 0)) != here)
        is_last = (step == steps - 1) | (block(jnp.minimum(step + 1, steps - 1)) != here)
        return cls(pairs[plan.place(by, row, step)], starts[row], is_first, is_last)

    def each_kind(self, body: Callable[[bool], None]) -> None:
        """Runs body(is_whole) for a pair that is visible."""
        pl.when(self.sees == WHOLE)(functools.partial(body, True))
        pl.when(self.sees == PARTLY)(functools.partial(body, False))


def query_block_of(number: jax.Array) -> jax.Array:
    """Of the number of a pair, see `Plan.pairs`; so are the others."""
    return number >> 16


def key_block_of(number: jax.Array) -> jax.Array:
    return (number >> 2) & (_MOST_BLOCKS - 1)


def sees_of(number: jax.Array) -> jax.Array:
    return number & 3


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product summed in float32, of float32 operands as they are."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _as_column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    return row.reshape(row.shape[1], 1)


def _round_up(number: int, multiple: int) -> int:
    return pl.cdiv(number, multiple) * multiple
