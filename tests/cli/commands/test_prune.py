"""`scalejax prune` and `scalejax grow`: what they write and print, that runs begin with it, mistakes."""

import json
import os
import pathlib
import shlex

import numpy as np
import pytest
import small_run
import typer.testing

from scalejax.surgery import units
from scalejax.train.checkpoints import trained

RECIPE = """
import pathlib
import small_run
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import FactorizationMachine
from scalejax.models.recsys.towers import TowersConfig
from scalejax.parallel.towers import Partition
from scalejax.surgery.alternation import alternate
from scalejax.train.experiment import Experiment

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


def test_what_is_written_is_scored_and_begun_with(runs, invoke):
    folder, printed, recipe = runs
    scored = invoke("eval", str(folder / "half"), "--split", "validation", *recipe)
    assert scored.exit_code == 0, scored.stderr
    assert f"{numbers(printed[1], 'validation ne')[1]:.4f}" in scored.stdout
    record = json.loads((folder / "half" / "experiment.json").read_text())
    assert record["sets"] == ["phases=[]", "model.top_hidden=[8]"]
    (command,) = [line for line in printed[1].splitlines() if "scalejax train" in line]
    words = shlex.split(command[command.index("scalejax train") :].removesuffix("train it on"))[1:]
    begun = invoke(*words, "--workdir", str(folder / "begun"))
    assert begun.exit_code == 0, begun.stderr


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prune", "{run}", "{out}"), "takes either --widths FIELD=N,... or --share S"),
        (("prune", "{run}", "{out}", "--share", "0.5", "--widths", "top_hidden=[8]"), "takes either --widths"),
        (("prune", "{run}", "{out}", "--share", "2"), "share must be above 0 and at most 1"),
        (("prune", "{run}", "{out}", "--share", "0.5", "--multiple", "9"), "below the multiple of 9"),
        (("prune", "{run}", "{out}", "--widths", "middle_hidden=[8]"), "no field"),
        (("prune", "{run}", "{out}", "--widths", "dim=8"), "is no matter of hidden units"),
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
        (("prune", "{run}", "{out}", "--step", "6", "--share", "0.5"), "is of a phase whose model is not the one"),
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
