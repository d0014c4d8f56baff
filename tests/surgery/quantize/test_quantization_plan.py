"""Which weights take which format: rules by whole paths, the first that matches."""

import pytest
from quantized_cases import EXPERTS, SMALL, write_model

from scalejax.errors import UserError
from scalejax.models.llm import model_folder
from scalejax.models.llm.packed_layouts.known import find_layout
from scalejax.surgery.quantize import quantization_plan

OWN = find_layout("scalejax")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return model_folder.open_folder(folder)


def formats_of(model, format, *given):
    return {
        w.module: None if w.format is None else w.format.name
        for w in quantization_plan.make(model, format, [quantization_plan.parse_rule(rule) for rule in given], OWN)
    }


def test_embeddings_norms_and_the_head_stay(model):
    found = formats_of(model, "mxfp6_e3m2")
    kept = {module for module, format in found.items() if format is None}
    assert kept == {
        *("embed", "head", "final_norm"),
        *(f"layers/{i}/{name}" for i in (0, 1) for name in ("attention_norm", "mlp_norm")),
    }
    assert {format for format in found.values() if format} == {"mxfp6_e3m2"}
    assert len(found) == 3 + 2 * 9


def test_the_first_rule_that_matches_a_whole_path_decides(model):
    found = formats_of(
        model, "mxfp4_e2m1", "layers/1/mlp/down=none", "layers/1/.*(gate|up|down)=bdr_mx9", "head=int8:row"
    )
    assert found["layers/1/mlp/down"] is None
    assert found["layers/1/mlp/up"] == "bdr_mx9"
    assert found["layers/0/mlp/up"] == found["layers/1/attention/query"] == "mxfp4_e2m1"
    assert found["head"] == f"int8:{SMALL.dim}"
    assert found["embed"] is None


def test_weights_come_in_the_order_of_the_model(model):
    layers = [w.layer for w in quantization_plan.make(model, "mxfp4_e2m1", [], OWN)]
    assert layers == [None, *[0] * 9, *[1] * 9, None, None]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    write_model(folder, EXPERTS)
    return model_folder.open_folder(folder)


def test_routers_stay_whatever_rules_say(mixtral):
    found = formats_of(mixtral, "int8:32", "layers/0/.*=mxfp4_e2m1", "layers/1/mlp/down=none")
    assert found["layers/0/mlp/router"] is found["layers/1/mlp/router"] is None
    assert found["layers/0/mlp/gate"] == found["layers/0/mlp_norm"] == "mxfp4_e2m1"
    assert (found["layers/1/mlp/up"], found["layers/1/mlp/down"]) == ("int8:32", None)
    with pytest.raises(UserError, match=r"layers/0/mlp/up, layers/0/mlp_norm, and so on for each layer; routers stay"):
        formats_of(mixtral, "int8:32", ".*router=int8:32")


def test_a_rule_is_for_all_experts_of_a_layer(mixtral):
    plan = quantization_plan.make(mixtral, "none", [("layers/1/mlp/up", "mxfp4_e2m1")], OWN)
    changed = [weight.name for weight in plan if weight.format is not None]
    assert changed == [f"model.layers.1.block_sparse_moe.experts.{i}.w3.weight" for i in range(4)]
    assert [w.layer for w in plan] == [None, *[0] * 19, *[1] * 19, None, None]


def test_halves_of_one_tensor_take_one_format(mixtral):
    layout = find_layout("gpt-oss")
    plan = quantization_plan.make(mixtral, "mxfp4_e2m1", [("layers/0/mlp/(gate|up)", "none")], layout)
    names = {weight.module: weight.format for weight in plan if weight.layer == 0}
    assert names["layers/0/mlp/gate and layers/0/mlp/up"] is None
    assert names["layers/0/mlp/down"].name == "mxfp4_e2m1"
    with pytest.raises(
        UserError, match=r"gate_up_proj, where rules say none for layers/0/mlp/gate, but mxfp4_e2m1 for"
    ):
        quantization_plan.make(mixtral, "mxfp4_e2m1", [("layers/0/mlp/gate", "none")], layout)


def test_inputs_of_experts_have_static_scales(mixtral):
    plan = quantization_plan.make(mixtral, "int8:32", [], OWN, "int8")
    assert {w.tensor.expert for w in plan if w.inputs} == {None, *range(4)}
    plan = quantization_plan.make(mixtral, "int8:32", [("layers/.*/mlp/.*", "none")], OWN, "int8")
    assert {w.module.split("/")[2] for w in plan if w.inputs} == {"attention"}


@pytest.mark.parametrize(
    ("format", "rules", "words"),
    [
        ("mx6", [], "there is no 'mx6'; the nearest are bdr_mx6"),
        ("mxfp4_e2m1", ["layers/7/.*=none"], "decides of no weight"),
        ("mxfp4_e2m1", [".*=none", "head=bdr_mx9"], "--rule head=bdr_mx9 decides of no weight"),
        ("mxfp4_e2m1", [".*=none"], "leave every weight as it is"),
        ("mxfp4_e2m1", ["head=fp4"], "--rule head=fp4: format: there is no 'fp4'; the nearest are mxfp4_e2m1"),
        ("mxfp4_e2m1", ["(=none"], "must be a regular expression"),
        ("mxfp4_e2m1", ["head"], "--rule must be PATTERN=FORMAT"),
        (
            "int8",
            [],
            "fewer than the 1024 of a block of int8. Choose another format for it, such as int8:64",
        ),
    ],
)
def test_mistakes_are_named(model, format, rules, words):
    with pytest.raises(UserError) as caught:
        formats_of(model, format, *rules)
    assert words in str(caught.value)
