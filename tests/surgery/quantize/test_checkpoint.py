"""Quantized folders: what they hold, that they read back, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from quantized_cases import (
    EXPERTS,
    MATRICES,
    SMALL,
    change_config,
    is_matrix,
    quantize,
    read_weights,
    rewrite,
    write_model,
)

from scalejax.errors import UserError
from scalejax.models.llm import model_folder, safetensors
from scalejax.numerics import formats
from scalejax.numerics import quantize as quantizing
from scalejax.numerics.qsnr import qsnr


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    return folder, write_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bdr_mx9", "nvfp4"])
def test_weights_read_back_as_the_format_has_them(theirs, tmp_path, name):
    source, weights = theirs
    rows = quantize(source, tmp_path / "out", name)
    found = read_weights(tmp_path / "out")
    assert found.keys() == weights.keys()
    for row in rows:
        want = weights[row.name]
        if is_matrix(row.name):
            cast = quantizing.cast(jnp.asarray(want), name, axis=-1)
            np.testing.assert_array_equal(found[row.name], cast)
            assert abs(row.qsnr - qsnr(want, np.asarray(cast))) < 1e-6
        else:
            np.testing.assert_array_equal(found[row.name], want)
            assert (row.format, row.qsnr) == (None, None)
    assert sum(row.format == name for row in rows) == MATRICES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("bdr_mx6", 0.75),
        ("mxfp6_e3m2", 25 / 32),
        ("bdr_mx9", 1.125),
        ("bdr_mx4", 0.5),
        ("mxfp8_e4m3", 33 / 32),
        ("mxfp4_e2m1", 17 / 32),
    ],
)
def test_bytes_of_a_number(theirs, tmp_path, name, each):
    rows = quantize(theirs[0], tmp_path / "out", name)
    packed = [row for row in rows if row.format]
    assert {row.bytes_after / row.numbers for row in packed} == {each}
    file = tmp_path / "out" / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - header == sum(row.bytes_after for row in rows)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    return folder, write_model(folder, EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("scalejax", "int8:32"),
        ("compressed-tensors", "mxfp4_e2m1"),
        ("scalejax", "nvfp4"),
        ("compressed-tensors", "int4:32"),
    ],
)
def test_each_expert_is_a_matrix_of_its_own(mixtral, tmp_path, layout, name):
    """Read back each has the values of its format; routers are as they were."""
    source, weights = mixtral
    rows = quantize(source, tmp_path / "out", name, layout=layout)
    opened, found = model_folder.open_folder(tmp_path / "out"), read_weights(tmp_path / "out")
    assert opened.config == model_folder.open_folder(source).config
    packed = {row.name for row in rows if row.format}
    assert {name for name in weights if ".experts." in name} < packed
    assert len(packed) == (4 + 3 * 4) * EXPERTS.layers
    for weight, array in weights.items():
        want = quantizing.cast(jnp.asarray(array), name, axis=-1) if weight in packed else array
        np.testing.assert_array_equal(found[weight], want, err_msg=weight)
    if layout == "compressed-tensors":  # names as vLLM and llm-compressor have them
        stored = "packed" if name in ("mxfp4_e2m1", "int4:32", "int8:32") else "scale"
        names = safetensors.open_folder(tmp_path / "out")
        assert f"model.layers.1.block_sparse_moe.experts.3.w1.weight_{stored}" in names
        content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        assert set(content["ignore"]) == {"lm_head", *(f"model.layers.{i}.block_sparse_moe.gate" for i in (0, 1))}


@pytest.mark.slow
def test_the_layout_of_gpt_oss_has_all_experts_in_one_tensor(mixtral, tmp_path):
    source, weights = mixtral
    quantize(source, tmp_path / "out", "mxfp4_e2m1", layout="gpt-oss")
    stored = safetensors.open_folder(tmp_path / "out")
    moe = "model.layers.1.mlp.experts"
    assert stored[f"{moe}.gate_up_proj_blocks"].shape == (4, 2 * EXPERTS.ffn_dim, EXPERTS.dim // 32, 16)
    assert stored[f"{moe}.down_proj_scales"].shape == (4, EXPERTS.dim, EXPERTS.ffn_dim // 32)
    opened = model_folder.open_folder(tmp_path / "out")
    for expert in range(4):
        for path, old in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            exact = weights[f"model.layers.1.block_sparse_moe.experts.{expert}.{old}.weight"]
            want = np.asarray(quantizing.cast(jnp.asarray(exact), "mxfp4_e2m1", axis=-1)).T
            np.testing.assert_array_equal(opened.source.read(f"layers/mlp/{path}", 1)[expert], want)
    router = weights["model.layers.1.block_sparse_moe.gate.weight"].T
    np.testing.assert_array_equal(opened.source.read("layers/mlp/router", 1), router)


@pytest.mark.slow
def test_experts_that_are_quantized_become_plain_ones(mixtral, tmp_path):
    """From both forms to both."""
    source, _ = mixtral
    for layout, form in (("gpt-oss", "separate"), ("scalejax", "fused")):
        out = tmp_path / layout
        quantize(source, out / "packed", "mxfp4_e2m1", layout=layout)
        packed = model_folder.open_folder(out / "packed")
        model_folder.convert(packed, out / "plain", to="huggingface", experts=form)
        plain = model_folder.open_folder(out / "plain")
        assert "layers.0.mlp.experts" in " ".join(plain.source.tensors) or form == "separate"
        for path in ("router", "gate", "up", "down"):
            want = packed.source.read(f"layers/mlp/{path}", 0)
            np.testing.assert_array_equal(plain.source.read(f"layers/mlp/{path}", 0), want)


@pytest.mark.slow
def test_the_dtype_that_weights_had_is_what_they_are_decoded_to(tmp_path):
    write_model(tmp_path / "theirs", dtype="bfloat16")
    quantize(tmp_path / "theirs", tmp_path / "out", "mxfp8_e4m3")
    model = model_folder.open_folder(tmp_path / "out")
    assert str(model.dtype) == "bfloat16"
    assert model.remarks == ("quantized weights (scalejax): 14 in mxfp8_e4m3",)


def test_a_quantized_folder_becomes_a_plain_one(theirs, tmp_path):
    quantize(theirs[0], tmp_path / "out", "mxfp4_e2m1")
    model_folder.convert(model_folder.open_folder(tmp_path / "out"), tmp_path / "ours", to="model")
    model_folder.convert(model_folder.open_folder(tmp_path / "ours"), tmp_path / "back", to="huggingface")
    plain, packed = read_weights(tmp_path / "back"), read_weights(tmp_path / "out")
    for name, array in packed.items():
        np.testing.assert_array_equal(plain[name], array)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_shards_and_rules(theirs, tmp_path):
    from scalejax.models.llm.packed_layouts.known import find_layout
    from scalejax.surgery.quantize import checkpoint, quantization_plan

    model, layout = model_folder.open_folder(theirs[0]), find_layout("scalejax")
    weights = quantization_plan.make(
        model, "mxfp4_e2m1", [("layers/[01]/mlp/down", "bdr_mx9"), ("layers/1/.*", "none")], layout
    )
    told = []
    rows = checkpoint.write(
        model, tmp_path / "out", weights, checkpoint.DirectCast(model), layout, shard_bytes=5_000, wrote=told.append
    )
    found = safetensors.open_folder(tmp_path / "out")
    assert len({tensor.file for tensor in found.values()}) > 3
    assert sum(told) == sum(row.bytes_after for row in rows)
    counts = [sum(row.format == name for row in rows) for name in ("mxfp4_e2m1", "bdr_mx9", None)]
    assert counts == [6, 2, len(rows) - 8]
    assert "model.layers.1.mlp.down_proj.weight.bdr_mx9.sub_scales" in found
    assert len(read_weights(tmp_path / "out")) == len(rows)


def test_padding_is_counted(tmp_path):
    config = dataclasses.replace(SMALL, ffn_dim=72)
    weights = write_model(tmp_path / "theirs", config)
    rows = {row.name: row for row in quantize(tmp_path / "theirs", tmp_path / "out", "mxfp4_e2m1")}
    down = rows["model.layers.0.mlp.down_proj.weight"]
    assert (down.padding, down.bytes_after) == (64 * 24, 64 * 3 * 17)
    found = read_weights(tmp_path / "out")[down.name]
    want = quantizing.cast(jnp.asarray(weights[down.name]), "mxfp4_e2m1", axis=-1, tail="pad")
    np.testing.assert_array_equal(found, want)


def test_a_tied_head_is_the_embedding(tmp_path):
    config = dataclasses.replace(SMALL, tie_embeddings=True)
    write_model(tmp_path / "theirs", config)
    rows = quantize(tmp_path / "theirs", tmp_path / "out", "mxfp4_e2m1", given=[("embed", "mxfp8_e4m3")])
    assert next(row.format for row in rows if row.module == "embed") == "mxfp8_e4m3"
    assert model_folder.open_folder(tmp_path / "out").config == config


def test_blocks_of_nan_are_counted(theirs, tmp_path):
    quantize(theirs[0], tmp_path / "out", "mxfp6_e3m2")
    tensors = safetensors.open_folder(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    scales = tensors[f"{name}.mxfp6_e3m2.scales"]
    with open(scales.file, "r+b") as file:
        file.seek(scales.begin + 5)
        file.write(b"\xff\xff\xff")
    stored = model_folder.open_folder(tmp_path / "out").source.tensors[name]
    with pytest.raises(UserError, match=rf"3 of 192 blocks of {name} \(mxfp6_e3m2\) stand for NaN"):
        stored.read()
    stored.read((slice(5, 96), slice(0, 64)))  # the others are as they were


def test_codes_of_nan_are_counted(theirs, tmp_path):
    quantize(theirs[0], tmp_path / "out", "mxfp8_e4m3")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = safetensors.open_folder(tmp_path / "out")[f"{name}.mxfp8_e4m3.codes"]
    with open(codes.file, "r+b") as file:
        file.seek(codes.begin + 64)
        file.write(b"\x7f\xff")
    with pytest.raises(UserError, match=r"2 of 4,096 codes of .* stand for NaN"):
        read_weights(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "role", "value", "words"),
    [
        ("int8:32", "scales", np.inf, "2 of 192 blocks of .* stand for NaN"),
        ("nvfp4", "scales", 0xFF, "2 of 384 blocks of .* stand for NaN"),
        ("nvfp4", "tensor_scale", np.nan, "the scale of the whole tensor .* is nan"),
        ("nvfp4", "tensor_scale", 0.0, "the scale of the whole tensor .* is 0"),
    ],
)
def test_scales_that_are_none_are_refused(theirs, tmp_path, format, role, value, words):
    quantize(theirs[0], tmp_path / "out", "none", given=[("layers/0/mlp/up", format)])

    def change(arrays):
        arrays[f"model.layers.0.mlp.up_proj.weight.{format}.{role}"].reshape(-1)[:2] = value

    rewrite(tmp_path / "out", change)
    with pytest.raises(UserError, match=words):
        read_weights(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "said", "words"),
    [
        # Of the same size, so that only the name tells them apart.
        ("mxfp8_e4m3", "mxfp8_e5m2", "is mxfp8_e5m2, but the files hold it as mxfp8_e4m3"),
        ("mxfp6_e3m2", "mxfp4_e2m1", "is mxfp4_e2m1, but the files hold it as mxfp6_e3m2"),
        ("int4:32", "int4:64", "is int4:64, but the files hold it as int4:32"),
        ("mxfp6_e3m2", "mxfp6", "there is no 'mxfp6'; the nearest are mxfp6_e2m3, mxfp6_e3m2"),
    ],
)
def test_a_checkpoint_read_with_another_format_is_refused(theirs, tmp_path, made, said, words):
    quantize(theirs[0], tmp_path / "out", made)
    names = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["weights"]
    change_config(tmp_path / "out", weights=dict.fromkeys(names, said))
    with pytest.raises(UserError) as caught:
        model_folder.open_folder(tmp_path / "out")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


SCALES = "model.layers.0.mlp.up_proj.weight.mxfp6_e3m2.scales"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.pop(SCALES), f"{SCALES} is missing: codes without their scales are no values"),
        (lambda a: a.update({SCALES: a[SCALES][:, :1].copy()}), "but scalejax has mxfp6_e3m2 as uint8 [96, 2]"),
        (lambda a: a.update({"more": np.zeros(3, np.float32)}), "also holds more"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(theirs, tmp_path, change, words):
    quantize(theirs[0], tmp_path / "out", "mxfp6_e3m2")
    rewrite(tmp_path / "out", change)
    with pytest.raises(UserError) as caught:
        model_folder.open_folder(tmp_path / "out")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq': quantised weights of this kind are not known here"),
        ({"version": 7}, "has version 7, and this scalejax reads up to 2"),
        ({"weights": ["a"]}, "must have the formats of the weights by name"),
        ({"weights": {"model.x": "mxfp4_e2m1"}}, "names model.x, which the model does not have"),
    ],
)
def test_configs_that_are_not_known_are_refused(theirs, tmp_path, fields, words):
    quantize(theirs[0], tmp_path / "out", "mxfp6_e3m2")
    change_config(tmp_path / "out", **fields)
    with pytest.raises(UserError) as caught:
        model_folder.open_folder(tmp_path / "out")
    assert words in str(caught.value)


@pytest.mark.slow
def test_all_formats_are_read_back(theirs, tmp_path):
    for name in formats.FORMATS:
        sized = f"{name}:64" if formats.find(name).scale == "float32" else name
        quantize(theirs[0], tmp_path / name, "none", given=[("layers/0/mlp/up", sized)])
        up = "model.layers.0.mlp.up_proj.weight"
        want = quantizing.cast(jnp.asarray(theirs[1][up]), sized, axis=-1)
        np.testing.assert_array_equal(read_weights(tmp_path / name)[up], want)
