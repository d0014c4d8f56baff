"""A recipe from the command line to a run folder, and mistakes that only the loop can see."""

import json
import shlex

import pytest
import small_run

from scalejax.errors import UserError
from scalejax.train import loop


@pytest.mark.slow
def test_train_then_eval_give_the_same_scores(invoke, tmp_path):
    recipe, workdir = small_run.write_recipe(tmp_path), tmp_path / "run"
    trained = invoke("train", recipe, "--set", "steps=4", "--workdir", str(workdir))
    assert trained.exit_code == 0, trained.stderr
    # What it says to do next can be done: a file of a user's has to be named again.
    (command,) = (line for line in trained.stdout.splitlines() if line.startswith("  scalejax eval"))
    assert invoke(*shlex.split(command.partition("  score")[0])[1:]).exit_code == 0
    record = json.loads((workdir / "experiment.json").read_text())
    assert (record["recipe"], record["sets"]) == (recipe, ["steps=4"])
    summary = json.loads((workdir / "summary.json").read_text())
    evaluated = invoke("eval", str(workdir), "--recipe", recipe)
    assert evaluated.exit_code == 0, evaluated.stderr
    assert f"{summary['test_auc']:.4f}" in evaluated.stdout
    elsewhere = ("eval", str(workdir), "--recipe", recipe, "--mesh", "fsdp=4,tensor=2")
    refused = invoke(*elsewhere, "--batch-size", "12")
    assert refused.exit_code == 2
    assert "--batch-size N" in refused.stderr
    resized = invoke(*elsewhere, "--batch-size", "16")
    assert resized.exit_code == 0, resized.stderr
    assert f"{summary['test_auc']:.4f}" in resized.stdout


@pytest.mark.slow
def test_a_run_in_a_pipe_says_how_far_it_is_and_as_json_nothing_else(invoke, tmp_path, capfd):
    recipe = small_run.write_recipe(tmp_path)
    trained = invoke("train", recipe, "--set", "steps=4", "--set", "log_every=2", "--workdir", str(tmp_path / "a"))
    lines = trained.stdout.splitlines()
    windows = [line for line in lines if line.startswith("train step")]
    assert [line.split("  ")[0] for line in windows] == ["train step 2/4", "train step 4/4"]
    assert all("loss " in line and "examples/s" in line for line in windows)
    said = [line.split(" in ")[0] for line in lines if line.startswith("compiled")]
    assert said == ["compiled the state", "compiled the step"]
    assert sum(line.startswith("validation at step 4") for line in lines) == 1
    capfd.readouterr()
    trained = invoke("train", recipe, "--set", "steps=4", "--workdir", str(tmp_path / "b"), "--log", "json")
    assert trained.exit_code == 0, trained.stderr
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert trained.stdout == ""
    (window,) = (event for event in events if event["event"] == "window")
    assert window["step"] == 4
    assert {"loss", "examples_per_s", "eta_s"} <= window.keys()
    assert events[-1]["event"] == "done"
    assert events[-1]["run_folder"] == str(tmp_path / "b")


@pytest.mark.slow
def test_what_eval_is_told_holds_for_a_run_of_phases_too(invoke, tmp_path):
    recipe, workdir = small_run.write_recipe(tmp_path).replace(":small", ":parted"), tmp_path / "run"
    trained = invoke("train", recipe, "--workdir", str(workdir))
    assert trained.exit_code == 0, trained.stderr
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["examples"] == 6 * 64 + 6 * 32
    here = ("eval", str(workdir), "--recipe", recipe)
    for more in ((), ("--batch-size", "16", "--mesh", "fsdp=4,tensor=2")):
        evaluated = invoke(*here, *more)
        assert evaluated.exit_code == 0, evaluated.stderr
        assert f"{summary['test_auc']:.4f}" in evaluated.stdout
    assert "axes" in invoke(*here, "--batch-size", "12", "--mesh", "fsdp=8").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "placement.mesh.fsdp=3"], "axis sizes must multiply to the 8 devices at hand; got fsdp=3"),
        (["--set", "data.batch_size=12"], "12"),
        (["--set", "data.path=nowhere.parquet"], "nowhere.parquet"),
        (["--resume", "must"], "--resume must"),
        (["--processes", "2"], "--coordinator, --process-id missing"),
    ],
)
def test_mistakes_that_the_loop_sees(invoke, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = invoke("train", "wukong-smoke", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_command_to_go_on_with_says_what_was_said(invoke, tmp_path, monkeypatch):
    def ends(experiment, *, preemption, **_):
        raise UserError(preemption.again)

    monkeypatch.setattr(loop, "train", ends)
    said = ["--set=steps=4", "--log=json", "--grace=7.0", "--peer-timeout=9.0", f"--workdir={tmp_path / 'run'}"]
    result = invoke("train", "wukong-smoke", *said)
    assert shlex.split(result.stderr.strip()) == ["Error:", "scalejax", "train", "wukong-smoke", *said]
    monkeypatch.chdir(tmp_path)
    again = invoke("train", "wukong-smoke").stderr.strip()
    assert again == f"Error: scalejax train wukong-smoke --workdir={tmp_path / 'runs' / 'wukong-smoke-001'}"


@pytest.mark.slow
def test_a_workdir_that_cannot_be_made(invoke, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("train", "wukong-smoke", "--workdir", str(tmp_path / "file" / "run"))
    assert result.exit_code == 2
    assert str(tmp_path / "file" / "run") in result.stderr
