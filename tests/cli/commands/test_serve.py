"""`scalejax serve`: a folder behind HTTP in a process of its own, and mistakes."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import click_cases
import httpx2 as httpx
import pytest
from llama_cases import GQA, write_checkpoint

from scalejax.inference import reload
from scalejax.inference.recommendation import export, lowering, precision

ROOT = pathlib.Path(__file__).parents[3]
# The real command; only what continues tokens is a stand-in.
PROGRAM = """
import json, sys, types
from fake_loop import FakeLoop
module = types.ModuleType("scalejax.inference.loop")
def make_loop(engine, **options):
    print(json.dumps(options | {"vocabulary": engine.config.vocabulary}), flush=True)
    loop = FakeLoop(text="bab")
    loop.max_positions = engine.config.max_positions
    return loop
module.make_loop = make_loop
sys.modules["scalejax.inference.loop"] = module
from scalejax.cli import main
sys.argv[0] = "scalejax"
main()
"""
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of Hugging Face whose tokenizer has an id for each byte."""
    library = pytest.importorskip("tokenizers", reason="needs the extra llm")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, dataclasses.replace(GQA, vocabulary=320, layers=1, max_positions=128))
    names = {f"<{i}>": i for i in range(320)} | {"<s>": 1, "</s>": 2} | {chr(i): i for i in range(32, 127)}
    kept = {i: name for name, i in names.items()}
    words = library.Tokenizer(library.models.WordLevel({name: i for i, name in kept.items()}, unk_token=kept[0]))
    words.pre_tokenizer = library.pre_tokenizers.Split("", "isolated")
    words.decoder = library.decoders.Fuse()
    words.add_special_tokens(["<s>", "</s>"])
    words.save(str(folder / "tokenizer.json"))
    beside = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder


@pytest.mark.slow
def test_a_folder_is_served_until_a_signal(folder):
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "cases")))
    environment = {**os.environ, "PYTHONPATH": path, "SCALEJAX_API_KEY": "secret"}
    arguments = [str(folder), "--port", "0", "--slots", "3", "--kv-tokens", "100", "--page", "16", "--kv-dtype", "int8"]
    command = [sys.executable, "-c", PROGRAM, "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            line = child.stdout.readline()
            assert line, child.stderr.read()
            assert json.loads(line) == {"slots": 3, "kv_tokens": 100, "page": 16, "kv_dtype": "int8", "vocabulary": 320}
            line = child.stdout.readline()
            assert line.startswith("Serving tiny at http://127.0.0.1:"), line
            address = line.split()[3].removesuffix(";")
            with httpx.Client(base_url=address, headers={"authorization": "Bearer secret"}, trust_env=False) as client:
                (model,) = client.get("/models").json()["data"]
                assert (model["id"], model["max_model_len"]) == ("tiny", 100)
                body = client.post("/completions", json={"prompt": "ab", "logprobs": 0, "echo": True}).json()
                (choice,) = body["choices"]
                assert choice["text"] == "abbab"
                assert choice["logprobs"]["tokens"] == ["<s>", *"abbab"]
                assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4]
                body = client.post("/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}).json()
                assert body["choices"][0]["message"]["content"] == "bab"
                assert body["usage"]["prompt_tokens"] == 3  # <s>hi
                assert client.get("/models", headers={"authorization": ""}).status_code == 401
            child.send_signal(signal.SIGTERM)
            assert child.wait(300) == 0, child.stderr.read()
        finally:
            if child.poll() is None:
                child.kill()


@pytest.mark.slow
def test_an_exported_click_model_is_served_until_a_signal(tmp_path, invoke):
    made = click_cases.model("logistic")
    exact = precision.uniform(made, tables="float32", dense="float32")
    export.write(lowering.lower(made, exact, None), tmp_path / "clicks")
    for option in (("--kv-tokens", "9"), ("--dtype", "bfloat16"), ("--mesh", "tensor=2"), ("--step", "3")):
        result = invoke("serve", str(tmp_path / "clicks"), "--port", "0", *option)
        assert result.exit_code == 2
        assert f"{' '.join(option)}: " in result.stderr
    command = [sys.executable, "-m", "scalejax", "serve", str(tmp_path / "clicks"), "--port", "0", "--slots", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as child:
        try:
            line = child.stdout.readline()
            assert line.startswith("Serving clicks at http://127.0.0.1:"), line + child.stderr.read()
            with httpx.Client(base_url=line.split()[3].removesuffix(";"), trust_env=False) as client:
                row = {"ids": {"user": 3, "shown": [1, 2], "pages": [5]}, "dense": [0.5, 1, 2]}
                (score,) = client.post("/score", json={"rows": [row]}).json()["data"]
                ids = {name: [value] for name, value in row["ids"].items()}
                want = reload.load(tmp_path / "clicks")(ids, [row["dense"]])
                assert score["logits"] == pytest.approx(want["logits"][0].tolist(), abs=1e-6)
                assert client.post("/score", json={"rows": [row] * 3}).status_code == 400
            child.send_signal(signal.SIGTERM)
            assert child.wait(300) == 0, child.stderr.read()
        finally:
            if child.poll() is None:
                child.kill()


def test_an_export_that_cannot_be_served_is_one_line(tmp_path, invoke):
    for written, words in (({"format": "x"}, "has the format 'x'"), ({"format": reload.FORMAT}, "Export it again")):
        (tmp_path / "signature.json").write_text(json.dumps(written | {"sha256": {"model.safetensors": ""}}))
        result = invoke("serve", str(tmp_path), "--port", "0")
        assert result.exit_code == 2, result.stdout
        assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--page", "48"), "--page must be one of 16, 32, 64, 128; got 48"),
        (("--kv-dtype", "int4"), "--kv-dtype must be one of none, int8, float8; got 'int4'"),
        (("--metrics-prefix", "x"), "--metrics-prefix must be one of"),
        (("--api-key", ""), "--api-key is empty"),
        (("--drain-seconds", "-1"), "--drain-seconds must be at least 0"),
        (("--port", "70000"), "--port must be from 0"),
        (("--host", "192.0.2.1", "--port", "0"), "--host 192.0.2.1 --port 0: cannot be listened at"),
        (("--port", "0"), "/nowhere"),
        (("--port", "0", "--mesh", "tensor=3"), "must multiply to the 8 devices at hand; got tensor=3"),
    ],
)
def test_mistakes_are_one_line(invoke, arguments, words):
    result = invoke("serve", "/nowhere", *arguments)
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line


def test_the_extra_is_named_where_it_is_missing(invoke, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("serve", "/nowhere")
    assert result.exit_code == 2
    assert "pip install 'scalejax[serve]'" in result.stderr
