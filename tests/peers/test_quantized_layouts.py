"""Quantized folders as other libraries read them: compressed-tensors, and transformers' reader of gpt-oss."""

import dataclasses
import json

import numpy as np
import pytest
from quantized_cases import EXPERTS, gaussian, quantize, quantize_with_inputs, read_weights, write_model

from scalejax.models.llm import model_folder

pytestmark = pytest.mark.peers

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

NAME = "model.layers.0.mlp.up_proj"
FORMATS = ("int2:32", "int4:32", "int8:64", "int4:row", "fp8_e4m3:row", "fp8_e4m3:32", "nvfp4")
EXPONENTS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    write_model(folder)
    return folder


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("format", [*FORMATS, *EXPONENTS])
def test_compressed_tensors_decodes_the_same_weights(theirs, tmp_path, format):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    given = [("layers/./mlp/down", "none")]  # whose 96 columns not all of these formats divide
    quantize(theirs, tmp_path / "out", format, given=given, layout="compressed-tensors")
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(content)
    assert set(config.ignore) == {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))}
    (scheme,) = config.config_groups.values()
    stored = tensors(tmp_path / "out")
    own = {name.removeprefix(f"{NAME}."): value for name, value in stored.items() if name.startswith(f"{NAME}.")}
    reader = BaseCompressor.get_value_from_registry(config.format)
    assert set(own) == set(reader.compression_param_names(scheme))
    decoded = reader.decompress(own, scheme)["weight"].float().numpy()
    want = read_weights(tmp_path / "out")[f"{NAME}.weight"]
    # They multiply in bfloat16 where scales are stored as bytes.
    np.testing.assert_allclose(decoded, want, rtol=2**-7 if format in (*EXPONENTS, "nvfp4") else 1e-6, atol=1e-7)


