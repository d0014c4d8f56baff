"""Which parameters and products take which number format: rules by path, in qwix's vocabulary."""

import dataclasses
import re
from collections.abc import Sequence

from scalejax.errors import UserError
from scalejax.numerics import formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """The formats of the modules whose path matches.

    Attributes:
      module_path: Regular expression that the whole path of a module has to match, such as "layers/.*/gate".
      weight_qtype: Format of its weights (`numerics.formats.FORMATS`); None = they stay as they are.
      act_qtype: Format of the activations that meet them in the forward pass; None = they stay as they are.
      bwd_qtype: Format of gradients in the products of the backward pass; None = they stay as they are.
    """

    module_path: str = ".*"
    weight_qtype: str | None = None
    act_qtype: str | None = None
    bwd_qtype: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise UserError(
                f"QuantizationRule: module_path must be a regular expression; got {self.module_path!r}: {error}. "
                'A dot stands for any character, "/" parts names.'
            ) from None
        for name in (self.weight_qtype, self.act_qtype, self.bwd_qtype):
            if name is not None:
                formats.find(name)


def find(rules: Sequence[QuantizationRule], path: str) -> QuantizationRule | None:
    """The first rule that matches the whole of a module's path, names parted by "/"; None = left as it is."""
    return next((rule for rule in rules if re.fullmatch(rule.module_path, path)), None)
