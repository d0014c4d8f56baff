"""Keys and values of what a model has read, in pages that sequences hold in any order.

A *unit* is `page` consecutive tokens of a sequence, or N times as many where a mesh cuts sequences over N devices along
`context`. It owns the page of the same number on each of these devices, so that one table, int32[rows, units], serves
any number of devices. A token may lie at any place of its unit: each place stores the position of its token, and a
query sees the places whose position is not after its own. An empty place has a position after all others.

    write    the first token of a unit empties its pages; then tokens go to the places that the host chose
    attend   the pages of a row are gathered by its table, and hidden by their positions; along `context` by pass-KV or
             pass-Q (`parallel.context_inference`), and with one token a row by the decode of that module

On a CPU arrays of a cache lie as [layers, pages, 2, K, page, D], keys before values and heads before places: the
products of one query a row with a page then need no transposition, which saves a quarter of attention. Elsewhere they
lie as [layers, pages, page, 2 K, D], the key and the value of a head side by side, so that a token is one piece: the
compiler of TPUs would turn the whole cache around for each token that it stores.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from scalejax import compat
from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.flash_attention.api import Implementation
from scalejax.kernels.paged_attention import paged_attention, ragged
from scalejax.nn.linear import wide
from scalejax.numerics import bits
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.context_choice import Passed
from scalejax.parallel.context_inference import pass_kv, pass_q, pass_q_to
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.rules import LogicalAxes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

EMPTY = int(np.iinfo(np.int32).max)
"""Position of a place without a token: causality alone hides it."""

KvFormat = Literal["compute", "int8", "float8"]
"""How keys and values are stored: as computed, int8 with a scale for each token and head, or float8_e4m3fn with one
scale for the keys and one for the values of each layer."""

KV_FORMATS: tuple[KvFormat, ...] = ("compute", "int8", "float8")


@dataclasses.dataclass(frozen=True)
class PageShape:
    """Size of a cache.

    Attributes:
      pages: Of all devices together.
      page: Places of one.
      format: How keys and values are stored.
    """

    pages: int
    page: int = 64
    format: KvFormat = "compute"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """The tokens that a program reads, and where they lie.

    Attributes:
      positions: int32[R, S], -1 = no token.
      table: int32[R, W], the units of each row in the order of its tokens; what is behind them may be any.
      last: int32[R], the column of the token whose logits are wanted.
      first: int32[R], the number, in its row, of the first unit of the table, where a window lets go of those before;
        None = 0.
      places: int32[R, S], the place of each token in its unit, where `context` cuts rows over N devices: device d has
        the places from d * page on, and of several tokens a row the columns from d * S / N on. None where it does not:
        tokens then lie in their order.
      seen: int32[R, N * W * page], positions of the places of each row; None before `admit`.
      passed: What goes round the devices along `context` where rows have several tokens.
      in_order: Whether rows have all their tokens, and the new ones of each are consecutive and before what is none:
        `admit` says so of readings of all layers.
    """

    positions: jax.Array
    table: jax.Array
    last: jax.Array
    first: jax.Array | None = None
    places: jax.Array | None = None
    seen: jax.Array | None = None
    passed: Passed = dataclasses.field(default="pass_kv", metadata={"static": True})
    in_order: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def whole(cls, shape: tuple[int, int], counts: jax.Array, page: int) -> Self:
        """Of rows that are read from their beginning, row b its first counts[b] tokens, into a cache of their own.

        For meshes without `context`.
        """
        rows, length = shape
        columns = jnp.arange(length, dtype=jnp.int32)[None, :]
        units = -(-length // page)
        table = jnp.arange(rows * units, dtype=jnp.int32).reshape(rows, units)
        return cls(jnp.where(columns < counts[:, None], columns, -1), table, jnp.maximum(counts - 1, 0))

    @property
    def real(self) -> jax.Array:
        """bool[R, S], whether there is a token."""
        return self.positions >= 0

    def units(self, size: int) -> jax.Array:
        """int32[R, S], the unit of each token, for units of this size; of no meaning where there is no token."""
        return jnp.take_along_axis(self.table, self.columns(self.positions, size), axis=1)

    def columns(self, positions: jax.Array, size: int) -> jax.Array:
        """int32[R, ...], the columns of the table of the units, of this size, of positions; 0 for negative ones."""
        unit = jnp.maximum(positions, 0) // size
        if self.first is None:
            return unit
        return jnp.maximum(unit - jnp.reshape(self.first, (-1,) + (1,) * (positions.ndim - 1)), 0)


class _HeadsFirst:
    """Pages of [2, K, page, D]."""

    axes: ClassVar[LogicalAxes] = (None, "kv_heads", None, None)

    @staticmethod
    def shape(page: int, kv_heads: int, width: int) -> tuple[int, ...]:
        return 2, kv_heads, page, width

    @staticmethod
    def heads(kv: Any) -> int:
        return kv.shape[3]

    @staticmethod
    def index(layer: jax.Array, page: jax.Array, place: jax.Array) -> tuple[Any, ...]:
        return layer, page, slice(None), slice(None), place

    @staticmethod
    def together(k: jax.Array, v: jax.Array) -> jax.Array:
        """[R, S, K, ...] each -> as `index` wants them."""
        return jnp.stack([k, v], axis=2)

    @staticmethod
    def apart(found: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of gathered pages -> [R, W, K, page, ...] each."""
        return found[:, :, 0], found[:, :, 1]


