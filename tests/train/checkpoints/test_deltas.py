"""Checkpoints of touched rows: with what they build on they are full checkpoints, to the bit, or refused."""

import dataclasses
import errno
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import small_run

from scalejax.errors import UserError
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adam, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.embedding.stored import tracking
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.checkpoints import chain, publish, rows_file
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints

EVERY = Checkpoints(every=2, keep_last=20, keep_best=0)
MIXED = ShardingPlan(
    tables=(
        TablePlan(table="shop", kind="column_wise", columns=2),
        TablePlan(table="hour", kind="data_parallel"),
        TablePlan(table="item", kind="table_wise"),
    )
)


def experiment(rows, **changes):
    """Full checkpoints are those of every eighth step."""
    given = {"checkpoints": EVERY, "tables__full_every": 8, "steps": 6, "evaluation__every": 0, "log_every": 2}
    return small_run.experiment(rows, **given | changes)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("data") / "rows.parquet")


@pytest.fixture(scope="module")
def runs(rows, tmp_path_factory):
    """The same run of six steps with deltas at 4 and 6 (2 begins the chain), and with full checkpoints only."""
    folder = tmp_path_factory.mktemp("runs")
    loop.train(experiment(rows), workdir=folder / "deltas")
    loop.train(experiment(rows, tables__full_every=2), workdir=folder / "full")
    return folder / "deltas", folder / "full"


@pytest.fixture
def run(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    return tmp_path / "run"


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.slow
def test_a_chain_is_the_full_checkpoint_to_the_bit_on_any_mesh(runs, rows):
    deltas, full = runs
    kinds = [manifests.read(deltas / "checkpoints" / str(step)).delta is None for step in (2, 4, 6)]
    assert kinds == [True, False, False]
    expected = small_run.restored(experiment(rows), full, 6, 8)
    sliced = experiment(rows, tables__sharding=dataclasses.replace(MIXED, tables=MIXED.tables[1:]))
    for what, devices in ((experiment(rows), 8), (sliced, 4), (experiment(rows, data=small(rows, 63)), 3)):
        tree, host = small_run.restored(what, deltas, 6, devices)
        assert_equal(tree, expected[0])
        assert host == expected[1]
    assert_equal(
        small_run.restored(experiment(rows), deltas, 4, 1)[0], small_run.restored(experiment(rows), full, 4, 1)[0]
    )


def small(rows, batch_size):
    return dataclasses.replace(small_run.data(rows), batch_size=batch_size)


@pytest.mark.slow
def test_a_chain_from_column_slices_and_copies_restores_elsewhere(rows, tmp_path):
    changes = {"tables__sharding": MIXED, "tables__optimizer": Adam(learning_rate=0.01), "steps": 8}
    loop.train(experiment(rows, **changes, tables__full_every=10), workdir=tmp_path / "a")
    loop.train(experiment(rows, **changes, tables__full_every=2), workdir=tmp_path / "b")
    assert len(chain.chain_to(tmp_path / "a" / "checkpoints", 8)) == 4
    plain = experiment(rows, tables__optimizer=Adam(learning_rate=0.01))
    assert_equal(small_run.restored(plain, tmp_path / "a", 8, 1), small_run.restored(plain, tmp_path / "b", 8, 1))


@pytest.mark.slow
def test_training_goes_on_from_a_chain_as_if_never_stopped(runs, rows, run, tmp_path):
    longer = experiment(rows, steps=10)
    loop.train(longer, workdir=run)
    loop.train(longer, workdir=tmp_path / "whole")
    for step in (8, 10):
        (tree, host), (whole, there) = (small_run.restored(longer, one, step) for one in (run, tmp_path / "whole"))
        assert_equal(tree, whole)
        # The run that ended at step 6 was scored there.
        assert host | {"best": None} == there | {"best": None}
    kinds = [manifests.read(run / "checkpoints" / str(step)).delta is None for step in (2, 4, 6, 8, 10)]
    assert kinds == [True, False, False, True, False]


@pytest.mark.slow
def test_frozen_parameters_are_hashed_once_by_all_saves_and_once_by_a_restore(rows, tmp_path, monkeypatch):
    hashed, digest = [], manifests.digest
    monkeypatch.setattr(manifests, "digest", lambda path: hashed.append(path) or digest(path))
    loop.train(experiment(rows, trainable="head/.*"), workdir=tmp_path)
    checkpoints = tmp_path / "checkpoints"
    assert len(chain.chain_to(checkpoints, 6)) == 3
    files = {str(path.relative_to(checkpoints)) for path in checkpoints.glob("frozen-2/arrays/**/*") if path.is_file()}
    assert files

    def frozen():
        """Of what was hashed since this was asked last."""
        found = [str(path.relative_to(checkpoints)).removeprefix("saving-") for path in hashed]
        hashed.clear()
        return sorted(name for name in found if name.startswith("frozen-"))

    assert frozen() == sorted(files)
    loop.train(experiment(rows, trainable="head/.*", steps=10), workdir=tmp_path, resume="must")
    assert frozen() == sorted(files)  # checked with the chain, and not written again
    assert [path.name for path in checkpoints.glob("frozen-*")] == ["frozen-2"]


@pytest.mark.slow
def test_what_is_written_grows_with_touched_rows_and_not_with_tables(runs):
    folder = runs[0] / "checkpoints" / "6"
    touched = {}
    for block in rows_file.read(folder):
        touched[block.table] = touched.get(block.table, 0) + len(block.numbers)
    assert touched["item"] <= 2 * 64  # two batches of 64 examples
    a_row = 8 + 8 * 4 + 4 + 4  # its number, values, accumulator and update
    data = sum(path.stat().st_size for path in (folder / "rows").glob("*.bin"))
    blocks = sum(1 for _ in rows_file.read(folder))
    assert sum(touched.values()) * a_row <= data <= sum(touched.values()) * a_row + blocks * 4 * 64
    assert data < 1101 * a_row / 4


@pytest.mark.slow
def test_a_base_is_kept_as_long_as_it_is_needed(rows, tmp_path):
    policy = Checkpoints(every=1, keep_last=1, keep_best=0)
    loop.train(experiment(rows, steps=7, checkpoints=policy, tables__full_every=4), workdir=tmp_path)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 5, 6, 7]


