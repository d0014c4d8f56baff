"""Quantized weights that stay packed on devices: a layer is decoded where it is used, inside the scan over layers.

Packed are the parameters of layers whose blocks all have one format and lie whole on a device, those of all experts of
a layer together, whether the folder has them in one tensor or in many. Others are decoded when they are loaded: those
outside the layers, those of which a rule has quantized some layers otherwise, and on meshes those that cut blocks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.models.llm import loading
from scalejax.models.llm.mapping import Entry, Index, ParamSource, TensorSource
from scalejax.models.llm.packed import PackedTensor
from scalejax.nn.layers import Arrays
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantized.weights import StaticWeight
from scalejax.parallel.compression import packed_blocks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("packed",),
    meta_fields=("entry", "sizes", "stored", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A parameter of layers, packed; arrays have a leading axis of layers, or are those of one.

    Attributes:
      packed: Codes and scales, rows and blocks as in the checkpoint, experts before them.
      entry: How its rows and columns become the parameter's axes, see `Entry.alone`.
      sizes: Sizes of these axes.
      stored: Dtype that it is decoded to.
      dtype: Dtype that it is used in, to which it is cast then.
    """

    packed: Packed
    entry: Entry
    sizes: tuple[tuple[str, int], ...]
    stored: np.dtype
    dtype: np.dtype

    def decode(self) -> jax.Array:
        """The parameter of one layer."""
        weight = packed_blocks.dequantize(self.packed, self.stored).astype(self.dtype)
        return self.entry.from_tensor(weight, dict(self.sizes))


_Axes = str | tuple[str, ...] | None
_Spec = tuple[_Axes, ...]
"""Mesh axes of layers, of experts where there are some, of rows and columns."""