def test_weights_that_compressed_tensors_packs_are_read(theirs, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    from scalejax.models.llm import packed, safetensors
    from scalejax.models.llm.packed_layouts.known import LAYOUTS
    from scalejax.numerics import formats

    x = torch.tensor(gaussian(0, 8, 64))
    for format, group in (("int4:32", 32), ("mxfp4_e2m1", 32), ("nvfp4", 16)):
        content = LAYOUTS["compressed-tensors"].write_config(
            {f"{NAME}.weight": (formats.find(format), (8, 64))}, [], {}
        )
        config = QuantizationConfig.model_validate(content)
        (scheme,) = config.config_groups.values()
        largest = x.abs().reshape(8, -1, group).amax(-1)
        given = {"weight": x}
        if format == "nvfp4":
            given["weight_global_scale"] = (448 * 6 / x.abs().max()).reshape(1)
            given["weight_scale"] = (largest / 6 * given["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        elif format == "int4:32":
            given["weight_scale"] = largest / 7
        else:
            given["weight_scale"] = 2.0 ** (torch.floor(torch.log2(largest)) - 2)
        reader = BaseCompressor.get_value_from_registry(config.format)
        made = reader.compress(given, scheme)
        arrays = {}
        for name, value in made.items():
            bits = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
            array = bits.numpy()
            arrays[f"{NAME}.{name}"] = array.view(safetensors.STORED["F8_E4M3"]) if bits is not value else array
        folder = tmp_path / format
        folder.mkdir()
        plan = tuple(safetensors.Written(name, array.dtype, array.shape) for name, array in arrays.items())
        safetensors.write_folder(folder, plan, arrays.__getitem__)
        found = packed.resolve(
            content, safetensors.open_folder(folder), {f"{NAME}.weight": (8, 64)}, "F32", "config.json"
        ).tensors
        theirs_ = reader.decompress(made, scheme)["weight"].float().numpy()
        np.testing.assert_allclose(found[f"{NAME}.weight"].read(), theirs_, rtol=2**-7, atol=1e-7)


def test_transformers_decodes_the_blocks_of_gpt_oss(theirs, tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    quantize(theirs, tmp_path / "out", "mxfp4_e2m1", layout="gpt-oss")
    stored = tensors(tmp_path / "out")
    blocks, scales = (stored[f"{NAME}.weight_{part}"][None] for part in ("blocks", "scales"))  # as one expert
    decoded = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T.numpy()
    np.testing.assert_array_equal(decoded, read_weights(tmp_path / "out")[f"{NAME}.weight"])


def test_transformers_decodes_the_experts_of_a_mixtral_in_blocks_of_gpt_oss(tmp_path):
    """All experts of a layer in one tensor, the gate in the first half of the rows."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    write_model(tmp_path / "theirs", EXPERTS)
    quantize(tmp_path / "theirs", tmp_path / "out", "mxfp4_e2m1", layout="gpt-oss")
    stored, opened = tensors(tmp_path / "out"), model_folder.open_folder(tmp_path / "out").source
    decoded = {}
    for name in ("gate_up_proj", "down_proj"):
        parts = (stored[f"model.layers.1.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
        decoded[name] = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()  # [experts, in, out]
    width = EXPERTS.ffn_dim
    np.testing.assert_array_equal(decoded["gate_up_proj"][..., :width], opened.read("layers/mlp/gate", 1))
    np.testing.assert_array_equal(decoded["gate_up_proj"][..., width:], opened.read("layers/mlp/up", 1))
    np.testing.assert_array_equal(decoded["down_proj"], opened.read("layers/mlp/down", 1))


@pytest.mark.parametrize("format", ["int4:32", "fp8_e4m3:row"])
def test_transformers_runs_what_compressed_tensors_describe(theirs, tmp_path, format):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    given = [("layers/./mlp/down", "none")]
    quantize(theirs, tmp_path / "out", format, given=given, layout="compressed-tensors")
    quantize(theirs, tmp_path / "own", format, given=given)
    model_folder.convert(model_folder.open_folder(tmp_path / "own"), tmp_path / "ours", to="model")
    model_folder.convert(model_folder.open_folder(tmp_path / "ours"), tmp_path / "plain", to="huggingface")
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits.numpy()
            for name in ("out", "plain")
        ]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


STATIC = (("fp8_e4m3", "fp8_e4m3:row"), ("int8", "int8:row"), ("nvfp4", "nvfp4"))


@pytest.mark.parametrize(("inputs", "format"), STATIC)
def test_compressed_tensors_quantizes_activations_alike(theirs, tmp_path, inputs, format):
    """The scheme it reads, the tensors it wants, the weights it decodes, and its own cast of activations."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from compressed_tensors.quantization.lifecycle import forward, initialize_module_for_quantization

    from scalejax.numerics.quantized import static

    quantize_with_inputs(theirs, tmp_path / "out", format, inputs, layout="compressed-tensors")
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(content)
    (scheme,) = config.config_groups.values()
    assert scheme.input_activations.dynamic == ("local" if inputs == "nvfp4" else False)
    stored = tensors(tmp_path / "out")
    own = {name.removeprefix(f"{NAME}."): value for name, value in stored.items() if name.startswith(f"{NAME}.")}
    scale_name = "input_global_scale" if inputs == "nvfp4" else "input_scale"
    reader = BaseCompressor.get_value_from_registry(config.format)
    assert set(own) == {*reader.compression_param_names(scheme), scale_name}
    decoded = reader.decompress(own, scheme)["weight"].float().numpy()
    want = read_weights(tmp_path / "out")[f"{NAME}.weight"]
    np.testing.assert_allclose(decoded, want, rtol=2**-7 if inputs == "nvfp4" else 1e-6, atol=1e-7)

    linear = torch.nn.Linear(*want.shape[::-1], bias=False)
    initialize_module_for_quantization(linear, scheme, force_zero_point=False)
    linear.quantization_status = QuantizationStatus.FROZEN
    getattr(linear, scale_name).data.copy_(own[scale_name])
    x = 3 * gaussian(5, 7, 64)
    found = forward.forward_quantize(linear, torch.tensor(x), "input", scheme.input_activations).numpy()
    scale = model_folder.open_folder(tmp_path / "out").inputs[f"{NAME}.weight"].scale
    ours = np.asarray(static.encode(x, scale, inputs)) * scale
    if inputs == "nvfp4":  # a quotient within a rounding of a tie
        assert (np.abs(found - ours) > 1e-6 * np.abs(ours).max()).mean() < 0.01
    else:
        np.testing.assert_array_equal(found, ours)
    assert np.abs(found - x).max() > 0.1  # some saturate


@pytest.mark.parametrize(("inputs", "format"), STATIC[:2])  # NVFP4 it decodes to bfloat16, whatever the model has
def test_transformers_gives_the_logits_of_static_scales(theirs, tmp_path, inputs, format):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import jax

    from scalejax.inference import generate
    from scalejax.parallel.mesh import MeshShape, make_mesh

    quantize_with_inputs(theirs, tmp_path / "out", format, inputs, layout="compressed-tensors")
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        want = model(ids).logits.numpy()
    opened = model_folder.open_folder(tmp_path / "out")
    mesh = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    found = np.asarray(generate.load(opened, mesh).logits(ids.numpy()))
    without = np.asarray(generate.load(dataclasses.replace(opened, inputs={}), mesh).logits(ids.numpy()))
    # An activation within a rounding of a tie gets the code beside it, and moves what comes after.
    near, far = np.abs(found - want).max(), np.abs(without - want).max()
    assert near < 0.2 * far, (near, far)


def test_weights_under_one_scale_are_read(tmp_path):
    """As published FP8 checkpoints have them: one scale a weight and one for its inputs."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    from scalejax.models.llm import packed, safetensors

    scheme: QuantizationScheme = preset_name_to_scheme("FP8", ["Linear"])
    x = torch.tensor(gaussian(0, 8, 64))
    reader = BaseCompressor.get_value_from_registry("float-quantized")
    made = reader.compress({"weight": x, "weight_scale": (x.abs().max() / 448).reshape(1)}, scheme)
    want = reader.decompress(made, scheme)["weight"].float().numpy()
    bits = made["weight"].view(torch.uint8).numpy().view(safetensors.STORED["F8_E4M3"])
    arrays = {"weight": bits, "weight_scale": made["weight_scale"].numpy(), "input_scale": np.float32([0.02])}
    plan = tuple(safetensors.Written(f"{NAME}.{name}", array.dtype, array.shape) for name, array in arrays.items())
    safetensors.write_folder(tmp_path, plan, lambda name: arrays[name.rpartition(".")[2]])
    content = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    shapes = {f"{NAME}.weight": (8, 64)}
    found = packed.resolve(content, safetensors.open_folder(tmp_path), shapes, "F32", "config.json")
    np.testing.assert_allclose(found.tensors[f"{NAME}.weight"].read(), want, rtol=1e-6)
    part = found.tensors[f"{NAME}.weight"].read((slice(2, 5), slice(40, 50)))
    np.testing.assert_allclose(part, want[2:5, 40:50], rtol=1e-6)
    own = found.inputs[f"{NAME}.weight"]
    assert (own.format, own.scale) == ("fp8_e4m3", np.float32(0.02))
