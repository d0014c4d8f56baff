"""What a command prints under "Next:" can be run where it was printed."""

import importlib.util
import pathlib
import re
import shlex
import shutil

import pytest
import small_run
import typer
from llama_cases import write_checkpoint
from quantized_cases import SMALL, write_model

from scalejax.cli import folders, requirements
from scalejax.errors import UserError
from scalejax.plan import topology

ROOT = pathlib.Path(__file__).parents[2]


def next_commands(stdout):
    """Words of each command under "Next:"; what it is for is behind two spaces."""
    (_, *sections) = re.split(r"^Next.*:$", stdout, flags=re.MULTILINE)
    (section,) = sections
    lines = [line for line in section.splitlines() if line.startswith("  ") and not line.startswith("  (")]
    return [shlex.split(line.strip().rpartition("  ")[0]) for line in lines]


def understood(words):
    """Whether `scalejax` has such a command with such arguments; runs nothing."""
    from scalejax.cli.app import app

    assert words[0] == "scalejax"
    command = typer.main.get_command(app).commands[words[1]]
    return command.make_context(words[1], list(words[2:])) is not None


def test_commands_are_printed_in_one_place():
    for path in (ROOT / "scalejax" / "cli").rglob("*.py"):
        if path.name != "output.py":
            assert not re.search(r"[\"']\s*Next\b", path.read_text()), path


@pytest.fixture
def here(tmp_path):
    """A folder that has to be quoted, and a user's recipe in it."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder, small_run.write_recipe(folder)


@pytest.mark.slow
def test_after_training_with_a_recipe_of_a_users(invoke, here, monkeypatch):
    folder, recipe = here
    monkeypatch.chdir(folder)
    lacking = lambda: (_ for _ in ()).throw(UserError("libtpu is not installed"))  # noqa: E731
    monkeypatch.setattr(topology, "check_libtpu", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    sets = ("--set", "steps=2", "--set", "placement.mesh.fsdp=8")
    done = invoke("train", recipe, *sets, "--workdir", "run one")
    evaluate, board, plan = next_commands(done.stdout)
    assert evaluate == ["scalejax", "eval", "run one", "--recipe", recipe]
    assert invoke(*evaluate[1:]).exit_code == 0
    assert board == ["tensorboard", "--logdir", "run one"]
    assert plan[:5] == ["scalejax", "plan", recipe, "--topology", "v5e:2x2"]
    assert "--set=steps=2" in plan
    assert not [word for word in plan if "mesh" in word]  # 8 devices are none of a slice of 4
    assert understood(plan)
    # Where neither tensorboard nor libtpu is installed, neither command is printed, and how to have it is.
    monkeypatch.setattr(topology, "check_libtpu", lacking)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = invoke("train", recipe, *sets, "--workdir", "run one")
    assert next_commands(done.stdout) == [evaluate]
    assert "(pip install tensorboard, and tensorboard --logdir 'run one' shows curves)" in done.stdout
    assert "(pip install 'scalejax[plan]', and scalejax plan" in done.stdout


@pytest.mark.aot
def test_the_plan_that_is_printed_after_training_compiles(invoke, here, monkeypatch):
    folder, recipe = here
    monkeypatch.chdir(folder)
    done = invoke("train", recipe, "--set", "steps=2", "--set", "placement.mesh.fsdp=8", "--workdir", "run")
    (plan,) = (words for words in next_commands(done.stdout) if words[1] == "plan")
    planned = invoke(*plan[1:])
    assert planned.exit_code == 0, planned.stderr


@pytest.mark.slow
def test_a_model_with_a_tokenizer_generates_next(invoke, tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "their model")
    converted = invoke("convert", str(tmp_path / "their model"), str(tmp_path / "our model"))
    quantized = invoke("quantize", str(tmp_path / "their model"), str(tmp_path / "small"), "--format", "int8:row")
    for done in (converted, quantized):
        assert done.exit_code == 0, done.stderr
        ((*words,),) = next_commands(done.stdout)
        ran = invoke(*words[1:], "--max-tokens", "2")
        assert ran.exit_code == 0, ran.stderr
    # One without takes no text, and where no library reads a tokenizer that is said.
    write_checkpoint(tmp_path / "bare", SMALL)
    done = invoke("convert", str(tmp_path / "bare"), str(tmp_path / "ours"))
    assert done.exit_code == 0
    assert "Next" not in done.stdout
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find_spec(name))
    folders.print_next_of_model(tmp_path / "our model")
    assert "With pip install 'scalejax[llm]': scalejax generate" in capsys.readouterr().out


LANGUAGE = """
import pathlib
from scalejax.train.experiment import Experiment
import small_language_run

def small() -> Experiment:
    return small_language_run.experiment(pathlib.Path(__file__).with_name("texts"))
"""


@pytest.mark.slow
def test_after_training_converting_and_quantizing_a_language_model(invoke, tmp_path, monkeypatch):
    import small_language_run

    monkeypatch.chdir(tmp_path)
    small_language_run.write(tmp_path / "texts")
    (tmp_path / "recipe.py").write_text(LANGUAGE)
    done = invoke("train", "recipe.py:small", "--set", "steps=2", "--workdir", "run")
    commands = next_commands(done.stdout)
    assert [words[1] for words in commands][:2] == ["generate", "eval"]
    for arguments in (("convert", "run", "theirs"), ("quantize", "run", "packed", "--format", "int8:row")):
        done = invoke(*arguments, "--recipe", "recipe.py:small")
        assert done.exit_code == 0, done.stderr
        commands += next_commands(done.stdout) if "Next" in done.stdout else []
    for words in commands:
        if words[0] == "scalejax" and words[1] != "plan":
            ran = invoke(*words[1:])
            assert ran.exit_code == 0, (words, ran.stderr)


@pytest.mark.slow
def test_a_plan_of_tables_is_kept_and_trained_by(invoke, here, monkeypatch):
    folder, recipe = here
    monkeypatch.chdir(folder)
    (keep,) = next_commands(invoke("shard", recipe, "--topology", "h100:1x8", "--set", "seed=3").stdout)
    kept = invoke(*keep[1:])
    assert kept.exit_code == 0, kept.stderr
    assert "Next, on 8 devices:" in kept.stdout
    (train,) = next_commands(kept.stdout)
    done = invoke(*train[1:], "--set", "steps=1", "--workdir", "run")
    assert done.exit_code == 0, done.stderr


def test_the_list_of_recipes_ends_in_commands_that_exist(invoke):
    train, show = next_commands(invoke("recipes").stdout)
    assert understood(train)
    assert invoke(*show[1:]).exit_code == 0


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="runs in a checkout")
def test_the_table_of_commands_says_what_each_needs():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `scalejax ")]
    assert len(rows) > 12
    for row in rows:
        command, _, needs = (cell.strip() for cell in row.strip("|").split(" | "))
        extras = re.findall(r"`([a-z,]+)`", needs)[0].split(",")
        assert set(extras) <= set(requirements.EXTRAS)
        assert "train" in extras  # typer and rich
        assert ("plan" in extras) == (
            "scalejax plan " in command and "--serve" not in command
        )  # which compiles nothing
