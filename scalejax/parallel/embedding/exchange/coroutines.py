"""One all_to_all for everything that travels at a time, of all stacks.

What a device does in an exchange is a coroutine, written as a generator: it yields what it sends and is handed what
came. `together` makes one of several that go in step, hop by hop; `complete` runs one to its end, and what is sent over
the same mesh axes at a time goes by one collective, each block as full rows of 128:

    stack 0            float32[N, a, 8]                                                          float32[N, a, 8]
    stack 1            float32[N, b, 48]  -->  float32[N, rows, 128]  --all_to_all-->  ...  -->  float32[N, b, 48]
    stack 1, bags      float32[N, c, 48]                                                         float32[N, c, 48]

What is alone travels as it is. Arrays of several dtypes go as 32-bit words, which all platforms move as they are (a CPU
would widen 16-bit floats): in the words of 16-bit numbers one half of the rows lies above the other, of bytes four
quarters, because numbers side by side in a word would have to change lanes.

Runs inside a shard_map.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Sending:
    """Blocks that a device sends.

    Attributes:
      axes: Mesh axes of n devices.
      blocks: [n, size, ...]: block i goes to device i of them, and that of device i comes.
    """

    axes: tuple[str, ...]
    blocks: jax.Array


ExchangeCoroutine = Generator[list[Sending], Any, Result]
"""Yields what is sent, and is sent what came for it, array by array: list[jax.Array]."""


def send(axes: tuple[str, ...], blocks: jax.Array) -> ExchangeCoroutine[jax.Array]:
    """One array there; what came, of the same shape."""
    (came,) = yield [Sending(axes, blocks)]
    return came


def together(coroutines: Sequence[ExchangeCoroutine[Result]]) -> ExchangeCoroutine[list[Result]]:
    """Coroutines in step: what they send first goes first, and so on until the longest is at its end."""
    results: dict[int, Result] = {}
    came: dict[int, list[jax.Array] | None] = dict.fromkeys(range(len(coroutines)))
    while True:
        sent: dict[int, list[Sending]] = {}
        for number, arrays in came.items():
            try:
                sent[number] = coroutines[number].send(arrays)
            except StopIteration as end:
                results[number] = end.value
        if not sent:
            return [results[number] for number in range(len(coroutines))]
        arrived = iter((yield [*itertools.chain.from_iterable(sent.values())]))
        came = {number: [next(arrived) for _ in own] for number, own in sent.items()}


def complete(coroutine: ExchangeCoroutine[Result]) -> Result:
    """Runs a coroutine to its end, with one all_to_all for all that it sends over the same axes at a time."""
    came = None
    while True:
        try:
            sent = coroutine.send(came)
        except StopIteration as end:
            return end.value
        came = [one.blocks for one in sent]
        for axes in dict.fromkeys(one.axes for one in sent):
            which = [number for number, one in enumerate(sent) if one.axes == axes]
            for number, blocks in zip(which, _all_to_all([sent[n].blocks for n in which], axes), strict=True):
                came[number] = blocks


def _all_to_all(parts: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    if len(parts) == 1:
        return [lax.all_to_all(parts[0], axes, 0, 0, tiled=True)]
    as_words = len({part.dtype for part in parts}) > 1
    sent = [_words(_lanes(part)) if as_words else _lanes(part) for part in parts]
    ends = itertools.accumulate(part.shape[1] for part in sent[:-1])
    came = lax.all_to_all(jnp.concatenate(sent, axis=1), axes, 0, 0, tiled=True)
    back = []
    for own, part in zip(jnp.split(came, [*ends], axis=1), parts, strict=True):
        flat = (_of_words(own, part.dtype) if as_words else own).reshape(part.shape[0], -1)
        back.append(flat[:, : math.prod(part.shape[1:])].reshape(part.shape))
    return back


_LANES = 128


def _lanes(blocks: jax.Array) -> jax.Array:
    """[n, ...] -> [n, rows, 128], filled up with zeros: a block begins with a row, and all rows are full on a TPU."""
    flat = blocks.reshape(blocks.shape[0], -1)
    return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % _LANES))).reshape(blocks.shape[0], -1, _LANES)


def _words(rows: jax.Array) -> jax.Array:
    """[n, rows, 128] -> uint32[n, rows', 128], the same bits, filled up with zeros."""
    count, size = rows.shape[0], rows.dtype.itemsize
    if size >= 4:
        return lax.bitcast_convert_type(rows, jnp.uint32).reshape(count, -1, _LANES)
    ratio = 4 // size
    bits = lax.bitcast_convert_type(rows, f"uint{8 * size}").astype(jnp.uint32)
    bits = jnp.pad(bits, ((0, 0), (0, -rows.shape[1] % ratio), (0, 0)))
    parts = enumerate(jnp.split(bits, ratio, axis=1))
    return functools.reduce(jnp.bitwise_or, (part << (8 * size * number) for number, part in parts))


def _of_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_words`: [n, rows, 128], or more rows."""
    size = dtype.itemsize
    if size >= 4:
        return lax.bitcast_convert_type(words.reshape(words.shape[0], -1, *([2] if size == 8 else [])), dtype)
    parts = [(words >> (8 * size * number)).astype(f"uint{8 * size}") for number in range(4 // size)]
    return lax.bitcast_convert_type(jnp.concatenate(parts, axis=1), dtype)
