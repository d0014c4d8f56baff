"""Rules that give parameters and products their number formats by path, in qwix's vocabulary."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from scalejax.errors import UserError, check_one_of
from scalejax.numerics import formats
from scalejax.numerics.quantize import Tail
from scalejax.numerics.scales import ScaleRule, threshold

Scales = Literal["blocks", "rows", "tensor"]
Implementation = Literal["emulated", "native"]

_FLOAT8 = ("fp8_e4m3", "fp8_e5m2")
_SHOWN = 8  # nearest paths in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """The formats of the modules whose path matches.

    Attributes:
      module_path: Regular expression that the whole path of a module has to match, such as "layers/.*/gate".
      weight_qtype: Format of its weights (`numerics.formats.FORMATS`); None = they stay as they are.
      act_qtype: Format of the activations that meet them; None = they stay as they are.
      bwd_qtype: Format of gradients in the products of the backward pass, whose other operands are then quantized anew
        along the axis that those sum over; None = gradients stay as they are and meet the operands of the forward pass
        ("straight through").
      scales: "blocks": as the format has them. For formats with a scale in software (int8, fp8_e4m3, ...) also "rows",
        one scale for all values that a product adds up, and "tensor", one for the whole array. Both are taken from
        the array itself ("dynamic").
      scale_rule: How exponents of scales are found (`numerics.scales`); None = "floor". For formats that have some.
      tail: What becomes of an axis that is no multiple of the block: "refuse", or "pad" with zeros, which change no
        scale.
      implementation: "emulated": operands are rounded to the format, the product is that of floats. "native": FP8
        arrays meet in the product itself, which GPUs since Hopper have an instruction for.
    """

    module_path: str = ".*"
    weight_qtype: str | None = None
    act_qtype: str | None = None
    bwd_qtype: str | None = None
    scales: Scales = "blocks"
    scale_rule: ScaleRule | None = None
    tail: Tail = "refuse"
    implementation: Implementation = "emulated"

    def __post_init__(self) -> None:
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise UserError(
                f"QuantizationRule: module_path must be a regular expression; got {self.module_path!r}: {error}. "
                'A dot stands for any character, "/" parts names.'
            ) from None
        for field, choices in (("scales", Scales), ("tail", Tail), ("implementation", Implementation)):
            check_one_of(f"QuantizationRule: {field}", getattr(self, field), get_args(choices))
        named = [formats.find(name) for name in (self.weight_qtype, self.act_qtype, self.bwd_qtype) if name is not None]
        without = [format.name for format in named if format.scale != "float32" or format.sub_scale != "none"]
        if self.scales != "blocks" and without:
            raise UserError(
                f"QuantizationRule: scales={self.scales!r} is for formats with one scale in software (int8, int4, "
                f"int2, fp8_e4m3, fp8_e5m2); got {', '.join(without)}, whose blocks belong to the format. Set "
                "scales='blocks'."
            )
        sized = [name for name in (self.weight_qtype, self.act_qtype, self.bwd_qtype) if name and ":" in name]
        if self.scales != "blocks" and sized:
            raise UserError(
                f"QuantizationRule: scales={self.scales!r} says how many values share a scale, and so does "
                f"{', '.join(sized)}. Set scales='blocks', or leave the size out of the name."
            )
        if self.scale_rule is not None:
            check_one_of("QuantizationRule: scale_rule", self.scale_rule, get_args(ScaleRule))
            if not any(format.scale == "exponent" for format in named):
                raise UserError(
                    f"QuantizationRule: scale_rule={self.scale_rule!r} needs a format whose scales are exponents; got "
                    f"{', '.join(format.name for format in named) or 'no format'}. Leave it out."
                )
            for format in named:
                if format.scale == "exponent":
                    threshold(format.element, self.scale_rule)  # which refuses rules that its elements lack
        if self.implementation == "native":
            self._check_native()

    def _check_native(self) -> None:
        operands = (self.weight_qtype, self.act_qtype)
        if any(name not in _FLOAT8 for name in operands) or self.bwd_qtype not in (None, *_FLOAT8):
            raise UserError(
                "QuantizationRule: implementation='native' multiplies FP8 by FP8: weight_qtype and act_qtype must be "
                f"{' or '.join(_FLOAT8)}, bwd_qtype one of them or None; got {self.weight_qtype}, {self.act_qtype} and "
                f"{self.bwd_qtype}. Use 'emulated' for other formats."
            )
        # What cuBLASLt has no product for.
        if "fp8_e5m2" in operands and (operands[0] == operands[1] or self.bwd_qtype == "fp8_e5m2"):
            raise UserError(
                "QuantizationRule: implementation='native' has no product of fp8_e5m2 by fp8_e5m2. Take fp8_e4m3 for "
                "weight_qtype and act_qtype, and fp8_e5m2 for bwd_qtype alone."
            )
        if self.scales == "blocks":
            raise UserError(
                "QuantizationRule: implementation='native' needs one scale for all that a product adds up. Set "
                "scales='tensor', or scales='rows'."
            )

    @property
    def weight_block(self) -> int | None:
        """Values that share a scale in the format of weights; None = all that a product adds up, or more."""
        return None if self.weight_qtype is None or self.scales != "blocks" else formats.find(self.weight_qtype).k1


def find(rules: Sequence[QuantizationRule], path: str) -> QuantizationRule | None:
    """The first rule that matches the whole of a module's path, names parted by "/"; None = left as it is."""
    return next((rule for rule in rules if re.fullmatch(rule.module_path, path)), None)


def module_of(parameter: str) -> str:
    """The path that rules know a parameter by: its own, without a last "/kernel" or "/weight"."""
    return re.sub(r"/(kernel|weight)$", "", parameter)


def assign(
    rules: Sequence[QuantizationRule], paths: Iterable[str], tables: Iterable[str] = ()
) -> dict[str, QuantizationRule]:
    """Which modules take which rule; those that none matches are left out.

    Args:
      rules: The first that matches holds.
      paths: Of all modules whose products can be quantized.
      tables: Of all tables whose rows can be: they are read in the format of weights, and nothing multiplies them.

    Raises:
      UserError: a rule is for no module, because there is none of that path, or because others come before it; or it is
        for tables alone and names none but formats of products.
    """
    tables = sorted(tables)
    paths = sorted([*paths, *tables])
    found = {path: rule for path in paths if (rule := find(rules, path)) is not None}
    for number, rule in enumerate(rules):
        matching = [path for path in paths if re.fullmatch(rule.module_path, path)]
        what = f"quantization.{number}: module_path {rule.module_path!r} matches"
        if not matching:
            near = difflib.get_close_matches(rule.module_path, paths, n=_SHOWN, cutoff=0.0)
            of = f"the nearest of {len(paths)} modules are" if len(paths) > len(near) else "there are"
            raise UserError(f"{what} no module; {of} {', '.join(near)}.")
        if all(find(rules[:number], path) is not None for path in matching):
            raise UserError(
                f"{what} only modules that earlier rules take, {', '.join(matching[:_SHOWN])}. Put exceptions first."
            )
        products = [name for name in ("act_qtype", "bwd_qtype") if getattr(rule, name) is not None]
        if products and rule.weight_qtype is None and set(matching) <= set(tables):
            raise UserError(
                f"{what} only embedding tables, {', '.join(matching[:_SHOWN])}, whose rows have a weight_qtype and no "
                f"{' or '.join(products)}. Name a weight_qtype, or leave the rule out."
            )
    return found
