"""Layouts of quantized weights: what goes in comes out, slice by slice, in the bytes that formats promise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_cases import gaussian

from scalejax.errors import UnsupportedError, UserError
from scalejax.models.llm import packed, safetensors
from scalejax.models.llm.packed_layouts.known import LAYOUTS, find_layout, layout_of
from scalejax.models.llm.packed_layouts.protocol import inverted
from scalejax.numerics import formats, packing
from scalejax.numerics.quantize import dequantize, quantize

NAME = "model.layers.0.mlp.up_proj.weight"
CASES = [
    *(("scalejax", name) for name in ("bdr_mx6", "nvfp4", "vsq4:32")),
    *(("compressed-tensors", name) for name in ("int4:128", "fp8_e4m3:128", "nvfp4", "mxfp6_e2m3")),
    ("gpt-oss", "mxfp4_e2m1"),
]
MORE = [
    *(("scalejax", name) for name in ("bdr_mx9", "bdr_mx4", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1")),
    *(("scalejax", name) for name in ("int8:64", "int4:32", "fp8_e5m2:128")),
    *(("compressed-tensors", name) for name in ("int2:32", "int8:64", "mxfp8_e4m3", "mxfp4_e2m1")),
]


def stored(layout, name, x, tmp_path):
    """The tensors of a weight in a file, and the weight as it should be read."""
    format = formats.find(name)
    quantized = quantize(jnp.asarray(x), format, axis=-1)
    if quantized.tensor_scale is not None:
        scale = jnp.asarray(layout.tensor_scale(np.asarray(quantized.tensor_scale)))
        quantized = quantize(jnp.asarray(x), format, axis=-1, tensor_scale=scale)
    arrays = layout.store(jax.tree.map(np.asarray, packing.pack(quantized)), format, x.shape)
    parts = layout.parts(NAME, format, x.shape)
    assert arrays.keys() == parts.keys()
    written = tuple(safetensors.Written(part.name, part.dtype, part.shape) for part in parts.values())
    by_name = {part.name: arrays[role] for role, part in parts.items()}
    safetensors.write_folder(tmp_path, written, by_name.__getitem__)
    return safetensors.open_folder(tmp_path), np.asarray(dequantize(quantized))


def opened(layout, name, tensors, shape, kind="F32"):
    content = layout.write_config({NAME: (formats.find(name), shape)}, ["lm_head.weight"], {})
    shapes = {NAME: shape, "lm_head.weight": (100, 64)}
    found = packed.resolve(content, tensors, shapes, kind, "config.json")
    assert (found.tensors.keys(), found.inputs) == ({NAME}, {})
    assert f"1 in {name}" in found.remarks[0]
    return found.tensors[NAME]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), [*CASES, *MORE])
def test_what_is_written_is_read(layout, name, tmp_path):
    x = gaussian(0, 12, 256)
    tensors, want = stored(LAYOUTS[layout], name, x, tmp_path)
    found = opened(LAYOUTS[layout], name, tensors, x.shape)
    assert (found.format, found.dtype, found.shape) == (formats.find(name), np.float32, (12, 256))
    np.testing.assert_array_equal(found.read(), want)
    for rows, columns in ((slice(2, 5), slice(0, 256)), (slice(0, 12), slice(40, 170)), (slice(7, 8), slice(255, 256))):
        np.testing.assert_array_equal(found.read((rows, columns)), want[rows, columns])
    half = opened(LAYOUTS[layout], name, tensors, x.shape, "BF16")
    np.testing.assert_array_equal(half.read(), want.astype(jnp.bfloat16))


@pytest.mark.default_cases(first=3)
@pytest.mark.parametrize(
    ("name", "each"),
    [
        *(("bdr_mx9", 1.125), ("bdr_mx6", 0.75), ("bdr_mx4", 0.5), ("mxint8", 33 / 32), ("mxfp8_e4m3", 33 / 32)),
        *(("mxfp6_e2m3", 25 / 32), ("mxfp6_e3m2", 25 / 32), ("mxfp4_e2m1", 17 / 32), ("nvfp4", 9 / 16 + 4 / 3072)),
    ],
)
def test_bytes_on_disk(name, each, tmp_path):
    x = gaussian(0, 12, 256)
    tensors, _ = stored(LAYOUTS["scalejax"], name, x, tmp_path)
    found = opened(LAYOUTS["scalejax"], name, tensors, x.shape)
    assert found.nbytes / x.size == each
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (tmp_path / "model.safetensors").stat().st_size - header == found.nbytes


def test_a_last_block_is_padded(tmp_path):
    x = gaussian(0, 3, 40)
    format = formats.find("mxfp6_e3m2")
    quantized = quantize(jnp.asarray(x), format, axis=-1, tail="pad")
    layout = LAYOUTS["scalejax"]
    arrays = layout.store(jax.tree.map(np.asarray, packing.pack(quantized)), format, x.shape)
    parts = layout.parts(NAME, format, x.shape)
    assert {role: part.shape for role, part in parts.items()} == {"codes": (3, 48), "scales": (3, 2)}
    written = tuple(safetensors.Written(part.name, part.dtype, part.shape) for part in parts.values())
    by_name = {part.name: arrays[role] for role, part in parts.items()}
    safetensors.write_folder(tmp_path, written, by_name.__getitem__)
    found = opened(layout, "mxfp6_e3m2", safetensors.open_folder(tmp_path), x.shape)
    np.testing.assert_array_equal(found.read(), np.asarray(dequantize(quantized)))
    np.testing.assert_array_equal(found.read((slice(0, 2), slice(35, 40))), np.asarray(dequantize(quantized))[:2, 35:])


def test_the_global_scale_of_nvfp4_is_divided_by(tmp_path):
    """By hand: code times scale over the global scale. Multiplied, weights would be thousands of times too large."""
    x = gaussian(0, 4, 64)
    layout = LAYOUTS["compressed-tensors"]
    tensors, want = stored(layout, "nvfp4", x, tmp_path)
    given = tensors[f"{NAME}_global_scale"].read()[0]
    np.testing.assert_allclose(given, 448 * 6 / np.abs(x).max(), rtol=1e-6)
    values = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = tensors[f"{NAME}_packed"].read()
    numbers = values[np.stack([codes & 15, codes >> 4], -1).reshape(4, 64)]
    scale = tensors[f"{NAME}_scale"].read().astype(np.float64).repeat(16, 1)
    np.testing.assert_allclose(numbers * scale / given, want, rtol=1e-6)
    assert np.abs(numbers * scale * given).max() > 1000 * np.abs(x).max()


def test_a_global_scale_the_wrong_way_round_is_refused(tmp_path):
    x = gaussian(0, 4, 64)
    layout = LAYOUTS["compressed-tensors"]
    format = formats.find("nvfp4")
    arrays = layout.store(
        jax.tree.map(np.asarray, packing.pack(quantize(jnp.asarray(x), format, axis=-1))), format, x.shape
    )
    arrays["tensor_scale"] = 1 / arrays["tensor_scale"]
    with pytest.raises(UserError, match="by which scales are divided: weights would reach"):
        layout.restore(arrays, format, 64, "file: weight")


def test_one_over_a_tensor_scale_is_kept_to_the_bit():
    scales = np.exp(np.random.default_rng(0).uniform(-20, 20, 100_000)).astype(np.float32)
    kept = inverted(inverted(scales))
    np.testing.assert_array_equal(inverted(inverted(kept)), kept)
    np.testing.assert_allclose(kept, scales, rtol=2e-7)


def test_integers_are_words_of_offset_binary(tmp_path):
    """The definition of pack-quantized: element i in bits 4 i of the words of its row, plus 8."""
    x = gaussian(0, 3, 64)
    tensors, want = stored(LAYOUTS["compressed-tensors"], "int4:32", x, tmp_path)
    words = tensors[f"{NAME}_packed"].read().view(np.uint32)
    numbers = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(3, 64).astype(int) - 8
    scale = tensors[f"{NAME}_scale"].read().repeat(32, 1)
    np.testing.assert_array_equal((numbers * scale).astype(np.float32), want)
    assert tensors[f"{NAME}_shape"].read().tolist() == [3, 64]


def test_blocks_of_gpt_oss_have_the_first_number_in_the_low_nibble(tmp_path):
    x = gaussian(0, 3, 64)
    tensors, want = stored(LAYOUTS["gpt-oss"], "mxfp4_e2m1", x, tmp_path)
    blocks, scales = tensors[f"{NAME}_blocks"].read(), tensors[f"{NAME}_scales"].read()
    assert (blocks.shape, scales.shape) == ((3, 2, 16), (3, 2))
    values = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = np.stack([values[blocks & 15], values[blocks >> 4]], -1).reshape(3, 2, 32)
    np.testing.assert_array_equal(np.ldexp(numbers, scales.astype(int)[..., None] - 127).reshape(3, 64), want)


@pytest.mark.parametrize(
    ("layout", "format", "name", "shape", "words"),
    [
        ("gpt-oss", "mxfp6_e3m2", NAME, (8, 64), "holds mxfp4_e2m1 alone; got mxfp6_e3m2"),
        ("gpt-oss", "mxfp4_e2m1", NAME, (8, 40), "has 40 columns, no multiple of the 32"),
        ("compressed-tensors", "bdr_mx9", NAME, (8, 64), "got bdr_mx9 for"),
        ("compressed-tensors", "mxfp6_e3m2", NAME, (8, 64), "mxfp6_e2m3"),
        ("compressed-tensors", "mxfp4_e2m1", "model.embed_tokens.weight", (8, 64), "holds matrices of products"),
        ("compressed-tensors", "int2:8", NAME, (8, 64), "do not fill whole words of 32 bits"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(layout, format, name, shape, words):
    with pytest.raises(UnsupportedError, match=words):
        LAYOUTS[layout].check(name, formats.find(format), shape)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"symmetric": False}, "zero points"),
        ({"actorder": "group"}, "another order of columns"),
        ({"strategy": "block"}, "strategy 'block' is not known"),
        ({"num_bits": 3}, "3 bits and groups of 32 are not known here"),
        ({"type": "float", "num_bits": 4, "group_size": 64}, "groups of 64 are not known here"),
    ],
)
def test_schemes_that_are_not_known_are_refused(args, words):
    layout = LAYOUTS["compressed-tensors"]
    content = layout.write_config({NAME: (formats.find("int4:32"), (8, 64))}, [], {})
    content["config_groups"]["group_0"]["weights"] |= args
    with pytest.raises(UserError, match=words):
        layout.read_config(content, {NAME: (8, 64)}, [], "config.json")


@pytest.mark.parametrize(
    ("fields", "group", "words"),
    [
        ({"format": "naive-quantized"}, {"format": None}, "stored as naive-quantized, which is not known here; pack-q"),
        ({"format": "int-quantized"}, {"format": None}, "stored as int-quantized, which is not known here; pack-quant"),
        ({"format": "mixed-precision"}, {"format": "marlin-24"}, "stored as marlin-24, which is not known here"),
        ({"transform_config": {"config_groups": {"u": {}}}}, {}, "rotated activations are not known here"),
    ],
)
def test_other_ways_to_store_the_same_numbers_are_refused(fields, group, words):
    layout = LAYOUTS["compressed-tensors"]
    content = layout.write_config({NAME: (formats.find("int8:32"), (8, 64))}, [], {}) | fields
    content["config_groups"]["group_0"] |= group
    with pytest.raises(UserError, match=words):
        layout.read_config(content, {NAME: (8, 64)}, [], "config.json")


@pytest.mark.parametrize(("key", "value"), [("ignore", 3), ("targets", "Linear")])
def test_names_of_modules_that_are_no_list_are_refused(key, value):
    layout = LAYOUTS["compressed-tensors"]
    content = layout.write_config({NAME: (formats.find("int8:32"), (8, 64))}, [], {})
    (content if key == "ignore" else content["config_groups"]["group_0"])[key] = value
    with pytest.raises(UserError, match=f"{key} must be a list of names of modules; got {value!r}"):
        layout.read_config(content, {NAME: (8, 64)}, [], "config.json")


@pytest.mark.parametrize(
    ("layout", "made", "said"),
    [
        ("compressed-tensors", "mxfp8_e4m3", "fp8_e4m3:32"),
        ("compressed-tensors", "fp8_e4m3:32", "mxfp8_e4m3"),
        ("compressed-tensors", "nvfp4", "mxfp4_e2m1"),
        ("compressed-tensors", "int4:32", "mxfp4_e2m1"),
        ("compressed-tensors", "int4:64", "int4:32"),
        ("gpt-oss", "mxfp4_e2m1", "nvfp4"),
    ],
)
def test_weights_packed_in_another_format_are_refused(layout, made, said, tmp_path):
    """The config of another checkpoint: in the same layout, or that of compressed-tensors."""
    tensors, _ = stored(LAYOUTS[layout], made, gaussian(0, 4, 64), tmp_path)
    content = LAYOUTS["compressed-tensors"].write_config({NAME: (formats.find(said), (4, 64))}, [], {})
    with pytest.raises(UserError, match=r"It was packed in another format|is missing|holds it as it was"):
        packed.resolve(content, tensors, {NAME: (4, 64)}, "F32", "config.json")


def test_groups_of_several_formats_name_their_modules():
    layout = LAYOUTS["compressed-tensors"]
    first, second, head = NAME, NAME.replace("up", "down"), "lm_head.weight"
    weights = {first: (formats.find("mxfp4_e2m1"), (96, 64)), second: (formats.find("int8:96"), (64, 96))}
    content = layout.write_config(weights, [head], {})
    assert content["format"] == "mixed-precision"
    strategies = [group["weights"]["strategy"] for group in content["config_groups"].values()]
    assert strategies == ["group", "channel"]
    shapes = {first: (96, 64), second: (64, 96), head: (264, 64), "model.norm.weight": (64,)}
    found, remarks = layout.read_config(content, shapes, [], "config.json")
    assert {name: format.name for name, format in found.items()} == {first: "mxfp4_e2m1", second: "int8:96"}
    assert remarks == ()
    content["config_groups"]["group_0"] |= {
        "input_activations": {"num_bits": 8, "dynamic": True},
        "targets": ["re:.*up_proj$"],
    }
    found, remarks = layout.read_config(content, shapes, [], "config.json")
    assert len(found) == 2
    assert remarks == ("quantized where the checkpoint comes from, and not here: input activations",)
    _, remarks = layout.read_config(content | {"kv_cache_scheme": {"num_bits": 8}}, shapes, [], "config.json")
    assert remarks[0].endswith("input activations, keys and values of attention")


def test_sizes_of_a_layout_need_no_data():
    parts = LAYOUTS["scalejax"].parts(NAME, formats.find("bdr_mx6"), (4096, 14_336))
    assert sum(math.prod(part.shape) for part in parts.values()) == 4096 * 14_336 * 0.75


@pytest.mark.parametrize(
    ("inputs", "format", "tensor", "storage"),
    [
        ("fp8_e4m3", "fp8_e4m3:64", "input_scale", "float-quantized"),
        ("int8", "int8:64", "input_scale", "int-quantized"),
        ("nvfp4", "nvfp4", "input_global_scale", "nvfp4-pack-quantized"),
    ],
)
def test_static_scales_of_activations_are_said_as_compressed_tensors_says_them(inputs, format, tensor, storage):
    layout = find_layout("compressed-tensors", inputs)
    weights = {NAME: (formats.find(format), (8, 64)), NAME.replace("up", "gate"): (formats.find(format), (8, 64))}
    content = layout.write_config(weights, [], {NAME: inputs})
    assert layout_of(content, "config.json") == layout
    first, second = content["config_groups"].values()
    assert (first["format"], second["input_activations"]) == (storage, None)
    args = first["input_activations"]
    assert (args["dynamic"], args["strategy"]) == (
        ("local", "tensor_group") if inputs == "nvfp4" else (False, "tensor")
    )
    named = {name: format for name, (format, _) in weights.items()}
    assert layout.read_inputs(content, named, "config.json") == {NAME: inputs}
    part = layout.input_part(NAME, inputs)
    assert part is not None
    assert (part.name, part.shape) == (NAME.replace("weight", tensor), (1,))
    stored = part.store(np.float32(0.01))
    np.testing.assert_allclose(stored, [100 if inputs == "nvfp4" else 0.01], rtol=1e-6)
    np.testing.assert_allclose(part.restore(stored, "file"), 0.01, rtol=2e-7)
    for broken in (0, -1, np.nan, np.inf):
        with pytest.raises(UserError, match="file: the scale of activations must be above 0 and finite"):
            part.restore(np.float32([broken]), "file")
    if inputs == "nvfp4":
        with pytest.raises(UserError, match="by which they are divided: they would reach"):
            part.restore(1 / stored, "file")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"symmetric": False}, "activations with zero points"),
        ({"strategy": "group", "group_size": 32}, "static scales of activations of this kind are not known here"),
        ({"num_bits": 4}, "static scales of activations of this kind are not known here"),
        ({"dynamic": "local"}, "static scales of activations of this kind are not known here"),
    ],
)
def test_static_scales_that_are_not_known_are_refused(args, words):
    layout = LAYOUTS["compressed-tensors"]
    weight = formats.find("fp8_e4m3:64")
    content = layout.write_config({NAME: (weight, (8, 64))}, [], {NAME: "fp8_e4m3"})
    content["config_groups"]["group_0"]["input_activations"] |= args
    with pytest.raises(UserError, match=words):
        layout.read_inputs(content, {NAME: weight}, "config.json")
    content["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    assert layout.read_inputs(content, {NAME: weight}, "config.json") == {}