def test_steps_with_their_bases():
    bases = {1: None, 2: 1, 3: 2, 4: None, 5: 4}
    assert chain.with_bases({3}, bases) == {1, 2, 3}
    assert chain.with_bases({4, 2}, bases) == {1, 2, 4}


@pytest.mark.slow
def test_a_missing_base_is_said(run, rows):
    shutil.rmtree(run / "checkpoints" / "4")
    with pytest.raises(UserError, match=r"only the rows updated since step 4, and .*checkpoints/4 is missing.*step 2"):
        small_run.restored(experiment(rows), run, 6)


@pytest.mark.slow
def test_another_base_of_the_same_step_is_refused(runs, run, rows):
    shutil.rmtree(run / "checkpoints" / "4")
    shutil.copytree(runs[1] / "checkpoints" / "4", run / "checkpoints" / "4")
    with pytest.raises(UserError, match=r"checkpoints/4 is another checkpoint of that step"):
        small_run.restored(experiment(rows), run, 6)


@pytest.mark.slow
def test_a_flipped_bit_in_any_link_is_noticed(run, rows):
    path = run / "checkpoints" / "4" / "rows" / "00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"checkpoints/4/rows/00000\.bin is damaged.*step 2"):
        small_run.restored(experiment(rows), run, 6)


@pytest.mark.slow
def test_a_half_written_one_is_not_listed(run, rows):
    (run / "checkpoints" / "6").rename(run / "checkpoints" / "saving-6")
    assert_equal(small_run.restored(experiment(rows), run, None)[0], small_run.restored(experiment(rows), run, 4)[0])


