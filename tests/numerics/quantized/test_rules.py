"""Rules by path: the first that matches the whole path holds."""

import re

import pytest

from scalejax.errors import UserError
from scalejax.numerics.quantized import rules, weights
from scalejax.numerics.quantized.rules import QuantizationRule

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


@pytest.mark.parametrize(
    ("axes", "is_weight"),
    [
        (("input", "hidden"), True),
        (("layers", "embed", "ffn"), True),
        (("heads", "head", "embed"), True),
        (("embed", "heads"), True),
        (("layers", "norm"), False),
        (("heads", "head"), False),
        (("layers", "heads", "head"), False),
    ],
)
def test_vectors_are_no_weights_of_products(axes, is_weight):
    assert weights.weights_of({"part/kernel": axes}) == ({"part": "part/kernel"} if is_weight else {})


def test_a_broken_pattern_and_an_unknown_format_are_refused_by_name():
    with pytest.raises(UserError, match=r"module_path must be a regular expression; got '\('"):
        QuantizationRule(module_path="(")
    with pytest.raises(UserError, match="mxfp8_e4m3"):
        QuantizationRule(weight_qtype="mxfp8_e4m")


FP8 = {"weight_qtype": "fp8_e4m3", "act_qtype": "fp8_e4m3", "implementation": "native"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scales": "row"}, "scales must be one of blocks, rows, tensor; got 'row'"),
        ({"tail": "drop"}, "tail must be one of refuse, pad"),
        ({"implementation": "cuda"}, "implementation must be one of emulated, native"),
        ({"weight_qtype": "bdr_mx9", "scales": "rows"}, "bdr_mx9, whose blocks belong to the format"),
        ({"weight_qtype": "bdr_mx9", "scale_rule": "up"}, "scale_rule must be one of floor, rceil"),
        ({"weight_qtype": "int8", "scale_rule": "rceil"}, "needs a format whose scales are exponents; got int8"),
        ({"weight_qtype": "int8", "act_qtype": "bdr_mx9", "scale_rule": "qwix"}, "qwix defines its rule for E4M3"),
        ({"weight_qtype": "int4:128", "scales": "rows"}, "and so does int4:128. Set scales='blocks'"),
        ({**FP8, "act_qtype": None, "scales": "tensor"}, "multiplies FP8 by FP8"),
        ({**FP8, "act_qtype": "mxfp8_e4m3"}, "Use 'emulated'"),
        ({**FP8, "bwd_qtype": "int8", "scales": "tensor"}, "bwd_qtype one of them or None"),
        ({**FP8}, "Set scales='tensor'"),
        ({**FP8, "weight_qtype": "fp8_e5m2", "bwd_qtype": "fp8_e5m2", "scales": "rows"}, "no product of fp8_e5m2"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(fields, words):
    with pytest.raises(UserError, match=re.escape(words)):
        QuantizationRule(**fields)


PATHS = ["embed", "head", "layers/attention/query", "layers/mlp/gate", "layers/mlp/up"]


def test_modules_take_the_first_rule_and_the_rest_none():
    first, rest = QuantizationRule(module_path="layers/mlp/gate"), QuantizationRule(module_path="layers/.*")
    assert rules.assign((first, rest), PATHS) == {
        "layers/attention/query": rest,
        "layers/mlp/gate": first,
        "layers/mlp/up": rest,
    }
    assert rules.assign((), PATHS) == {}


def test_a_rule_for_no_module_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"quantization.1: .*'layers/mlp/gat' matches no module;.* layers/mlp/gate"):
        rules.assign((QuantizationRule(module_path="head"), QuantizationRule(module_path="layers/mlp/gat")), PATHS)


def test_an_exception_that_comes_too_late_is_refused():
    with pytest.raises(UserError, match=r"quantization.1: .*only modules that earlier rules take, head. Put exc"):
        rules.assign((QuantizationRule(), QuantizationRule(module_path="head", weight_qtype="int8")), PATHS)


def test_formats_of_products_are_refused_where_there_are_tables_alone():
    some = QuantizationRule(module_path="tables/.*", act_qtype="bdr_mx9", bwd_qtype="bdr_mx9")
    with pytest.raises(UserError, match=r"only embedding tables, tables/a, whose rows .* no act_qtype or bwd_qtype"):
        rules.assign((some,), PATHS, tables=["tables/a"])
    for rule in (QuantizationRule(act_qtype="bdr_mx9"), QuantizationRule(module_path="tables/.*")):
        assert rules.assign((rule,), PATHS, tables=["tables/a"])["tables/a"] is rule


@pytest.mark.parametrize(
    ("parameter", "module"),
    [("top/layers/0/kernel", "top/layers/0"), ("embed/weight", "embed"), ("layers/mlp/gate", "layers/mlp/gate")],
)
def test_a_parameter_goes_by_its_module_where_that_has_one_weight(parameter, module):
    assert rules.module_of(parameter) == module
