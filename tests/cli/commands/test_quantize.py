"""`scalejax quantize`: what it writes and prints, that `generate` and `convert` read it, mistakes."""

import json

import numpy as np
import pytest
from llama_cases import tensors
from quantized_cases import MATRICES, SMALL, change_config, quantize, write_model

from scalejax.errors import UserError
from scalejax.models.llm import safetensors
from scalejax.surgery.quantize import checkpoint


def one_error(result, words):
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line, line


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "theirs"
    write_model(folder)
    return folder


@pytest.mark.slow
def test_a_model_is_quantized_and_generates(invoke, theirs, tmp_path):
    arguments = ("--format", "mxfp6_e3m2", "--rule", "layers/0/mlp/down=bdr_mx9", "--rule", "layers/1/mlp/down=none")
    done = invoke("quantize", str(theirs), str(tmp_path / "out"), *arguments, "--json", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.stderr
    assert f"Wrote the quantized model {tmp_path / 'out'}." in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "model.layers.1.mlp.up_proj.weight" in line)
    assert line.split()[1] == "mxfp6_e3m2"
    assert line.split()[-2] == "0.7812"
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["format"] for row in rows].count("mxfp6_e3m2") == MATRICES - 2
    assert all(20 < row["qsnr"] < 60 for row in rows if row["format"])
    plain = tmp_path / "plain"
    assert invoke("convert", str(tmp_path / "out"), str(plain)).exit_code == 0
    texts = []
    for folder in (tmp_path / "out", plain):
        result = invoke("generate", str(folder), "--prompt", "def f(", "--max-tokens", "8", "--mesh", "fsdp=8")
        assert result.exit_code == 0, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{theirs}", "x", "--format", "mx6"), "there is no 'mx6'; the nearest are bdr_mx6"),
        (("{theirs}", "x", "--format", "int9"), "there is no 'int9'; the nearest are int"),
        (("{theirs}", "{theirs}", "--format", "bdr_mx9"), "is there already"),
        (("nowhere", "x", "--format", "bdr_mx9"), "nowhere is no folder"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--rule", "head"), "--rule must be PATTERN=FORMAT"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--rule", "heads=none"), "--rule heads=none decides of no weight"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--layout", "gguf"), "--layout must be one of scalejax, compressed-"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--layout", "gpt-oss"), "holds mxfp4_e2m1 alone; got bdr_mx9"),
        (("{theirs}", "x", "--format", "int4", "--layout", "gpt-oss"), "fewer than the 1024 of a block of int4"),
        (
            ("{theirs}", "x", "--format", "bdr_mx9", "--calibrate", "kl"),
            "--calibrate must be one of max, percentile, mse",
        ),
        (("{theirs}", "x", "--format", "nvfp4", "--scale-rule", "rceil"), "no weight takes a format with exponents"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--scale-rule", "up"), "scale_rule: must be one of floor"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--shard-size", "0"), "--shard-size must be above 0 GB"),
        (("{theirs}", "x", "--format", "bdr_mx9", "--step", "3"), "--step 3: "),
    ],
)
def test_mistakes_are_one_message(invoke, theirs, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = invoke("quantize", *(a.format(theirs=theirs) for a in arguments))
    one_error(result, words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("said", "most"), [((), 5 * 10**9), (("--shard-size", "0.25"), 250_000_000)])
def test_files_are_as_large_as_the_gigabytes_that_are_asked_for(invoke, theirs, tmp_path, monkeypatch, said, most):
    def asked(*_, shard_bytes, **__):
        raise UserError(f"{shard_bytes} bytes")

    monkeypatch.setattr(checkpoint, "write", asked)
    one_error(
        invoke("quantize", str(theirs), str(tmp_path / "x"), "--format", "bdr_mx9", *said), f"Error: {most} bytes"
    )


@pytest.mark.slow
def test_weights_of_nan_are_refused(invoke, tmp_path):
    weights = tensors(SMALL)
    weights["model.layers.1.mlp.up_proj.weight"][3, :40] = np.nan
    write_model(tmp_path / "theirs", weights=weights)
    result = invoke("quantize", str(tmp_path / "theirs"), str(tmp_path / "out"), "--format", "bdr_mx9")
    one_error(result, "tensor model.layers.1.mlp.up_proj.weight holds 40 values that are NaN or infinite")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_weights_are_packed_or_decoded_in_memory(invoke, theirs, tmp_path):
    quantize(theirs, tmp_path / "out", "mxfp6_e3m2")
    one_error(
        invoke("generate", str(tmp_path / "out"), "--prompt", "a", "--weights", "int8"),
        "--weights must be one of packed, decoded; got 'int8'",
    )
    arguments = ("--prompt", "def f(", "--max-tokens", "6", "--mesh", "fsdp=8", "--weights")
    texts = [invoke("generate", str(tmp_path / "out"), *arguments, weights) for weights in ("packed", "decoded")]
    assert [result.exit_code for result in texts] == [0, 0]
    assert texts[0].stdout == texts[1].stdout


@pytest.mark.slow
def test_reading_with_the_wrong_format_is_one_message(invoke, theirs, tmp_path):
    quantize(theirs, tmp_path / "out", "mxfp8_e4m3")
    name = "model.layers.1.mlp.up_proj.weight"
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["weights"]
    change_config(tmp_path / "out", weights=content | {name: "mxfp8_e5m2"})
    words = f"{name} is mxfp8_e5m2, but the files hold it as mxfp8_e4m3"
    one_error(invoke("generate", str(tmp_path / "out"), "--prompt", "a"), words)
    one_error(invoke("convert", str(tmp_path / "out"), str(tmp_path / "plain")), words)
    change_config(tmp_path / "out", weights=content | {name: "mxfp9"})
    one_error(
        invoke("generate", str(tmp_path / "out"), "--prompt", "a"), "format: there is no 'mxfp9'; the nearest are "
    )


@pytest.mark.slow
def test_errors_are_passed_on_with_text(invoke, theirs, tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 40)
    arguments = ("--format", "mxfp4_e2m1", "--method", "error-diffusion", "--text", str(tmp_path / "text.txt"))
    done = invoke("quantize", str(theirs), str(tmp_path / "out"), *arguments, "--tokens", "600")
    assert done.exit_code == 0, done.stderr
    assert "Calibration text: 512 tokens in 1 rows." in done.stdout
    assert "output error / direct cast" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "model.layers.1.mlp.up_proj.weight" in line)
    assert 0 < float(line.split()[-1]) < 1


