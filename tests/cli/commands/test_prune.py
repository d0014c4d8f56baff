"""`scalejax prune` and `scalejax grow`: what they write and print, that runs begin with it, mistakes."""

import dataclasses
import json
import os
import pathlib
import shlex
import shutil

import numpy as np
import pytest
import small_run
import typer.testing

from scalejax import configs
from scalejax.configs import serialization
from scalejax.surgery import units
from scalejax.train import loop, phases
from scalejax.train.checkpoints import trained

RECIPE = """
import pathlib
import small_run
from scalejax import optim
from scalejax.data.splits import Fractions
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import FactorizationMachine, LinearCompression, SelfAttention
from scalejax.models.recsys.towers import TowersConfig
from scalejax.parallel.towers import Partition
from scalejax.surgery.alternation import alternate
from scalejax.train.experiment import Experiment, Phase

def whole() -> Experiment:
    model = DlrmConfig(dim=4, bottom_hidden=(8,), top_hidden=(16,))
    base = small_run.experiment(pathlib.Path(__file__).with_name("rows.parquet"), model=model)
    return alternate(base, ((3, 1.0), (3, 0.5), (2, 1.0)), multiple=4)

def towers() -> Experiment:
    base = DlrmConfig(dim=4, bottom_hidden=(8,), top_hidden=(16,))
    modules = (FactorizationMachine(outputs=2, rank=2, hidden=(6,)),)
    model = TowersConfig(base=base, towers=Partition(towers=(("item",), ("shop", "hour"))), modules=modules)
    rows = pathlib.Path(__file__).with_name("rows.parquet")
    return small_run.experiment(rows, model=model, steps=2, evaluation__every=0)

def days() -> Experiment:
    # In its second phase other rows are scored, by an average.
    rows = pathlib.Path(__file__).with_name("rows.parquet")
    modules = (LinearCompression(outputs=2), SelfAttention(outputs=2))
    model = DhenConfig(dim=4, layers=(EnsembleLayer(modules=modules),), bottom_hidden=(), head_hidden=(6,))
    other = small_run.data(rows, split=Fractions(train=0.3, validation=0.2, by="position"))
    changes = {"data": other, "evaluation.average": "ema", "evaluation.split": "test"}
    return small_run.experiment(
        rows,
        model=model,
        steps=2,
        evaluation__every=0,
        averages=(optim.Average(name="ema", decay=0.5),),
        phases=(Phase(name="days", steps=3, changes=changes),),
    )
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, what was cut of it by share and by widths, and what was grown of that."""
    from scalejax.cli.app import app

    variables = dict(os.environ)
    folder = tmp_path_factory.mktemp("runs")
    run, half, named, back = (str(folder / name) for name in ("run", "half", "named", "back"))
    small_run.write(folder / "rows.parquet")
    (folder / "recipe.py").write_text(RECIPE)
    recipe = f"{folder / 'recipe.py'}:whole"
    commands = (
        ("train", recipe, "--workdir", run),
        ("prune", run, half, "--share", "0.5", "--multiple", "8", "--recipe", recipe),
        ("prune", run, named, "--widths", "top_hidden=[12]", "--recipe", recipe),
        ("grow", half, back, "--recipe", recipe),
    )
    done = [typer.testing.CliRunner().invoke(app, command) for command in commands]
    os.environ.clear()
    os.environ.update(variables)
    for one in done:
        assert one.exit_code == 0, one.output
    return folder, [one.stdout for one in done], ("--recipe", recipe)


def numbers(printed, name):
    """Before and after."""
    (line,) = [line for line in printed.splitlines() if line.startswith(name)]
    words = line.removeprefix(name).replace(",", "").split()
    return float(words[0]), float(words[2])


@pytest.mark.slow
def test_a_run_in_phases_ends_whole_and_is_cut_and_grown(runs):
    folder, printed, _ = runs
    widths = {
        name: [layer.width for layer in units.hidden_layers(trained.open_run(folder / name).params)]
        for name in ("run", "half", "named", "back")
    }
    assert widths == {"run": [8, 16], "half": [8, 8], "named": [8, 12], "back": [8, 16]}
    before, after = numbers(printed[1], "validation ne")
    assert before != after
    flops = numbers(printed[1], "FLOPs an example")
    assert flops[1] < flops[0]
    assert numbers(printed[1], "dense parameters")[0] == sum(
        np.prod(x.shape) for x in trained.open_run(folder / "run").params.values()
    )
    # New units change nothing.
    grown = numbers(printed[3], "validation ne")
    assert grown[0] == pytest.approx(after, abs=1e-6)
    assert grown[1] == pytest.approx(grown[0], rel=1e-6)
    assert "widths                    top_hidden=[16]" in printed[3]


