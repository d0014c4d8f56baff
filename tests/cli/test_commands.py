"""Commands hand to the library exactly what the user gave, and print what comes back."""

import json
import sys
import types

import pytest
import small_run

import scalejax.bench
import scalejax.plan.render
import scalejax.train
from scalejax import configs
from scalejax.configs import discovery
from scalejax.errors import UserError
from scalejax.parallel.mesh import MeshShape
from scalejax.plan.arithmetic import estimate


@pytest.fixture
def loop(monkeypatch):
    """A train loop that writes down its arguments, and the record as the run folder has it."""
    stub = types.ModuleType("scalejax.train.loop")
    stub.calls = []

    def train(experiment, **named):
        stub.calls.append((experiment, named))
        return {"steps": experiment.steps, "test_auc": 0.75, "test_logloss": 0.5}

    def evaluate(experiment, **named):
        stub.calls.append((experiment, named))
        return {"test_auc": 0.76, "test_logloss": 0.5}

    stub.train, stub.evaluate = train, evaluate
    monkeypatch.setitem(sys.modules, "scalejax.train.loop", stub)
    monkeypatch.setattr(scalejax.train, "loop", stub, raising=False)
    return stub


def test_train_passes_the_experiment_and_prints_the_summary(invoke, example, loop, tmp_path):
    workdir = tmp_path / "run"
    result = invoke(
        "train", example, "--set", "steps=3", "--set", "seed=9", "--workdir", str(workdir), "--resume", "must"
    )
    ((experiment, named),) = loop.calls
    assert (experiment.steps, experiment.seed) == (3, 9)
    assert (named["workdir"], named["resume"]) == (workdir, "must")
    assert type(named["resume"]) is str
    assert named["record"]["sets"] == ["steps=3", "seed=9"]
    assert named["record"]["experiment"]["fields"]["steps"] == 3
    assert result.exit_code == 0
    for words in ("0.7500", f"Run folder: {workdir}", f"scalejax eval {workdir}", "report.html", "tensorboard"):
        assert words in result.stdout


def test_eval_runs_the_recorded_recipe_again(invoke, example, loop, tmp_path):
    invoke("train", example, "--set", "steps=3", "--workdir", str(tmp_path))
    (tmp_path / "experiment.json").write_text(json.dumps(loop.calls[0][1]["record"]))
    refused = invoke("eval", str(tmp_path))
    assert refused.exit_code == 2
    assert f"--recipe {example}" in refused.stderr
    result = invoke("eval", str(tmp_path), "--recipe", example, "--step", "2", "--mesh", "tensor=2")
    assert "0.7600" in result.stdout
    experiment, named = loop.calls[1]
    assert (experiment.steps, experiment.placement.mesh.fsdp, experiment.placement.mesh.tensor) == (3, 1, 2)
    assert (named["workdir"], named["split"], named["step"]) == (tmp_path, "test", 2)
    assert experiment.data.batch_size == 8
    invoke("eval", str(tmp_path), "--recipe", example, "--batch-size", "24")
    experiment, _ = loop.calls[2]
    assert (experiment.data.batch_size, experiment.placement.mesh.fsdp) == (24, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mesh", "data=2"), "axis must be one of replica, fsdp"),
        (("--mesh", "fsdp=4,fsdp=2"), "got fsdp twice"),
        (("--mesh", "fsdp"), "Give AXIS=SIZE"),
        (("--batch-size", "0"), "--batch-size"),
    ],
)
def test_eval_refuses_a_wrong_mesh_or_batch_size(invoke, example, loop, tmp_path, arguments, words):
    invoke("train", example, "--workdir", str(tmp_path))
    (tmp_path / "experiment.json").write_text(json.dumps(loop.calls.pop()[1]["record"]))
    refused = invoke("eval", str(tmp_path), "--recipe", example, *arguments)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert not loop.calls


@pytest.mark.parametrize(
    "option", ["--split x", "--batch-size 3", "--coordinator host:1", "--processes 5", "--process-id 7"]
)
def test_eval_of_a_text_names_the_option_that_does_not_go_with_it(invoke, tmp_path, option):
    refused = invoke("eval", str(tmp_path), "--text", "text", *option.split())
    assert refused.exit_code == 2
    assert f"{option}: goes with the data of a run" in refused.stderr


