"""The layout of the gpt-oss models: MXFP4 alone, codes and scales of blocks in a tensor each."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from scalejax.errors import UnsupportedError
from scalejax.models.llm.packed_layouts import protocol
from scalejax.models.llm.packed_layouts.protocol import InputFormats, InputPart, Role, Shape, TensorPart
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantized import static


@dataclasses.dataclass(frozen=True)
class GptOss:
    """MXFP4 alone, as the gpt-oss models have their experts."""

    name: str = "gpt-oss"
    experts: str = "fused"

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """See `PackedLayout`."""
        if format.name != "mxfp4_e2m1":
            raise UnsupportedError(
                f"--layout {self.name} holds mxfp4_e2m1 alone; got {format.name} for {name}. Choose that format, or "
                "--layout scalejax."
            )
        protocol.check_whole_blocks(self.name, name, format, shape)

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, TensorPart]:
        """See `PackedLayout`."""
        *rows, _ = shape
        n = protocol.block_count(format, shape)
        return {
            "codes": TensorPart(f"{name}_blocks", np.dtype(np.uint8), (*rows, n, format.k1 // 2), 1),
            "scales": TensorPart(f"{name}_scales", np.dtype(np.uint8), (*rows, n), 1),
        }

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """See `PackedLayout`."""
        return scale

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """See `PackedLayout`."""
        codes = self.parts("", format, shape)["codes"].shape
        return {"codes": np.asarray(packed.codes).reshape(codes), "scales": np.asarray(packed.scales)}

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """See `PackedLayout`."""
        del where
        codes = stored["codes"]
        flat = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
        return protocol.as_packed({**stored, "codes": flat}, format, length)

    def input_part(self, name: str, inputs: static.Format) -> InputPart | None:
        """See `PackedLayout`."""
        del name, inputs

    def write_config(
        self, weights: Mapping[str, tuple[BlockFormat, Shape]], others: Iterable[str], inputs: InputFormats
    ) -> dict[str, object]:
        """See `PackedLayout`."""
        del weights, inputs
        return {"quant_method": "mxfp4", "modules_to_not_convert": [name.removesuffix(".weight") for name in others]}

    def read_config(
        self, content: Mapping[str, object], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """See `PackedLayout`."""
        del content, where
        names = set(stored)
        half = {f"{name}{end}": name for name in shapes for end in ("_blocks", "_scales")}
        return {half[name]: formats.find("mxfp4_e2m1") for name in sorted(names & half.keys())}, ()

    def read_inputs(
        self, content: Mapping[str, object], formats: Mapping[str, BlockFormat], where: str
    ) -> InputFormats:
        """See `PackedLayout`: there are none."""
        del content, formats, where
        return {}
