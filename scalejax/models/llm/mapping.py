"""Parameters of ours as tensors of a checkpoint: a table with a line a tensor, read in both directions.

    Entry("layers/attention/query", "model.layers.{layer}.self_attn.q_proj.weight", "(H D) E -> E H D")

says that layer l of the stacked parameter is the tensor of that name, whose first dimension is split in heads, and
whose axes are put in another order. Sizes of the letters belong to a config. Because of the table a slice of a
parameter is a slice of a tensor, and a device reads no more than it holds.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from scalejax.errors import UserError
from scalejax.models.llm import safetensors
from scalejax.models.llm.safetensors import some

if TYPE_CHECKING:
    import jax

A = TypeVar("A", np.ndarray, "jax.Array")

LAYER = "{layer}"
EXPERT = "{expert}"
Index = tuple[slice, ...]
_CHECKED = 2**20  # values that are looked at together: few enough to stay in a cache


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter.

    Attributes:
      path: Our path.
      name: The name of the tensor, with `{layer}` in it where there is one for each layer of a stacked parameter, and
        `{expert}` where there is one for each index of our first axis.
      axes: Its axes and ours, "(H D) E -> E H D"; axes in brackets are one dimension of the tensor.
      half: (axis, index) of an axis of the tensor of which the parameter has one index: "(P F) E -> E F" with ("P", 1)
        is the second half of the rows.
    """

    path: str
    name: str
    axes: str
    half: tuple[str, int] | None = None

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading axis of layers."""
        return LAYER in self.name

    @property
    def spread(self) -> bool:
        """Whether our first axis, that of experts, lies in as many tensors."""
        return EXPERT in self.name

    def tensor(self, layer: int | None, expert: int | None = None) -> str:
        """The name of the tensor of a layer and an expert."""
        return self.name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))

    def tensors(self, layers: int, sizes: Mapping[str, int]) -> Iterator[tuple[str, int | None, int | None]]:
        """(name, layer, expert) of all tensors that hold it; None where it is not stacked, or not spread."""
        for layer in range(layers) if self.stacked else (None,):
            for expert in range(sizes[self.ours()[0]]) if self.spread else (None,):
                yield self.tensor(layer, expert), layer, expert

    def theirs(self) -> list[list[str]]:
        """Dimensions of the tensor, each a list of axes."""
        left = self.axes.split(" -> ")[0].replace("(", "( ").replace(")", " )").split()
        dims: list[list[str]] = []
        inside = False
        for word in left:
            if word == "(":
                dims.append([])
            elif word != ")":
                if inside:
                    dims[-1].append(word)
                else:
                    dims.append([word])
            inside = word == "(" or (inside and word != ")")
        return dims

    def ours(self) -> list[str]:
        """Axes of the parameter, without that of layers."""
        return self.axes.split(" -> ")[1].split()

    def ours_in_tensor(self) -> list[str]:
        """The same, without an axis that lies in several tensors."""
        return self.ours()[1:] if self.spread else self.ours()

    def tensor_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(math.prod(sizes[axis] for axis in dim) for dim in self.theirs())

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one layer of the parameter."""
        return tuple(sizes[axis] for axis in self.ours())

    def from_tensor(self, array: A, sizes: Mapping[str, int]) -> A:
        """The tensor, or the slice of it whose axes have these sizes, as one layer of the parameter (a view).

        Of an axis with a `half` it has that index alone, or all. Where the parameter is spread this is one index of it.
        """
        flat = [axis for dim in self.theirs() for axis in dim]
        ours = self.ours_in_tensor()
        if self.half is not None:
            ours = [self.half[0], *ours]
        turned: Any = array.reshape([sizes[axis] for axis in flat]).transpose([flat.index(axis) for axis in ours])
        if self.half is None:
            return turned
        return turned[self.half[1] if turned.shape[0] > 1 else 0]

    def to_tensor(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """The inverse of `from_tensor`, contiguous; of one with a `half`, of the parameters of all halves, stacked."""
        flat, ours = [axis for dim in self.theirs() for axis in dim], self.ours_in_tensor()
        if self.half is not None:
            ours = [self.half[0], *ours]
        return _contiguous(array.transpose([ours.index(axis) for axis in flat])).reshape(self.tensor_shape(sizes))

    def alone(self) -> "Entry":
        """The entry of a tensor that would hold the whole parameter, or the whole layer of it, and nothing else."""
        half = None if self.half is None else self.half[0]
        dims = [" ".join(axis for axis in dim if axis != half) for dim in self.theirs()]
        if self.spread:
            dims = [self.ours()[0], *dims]
        left = " ".join(f"({dim})" for dim in dims if dim)
        return Entry(self.path, self.name.replace(EXPERT, "*"), f"{left} -> {' '.join(self.ours())}")


@dataclasses.dataclass(frozen=True)
class TableTensor:
    """One tensor of a checkpoint, by the table.

    Attributes:
      name: Its name.
      entries: Of the parameter that it holds, or of those that are halves of it, in their order.
      layer: Its layer, or None.
      expert: Its expert, or None.
    """

    name: str
    entries: tuple[Entry, ...]
    layer: int | None
    expert: int | None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape."""
        return self.entries[0].tensor_shape(sizes)

    def dtype(self, source: "ParamSource") -> np.dtype:
        """The dtype of its parameters.

        Raises:
          UserError: they have several.
        """
        found = {entry.path: source.dtype(entry.path) for entry in self.entries}
        first, *others = found.values()
        if any(dtype != first for dtype in others):
            shown = " and ".join(f"{path} in {dtype}" for path, dtype in found.items())
            raise UserError(
                f"{self.name} is made of {shown}. Give both one dtype: convert the model to a model folder or to "
                "separate experts with --dtype before."
            )
        return first

    def read(self, source: "ParamSource", sizes: Mapping[str, int]) -> np.ndarray:
        """The tensor, from parameters.

        Raises:
          UserError: as `ParamSource.read`, or they have several dtypes.
        """
        self.dtype(source)
        read = [self._parameter(source, entry, sizes) for entry in self.entries]
        return self.entries[0].to_tensor(read[0] if self.entries[0].half is None else np.stack(read), sizes)

    def _parameter(self, source: "ParamSource", entry: Entry, sizes: Mapping[str, int]) -> np.ndarray:
        if self.expert is None:
            return source.read(entry.path, self.layer)
        rest = (slice(0, size) for size in entry.shape(sizes)[1:])
        return source.read(entry.path, self.layer, (slice(self.expert, self.expert + 1), *rest))[0]


def tensors(entries: Iterable[Entry], sizes: Mapping[str, int], layers: int) -> dict[str, TableTensor]:
    """All tensors of a table, by name."""
    found: dict[str, TableTensor] = {}
    for entry in entries:
        for name, layer, expert in entry.tensors(layers, sizes):
            others = found[name].entries if name in found else ()
            parts = tuple(sorted((*others, entry), key=lambda part: 0 if part.half is None else part.half[1]))
            found[name] = TableTensor(name, parts, layer, expert)
    return found


class StoredTensor(Protocol):
    """A tensor of a checkpoint, plain or quantized: `safetensors.Tensor`, `packed.PackedTensor`."""

    @property
    def name(self) -> str:
        """The name of the tensor."""
        ...

    @property
    def file(self) -> pathlib.Path:
        """The file that holds the tensor, for messages."""
        ...

    @property
    def kind(self) -> str:
        """The name of the dtype in the headers of files, such as "BF16"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensor."""
        ...

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or a part of it: one slice of step 1 a dimension."""
        ...


class ParamSource(Protocol):
    """A source of parameters, each read when it is asked for."""

    def dtype(self, path: str) -> np.dtype:
        """The dtype in which a parameter is stored."""
        ...

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """A slice of a parameter, of one layer of it where it is stacked (`layer`), contiguous.

        Raises:
          UserError: it cannot be read, or holds NaN or infinity.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Parameters that lie in safetensors files, by a table.

    Attributes:
      entries: The table.
      sizes: Sizes of its axes.
      tensors: The files' tensors by name, see `check`.
    """

    entries: Mapping[str, Entry]
    sizes: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]

    def dtype(self, path: str) -> np.dtype:
        """The dtype in which a parameter is stored."""
        return self.tensors[self.entries[path].tensor(0, 0)].dtype

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """See `ParamSource`."""
        entry = self.entries[path]
        if not entry.spread:
            return self._read_tensor(entry, entry.tensor(layer), index)
        experts = range(self.sizes[entry.ours()[0]]) if index is None else range(index[0].start, index[0].stop)
        rest = None if index is None else index[1:]
        return np.stack([self._read_tensor(entry, entry.tensor(layer, expert), rest) for expert in experts])

    def _read_tensor(self, entry: Entry, name: str, index: Index | None) -> np.ndarray:
        tensor, ours = self.tensors[name], entry.ours_in_tensor()
        whole = {axis: range(self.sizes[axis]) for axis in ours}
        wanted = dict(whole)
        if index is not None:
            wanted = {a: whole[a][part] for a, part in zip(ours, index, strict=True)}
        if entry.half is not None:
            axis, place = entry.half
            whole[axis] = wanted[axis] = range(place, place + 1)
        # Of axes that share a dimension the first can be cut in the file, the others in memory.
        cut, read = [], dict(whole)
        for first, *rest in entry.theirs():
            inner = math.prod(self.sizes[axis] for axis in rest)
            read[first] = wanted[first]
            cut.append(slice(wanted[first].start * inner, wanted[first].stop * inner))
        found = tensor.read(tuple(cut))
        check_finite(found, f"{tensor.file}: tensor {tensor.name}")
        array = entry.from_tensor(found, {axis: len(span) for axis, span in read.items()})
        array = array[
            tuple(slice(wanted[a].start, wanted[a].stop) if read[a] != wanted[a] else slice(None) for a in ours)
        ]
        return _contiguous(array)