def test_full_checkpoints_come_at_multiples(rows):
    with pytest.raises(ValueError, match=r"tables.full_every must be a multiple of checkpoints.every, 4.*got 6"):
        experiment(rows, checkpoints=Checkpoints(every=4), tables__full_every=6)


def test_a_delta_needs_a_base(tmp_path):
    with checkpointer(tmp_path, 8) as checkpoints, pytest.raises(ValueError, match="a full checkpoint is due"):
        checkpoints.save_delta(3, {}, [], {}, abstract_tree={}, updates=3)


LEAF = {"x": jax.ShapeDtypeStruct((2,), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}


def checkpointer(folder, full_every=10, **policy):
    kept = Checkpoints(**{"every": 1, "keep_best": 0, **policy})
    return Checkpointer(folder, kept, {}, full_every=full_every)


def save_chain(folder, steps, *, before=lambda step: None, **policy):
    """Saves a leaf of two numbers, its step, at these steps; full where it is due."""
    with checkpointer(folder, **policy) as made:
        for step in steps:
            before(step)
            tree = {"x": jax.numpy.full(2, step, np.float32)}
            if made.base_updates(step) is None:
                made.save(step, tree, {}, updates=step)
            else:
                made.save_delta(step, tree, [], {}, abstract_tree=LEAF, updates=step)
            made.wait()
        return made.steps()


def restore_leaf(folder, step):
    with checkpointer(folder) as made:
        return float(made.restore(step, LEAF)[0]["x"][0])


@pytest.mark.parametrize("error", [UserError("cannot read it"), OSError(errno.ESTALE, "Stale file handle")])
def test_what_an_unreadable_link_may_need_is_not_removed(tmp_path, monkeypatch, error):
    read, failing = manifests.read, []

    def flaky(folder):
        if folder.name in failing:
            raise error
        return read(folder)

    def at_14_only(step):
        failing[:] = ["12"] if step == 14 else []

    monkeypatch.setattr(manifests, "read", flaky)
    assert save_chain(tmp_path, (8, 9, 10, 11, 12, 13, 14), keep_last=2, before=at_14_only) == [*(10, 11, 12, 13, 14)]
    failing.clear()
    assert [restore_leaf(tmp_path, step) for step in (12, 13, 14)] == [12, 13, 14]


def test_an_unreadable_best_checkpoint_is_not_removed(tmp_path, monkeypatch):
    read = manifests.read
    policy = Checkpoints(every=1, keep_last=1, keep_best=1)
    with Checkpointer(tmp_path, policy, {}) as made:
        made.save(1, {"x": jax.numpy.zeros(2)}, {}, {"logloss": 0.1})
        made.save(2, {"x": jax.numpy.zeros(2)}, {}, {"logloss": 0.3})
        made.wait()

        def flaky(folder):
            if folder.name == "1":
                raise UserError("cannot read it")
            return read(folder)

        monkeypatch.setattr(manifests, "read", flaky)
        made.save(3, {"x": jax.numpy.zeros(2)}, {}, {"logloss": 0.2})
        made.wait()
        assert 1 in made.steps()


def test_a_damaged_manifest_keeps_older_ones_only_while_it_is_kept(tmp_path):
    def damage(step):
        if step == 5:
            (tmp_path / "4" / "manifest.json").write_text("{")

    policy = {"full_every": None, "keep_last": 2}
    assert save_chain(tmp_path, (2, 3, 4, 5), before=damage, **policy) == [3, 4, 5]
    assert save_chain(tmp_path, (6,), **policy) == [5, 6]


def test_nothing_is_built_on_a_base_that_cannot_be_read(tmp_path, monkeypatch):
    read = manifests.read

    def stale(folder):
        if folder.name == "10":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(folder)

    def fail(step):
        if step == 11:
            monkeypatch.setattr(manifests, "read", stale)

    with pytest.raises(UserError, match=r"cannot save checkpoint .*/11: .* Stale file handle\. Run the same command"):
        save_chain(tmp_path, (10, 11), before=fail)


def test_nothing_is_built_on_a_damaged_manifest(tmp_path):
    def damage(step):
        if step == 11:
            text = (tmp_path / "10" / "manifest.json").read_text()
            (tmp_path / "10" / "manifest.json").write_text(text.replace('"step": 10', '"step": 18'))

    with pytest.raises(UserError, match=r"cannot save checkpoint .*/11: it would hold .*/10/manifest.json is damaged"):
        save_chain(tmp_path, (9, 10, 11), before=damage)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]