@pytest.mark.slow
def test_what_is_written_is_scored_and_begun_with(runs, invoke):
    folder, printed, recipe = runs
    scored = invoke("eval", str(folder / "half"), "--split", "validation", *recipe)
    assert scored.exit_code == 0, scored.stderr
    assert f"{numbers(printed[1], 'validation ne')[1]:.4f}" in scored.stdout
    record = json.loads((folder / "half" / "experiment.json").read_text())
    assert record["sets"] == ["phase=2-grow", "model.top_hidden=[8]"]
    (command,) = [line for line in printed[1].splitlines() if "scalejax train" in line]
    words = shlex.split(command[command.index("scalejax train") :].removesuffix("train it on"))[1:]
    begun = invoke(*words, "--workdir", str(folder / "begun"))
    assert begun.exit_code == 0, begun.stderr


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """A run of a DHEN in phases, of which the second scores other rows by an average; and (run, recipe option)."""
    from scalejax.cli.app import app

    variables = dict(os.environ)
    folder = tmp_path_factory.mktemp("days")
    small_run.write(folder / "rows.parquet")
    (folder / "recipe.py").write_text(RECIPE)
    recipe = f"{folder / 'recipe.py'}:days"
    done = typer.testing.CliRunner().invoke(app, ("train", recipe, "--workdir", str(folder / "run")))
    os.environ.clear()
    os.environ.update(variables)
    assert done.exit_code == 0, done.output
    return folder / "run", ("--recipe", recipe)


@pytest.mark.slow
def test_both_models_are_scored_as_the_phase_is_that_saved_the_checkpoint(days, invoke, tmp_path):
    run, recipe = days
    half, back = (str(tmp_path / name) for name in ("half", "back"))
    printed = []
    for command in (("prune", str(run), half, "--share", "0.5"), ("grow", half, back)):
        done = invoke(*command, *recipe)
        assert done.exit_code == 0, done.stderr
        printed.append(done.stdout)
    assert "layers.0.modules.1.hidden=8" in printed[0]  # of 4 dim
    before, after = numbers(printed[0], "test ne")
    assert numbers(printed[1], "test ne")[1] == pytest.approx(after, rel=1e-6)
    last = phases.resolved(configs.load(recipe[1]))[-1].experiment
    assert before == pytest.approx(loop.evaluate(last, workdir=run, split="test")["test_ne"], abs=1e-6)
    scored = invoke("eval", half, *recipe)
    assert scored.exit_code == 0, scored.stderr
    assert f"{after:.4f}" in scored.stdout
    record = json.loads((tmp_path / "half" / "experiment.json").read_text())
    assert record["sets"][0] == "phase=days"
    # The average has its units, too.
    opened = trained.open_run(tmp_path / "half")
    assert {path: x.shape for path, x in opened.averages["ema"].items()} == {
        path: x.shape for path, x in opened.params.items()
    }
    whole = trained.open_run(run)
    assert opened.params.keys() == whole.params.keys()
    path = "layers/0/interactions/1/mlp/layers/0/bias"
    kept = [whole.params[path][...].tolist().index(x) for x in opened.params[path][...].tolist()]
    np.testing.assert_array_equal(opened.averages["ema"][path][...], whole.averages["ema"][path][...][kept])


@pytest.mark.slow
def test_nothing_is_left_where_the_cut_model_cannot_be_scored(days, invoke, tmp_path, monkeypatch):
    run, recipe = days
    monkeypatch.setattr(units.ResizeUnits, "operate", without_averages(units.ResizeUnits.operate))
    refused = invoke("prune", str(run), str(tmp_path / "out"), "--share", "0.5", *recipe)
    assert refused.exit_code == 2
    assert "evaluation.average is 'ema', and the averages in" in refused.stderr
    assert not list(tmp_path.iterdir())


def without_averages(operate):
    return lambda surgery, *models: dataclasses.replace(operate(surgery, *models), averages={})


@pytest.mark.slow
def test_a_run_of_a_larger_mesh_is_cut_on_the_devices_at_hand(runs, invoke, tmp_path):
    folder, _, recipe = runs
    sets = ["placement.mesh.replica=8", "placement.mesh.fsdp=2"]
    shutil.copytree(folder / "run", tmp_path / "run")
    record = serialization.record(recipe[1], sets, configs.load(recipe[1], sets))
    (tmp_path / "run" / "experiment.json").write_text(json.dumps(record))
    command = ("prune", str(tmp_path / "run"), str(tmp_path / "half"), "--share", "0.5", "--multiple", "8", *recipe)
    refused = invoke(*command)
    assert refused.exit_code == 2
    assert "to the 8 devices at hand; got replica=8, fsdp=2" in refused.stderr
    assert "--mesh fsdp=-1" in refused.stderr
    done = invoke(*command, "--mesh", "fsdp=-1")
    assert done.exit_code == 0, done.stderr
    assert numbers(done.stdout, "validation ne") == pytest.approx(numbers(runs[1][1], "validation ne"), abs=2e-6)
    record = json.loads((tmp_path / "half" / "experiment.json").read_text())
    assert record["sets"] == [*sets, "phase=2-grow", "model.top_hidden=[8]"]


