"""An exchange of `parallel.gradients.blocks` whose parameters and gradients travel as bytes of a block format.

    gather    each device encodes its shard; all_gather of bytes; every device decodes the same whole parameter
    reduce    each device encodes its gradient in as many pieces as there are shards; all_to_all of bytes; the owner of
              a piece decodes what came from every device and adds it up in float32, in the order of devices

Master parameters stay exact in their shards, and the derivative passes straight through the rounding of the gather. A
piece is one stream of values, the sharded dimension first, and begins a block: no block lies on two devices. Where a
block divides a piece, blocks are those of the whole parameter and do not depend on the number of devices.

Nothing else is rounded: gradients of parameters that are whole on every device are summed by
`blocks.UncompressedExchange`, and so are shards over their copies (`replica` under HYBRID_SHARD).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import mlir

from scalejax.errors import UserError
from scalejax.parallel.compression import arrivals, codec
from scalejax.parallel.compression.wire_formats import WireFormat
from scalejax.parallel.gradients import blocks
from scalejax.parallel.gradients.blocks import Arrays, States


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedExchange(blocks.Stateless):
    """The exchange; see above.

    Attributes:
      plain: The exchange of what is not encoded, and the layout of parameters.
      gather_format: Of parameters that are gathered; None = in their dtype.
      reduce_format: Of gradients that are reduced; None = in their dtype.
    """

    plain: blocks.UncompressedExchange
    gather_format: WireFormat | None
    reduce_format: WireFormat | None

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, None]:
        if self.gather_format is None:
            return self.plain.gather(shards, state)
        whole, _ = self.plain.gather({path: x for path, x in shards.items() if not self._cut(path, x)}, state)
        encoded = {path: self._gather(path, x) for path, x in shards.items() if path not in whole}
        return {path: (whole | encoded)[path] for path in shards}, None

    def reduce(self, gradients: Arrays, state: States, kept: object) -> tuple[Arrays, States]:
        if self.reduce_format is None:
            return self.plain.reduce(gradients, state, kept)
        whole, _ = self.plain.reduce({path: x for path, x in gradients.items() if not self._cut(path, x)}, state, kept)
        encoded = {path: self._reduce(path, x) for path, x in gradients.items() if path not in whole}
        return {path: (whole | encoded)[path] for path in gradients}, state

    def _cut(self, path: str, x: jax.Array) -> tuple[tuple[int, tuple[str, ...]], ...]:
        return self.plain.layouts[path].dimensions(x.ndim)

    def _gather(self, path: str, x: jax.Array) -> jax.Array:
        ((dim, axes),) = self._cut(path, x)
        assert self.gather_format is not None
        _check(path, x, gather_format=self.gather_format)
        # The sharded dimension first: the streams of all shards, one behind the other, are that of the whole parameter.
        stream = jnp.moveaxis(x, dim, 0).ravel()
        data = jax.lax.all_gather(codec.encode(stream, self.gather_format), axes)
        dtype = jnp.dtype(x.dtype if self.plain.param_dtype is None else self.plain.param_dtype)
        return decode_shards(data, self.gather_format, shape=x.shape, dim=dim, dtype=dtype)

    def _reduce(self, path: str, x: jax.Array) -> jax.Array:
        ((dim, axes),) = self._cut(path, x)
        assert self.reduce_format is not None
        _check(path, x, reduce_format=self.reduce_format)
        count = math.prod(jax.lax.axis_size(axis) for axis in axes)
        first = jnp.moveaxis(x, dim, 0)
        shape = (first.shape[0] // count, *first.shape[1:])
        sent = codec.encode(first.reshape(count, -1), self.reduce_format)
        arrived = jax.lax.all_to_all(sent, axes, 0, 0, tiled=True)  # row r from device r
        values = math.prod(shape)
        decode = functools.partial(codec.decode, format=self.reduce_format, length=values)
        total = jnp.moveaxis(arrivals.summed(arrived, decode, values).reshape(shape), 0, dim)
        rest = tuple(a for a in self.plain.axes if a not in axes and a not in self.plain.layouts[path].apart)
        return jax.lax.psum(total, rest) if rest else total


def decode_shards(
    data: jax.Array, format: WireFormat, *, shape: Sequence[int], dim: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """uint8[F, bytes], the encoded shards of a parameter -> the parameter.

    One primitive, `decode_shards`, so that rematerialisation can drop what comes out of it (`blocks.GATHERS`): of
    several operations it would keep one in between.

    Args:
      data: Row r is `codec.encode` of shard r, as a stream with the sharded dimension first.
      format: Of the bytes.
      shape: Of a shard.
      dim: The dimension that is sharded.
      dtype: Of the result.
    """
    return _decode_shards.bind(data, format=format, shape=tuple(shape), dim=dim, dtype=jnp.dtype(dtype))


def _decoded(
    data: jax.Array, *, format: WireFormat, shape: tuple[int, ...], dim: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    values = codec.decode(data, format, length=math.prod(shape), dtype=dtype)
    rest = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(values.reshape(data.shape[0] * shape[dim], *rest), 0, dim)


def _abstract(data: jax.core.ShapedArray, **how: Any) -> jax.core.AbstractValue:
    return jax.make_jaxpr(functools.partial(_decoded, **how))(data).out_avals[0]


_decode_shards = jax.extend.core.Primitive("decode_shards")
_decode_shards.def_impl(jax.jit(_decoded, static_argnames=("format", "shape", "dim", "dtype")))
_decode_shards.def_abstract_eval(_abstract)
mlir.register_lowering(_decode_shards, mlir.lower_fun(_decoded, multiple_results=False))


def _check(path: str, x: jax.Array, **formats: str) -> None:
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        ((field, format),) = formats.items()
        what = "parameter" if field == "gather_format" else "gradient"
        raise UserError(
            f"Fsdp: {field}={format!r} encodes float32, bfloat16 and float16; the {what} {path!r} is {x.dtype}. Keep "
            f"master parameters in float32, or leave {field} out."
        )
