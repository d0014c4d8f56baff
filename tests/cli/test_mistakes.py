"""A user's mistake is one message on stderr and exit status 2; a bug keeps its traceback and exits 1."""

import importlib.machinery
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest
import small_run

import scalejax.train
from scalejax.errors import UserError

HEADER = "from scalejax.train.experiment import Experiment\n"


def _one_message(result, words):
    """Exit status 2, nothing on stdout, one line on stderr that has these words."""
    code = result.exit_code if hasattr(result, "exit_code") else result.returncode
    assert code == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    assert words in lines[0], lines[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f() -> Experiment:\n  return (\n", "line 2: '(' was never closed"),
        ("x = 1\n", "has no recipe"),
        (HEADER + "def f() -> Experiment: ...\ndef f() -> Experiment: ...\n", "'f' is ambiguous"),
        (HEADER + "def g() -> Experiment: ...\n", "has no recipe 'f'"),
        ("import no_such_package\ndef f() -> 'Experiment': ...\n", "line 1: ModuleNotFoundError"),
        ("def f() -> 'Experiment': return 3\n", "must return a scalejax.train.experiment.Experiment"),
    ],
)
def test_broken_recipe_file(invoke, tmp_path, text, words):
    (tmp_path / "mine_broken.py").write_text(text)
    _one_message(invoke("train", f"{tmp_path}/mine_broken.py:f"), words)


def test_a_search_with_what_it_should_find_or_cannot(invoke, example):
    _one_message(invoke("plan", "llama", "--topology", "v6e:4x4", "--search", "--mesh", "fsdp=16"), "finds the mesh")
    _one_message(
        invoke("plan", "llama", "--topology", "v6e:4x4", "--search", "--set", "placement.mesh.fsdp=2"),
        "got --set placement.mesh.fsdp=2",
    )
    _one_message(
        invoke("plan", example, "--topology", "v6e:4x4", "--mesh", "fsdp=16", "--set", "placement.mesh.tensor=2"),
        "the mesh is given twice: --mesh fsdp=16 and --set placement.mesh.tensor=2",
    )
    searched = invoke("plan", example, "--topology", "v6e:4x4", "--search")
    _one_message(searched, "`scalejax shard` plans where embedding tables live")


@pytest.mark.parametrize("command", [("train",), ("plan", "--topology", "v5e:2x2"), ("recipes",)])
def test_unknown_recipe(invoke, command):
    _one_message(invoke(*command, "no-such-recipe"), "Unknown recipe 'no-such-recipe'")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model.layer=3", "Nearest: model.layers"),
        ("steps=many", "steps must be an integer, for example --set steps=10; got 'many'"),
        ("model.layers=0", "layers must be at least 1; got 0"),
        ("steps", "must be path=value"),
    ],
)
def test_bad_override(invoke, example, text, words):
    _one_message(invoke("train", example, "--set", text), words)


def test_missing_recipe_file(invoke):
    _one_message(invoke("train", "nowhere/mine.py:f"), "'nowhere/mine.py' does not exist")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "does not exist"), ("", "has no experiment.json"), ("{", "cannot be read as JSON"), ("{}", "no record of")],
)
def test_eval_of_something_that_is_no_run_folder(invoke, tmp_path, content, words):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
    if content:
        (folder / "experiment.json").write_text(content)
    _one_message(invoke("eval", str(folder)), words)


def test_unwritable_json_file(invoke, example, monkeypatch):
    result = types.SimpleNamespace(to_json=dict)
    import scalejax.plan.render

    monkeypatch.setattr(scalejax.plan.render, "render", lambda result, console: None)
    monkeypatch.setattr(scalejax.plan, "plan", lambda *arguments: result, raising=False)
    _one_message(invoke("plan", example, "--topology", "v5e:2x2", "--json", "no/folder/x.json"), "cannot be written")


@pytest.mark.parametrize(
    "arguments", [("train",), ("trian", "x"), ("train", "x", "--resume", "maybe"), ("train", "x", "--steps", "3"), ()]
)
def test_usage_errors_exit_with_status_2(invoke, arguments):
    assert invoke(*arguments).exit_code == 2


def test_cpu_devices_against_another_platform(invoke, example, monkeypatch):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cuda")
    _one_message(invoke("train", example, "--cpu-devices", "2"), "JAX_PLATFORMS is 'cuda'")