def shapes(entries: Iterable[Entry], sizes: Mapping[str, int], layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a table, by name."""
    return {name: tensor.shape(sizes) for name, tensor in tensors(entries, sizes, layers).items()}


def check(
    entries: Iterable[Entry], sizes: Mapping[str, int], layers: int, tensors: Mapping[str, StoredTensor], where: str
) -> None:
    """Compares the tensors of a checkpoint with those that a table wants.

    Raises:
      UserError: one is missing, is there beside them, or has another shape or a dtype that is no float.
    """
    layers = min(layers, len(tensors) + 1)  # a config may say anything, and more layers than tensors lack one
    wanted = shapes(entries, sizes, layers)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise UserError(
            f"{where}: lacks {some(missing)}, which its config asks for. The folder is incomplete, or config.json is "
            "that of another model."
        )
    extra = sorted(name for name in tensors if name not in wanted)
    if extra:
        hint = " Biases are not part of this architecture." if any(name.endswith(".bias") for name in extra) else ""
        raise UserError(
            f"{where}: also holds {some(extra)}, which its config does not account for.{hint} A model that is only "
            "partly understood is not converted: check config.json."
        )
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise UserError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, but by the config it should be "
                f"{list(shape)}. The file and config.json belong to different models."
            )
        if tensor.kind not in safetensors.DTYPES:
            raise UserError(
                f"{tensor.file}: tensor {name} has dtype {tensor.kind}; weights can be "
                f"{', '.join(safetensors.DTYPES)}. Get the model unquantised."
            )
    kinds = {tensors[name].kind for name in wanted}
    for entry in entries:
        own = {tensors[name].kind for name, _, _ in entry.tensors(layers, sizes)}
        if len(own) > 1:
            raise UserError(
                f"{where}: the layers of {entry.name} have different dtypes, {some(sorted(own))}, and become "
                f"one array. Rewrite the model in one of {some(sorted(kinds))}."
            )


def cast(array: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """The array in a dtype, itself if it has it.

    Raises:
      UserError: a value is beyond the range of the dtype.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        array = array.astype(dtype)
    check_finite(array, f"{what} as {dtype}")
    return array


def check_finite(array: np.ndarray, what: str) -> None:
    """Refuses NaN and infinity.

    Raises:
      UserError: says how many there are, and in what.
    """
    flat, bad = array.reshape(-1), 0
    for start in range(0, flat.size, _CHECKED):
        part = flat[start : start + _CHECKED]
        if part.dtype == ml_dtypes.bfloat16:  # by its exponent, twice as fast as by its own isfinite
            bad += int(np.count_nonzero((part.view(np.uint16) & np.uint16(0x7F80)) == np.uint16(0x7F80)))
        else:
            bad += int(np.count_nonzero(~np.isfinite(part)))
    if bad:
        raise UserError(
            f"{what} holds {bad:,} values that are NaN or infinite. The file is damaged, or its training diverged: get "
            "it anew, or take an earlier checkpoint."
        )


def _contiguous(array: np.ndarray, tile: int = 512) -> np.ndarray:
    """The array in memory order; where it is a transposed matrix tile by tile, which is 2.5 times as fast."""
    if array.flags.c_contiguous:
        return array
    for split in range(1, array.ndim):
        turned = array.transpose(*range(split, array.ndim), *range(split))
        if turned.flags.c_contiguous:
            out = np.empty(array.shape, array.dtype)
            rows = out.reshape(math.prod(array.shape[:split]), -1)
            columns = turned.reshape(rows.shape[::-1])
            for i in range(0, rows.shape[0], tile):
                for j in range(0, rows.shape[1], tile):
                    rows[i : i + tile, j : j + tile] = columns[j : j + tile, i : i + tile].T
            return out
    return np.ascontiguousarray(array)