@pytest.mark.slow
def test_static_scales_of_activations_are_written_and_used(invoke, theirs, tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 40)
    text = ("--text", str(tmp_path / "text.txt"), "--tokens", "600")
    more = ("--format", "fp8_e4m3:row", "--activations", "fp8_e4m3", "--layout", "compressed-tensors", *text)
    done = invoke("quantize", str(theirs), str(tmp_path / "out"), *more, "--json", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.stderr
    assert "scale of activations" in done.stdout
    rows = [row for row in json.loads((tmp_path / "report.json").read_text()) if row["format"]]
    assert {row["inputs"] for row in rows} == {"fp8_e4m3"}
    assert all(0 < row["input_scale"] < 1 for row in rows)
    assert invoke("quantize", str(theirs), str(tmp_path / "plain"), *more[:2]).exit_code == 0
    found = []
    for folder in ("out", "plain"):
        arguments = ("--against", str(tmp_path / folder), *text[:2], "--tokens", "256", "--mesh", "fsdp=8")
        done = invoke("eval", str(theirs), *arguments, "--json", str(tmp_path / "found.json"))
        assert done.exit_code == 0, done.stderr
        found.append(json.loads((tmp_path / "found.json").read_text())["divergence"])
    assert 0 < found[1] < found[0] < 0.2
    done = invoke("convert", str(tmp_path / "out"), str(tmp_path / "converted"))
    assert "static scales of activations (fp8_e4m3) for 14 weights" in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        ("int8", ("--calibrate", "percentile", "--percentile", "99.99")),
        ("nvfp4", ("--calibrate", "mse", "--method", "error-diffusion")),
    ],
)
def test_static_scales_of_other_formats_are_calibrated_and_generate(invoke, theirs, tmp_path, inputs, more):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 40)
    text = ("--text", str(tmp_path / "text.txt"), "--tokens", "600")
    arguments = ("--format", "bdr_mx9", "--activations", inputs, *more, *text, "--json", str(tmp_path / "report.json"))
    done = invoke("quantize", str(theirs), str(tmp_path / "out"), *arguments)
    assert done.exit_code == 0, done.stderr
    scales = {row["name"]: row["input_scale"] for row in json.loads((tmp_path / "report.json").read_text())}
    held = {n: float(t.read()) for n, t in safetensors.open_folder(tmp_path / "out").items() if ".inputs." in n}
    assert held == {f"{name}.inputs.{inputs}.scale": scale for name, scale in scales.items() if scale is not None}
    assert len(held) == MATRICES
    asked = ("--prompt", "def f(", "--max-tokens", "6", "--mesh", "fsdp=8", "--weights")
    found = [invoke("generate", str(tmp_path / "out"), *asked, weights) for weights in ("packed", "decoded")]
    assert [result.exit_code for result in found] == [0, 0], found[0].stderr
    assert found[0].stdout == found[1].stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "gptq"), "--method must be one of direct, error-diffusion; got 'gptq'"),
        (("--text", "a.txt"), "--text a.txt: a direct cast reads no text"),
        (("--tokens", "500"), "--tokens 500: a direct cast reads no text"),
        (("--damping", "0.1"), "--damping 0.1: goes with --method error-diffusion"),
        (("--activations", "fp8"), "--activations must be one of fp8_e4m3, int8, nvfp4; got 'fp8'"),
        (("--activations", "int8", "--layout", "gpt-oss"), "--layout gpt-oss has no scales of activations"),
        (("--activations", "int8", "--damping", "0.1"), "--damping 0.1: goes with --method error-diffusion"),
        (("--percentile", "95"), "--percentile 95.0: goes with --calibrate percentile"),
        (("--calibrate", "percentile"), "--percentile 99.9 leaves nothing out of the 32 values of a block"),
        (("--method", "error-diffusion", "--text", "nowhere"), "--text nowhere does not exist"),
        (("--method", "error-diffusion", "--tokens", "0"), "--tokens must be at least 2"),
        (("--method", "error-diffusion", "--damping", "0"), "--damping must be above 0"),
    ],
)
def test_mistakes_with_text_are_one_message(invoke, theirs, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    one_error(invoke("quantize", str(theirs), "x", "--format", "mxfp4_e2m1", *arguments), words)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_models_are_compared_on_a_text(invoke, theirs, tmp_path):
    quantize(theirs, tmp_path / "mx9", "bdr_mx9")
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 20)
    text = ("--text", str(tmp_path / "text.txt"), "--mesh", "fsdp=8", "--tokens", "256")
    done = invoke("eval", str(tmp_path / "mx9"), *text)
    assert done.exit_code == 0, done.stderr
    assert "tokens predicted          255" in done.stdout
    done = invoke(
        "eval", str(theirs), "--against", str(tmp_path / "mx9"), *text, "--json", str(tmp_path / "found.json")
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["divergence"] < 0.05
    assert found["agreement"] > 0.8
    assert f"{found['before']['loss']:.4f} -> {found['after']['loss']:.4f}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--against", "x"), "--against x: goes with --text PATH"),
        (("--text", "nowhere"), "--text nowhere does not exist"),
        (("--text", "a", "--split", "test"), "--split test: goes with the data of a run, not with --text"),
    ],
)
def test_mistakes_of_comparing_are_one_message(invoke, theirs, arguments, words):
    one_error(invoke("eval", str(theirs), *arguments), words)
