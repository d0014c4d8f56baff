"""Which weights take which format: rules by whole paths, the first that matches."""

import pytest
from quantized_cases import SMALL, write_model

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
