"""A table of the user's own on the command line: one command trains, and the run is a run like any other."""

import ast
import dataclasses
import json
import shlex
import shutil

import numpy as np
import polars as pl
import pytest
import typer.testing

from scalejax import configs
from scalejax.cli.commands import train
from scalejax.configs import own_table
from scalejax.data import TableData
from scalejax.errors import UserError
from scalejax.train import loop
from scalejax.train.experiment import Checkpoints, Evaluation

ROWS = 4000
ARGUMENTS = ("--label", "late", "--weight", "count", "--leave-out", "secret", "--set", "log_every=19")


def table():
    """Whether it is late depends on a colour and a number together, and on neither alone."""
    random = np.random.RandomState(0)
    colour, number = random.choice(["red", "green", "blue", "grey"], ROWS), random.normal(size=ROWS).round(3)
    late = (np.isin(colour, ["red", "green"]) == (number > 0)) ^ (random.rand(ROWS) < 0.1)
    return pl.DataFrame(
        {
            "id": np.arange(ROWS),
            "colour": [None if i % 50 == 0 else str(c) for i, c in enumerate(colour)],
            "number": number,
            "secret": late.astype(int),
            "count": random.randint(1, 3, ROWS),
            "late": np.where(late, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(file, run folder, what was printed); do not write to them."""
    from scalejax.cli.app import app

    folder = tmp_path_factory.mktemp("own")
    path, run = folder / "own.csv", folder / "run"
    table().write_csv(path)
    arguments = ["train", "dcnv2", "--data", str(path), *ARGUMENTS, "--workdir", str(run)]
    result = typer.testing.CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return path, run, result.stdout


def summary(run):
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_one_command_learns_what_is_in_the_table(trained):
    path, run, printed = trained
    assert summary(run)["test_auc"] > 0.8  # without the 10 % that are turned around it could be 0.9
    assert f"{path}: predicts late = yes (not no); 3,040 train, 160 validation, 800 test" in " ".join(printed.split())
    for column, kind, why in [
        ("id", "-", "left out: like an id"),
        ("colour", "text", "4 different texts, 2 % missing"),
    ]:
        (line,) = [line for line in printed.splitlines() if line.split()[:1] == [column]]
        assert line.split()[1] == kind
        assert why in line
    assert f"scalejax train {run / own_table.FILE}" in printed


@pytest.mark.slow
def test_the_plan_that_is_printed_names_the_recipe_of_the_run(trained):
    _, run, printed = trained
    (plan,) = [line.strip().rpartition("  ")[0] for line in printed.splitlines() if "scalejax plan" in line]
    assert shlex.split(plan) == [
        *("scalejax", "plan", str(run / own_table.FILE), "--topology", "v5e:2x2"),
        "--set=log_every=19",
    ]


@pytest.mark.slow
@pytest.mark.aot
def test_the_plan_of_a_table_compiles(trained, invoke):
    planned = invoke("plan", str(trained[1] / own_table.FILE), "--topology", "v5e:2x2")
    assert planned.exit_code == 0, planned.stderr


@pytest.mark.slow
def test_the_run_is_scored_and_goes_on_from_what_it_recorded(trained, tmp_path, invoke):
    path, run, _ = trained
    run = shutil.copytree(run, tmp_path / "run")
    scored = invoke("eval", str(run))
    assert scored.exit_code == 0, scored.stderr
    assert f"{summary(run)['test_auc']:.4f}" in scored.stdout
    before = (run / "metrics.jsonl").read_bytes()
    again = invoke("train", "dcnv2", "--data", str(path), *ARGUMENTS, "--workdir", str(run), "--resume", "must")
    assert again.exit_code == 0, again.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_the_recipe_is_written_however_the_run_is_told(tmp_path, invoke):
    run, path = tmp_path / "run", tmp_path / "own.parquet"
    table().write_parquet(path)
    steps = ("--set", "steps=2", "--set", "evaluation.every=1", "--set", "checkpoints.every=2")
    told = invoke("train", "logistic", "--data", str(path), *ARGUMENTS, *steps, "--log", "json", "--workdir", str(run))
    assert told.exit_code == 0, told.output
    assert all(json.loads(line) for line in told.stdout.splitlines())
    assert f"{path}: pages have no checksums, so damage may be read as other values" in told.stderr
    assert configs.load(str(run / own_table.FILE)).data.label == "late"


@pytest.mark.slow
def test_a_best_step_is_offered_if_it_has_a_checkpoint(trained, capsys):
    _, run, _ = trained
    saved = min(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    experiment = configs.load("dcnv2-table", json.loads((run / "experiment.json").read_text())["sets"])
    for best, offered in ((saved, True), (saved - 1, False)):
        train._print_next(run, "dcnv2-table", [], None, experiment, {"steps": 10**6, "best_step": best})
        assert (f"--step {best}" in capsys.readouterr().out) == offered


@pytest.mark.slow
def test_a_file_that_changed_is_refused(trained, tmp_path, invoke):
    path, run, _ = trained
    kept = path.read_bytes()
    try:
        path.write_bytes(kept.replace(b"red", b"pink"))
        result = invoke("eval", str(run))
    finally:
        path.write_bytes(kept)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {path}: is not the file it was (SHA-256 ")


@pytest.mark.slow
def test_the_recipe_of_the_run_gives_the_same_examples_and_steps(trained):
    _, run, _ = trained
    experiment = configs.load(str(run / own_table.FILE))
    recorded = json.loads((run / "experiment.json").read_text())["experiment"]["fields"]
    assert experiment.steps == recorded["steps"]
    assert experiment.data.batch_size == 64
    assert [column.name for column in experiment.data.columns] == ["colour", "number"]
    original = configs.load("dcnv2-table", json.loads((run / "experiment.json").read_text())["sets"])
    assert experiment.data.build().fingerprint() == original.data.build().fingerprint()
    assert experiment.evaluation == original.evaluation


def test_names_in_a_table_are_never_code():
    names = ['"""\nimport os\nos.abort()\n"""', "'), print(1)  # ", "# x\ny", "\r\x0c\u2028z"]
    frame = pl.DataFrame({name: np.random.RandomState(i).rand(600) for i, name in enumerate(names)})
    frame = frame.with_columns(pl.Series('label """', [f'{i % 2}"""\n' for i in range(600)]))
    fields = {
        "path": TableData.from_frame(frame, label='label """').path,
        "label": 'label """',
        "leave_out": (names[1],),
    }
    text = own_table.resolve("dcnv2", fields, []).text
    tree = ast.parse(text)
    assert [type(node).__name__ for node in tree.body] == ["Expr", "Import", *["ImportFrom"] * 3, "FunctionDef"]
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls == {"dataclasses.replace", "dcnv2.table", "TableData", "TableColumn"}
    named = [
        ast.literal_eval(node.keywords[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TableColumn"
    ]
    assert named == [name for name in names if name != names[1]]


@pytest.mark.parametrize("model", ["dcnv2", "wukong", "dlrm", "logistic"])
def test_each_model_has_a_recipe_for_tables(model):
    path = TableData.from_frame(table(), label="late").path
    own = own_table.resolve(model, {"path": path, "label": "late"}, ["data.batch_size=100"])
    experiment = configs.load(own.recipe, own.sets)
    assert experiment.steps == 4 * 30  # four passes over 3,040 examples
    assert (experiment.evaluation.every, experiment.checkpoints.every) == (30, 30)
    experiment.model.task(experiment.data.schema()).tables()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dcnv2", "--data", "{file}"], "--data {file}: --label COLUMN has to say which column"),
        (["dcnv2", "--label", "late"], "--label late: goes with --data FILE. Add it."),
        (["gcn", "--data", "{file}", "--label", "late"], "--data: recipe 'gcn' has a kind of data of its own"),
        (["dcnv2", "--data", "{file}", "--label", "lade"], "{file}: there is no column 'lade'. Did you mean 'late'"),
        (["dcnv2", "--data", "{file}", "--label", "late", "--positive", "1"], "{file}: label 'late' has the values"),
        (["dcnv2", "--data", "no.csv", "--label", "late"], "no.csv: there is no such file"),
    ],
)
def test_mistakes_are_one_message_and_status_2(trained, invoke, arguments, message):
    path = trained[0]
    result = invoke("train", *(argument.format(file=path) for argument in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: " + message.format(file=path)), result.stderr


@pytest.mark.slow
def test_weights_of_lists_are_learned_from(tmp_path):
    random = np.random.RandomState(1)
    weights = random.rand(ROWS, 2).round(3)
    # Every list has the same values: what tells them apart is their weights.
    lists = [[{"value": "a", "weight": a}, {"value": "b", "weight": b}] for a, b in weights.tolist()]
    frame = pl.DataFrame({"tags": lists, "label": (weights[:, 0] > weights[:, 1]).astype(int)})
    data = TableData.from_frame(frame, label="label")
    experiment = dataclasses.replace(configs.load("logistic-table"), data=data, steps=60)
    experiment = dataclasses.replace(experiment, evaluation=Evaluation(), checkpoints=Checkpoints(every=0))
    assert loop.train(experiment, workdir=tmp_path)["test_auc"] > 0.95


def test_a_frame_of_another_process_is_asked_for():
    data = TableData.from_frame(table(), label="late")
    with pytest.raises(UserError, match=r"TableData.from_frame again, of the same content"):
        TableData(path=data.path[:-1] + "?", label="late").build()


@pytest.mark.slow
def test_a_run_on_another_table_is_no_beginning_as_its_ids_are_counted_anew(tmp_path, invoke):
    random = np.random.RandomState(0)
    for name, cities in (("day1", ["Athens", "Berlin"]), ("day2", ["Berlin", "Essen"])):
        city, x = random.choice(cities, 600), random.normal(size=600).round(3)
        pl.DataFrame({"city": city, "x": x, "y": random.randint(0, 2, 600)}).write_csv(tmp_path / f"{name}.csv")
    sets = ("--set", "steps=1", "--set", "evaluation.patience=none", "--set", "evaluation.every=0")

    def on(day, run, *more):
        arguments = ("--data", str(tmp_path / f"{day}.csv"), "--label", "y", "--workdir", str(tmp_path / run))
        return invoke("train", "logistic", *arguments, *sets, *more)

    assert on("day1", "first").exit_code == 0
    begun = ("--set", f"init={tmp_path / 'first'}")
    refused = on("day2", "second", *begun)
    assert refused.exit_code == 2
    assert "those of city, x are counted anew in each table" in refused.stderr
    assert "Leave init out and train on all rows in one table" in refused.stderr
    assert on("day1", "third", *begun).exit_code == 0
