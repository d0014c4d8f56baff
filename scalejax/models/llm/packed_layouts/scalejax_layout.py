"""The layout of scalejax itself: every format of `numerics`, under names that say what tensors hold."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from scalejax.errors import UserError
from scalejax.models.llm.packed_layouts import protocol
from scalejax.models.llm.packed_layouts.protocol import InputFormats, InputPart, Role, Shape, TensorPart
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantized import static

VERSION = 2
"""1 has no scales of inputs."""


@dataclasses.dataclass(frozen=True)
class ScalejaxLayout:
    """Every format of `numerics`; tensors say in their names what they are."""

    name: str = "scalejax"
    experts: str = "separate"

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """See `PackedLayout`: nothing is refused."""
        del name, format, shape

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, TensorPart]:
        """See `PackedLayout`."""
        *rows, _ = shape
        n = protocol.block_count(format, shape)

        def part(role: Role, dtype: np.dtype, per_block: int) -> TensorPart:
            own = (*rows, n * per_block) if per_block else ()
            return TensorPart(f"{name}.{format.name}.{role}", dtype, own, per_block)

        made: dict[Role, TensorPart] = {
            "codes": part("codes", np.dtype(np.uint8), format.k1 * format.element.bits // 8),
            "scales": part("scales", np.dtype(np.float32) if format.scale == "float32" else np.dtype(np.uint8), 1),
        }
        if format.sub_scale != "none":
            made["sub_scales"] = part("sub_scales", np.dtype(np.uint8), format.k1 // format.k2 * format.d2 // 8)
        if format.scale == "e4m3":
            made["tensor_scale"] = part("tensor_scale", np.dtype(np.float32), 0)
        return made

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """See `PackedLayout`."""
        return scale

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """See `PackedLayout`."""
        del format, shape
        given: dict[Role, jax.Array | None] = {
            "codes": packed.codes,
            "scales": packed.scales,
            "sub_scales": packed.sub_scales,
            "tensor_scale": packed.tensor_scale,
        }
        return {role: np.asarray(array) for role, array in given.items() if array is not None}

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """See `PackedLayout`."""
        del where
        return protocol.as_packed(stored, format, length)

    def input_part(self, name: str, inputs: static.Format) -> InputPart | None:
        """See `PackedLayout`."""
        return InputPart(f"{name}.inputs.{inputs}.scale", ())

    def write_config(
        self, weights: Mapping[str, tuple[BlockFormat, Shape]], others: Iterable[str], inputs: InputFormats
    ) -> dict[str, object]:
        """See `PackedLayout`; without scales of inputs, what version 1 reads."""
        del others
        made: dict[str, object] = {"quant_method": self.name, "version": VERSION if inputs else 1}
        made["weights"] = {name: format.name for name, (format, _) in weights.items()}
        return made | ({"inputs": dict(inputs)} if inputs else {})

    def read_config(
        self, content: Mapping[str, object], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """See `PackedLayout`."""
        version, named = content.get("version"), content.get("weights")
        if not isinstance(version, int) or version > VERSION:
            raise UserError(
                f"{where}: has version {version!r}, and this scalejax reads up to {VERSION}. Upgrade scalejax, or "
                "quantize the model again."
            )
        if not isinstance(named, dict) or not all(isinstance(format, str) for format in named.values()):
            raise UserError(f"{where}: must have the formats of the weights by name; got {named!r:.60}.")
        unknown = sorted(set(named) - set(shapes))
        if unknown:
            raise UserError(
                f"{where}: names {unknown[0]}, which the model does not have. config.json is that of another model."
            )
        return {name: _found(format, f"{where}: {name}") for name, format in named.items()}, ()

    def read_inputs(
        self, content: Mapping[str, object], formats: Mapping[str, BlockFormat], where: str
    ) -> InputFormats:
        """See `PackedLayout`."""
        named = content.get("inputs", {})
        if not isinstance(named, dict) or not all(isinstance(format, str) for format in named.values()):
            raise UserError(f"{where}: must have the formats of inputs by the names of weights; got {named!r:.60}.")
        unknown = sorted(set(named) - set(formats))
        if unknown:
            raise UserError(
                f"{where}: inputs names {unknown[0]}, which is no quantized weight. config.json is that of another "
                "checkpoint."
            )
        return {name: static.find(format, f"{where}: inputs of {name}") for name, format in named.items()}


def _found(name: str, where: str) -> BlockFormat:
    try:
        return formats.find(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
