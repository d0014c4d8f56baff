"""Safetensors files: named tensors in one file or in shards with an index, read slice by slice, written one at a time.

A file is the length of a header (8 bytes, little endian), the header as JSON, {name: {"dtype", "shape",
"data_offsets": [begin, end]}}, and the data without gaps (https://github.com/huggingface/safetensors, format section).
A folder holds `model.safetensors`, or `model-00001-of-00004.safetensors` and so on with `model.safetensors.index.json`,
{"weight_map": {name: file}}.

Nothing is mapped into memory: of a tensor the bytes of the wanted slice are read, and when a folder is written one
tensor exists at a time. The package of the format holds all tensors of a file that it writes.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from scalejax import json_reading
from scalejax.errors import UserError
from scalejax.units import size

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest file that is written, unless one tensor is larger."""

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of weights, by their names in a file."""

STORED = DTYPES | {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Dtypes that are read and written: those of weights, and of codes and scales of quantized ones."""

_NAMES = {dtype: name for name, dtype in STORED.items()}
_LONGEST_HEADER = 100 * 10**6  # that of the format's own reader
_MOST_DIMENSIONS = 32
_LARGEST_ITEM = 8
_LEAST_RUN_BYTES = 64 * 2**10  # shorter runs are read together with what lies between them
_BLOCK_BYTES = 32 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
      name: Its name in the file.
      file: The file.
      kind: Its dtype, as the file says it; `STORED` has those that can be read.
      shape: Its shape.
      begin: Offset of its first byte in the file.
    """

    name: str
    file: pathlib.Path
    kind: str
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> np.dtype:
        """Dtype in memory; only for what `STORED` has."""
        return STORED[self.kind]

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part of it that `index` says: one slice of step 1 a dimension.

        Raises:
          UserError: the file cannot be read, or has become shorter.
        """
        if index is None:
            index = (slice(None),) * len(self.shape)
        bounds = [part.indices(n) for part, n in zip(index, self.shape, strict=True)]
        spans = [(start, max(start, stop)) for start, stop, _ in bounds]
        out = np.empty([stop - start for start, stop in spans], self.dtype)
        if not out.size:
            return out
        try:
            with open(self.file, "rb", buffering=0) as file:
                if self.shape:
                    self._fill(file.fileno(), spans, out)
                else:
                    self._read(file.fileno(), 0, out)
        except OSError as error:
            raise UserError(
                f"{self.file}: cannot be read ({error.strerror}). Check the disk, or copy it anew."
            ) from error
        return out

    def _fill(self, descriptor: int, spans: list[tuple[int, int]], out: np.ndarray) -> None:
        """Reads runs of bytes that lie together; of short runs, blocks of whole rows that they are then cut from."""
        width = self.dtype.itemsize
        strides = [math.prod(self.shape[i + 1 :]) * width for i in range(len(self.shape))]
        cut = [i for i, span in enumerate(spans) if span != (0, self.shape[i])]
        last = max(cut, default=0)  # behind it, everything is wanted
        run = (spans[last][1] - spans[last][0]) * strides[last]
        if last == 0 or run >= _LEAST_RUN_BYTES:
            rows = out.reshape(-1, run // width)
            for row, at in zip(rows, itertools.product(*(range(*span) for span in spans[:last])), strict=True):
                start = sum(i * stride for i, stride in zip((*at, spans[last][0]), strides, strict=False))
                self._read(descriptor, start, row)
            return
        step = max(1, _BLOCK_BYTES // strides[0])
        first, end = spans[0]
        for start in range(first, end, step):
            block = np.empty((min(step, end - start), *self.shape[1:]), self.dtype)
            self._read(descriptor, start * strides[0], block)
            out[start - first : start - first + len(block)] = block[:, *(slice(*span) for span in spans[1:])]

    def _read(self, descriptor: int, offset: int, into: np.ndarray) -> None:
        view = _bytes(into)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], self.begin + offset + done)
            if not count:
                raise UserError(f"{self.file}: ends inside of tensor {self.name}. Copy the file anew.")
            done += count


