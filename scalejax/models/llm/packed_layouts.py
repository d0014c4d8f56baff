"""How checkpoints store quantized weights: which tensors a weight becomes, and what config.json says of it.

A weight [rows, columns] is quantized along its columns, over which products sum. n blocks of k1 numbers cover a row:

    scalejax            WEIGHT.FORMAT.codes         uint8 [rows, n k1 bits / 8]   streams of bits, see numerics.packing
                        WEIGHT.FORMAT.scales        uint8 or float32 [rows, n]
                        WEIGHT.FORMAT.sub_scales    uint8 [rows, n k1 d2 / (8 k2)]         where the format has them
                        WEIGHT.FORMAT.tensor_scale  float32 []                             where the format has one
                        WEIGHT.inputs.FORMAT.scale  float32 []                             where inputs have one
    compressed-tensors  M.weight_packed             uint8, or int32 of integers + 2^(bits - 1), least first
                        M.weight                    instead of it: float8_e4m3 or int8 [rows, columns]
                        M.weight_scale              uint8 (E8M0), float8_e4m3 (NVFP4) or float32 [rows, n]
                        M.weight_global_scale       float32 [1], NVFP4: what scales are *divided* by
                        M.weight_shape              int64 [2], beside int32
                        M.input_scale               float32 [1], of what the weight multiplies
                        M.input_global_scale        float32 [1], instead of it, NVFP4: what is *divided* by
    gpt-oss             WEIGHT_blocks               uint8 [rows, n, 16], MXFP4, first number in the low nibble
                        WEIGHT_scales               uint8 [rows, n], E8M0

where WEIGHT is the tensor's name and M that name without ".weight". The global scale of NVFP4 is one over the tensor
scale g of `numerics`: other writers of NVFP4 store g itself, under other names, and a reader that takes one for the
other generates nonsense.

Source: https://github.com/neuralmagic/compressed-tensors and transformers' integration of mxfp4, as of 2026.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from scalejax.errors import UnsupportedError, UserError
from scalejax.numerics import formats, static
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed

Role = Literal["codes", "scales", "sub_scales", "tensor_scale", "shape"]
Shape = tuple[int, ...]

_U8, _I8, _F32, _I32, _I64 = (np.dtype(kind) for kind in (np.uint8, np.int8, np.float32, np.int32, np.int64))
_F8 = np.dtype(ml_dtypes.float8_e4m3fn)
VERSION = 2
"""1 has no scales of inputs."""
_LARGEST_WEIGHT = 1e4
_LARGEST_INPUT = 1e5
_LARGEST_NVFP4 = 6.0 * 448  # of an element times that of a scale


@dataclasses.dataclass(frozen=True)
class Part:
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
        whole = np.full(self.shape, scale, _F32)
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
        if self.divided and _LARGEST_NVFP4 / given > _LARGEST_INPUT:
            raise UserError(
                f"{where}: the global scale of activations is {float(given):g}, by which they are divided: they would "
                f"reach {_LARGEST_NVFP4 / float(given):g}. A writer of another layout may have stored its inverse; "
                "write the checkpoint anew."
            )
        return np.float32(inverted(given)) if self.divided else np.float32(given)


class Layout(Protocol):
    """A way to store quantized weights."""

    @property
    def name(self) -> str:
        """What `--layout` calls it."""
        ...

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """Refuses a weight that it cannot hold.

        Raises:
          UnsupportedError: names the weight and what the layout has.
        """
        ...

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, Part]:
        """The tensors of a weight."""
        ...

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """float32[]: the tensor scale nearest to `scale` that it keeps to the bit."""
        ...

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """A quantized weight as those tensors."""
        ...

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """Whole blocks of those tensors as a quantized weight, `length` numbers a row."""
        ...

    def input_part(self, name: str, inputs: static.Format) -> "InputPart | None":
        """The tensor of the static scale of what a weight multiplies; None = the layout has none."""
        ...

    def write_config(
        self,
        weights: Mapping[str, tuple[BlockFormat, Shape]],
        others: Iterable[str],
        inputs: Mapping[str, static.Format],
    ) -> dict[str, Any]:
        """`quantization_config` of config.json.

        Args:
          weights: Quantized ones.
          others: Names of other matrices of products.
          inputs: Format of what a weight multiplies, for those that have a static scale.
        """
        ...

    def read_config(
        self, content: Mapping[str, Any], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
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
        self, content: Mapping[str, Any], formats: Mapping[str, BlockFormat], where: str
    ) -> dict[str, static.Format]:
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


@dataclasses.dataclass(frozen=True)
class Own:
    """Every format of `numerics`; tensors say in their names what they are."""

    name: str = "scalejax"

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """See `Layout`: nothing is refused."""
        del name, format, shape

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, Part]:
        """See `Layout`."""
        *rows, _ = shape
        n = block_count(format, shape)

        def part(role: Role, dtype: np.dtype, per_block: int) -> Part:
            own = (*rows, n * per_block) if per_block else ()
            return Part(f"{name}.{format.name}.{role}", dtype, own, per_block)

        made: dict[Role, Part] = {
            "codes": part("codes", _U8, format.k1 * format.element.bits // 8),
            "scales": part("scales", _F32 if format.scale == "float32" else _U8, 1),
        }
        if format.sub_scale != "none":
            made["sub_scales"] = part("sub_scales", _U8, format.k1 // format.k2 * format.d2 // 8)
        if format.scale == "e4m3":
            made["tensor_scale"] = part("tensor_scale", _F32, 0)
        return made

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """See `Layout`."""
        return scale

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """See `Layout`."""
        del format, shape
        given: dict[Role, Any] = {
            "codes": packed.codes,
            "scales": packed.scales,
            "sub_scales": packed.sub_scales,
            "tensor_scale": packed.tensor_scale,
        }
        return {role: np.asarray(array) for role, array in given.items() if array is not None}

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """See `Layout`."""
        del where
        return _packed(stored, format, length)

    def input_part(self, name: str, inputs: static.Format) -> "InputPart | None":
        """See `Layout`."""
        return InputPart(f"{name}.inputs.{inputs}.scale", ())

    def write_config(
        self,
        weights: Mapping[str, tuple[BlockFormat, Shape]],
        others: Iterable[str],
        inputs: Mapping[str, static.Format],
    ) -> dict[str, Any]:
        """See `Layout`; without scales of inputs, what version 1 reads."""
        del others
        made: dict[str, Any] = {"quant_method": self.name, "version": VERSION if inputs else 1}
        made["weights"] = {name: format.name for name, (format, _) in weights.items()}
        return made | ({"inputs": dict(inputs)} if inputs else {})

    def read_config(
        self, content: Mapping[str, Any], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """See `Layout`."""
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
        self, content: Mapping[str, Any], formats: Mapping[str, BlockFormat], where: str
    ) -> dict[str, static.Format]:
        """See `Layout`."""
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


@dataclasses.dataclass(frozen=True)
class GptOss:
    """MXFP4 alone, as the gpt-oss models have their experts."""

    name: str = "gpt-oss"

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """See `Layout`."""
        if format.name != "mxfp4_e2m1":
            raise UnsupportedError(
                f"--layout {self.name} holds mxfp4_e2m1 alone; got {format.name} for {name}. Choose that format, or "
                "--layout scalejax."
            )
        _check_whole(self.name, name, format, shape)

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, Part]:
        """See `Layout`."""
        *rows, _ = shape
        n = block_count(format, shape)
        return {
            "codes": Part(f"{name}_blocks", _U8, (*rows, n, format.k1 // 2), 1),
            "scales": Part(f"{name}_scales", _U8, (*rows, n), 1),
        }

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """See `Layout`."""
        return scale

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """See `Layout`."""
        codes = self.parts("", format, shape)["codes"].shape
        return {"codes": np.asarray(packed.codes).reshape(codes), "scales": np.asarray(packed.scales)}

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """See `Layout`."""
        del where
        codes = stored["codes"]
        flat = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
        return _packed({**stored, "codes": flat}, format, length)

    def input_part(self, name: str, inputs: static.Format) -> "InputPart | None":
        """See `Layout`."""
        del name, inputs

    def write_config(
        self,
        weights: Mapping[str, tuple[BlockFormat, Shape]],
        others: Iterable[str],
        inputs: Mapping[str, static.Format],
    ) -> dict[str, Any]:
        """See `Layout`."""
        del weights, inputs
        return {"quant_method": "mxfp4", "modules_to_not_convert": [name.removesuffix(".weight") for name in others]}

    def read_config(
        self, content: Mapping[str, Any], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """See `Layout`."""
        del content, where
        names = set(stored)
        half = {f"{name}{end}": name for name in shapes for end in ("_blocks", "_scales")}
        return {half[name]: formats.find("mxfp4_e2m1") for name in sorted(names & half.keys())}, ()

    def read_inputs(
        self, content: Mapping[str, Any], formats: Mapping[str, BlockFormat], where: str
    ) -> dict[str, static.Format]:
        """See `Layout`: there are none."""
        del content, formats, where
        return {}


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """Integers, FP8, MX and NVFP4 as vLLM, llm-compressor and transformers read them.

    Attributes:
      name: See `Layout`.
      integers: "words": of 32 bits, which is how loaders take weights that meet float activations; "bytes": int8 as
        it is, which is how they take weights that meet int8 activations.
    """

    name: str = "compressed-tensors"
    integers: Literal["words", "bytes"] = "words"

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """See `Layout`."""
        if format.name.partition(":")[0] not in _SCHEMES:
            raise UnsupportedError(
                f"--layout {self.name} holds {', '.join(_SCHEMES)}; got {format.name} for {name}. Choose one of these, "
                "or --layout scalejax."
            )
        if len(shape) != 2 or not name.endswith(".weight") or name.endswith("embed_tokens.weight"):
            raise UnsupportedError(
                f"--layout {self.name} holds matrices of products; got {name}. Leave it as it is by a rule, or choose "
                "--layout scalejax."
            )
        _check_whole(self.name, name, format, shape)
        if self.integers == "bytes" and format.name.partition(":")[0] in ("int2", "int4"):
            raise UnsupportedError(
                f"--layout {self.name}: weights that meet int8 activations are int8; got {format.name} for {name}. "
                "Take int8:row, or other activations."
            )
        if self._scheme(format).kind == "packed integers" and format.k1 * format.element.bits % 32:
            raise UnsupportedError(
                f"--layout {self.name}: blocks of {format.name} do not fill whole words of 32 bits ({name}). Take a "
                f"multiple of {32 // format.element.bits}."
            )

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, Part]:
        """See `Layout`."""
        rows, columns = shape
        n, bits, kind = block_count(format, shape), format.element.bits, self._scheme(format).kind
        packed = f"{name}_packed"
        codes = {
            "packed integers": Part(packed, _I32, (rows, columns * bits // 32), format.k1 * bits // 32),
            "packed floats": Part(packed, _U8, (rows, columns * bits // 8), format.k1 * bits // 8),
            "float8": Part(name, _F8, (rows, columns), format.k1),
            "integers": Part(name, _I8, (rows, columns), format.k1),
        }[kind]
        scale = {"float32": _F32, "exponent": _U8, "e4m3": _F8}[format.scale]
        one = format.name.endswith(_WHOLE)
        scales = Part(f"{name}_scale", scale, (1,) if one else (rows, n), 0 if one else 1)
        made: dict[Role, Part] = {"codes": codes, "scales": scales}
        if format.scale == "e4m3":
            made["tensor_scale"] = Part(f"{name}_global_scale", _F32, (1,), 0)
        if kind == "packed integers":
            made["shape"] = Part(f"{name}_shape", _I64, (2,), 0)
        return made

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """See `Layout`."""
        return inverted(inverted(scale))

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """See `Layout`."""
        kind = self._scheme(format).kind
        codes, scales = np.ascontiguousarray(packed.codes), np.ascontiguousarray(packed.scales)
        if kind == "packed integers":
            codes = (codes ^ _signs(format.element.bits)).view("<i4")
        elif kind == "float8":
            codes = codes.view(_F8)
        elif kind == "integers":
            codes = codes.view(_I8)
        made: dict[Role, np.ndarray] = {"codes": codes, "scales": scales}
        if format.scale == "e4m3":
            made["scales"] = scales.view(_F8)
            made["tensor_scale"] = inverted(np.asarray(packed.tensor_scale, np.float32)).reshape(1)
        if kind == "packed integers":
            made["shape"] = np.asarray(shape, np.int64)
        return made

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """See `Layout`."""
        made = dict(stored)
        if self._scheme(format).kind == "packed integers":
            made["codes"] = np.ascontiguousarray(made["codes"]).view(np.uint8) ^ _signs(format.element.bits)
        for role in ("codes", "scales"):
            if made[role].dtype in (_F8, _I8):
                made[role] = np.ascontiguousarray(made[role]).view(np.uint8)
        if format.scale == "float32":
            scales = made["scales"].astype(np.float32)
            made["scales"] = np.broadcast_to(scales, (len(made["codes"]), scales.shape[-1]))
        if format.scale == "e4m3":
            given = made["tensor_scale"].astype(np.float32).reshape(())
            if not np.isfinite(given) or given <= 0 or _LARGEST_NVFP4 / given > _LARGEST_WEIGHT:
                raise UserError(
                    f"{where}: its global scale is {float(given):g}, by which scales are divided: weights would reach "
                    f"{_LARGEST_NVFP4 / float(given) if given else math.inf:g}. A writer of another layout may have "
                    "stored its inverse; write the checkpoint anew."
                )
            made["tensor_scale"] = inverted(given)
        return _packed(made, format, length)

    def input_part(self, name: str, inputs: static.Format) -> "InputPart | None":
        """See `Layout`."""
        divided = inputs == "nvfp4"
        what = "input_global_scale" if divided else "input_scale"
        return InputPart(f"{name.removesuffix('.weight')}.{what}", (1,), divided)

    def _scheme(self, format: BlockFormat) -> "_Scheme":
        found = _SCHEMES[format.name.partition(":")[0]]
        return _BYTES if found.kind == "packed integers" and self.integers == "bytes" else found

    def write_config(
        self,
        weights: Mapping[str, tuple[BlockFormat, Shape]],
        others: Iterable[str],
        inputs: Mapping[str, static.Format],
    ) -> dict[str, Any]:
        """See `Layout`."""
        groups: list[tuple[dict[str, Any], static.Format | None, str, list[str]]] = []
        for name, (format, shape) in weights.items():
            scheme, met = self._scheme(format), inputs.get(name)
            args = _arguments(scheme, format, shape)
            group = next((g for g in groups if g[:2] == (args, met)), None)
            if group is None:
                groups.append(group := (args, met, scheme.format, []))
            group[3].append(name.removesuffix(".weight"))
        kinds = {format for _, _, format, _ in groups}
        one = len(groups) == 1
        return {
            "quant_method": self.name,
            "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": {
                    # A class of modules where one group has them all, else each by name.
                    "targets": ["Linear"] if one else targets,
                    "weights": args,
                    "input_activations": None if met is None else dict(_INPUTS[met]),
                    "output_activations": None,
                    "format": format,
                }
                for i, (args, met, format, targets) in enumerate(groups)
            },
            "ignore": [name.removesuffix(".weight") for name in others],
        }

    def read_config(
        self, content: Mapping[str, Any], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """See `Layout`."""
        del stored
        if content.get("transform_config"):
            raise UserError(
                f"{where}: transform_config: weights that go with rotated activations are not known here. Get the "
                "model unquantised and use `scalejax quantize`."
            )
        found: dict[str, BlockFormat] = {}
        for name, shape in shapes.items():
            linear = len(shape) == 2 and not name.endswith("embed_tokens.weight")
            if linear and (own := _group_of(content, name, where)) is not None:
                label, group = own
                found[name] = _format_of(group.get("weights"), shape, f"{where}: {label}")
                self._check_storage(group.get("format") or content.get("format"), found[name], f"{where}: {label}")
        groups = _groups(content, where).values()
        args = [group.get("input_activations") for group in groups]
        more = ["input activations"] if any(isinstance(a, dict) and a.get("dynamic") is True for a in args) else []
        more += ["output activations"] if any(g.get("output_activations") for g in groups) else []
        more += ["keys and values of attention"] if content.get("kv_cache_scheme") else []
        remark = "quantized where the checkpoint comes from, and not here: " + ", ".join(more)
        return found, (remark,) if more else ()

    def read_inputs(
        self, content: Mapping[str, Any], formats: Mapping[str, BlockFormat], where: str
    ) -> dict[str, static.Format]:
        """See `Layout`."""
        found: dict[str, static.Format] = {}
        for name in formats:
            own = _group_of(content, name, where)
            assert own is not None
            label, group = own
            inputs = _inputs_of(group.get("input_activations"), f"{where}: {label}: input_activations")
            if inputs is not None:
                found[name] = inputs
        return found

    def _check_storage(self, given: Any, format: BlockFormat, where: str) -> None:
        """Refuses other ways to store the same numbers, such as only those that are not zero."""
        wanted = self._scheme(format).format
        if given not in (None, "mixed-precision", wanted):
            raise UserError(
                f"{where}: weights in {format.name} are stored as {given}, which is not known here; {wanted} is. Get "
                "the model unquantised and use `scalejax quantize`."
            )


def _groups(content: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    groups = content.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise UserError(f"{where}: must have config_groups by name, each with its targets; got {groups!r:.60}.")
    return groups


def _group_of(content: Mapping[str, Any], name: str, where: str) -> tuple[str, dict[str, Any]] | None:
    """The group that a matrix belongs to, by its name and as it is; None = it is not quantized."""
    module = name.removesuffix(".weight")
    if any(_matches(str(ignored), module) for ignored in content.get("ignore") or []):
        return None
    for label, group in _groups(content, where).items():
        targets = [str(target) for target in group.get("targets") or []]
        if any(target == "Linear" or _matches(target, module) for target in targets):
            return label, group
    return None


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Own(), CompressedTensors(), GptOss())}
_INT8 = CompressedTensors(integers="bytes")
_METHODS = {"scalejax": "scalejax", "compressed-tensors": "compressed-tensors", "mxfp4": "gpt-oss"}


def find_layout(name: str, inputs: static.Format | None = None) -> Layout:
    """The layout that `--layout` names, for weights that multiply such inputs.

    Raises:
      UserError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise UserError(f"--layout must be one of {', '.join(LAYOUTS)}; got {name!r}.")
    return _INT8 if name == _INT8.name and inputs == "int8" else LAYOUTS[name]


