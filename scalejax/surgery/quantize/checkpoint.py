"""Writes a model with quantized weights, one weight in memory at a time."""

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.models.llm import mapping, model_folder, safetensors
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.models.llm.packed_layouts.protocol import PackedLayout, Role
from scalejax.models.llm.safetensors import Written
from scalejax.models.llm.special_tokens import write_generation_config
from scalejax.numerics import packing
from scalejax.numerics.quantize import Quantized, dequantize, poisoned_blocks
from scalejax.numerics.quantized import static
from scalejax.surgery.quantize import calibration as calibrations
from scalejax.surgery.quantize.calibration import Calibration
from scalejax.surgery.quantize.quantization_plan import Weight
from scalejax.train import disk

_CHUNK = 2**22
_INPUT: Literal["input"] = "input"
_Kept = Role | Literal["input"]
"""Which tensor of a weight: one of its layout, or the scale of what it multiplies."""


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight.

    Attributes:
      quantized: Its codes and scales.
      output_error: Squared error of the outputs on the calibration text, relative to that of a direct cast in the same
        format; None where no text was looked at.
      input_scale: Static scale of what it multiplies; None where that stays as it is.
    """

    quantized: Quantized
    output_error: float | None = None
    input_scale: np.float32 | None = None


class Quantizer(Protocol):
    """Turns weights into codes and scales."""

    def quantize(self, weight: Weight, layout: PackedLayout) -> QuantizedWeight:
        """Called once for each weight that has a format, in the order of the plan."""
        ...


@dataclasses.dataclass(frozen=True)
class DirectCast:
    """Every number to the nearest one under its block's scale.

    Attributes:
      model: The model.
      calibration: How scales are chosen.
    """

    model: LanguageModel
    calibration: Calibration = dataclasses.field(default_factory=Calibration)

    def quantize(self, weight: Weight, layout: PackedLayout) -> QuantizedWeight:
        """See `Quantizer`."""
        exact = jnp.asarray(read_weight(self.model, weight))
        return QuantizedWeight(cast(exact, weight, layout, self.calibration))


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """A line of the report of a quantization: one tensor, before and after.

    Attributes:
      name: Of the tensor.
      module: Its path.
      format: Its format; None = it stayed as it was.
      numbers: How many values it has.
      bytes_before: Of the tensor as it was stored.
      bytes_after: Of codes and scales.
      padding: Values that rows were filled up with.
      qsnr: dB, of the weight; None where it stayed.
      output_error: See `QuantizedWeight`.
      inputs: Format of what it multiplies; None where that stays as it is.
      input_scale: See `QuantizedWeight`.
    """

    name: str
    module: str
    format: str | None
    numbers: int
    bytes_before: int
    bytes_after: int
    padding: int = 0
    qsnr: float | None = None
    output_error: float | None = None
    inputs: str | None = None
    input_scale: float | None = None


def cast(exact: jax.Array, weight: Weight, layout: PackedLayout, calibration: Calibration) -> Quantized:
    """A direct cast of float32[rows, columns], under a tensor scale that the layout can hold."""
    assert weight.format is not None
    scale = calibrations.choose_tensor_scale(exact, weight.format, calibration)
    if scale is not None:
        scale = jnp.asarray(layout.tensor_scale(np.asarray(scale)))
    return calibrations.encode(exact, weight.format, calibration, scale)


def read_weight(model: LanguageModel, weight: Weight) -> np.ndarray:
    """float32[rows, columns] as it is stored, all but the last axis merged.

    Raises:
      UserError: it cannot be read, or holds NaN or infinities.
    """
    sizes = model.architecture.sizes(model.config)
    exact = mapping.cast(weight.tensor.read(model.source, sizes), np.dtype(np.float32), weight.name)
    return exact.reshape(-1, exact.shape[-1])


def write(
    model: LanguageModel,
    target: pathlib.Path,
    plan: Sequence[Weight],
    quantizer: Quantizer,
    layout: PackedLayout,
    *,
    shard_bytes: int = safetensors.SHARD_BYTES,
    wrote: Callable[[int], None] = lambda _: None,
) -> tuple[TensorReport, ...]:
    """Writes a folder of Hugging Face with packed weights.

    Args:
      model: The model.
      target: Folder that is not there yet, or is empty.
      plan: Its weights and their formats.
      quantizer: Makes codes and scales.
      layout: How they are stored.
      shard_bytes: Largest file.
      wrote: Told the bytes of every tensor that is written.

    Returns:
      What became of each tensor.

    Raises:
      UserError: the target is there, the disk is full, or a parameter cannot be read or is not finite.
    """
    sizes = model.architecture.sizes(model.config)
    written: list[Written] = []
    codebook_ids: dict[str, tuple[Weight, _Kept | None]] = {}
    parts: dict[_Kept | None, Written]
    for weight in plan:
        if weight.format is None:
            parts = {None: Written(weight.name, weight.tensor.dtype(model.source), weight.shape)}
        else:
            stored = layout.parts(weight.name, weight.format, weight.shape)
            parts = {role: Written(part.name, part.dtype, part.shape) for role, part in stored.items()}
            if weight.inputs is not None and (own := layout.input_part(weight.name, weight.inputs)) is not None:
                parts[_INPUT] = Written(own.name, np.dtype(np.float32), own.shape)
        for role, part in parts.items():
            written.append(part)
            codebook_ids[part.name] = (weight, role)
    rows: list[TensorReport] = []
    held: dict[_Kept, np.ndarray] = {}

    def produce(name: str) -> np.ndarray:
        weight, role = codebook_ids[name]
        if role is None:
            array = weight.tensor.read(model.source, sizes)
            rows.append(TensorReport(weight.name, weight.module, None, array.size, array.nbytes, array.nbytes))
            return array
        if not held:
            row, arrays = _stored(model, weight, quantizer.quantize(weight, layout), layout)
            rows.append(row)
            held.update(arrays)
        return held.pop(role)

    with disk.appearing(target) as folder:
        safetensors.write_folder(folder, tuple(written), produce, shard_bytes=shard_bytes, wrote=wrote)
        for file in model.files:
            shutil.copyfile(file, folder / file.name)
        for name, text in model.made.items():
            (folder / name).write_text(text, encoding="utf-8")
        content = model.architecture.write_config(model.config, model.tokens, str(model.dtype))
        named = {w.name: (w.format, w.shape) for w in plan if w.format is not None}
        matrices = [w.name for w in plan if w.format is None and len(w.shape) > 1 and w.module != "embed"]
        inputs: dict[str, static.Format] = {w.name: w.inputs for w in plan if w.inputs is not None}
        content["quantization_config"] = layout.write_config(named, matrices, inputs)
        model_folder.write_json(folder / model_folder.CONFIG, content)
        if not (folder / model_folder.GENERATION).exists():
            model_folder.write_json(folder / model_folder.GENERATION, write_generation_config(model.tokens))
    return tuple(rows)


def _stored(
    model: LanguageModel, weight: Weight, result: QuantizedWeight, layout: PackedLayout
) -> tuple[TensorReport, dict[_Kept, np.ndarray]]:
    """A weight as its layout has it, and its line of the report."""
    format, quantized = weight.format, result.quantized
    assert format is not None
    if int(poisoned_blocks(quantized)):
        raise ValueError(f"{weight.name}: finite weights have become blocks of NaN.")
    shape = weight.shape
    held = packing.pack(quantized)
    whole = jax.tree.map(lambda a: np.asarray(a).reshape(*shape[:-1], -1) if a.ndim > 1 else np.asarray(a), held)
    arrays: dict[_Kept, np.ndarray] = {**layout.store(whole, format, shape)}
    if weight.inputs is not None:
        part = layout.input_part(weight.name, weight.inputs)
        assert part is not None
        assert result.input_scale is not None
        arrays[_INPUT] = part.store(result.input_scale)
    row = TensorReport(
        name=weight.name,
        module=weight.module,
        format=format.name,
        numbers=math.prod(shape),
        bytes_before=math.prod(shape) * weight.tensor.dtype(model.source).itemsize,
        bytes_after=sum(array.nbytes for array in arrays.values()),
        padding=math.prod(shape[:-1]) * (-shape[-1] % format.k1),
        qsnr=_qsnr(read_weight(model, weight), quantized),
        output_error=result.output_error,
        inputs=weight.inputs,
        input_scale=None if result.input_scale is None else float(result.input_scale),
    )
    return row, arrays


def _qsnr(exact: np.ndarray, quantized: Quantized) -> float:
    """dB, some rows at a time."""
    noise = signal = 0.0
    step = max(1, _CHUNK // max(1, exact.shape[1]))
    for start in range(0, len(exact), step):

        def part(array: jax.Array, start: int = start) -> jax.Array:
            return array[start : start + step] if array.ndim else array

        inexact = np.asarray(dequantize(jax.tree.map(part, quantized)), np.float64)
        wanted = exact[start : start + step].astype(np.float64)
        noise += float(((inexact - wanted) ** 2).sum())
        signal += float((wanted**2).sum())
    if signal == 0 or noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise)


def as_json(rows: Sequence[TensorReport]) -> list[dict[str, object]]:
    """The report for a file; a QSNR without noise is null."""
    made = [dataclasses.asdict(row) for row in rows]
    for row in made:
        if row["qsnr"] is not None and math.isinf(row["qsnr"]):
            row["qsnr"] = None
    return made
