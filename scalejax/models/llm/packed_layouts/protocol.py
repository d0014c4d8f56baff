"""The protocol of a layout of quantized weights, and what layouts share: parts, shapes and whole blocks."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from scalejax.errors import UnsupportedError, UserError
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantized import static

Role = Literal["codes", "scales", "sub_scales", "tensor_scale", "shape"]
Shape = tuple[int, ...]
InputFormats = Mapping[str, static.Format]
"""Formats of what weights multiply, by the names of the weights."""

LARGEST_NVFP4 = 6.0 * 448  # of an element times that of a scale
_LARGEST_INPUT = 1e5


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One of the tensors that a weight becomes.

    Attributes:
      name: Of the tensor.
      dtype: Its dtype.
      shape: Its shape; all but the last axis of the weight come first.
      per_block: Entries of a block along the next axis; 0 = the whole weight has it once.
    """

    name: str
    dtype: np.dtype
    shape: Shape
    per_block: int


@dataclasses.dataclass(frozen=True)
class InputPart:
    """The tensor of the static scale of what a weight multiplies, float32.

    Attributes:
      name: Of the tensor.
      shape: Its shape, of one number.
      divided: Whether it holds what is divided by, one over the scale.
    """

    name: str
    shape: Shape
    divided: bool = False

    def store(self, scale: np.float32) -> np.ndarray:
        """A scale as the tensor."""
        whole = np.full(self.shape, scale, np.float32)
        return inverted(whole) if self.divided else whole

    def restore(self, stored: np.ndarray, where: str) -> np.float32:
        """The scale of a tensor.

        Raises:
          UserError: it is not above 0 and finite, or the wrong way round.
        """
        given = stored.astype(np.float32).reshape(())[()]
        if not 0 < given < np.inf:
            raise UserError(
                f"{where}: the scale of activations must be above 0 and finite; got {float(given):g}. The file is "
                "damaged: copy it anew, or quantize the model again."
            )
        if self.divided and LARGEST_NVFP4 / given > _LARGEST_INPUT:
            raise UserError(
                f"{where}: the global scale of activations is {float(given):g}, by which they are divided: they would "
                f"reach {LARGEST_NVFP4 / float(given):g}. A writer of another layout may have stored its inverse; "
                "write the checkpoint anew."
            )
        return np.float32(inverted(given)) if self.divided else np.float32(given)


class PackedLayout(Protocol):
    """A way to store quantized weights."""

    @property
    def name(self) -> str:
        """The name of the layout in `--layout`."""
        ...

    @property
    def experts(self) -> str:
        """The form in which it has experts, see `Architecture.forms`."""
        ...

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """Refuses a weight that it cannot hold.

        Raises:
          UnsupportedError: names the weight and what the layout has.
        """
        ...

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, TensorPart]:
        """The tensors of a weight."""
        ...

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """float32[]: the tensor scale nearest to `scale` that it keeps to the bit."""
        ...

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """A quantized weight as those tensors."""
        ...

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """Whole blocks of those tensors as a quantized weight, `length` values a row."""
        ...

    def input_part(self, name: str, inputs: static.Format) -> InputPart | None:
        """The tensor of the static scale of what a weight multiplies; None = the layout has none."""
        ...

    def write_config(
        self, weights: Mapping[str, tuple[BlockFormat, Shape]], others: Iterable[str], inputs: InputFormats
    ) -> dict[str, object]:
        """`quantization_config` of config.json.

        Args:
          weights: Quantized ones.
          others: Names of other matrices of products.
          inputs: Format of what a weight multiplies, for those that have a static scale.
        """
        ...

    def read_config(
        self, content: Mapping[str, object], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """The formats of the weights that are quantized, and what a user should know.

        Args:
          content: `quantization_config`.
          shapes: Of all weights, by name.
          stored: Names of the tensors in the files.
          where: For messages.

        Raises:
          UserError: it says what is not known here.
        """
        ...

    def read_inputs(
        self, content: Mapping[str, object], formats: Mapping[str, BlockFormat], where: str
    ) -> InputFormats:
        """Formats of what weights multiply, for those whose scales are static.

        Args:
          content: `quantization_config`.
          formats: Of the quantized weights, from `read_config`.
          where: For messages.

        Raises:
          UserError: it says what is not known here.
        """
        ...


def block_count(format: BlockFormat, shape: Shape) -> int:
    """Blocks of a row."""
    return math.ceil(shape[-1] / format.k1)


def inverted(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32. Of what this gives, twice gives the same again."""
    return (np.float32(1) / scale).astype(np.float32)


def check_whole_blocks(layout: str, name: str, format: BlockFormat, shape: Shape) -> None:
    """Refuses a row that ends within a block.

    Raises:
      UnsupportedError: names the weight and its columns.
    """
    if shape[-1] % format.k1:
        raise UnsupportedError(
            f"--layout {layout}: {name} has {shape[-1]} columns, no multiple of the {format.k1} of a block of "
            f"{format.name}, and the layout has no padding. Choose another format for it by a rule, or --layout "
            "scalejax."
        )


def as_packed(stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int) -> Packed:
    """The tensors of a weight, uint8 codes and all else, as `numerics` holds them, `length` values a row."""
    # numpy arrays are leaves of a pytree as good as jax's.
    arrays: Any = stored
    return Packed(
        codes=arrays["codes"],
        scales=arrays["scales"],
        sub_scales=arrays.get("sub_scales"),
        tensor_scale=arrays.get("tensor_scale"),
        format=format,
        axis=-1,
        length=length,
    )