class _TokensFirst:
    """Pages of [page, 2 K, D]."""

    axes: ClassVar[LogicalAxes] = (None, "kv_pairs", None)

    @staticmethod
    def shape(page: int, kv_heads: int, width: int) -> tuple[int, ...]:
        return page, 2 * kv_heads, width

    @staticmethod
    def heads(kv: Any) -> int:
        return kv.shape[3] // 2

    @staticmethod
    def index(layer: jax.Array, page: jax.Array, place: jax.Array) -> tuple[Any, ...]:
        return layer, page, place

    @staticmethod
    def together(k: jax.Array, v: jax.Array) -> jax.Array:
        """[R, S, K, ...] each -> as `index` wants them."""
        both = jnp.stack([k, v], axis=3)
        return both.reshape(*k.shape[:2], 2 * k.shape[2], *k.shape[3:])

    @staticmethod
    def apart(found: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of gathered pages -> [R, W, K, page, ...] each."""
        return found[:, :, :, 0::2].swapaxes(2, 3), found[:, :, :, 1::2].swapaxes(2, 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers.

    Attributes:
      kv: [layers, pages, 2, K, page, D], or [layers, pages, page, 2 K, D].
      positions: int32[1, pages, page]; or int32[layers, ...] where layers keep tokens of their own.
      scales: None for the format "compute"; "int8": float32 in the shape of kv without D; "float8": float32[layers, 2].
    """

    kv: jax.Array
    positions: jax.Array
    scales: jax.Array | None = None

    @classmethod
    def empty(cls, shape: PageShape, *, layers: int, kv_heads: int, width: int, dtype: DTypeLike) -> Self:
        """One without tokens; scales of "float8" are 1 until `with_static_scales`."""
        stored = {"compute": dtype, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}[shape.format]
        order = _HeadsFirst if compat.platform() == "cpu" else _TokensFirst
        kv = jnp.zeros((layers, shape.pages, *order.shape(shape.page, kv_heads, width)), stored)
        positions = jnp.full((1, shape.pages, shape.page), EMPTY, jnp.int32)
        scales = {"compute": None, "int8": kv.shape[:-1], "float8": (layers, 2)}[shape.format]
        return cls(kv, positions, None if scales is None else jnp.ones(scales, jnp.float32))

    def of_each_layer(self) -> Self:
        """The same where layers keep tokens of their own."""
        return dataclasses.replace(self, positions=jnp.repeat(self.positions, self.kv.shape[0], axis=0))

    def axes(self) -> "PagedCache":
        """Names of the axes of the arrays, see `parallel.activations`, in a pytree like this.

        Heads that do not divide over the mesh in force are whole on every device.
        """
        order, over = self._order, jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
        of_page = tuple(name if order.heads(self.kv) % over == 0 else None for name in order.axes)
        kv: Any = (None, "pages", *of_page)
        scales: Any = None
        if self.scales is not None:
            scales = kv[:-1] if self.scales.ndim == self.kv.ndim - 1 else (None, None)
        positions: Any = (None, "pages", None)
        return PagedCache(kv, positions, scales)

    def with_static_scales(self, read: "PagedCache") -> Self:
        """This with scales for float8 after a cache, in the format "compute", of tokens like those to come.

        The largest number of each layer comes to lie at a sixteenth of the largest of the format, whose smaller numbers
        are as precise down to 1 / 1,800 of it; what is still larger becomes NaN and not something else.
        """
        if self.scales is None or self.scales.ndim != 2:
            return self
        layers = read.kv.shape[0]
        pages = jnp.broadcast_to(jnp.arange(read.kv.shape[1])[None, :], (1, read.kv.shape[1]))
        both = (read._order.apart(read.kv[layer, pages]) for layer in range(layers))
        most = jnp.stack([jnp.stack([jnp.abs(x.astype(jnp.float32)).max() for x in pair]) for pair in both])
        largest = float(jnp.finfo(jnp.float8_e4m3fn).max) / 16
        return dataclasses.replace(self, scales=jnp.where(most > 0, most / largest, 1))

    def emptied(self, reading: Reading) -> Self:
        """Without what the units that begin with a token of `reading` had before.

        Their keys and values too: what is not finite would reach those who see the unit, even where it is hidden.
        """
        unit = self.positions.shape[2] * _ranks()
        axes: Any = self.axes()
        names = ["positions", "kv", *(["scales"] if self._scales_of_tokens is not None else [])]

        def local(
            positions: jax.Array, table: jax.Array, first: jax.Array, *arrays: jax.Array
        ) -> tuple[jax.Array, ...]:
            # The tokens of a row are consecutive, in whatever columns they stand.
            last = positions.max(1, keepdims=True)
            lowest = jnp.where(positions < 0, EMPTY, positions).min(1, keepdims=True)
            units = (lowest - 1) // unit + 1 + jnp.arange(positions.shape[1] // unit + 1, dtype=jnp.int32)[None, :]
            begun = (last >= 0) & (units * unit <= last)
            own = Reading(units * unit, table, table[:, 0], first)
            pages = jnp.where(begun, own.units(unit), arrays[0].shape[1]).reshape(-1)

            def without(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                stored, *rest = arrays
                stored = stored.at[:, pages].set(EMPTY, mode="drop")
                return stored, *(x.at[:, pages].set(jnp.zeros((), x.dtype), mode="drop") for x in rest)

            # A unit begins in nearly every piece, and a TPU's compiler would copy the cache for a condition there.
            if positions.shape[1] > 1:
                return without(arrays)
            return jax.lax.cond(begun.any(), without, lambda arrays: arrays, arrays)

        of = tuple(getattr(axes, name) for name in names)
        run = _on_devices(local, (_ROWS, _ROWS, ("batch",), *of), of)
        arrays = (getattr(self, name) for name in names)
        return dataclasses.replace(
            self, **dict(zip(names, run(reading.positions, reading.table, _first(reading), *arrays), strict=True))
        )

    def admit(self, reading: Reading, layer: jax.Array | None = None) -> tuple[Self, Reading]:
        """Stores the positions of tokens before their keys and values are, and finds those that rows can see.

        Args:
          reading: Of all layers, or of this one.
          layer: int32[], where layers keep tokens of their own; their units were `emptied` for all layers before.
        """
        at = jnp.int32(0) if layer is None else layer
        page = self.positions.shape[2]
        unit = page * _ranks()

        def local(
            stored: jax.Array,
            at: jax.Array,
            positions: jax.Array,
            places: jax.Array,
            table: jax.Array,
            first: jax.Array,
            _: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            pages, place = _local_places(Reading(positions, table, table[:, 0], first, places), page, stored.shape[1])
            stored = stored.at[at, pages, place].set(positions, mode="drop")
            seen = stored[at, table]
            # What is behind the units of a row in its table may belong to another row, and units that have not begun
            # have what they had before.
            own_units = (first[:, None] + jnp.arange(table.shape[1], dtype=jnp.int32)[None, :])[..., None]
            seen = jnp.where(seen // unit == own_units, seen, EMPTY)
            seen = jnp.where(seen <= positions.max(1)[:, None, None], seen, EMPTY)
            return stored, seen.reshape(table.shape[0], -1)

        cache = self.emptied(reading) if layer is None else self
        run = _on_devices(local, (_PAGES, (), _ROWS, _ROWS, _ROWS, ("batch",), ("keys",)), (_PAGES, ("batch", "keys")))
        # The last argument says that there are keys of each device, which no other has.
        each = jnp.zeros(_ranks())
        given = (at, reading.positions, _places(reading, unit), reading.table, _first(reading), each)
        stored, seen = run(cache.positions, *given)
        reading = dataclasses.replace(reading, seen=seen, in_order=layer is None)
        return dataclasses.replace(cache, positions=stored), reading

    def extend(
        self,
        layer: jax.Array,
        q: "Float[Array, 'rows tokens heads width']",
        k: "Float[Array, 'rows tokens kv_heads width']",
        v: "Float[Array, 'rows tokens kv_heads width']",
        reading: Reading,
        *,
        window: int | None = None,
        implementation: Implementation | None = None,
    ) -> tuple["Float[Array, 'rows tokens heads width']", Self]:
        """Stores keys and values of tokens, then attends to all that their rows can see.

        Args:
          layer: int32[].
          q: Queries.
          k: Keys.
          v: Values.
          reading: That `admit` gave back.
          window: See `kernels.flash_attention`.
          implementation: See there; of pieces of a text, as one token a row takes products of its own.

        Returns:
          Mixed values in the dtype of q (0 where there is no token), and the cache.
        """
        assert reading.seen is not None
        rows, tokens, heads, width = q.shape
        groups = k.shape[2]
        share = heads // groups
        ranks = _ranks()
        if ranks > 1 and (rows % _decoding_devices() if tokens == 1 else tokens % ranks):
            raise ValueError(
                f"PagedCache.extend: context={ranks} cuts rows of one token each, or the tokens of a row; got {rows} "
                f"rows of {tokens}. Fill them up where they are made."
            )

        def local(
            kv: jax.Array,
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            layer: jax.Array,
            positions: jax.Array,
            places: jax.Array,
            table: jax.Array,
            first: jax.Array,
            seen: jax.Array,
            stored: jax.Array,
            scales: jax.Array | None = None,
        ) -> tuple[jax.Array, ...]:
            own = Reading(positions, table, table[:, 0], first, places, seen, reading.passed)
            if tokens == 1 and ranks > 1:
                # Each device has the new keys and values of some rows, and keeps those that lie with it of all.
                k, v = (jax.lax.all_gather(x, "context", axis=0, tiled=True) for x in (k, v))
            cache = PagedCache(kv, stored, scales)._written(layer, k, v, own)
            flat = q.reshape(*q.shape[:2], -1, width)
            if tokens == 1 and ranks > 1:
                out = cache._decoded_around(layer, flat, own, window)
            elif tokens == 1 and compat.platform() != "cpu":
                out, _ = cache._decoded(layer, flat[:, 0], positions[:, 0], own, window)
            elif tokens == 1:
                keys, values = cache._gathered(layer, own, q.dtype)
                out = _one_each(q[:, 0], keys, values, positions[:, 0], seen, window)
            elif reading.in_order and implementation is None and ranks == 1 and cache._suits_kernel(flat):
                out = cache._read_in_place(layer, flat, own, window)
            else:
                keys, values = (
                    x.swapaxes(2, 3).reshape(x.shape[0], -1, x.shape[2], width)
                    for x in cache._gathered(layer, own, q.dtype)
                )
                out = _read(flat, keys, values, own, window, implementation)
            out = out.reshape(q.shape)
            return (out, cache.kv) if cache.scales is None else (out, cache.kv, cache.scales)

        by_head: LogicalAxes = ("decoded", None, "kv_heads", None)
        of_columns = _ROWS
        if tokens > 1:
            by_head, of_columns = ("batch", "sequence", "kv_heads", None), ("batch", "sequence")
        by_group: LogicalAxes = (*by_head, None)
        axes: Any = self.axes()
        own = () if self.scales is None else (axes.scales,)
        run = _on_devices(
            local,
            (
                *(axes.kv, by_group, by_head, by_head, (), of_columns, of_columns, _ROWS, ("batch",)),
                *(("batch", "keys"), _PAGES, *own),
            ),
            (by_group, axes.kv, *own),
        )
        q = q.reshape(rows, tokens, groups, share, width)
        scales = () if self.scales is None else (self.scales,)
        places = _places(reading, ranks * self.positions.shape[2])
        given = (reading.positions, places, reading.table, _first(reading), reading.seen)
        out, kv, *rest = run(self.kv, q, k, v, layer, *given, self.positions, *scales)
        cache = dataclasses.replace(self, kv=kv, scales=rest[0] if rest else None)
        return out.reshape(rows, tokens, heads, width), cache

    def copied(self, source: jax.Array, target: jax.Array) -> Self:
        """With pages of one number copied to those of another, int32[groups, n] each; numbers that are none do nothing.

        Rows of `source` and `target` are those of the groups of devices that have rows of a batch of their own.
        """

        def local(source: jax.Array, target: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(a.at[:, target[0]].set(a[:, source[0]], mode="drop") for a in arrays)

        axes: Any = self.axes()
        names = ["kv", "positions", *(["scales"] if self._scales_of_tokens is not None else [])]
        of = tuple(getattr(axes, name) for name in names)
        rows: LogicalAxes = ("batch", None)
        copied = _on_devices(local, (rows, rows, *of), of)(source, target, *(getattr(self, name) for name in names))
        return dataclasses.replace(self, **dict(zip(names, copied, strict=True)))

    def _written(self, layer: jax.Array, k: jax.Array, v: jax.Array, reading: Reading) -> Self:
        """On one device."""
        page, place = _local_places(reading, self.positions.shape[2], self.kv.shape[1])
        order = self._order
        at = order.index(layer, page, place)
        scales = self.scales
        if (of_tokens := self._scales_of_tokens) is not None:
            new = order.together(k, v).astype(jnp.float32)
            own = bits.largest(new, (-1,)) / 127
            own = jnp.where(own == 0, 1, own)  # NaN stays, so that the row is known to be broken
            new = jnp.round(new / own[..., None])
            scales = of_tokens.at[at].set(own, mode="drop")
        elif scales is not None:
            new = order.together(*(x.astype(jnp.float32) / scales[layer, i] for i, x in enumerate((k, v))))
        else:
            new = order.together(k, v)
        kv = self.kv.at[at].set(new.astype(self.kv.dtype), mode="drop")
        return dataclasses.replace(self, kv=kv, scales=scales)

    def _decoded(
        self, layer: jax.Array, q: jax.Array, positions: jax.Array, reading: Reading, window: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """On one device: attention of one query a row, q [R, H, D], by a kernel that reads the pages where they lie.

        Args:
          layer: int32[].
          q: Queries.
          positions: int32[R], of them.
          reading: Has the units of the same rows.
          window: See `extend`.

        Returns:
          What the keys here give, [R, H, D], and its log-sum-exp float32[R, H].
        """
        pages, page = self.kv.shape[1], self.positions.shape[2]
        flat = self._flat
        scales, of_values = None, None
        if self._scales_of_tokens is not None:
            scales = self._scales_of_tokens.reshape(flat.shape[:-1])
        elif self.scales is not None:
            of_values = self.scales[layer, 1]
            q = (q * self.scales[layer, 0]).astype(q.dtype)
        out, lse = paged_attention(
            q,
            flat,
            reading.table + layer * pages,
            self.positions.reshape(-1, page),
            positions,
            used=jnp.where(positions < 0, 0, reading.columns(positions, page * _ranks()) + 1),
            scales=scales,
            window=window,
        )
        return out if of_values is None else (out * of_values).astype(q.dtype), lse

    def _suits_kernel(self, q: jax.Array) -> bool:
        """Whether `_read_in_place` is the choice for queries [R, S, H, D]."""
        return self.scales is None and ragged.suits(q, self._flat)

    def _read_in_place(self, layer: jax.Array, q: jax.Array, reading: Reading, window: int | None) -> jax.Array:
        """On one device: attention of tokens in their order, q [R, S, H, D], to pages where they lie."""
        assert reading.first is not None
        table = reading.table + layer * self.kv.shape[1]
        return ragged.attention(
            q, self._flat, table, reading.positions, reading.first, window=window, scale=q.shape[3] ** -0.5
        )

    @property
    def _flat(self) -> jax.Array:
        """The pages of all layers behind one another, so that none is cut out."""
        return self.kv.reshape(-1, *self.kv.shape[2:])

    def _decoded_around(self, layer: jax.Array, q: jax.Array, reading: Reading, window: int | None) -> jax.Array:
        """On one device along `context`: the same of the rows of this device, q [R / N, 1, H, D], whose queries go
        round.
        """
        rows = q.shape[0]

        def of(source: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, source * rows, rows)

        def attend(q: jax.Array, positions: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
            assert reading.first is not None
            theirs = dataclasses.replace(reading, table=of(source, reading.table), first=of(source, reading.first))
            out, lse = self._decoded(layer, q[:, 0], positions[:, 0], theirs, window)
            return out[:, None], lse[..., None]

        own = of(jax.lax.axis_index("context"), reading.positions)
        return pass_q_to(attend, q, query_positions=own)

    def _gathered(self, layer: jax.Array, reading: Reading, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """On one device: keys and values of the units of each row, [R, W, K, page, D]."""
        assert reading.seen is not None
        found = self._order.apart(self.kv[layer, reading.table])
        if self._scales_of_tokens is not None:
            of_tokens = self._order.apart(self._scales_of_tokens[layer, reading.table])
            scales = [scale[..., None] for scale in of_tokens]
        else:
            scales = [None if self.scales is None else self.scales[layer, which] for which in range(2)]
        keys, values = (
            x if scale is None else (x.astype(jnp.float32) * scale).astype(dtype)
            for x, scale in zip(found, scales, strict=True)
        )
        # What is not finite in a place without a token, as in units that have not begun, would reach sums.
        is_token = (reading.seen < EMPTY).reshape(*reading.table.shape, 1, -1, 1)
        return jnp.where(is_token, keys, 0), jnp.where(is_token, values, 0)

    @property
    def _order(self) -> type[_HeadsFirst] | type[_TokensFirst]:
        return _HeadsFirst if self.kv.ndim == 6 else _TokensFirst

    @property
    def _scales_of_tokens(self) -> jax.Array | None:
        """Those of the format "int8"."""
        return None if self.scales is None or self.scales.ndim == 2 else self.scales


def _read(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    reading: Reading,
    window: int | None,
    implementation: Implementation | None,
) -> jax.Array:
    """On one device: attention of tokens of rows, q [R, s, H, D], keys and values [R, t, K, D] -> [R, s, H, D]."""
    assert reading.seen is not None
    seen, options = reading.seen, {"window": window, "implementation": implementation}
    if _ranks() == 1:
        return flash_attention(q, keys, values, query_positions=reading.positions, key_positions=seen, **options)[0]
    if reading.passed == "pass_kv":
        return pass_kv(q, keys, values, query_positions=reading.positions, key_positions=seen, **options)
    return pass_q(q, lambda _: (keys, values, seen), query_positions=reading.positions, **options)


def _one_each(
    q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, seen: jax.Array, window: int | None
) -> jax.Array:
    """Attention of one query a row: q [R, K, G, D], keys and values [R, W, K, page, D] -> [R, K, G, D]."""
    rows, units, _, page, width = keys.shape
    dtype = wide(q.dtype)
    scores = jnp.einsum("rkgd,rwkpd->rwkgp", q, keys, preferred_element_type=dtype) * width**-0.5
    visible = seen <= positions[:, None]
    if window is not None:
        visible &= positions[:, None] - seen < window
    scores = jnp.where(visible.reshape(rows, units, 1, 1, page), scores, -jnp.inf)
    highest = scores.max((1, 4), keepdims=True)
    # A row without a token sees nothing: -inf - -inf would be NaN where its weights are 0.
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0, highest))
    total = weights.sum((1, 4))[..., None]
    mixed = jnp.einsum("rwkgp,rwkpd->rwkgd", weights.astype(values.dtype), values, preferred_element_type=dtype)
    return (mixed.sum(1) / jnp.where(total > 0, total, 1)).astype(q.dtype)


_PAGES: LogicalAxes = (None, "pages", None)
_ROWS: LogicalAxes = ("batch", None)


def _ranks() -> int:
    """N, the devices along `context`."""
    return jax.sharding.get_abstract_mesh().shape.get("context", 1)


def _decoding_devices() -> int:
    """Devices over which rows of one token each are cut."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in ACTIVATIONS.mesh_axes("decoded"))


def _first(reading: Reading) -> jax.Array:
    """int32[R]."""
    return jnp.zeros(reading.table.shape[0], jnp.int32) if reading.first is None else jnp.asarray(reading.first)


def _places(reading: Reading, unit: int) -> jax.Array:
    """int32[R, S], of each token in its unit."""
    return reading.positions % unit if reading.places is None else jnp.asarray(reading.places)


def _local_places(reading: Reading, page: int, pages: int) -> tuple[jax.Array, jax.Array]:
    """On one device: the page of each token and its place there; page `pages`, which is none, for those elsewhere."""
    assert reading.places is not None
    ranks = _ranks()
    here = reading.real
    if ranks > 1:
        here &= reading.places // page == jax.lax.axis_index("context")
    return jnp.where(here, reading.units(page * ranks), pages), reading.places % page


def _on_devices(function: Any, in_axes: tuple[LogicalAxes, ...], out_axes: tuple[LogicalAxes, ...]) -> Any:
    """The function on each device's rows, pages and heads; itself where there is one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return shard_kernel(function, in_axes=in_axes, out_axes=out_axes, rules=ACTIVATIONS)