@dataclasses.dataclass(frozen=True)
class StoredLayers:
    """A parameter of layers whose tensors are all packed in one format.

    Attributes:
      entry: Its line of the table.
      sizes: Sizes of the axes of the table.
      tensors: Of each layer; where it is spread, of each expert of each layer.
    """

    entry: Entry
    sizes: Mapping[str, int]
    tensors: tuple[tuple[PackedTensor, ...], ...]

    @property
    def first(self) -> PackedTensor:
        """One of them; in shape and format they are all alike."""
        return self.tensors[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one layer: experts where there are some, rows, columns."""
        return self.entry.alone().tensor_shape(self.sizes)

    def load(self, layer: int, index: Index) -> Packed:
        """The blocks of a part of a layer, in arrays of numpy.

        Args:
          layer: The layer.
          index: One slice for each axis of `shape`.
        """
        if self.entry.spread:
            experts, *rest = index
            read = [tensor.load(tuple(rest)) for tensor in self.tensors[layer][experts]]
            return jax.tree.map(lambda *arrays: np.stack(arrays), *read)
        (tensor,) = self.tensors[layer]
        if self.entry.half is not None:
            axis, place = self.entry.half
            dim = next(i for i, axes in enumerate(self.entry.theirs()) if axes[0] == axis)
            start, cut = place * self.shape[dim], index[dim]
            index = (*index[:dim], slice(start + cut.start, start + cut.stop), *index[dim + 1 :])
        return tensor.load(index)


def whole(params: Arrays) -> Arrays:
    """The gather (see `nn.layers`) of parameters of which some are packed, or have static scales of their inputs."""
    return {name: _decoded(value) for name, value in params.items()}


def _decoded(value: "jax.Array | PackedWeight | StaticWeight") -> Any:
    if isinstance(value, StaticWeight):
        return dataclasses.replace(value, array=_decoded(value.array))
    return value.decode() if isinstance(value, PackedWeight) else value


@dataclasses.dataclass
class _Parts:
    """Codes and scales as parameters of their own, "PATH ROLE"; a `mapping.ParamSource`."""

    layers: Mapping[str, StoredLayers]
    _held: tuple[tuple[object, ...], Packed] | None = None

    def dtype(self, path: str) -> np.dtype:
        """See `mapping.ParamSource`."""
        name, role = path.split(" ")
        floats = role == "tensor_scale" or (role == "scales" and self.layers[name].first.format.scale == "float32")
        return np.dtype(np.float32 if floats else np.uint8)

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """See `mapping.ParamSource`."""
        assert layer is not None
        assert index is not None
        name, role = path.split(" ")
        stored = self.layers[name]
        *rows, columns = (slice(0, size) for size in stored.shape)
        if role == "tensor_scale":
            rows[: len(index)] = index  # of experts, or none
        else:
            *rows, cut = index
            width, k1 = _per_block(stored.first.format)[role], stored.first.format.k1
            columns = slice(cut.start // width * k1, min(cut.stop // width * k1, columns.stop))
        at = (name, layer, *((part.start, part.stop) for part in (*rows, columns)))
        if self._held is None or self._held[0] != at:
            self._held = (at, stored.load(layer, (*rows, columns)))
        return np.asarray(getattr(self._held[1], role))


def load(
    source: ParamSource,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    loaded: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], dict[str, jax.ShapeDtypeStruct]]:
    """Loads what can stay packed.

    Args:
      source: Where parameters are.
      targets: Shape, dtype and sharding of each parameter, decoded.
      loaded: Told the bytes of every tensor that is loaded.

    Returns:
      {path: PackedWeight}, and the targets that are left.
    """
    params: dict[str, Any] = {}
    for path, (stored, parts) in choose_packed(source, targets).items():
        arrays = loading.load(
            _Parts({path: stored}), {f"{path} {role}": part for role, part in parts.items()}, loaded=loaded
        )
        found = {role: arrays[f"{path} {role}"] for role in parts}
        packed = Packed(
            codes=found["codes"],
            scales=found["scales"],
            sub_scales=found.get("sub_scales"),
            tensor_scale=found.get("tensor_scale"),
            format=stored.first.format,
            axis=-1,
            length=stored.shape[-1],
        )
        alone = stored.entry.alone()
        own = tuple((axis, stored.sizes[axis]) for axis in alone.ours())
        params[path] = PackedWeight(packed, alone, own, stored.first.dtype, np.dtype(targets[path].dtype))
    return params, {path: target for path, target in targets.items() if path not in params}


def choose_packed(
    source: ParamSource, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tuple[StoredLayers, dict[str, jax.ShapeDtypeStruct]]]:
    """{path: (its layers, shapes and shardings of codes and scales)} of the parameters that can stay packed."""
    found = {}
    if not isinstance(source, TensorSource):
        return found
    for path, target in targets.items():
        entry = source.entries[path]
        stored = _stored(source, entry, target.shape[0]) if entry.stacked else None
        spec = None if stored is None else _spec(entry.alone(), target)
        parts = None if stored is None or spec is None else _parts(stored, target, spec)
        if parts is not None:
            found[path] = (stored, parts)
    return found


def nbytes(parts: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of codes and scales on each device."""
    total = 0
    for part in parts.values():
        assert part.sharding is not None
        total += math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize
    return total


def _stored(source: TensorSource, entry: Entry, layers: int) -> StoredLayers | None:
    """The tensors of a parameter; None where one is not packed, or in another format than the others."""
    if entry.half is not None and all(dim[0] != entry.half[0] for dim in entry.theirs()):
        return None  # rows of both halves alternate
    experts = range(source.sizes[entry.ours()[0]]) if entry.spread else (None,)
    layered = []
    for layer in range(layers):
        tensors = [source.tensors[entry.tensor(layer, expert)] for expert in experts]
        layered.append(tuple(tensor for tensor in tensors if isinstance(tensor, PackedTensor)))
        if len(layered[-1]) < len(tensors):
            return None
    found = StoredLayers(entry, source.sizes, tuple(layered))
    if any(tensor.format != found.first.format for tensors in layered for tensor in tensors):
        return None
    return None if found.first.dtype == np.float64 or len(found.shape) < 2 else found


def _per_block(format: BlockFormat) -> dict[str, int]:
    """Entries of a block along a row, by role."""
    made = {"codes": format.k1 * format.element.bits // 8, "scales": 1}
    if format.sub_scale != "none":
        made["sub_scales"] = format.k1 // format.k2 * format.d2 // 8
    return made


def _spec(alone: Entry, target: jax.ShapeDtypeStruct) -> _Spec | None:
    """Mesh axes of layers, experts, rows and columns; None where more than the first axis of rows or columns is cut."""
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    spec = (*sharding.spec, *(None,) * (len(target.shape) - len(sharding.spec)))
    named = dict(zip(alone.ours(), spec[1:], strict=True))
    dims = alone.theirs()
    if any(named[axis] is not None for dim in dims for axis in dim[1:]):
        return None
    return spec[0], *(named[dim[0]] for dim in dims)


def _parts(stored: StoredLayers, target: jax.ShapeDtypeStruct, spec: _Spec) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Codes and scales of all layers; None where a device would get a part of a block."""
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    mesh, layers, format = sharding.mesh, target.shape[0], stored.first.format
    *rows, columns = stored.shape
    blocks, cut = -(-columns // format.k1), spec[-1]
    axes = () if cut is None else (cut,) if isinstance(cut, str) else cut
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if shards > 1 and (blocks % shards or columns % format.k1):
        return None
    made = {}
    for role, width in _per_block(format).items():
        dtype = jnp.float32 if role == "scales" and format.scale == "float32" else jnp.uint8
        shape = (layers, *rows, blocks * width)
        made[role] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    if format.scale == "e4m3":
        own = 2 if stored.entry.spread else 1  # one a tensor
        shape = (layers, *stored.shape)[:own]
        made["tensor_scale"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec[:own])))
    return made