@pytest.mark.parametrize("grace", ["nan", "inf", "-1"])
@pytest.mark.parametrize("deadline", [(), ("--deadline", "3600")], ids=["no deadline", "a deadline"])
def test_a_grace_that_is_no_time(invoke, example, grace, deadline):
    words = f"--grace must be 0 or more seconds, such as 30; got {grace}."
    _one_message(invoke("train", example, "--grace", grace, *deadline), words)


NO_KEY = "api_key not configured (no-tty). call wandb.login(key=[your_api_key])"


@pytest.mark.slow
def test_wandb_without_a_login(invoke, tmp_path, monkeypatch):
    class Error(Exception):
        pass

    def init(**_):
        raise Error(NO_KEY)

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    vars(wandb).update(Error=Error, init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sets = ("--set", "trackers=Wandb", "--set", "trackers.0.mode=online")
    result = invoke("train", small_run.write_recipe(tmp_path), *sets, "--workdir", str(tmp_path / "run"))
    assert result.exit_code == 2, result.stderr
    told = f"Error: trackers: Wandb cannot begin ({NO_KEY}). Run `wandb login`, or set mode='offline'."
    assert told in result.stderr.splitlines()
    assert "Traceback" not in result.output


@pytest.fixture
def loop(monkeypatch):
    """A train loop that does what a test says."""
    stub = types.ModuleType("scalejax.train.loop")
    monkeypatch.setitem(sys.modules, "scalejax.train.loop", stub)
    monkeypatch.setattr(scalejax.train, "loop", stub, raising=False)
    return stub


def test_user_error_of_the_loop_is_one_message(invoke, example, loop, tmp_path, monkeypatch):
    def train(*arguments, **named):
        raise UserError("mesh must multiply to the 8 devices")

    loop.train = train
    monkeypatch.chdir(tmp_path)
    _one_message(invoke("train", example), "mesh must multiply to the 8 devices")
    assert list((tmp_path / "runs").iterdir()) == []  # a run that could not begin leaves no folder


def test_other_exceptions_are_bugs_and_are_raised(invoke, example, loop, tmp_path):
    def train(*arguments, **named):
        raise ValueError("a bug")

    loop.train = train
    with pytest.raises(ValueError, match="a bug"):
        invoke("train", example, "--workdir", str(tmp_path))


def test_a_run_that_was_asked_to_end_says_how_to_go_on(invoke, example, loop, tmp_path):
    def train(*arguments, preemption, **named):
        raise preemption.ended(5)

    loop.train = train
    result = invoke("train", example, "--set", "steps=7", "--workdir", str(tmp_path / "run"))
    assert result.exit_code == 75
    assert "saved after step 5" in result.stderr
    assert f"scalejax train {example} --set=steps=7 --workdir={tmp_path}/run" in result.stderr


def test_a_mistake_in_a_process_of_its_own(scalejax):
    _one_message(scalejax("train", "no-such-recipe"), "Unknown recipe")


@pytest.mark.slow
def test_a_bug_in_a_process_of_its_own_keeps_its_traceback(scalejax, tmp_path):
    (tmp_path / "a_module.py").write_text(HEADER + "def f() -> Experiment: raise KeyError('bug')\n")
    result = scalejax("recipes", "a_module:f")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "KeyError: 'bug'" in result.stderr


def test_missing_packages_of_the_command_line(scalejax, tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    _one_message(scalejax("recipes"), "pip install 'scalejax[train]'")


def test_json_of_a_bad_recipe_prints_no_json(invoke, example):
    _one_message(invoke("recipes", example, "--json", "--set", "step=3"), "Nearest: steps")
    assert json.loads(invoke("recipes", example, "--json").stdout)["experiment"]["fields"]["steps"] == 10


def test_ctrl_c_before_anything_is_trained_is_status_75_at_once(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import time\ndef f() -> 'Experiment':\n    print('waiting', flush=True)\n    time.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    # Programs that a script started with & inherit an ignored SIGINT, and with it this test's: ask for the usual one.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('scalejax', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, "train", "waits.py"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75
    assert stderr == "Asked to end; all that was trained is saved. Go on with: scalejax train waits.py\n"
