"""`scalejax towers`: from a run of a flat model to one over the towers that were found; mistakes."""

import json

import numpy as np
import pytest
import small_run

RECIPE = """
import pathlib
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.towers import DlrmTower, TowersConfig
from scalejax.models.recsys.wukong import NarrowGroup, WukongConfig
from scalejax.parallel.towers import Partition
from scalejax.train.experiment import Experiment
import small_run

DATA = pathlib.Path(__file__).with_name("rows.parquet")
BASE = DlrmConfig(dim=8, bottom_hidden=(8,), top_hidden=(8,))
TOWERS = Partition(towers=(("shop", "hour", "item"),))

def flat() -> Experiment:
    return small_run.experiment(DATA, model=BASE, steps=6)

def towered() -> Experiment:
    model = TowersConfig(base=BASE, towers=TOWERS, modules=(DlrmTower(dim=4),))
    return small_run.experiment(DATA, model=model, steps=6)

def hosted() -> Experiment:
    towers = Partition(towers=(("item",), ("shop", "hour")))
    model = TowersConfig(base=BASE, towers=towers, modules=(DlrmTower(dim=4),))
    return small_run.experiment(DATA, model=model, steps=6)

def narrow() -> Experiment:
    model = WukongConfig(dim=8, narrow=(NarrowGroup(features=("hour",), dim=4),), head_hidden=(8,), bottom_hidden=(8,))
    return small_run.experiment(DATA, model=model, steps=6)
"""


def train(invoke, folder, recipe, *sets):
    done = invoke("train", f"{folder / 'recipe.py'}:{recipe}", "--workdir", str(folder / recipe), *sets)
    assert done.exit_code == 0, done.stderr
    return str(folder / recipe), "--recipe", f"{folder / 'recipe.py'}:{recipe}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    small_run.write(folder / "rows.parquet")
    (folder / "recipe.py").write_text(RECIPE)
    return folder


def one_error(result, words):
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line, line


@pytest.mark.slow
def test_towers_of_a_run_are_what_a_model_over_towers_takes(invoke, folder, tmp_path):
    run = train(invoke, folder, "flat")
    saved, report = tmp_path / "towers.json", tmp_path / "report.json"
    done = invoke("towers", *run, "--towers", "2", "--save", str(saved), "--json", str(report))
    assert done.exit_code == 0, done.stderr
    for words in ("tower 1: ", "33.3% of the cost (64 B an example)", "objective (spread on the plane): towers "):
        assert words in done.stdout, done.stdout
    towers = json.loads(saved.read_text())["towers"]
    assert sorted(map(len, towers)) == [1, 2]
    found = json.loads(report.read_text())
    assert found["towers"] == towers
    assert sum(found["shares"]) == pytest.approx(1)
    assert found["objectives"]["towers"] <= min(found["objectives"].values())
    assert saved.with_suffix(".svg").read_text().startswith("<svg")

    # The interactions are those of the rows of the checkpoint that the examples of the validation split look up.
    from scalejax.plan import towers as partitioning
    from scalejax.train.checkpoints import trained

    tables = trained.open_run(folder / "flat").tables
    data = small_run.data(folder / "rows.parquet").build()
    rows = []
    for batch in data.eval_batches("validation"):
        ids = [batch.features[f.name].values for f in small_run.FEATURES]
        each = [tables[f.name][...][own] for f, own in zip(small_run.FEATURES, ids, strict=True)]
        rows.append(np.stack(each, axis=1)[batch.weights > 0])
    np.testing.assert_allclose(found["interactions"], partitioning.interactions(rows), rtol=1e-5, atol=1e-7)

    towered = train(invoke, folder, "towered", "--set", f"model.towers={saved}")
    saved.unlink()
    done = invoke("eval", *towered)  # its towers are in the record
    assert done.exit_code == 0, done.stderr
    for arguments, words in {
        ("--towers", "4"): "--towers 4: the run has 3 features with tables",
        ("--towers", "2", "--save", "towers"): "--save towers: must end in .json",
        ("--towers", "2", "--save", "nowhere/towers.json"): "--save nowhere/towers.json: cannot be written",
        ("--towers", "2", "--first", "shop,x"): "--first: every group must name features of the run, each once; got x",
    }.items():
        one_error(invoke("towers", *run, *arguments), words)


@pytest.mark.slow
def test_tables_of_several_widths_are_refused(invoke, folder):
    run = train(invoke, folder, "narrow")
    one_error(invoke("towers", *run, "--towers", "2"), "only rows of one width can be compared; its tables have ")


def test_a_folder_that_is_no_run_is_refused(invoke):
    one_error(invoke("towers", "nowhere", "--towers", "2"), "RUN_FOLDER nowhere does not exist")


@pytest.mark.slow
def test_a_run_of_towers_on_two_hosts_is_scored_anywhere_and_exported(invoke, folder, tmp_path):
    on_hosts = ("--set", "tables.exchange.route=towers", "--set", "placement.mesh.replica=2")
    run = train(invoke, folder, "hosted", *on_hosts)
    done = invoke("export", run[0], str(tmp_path / "out"), *run[1:], "--json", str(tmp_path / "export.json"))
    assert done.exit_code == 0, done.stderr
    exported = json.loads((tmp_path / "export.json").read_text())
    assert exported["scored"] == {"split": "validation", "examples": 64, "of": 64}
    for mesh in ("replica=2,fsdp=4", "fsdp=8"):
        done = invoke("eval", *run, "--mesh", mesh, "--split", "validation")
        assert done.exit_code == 0, done.stderr
        assert f"  {exported['quality']['auc_float32']:.4f}  " in done.stdout, done.stdout
    one_error(invoke("eval", *run, "--mesh", "replica=4,fsdp=2"), "got 2 towers and replica=4. Take replica=1 or 2 ")