def open_folder(folder: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a folder, by name; no weights are read.

    Raises:
      UserError: there is no safetensors file (but, perhaps, pickles), a shard is missing or damaged, or the index and
        the shards disagree.
    """
    index = folder / INDEX
    if index.is_file():
        return _open_shards(folder, index)
    if (folder / FILE).is_file():
        return read_header(folder / FILE)
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        raise UserError(
            f"{folder}: has {some(others)}, but neither {FILE} nor {INDEX}. Bring the index of the shards, or rename "
            f"a single file to {FILE}."
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{folder}: has its weights in {some(pickles)}, and pickle files are never loaded: they can run any code. "
            "Get the model as safetensors, or rewrite it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers."
        )
    raise UserError(f"{folder}: has no {FILE} and no {INDEX}. Give the folder of a model.")


def _open_shards(folder: pathlib.Path, index: pathlib.Path) -> dict[str, Tensor]:
    try:
        content = json_reading.read(index)
        named = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: is no index of shards, {{'weight_map': {{tensor: file}}}}: {error}.") from error
    found: dict[str, Tensor] = {}
    there = {path.name for path in folder.iterdir() if path.is_file()}
    for file in sorted(set(named.values())):
        path = folder / file
        if path.parent != folder:
            raise UserError(f"{index}: names {file!r}, which is not in the folder. Put all shards beside the index.")
        if file not in there:
            raise UserError(f"{index}: names {file}, which is missing. Copy the shard into {folder}.")
        for name, tensor in read_header(path).items():
            if named.get(name) != file:
                where = named.get(name, "no file")
                raise UserError(f"{path}: holds tensor {name}, which the index has in {where}. Copy the folder anew.")
            found[name] = tensor
    missing = sorted(named.keys() - found.keys())
    if missing:
        raise UserError(f"{folder / named[missing[0]]}: lacks {some(missing)}, which the index has there.")
    return found


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
      UserError: the file cannot be read, or is not what the format wants.
    """
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(_LONGEST_HEADER, total - 8) else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    try:
        if not header:
            raise ValueError(f"its header would be {length:,} of {total:,} bytes")
        return _parse(path, json_reading.parse(header), 8 + length, total)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is damaged or no safetensors file: {error}. Copy it anew.") from error


def _parse(path: pathlib.Path, header: dict[str, Any], start: int, total: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        kind = str(entry["dtype"])
        if any(type(number) is not int for number in (*shape, begin, end)):
            raise ValueError(f"tensor {name} has shape {shape} and offsets {begin} to {end}, not whole numbers")
        # numpy has limits of its own, of empty tensors too: 64 dimensions, and their product without those of 0.
        room = math.prod(n or 1 for n in shape) * _LARGEST_ITEM
        if min(shape, default=0) < 0 or begin > end or len(shape) > _MOST_DIMENSIONS or room >= 2**63:
            raise ValueError(f"tensor {name} has shape {shape} and offsets {begin} to {end}")
        if kind in STORED and math.prod(shape) * STORED[kind].itemsize != end - begin:
            raise ValueError(f"tensor {name}, {kind} {shape}, has {end - begin:,} bytes")
        found[name] = Tensor(name, path, kind, shape, start + begin)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError(f"its tensors overlap or leave a gap at byte {at:,}")
        at = end
    if start + at != total:
        raise ValueError(f"it has {total:,} bytes and should have {start + at:,}")
    return found


@dataclasses.dataclass(frozen=True)
class Written:
    """A tensor that is to be written: its name, dtype and shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
    folder: pathlib.Path,
    tensors: tuple[Written, ...],
    produce: Callable[[str], np.ndarray],
    *,
    shard_bytes: int = SHARD_BYTES,
    wrote: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes tensors into a folder that exists, in the order given, one in memory at a time.

    Args:
      folder: Where to.
      tensors: What will be written.
      produce: Name -> the tensor, of the dtype and shape said before.
      shard_bytes: Largest file, unless a tensor is larger.
      wrote: Told the bytes of every tensor that is written.

    Raises:
      UserError: the disk lacks the room, or refuses.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise UserError(
            f"{folder}: needs {size(total)} and the disk has {size(free)} left. Free some space, or "
            "choose another disk."
        )
    shards = list(_shards(tensors, shard_bytes))
    names = [FILE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _from_1(shards)]
    for file, shard in zip(names, shards, strict=True):
        try:
            _write_file(folder / file, shard, produce, wrote)
        except OSError as error:
            raise UserError(f"{folder / file}: cannot be written ({error.strerror}).") from error
    if len(shards) > 1:
        where = {tensor.name: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(
    path: pathlib.Path, tensors: list[Written], produce: Callable[[str], np.ndarray], wrote: Callable[[int], None]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told of "pt"
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            array = produce(tensor.name)
            if array.dtype != tensor.dtype or array.shape != tensor.shape:
                raise ValueError(f"write_folder: {tensor} was announced; got {array.dtype} {array.shape}.")
            file.write(_bytes(np.ascontiguousarray(array)))
            del array
            wrote(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _shards(tensors: tuple[Written, ...], shard_bytes: int) -> Iterator[list[Written]]:
    shard: list[Written] = []
    for tensor in tensors:
        if shard and sum(t.nbytes for t in shard) + tensor.nbytes > shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _bytes(array: np.ndarray) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _from_1(items: list[Written] | list[list[Written]]) -> range:
    return range(1, len(items) + 1)


def some(names: list[str], shown: int = 3) -> str:
    """The first few of some names, and how many there are besides."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
