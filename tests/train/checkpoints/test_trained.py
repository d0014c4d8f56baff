"""Opened runs: the arrays that the trainer saved, each read when it is wanted, and written anew to the same bits."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_language_run
import small_run
import tensorstore

import scalejax
from scalejax import configs
from scalejax.configs import serialization
from scalejax.data.examples.schema import Categorical
from scalejax.errors import UserError
from scalejax.inference import run_model
from scalejax.inference.recommendation import click_model
from scalejax.models.llm import model_folder
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.checkpoints import array_store, publish, rows_file
from scalejax.train.checkpoints.array_store import LazyArray
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.checkpoints.trained import Trained, matched, open_run, write_run
from scalejax.train.experiment import Checkpoints
from scalejax.train.runs.run import Run

MAP = IdMapConfig(rows=1 + 64 * 2, ways=2, policy="lru", admit_after=2)
DELTAS = {"checkpoints": Checkpoints(every=2, keep_last=20, keep_best=0), "tables__full_every": 8}
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def click_experiment(rows, **changes):
    """Items by hashes of any 64 bits; steps 4 and 6 hold only the rows that changed, 2 begins the chain."""
    features = (*small_run.FEATURES[:2], Categorical(name="item", rows=None), Categorical(name="many", rows=1101))
    more = {"tables__id_maps": (MappedFeatures(features=("item",), id_map=MAP),), "steps": 6, **DELTAS, **changes}
    data = small_run.data(rows, categorical=features)
    return small_run.experiment(rows, data=data, **{"evaluation__every": 0, "log_every": 2, **more})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    columns = small_run.columns()
    item = (columns["item"] % 40 + 40 * columns["day"]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet", {"item": item, "many": columns["item"]})


@pytest.fixture(scope="module")
def click(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("click") / "run"
    loop.train(click_experiment(rows), workdir=folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A run without id maps, which click models are loaded from."""
    folder = tmp_path_factory.mktemp("served")
    experiment = small_run.experiment(small_run.write(folder / "rows.parquet"), steps=4, **DELTAS)
    loop.train(experiment, workdir=folder / "run")
    return folder / "run", experiment


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    texts = small_language_run.write(tmp_path_factory.mktemp("texts") / "documents")
    experiment = small_language_run.experiment(texts)
    folder = tmp_path_factory.mktemp("language") / "run"
    loop.train(experiment, workdir=folder)
    return folder, experiment


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "run"
    loop.train(configs.load("gcn-smoke", ["steps=2"]), workdir=folder)
    return folder


