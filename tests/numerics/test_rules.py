"""Rules by path: the first that matches the whole path holds."""

import pytest

from scalejax.errors import UserError
from scalejax.numerics import rules
from scalejax.numerics.rules import QuantizationRule

FIRST, LAST = (
    QuantizationRule(module_path="layers/0/.*"),
    QuantizationRule(module_path="layers/.*", weight_qtype="int8"),
)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("layers/0/gate", FIRST), ("layers/10/gate", LAST), ("head", None), ("the/layers/0/gate", None)],
)
def test_the_first_rule_that_matches_the_whole_path_holds(path, wanted):
    assert rules.find((FIRST, LAST), path) is wanted


def test_a_broken_pattern_and_an_unknown_format_are_refused_by_name():
    with pytest.raises(UserError, match=r"module_path must be a regular expression; got '\('"):
        QuantizationRule(module_path="(")
    with pytest.raises(UserError, match="mxfp8_e4m3"):
        QuantizationRule(weight_qtype="mxfp8_e4m")