def test_every_start_without_workdir_gets_a_folder_of_its_own(invoke, example, loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        invoke("train", f"{example}:second")
    assert [named["workdir"] for _, named in loop.calls] == [
        tmp_path / "runs" / f"example_recipes-second-00{number}" for number in (1, 2)
    ]


def test_recipes_lists_and_shows(invoke, example):
    assert "recipe" in invoke("recipes").stdout
    shown = invoke("recipes", example, "--set", "model.mlp.hidden=5,4").stdout
    settings = {path.strip(): value for path, _, value in (line.partition(" = ") for line in shown.splitlines())}
    assert settings["model.mlp.hidden"] == "5,4"
    assert settings["placement.mesh.fsdp"] == "2"


def test_recipes_as_json_names_them_all(invoke):
    found = json.loads(invoke("recipes", "--json").stdout)
    assert [r["name"] for r in found] == [r.name for r in discovery.listing()]
    by_name = {row["name"]: row for row in found}
    # Values, not the names that the recipe's text has for them.
    tiny, large = by_name["llama-tiny"], by_name["llama-pretrain_8b"]
    assert tiny["model"].startswith("LlamaConfig(layers=")
    assert large["model"].startswith("LlamaConfig(")
    assert "dim=4096" in large["model"]
    assert by_name["wukong-flights"]["steps"] == configs.load("wukong-flights", []).steps


def test_plan_passes_its_arguments_and_writes_json(invoke, example, monkeypatch, tmp_path):
    calls = []

    def plan(experiment, topology, mesh):
        calls.append((experiment.steps, topology, mesh))
        return types.SimpleNamespace(text="it fits", to_json=lambda: {"fits": True})

    monkeypatch.setattr(scalejax.plan, "plan", plan, raising=False)
    monkeypatch.setattr(scalejax.plan.render, "render", lambda result, console: console.print(result.text))
    out = tmp_path / "plan.json"
    result = invoke(
        "plan", example, "--topology", "v5p:2x2x1", "--mesh", "fsdp=4", "--set", "steps=2", "--json", str(out)
    )
    assert calls == [(2, "v5p:2x2x1", "fsdp=4")]
    assert "it fits" in result.stdout
    assert json.loads(out.read_text()) == {"fits": True}
    invoke("plan", example, "--topology", "v5p:2x2x1", "--set", "placement.mesh.tensor=2")
    assert calls[-1][2] == MeshShape(fsdp=2, tensor=2)  # what was said about the mesh is not dropped
    invoke("plan", example, "--topology", "v5p:2x2x1", "--set", "steps=2")
    assert calls[-1][2] is None


def test_memory_is_asked_of_every_phase_before_anything_is_trained(invoke, monkeypatch, tmp_path):
    layers = []

    def check(experiment, mesh):
        layers.append(experiment.model.layers)
        if experiment.model.layers > 2:
            raise UserError("it does not fit")

    monkeypatch.setattr(estimate, "check_fits", check)
    text = """
import dataclasses
from scalejax.configs.llm import llama
from scalejax.train.experiment import Experiment, Phase

def grown() -> Experiment:
    smoke = llama.smoke()
    model = dataclasses.replace(smoke.model, layers=2)
    return dataclasses.replace(smoke, model=model, phases=(Phase(name="deep", steps=1, changes={"model.layers": 4}),))
"""
    (tmp_path / "recipe.py").write_text(text)
    refused = invoke("train", f"{tmp_path / 'recipe.py'}:grown", "--workdir", str(tmp_path / "run"))
    assert refused.exit_code == 2
    assert "it does not fit" in refused.stderr
    assert layers == [2, 4]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_plan_takes_one_phase_and_says_which(invoke, monkeypatch, tmp_path):
    calls = []

    def plan(experiment, topology, mesh):
        calls.append((experiment.trainable, experiment.phases))
        return types.SimpleNamespace(text="", to_json=dict)

    monkeypatch.setattr(scalejax.plan, "plan", plan, raising=False)
    monkeypatch.setattr(scalejax.plan.render, "render", lambda result, console: console.print(result.text))
    recipe = small_run.write_recipe(tmp_path).replace(":small", ":parted")
    first = invoke("plan", recipe, "--topology", "v5p:2x2x1")
    assert "Planned is what precedes the phases fresh, head; --phase NAME plans one of them." in first.stderr
    assert invoke("plan", recipe, "--topology", "v5p:2x2x1", "--phase", "head").stderr == ""
    assert calls == [(".*", ()), ("head/.*", ())]
    refused = invoke("plan", recipe, "--topology", "v5p:2x2x1", "--phase", "tail")
    assert refused.exit_code == 2
    assert "--phase tail" in refused.stderr
    assert "has the phases fresh, head" in refused.stderr


def test_plan_search_reports_progress_beside_its_result(invoke, monkeypatch, tmp_path):
    def search(experiment, topology, *, progress):
        progress(f"compiling for {topology}")
        return types.SimpleNamespace(text="ranked", to_json=lambda: {"ranked": []})

    monkeypatch.setattr(scalejax.plan, "search", search, raising=False)
    monkeypatch.setattr(scalejax.plan.render, "render", lambda result, console: console.print(result.text))
    out = tmp_path / "search.json"
    result = invoke("plan", "llama", "--topology", "v6e:4x4", "--search", "--json", str(out))
    assert "compiling for v6e:4x4" in result.stderr
    assert result.stdout.strip() == "ranked"
    assert json.loads(out.read_text()) == {"ranked": []}


def test_bench_passes_its_arguments(invoke, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(scalejax.bench, "run", lambda name, **named: calls.append((name, named)), raising=False)
    monkeypatch.setattr(scalejax.bench, "names", lambda: ["wukong_step", "data_pipeline"], raising=False)
    invoke("bench", "wukong_step", "--against", "torch", "--case", "b1024", "--case", "b8192", "--data", str(tmp_path))
    ((name, named),) = calls
    assert name == "wukong_step"
    assert (named["against"], named["cases"], named["data"]) == ("torch", ["b1024", "b8192"], tmp_path)
    assert invoke("bench", "--list").stdout == "wukong_step\ndata_pipeline\n"
    assert invoke("bench").exit_code == 2
