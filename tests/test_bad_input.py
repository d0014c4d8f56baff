"""Bad input at the command line: one message (what, where, wanted, next step), status 2, earlier checkpoints usable."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_run
import typer.testing

from scalejax.train.run_folder import RunFolder


def invoke(*arguments):
    """Runs the command line in this process; a bug is raised."""
    from scalejax.cli.app import app

    before = dict(os.environ)
    try:
        result = typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        os.environ.clear()
        os.environ.update(before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def assert_one_message(code, stderr, *words):
    """Status 2 and one line that has all the words."""
    assert code == 2, stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("Error: ")
    assert "Traceback" not in stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe on a small file of its own."""
    return small_run.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run of that recipe with checkpoints of steps 6 and 12."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    result = invoke("train", recipe, "--workdir", folder)
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run to do harm to."""
    return pathlib.Path(shutil.copytree(trained, tmp_path / "run"))


def assert_usable(recipe, run, step):
    """A checkpoint can still be scored."""
    result = invoke("eval", run, "--step", step, "--recipe", recipe)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wukon"], ["'wukon'", "wukong"]),
        (["wukong", "--set", "model.layer=3"], ["model.layer", "Nearest: model.layers"]),
        (["wukong", "--set", "model.layers=two"], ["model.layers", "'two'", "integer"]),
    ],
)
def test_unknown_recipe_or_field(arguments, words):
    result = invoke("train", *arguments)
    assert_one_message(result.exit_code, result.stderr, *words)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    """Flips a byte of the second row group."""
    place = pq.read_metadata(path).row_group(1).column(1)
    content = bytearray(path.read_bytes())
    content[place.data_page_offset + place.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(content)


def change(name, row, value, dtype=None):
    """Replaces one value of a column."""

    def write(path):
        column = small_run.columns()[name]
        column = column.astype(dtype or column.dtype)
        column[row] = value
        small_run.write(path, {name: column})

    return write


def drop(path):
    pq.write_table(pq.read_table(path).drop_columns(["price"]), path)


def as_text(path):
    table = pq.read_table(path)
    shops = pa.array([f"s{shop}" for shop in table["shop"].to_pylist()])
    pq.write_table(table.set_column(0, "shop", shops), path)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(pathlib.Path.unlink, ["no such file", "data.path"], id="missing"),
        pytest.param(lambda path: path.write_bytes(b""), ["empty (0 bytes)", "Copy it again"], id="empty"),
        pytest.param(truncate, ["not a complete Parquet file", "Copy it again"], id="truncated"),
        pytest.param(flip, ["row group 1", "damaged", "Restore the file"], id="corrupt"),
        pytest.param(drop, ["'price'", "there"], id="column missing"),
        pytest.param(as_text, ["'shop'", "string", "wanted integers", "Code strings"], id="column of the wrong type"),
        pytest.param(change("label", 7, 2), ["label 'label' is 2 in row 7", "wanted 0 or 1"], id="label"),
        pytest.param(change("shop", 300, 37), ["'shop'", "37", "[0, 37)"], id="id too large"),
        pytest.param(change("item", 0, -1), ["'item'", "-1", "[0, 1101)"], id="id negative"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path, harm, words):
    recipe = small_run.write_recipe(tmp_path)
    harm(tmp_path / "rows.parquet")
    result = invoke("train", recipe, "--workdir", tmp_path / "run", "--set", "steps=1")
    assert_one_message(result.exit_code, result.stderr, "rows.parquet", *words)


@pytest.mark.slow
def test_missing_numbers_are_the_mean_or_refused_as_stated(tmp_path):
    recipe = small_run.write_recipe(tmp_path)
    change("price", 5, np.nan)(tmp_path / "rows.parquet")
    result = invoke("train", recipe, "--workdir", tmp_path / "run", "--set", "steps=1", "--set", "data.nan=error")
    assert_one_message(result.exit_code, result.stderr, "rows.parquet", "'price'", "row 5", 'nan="mean"')
    assert invoke("train", recipe, "--workdir", tmp_path / "run", "--set", "steps=1").exit_code == 0


@pytest.mark.slow
def test_checkpoint_of_another_model(recipe, run):
    before = (run / "metrics.jsonl").read_bytes()
    result = invoke("train", recipe, "--workdir", run, "--set", "model.layers=3")
    assert_one_message(result.exit_code, result.stderr, str(run), "another model", "another --workdir")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert_usable(recipe, run, 12)


@pytest.mark.slow
def test_checkpoint_of_other_data(recipe, run, tmp_path):
    small_run.write(tmp_path / "other.parquet", {"label": 1 - small_run.columns()["label"]})
    result = invoke("train", recipe, "--workdir", run, "--set", f"data.path={tmp_path / 'other.parquet'}")
    assert_one_message(result.exit_code, result.stderr, str(run), "data is", "another --workdir")
    assert_usable(recipe, run, 12)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_in_the_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [flip_in_the_middle, cut_in_half, pathlib.Path.unlink])
def test_damaged_checkpoint(recipe, run, harm, tmp_path):
    newest = run / "checkpoints" / "12"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    harm(largest)
    result = invoke("train", recipe, "--workdir", run, "--set", "steps=14", "--resume", "must")
    advice = f"move the folder {newest} away and run the same command again"
    assert_one_message(result.exit_code, result.stderr, largest.name, "before it is step 6", advice)
    assert_usable(recipe, run, 6)
    newest.rename(tmp_path / "away")
    assert invoke("train", recipe, "--workdir", run).exit_code == 0
    assert_usable(recipe, run, 12)


@pytest.mark.slow
def test_checkpoint_that_a_kill_left_half_written_is_passed_over(recipe, run):
    checkpoints = run / "checkpoints"
    (checkpoints / "12").rename(checkpoints / "saving-12")
    shutil.rmtree(checkpoints / "saving-12" / "arrays")
    assert invoke("train", recipe, "--workdir", run).exit_code == 0
    assert sorted(path.name for path in checkpoints.iterdir()) == ["12", "6"]
    assert_usable(recipe, run, 12)


@pytest.mark.slow
def test_fewer_steps_than_were_trained(recipe, run):
    before = (run / "metrics.jsonl").read_bytes()
    result = invoke("train", recipe, "--workdir", run, "--set", "steps=6")
    assert_one_message(result.exit_code, result.stderr, "steps=6", str(run), "12 steps", "another --workdir")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert_usable(recipe, run, 12)


@pytest.mark.slow
def test_what_is_not_finite_is_not_saved_however_seldom_the_log_is_written(recipe, run):
    diverging = [
        "steps=40",
        "log_every=40",
        "evaluation.every=0",
        "checkpoints.every=2",
        "tables.optimizer.learning_rate=1e38",
    ]
    settings = [word for one in diverging for word in ("--set", one)]
    result = invoke("train", recipe, "--workdir", run, *settings)
    assert_one_message(result.exit_code, result.stderr, "not finite in the steps up to 14", "Lower the learning rates")
    assert_usable(recipe, run, 12)


def hot_rows(folder):
    """The recipe on ids that all live on one of 8 devices."""
    recipe = small_run.write_recipe(folder)
    hot = {"shop": 0, "hour": 7, "item": 6}  # row r of the t-th table of a stack lives on device r + t
    small_run.write(folder / "rows.parquet", {n: np.full(small_run.ROWS, i, np.int32) for n, i in hot.items()})
    return recipe


@pytest.mark.slow
def test_ids_that_an_exchange_has_no_room_for(tmp_path):
    arguments = [
        "train",
        hot_rows(tmp_path),
        "--workdir",
        tmp_path / "run",
        "--set",
        "tables.exchange.roomy_below_bytes=0",
    ]
    result = invoke(*arguments)
    words = ["ids for one other device", "room for", "capacity_factor 2", "--set tables.exchange.capacity_factor="]
    assert_one_message(result.exit_code, result.stderr, *words)
    assert not (tmp_path / "run" / "checkpoints").exists() or not os.listdir(tmp_path / "run" / "checkpoints")


@pytest.mark.slow
def test_overflow_ids_are_a_metric_where_that_is_chosen(tmp_path):
    settings = ["tables.exchange.roomy_below_bytes=0", "tables.exchange.overflow=count"]
    arguments = [word for one in settings for word in ("--set", one)]
    result = invoke("train", hot_rows(tmp_path), "--workdir", tmp_path / "run", *arguments)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    overflowed = {(line["kind"], line["split"], line["step"]): line["overflow_ids"] for line in lines}
    # 8 devices send 8 examples x 3 ids to one that has room for 8 + 3 x 2 of each: 10 are left on each, every batch.
    windows = {("window", "train", step): 80 * step for step in (4, 8, 12)}
    scored = {("evaluation", split, step): 80 for split, step in (("validation", 6), ("validation", 12), ("test", 12))}
    assert overflowed == windows | scored
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_overflow_ids"] == 80
    assert "ids without room" in result.stdout


PLANNED = """
import dataclasses
import pathlib
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.train.experiment import Experiment
import small_run

