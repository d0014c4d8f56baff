"""Quantized weights of a checkpoint: read as if they were plain tensors, or block by block as they are.

A folder's config.json says in `quantization_config` which weights have which format, and tensors of codes and scales
stand where those weights would be (see packed_layouts). `resolve` puts both together, so that whoever reads weights by
name, shape and slice does not need to know.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError
from scalejax.models.llm import safetensors
from scalejax.models.llm.mapping import StoredTensor
from scalejax.models.llm.packed_layouts.known import layout_of
from scalejax.models.llm.packed_layouts.protocol import InputPart, PackedLayout, Role, Shape, TensorPart
from scalejax.models.llm.safetensors import Tensor, some
from scalejax.numerics import packing
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import dequantize
from scalejax.numerics.quantized import static


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """Where a quantized weight lies; it has the name, shape and dtype of the weight that it stands for.

    Attributes:
      name: Of the weight.
      kind: Dtype of the weight, by its name in a file: what it had before, and is decoded to.
      shape: Of the weight.
      format: Of its blocks, along the last axis.
      layout: How they are stored.
      parts: The tensors that they are stored in.
    """

    name: str
    kind: str
    shape: Shape
    format: BlockFormat
    layout: PackedLayout
    parts: Mapping[Role, Tensor]

    @property
    def file(self) -> pathlib.Path:
        """The file that holds its codes."""
        return self.parts["codes"].file

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the weight."""
        return safetensors.DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in files."""
        return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in self.parts.values())

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The weight, or a part of it, decoded; float64 ones have been rounded to float32 before they were quantized.

        Raises:
          UserError: a file cannot be read, or a block stands for NaN.
        """
        spans = self._spans(index)
        first = spans[-1][0] // self.format.k1 * self.format.k1
        packed = jax.tree.map(jnp.asarray, self.load(index))
        wanted = self.dtype if self.dtype != np.float64 else np.dtype(np.float32)
        decoded = np.asarray(dequantize(packing.unpack(packed), wanted)).astype(self.dtype, copy=False)
        return decoded[..., spans[-1][0] - first : spans[-1][1] - first]

    def load(self, index: tuple[slice, ...] | None = None) -> Packed:
        """The blocks, in arrays of numpy; those that a part of the weight touches.

        Raises:
          UserError: a file cannot be read, or a block stands for NaN: says how many do.
        """
        spans = self._spans(index)
        *rows, (start, stop) = spans
        k1 = self.format.k1
        first, last = start // k1, -(-stop // k1)
        stored: dict[Role, np.ndarray] = {}
        for role, part in self.layout.parts(self.name, self.format, self.shape).items():
            if role != "shape":
                stored[role] = self.parts[role].read(_cut(part, rows, first, last))
        length = min(last * k1, self.shape[-1]) - first * k1
        packed = self.layout.restore(stored, self.format, length, f"{self.file}: {self.name}")
        self._check_numbers(packed)
        return packed

    def _spans(self, index: tuple[slice, ...] | None) -> list[tuple[int, int]]:
        whole = (slice(None),) * len(self.shape) if index is None else index
        return [part.indices(n)[:2] for part, n in zip(whole, self.shape, strict=True)]

    def _check_numbers(self, packed: Packed) -> None:
        """NaN marks in scales and codes, and scales that are infinite: no writer means any of them."""
        scales, element = np.asarray(packed.scales), self.format.element
        if packed.tensor_scale is not None and not 0 < np.asarray(packed.tensor_scale) < np.inf:
            raise UserError(
                f"{self.file}: the scale of the whole tensor {self.name} ({self.format.name}) is "
                f"{float(np.asarray(packed.tensor_scale)):g}, and must be above 0 and finite. The file is damaged: "
                "copy it anew, or quantize the model again."
            )
        if scales.dtype == np.float32:
            poisoned = ~np.isfinite(scales)
        elif self.format.scale == "e4m3":
            poisoned = (scales & 0x7F) == 0x7F
        else:
            poisoned = scales == (1 << self.format.d1) - 1
        count, what = int(np.count_nonzero(poisoned)), "blocks"
        if not count and element.specials != "none" and element.bits == 8:
            codes = np.asarray(packed.codes) & 0x7F
            count, what = int(np.count_nonzero(codes > element.max_code)), "codes"
        if count:
            total = scales.size if what == "blocks" else int(np.prod(np.shape(packed.codes)))
            raise UserError(
                f"{self.file}: {count:,} of {total:,} {what} of {self.name} ({self.format.name}) stand for NaN. The "
                "file is damaged, or the weights held NaN when they were quantized: quantize the model again."
            )


