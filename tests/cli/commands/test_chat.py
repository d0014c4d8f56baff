"""`scalejax generate` with --chat, --messages and --token-ids."""

import json
import re

import pytest
import typer.testing
from chat_cases import write_model, write_tokenizer
from llama_cases import GQA, write_checkpoint

from scalejax.cli import chat
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer

pytest.importorskip("tokenizers", reason="needs the extra llm")

SMALL = ("--max-tokens", "4", "--mesh", "fsdp=8")
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "theirs")


def talk(folder, lines, *more):
    from scalejax.cli.app import app

    return typer.testing.CliRunner().invoke(app, ["generate", str(folder), "--chat", *SMALL, *more], input=lines)


def one_error(result, words):
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line, line
    assert result.stdout == ""


@pytest.mark.slow
def test_a_chat_answers_each_line_in_the_conversation_so_far(invoke, model, tmp_path):
    done = talk(model, "hi\n\nmore {{ 1/0 }}\n\n\nnot read\n", "--json", str(tmp_path / "chat.json"))
    assert done.exit_code == 0, done.output
    first, second = json.loads((tmp_path / "chat.json").read_text())
    tokenizer = HuggingFaceTokenizer(path=str(model)).build()
    assert first["prompt"] == tokenizer.render_chat(QUESTION)
    turns = [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "more {{ 1/0 }}"}]
    assert second["prompt"] == tokenizer.render_chat(QUESTION + turns)
    assert done.stdout == f"{first['text']}\n{second['text']}\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("Prompt: ")]
    for line, turn in zip(said, (first, second), strict=True):
        read = len(tokenizer.encode(turn["prompt"], specials="parse"))
        assert re.fullmatch(rf"Prompt: 0 tokens reused, {read} read\. {len(turn['tokens'])} new in .* s\.", line)

    # The same first answer by the other ways in: a file of messages, and the ids of the prompt.
    (tmp_path / "messages.json").write_text(json.dumps(QUESTION))
    done = invoke("generate", str(model), "--messages", str(tmp_path / "messages.json"), *SMALL)
    assert (done.exit_code, done.stdout) == (0, first["text"] + "\n")
    assert "Prompt: 0 tokens reused, " in done.stderr
    ids = " ".join(map(str, tokenizer.encode(first["prompt"], specials="parse")))
    done = invoke("generate", str(model), "--token-ids", ids, *SMALL)
    assert (done.exit_code, done.stdout.split()) == (0, [str(i) for i in first["tokens"]])


@pytest.mark.slow
@pytest.mark.parametrize("lines", ["", "/exit\nhi\n", "\n\nhi\n"])
def test_a_chat_ends_where_it_is_said(model, lines):
    done = talk(model, lines)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "Prompt" not in done.stderr


def test_ctrl_c_ends_a_chat_without_a_traceback(model, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_line", interrupted)
    done = talk(model, "hi\n")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "Interrupted."


@pytest.mark.slow
def test_ids_are_continued_without_a_tokenizer(invoke, tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    results = tmp_path / "ids.json"
    asked = ("--token-ids", "1 2 3", "--token-ids", "95,0", *SMALL)
    done = invoke("generate", str(tmp_path / "theirs"), *asked, "--json", str(results))
    assert done.exit_code == 0, done.stderr
    found = json.loads(results.read_text())
    assert [c["prompt"] for c in found] == [[1, 2, 3], [95, 0]]
    assert [line.split() for line in done.stdout.splitlines()] == [[str(i) for i in c["tokens"]] for c in found]
    assert all(len(c["tokens"]) == 4 or c["ended"] == "stop" for c in found)
    drawn = ("--token-ids", "95,0", "--samples", "2", "--temperature", "2", *SMALL)
    done = invoke("generate", str(tmp_path / "theirs"), *drawn)
    assert len(set(done.stdout.splitlines())) == 2


@pytest.mark.default_cases(first=13)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chat", "--prompt", "a"), "--chat does not go with --prompt"),
        (("--messages", "{file}", "--chat"), "--chat does not go with --messages"),
        (("--messages", "{file}", "--token-ids", "1"), "--messages does not go with --token-ids"),
        (("--token-ids", "1", "--prompt-file", "x"), "--token-ids does not go with --prompt-file"),
        (("--token-ids", "1", "--stop", "x"), "--token-ids does not go with --stop"),
        (("--token-ids", "1", "--images", "x"), "--token-ids does not go with --images"),
        (("--chat", "--samples", "2"), "--chat does not go with --samples"),
        (("--token-ids", "1 x"), "--token-ids must be ids, separated by spaces or commas, such as '1 2 3'; got 'x'"),
        (("--token-ids", "-1"), "got '-1'"),
        (("--token-ids", ""), "got ''"),
        (("--token-ids", "9" * 30), "got '999"),
        (("--token-ids", "1 320"), "--token-ids: 320 is no id of "),
        (("--token-ids", "1", "--samples", "2"), "samples must be 1 where the temperature is 0"),
        (("--token-ids", "1", "--max-tokens", "2048"), "the model is meant for at most 2,048 positions"),
        (("--messages", "nowhere.json"), "--messages nowhere.json: cannot be read as JSON"),
    ],
)
def test_mistakes_are_one_message(invoke, model, tmp_path, arguments, words):
    (tmp_path / "file").write_text(json.dumps(QUESTION))
    arguments = [a.format(file=tmp_path / "file") for a in arguments]
    one_error(invoke("generate", str(model), *arguments, "--mesh", "fsdp=8"), words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{", "file: cannot be read as JSON"),
        ("{}", "file: must be a list of at least one message; got {}"),
        ('[{"role": "wizard", "content": "a"}]', "messages[0].role must be one of system, developer, user"),
        ('[{"role": "user"}]', "messages[0].content must be text; got None"),
        ("[" * 10**5, "nested more than 100 deep"),
    ],
)
def test_files_that_are_no_conversation_are_refused(invoke, model, tmp_path, content, words):
    (tmp_path / "file").write_text(content)
    one_error(invoke("generate", str(model), "--messages", str(tmp_path / "file"), "--mesh", "fsdp=8"), words)


def test_models_without_a_template_and_templates_that_fail_are_refused(invoke, tmp_path):
    (tmp_path / "file").write_text(json.dumps(QUESTION))
    theirs = write_model(tmp_path / "theirs", template=None)
    arguments = ("generate", str(theirs), "--messages", str(tmp_path / "file"), "--mesh", "fsdp=8")
    one_error(invoke(*arguments), "there is no chat template (tokenizer_config.json or chat_template.jinja beside it)")
    one_error(invoke("generate", str(theirs), "--chat", "--mesh", "fsdp=8"), "there is no chat template")
    write_tokenizer(theirs, "{{ 1/0 }}")
    one_error(invoke(*arguments), "chat_template.jinja: its chat template fails on these messages (ZeroDivisionError")
    write_checkpoint(tmp_path / "bare", GQA)
    one_error(invoke("generate", str(tmp_path / "bare"), "--chat", "--mesh", "fsdp=8"), "there is no chat template")
