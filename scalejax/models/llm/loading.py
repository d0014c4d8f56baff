"""Parameters from files onto devices: each holds its part, and the host one layer's at a time."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from scalejax.models.llm import mapping
from scalejax.models.llm.mapping import Index, ParamSource


def load(
    source: ParamSource,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    stacked: Callable[[str], bool] = lambda path: path.startswith("layers/"),
    loaded: Callable[[int], None] = lambda _: None,
) -> dict[str, jax.Array]:
    """Reads parameters in the layout of a mesh.

    Of a stacked parameter the devices fill an array of zeros layer by layer, so that the host never holds more than the
    local slices of one layer of it, and a device its part and one layer's.

    Args:
      source: Where they are.
      targets: Shape, dtype and NamedSharding of each, by path. Another dtype than the stored one is a cast.
      stacked: Whether a path has a leading axis of layers.
      loaded: Told the bytes of every tensor that is read, in the dtype of its target.

    Raises:
      UserError: as `Source.read`, or a value is beyond the range of its target's dtype.
    """
    params: dict[str, jax.Array] = {}
    for path, target in targets.items():
        if not isinstance(target.sharding, NamedSharding):
            raise ValueError(f"load: {path} must have a NamedSharding; got {target.sharding}.")
        if stacked(path):
            params[path] = _stacked(source, path, target, loaded)
        else:
            params[path] = _place(source, path, None, target.shape, target.dtype, target.sharding)
            loaded(target.size * target.dtype.itemsize)
    return params


def _stacked(source: ParamSource, path: str, target: jax.ShapeDtypeStruct, loaded: Callable[[int], None]) -> jax.Array:
    whole = target.sharding
    assert isinstance(whole, NamedSharding)
    one = NamedSharding(whole.mesh, P(*whole.spec[1:]), memory_kind=whole.memory_kind)
    shape = target.shape[1:]

    def write(stack: jax.Array, layer: jax.Array, number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, number, 0)

    write = jax.jit(write, donate_argnums=0, out_shardings=whole)
    stack = jax.jit(lambda: jnp.zeros(target.shape, target.dtype), out_shardings=whole)()
    for number in range(target.shape[0]):
        layer = _place(source, path, number, shape, target.dtype, one)
        # Waiting bounds what is on its way from the host.
        stack = jax.block_until_ready(write(stack, layer, jnp.int32(number)))
        loaded(layer.size * layer.dtype.itemsize)
    return stack


def _place(
    source: ParamSource, path: str, layer: int | None, shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding
) -> jax.Array:
    """One tensor: the box around the parts of this process's devices is read once, and cut for each."""
    local = [
        _spans(index, shape) for index in sharding.addressable_devices_indices_map(shape).values() if index is not None
    ]
    box = [(min(start for start, _ in spans), max(stop for _, stop in spans)) for spans in zip(*local, strict=True)]
    read = mapping.cast(source.read(path, layer, tuple(slice(*span) for span in box)), np.dtype(dtype), path)

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        spans = zip(_spans(index, shape), box, strict=True)
        return read[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in spans)]

    return jax.make_array_from_callback(shape, sharding, part)


def _spans(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
