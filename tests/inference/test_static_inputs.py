"""Folders with static scales of activations: what is served with them, and what does not belong together."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from llama_cases import model as llama
from llama_cases import tokens
from quantized_cases import (
    EXPERTS,
    MATRICES,
    SMALL,
    change_config,
    quantize,
    quantize_with_inputs,
    read_weights,
    rewrite,
    write_model,
)

from scalejax import nn
from scalejax.errors import UnsupportedError, UserError
from scalejax.inference import generate
from scalejax.models.llm import model_folder
from scalejax.numerics.quantized.weights import StaticWeight
from scalejax.parallel.mesh import MeshShape, make_mesh

ROWS = tokens(SMALL, 2, 24)
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    write_model(folder)
    return folder


def engine(folder, **sizes):
    sizes = sizes or {"fsdp": 1}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return generate.load(model_folder.open_folder(folder), make_mesh(MeshShape(**sizes), devices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "format", "layout"),
    [
        ("fp8_e4m3", "fp8_e4m3:row", "scalejax"),
        ("fp8_e4m3", "fp8_e4m3:row", "compressed-tensors"),
        ("int8", "int8:row", "compressed-tensors"),
        ("nvfp4", "nvfp4", "scalejax"),
    ],
)
def test_scales_that_are_written_are_read(theirs, tmp_path, inputs, format, layout):
    rows = quantize_with_inputs(
        theirs, tmp_path / "out", format, inputs, given=[("layers/1/mlp/.*", "none")], layout=layout
    )
    written = {row.name: row for row in rows if row.inputs}
    assert len(written) == MATRICES - 3
    found = model_folder.open_folder(tmp_path / "out")
    assert found.inputs.keys() == written.keys()
    assert {own.format for own in found.inputs.values()} == {inputs}
    for name, own in found.inputs.items():
        # One over a float32 and back may miss it by an ulp.
        np.testing.assert_allclose(own.scale, written[name].input_scale, rtol=2e-7 if inputs == "nvfp4" else 0)
    assert any(remark.startswith(f"static scales of activations ({inputs}) for 11 weights") for remark in found.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["fp8_e4m3", "int8"])
def test_logits_are_those_of_activations_quantized_by_hand(tmp_path, monkeypatch, inputs):
    """One layer, so that the products of a scan can be told from each other; the nearest number of a table."""
    config = dataclasses.replace(SMALL, layers=1)
    write_model(tmp_path / "theirs", config)
    quantize_with_inputs(tmp_path / "theirs", tmp_path / "out", "bdr_mx9", inputs)
    found = engine(tmp_path / "out").logits(ROWS)
    scales = model_folder.open_folder(tmp_path / "out").inputs
    order = iter(("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"))

    numbers = np.arange(-128, 128, dtype=np.float32)
    if inputs == "fp8_e4m3":
        numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        numbers = np.unique(numbers[np.isfinite(numbers)])

    def project(x, weight, *, contract=1):
        own = scales[f"model.layers.0.{next(order)}_proj.weight"]
        nearest = jnp.searchsorted((numbers[1:] + numbers[:-1]) / 2, x / own.scale)
        return jnp.tensordot(jnp.asarray(numbers)[nearest] * own.scale, weight, contract)

    monkeypatch.setattr(nn, "project", project)
    along = np.broadcast_to(np.arange(24, dtype=np.int32), ROWS.shape)
    plain = llama(config, read_weights(tmp_path / "out"))
    want = np.asarray(plain(ROWS, along, np.ones_like(ROWS)))
    assert next(order, None) is None
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-3 * np.abs(want).max())
    monkeypatch.undo()
    floats = np.asarray(plain(ROWS, along, np.ones_like(ROWS)))
    assert np.abs(found - floats).max() > 10 * np.abs(found - want).max()  # which is not what it was without


@pytest.mark.slow
def test_layers_whose_weights_stay_keep_their_activations(theirs, tmp_path):
    quantize_with_inputs(theirs, tmp_path / "out", "bdr_mx9", "fp8_e4m3", given=[("layers/1/.*", "none")])
    on = engine(tmp_path / "out")
    held = {path: value for path, value in on.params.items() if isinstance(value, StaticWeight)}
    assert len(held) == MATRICES // 2
    for value in held.values():
        assert value.scale[0] > 0
        assert value.scale[1] == 0
    assert np.isfinite(on.logits(ROWS)).all()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 1, "tensor": 2}, {"fsdp": 2}])
def test_a_mesh_changes_no_token(theirs, tmp_path, mesh):
    quantize_with_inputs(theirs, tmp_path / "out", "bdr_mx6", "nvfp4", given=[("head", "bdr_mx9")])
    prompts = [ROWS[0, :9].tolist(), ROWS[1, :4].tolist()]
    want = engine(tmp_path / "out").generate(prompts, max_tokens=5)
    assert engine(tmp_path / "out", **mesh).generate(prompts, max_tokens=5) == want


@pytest.mark.slow
def test_static_scales_do_not_depend_on_the_batch(theirs, tmp_path):
    quantize_with_inputs(theirs, tmp_path / "out", "bdr_mx9", "int8")
    on = engine(tmp_path / "out")
    loud = np.concatenate([ROWS[:1], ROWS[1:].repeat(7, 0)])
    np.testing.assert_allclose(on.logits(ROWS)[0], on.logits(loud)[0], rtol=0, atol=1e-4)


NAMES = {"scalejax": f"{UP}.inputs.fp8_e4m3.scale", "compressed-tensors": UP.replace("weight", "input_scale")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "value", "words"),
    [
        ("compressed-tensors", None, "is missing. The folder is incomplete"),
        ("scalejax", np.float32(0), "the scale of activations must be above 0 and finite; got 0"),
        ("compressed-tensors", np.float32(np.nan), "the scale of activations must be above 0 and finite; got nan"),
        ("scalejax", np.float32(np.inf), "the scale of activations must be above 0 and finite; got inf"),
        ("compressed-tensors", np.ones(2, np.float32), "and must be one float, the scale of what"),
        ("scalejax", np.int32(1), "and must be one float, the scale of what"),
    ],
)
def test_scales_that_are_none_are_refused(theirs, tmp_path, layout, value, words):
    quantize_with_inputs(theirs, tmp_path / "out", "fp8_e4m3:32", "fp8_e4m3", layout=layout)
    name = NAMES[layout]
    rewrite(tmp_path / "out", lambda a: a.pop(name) if value is None else a.update({name: np.asarray(value)}))
    with pytest.raises(UserError) as caught:
        model_folder.open_folder(tmp_path / "out")
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.slow
def test_a_scale_that_the_config_does_not_know_is_refused(theirs, tmp_path):
    quantize_with_inputs(theirs, tmp_path / "out", "fp8_e4m3:32", "fp8_e4m3")
    change_config(tmp_path / "out", inputs={})
    with pytest.raises(UserError, match="which its config does not account for"):
        model_folder.open_folder(tmp_path / "out")


@pytest.mark.slow
def test_a_global_scale_the_wrong_way_round_is_refused(theirs, tmp_path):
    quantize_with_inputs(theirs, tmp_path / "out", "nvfp4", "nvfp4", layout="compressed-tensors")
    name = UP.replace("weight", "input_global_scale")
    rewrite(tmp_path / "out", lambda a: a.update({name: 1 / a[name]}))
    with pytest.raises(UserError, match="by which they are divided: they would reach"):
        model_folder.open_folder(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": ["a"]}, "must have the formats of inputs by the names of weights"),
        ({"inputs": {"model.norm.weight": "int8"}}, "inputs names model.norm.weight, which is no quantized weight"),
        ({"inputs": {UP: "mxfp4_e2m1"}}, f"inputs of {UP} must be one of fp8_e4m3, int8, nvfp4; got 'mxfp4_e2m1'"),
        ({"inputs": {UP: "int8"}}, f"{UP}.inputs.int8.scale is missing"),
    ],
)
def test_configs_that_say_otherwise_are_refused(theirs, tmp_path, fields, words):
    quantize_with_inputs(theirs, tmp_path / "out", "fp8_e4m3:32", "fp8_e4m3")
    change_config(tmp_path / "out", **fields)
    with pytest.raises(UserError) as caught:
        model_folder.open_folder(tmp_path / "out")
    assert words in str(caught.value)


@pytest.mark.slow
def test_several_formats_of_one_matrix_are_refused(theirs, tmp_path):
    quantize_with_inputs(theirs, tmp_path / "out", "bdr_mx9", "fp8_e4m3")
    model = model_folder.open_folder(tmp_path / "out")
    other = dataclasses.replace(model.inputs[UP], format="int8")
    mixed = dataclasses.replace(model, inputs={**model.inputs, UP: other})
    with pytest.raises(UserError, match="layers/mlp/up: its layers multiply activations in fp8_e4m3 and int8"):
        generate.load(mixed, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))


def test_what_cannot_be_written_is_refused(theirs, tmp_path):
    with pytest.raises(UnsupportedError, match="--layout gpt-oss has no scales of activations"):
        quantize_with_inputs(theirs, tmp_path / "a", "mxfp4_e2m1", "fp8_e4m3", layout="gpt-oss")
    with pytest.raises(UnsupportedError, match="weights that meet int8 activations are int8; got int4:32"):
        quantize_with_inputs(theirs, tmp_path / "b", "int4:32", "int8", layout="compressed-tensors")
    with pytest.raises(UserError, match="no matrix of a product takes a format"):
        quantize_with_inputs(theirs, tmp_path / "c", "none", "int8", given=[("embed", "bdr_mx9")])


@pytest.mark.slow
def test_folders_without_scales_are_those_of_version_1(theirs, tmp_path):
    quantize(theirs, tmp_path / "out", "bdr_mx9")
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (content["version"], "inputs" in content) == (1, False)


@pytest.mark.slow
def test_scales_of_what_experts_multiply_are_read(tmp_path):
    """As published FP8 checkpoints of Mixtral have them, one for each matrix of each expert."""
    write_model(tmp_path / "theirs", EXPERTS)
    given = [("layers/.*/mlp/down", "none")]
    rows = quantize(tmp_path / "theirs", tmp_path / "out", "fp8_e4m3:row", given=given, layout="compressed-tensors")
    names = [row.name for row in rows if row.format]

    def add(arrays):
        scales = np.linspace(0.01, 0.02, len(names), dtype=np.float32)
        arrays.update({n.replace(".weight", ".input_scale"): s[None] for n, s in zip(names, scales, strict=True)})

    rewrite(tmp_path / "out", add)
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    one = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    content["config_groups"]["group_0"]["input_activations"] = one
    change_config(tmp_path / "out", config_groups=content["config_groups"])
    opened = model_folder.open_folder(tmp_path / "out")
    assert opened.inputs.keys() == set(names)
    on = generate.load(opened, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))
    scaled = {path: value.scale for path, value in on.params.items() if isinstance(value, StaticWeight)}
    assert scaled.keys() == {
        *(f"layers/attention/{name}" for name in ("query", "key", "value", "out")),
        *(f"layers/mlp/{name}" for name in ("gate", "up")),
    }
    named = "model.layers.{}.block_sparse_moe.experts.{}.w3.weight"
    expected = [[opened.inputs[named.format(layer, e)].scale for e in range(4)] for layer in range(2)]
    np.testing.assert_array_equal(scaled["layers/mlp/up"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["fp8_e4m3", "nvfp4"])
def test_a_model_with_experts_is_served_under_the_scales_of_each(tmp_path, inputs):
    write_model(tmp_path / "theirs", EXPERTS)
    rows = quantize_with_inputs(tmp_path / "theirs", tmp_path / "out", "bdr_mx9", inputs, given=[("head", "none")])
    assert sum(bool(row.inputs) for row in rows) == 2 * (4 + 3 * 4)
    logits = engine(tmp_path / "out").logits(ROWS)
    quantize(tmp_path / "theirs", tmp_path / "floats", "bdr_mx9", given=[("head", "none")])
    # The median: a token that goes to another expert is far off.
    apart = np.median(np.abs(logits - engine(tmp_path / "floats").logits(ROWS)))
    assert 0 < apart < 0.4 * np.std(logits)
    prompts = [ROWS[0, :9].tolist(), ROWS[1, :4].tolist()]
    want = engine(tmp_path / "out").generate(prompts, max_tokens=5)
    assert engine(tmp_path / "out", fsdp=1, expert=2).generate(prompts, max_tokens=5) == want
