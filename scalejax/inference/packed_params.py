"""Quantized weights that stay packed on devices: a layer is decoded where it is used, inside the scan over layers.

Packed are the parameters of layers whose blocks all have one format and lie whole on a device. Others are decoded when
they are loaded: those outside the layers, those of which a rule has quantized some layers otherwise, and on meshes
those that cut blocks.
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
from scalejax.numerics import packing
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import dequantize
from scalejax.numerics.quantized.weights import StaticWeight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("packed",),
    meta_fields=("entry", "sizes", "stored", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A parameter of layers, packed; arrays have a leading axis of layers, or are those of one.

    Attributes:
      packed: Codes and scales, rows and blocks as in the checkpoint.
      entry: How its rows and columns become the parameter's axes.
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
        weight = dequantize(packing.unpack(self.packed), self.stored).astype(self.dtype)
        return self.entry.from_tensor(weight, dict(self.sizes))


_Axes = str | tuple[str, ...] | None
_Spec = tuple[_Axes, _Axes, _Axes]
"""Mesh axes of layers, rows and columns."""


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

    layers: Mapping[str, tuple[PackedTensor, ...]]
    _held: tuple[tuple[str | int, ...], Packed] | None = None

    def dtype(self, path: str) -> np.dtype:
        """See `mapping.ParamSource`."""
        name, role = path.split(" ")
        floats = role == "tensor_scale" or (role == "scales" and self.layers[name][0].format.scale == "float32")
        return np.dtype(np.float32 if floats else np.uint8)

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """See `mapping.ParamSource`."""
        assert layer is not None
        assert index is not None
        name, role = path.split(" ")
        tensor = self.layers[name][layer]
        rows, columns = slice(0, tensor.shape[0]), slice(0, tensor.shape[1])
        if index:  # the tensor scale has none
            rows = index[0]
            width = _per_block(tensor)[role]
            k1 = tensor.format.k1
            columns = slice(index[1].start // width * k1, min(index[1].stop // width * k1, tensor.shape[1]))
        at = (name, layer, rows.start, rows.stop, columns.start, columns.stop)
        if self._held is None or self._held[0] != at:
            self._held = (at, tensor.load((rows, columns)))
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
    for path, (tensors, parts) in choose_packed(source, targets).items():
        assert isinstance(source, TensorSource)
        entry = source.entries[path]
        arrays = loading.load(
            _Parts({path: tensors}), {f"{path} {role}": part for role, part in parts.items()}, loaded=loaded
        )
        found = {role: arrays[f"{path} {role}"] for role in parts}
        packed = Packed(
            codes=found["codes"],
            scales=found["scales"],
            sub_scales=found.get("sub_scales"),
            tensor_scale=found.get("tensor_scale"),
            format=tensors[0].format,
            axis=-1,
            length=tensors[0].shape[-1],
        )
        own = tuple((axis, source.sizes[axis]) for dim in entry.theirs() for axis in dim)
        params[path] = PackedWeight(packed, entry, own, tensors[0].dtype, np.dtype(targets[path].dtype))
    return params, {path: target for path, target in targets.items() if path not in params}


def choose_packed(
    source: ParamSource, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tuple[tuple[PackedTensor, ...], dict[str, jax.ShapeDtypeStruct]]]:
    """{path: (its layers, shapes and shardings of codes and scales)} of the parameters that can stay packed."""
    found = {}
    if not isinstance(source, TensorSource):
        return found
    for path, target in targets.items():
        entry = source.entries[path]
        if not entry.stacked or entry.spread:
            continue
        tensors = tuple(source.tensors[entry.tensor(i)] for i in range(target.shape[0]))
        first = tensors[0]
        if not isinstance(first, PackedTensor) or first.dtype == np.float64 or len(first.shape) != 2:
            continue
        same = [t for t in tensors if isinstance(t, PackedTensor) and t.format == first.format]
        spec = _spec(entry, target)
        if len(same) == len(tensors) and spec is not None:
            parts = _parts(first, target, spec)
            if parts is not None:
                found[path] = (tuple(same), parts)
    return found


def nbytes(parts: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of codes and scales on each device."""
    total = 0
    for part in parts.values():
        assert part.sharding is not None
        total += math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize
    return total


def _per_block(tensor: PackedTensor) -> dict[str, int]:
    """Entries of a block along a row, by role."""
    format = tensor.format
    made = {"codes": format.k1 * format.element.bits // 8, "scales": 1}
    if format.sub_scale != "none":
        made["sub_scales"] = format.k1 // format.k2 * format.d2 // 8
    return made


def _spec(entry: Entry, target: jax.ShapeDtypeStruct) -> _Spec | None:
    """Mesh axes of layers, rows and columns; None where more than the first axis of rows or columns is cut."""
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    spec = (*sharding.spec, *(None,) * (len(target.shape) - len(sharding.spec)))
    named = dict(zip(entry.ours(), spec[1:], strict=True))
    dims = entry.theirs()
    if any(named[axis] is not None for dim in dims for axis in dim[1:]):
        return None
    return spec[0], named[dims[0][0]], named[dims[1][0]]


def _parts(tensor: PackedTensor, target: jax.ShapeDtypeStruct, spec: _Spec) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Codes and scales of all layers; None where a device would get a part of a block."""
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    mesh, layers = sharding.mesh, target.shape[0]
    blocks = -(-tensor.shape[1] // tensor.format.k1)
    axes = () if spec[2] is None else (spec[2],) if isinstance(spec[2], str) else tuple(spec[2])
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if shards > 1 and (blocks % shards or tensor.shape[1] % tensor.format.k1):
        return None
    made = {}
    for role, width in _per_block(tensor).items():
        dtype = jnp.float32 if role == "scales" and tensor.format.scale == "float32" else jnp.uint8
        shape = (layers, tensor.shape[0], blocks * width)
        made[role] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    if tensor.format.scale == "e4m3":
        made["tensor_scale"] = jax.ShapeDtypeStruct((layers,), jnp.float32, sharding=NamedSharding(mesh, P(spec[0])))
    return made
