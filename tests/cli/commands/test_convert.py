"""`scalejax convert` and `scalejax generate`: folders of every kind, text out, mistakes."""

import json

import pytest
from llama_cases import GQA, tensors, write_checkpoint

from scalejax.models.llm import safetensors


def read_all(folder):
    return {name: tensor.read().tobytes() for name, tensor in safetensors.open_folder(folder).items()}


def one_error(result, words):
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line, line


def test_there_and_back_again(invoke, tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA, dtype="bfloat16", shard_bytes=20_000)
    done = invoke("convert", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert done.exit_code == 0, done.stderr
    for words in (f"{GQA.parameters():,}, bfloat16", "of Hugging Face", "up to 16,384, theta 500000", "bos 1, eos 2"):
        assert words in done.stdout
    assert f"Wrote the model folder {tmp_path / 'ours'}." in done.stdout
    done = invoke("convert", str(tmp_path / "ours"), str(tmp_path / "back"))
    assert f"Wrote the folder of Hugging Face {tmp_path / 'back'}." in done.stdout
    assert read_all(tmp_path / "back") == read_all(tmp_path / "theirs")


def test_dtype_and_shard_size(invoke, tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    arguments = ("--dtype", "bfloat16", "--shard-size", "1e-5")
    assert invoke("convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), *arguments).exit_code == 0
    tensors_ = safetensors.open_folder(tmp_path / "ours").values()
    assert {t.kind for t in tensors_} == {"BF16"}
    assert len({t.file for t in tensors_}) > 3


@pytest.fixture(scope="module")
def run(language_run):
    """A run folder of a few steps."""
    return language_run("llama-smoke")


@pytest.mark.slow
def test_a_run_generates_what_its_export_generates(invoke, run, tmp_path):
    exported, back = tmp_path / "exported", tmp_path / "back"
    done = invoke("convert", str(run), str(exported))
    assert done.exit_code == 0, done.stderr
    assert "step 2 of the run" in done.stdout
    assert invoke("convert", str(exported), str(back)).exit_code == 0
    texts = []
    for folder in (run, exported, back):
        result = invoke("generate", str(folder), "--prompt", "def f(", "--max-tokens", "12", "--mesh", "fsdp=8")
        assert result.exit_code == 0, result.stderr
        assert "12 tokens in " in result.stderr
        texts.append(result.stdout)
    assert texts[0].startswith("def f(")
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_several_prompts_and_a_file_of_results(invoke, run, tmp_path):
    (tmp_path / "one.txt").write_text("class A:\n")
    (tmp_path / "more.jsonl").write_text('"x"\n\n{"prompt": "y", "id": 3}\n')
    files = ("--prompt-file", str(tmp_path / "one.txt"), "--prompt-file", str(tmp_path / "more.jsonl"))
    sampled = ("--temperature", "1", "--top-p", "0.9", "--samples", "2", "--max-tokens", "5", "--batch-size", "3")
    results = tmp_path / "results.json"
    done = invoke("generate", str(run), "--prompt", "def", *files, *sampled, "--json", str(results), "--seed", "4")
    assert done.exit_code == 0, done.stderr
    found = json.loads(results.read_text())
    assert [c["prompt"] for c in found] == ["def", "def", "class A:\n", "class A:\n", "x", "x", "y", "y"]
    assert all(len(c["tokens"]) == 5 or c["ended"] == "stop" for c in found)
    assert "=== prompt 4, sample 2" in done.stdout
    again = tmp_path / "again.json"
    invoke("generate", str(run), "--prompt", "y", *sampled, "--json", str(again), "--seed", "4")
    assert json.loads(again.read_text()) == found[-2:]  # whatever came before it


MISTAKES = [
    (("convert", "{theirs}", "{theirs}"), "is there already"),
    (("convert", "nowhere", "x"), "nowhere is no folder"),
    (("convert", "{empty}", "x"), "has no model.json"),
    (
        ("convert", "{theirs}", "x", "--dtype", "int8"),
        "--dtype must be one of float32, bfloat16, float16; got 'int8'",
    ),
    (("convert", "{theirs}", "x", "--experts", "fused"), "--experts fused: goes with a folder of Hugging Face"),
    (("convert", "{run}", "x", "--experts", "fused"), "--experts fused: LlamaForCausalLM has no experts"),
    (("convert", "{theirs}", "x", "--shard-size", "0"), "--shard-size must be above 0 GB"),
    (("convert", "{theirs}", "x", "--shard-size", "inf"), "--shard-size must be above 0 GB and finite"),
    (("convert", "{theirs}", "x", "--step", "3"), "--step 3: "),
    (("convert", "{run}", "x", "--step", "3"), "--step 3: "),
    (("generate", "{theirs}", "--prompt", "a"), "has no tokenizer.json"),
    (("generate", "{run}", "--prompt", "a", "--dtype", "int8"), "--dtype must be one of"),
    (("generate", "{theirs}"), "--prompt or --prompt-file must say what to continue"),
    (("generate", "{run}", "--prompt", "a", "--max-tokens", "0"), "max_tokens must be at least 1; got 0"),
    (("generate", "{run}", "--prompt", "a", "--max-tokens", "2000"), "the model is meant for at most 1,024"),
    (("generate", "{run}", "--prompt", "a", "--temperature", "-1"), "temperature must be 0 (greedy) or above"),
    (("generate", "{run}", "--prompt", ""), "prompt 1 is empty"),
    (("generate", "{run}", "--prompt-file", "nowhere.txt"), "--prompt-file nowhere.txt: cannot be read"),
    (("generate", "{run}", "--prompt", "a", "--mesh", "tensor=3"), "axis sizes must multiply to the 8 devices"),
]


# To train the run takes longer than all mistakes.
@pytest.mark.parametrize(
    ("arguments", "words"),
    [pytest.param(*case, marks=pytest.mark.slow) if "{run}" in case[0] else case for case in MISTAKES],
)
def test_mistakes_are_one_message(invoke, request, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "theirs", GQA)
    (tmp_path / "empty").mkdir()
    places = {"theirs": tmp_path / "theirs", "empty": tmp_path / "empty"}
    if "{run}" in arguments:
        places["run"] = request.getfixturevalue("run")
    result = invoke(*(a.format(**places) for a in arguments))
    one_error(result, words)
    assert arguments[0] == "convert" or result.stdout == ""
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_runs_of_other_models_are_refused(invoke, tmp_path):
    import small_run

    recipe = small_run.write_recipe(tmp_path)
    assert invoke("train", recipe, "--set", "steps=1", "--workdir", str(tmp_path / "run")).exit_code == 0
    one_error(invoke("convert", str(tmp_path / "run"), "x", "--recipe", recipe), "CtrTask knows no form of others")


def test_damaged_weights_are_named(invoke, tmp_path):
    weights = tensors(GQA)
    weights["model.norm.weight"][3] = float("nan")
    write_checkpoint(tmp_path / "theirs", GQA, weights)
    refused = invoke("convert", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert refused.exit_code == 2
    assert "tensor model.norm.weight holds 1 values that are NaN or infinite" in refused.stderr
    assert not (tmp_path / "ours").exists()
