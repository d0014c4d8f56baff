"""A run of `mixtral-smoke` on the command line: scored, continued, converted, quantized, and what is refused."""

import json
import re

import numpy as np
import pytest

from scalejax.inference import reload
from scalejax.models.llm import model_folder, safetensors

pytestmark = pytest.mark.slow

ASKED = ("--prompt", "def f(", "--max-tokens", "8", "--mesh", "fsdp=8")


@pytest.fixture(scope="module")
def run(language_run):
    return language_run("mixtral-smoke")


def generated(invoke, folder, *more):
    result = invoke("generate", str(folder), *ASKED, *more)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("def f(")
    return result.stdout


def compared(invoke, run, other, folder):
    """What `eval` finds of two models on one text."""
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 40)
    text = ("--text", str(folder / "text.txt"), "--tokens", "256", "--mesh", "fsdp=8")
    report = ("--against", str(other), "--json", str(folder / "found.json"))
    done = invoke("eval", str(run), *text, *report)
    assert done.exit_code == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def test_eval_scores_it(invoke, run):
    done = invoke("eval", str(run))
    assert done.exit_code == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    for name, shown in (("loss", "loss"), ("expert_load_max", "largest load of an expert")):
        (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith(shown))
        assert line.split()[-1] == f"{summary[f'val_{name}']:.4f}"


def test_generate_continues_a_text(invoke, run):
    assert generated(invoke, run) == generated(invoke, run)


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_convert_writes_it_in_both_forms_and_back(invoke, run, tmp_path, form):
    done = invoke("convert", str(run), str(tmp_path / "theirs"), "--experts", form)
    assert done.exit_code == 0, done.stderr
    assert "4 a layer, of which a token takes 2" in done.stdout
    names = safetensors.open_folder(tmp_path / "theirs")
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == (form == "fused")
    assert ("model.layers.1.block_sparse_moe.experts.3.w2.weight" in names) == (form == "separate")
    assert invoke("convert", str(tmp_path / "theirs"), str(tmp_path / "ours")).exit_code == 0
    assert generated(invoke, tmp_path / "theirs") == generated(invoke, tmp_path / "ours")
    found = compared(invoke, run, tmp_path / "theirs", tmp_path)
    assert abs(found["divergence"]) < 1e-9
    assert found["before"]["loss"] == found["after"]["loss"]


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("scalejax", ("--format", "int8:32")),
        ("compressed-tensors", ("--format", "int4:32", "--method", "error-diffusion", "--tokens", "600")),
        ("gpt-oss", ("--format", "mxfp4_e2m1")),
    ],
)
def test_quantize_writes_what_generate_and_eval_read(invoke, run, tmp_path, layout, more):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 40)
    text = ("--text", str(tmp_path / "text.txt"))
    more = (*more, *(text if "--tokens" in more else ()), "--layout", layout)
    done = invoke("quantize", str(run), str(tmp_path / "out"), *more)
    assert done.exit_code == 0, done.stderr
    assert "layers.1.mlp.experts.down_proj" in done.stdout or "experts.3.w2" in done.stdout
    texts = [generated(invoke, tmp_path / "out", "--weights", weights) for weights in ("packed", "decoded")]
    assert texts[0] == texts[1]
    found = compared(invoke, run, tmp_path / "out", tmp_path)
    assert np.isfinite(found["after"]["loss"])
    assert 0 < found["divergence"] < 0.1
    assert model_folder.open_folder(tmp_path / "out").config.mlp.count == 4


def test_export_writes_what_scores_without_this_package(invoke, run, tmp_path):
    done = invoke("quantize", str(run), str(tmp_path / "int8"), "--format", "int8:32")
    assert done.exit_code == 0, done.stderr
    tokens, found = [[100, 101, 102], [40]], {}
    for name, folder in {"run": run, "int8": tmp_path / "int8"}.items():
        out = tmp_path / f"{name}-out"
        done = invoke("export", str(folder), str(out), "--length", "16", "--json", str(tmp_path / "found.json"))
        assert done.exit_code == 0, done.stderr
        assert "1 x 16 tokens" in done.stdout
        assert json.loads((tmp_path / "found.json").read_text())["reloaded_difference"] < 1e-5
        found[name] = reload.load(out)(tokens)["logits"]
    assert 0 < np.abs(found["run"] - found["int8"]).max() < 0.1
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("run-out", "int8-out")]
    assert sizes[1] < 0.6 * sizes[0]  # weights stay packed


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--dense", "int8"), "--dense int8: .* has a language model, and this is of a click model"),
        (("--logits", "first"), "--logits must be one of last, all; got 'first'"),
        (("--length", "1000000"), "--length must be from 1 to"),
    ],
)
def test_export_refuses_what_is_of_no_language_model(invoke, run, tmp_path, more, words):
    done = invoke("export", str(run), str(tmp_path / "out"), *more)
    assert done.exit_code == 2
    assert re.search(words, done.stderr)
    assert not (tmp_path / "out").exists()


def test_activations_of_experts_have_scales_of_each(invoke, run, tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 40)
    more = ("--format", "int8:row", "--activations", "int8", "--text", str(tmp_path / "text.txt"), "--tokens", "600")
    done = invoke("quantize", str(run), str(tmp_path / "out"), *more, "--layout", "compressed-tensors")
    assert done.exit_code == 0, done.stderr
    assert len(model_folder.open_folder(tmp_path / "out").inputs) == 2 * (4 + 3 * 4)
    found = compared(invoke, run, tmp_path / "out", tmp_path)
    assert 0 < found["divergence"] < 0.1