def planned() -> Experiment:
    plan = ShardingPlan(tables=(TablePlan(table="item", kind="table_wise", ranks=(11,)),))
    return small_run.experiment(pathlib.Path(__file__).with_name("rows.parquet"), tables__sharding=plan)
"""


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_plan_for_another_mesh(tmp_path, command):
    small_run.write(tmp_path / "rows.parquet")
    (tmp_path / "planned.py").write_text(PLANNED)
    target = ["--workdir", tmp_path / "run"] if command == "train" else ["--topology", "v5e:2x4"]
    result = invoke(command, f"{tmp_path / 'planned.py'}:planned", *target)
    words = ["table 'item'", "ranks (11,)", "0 to 7", "made for another mesh", "leave ranks out"]
    assert_one_message(result.exit_code, result.stderr, *words)


@pytest.mark.parametrize(
    ("fraction", "field"),
    [("validation=0", "evaluation.split"), ("validation=0.2", "evaluation.final_split")],
    ids=["eval", "final"],
)
def test_split_without_examples(recipe, tmp_path, fraction, field):
    result = invoke("train", recipe, "--workdir", tmp_path / "run", "--set", f"data.split.{fraction}")
    assert_one_message(result.exit_code, result.stderr, field, "no examples", "data.split")


@pytest.mark.slow
def test_two_runs_in_one_folder(recipe, run):
    with RunFolder(run):
        result = invoke("train", recipe, "--workdir", run)
    assert_one_message(result.exit_code, result.stderr, str(run), f"process {os.getpid()}", "another --workdir")
    assert_usable(recipe, run, 12)


FULL_DISK = """
import os, pathlib, sys
import test_bad_input as t
recipe, run = sys.argv[1], pathlib.Path(sys.argv[2])
first = t.invoke("train", recipe, "--workdir", run, "--set", "steps=6")
assert first.exit_code == 0, first.stderr
filler = run.parent / "filler"
with open(filler, "wb", buffering=0) as file:
    size = os.statvfs(run).f_bavail * os.statvfs(run).f_frsize - 40_000
    file.write(bytes(size))