def test_advice_about_a_damaged_base_names_all_that_need_it(tmp_path):
    assert save_chain(tmp_path, (8, 9, 10, 11, 12), keep_last=9) == [8, 9, 10, 11, 12]
    path = tmp_path / "10" / "arrays" / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        restore_leaf(tmp_path, 12)
    folders = ", ".join(str(tmp_path / name) for name in ("10", "11", "12"))
    assert f"is step 9. To go on from there, move the folders {folders} away" in str(caught.value)
    for name in ("10", "11", "12"):
        shutil.rmtree(tmp_path / name)
    assert restore_leaf(tmp_path, None) == 9


def collection_of(track):
    table = TableConfig(name="t", rows=40, dim=4, features=("f",), track=track, optimizer=Sgd())
    return EmbeddingCollection(tables=(table,), mesh=make_mesh(MeshShape(), jax.devices()[:1]))


def with_update(state, number):
    """The state after an update that wrote its number to the row of that number."""
    ((name, leaves),) = state["stacks"].items()
    leaves = {leaf: array.at[number].set(number) for leaf, array in leaves.items()}
    updates = jax.device_put(np.int32(number), state["updates"].sharding)
    return {**state, "stacks": {name: leaves}, "updates": updates}


def test_tracking_may_begin_in_a_run_that_has_checkpoints(tmp_path):
    plain, tracked = collection_of("nothing"), collection_of("updates")
    state = with_update(with_update(plain.init(jax.random.key(0)), 1), 2)
    with Checkpointer(tmp_path, Checkpoints(every=1), {}) as made:
        made.save(2, {"tables": plain.to_stored(state)}, {})
    abstract = {"tables": tracked.abstract_stored()}
    with checkpointer(tmp_path) as made:
        tree, _ = made.restore(None, abstract)
        found, expected = tree["tables"]["t"], plain.to_stored(state)["t"]
        assert set(found) == {*expected, "updated_tail"}
        assert_equal({name: np.asarray(found[name]) for name in expected}, jax.tree.map(np.asarray, expected))
        assert not np.asarray(found["updated_tail"]).any()
        state = with_update(tracked.from_stored(tree["tables"]), 3)
        # Rows 1 and 2 were updated without being counted: only a full checkpoint covers them.
        assert made.base_updates(3) is None
        made.save(3, {"tables": tracked.to_stored(state)}, {}, updates=3)
        since = made.base_updates(4)
    assert since == 3
    touched = tracking.touched_rows(tracked.stacks, with_update(state, 4), since)
    assert [row for rows in touched for row in rows.numbers] == [4]


def test_a_tracked_checkpoint_that_lacks_its_marks_is_refused(tmp_path):
    plain, tracked = collection_of("nothing"), collection_of("updates")
    with Checkpointer(tmp_path, Checkpoints(every=1), {}) as made:
        made.save(2, {"tables": plain.to_stored(plain.init(jax.random.key(0)))}, {}, updates=2)
    with (
        checkpointer(tmp_path, 8) as made,
        pytest.raises(UserError, match=r"tables\.t\.updated_tail .* not in the checkpoint"),
    ):
        made.restore(2, {"tables": tracked.abstract_stored()})