def by_orbax(folder, prefix="params."):
    """Path -> array of a full checkpoint, read by orbax alone."""
    path = (folder / "arrays").absolute()
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(path).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        found = reader.restore(path, ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {name.removeprefix(prefix): array for name, array in found.items() if name.startswith(prefix)}


def contents(model):
    """All arrays of a model, by what they are and their path."""
    found = {("params", path): array for path, array in model.params.items()}
    found |= {("variables", path): array for path, array in model.variables.items()}
    found |= {("averages", name, path): a for name, average in model.averages.items() for path, a in average.items()}
    found |= {("tables", name): array for name, array in model.tables.items()}
    return found | {("maps", name, leaf): a for name, leaves in model.maps.items() for leaf, a in leaves.items()}


def assert_same_bits(left, right):
    """Arrays that may be on disk."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (tuple(array.shape), array.dtype) == (tuple(right[name].shape), right[name].dtype), name
        one, other = np.asarray(array[...]), np.asarray(right[name][...])
        assert (one.shape, one.dtype) == (tuple(array.shape), array.dtype), name
        assert one.tobytes() == other.tobytes(), name


@pytest.mark.slow
def test_a_click_model_is_what_the_trainer_restores(click, rows):
    model = open_run(click)
    assert model.step == 6
    assert model.record == json.loads((click / "experiment.json").read_text())
    tree, _ = small_run.restored(click_experiment(rows), click, 6)
    maps = tree["tables"].pop("(id maps)")
    assert_same_bits(model.params, tree["params"])
    expected = {}
    for name in ("shop", "hour", "item", "many"):
        leaves = tree["tables"][name]
        parts = [leaves[part] for part in ("rows_body", "rows_tail") if part in leaves]
        expected[name] = np.concatenate(parts)
    assert_same_bits(model.tables, expected)
    assert model.tables["many"].shape == (1101, 8)
    assert_same_bits(model.maps["item"], {name: a for name, a in maps["item"].items() if name != "counts"})
    assert model.variables == {}
    assert model.averages == {}
    # The rows of step 2 alone are others.
    assert (open_run(click, step=2).tables["many"][...] != expected["many"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("run", ["language", "graph"])
def test_a_model_without_tables_is_what_orbax_reads(run, request):
    folder = request.getfixturevalue(run)
    folder = folder[0] if isinstance(folder, tuple) else folder
    model = open_run(folder)
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert (str(model.step), model.checkpoints) == (newest.name, (newest,))
    assert_same_bits(model.params, by_orbax(newest))
    assert (model.tables, model.maps) == ({}, {})


INDICES = [
    *(np.s_[...], np.s_[3], np.s_[-1], np.s_[2:5], np.s_[-7:], np.s_[5:2], np.s_[0:0], np.s_[1020:1030]),
    *(np.s_[1030:1101], np.s_[::3], np.s_[:, 2], np.s_[1000:1100, 2:4], np.s_[..., -1], np.s_[4, 1:], np.s_[4, ...]),
    *(np.s_[1023:1025, ..., 0], np.s_[90:2000]),
]


@pytest.mark.slow
@pytest.mark.parametrize("index", INDICES)
def test_parts_are_those_of_the_whole(click, tmp_path_factory, index):
    table = open_run(click).tables["many"]
    whole = table[...]
    np.testing.assert_array_equal(table[index], whole[index])
    folder = tmp_path_factory.mktemp("array")
    array_store.write_each(folder / "arrays", {"a": whole})
    stored = array_store.stored(folder / "arrays", "a", whole.shape, whole.dtype)
    np.testing.assert_array_equal(stored[index], whole[index])


@pytest.mark.slow
def test_an_array_is_read_when_it_is_indexed_and_no_other(click, monkeypatch):
    opened, read_block, names, tables = tensorstore.open, rows_file.read_block, [], []

    def counted(spec, **options):
        names.append(spec["kvstore"]["path"].removesuffix("/"))
        return opened(spec, **options)

    def counted_rows(path, block):
        tables.append(block["table"])
        return read_block(path, block)

    monkeypatch.setattr(tensorstore, "open", counted)
    monkeypatch.setattr(rows_file, "read_block", counted_rows)
    model = open_run(click)
    assert {array.dtype for array in contents(model).values()} >= {np.dtype(np.float32)}
    assert not any(array.shape == () for array in contents(model).values())
    assert names == tables == []
    path = next(iter(model.params))
    assert model.params[path][...].shape == model.params[path].shape
    assert names == [f"params.{path}"]
    assert model.tables["many"][1030:1040].shape == (10, 8)
    assert names[1:] == ["tables.many.rows_tail"]
    assert set(tables) == {"many"}


@pytest.mark.slow
def test_an_array_is_placed_on_a_mesh_piece_by_piece(click):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = open_run(click)
    lazy = {"item": model.tables["item"], "many": model.tables["many"], **model.params}
    for name, array in lazy.items():
        axes = [axis if size % 8 == 0 else None for axis, size in zip("ba", array.shape, strict=False)]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        placed = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        np.testing.assert_array_equal(placed, array[...], err_msg=name)


@pytest.mark.slow
def test_what_an_opened_run_lost_meanwhile_is_an_error(graph, tmp_path):
    folder = shutil.copytree(graph, tmp_path / "run")
    model = open_run(folder)
    shutil.rmtree(folder / "checkpoints" / str(model.step) / "arrays" / "ocdbt.process_0")
    shapes = {path: array.shape for path, array in model.params.items()}
    assert shapes["layers/0/kernel"] == (1433, 4)
    with pytest.raises(UserError, match=r"cannot read params\.layers/0/kernel of .*Open it anew"):
        model.params["layers/0/kernel"][...]


@pytest.mark.slow
def test_all_files_of_what_is_opened_are_checked_and_no_others(click, tmp_path):
    folder = shutil.copytree(click, tmp_path / "run")
    path = folder / "checkpoints" / "4" / "rows" / "00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for step in (4, 6):
        with pytest.raises(UserError, match=r"checkpoints/4/rows/00000\.bin is damaged.*there are 2, 4, 6\."):
            open_run(folder, step)
    assert open_run(folder, 2).step == 2
    shutil.rmtree(folder / "checkpoints" / "2")
    with pytest.raises(UserError, match=r"only the rows updated since step 2, and .*checkpoints/2 is missing"):
        open_run(folder, 4)


@pytest.mark.slow
def test_the_mean_of_checkpoints(click, language):
    for folder, steps in ((click, (4, 6)), (language[0], (4, 8, 12))):
        each = [open_run(folder, step) for step in steps]
        mean = open_run(folder, average=len(steps))
        assert [int(path.name) for path in mean.checkpoints] == list(steps)
        assert mean.origin.startswith(f"the mean of steps {', '.join(map(str, steps))} in ")
        assert mean.params.keys() == each[0].params.keys()
        for path, array in mean.params.items():
            total = sum(one.params[path][...].astype(np.float64) for one in each)
            np.testing.assert_array_equal(array[...], (total / len(steps)).astype(np.float32))
            np.testing.assert_array_equal(array[..., :1], array[...][..., :1])
        assert_same_bits(mean.tables, each[-1].tables)
        assert mean.step == steps[-1]


def saved(folder, **trees):
    """Full checkpoints of these steps."""
    policy = Checkpoints(every=1, keep_last=9, keep_best=0)
    with Checkpointer(folder / "checkpoints", policy, {"model": "m"}) as made:
        for step, tree in trees.items():
            made.save(int(step[1:]), tree, {})
    return folder


def test_variables_averages_and_narrow_numbers(tmp_path):
    half, one = jnp.full((3, 2), 1.5, jnp.bfloat16), jnp.ones(4)
    tree = {
        "params": {"a/b.c": half, "empty": jnp.zeros((0, 3)), "scalar": jnp.float32(7)},
        "variables": {"norm/mean": one},
        "averages": {"slow": {"a/b.c": one * 2}, "fast": {"a/b.c": one * 3}},
        "optimizer": {"a/b.c": one},
        "key": jax.random.key(0),
    }
    saved(tmp_path, s1=tree, s2={**tree, "params": {**tree["params"], "a/b.c": half * 2}})
    model = open_run(tmp_path)
    assert model.record is None
    wanted = {("params", path): array for path, array in tree["params"].items()} | {
        ("params", "a/b.c"): half * 2,
        ("variables", "norm/mean"): one,
        ("averages", "slow", "a/b.c"): one * 2,
        ("averages", "fast", "a/b.c"): one * 3,
    }
    assert_same_bits(contents(model), wanted)
    mean = open_run(tmp_path, average=2).params
    assert_same_bits({"a/b.c": mean["a/b.c"]}, {"a/b.c": half * 1.5})
    assert_same_bits({"scalar": mean["scalar"]}, {"scalar": jnp.float32(7)})
    write_run(tmp_path / "written", model)
    assert_same_bits(contents(open_run(tmp_path / "written")), wanted)
    assert not (tmp_path / "written" / "experiment.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("run", ["click", "language", "graph"])
def test_a_written_run_holds_the_same_bits(run, request, tmp_path):
    folder = request.getfixturevalue(run)
    model = open_run(folder[0] if isinstance(folder, tuple) else folder)
    written = tmp_path / "new %20#?" / "run"
    write_run(written, model)
    back = open_run(written)
    assert_same_bits(contents(back), contents(model))
    assert (back.step, back.record, back.identity) == (model.step, model.record, model.identity)
    assert [path.name for path in written.parent.iterdir()] == ["run"]
    assert [path.name for path in (written / "checkpoints").iterdir()] == [str(model.step)]
    assert_same_bits(by_orbax(back.checkpoints[0]), {path: array[...] for path, array in model.params.items()})
    step = jax.ShapeDtypeStruct((), np.int32, sharding=HERE)
    wanted = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=HERE) for path, a in model.params.items()}
    tables = {
        name: {
            f"rows_{part}": jax.ShapeDtypeStruct((rows, table.shape[1]), table.dtype, sharding=HERE)
            for part, rows in (("body", table.shape[0] // 1024 * 1024), ("tail", table.shape[0] % 1024))
            if rows
        }
        for name, table in model.tables.items()
    }
    if model.updates is not None:
        tables["(counts)"] = {"updates": step}
    if model.maps:
        tables["(id maps)"] = {
            name: {leaf: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=HERE) for leaf, a in leaves.items()}
            for name, leaves in model.maps.items()
        }
    with Checkpointer(written / "checkpoints", Checkpoints(), dict(model.identity)) as checkpoints:
        assert checkpoints.steps() == [model.step]
        tables = {"tables": tables} if tables else {}
        tree, host = checkpoints.restore(None, {"step": step, "params": wanted} | tables)
    assert (int(tree["step"]), host["examples"]) == (model.step, model.examples)
    assert model.examples > 0
    assert_same_bits({path: np.asarray(a) for path, a in tree["params"].items()}, model.params)


@pytest.mark.slow
def test_a_written_run_of_a_click_model_is_served(click, served, tmp_path):
    write_run(tmp_path / "run", open_run(click))
    before, after = (publish.load(folder / "checkpoints", 6) for folder in (click, tmp_path / "run"))
    assert before.digest != after.digest
    for one, other in ((before.tables, after.tables), (before.params, after.params), (before.maps, after.maps)):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    folder, experiment = served
    write_run(tmp_path / "plain", open_run(folder))
    one, other = (click_model.load(place, experiment) for place in (folder, tmp_path / "plain"))
    assert one.step == other.step == 4
    jax.tree.map(np.testing.assert_array_equal, (one.tables, one.params), (other.tables, other.params))


@pytest.mark.slow
def test_a_written_run_of_a_click_model_is_scored_and_begun_with(click, rows, tmp_path):
    """Its rows of full checkpoints and of deltas, and those of ids without bound; no state of an optimizer."""
    mesh = MeshShape(fsdp=8)
    experiment = click_experiment(rows, placement__mesh=mesh)
    write_run(tmp_path / "run", open_run(click))
    before, after = (loop.evaluate(experiment, workdir=folder) for folder in (click, tmp_path / "run"))
    assert before.pop("recipe") != after.pop("recipe")
    assert before == after
    assert before["test_auc"] != 0.5
    begun = click_experiment(rows, placement__mesh=mesh, init=str(tmp_path / "run"), steps=2)
    run = Run.bind(begun, begun.data.build(), make_mesh(mesh))
    state, host = run.begin()
    assert host.examples == 0
    assert run.score(state, "test")["test_auc"] == before["test_auc"]
    other = dataclasses.replace(open_run(click), maps={})
    write_run(tmp_path / "without", other)
    begun = dataclasses.replace(begun, init=str(tmp_path / "without"))
    with pytest.raises(UserError, match=r"table 'item' has an id map, and .* has none for it"):
        Run.bind(begun, begun.data.build(), make_mesh(mesh)).begin()


@pytest.mark.slow
def test_a_written_run_of_a_language_model_is_converted(language, tmp_path):
    folder, experiment = language
    # A surgery: one parameter is another, in memory, and the rest stays on disk.
    model = open_run(folder)
    doubled = {**model.params, "final_norm/scale": model.params["final_norm/scale"][...] * 2}
    write_run(tmp_path / "run", dataclasses.replace(model, params=doubled))
    opened = run_model.open_run(tmp_path / "run", experiment)
    assert opened.remarks == ("step 12 of the run",)
    model_folder.convert(opened, tmp_path / "exported", to="huggingface")
    source = model_folder.open_folder(tmp_path / "exported").source
    np.testing.assert_array_equal(source.read("final_norm/scale", None), doubled["final_norm/scale"])
    np.testing.assert_array_equal(source.read("layers/mlp/up", 1), model.params["layers/mlp/up"][1])
    scored = [loop.evaluate(experiment, workdir=place, split="validation") for place in (folder, tmp_path / "run")]
    losses = [next(value for name, value in one.items() if name.endswith("_loss")) for one in scored]
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_written_run_is_known_by_its_record_and_scored(tmp_path):
    sets = ["steps=1"]
    experiment = configs.load("gcn-smoke", sets)
    record = serialization.record("gcn-smoke", sets, experiment)
    loop.train(experiment, workdir=tmp_path / "run", recipe="gcn-smoke", record=record)
    write_run(tmp_path / "written", open_run(tmp_path / "run"))
    record = open_run(tmp_path / "written").record
    assert serialization.reload(record, recipe=None, where=tmp_path / "written") == experiment
    before, after = (loop.evaluate(experiment, workdir=tmp_path / name) for name in ("run", "written"))
    assert before | {"recipe": ""} == after | {"recipe": ""}


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_could_not_be_written(graph, tmp_path):
    def unreadable(index):
        raise UserError("cannot read it")

    model = open_run(graph)
    lazy = LazyArray((3,), np.dtype(np.float32), unreadable)
    broken = dataclasses.replace(model, params={**model.params, "z": lazy})
    with pytest.raises(UserError, match="cannot read it"):
        write_run(tmp_path / "run", broken)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    with pytest.raises(UserError, match=r"/run is there already"):
        write_run(tmp_path / "run", model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "given", "message"),
    [
        ("{run}/nowhere", {}, r"RUN_FOLDER .*/nowhere does not exist\. Give a folder"),
        ("{run}/tensorboard", {}, r"is no run folder: it holds no checkpoints and no experiment\.json\. Give"),
        ("{empty}", {}, r"checkpoints holds no checkpoint\. Train first"),
        ("{run}", {"step": 3}, r"--step 3: .* has 2, 4, 6\. Name one of these"),
        ("{run}", {"average": 0}, "--average must be at least 1; got 0"),
        ("{run}", {"average": 4}, r"--average 4: .* has 3 checkpoints up to there \(2, 4, 6\)\. Average fewer"),
        ("{run}", {"step": 4, "average": 3}, r"--average 3: .* has 2 checkpoints up to there \(2, 4\)"),
    ],
)
def test_mistakes_name_what_was_given_and_what_there_is(click, tmp_path, folder, given, message):
    (tmp_path / "experiment.json").write_text("{}")
    (click / "tensorboard").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=message):
        open_run(pathlib.Path(folder.format(run=click, empty=tmp_path)), **given)


def test_the_mean_of_different_models_is_refused(tmp_path):
    saved(tmp_path, s1={"params": {"a": jnp.zeros(3)}}, s2={"params": {"a": jnp.zeros(4)}})
    with pytest.raises(UserError, match=r"--average: the mean of steps 1, 2 in .* they hold other parameters"):
        open_run(tmp_path, average=2)


def test_parameters_are_matched_with_those_of_a_model():
    arrays = {name: np.zeros((2, number)) for number, name in enumerate("abcdefgh")}
    model = Trained(params=arrays, step=1, origin="step 1 in runs/x/checkpoints")
    same = {name: jax.ShapeDtypeStruct(array.shape, ml_dtypes.bfloat16) for name, array in arrays.items()}
    backwards = dict(reversed(same.items()))
    assert list(matched(model, backwards, "init")) == list(backwards)
    assert all(matched(model, same, "init")[name] is array for name, array in arrays.items())
    wanted = {name.upper(): jax.ShapeDtypeStruct((2,), np.float32) for name in "abcd"}
    wanted |= {name: jax.ShapeDtypeStruct((9,), np.float32) for name in "abcd"}
    with pytest.raises(UserError) as caught:
        matched(model, wanted, "init=runs/x")
    assert str(caught.value) == (
        "init=runs/x: step 1 in runs/x/checkpoints does not fit the model: it lacks A, B, C and 1 more; it has, and "
        "the model has not, e, f, g and 1 more; of other shapes: a is [2, 0] there and [9] in the model, b is [2, 1] "
        "there and [9] in the model, c is [2, 2] there and [9] in the model and 1 more. Give a run of the same model, "
        "or the model of that run (see experiment.json in its folder); or a surgery that makes the one of the other, "
        "as surgery.units.ResizeUnits does of other hidden widths and surgery.experts.Upcycle of another number of "
        "experts."
    )
    with pytest.raises(UserError, match=r"model: it lacks i\. Give"):
        matched(model, same | {"i": jax.ShapeDtypeStruct((), np.float32)}, "init")


@pytest.mark.slow
def test_a_run_of_another_size_is_named(language):
    folder, experiment = language
    wider = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, ffn_dim=48))
    with pytest.raises(UserError, match=r"of other shapes: .*layers/mlp/up is \[2, 16, 32\] there and \[2, 16, 48\]"):
        run_model.open_run(folder, wider)


_CHILD = """
import pathlib, sys
import numpy as np
from scalejax.train.checkpoints.array_store import LazyArray
from scalejax.train.runs.run import Run
from scalejax.train.checkpoints.trained import Trained, open_run, write_run

def made(rows):
    shape = (rows, 1024)
    return LazyArray(shape, np.dtype(np.float32), lambda i: np.random.default_rng(0).random(shape, np.float32)[i])

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))