second = t.invoke("train", recipe, "--workdir", run)
filler.unlink()
t.assert_one_message(second.exit_code, second.stderr, "the disk is full", "earlier checkpoints are intact", "--workdir")
assert os.listdir(run / "checkpoints") == ["6"]
third = t.invoke("train", recipe, "--workdir", run, "--resume", "must")
assert third.exit_code == 0, third.stderr
t.assert_usable(recipe, run, 12)
"""

READ_ONLY = """
import pathlib, sys
import test_bad_input as t
for folder in (pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[2]).parent):
    result = t.invoke("train", sys.argv[1], "--workdir", folder)
    t.assert_one_message(result.exit_code, result.stderr, str(folder), "read-only", "Choose a --workdir that can be")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "then"),
    [
        pytest.param(FULL_DISK, "true", id="full"),
        pytest.param(READ_ONLY, "mount -o remount,ro", id="read-only"),
    ],
)
def test_disk_that_refuses(recipe, tmp_path, script, then):
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    isolate = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=8m none {tmp_path}"
    if subprocess.run([*isolate, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this system does not let tests mount a file system of their own")
    shell = [*isolate, "sh", "-c", f'{mount} && {then} {tmp_path} && exec "$@"', "sh"]
    tests = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)]),
        "JAX_NUM_CPU_DEVICES": "1",
        # Where one write of an array fails, jax may leave the others unstarted, and Python says so when it ends.
        "PYTHONWARNINGS": "ignore:coroutine:RuntimeWarning",
    }
    command = [*shell, sys.executable, "-c", script, recipe, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