@dataclasses.dataclass(frozen=True)
class InputScale:
    """How what a weight multiplies is quantized.

    Attributes:
      format: Its format.
      scale: Its static scale.
    """

    format: static.Format
    scale: np.float32


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What tensors and `quantization_config` say together.

    Attributes:
      tensors: Weights by name, and what is left over.
      inputs: By the name of a weight, for those whose inputs have a static scale.
      remarks: What a user should know.
    """

    tensors: dict[str, StoredTensor]
    inputs: dict[str, InputScale]
    remarks: tuple[str, ...]


def resolve(
    content: Any, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], kind: str, where: str
) -> Resolved:
    """Puts the tensors of quantized weights together.

    Args:
      content: `quantization_config` of config.json.
      tensors: All tensors of the folder.
      shapes: Of the model's weights, by name.
      kind: Dtype of the weights, by its name in a file.
      where: Names the config, for messages.

    Raises:
      UserError: the layout or a format is not known, or the tensors are not those of the formats that are named.
    """
    layout = layout_of(content, where)
    named, remarks = layout.read_config(content, shapes, tensors, where)
    found: dict[str, StoredTensor] = dict(tensors)
    for name, format in named.items():
        parts = layout.parts(name, format, shapes[name])
        _check_format(name, format, layout, parts, tensors, where)
        for part in parts.values():
            found.pop(part.name, None)
    for name, format in named.items():
        parts = layout.parts(name, format, shapes[name])
        own: dict[Role, Tensor] = {role: tensors[part.name] for role, part in parts.items()}
        found[name] = PackedTensor(name, kind, shapes[name], format, layout, own)
    inputs: dict[str, InputScale] = {}
    for name, format in layout.read_inputs(content, named, where).items():
        part = layout.input_part(name, format)
        assert part is not None
        inputs[name] = _input_scale(name, format, part, tensors, where)
        del found[part.name]
    return Resolved(found, inputs, (*_counted(named, layout), *_counted_inputs(inputs), *remarks))


def _input_scale(
    name: str, format: static.Format, part: InputPart, tensors: Mapping[str, Tensor], where: str
) -> InputScale:
    tensor = tensors.get(part.name)
    if tensor is None:
        raise UserError(
            f"{where}: what {name} multiplies is {format} under a static scale, and {part.name} is missing. The folder "
            "is incomplete, or config.json is that of another checkpoint."
        )
    if int(np.prod(tensor.shape)) != 1 or tensor.kind not in safetensors.DTYPES:
        raise UserError(
            f"{tensor.file}: tensor {part.name} is {tensor.kind} {list(tensor.shape)}, and must be one float, the "
            f"scale of what {name} multiplies. config.json is that of another checkpoint."
        )
    return InputScale(format, part.restore(tensor.read(), f"{tensor.file}: {part.name}"))


def _check_format(
    name: str,
    format: BlockFormat,
    layout: PackedLayout,
    parts: Mapping[Role, TensorPart],
    tensors: Mapping[str, Tensor],
    where: str,
) -> None:
    """Compares the tensors that are there with those that a format has."""
    missing = [part.name for part in parts.values() if part.name not in tensors]
    if missing:
        begin = f"{name}."
        others = sorted({t[len(begin) :].rpartition(".")[0] for t in tensors if t.startswith(begin)})
        others = [other for other in others if not other.startswith("inputs.")]
        if others and format.name not in others:
            raise UserError(
                f"{where}: {name} is {format.name}, but the files hold it as {some(others)}. config.json is that of "
                "another checkpoint."
            )
        if name in tensors and parts["codes"].name != name:
            raise UserError(
                f"{where}: {name} is {format.name}, but {tensors[name].file} holds it as it was, in "
                f"{tensors[name].kind}. config.json is that of another checkpoint."
            )
        raise UserError(
            f"{where}: {name} is {format.name}, and {some(missing)} is missing: codes without their scales are no "
            "values. The folder is incomplete; copy it anew, or quantize the model again."
        )
    for part in parts.values():
        tensor = tensors[part.name]
        dtype = safetensors.STORED.get(tensor.kind)
        # Scales in software come in whatever float a writer likes.
        fits = dtype == part.dtype or (part.dtype == np.float32 and tensor.kind in safetensors.DTYPES)
        if tensor.shape != part.shape or not fits:
            raise UserError(
                f"{tensor.file}: tensor {part.name} is {tensor.kind} {list(tensor.shape)}, but {layout.name} has "
                f"{format.name} as {part.dtype} {list(part.shape)}. It was packed in another format, or config.json is "
                "that of another checkpoint."
            )


def _counted(named: Mapping[str, BlockFormat], layout: PackedLayout) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for format in named.values():
        counts[format.name] = counts.get(format.name, 0) + 1
    listed = ", ".join(f"{count} in {format}" for format, count in counts.items())
    return (f"quantized weights ({layout.name}): {listed or 'none'}",)


def _counted_inputs(inputs: Mapping[str, InputScale]) -> tuple[str, ...]:
    if not inputs:
        return ()
    used = ", ".join(sorted({found.format for found in inputs.values()}))
    return (
        f"static scales of activations ({used}) for {len(inputs)} weights, which `generate` and `eval` use, and "
        "which a converted folder has not",
    )


def _cut(part: TensorPart, rows: list[tuple[int, int]], first: int, last: int) -> tuple[slice, ...]:
    """The slices of a part that hold some rows and blocks."""
    if not part.per_block:
        return (slice(None),) * len(part.shape)
    behind = len(part.shape) - len(rows) - 1
    blocks = slice(first * part.per_block, last * part.per_block)
    return (*(slice(*span) for span in rows), blocks, *(slice(None),) * behind)