@pytest.mark.slow
def test_a_checkpoint_of_a_narrow_phase_is_cut(runs, invoke, tmp_path):
    done = invoke(
        *("prune", str(runs[0] / "run"), str(tmp_path / "out"), "--step", "6", "--widths", "top_hidden=[4]", *runs[2])
    )
    assert done.exit_code == 0, done.stderr
    record = json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert record["sets"] == ["phase=1-cut", "model.top_hidden=[4]"]
    scored = invoke("eval", str(tmp_path / "out"), "--split", "validation", *runs[2])
    assert f"{numbers(done.stdout, 'validation ne')[1]:.4f}" in scored.stdout


@pytest.mark.slow
def test_a_model_over_towers_is_cut_over_them(runs, invoke, tmp_path):
    recipe = f"{runs[0] / 'recipe.py'}:towers"
    run, half, back = (str(tmp_path / name) for name in ("run", "half", "back"))
    for command in (
        ("train", recipe, "--workdir", run),
        ("prune", run, half, "--share", "0.5", "--multiple", "4", "--recipe", recipe),
        ("grow", half, back, "--recipe", recipe),
    ):
        done = invoke(*command)
        assert done.exit_code == 0, done.stderr
    assert numbers(done.stdout, "validation ne")[1] == pytest.approx(numbers(done.stdout, "validation ne")[0], rel=1e-6)
    for name, widths in {"run": [8, 16], "half": [4, 8], "back": [8, 16]}.items():
        params = trained.open_run(tmp_path / name).params
        assert [layer.width for layer in units.hidden_layers(params)] == widths
        assert params["modules/0/mlp/layers/0/kernel"].shape == (2, 4, 6)
    refused = invoke("prune", run, str(tmp_path / "out"), "--widths", "modules.0.hidden=[3]", "--recipe", recipe)
    assert refused.exit_code == 2
    assert "units of MLPs whose parameters are stacked, as those of the modules of towers, neither" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prune", "{run}", "{out}"), "takes either --widths FIELD=N,... or --share S"),
        (("prune", "{run}", "{out}", "--share", "0.5", "--widths", "top_hidden=[8]"), "takes either --widths"),
        (("prune", "{run}", "{out}", "--share", "2"), "share must be above 0 and at most 1"),
        (("prune", "{run}", "{out}", "--share", "0.5", "--multiple", "9"), "below the multiple of 9"),
        (("prune", "{run}", "{out}", "--widths", "middle_hidden=[8]"), "no field"),
        (("prune", "{run}", "{out}", "--widths", "foo"), "top_hidden=256,128; got 'foo'."),
        (("prune", "{run}", "{out}", "--widths", "=5"), "top_hidden=256,128; got '=5'."),
        (("prune", "{run}", "{out}", "--widths", "dim=8"), "is no matter of hidden units"),
        (
            ("prune", "{run}", "{out}", "--widths", "top_hidden=0"),
            "a whole number of at least 1; got 0",
        ),
        (
            ("prune", "{run}", "{out}", "--widths", "top_hidden=[-4,3]"),
            "a whole number of at least 1; got -4",
        ),
        (
            ("prune", "{run}", "{out}", "--widths", "top_hidden=[12]", "--multiple", "8"),
            "--multiple 8 rounds the widths of --share, and --widths are taken as they are. Leave --multiple out",
        ),
        (
            ("prune", "{run}", "{out}", "--widths", "top_hidden=[64]"),
            "scalejax prune: top/layers/0 has 16 units and would have 64, which are more. Give other --widths, or take",
        ),
        (
            ("prune", "{run}", "{out}", "--widths", "top_hidden=[8]", "--widths", "bottom_hidden=[9]"),
            "scalejax prune: bottom/layers/0 has 8 units and would have 9",
        ),
        (
            ("grow", "{run}", "{out}", "--widths", "top_hidden=[4]"),
            "scalejax grow: top/layers/0 has 16 units and would have 4, which are fewer. Give other --widths, or take",
        ),
        (
            ("prune", "{run}", "{out}", "--share", "1"),
            "scalejax prune: all hidden layers would stay as wide as they are. Give fewer units by --widths, or a",
        ),
        (
            ("grow", "{run}", "{out}", "--widths", "top_hidden=[16]"),
            "scalejax grow: all hidden layers would stay as wide as they are. Give more units by --widths.",
        ),
        (("prune", "{run}", "{run}", "--share", "0.5"), "{run}"),
        (("grow", "{run}", "{out}"), "was not written by `scalejax prune`"),
    ],
)
def test_mistakes_are_one_line(runs, invoke, tmp_path, arguments, words):
    places = {"run": str(runs[0] / "run"), "out": str(tmp_path / "out")}
    result = invoke(*(word.format(**places) for word in arguments), *runs[2])
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words.format(**places) in line, line
    assert not pathlib.Path(places["out"]).exists()