@pytest.mark.slow
def test_a_served_copy_follows_a_run(runs, rows, tmp_path):
    folder = runs[0] / "checkpoints"
    served = publish.load(folder, 2)
    for step in (4, 6):
        served = publish.apply(served, shutil.copytree(folder / str(step), tmp_path / str(step)))
    whole = publish.load(runs[1] / "checkpoints", 6)
    assert served.step == 6
    assert_equal((served.tables, served.params), (whole.tables, whole.params))
    tree, _ = small_run.restored(experiment(rows), runs[1], 6)
    for name, array in served.tables.items():
        parts = [tree["tables"][name][part] for part in ("rows_body", "rows_tail") if part in tree["tables"][name]]
        np.testing.assert_array_equal(array, np.concatenate(parts))
    assert_equal(publish.load(folder, 6).tables, whole.tables)


@pytest.mark.slow
def test_folders_may_be_relative(runs, monkeypatch):
    monkeypatch.chdir(runs[0])
    served = publish.apply(publish.load(pathlib.Path("checkpoints"), 2), pathlib.Path("checkpoints/4"))
    assert_equal(served.tables, publish.load(runs[1] / "checkpoints", 4).tables)


@pytest.mark.slow
def test_what_does_not_follow_a_served_copy_is_refused_and_changes_nothing(runs, run):
    folder = run / "checkpoints"
    served = publish.load(folder, 2)
    before = {name: array.copy() for name, array in served.tables.items()}
    with pytest.raises(UserError, match=r"goes with step 4, but the copy is at step 2\. Apply"):
        publish.apply(served, folder / "6")
    with pytest.raises(UserError, match="is a full checkpoint"):
        publish.apply(served, folder / "2")
    with pytest.raises(UserError, match="of different runs"):
        publish.apply(publish.load(runs[1] / "checkpoints", 2), folder / "4")
    other = dataclasses.replace(served, tables={name: array[1:] for name, array in served.tables.items()})
    with pytest.raises(UserError, match=r"table 'hour' is 11 rows of float32 x 8 in .* and 10 rows"):
        publish.apply(other, folder / "4")
    with pytest.raises(UserError, match="the copy is at step 4 already"):
        publish.apply(dataclasses.replace(served, step=4), folder / "4")
    path = folder / "4" / "rows" / "00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"00000\.bin is damaged"):
        publish.apply(served, folder / "4")
    assert_equal(served.tables, before)


@pytest.mark.slow
def test_files_of_rows_are_read_by_numpy_alone(runs):
    folder = runs[0] / "checkpoints" / "6" / "rows"
    data = np.fromfile(folder / "00000.bin", np.uint8)
    seen = 0
    for described, rows in zip(
        json.loads((folder / "00000.json").read_text())["blocks"], rows_file.read(folder.parent), strict=True
    ):
        numbers = data[described["numbers"] :][: 8 * described["rows"]].view(np.int64)
        np.testing.assert_array_equal(numbers, rows.numbers)
        assert (np.diff(numbers) > 0).all()
        seen += 1
    assert seen >= 3


@pytest.mark.slow
def test_rows_of_bfloat16_come_back(tmp_path):
    from scalejax.parallel.embedding.stored.tracking import TableRows

    values = np.arange(6, dtype=np.float32).reshape(3, 2).astype(jax.numpy.bfloat16)
    given = TableRows(
        "t", np.array([1, 5, 2**33]), {"rows": ((2, 4), values), "updated": (None, np.arange(3, dtype=np.int32))}
    )
    assert rows_file.write(tmp_path, 0, [given]) == {"t": 3}
    (back,) = rows_file.read(tmp_path)
    assert back.numbers.tolist() == [1, 5, 2**33]
    assert back.leaves["rows"][0] == (2, 4)
    assert back.leaves["rows"][1].dtype == values.dtype
    assert back.leaves["rows"][1].tobytes() == values.tobytes()
    assert back.leaves["updated"][1].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_row_wise_adagrad_is_what_these_runs_use(rows):
    """The bytes of a row above count on it."""
    assert isinstance(experiment(rows).tables.optimizer, RowwiseAdagrad)
