"""Whole runs on 64-bit ids: counted in the metrics, saved with the tables, the same however pipelined or resumed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
import small_run

from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.stored.conversion import MAPS
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.checkpoints import publish
from scalejax.train.experiment import Checkpoints
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding

MAP = IdMapConfig(rows=1 + 64 * 2, ways=2, policy="lru", admit_after=2)
HASHED = (
    Categorical(name="shop", rows=37),
    Categorical(name="hour", rows=11),
    Categorical(name="item", rows=None),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The small data set with unsigned hashes for items, 40 of them a day."""
    columns = small_run.columns()
    item = (columns["item"] % 40 + 40 * columns["day"]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet", {"item": item})


def experiment(rows, **changes):
    more = {"tables__id_maps": (MappedFeatures(features=("item",), id_map=MAP),), **changes}
    return small_run.experiment(rows, data=small_run.data(rows, categorical=HASHED), **more)


def stored(whole, folder, devices=None):
    return small_run.restored(whole, folder, devices=devices)[0]


def windows(folder):
    return [r for r in read_lines(folder / "metrics.jsonl") if r["kind"] == "window"]


def train_whole(rows, folder):
    """A run without interruption, scored every four steps, nothing ahead; step 6 saved in full and 12 on top of it."""
    whole = experiment(rows, evaluation__every=4, checkpoints=Checkpoints(every=6), tables__full_every=18)
    return folder, loop.train(whole, workdir=folder)


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    return train_whole(rows, tmp_path_factory.mktemp("trained") / "run")


@pytest.mark.slow
def test_counters_of_the_maps_stand_in_the_metrics(trained):
    folder, summary = trained
    records = windows(folder)
    assert [r["step"] for r in records] == [4, 8, 12]
    for record in records:
        assert record["id_hits/item"] + record["id_misses/item"] == record["examples_seen"]
        assert record["id_unserved/item"] <= record["id_misses/item"]
        assert record["id_admitted/item"] - record["id_evicted/item"] <= MAP.rows - 1
    admitted = [r["id_admitted/item"] for r in records]
    assert 0 < admitted[0] < admitted[-1]
    assert records[-1]["id_evicted/item"] > 0
    assert not any("misplaced" in name or name.endswith(("/hour", "/shop")) for name in records[-1])
    assert np.isfinite(summary["test_logloss"])


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_a_pipelined_run_that_was_stopped_equals_one_that_was_not_and_scoring_changes_nothing(rows, tmp_path):
    """It goes on from a checkpoint of touched rows: evicted ones count among them."""
    whole, _ = train_whole(rows, tmp_path / "whole")
    ahead = experiment(
        rows, tables__pipeline="ids", evaluation__every=0, checkpoints=Checkpoints(every=3), tables__full_every=12
    )
    parts = tmp_path / "parts"
    loop.train(dataclasses.replace(ahead, steps=6), workdir=parts)
    loop.train(ahead, workdir=parts)
    by_step = {r["step"]: r for r in windows(parts)}
    expected = {r["step"]: r for r in windows(whole)}
    # The stopped run also has a window that ends where it stopped.
    assert by_step[4] == expected[4]
    counters = [name for name in expected[12] if name.startswith(("id_", "lifetime_"))]
    assert {name: by_step[12][name] for name in counters} == {name: expected[12][name] for name in counters}
    one, other = stored(ahead, parts), stored(ahead, whole)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_is_the_same_on_one_and_scores_there(trained, rows):
    folder, _ = trained
    whole = experiment(rows, checkpoints=Checkpoints(every=6), tables__full_every=6)
    jax.tree.map(np.testing.assert_array_equal, stored(whole, folder, devices=1), stored(whole, folder))
    again = loop.evaluate(whole, workdir=folder, split="test")
    assert again["test_logloss"] == trained[1]["test_logloss"]


@pytest.fixture(scope="module")
def served(trained):
    return publish.load(trained[0] / "checkpoints", 12)


@pytest.mark.slow
def test_a_served_copy_finds_rows_as_evaluation_does(served, trained, rows):
    expected = stored(experiment(rows, checkpoints=Checkpoints(every=6), tables__full_every=18), trained[0])["tables"][
        MAPS
    ]
    assert set(served.maps) == set(expected) == {"item"}
    for name, array in served.maps["item"].items():
        np.testing.assert_array_equal(array, expected["item"][name])
    seen = pq.read_table(rows)["item"].to_numpy()
    ids = np.concatenate([seen, np.arange(50, dtype=np.uint64)])
    hi, lo = (jnp.asarray(words) for words in id_map.split_ids(ids))
    state = {name: jnp.asarray(array) for name, array in expected["item"].items()}
    wanted = np.asarray(id_map.find(MAP, state, hi, lo, jnp.ones(len(ids), bool)))
    found = publish.rows_of(served, "item", ids, MAP)
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(found[: len(seen)])) > 20
    assert (found[len(seen) :] == 0).all()


@pytest.mark.slow
def test_rows_are_found_with_the_config_of_the_run_only(served):
    ids = np.arange(3)
    with pytest.raises(UserError, match=r"table 'shop' has no id map; with one: item\. Its ids are its rows"):
        publish.rows_of(served, "shop", ids, MAP)
    for other in (dataclasses.replace(MAP, ways=4), dataclasses.replace(MAP, rows=65)):
        with pytest.raises(UserError, match=r"config is of .* and the map of table 'item' was made with others \(129"):
            publish.rows_of(served, "item", ids, other)


@pytest.mark.slow
def test_a_checkpoint_of_another_map_is_refused(trained, rows):
    other = dataclasses.replace(MAP, policy="lfu")
    whole = experiment(rows, tables__id_maps=(MappedFeatures(features=("item",), id_map=other),))
    with pytest.raises(UserError, match=r"id_maps is .*lru.* in the checkpoint and .*lfu.* here"):
        loop.evaluate(whole, workdir=trained[0])


SCHEMA = Schema(categorical=HASHED, dense=("price", "age"))


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ((), r"'item' has ids of any 64 bits .* no id map. .*id_maps=\(MappedFeatures\(features=\('item',\)"),
        ((("shop", "item", "day"),), "id_maps: there is no feature 'day'; the data has shop, hour, item"),
        ((("shop", "item"), ("item",)), "id_maps: feature 'item' is named twice"),
    ],
)
def test_maps_that_do_not_fit_the_features_are_refused(rows, maps, message):
    entries = tuple(MappedFeatures(features=names, id_map=MAP) for names in maps)
    with pytest.raises(UserError, match=message):
        binding.bind(experiment(rows, tables__id_maps=entries), SCHEMA, make_mesh(MeshShape(), jax.devices()[:1]))


def test_rows_are_not_fetched_before_the_map_has_placed_them(rows):
    with pytest.raises(UserError, match=r"pipeline='stale'.*Set tables.pipeline='ids', which is exact, or 'none'"):
        experiment(rows, tables__pipeline="stale")


def test_a_feature_of_numbered_rows_may_have_a_map_too(rows):
    """A schema that knows its rows, too many for a table."""
    entries = (MappedFeatures(features=("shop", "item", "hour"), id_map=MAP),)
    built = binding.bind(experiment(rows, tables__id_maps=entries), SCHEMA, make_mesh(MeshShape(), jax.devices()[:1]))
    assert [(table.name, table.rows) for table in built.collection.mapped_tables] == [
        (name, MAP.rows) for name in ("shop", "hour", "item")
    ]
