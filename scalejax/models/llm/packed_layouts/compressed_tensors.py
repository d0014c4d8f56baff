"""The layout of compressed-tensors: integers, FP8, MX and NVFP4, with the schemes that its config groups name."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import ml_dtypes
import numpy as np

from scalejax.errors import UnsupportedError, UserError
from scalejax.models.llm.packed_layouts import protocol
from scalejax.models.llm.packed_layouts.protocol import InputFormats, InputPart, Role, Shape, TensorPart
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantized import static

_U8, _I8, _F32, _I32, _I64 = (np.dtype(kind) for kind in (np.uint8, np.int8, np.float32, np.int32, np.int64))
_F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST_WEIGHT = 1e4


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

BYTES = _Scheme("int-quantized", "integers", "int")
"""int8 beside int8 activations."""

_TENSOR = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False}
_INPUTS: dict[static.Format, dict[str, object]] = {
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


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """Integers, FP8, MX and NVFP4 as vLLM, llm-compressor and transformers read them.

    Attributes:
      name: See `PackedLayout`.
      experts: The same.
      integers: "words": of 32 bits, which is how loaders take weights that meet float activations; "bytes": int8 as
        it is, which is how they take weights that meet int8 activations.
    """

    name: str = "compressed-tensors"
    experts: str = "separate"
    integers: Literal["words", "bytes"] = "words"

    def check(self, name: str, format: BlockFormat, shape: Shape) -> None:
        """See `PackedLayout`."""
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
        protocol.check_whole_blocks(self.name, name, format, shape)
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

    def parts(self, name: str, format: BlockFormat, shape: Shape) -> dict[Role, TensorPart]:
        """See `PackedLayout`."""
        rows, columns = shape
        n, bits, kind = protocol.block_count(format, shape), format.element.bits, self._scheme(format).kind
        packed = f"{name}_packed"
        codes = {
            "packed integers": TensorPart(packed, _I32, (rows, columns * bits // 32), format.k1 * bits // 32),
            "packed floats": TensorPart(packed, _U8, (rows, columns * bits // 8), format.k1 * bits // 8),
            "float8": TensorPart(name, _F8, (rows, columns), format.k1),
            "integers": TensorPart(name, _I8, (rows, columns), format.k1),
        }[kind]
        scale = {"float32": _F32, "exponent": _U8, "e4m3": _F8}[format.scale]
        one = format.name.endswith(_WHOLE)
        scales = TensorPart(f"{name}_scale", scale, (1,) if one else (rows, n), 0 if one else 1)
        made: dict[Role, TensorPart] = {"codes": codes, "scales": scales}
        if format.scale == "e4m3":
            made["tensor_scale"] = TensorPart(f"{name}_global_scale", _F32, (1,), 0)
        if kind == "packed integers":
            made["shape"] = TensorPart(f"{name}_shape", _I64, (2,), 0)
        return made

    def tensor_scale(self, scale: np.ndarray) -> np.ndarray:
        """See `PackedLayout`."""
        return protocol.inverted(protocol.inverted(scale))

    def store(self, packed: Packed, format: BlockFormat, shape: Shape) -> dict[Role, np.ndarray]:
        """See `PackedLayout`."""
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
            made["tensor_scale"] = protocol.inverted(np.asarray(packed.tensor_scale, np.float32)).reshape(1)
        if kind == "packed integers":
            made["shape"] = np.asarray(shape, np.int64)
        return made

    def restore(self, stored: Mapping[Role, np.ndarray], format: BlockFormat, length: int, where: str) -> Packed:
        """See `PackedLayout`."""
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
            if not np.isfinite(given) or given <= 0 or protocol.LARGEST_NVFP4 / given > _LARGEST_WEIGHT:
                raise UserError(
                    f"{where}: its global scale is {float(given):g}, by which scales are divided: weights would reach "
                    f"{protocol.LARGEST_NVFP4 / float(given) if given else math.inf:g}. A writer of another layout "
                    "may have stored its inverse; write the checkpoint anew."
                )
            made["tensor_scale"] = protocol.inverted(given)
        return protocol.as_packed(made, format, length)

    def input_part(self, name: str, inputs: static.Format) -> InputPart | None:
        """See `PackedLayout`."""
        divided = inputs == "nvfp4"
        what = "input_global_scale" if divided else "input_scale"
        return InputPart(f"{name.removesuffix('.weight')}.{what}", (1,), divided)

    def _scheme(self, format: BlockFormat) -> _Scheme:
        found = _SCHEMES[format.name.partition(":")[0]]
        return BYTES if found.kind == "packed integers" and self.integers == "bytes" else found

    def write_config(
        self, weights: Mapping[str, tuple[BlockFormat, Shape]], others: Iterable[str], inputs: InputFormats
    ) -> dict[str, object]:
        """See `PackedLayout`."""
        groups: list[tuple[dict[str, object], static.Format | None, str, list[str]]] = []
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
        self, content: Mapping[str, object], shapes: Mapping[str, Shape], stored: Iterable[str], where: str
    ) -> tuple[dict[str, BlockFormat], tuple[str, ...]]:
        """See `PackedLayout`."""
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
        self, content: Mapping[str, object], formats: Mapping[str, BlockFormat], where: str
    ) -> InputFormats:
        """See `PackedLayout`."""
        found: dict[str, static.Format] = {}
        for name in formats:
            own = _group_of(content, name, where)
            assert own is not None
            label, group = own
            inputs = _inputs_of(group.get("input_activations"), f"{where}: {label}: input_activations")
            if inputs is not None:
                found[name] = inputs
        return found

    def _check_storage(self, given: object, format: BlockFormat, where: str) -> None:
        """Refuses other ways to store the same numbers, such as only those that are not zero."""
        wanted = self._scheme(format).format
        if given not in (None, "mixed-precision", wanted):
            raise UserError(
                f"{where}: weights in {format.name} are stored as {given}, which is not known here; {wanted} is. Get "
                "the model unquantised and use `scalejax quantize`."
            )


def _groups(content: Mapping[str, object], where: str) -> dict[str, dict[str, object]]:
    groups = content.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise UserError(f"{where}: must have config_groups by name, each with its targets; got {groups!r:.60}.")
    return groups


def _group_of(content: Mapping[str, object], name: str, where: str) -> tuple[str, dict[str, object]] | None:
    """The group that a matrix belongs to, by its name and as it is; None = it is not quantized."""
    module = name.removesuffix(".weight")
    if any(_matches(ignored, module) for ignored in _names(content, "ignore", where)):
        return None
    for label, group in _groups(content, where).items():
        targets = _names(group, "targets", f"{where}: {label}")
        if any(target == "Linear" or _matches(target, module) for target in targets):
            return label, group
    return None


def _names(content: Mapping[str, object], key: str, where: str) -> list[str]:
    names = content.get(key) or []
    if not isinstance(names, list):
        raise UserError(f"{where}: {key} must be a list of names of modules; got {names!r:.60}.")
    return [str(name) for name in names]


def _arguments(scheme: _Scheme, format: BlockFormat, shape: Shape) -> dict[str, object]:
    # One scale a row is a strategy of its own, whatever the length of the row.
    channel = format.scale == "float32" and format.k1 == shape[-1]
    made: dict[str, object] = {
        "num_bits": format.element.bits,
        "type": scheme.type,
        "symmetric": True,
        "strategy": "channel" if channel else scheme.strategy,
        "group_size": None if channel else format.k1,
        "dynamic": False,
    }
    return made | ({} if scheme.scale_dtype is None else {"scale_dtype": scheme.scale_dtype})


def _format_of(args: object, shape: Shape, where: str) -> BlockFormat:
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


def _inputs_of(args: object, where: str) -> static.Format | None:
    """The format of inputs under QuantizationArgs, if their scales are static; None = there are none such."""
    if args is None:
        return None
    if not isinstance(args, dict):
        raise UserError(f"{where}: must say how activations are quantized; got {args!r}.")
    if args.get("dynamic") is True:
        return None
    if args.get("symmetric") is False:
        raise UserError(f"{where}: activations with zero points (symmetric false) are not known here; symmetric are.")
    stated = {key: args.get(key) for key in ("num_bits", "type", "strategy", "group_size")}
    defaults = {"num_bits": 8, "type": "int", "strategy": "tensor" if stated["group_size"] is None else "group"}
    stated |= {key: value for key, value in defaults.items() if stated[key] is None}
    stated["dynamic"] = args.get("dynamic") or False
    for format, known in _INPUTS.items():
        if all(known[key] == value for key, value in stated.items()):
            return format
    raise UserError(
        f"{where}: static scales of activations of this kind are not known here: {stated}. Known are FP8 and int8 with "
        "one scale a tensor (dynamic false), and NVFP4 (dynamic local). Write the checkpoint anew with one of these."
    )


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _signs(bits: int) -> np.uint8:
    """The sign bits of all codes in a byte: two's complement to and from offset binary."""
    return np.uint8(sum(1 << i for i in range(bits - 1, 8, bits)))