def check_inputs(layout: Layout, name: str, inputs: static.Format, shape: Shape) -> None:
    """Refuses a static scale for what a weight multiplies where there can be none.

    Raises:
      UnsupportedError: names the weight, and what the layout or the format lacks.
    """
    if layout.input_part(name, inputs) is None:
        raise UnsupportedError(
            f"--layout {layout.name} has no scales of activations ({name}). Leave --activations out, or choose "
            "--layout scalejax or compressed-tensors."
        )
    if inputs == "nvfp4" and shape[-1] % formats.find(inputs).k1:
        raise UnsupportedError(
            f"--activations nvfp4: {name} sums over {shape[-1]} numbers, no multiple of blocks of 16. Take fp8_e4m3 or "
            "int8."
        )


def layout_of(content: Any, where: str) -> Layout:
    """The layout that a `quantization_config` speaks of.

    Raises:
      UserError: none that is known here.
    """
    method = content.get("quant_method") if isinstance(content, dict) else None
    if method not in _METHODS:
        raise UserError(
            f"{where}: quant_method {method!r}: quantised weights of this kind are not known here; "
            f"{', '.join(_METHODS)} are. Get the model unquantised and use `scalejax quantize`."
        )
    groups = content.get("config_groups")
    kinds = [g.get("format") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    whole = _METHODS[method] == _INT8.name and _BYTES.format in (content.get("format"), *kinds)
    return _INT8 if whole else LAYOUTS[_METHODS[method]]


def inverted(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32. Of what this gives, twice gives the same again."""
    return (np.float32(1) / scale).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """A format in words of compressed-tensors."""

    format: str
    kind: Literal["packed integers", "integers", "packed floats", "float8"]
    type: Literal["int", "float"]
    strategy: Literal["group", "tensor_group"] = "group"
    scale_dtype: str | None = None


_SCHEMES = {
    "int2": _Scheme("pack-quantized", "packed integers", "int"),
    "int4": _Scheme("pack-quantized", "packed integers", "int"),
    "int8": _Scheme("pack-quantized", "packed integers", "int"),
    "fp8_e4m3": _Scheme("float-quantized", "float8", "float"),
    "mxfp8_e4m3": _Scheme("mxfp8-quantized", "float8", "float", scale_dtype="torch.uint8"),
    "mxfp6_e2m3": _Scheme("mxfp6-pack-quantized", "packed floats", "float", scale_dtype="torch.uint8"),
    "mxfp4_e2m1": _Scheme("mxfp4-pack-quantized", "packed floats", "float", scale_dtype="torch.uint8"),
    "nvfp4": _Scheme("nvfp4-pack-quantized", "packed floats", "float", "tensor_group", "torch.float8_e4m3fn"),
}


_WHOLE = ":tensor"
"""Behind the name of a format that is read and not written: one scale a weight, which all rows share here."""

_BYTES = _Scheme("int-quantized", "integers", "int")
"""int8 beside int8 activations."""

_TENSOR = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False}
_INPUTS: dict[static.Format, dict[str, Any]] = {
    "fp8_e4m3": {**_TENSOR, "type": "float"},
    "int8": {**_TENSOR, "type": "int"},
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",  # scales of blocks are found anew, that of the tensor is not
        "scale_dtype": "torch.float8_e4m3fn",
    },
}
"""QuantizationArgs of activations under static scales."""


def _arguments(scheme: _Scheme, format: BlockFormat, shape: Shape) -> dict[str, Any]:
    # One scale a row is a strategy of its own, whatever the length of the row.
    channel = format.scale == "float32" and format.k1 == shape[-1]
    made = {
        "num_bits": format.element.bits,
        "type": scheme.type,
        "symmetric": True,
        "strategy": "channel" if channel else scheme.strategy,
        "group_size": None if channel else format.k1,
        "dynamic": False,
    }
    return made | ({} if scheme.scale_dtype is None else {"scale_dtype": scheme.scale_dtype})


def _format_of(args: Any, shape: Shape, where: str) -> BlockFormat:
    """The format of a weight under QuantizationArgs."""
    if not isinstance(args, dict):
        raise UserError(f"{where}: must say how weights are quantized; got weights {args!r}.")
    bits, kind, strategy, group = (args.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    if args.get("symmetric") is False:
        raise UserError(f"{where}: weights with zero points (symmetric false) are not known here; symmetric ones are.")
    if args.get("actorder") in ("group", True):
        raise UserError(f"{where}: weights in another order of columns (actorder) are not known here.")
    if strategy == "tensor" and bits == 8:
        rows = _format_of({**args, "strategy": "channel"}, shape, where)
        return dataclasses.replace(rows, name=rows.name.partition(":")[0] + _WHOLE)
    if strategy == "channel":
        group = shape[-1]
    elif strategy not in ("group", "tensor_group") or not isinstance(group, int):
        raise UserError(
            f"{where}: strategy {strategy!r} is not known here; group, tensor_group, channel and, of 8 bits, tensor "
            "are. Write the checkpoint anew with one of these."
        )
    exponents = str(args.get("scale_dtype")) == "torch.uint8"
    names = {
        ("float", 4, 32): "mxfp4_e2m1",
        ("float", 6, 32): "mxfp6_e2m3",
        ("float", 4, 16): "nvfp4",
    }
    if kind == "float" and bits == 8:
        return formats.find("mxfp8_e4m3" if exponents and group == 32 else f"fp8_e4m3:{group}")
    if kind == "int" and bits in (2, 4, 8):
        return formats.find(f"int{bits}:{group}")
    name = names.get((str(kind), bits if isinstance(bits, int) else 0, group))
    if name is None:
        raise UserError(
            f"{where}: weights of type {kind}, {bits} bits and groups of {group} are not known here; "
            f"{', '.join(_SCHEMES)} are."
        )
    return formats.find(name)


def _inputs_of(args: Any, where: str) -> static.Format | None:
    """The format of inputs under QuantizationArgs, if their scales are static; None = there are none such."""
    if args is None:
        return None
    if not isinstance(args, dict):
        raise UserError(f"{where}: must say how activations are quantized; got {args!r}.")
    if args.get("dynamic") is True:
        return None
    if args.get("symmetric") is False:
        raise UserError(f"{where}: activations with zero points (symmetric false) are not known here; symmetric are.")
    told = {key: args.get(key) for key in ("num_bits", "type", "strategy", "group_size")}
    defaults = {"num_bits": 8, "type": "int", "strategy": "tensor" if told["group_size"] is None else "group"}
    told |= {key: value for key, value in defaults.items() if told[key] is None}
    told["dynamic"] = args.get("dynamic") or False
    for format, known in _INPUTS.items():
        if all(known[key] == value for key, value in told.items()):
            return format
    raise UserError(
        f"{where}: static scales of activations of this kind are not known here: {told}. Known are FP8 and int8 with "
        "one scale a tensor (dynamic false), and NVFP4 (dynamic local). Write the checkpoint anew with one of these."
    )


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _found(name: str, where: str) -> BlockFormat:
    try:
        return formats.find(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_whole(layout: str, name: str, format: BlockFormat, shape: Shape) -> None:
    if shape[-1] % format.k1:
        raise UnsupportedError(
            f"--layout {layout}: {name} has {shape[-1]} columns, no multiple of the {format.k1} of a block of "
            f"{format.name}, and the layout has no padding. Choose another format for it by a rule, or --layout "
            "scalejax."
        )


def _signs(bits: int) -> np.uint8:
    """The sign bits of all codes in a byte: two's complement to and from offset binary."""
    return np.uint8(sum(1 << i for i in range(bits - 1, 8, bits)))


def _packed(stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int) -> Packed:
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