def grown(write):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    write()
    return status("VmHWM") - before

def model(rows, count):
    return Trained(params={f"layers/{i}": made(rows) for i in range(count)}, step=1, origin="here")

folder, rows, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
write_run(folder / "tiny", model(64, 2))  # what every process needs
print(grown(lambda: write_run(folder / "made", model(rows, count))))
print(grown(lambda: write_run(folder / "copy", open_run(folder / "made"))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_run_is_written_with_about_two_of_its_arrays_in_memory(tmp_path):
    rows, count = 6 * 1024, 6  # 24 MiB each
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # what is freed is given back
    command = [sys.executable, "-c", _CHILD, str(tmp_path), str(rows), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    largest = rows * 1024 * 4
    for grown in map(int, done.stdout.split()):
        assert grown < 2 * largest + 32 * 2**20, done.stdout  # and what threads compress at a time


@pytest.mark.slow
def test_nothing_else_opens_a_checkpoint():
    package = pathlib.Path(scalejax.__file__).parent
    words = {"orbax", "tensorstore", "ArrayStore", "array_store.stored", "chain_to"}
    uses = {word: {path.name for path in package.rglob("*.py") if word in path.read_text()} for word in words}
    assert uses == {
        "orbax": {"array_store.py", "checkpoint.py", "run_folder.py", "doctor.py"},  # the last two name its version
        "tensorstore": {"array_store.py"},
        "ArrayStore": {"array_store.py", "checkpoint.py"},
        "array_store.stored": {"trained.py"},
        "chain_to": {"chain.py", "checkpoint.py", "trained.py"},
    }
