"""Attention on one TPU of a ring: keys and values of every device pass by, on their way from one to the next.

A kernel has N turns. It holds two places for keys and values in its main memory, one for those that it attends to and
one into which the device before it writes those of the next turn:

    turn            0               1               2               3            N = 4, device 0
    attends to      place 0: own    place 1: of 3   place 0: of 2   place 1: of 1
    sends           place 0         place 1         place 0
    receives        in place 1      in place 0      in place 1
    waits for                       arrival, room   arrival, room   arrival

A transfer is started before the attention of its turn, behind which it hides. Its target is a place that the next
device attended to, and sent on, in the turn before. That device gives room when it has done both: a semaphore that it
raises with the device before it, which waits for that. So no place is written while anything reads it, and neighbours
are at most a turn apart. Before all, neighbours tell each other that they are there to be written to.

Inside a turn the kernel walks along the list of visible pairs of blocks, as `flash_attention` does, and brings the keys
and values of the next pair into vector memory while it works on one. Keys that a block of queries does not see are not
read. The result of a block of queries, out and its log-sum-exp in float32, waits in main memory from turn to turn, and
the sums of the next turn begin with it, which is what merging by the log-sum-exp comes to. Positions, 4 bytes a key,
are gathered before the kernel: the list, in scalar memory, follows from them.

Compiled for v5e, v5p and v6e and interpreted in the tests, with a search for races; it has not run on a TPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax.kernels.flash_attention import pallas_tpu as flash
from scalejax.kernels.flash_attention.visibility import HIDDEN, Visibility
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.types import Copy, Number, Ref, RemoteCopy

_Device = dict[Any, Any]
"""{axis: index along it} of a device that along other axes is where this one is."""

_COLLECTIVE = 19
"""Names the barrier of this kernel. In one program another kernel of this number, or this one over another axis, would
take signals for its own that are not."""


def lacks(q: jax.Array, k: jax.Array, v: jax.Array, ranks: int) -> str | None:
    """Which part of a case is missing here, or None."""
    if ranks == 1:
        return "needs several devices along the axis; got 1."
    if q.shape[3] % flash.LANES:
        return f"takes heads that {flash.LANES} divides, as memory is cut; got {q.shape[3]}."

    def of_turns(x: jax.Array, dims: int, dtype: jax.typing.DTypeLike) -> Any:
        return jax.ShapeDtypeStruct((ranks * x.shape[0], *x.shape[1:dims]), dtype)

    visibility = _visibility(of_turns(q, 2, jnp.int32), of_turns(k, 2, jnp.int32), None)
    of_q, of_k, of_v = (of_turns(x, 4, x.dtype) for x in (q, k, v))
    return flash.lacks(of_q, of_k, of_v, visibility, d_lse=False)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    axis: str,
    window: int | None,
    scale: float,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, s, H, D] in the dtype of q, lse float32[B, H, s]); arguments as in `api.ring_attention`."""
    ranks = lax.axis_size(axis)
    batch, _, heads, width = q.shape
    kv_heads = k.shape[2]
    share = heads // kv_heads
    # Rows of the grid are those of the batch in every turn, in each of which keys are of another device.
    of_keys = in_turns(key_positions, axis)
    plan = flash.Plan(q, k, _visibility(jnp.tile(query_positions, (ranks, 1)), of_keys, window))
    steps, block = plan.most_pairs["query"], plan.query_block

    def kernel(*refs: Ref) -> None:
        pairs, starts, masks, (q, _aliased, out, held, *rest) = plan.split(refs)
        stored, found, left, of_sums = rest[:2], rest[2:4], rest[4:6], rest[6:9]
        blocks, arrived, read, written, *of_ring = rest[9:]
        sums = flash.Sums(*of_sums)
        results = _Results(stored, found, left, read, written)
        ring = _Ring(axis, ranks, held, *of_ring)
        pair = flash.BlockPair.read(pairs, starts, plan, by="query")
        place, head, step = (pl.program_id(number) for number in range(3))
        turn = place // batch
        is_first = (place % batch == 0) & (head == 0) & (step == 0)
        is_last = (place % batch == batch - 1) & (head == heads - 1) & (step == steps - 1)
        number = (place * heads + head) * steps + step

        def bring(place: jax.Array, head: jax.Array, step: jax.Array, number: jax.Array) -> Copy:
            """Keys and values of a pair of blocks to vector memory."""
            key_block = flash.key_block_of(pairs[plan.place("query", place, step)])
            keys = pl.ds(pl.multiple_of(key_block * plan.key_block, plan.key_block), plan.key_block)
            source = held.at[place // batch % 2, :, place % batch, head // share, keys]
            return pltpu.make_async_copy(source, blocks.at[number % 2], arrived.at[number % 2])

        here = bring(place, head, step, number)

        @pl.when(is_first)
        def _() -> None:
            ring.begin(turn)
            pl.when(pair.sees != HIDDEN)(here.start)

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            end = step == steps - 1
            next_step = jnp.where(end, 0, step + 1)
            next_head = jnp.where(end, jnp.where(head == heads - 1, 0, head + 1), head)
            next_place = place + jnp.where(end & (head == heads - 1), 1, 0)
            sees = flash.sees_of(pairs[plan.place("query", next_place, next_step)])
            pl.when(sees != HIDDEN)(bring(next_place, next_head, next_step, number + 1).start)

        # Of blocks of queries, which all turns have in the same order.
        mine = (place % batch * heads + head) * plan.query_blocks + pair.query_block

        @pl.when(pair.is_first & (turn == 0))
        def _() -> None:
            sums.clear()

        @pl.when(pair.is_first & (turn > 0))
        def _() -> None:
            pl.when(is_first)(lambda: results.begin_read(mine))
            results.end_read(mine)
            sums.resume(found[0][...], found[1][...])
            pl.when(mine < results.count - 1)(lambda: results.begin_read(mine + 1))

        @pair.each_kind
        def _(is_whole: bool) -> None:
            here.wait()
            keys, values = blocks[number % 2]
            scores = flash.dot(q[0, 0], keys, (1, 1)) * scale
            if not is_whole:
                scores = jnp.where(plan.visible(pair, masks, keys_first=False), scores, -jnp.inf)
            sums.add(scores, values)

        @pl.when(pair.is_last)
        def _() -> None:
            pl.when(mine > 0)(lambda: results.end_write(mine - 1))
            mixed, lse = sums.result()
            left[0][...], left[1][...], out[0, 0] = mixed, lse, mixed.astype(out.dtype)
            results.begin_write(mine)
            pl.when(is_last)(lambda: results.end_write(mine))

        pl.when(is_last)(functools.partial(ring.end, turn))

    by_query = plan.spec("query", (1, 1, block, width), lambda place, h, i, j: (place % batch, h, i, 0))

    def of_last_turn(place: Number, h: Number, i: Number, j: Number) -> tuple[Number, ...]:
        # One block until then, so that nothing is written.
        return tuple(jnp.where(place // batch == ranks - 1, x, 0) for x in (place % batch, h, i, 0))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    own = jnp.stack([plan.pad_keys(k), plan.pad_keys(v)])
    held = jnp.stack([own, jnp.zeros_like(own)])
    padded = (batch, heads, plan.padded_queries, width)
    out, _, _, lse = plan.call(
        kernel,
        by="query",
        grid=(ranks * batch, heads),
        operands=[plan.pad_queries(q), held],
        in_specs=[by_query, anywhere],
        out_shape=[
            jax.ShapeDtypeStruct(padded, q.dtype),
            jax.ShapeDtypeStruct(held.shape, held.dtype),
            jax.ShapeDtypeStruct(padded, jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, 1, plan.padded_queries), jnp.float32),
        ],
        out_specs=[plan.spec("query", (1, 1, block, width), of_last_turn), anywhere, anywhere, anywhere],
        scratch_shapes=[
            *[pltpu.VMEM(shape, jnp.float32) for shape in ((block, width), (1, block)) * 2],
            *flash.Sums.shapes(block, width),
            pltpu.VMEM((2, 2, plan.key_block, width), k.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        products=2,
        in_place={1: 1},
        parameters=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=plan.vmem_bytes,
            collective_id=_COLLECTIVE,
            has_side_effects=True,
        ),
        interpret=interpret,
        name="ring_attention",
    )
    return out[:, :, : q.shape[1]].swapaxes(1, 2), lse[:, :, 0, : q.shape[1]]


class _Results:
    """Results of blocks of queries, [B, H, S, D] and [B, H, 1, S] in main memory, on their way from and to it.

    Blocks are numbered in the order of a turn. The next one is read and the last one written beside the work on one.
    """

    def __init__(self, stored: Sequence[Ref], found: Sequence[Ref], left: Sequence[Ref], read: Ref, written: Ref):
        self.stored, self.found, self.left, self.read, self.written = stored, found, left, read, written
        batch, self.heads, queries, _ = stored[0].shape
        self.block = found[0].shape[0]
        self.of_head = queries // self.block
        self.count = batch * self.heads * self.of_head

    def begin_read(self, number: jax.Array) -> None:
        for copy in self._reading(number):
            copy.start()

    def end_read(self, number: jax.Array) -> None:
        for copy in self._reading(number):
            copy.wait()

    def begin_write(self, number: jax.Array) -> None:
        for copy in self._writing(number):
            copy.start()

    def end_write(self, number: jax.Array) -> None:
        for copy in self._writing(number):
            copy.wait()

    def _reading(self, number: jax.Array) -> list[Copy]:
        return [pltpu.make_async_copy(*pair, self.read) for pair in zip(self._at(number), self.found, strict=True)]

    def _writing(self, number: jax.Array) -> list[Copy]:
        return [pltpu.make_async_copy(*pair, self.written) for pair in zip(self.left, self._at(number), strict=True)]

    def _at(self, number: jax.Array) -> tuple[Ref, Ref]:
        row, head, block = (
            number // self.of_head // self.heads,
            number // self.of_head % self.heads,
            number % self.of_head,
        )
        queries = pl.ds(pl.multiple_of(block * self.block, self.block), self.block)
        return self.stored[0].at[row, head, queries], self.stored[1].at[row, head, :, queries]


class _Ring:
    """What passes between this device and its neighbours along an axis; see the module."""

    def __init__(self, axis: str, ranks: int, held: Ref, sent: Ref, received: Ref, room: Ref):
        self.ranks = ranks
        rank = lax.axis_index(axis)
        self.next: _Device = {axis: lax.rem(rank + 1, ranks)}
        self.before: _Device = {axis: lax.rem(rank + ranks - 1, ranks)}
        self.held, self.sent, self.received, self.room = held, sent, received, room

    def begin(self, turn: jax.Array) -> None:
        """Waits for what is attended to in a turn, and sends it on."""
        pl.when(turn == 0)(self._meet)
        pl.when(turn > 0)(lambda: wait_for_arrival(self._transfer(turn - 1)))

        @pl.when(turn < self.ranks - 1)
        def _() -> None:
            pl.when(turn > 0)(lambda: wait_for_room(self.room))
            self._transfer(turn).start()

    def end(self, turn: jax.Array) -> None:
        """All that was held in a turn has been read."""
        pl.when(turn < self.ranks - 1)(lambda: self._transfer(turn).wait_send())
        pl.when(turn < self.ranks - 2)(lambda: give_room(self.room, self.before))

    def _meet(self) -> None:
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in (self.next, self.before):
            pl.semaphore_signal(barrier, 1, device_id=neighbour)
        pl.semaphore_wait(barrier, 2)

    def _transfer(self, turn: jax.Array) -> RemoteCopy:
        """From the place of a turn to that of the turn after it on the next device."""
        source, target = turn % 2, (turn + 1) % 2
        return pltpu.make_async_remote_copy(
            self.held.at[source], self.held.at[target], self.sent, self.received.at[target], device_id=self.next
        )


def give_room(room: Ref, before: _Device) -> None:
    """Tells the device before this one that a place may be written."""
    pl.semaphore_signal(room, 1, device_id=before)


def wait_for_room(room: Ref) -> None:
    """Until the next device gave it."""
    pl.semaphore_wait(room, 1)


def wait_for_arrival(transfer: RemoteCopy) -> None:
    """Of what the device before this one sent by a transfer like this."""
    transfer.wait_recv()


def in_turns(of_device: jax.Array, axis: str) -> jax.Array:
    """[turns * B, s]: what each device has of its keys, [B, s], in the order in which they pass by this one."""
    ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    of_turn = (rank - jnp.arange(ranks)) % ranks
    return lax.all_gather(of_device, axis)[of_turn].reshape(ranks * of_device.shape[0], -1)


def _visibility(query_positions: jax.Array, key_positions: jax.Array, window: int | None) -> Visibility:
    return Visibility(
        causal=True,
        window=window,
        start=0,
        offset=None,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=None,
        key_segments=None,
    )
