"""Tables that rest outside of the devices train, are scored, saved and resumed as tables on the devices are."""

import dataclasses
import gc
import pathlib
import weakref
from typing import ClassVar

import jax
import killed_run
import numpy as np
import pytest
import small_run

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel.embedding import config
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.embedding.tiers import ArrayRows, Tier
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.experiment import Checkpoints, Phase
from scalejax.train.run_folder import read_lines
from scalejax.train.runs.run import Run

ITEMS = Tier(features=("item",), slots=70)
"""A batch has up to 64 of the 1,101 items: most steps bring rows and take others away."""

BOTH = (ITEMS, Tier(features=("shop",), slots=200))
"""The second fits its cache: rows arrive, and none leaves."""

ONE, EIGHT = None, MeshShape(replica=2, fsdp=4)


@dataclasses.dataclass(frozen=True)
class Files:
    """A user's store: rows in files, as of a disk below the memory of the host."""

    folder: str

    def build(self, table, leaves):
        path = pathlib.Path(self.folder)
        return ArrayRows(
            {
                name: np.lib.format.open_memmap(path / f"{table}.{name}.npy", "w+", x.dtype, x.shape)
                for name, x in leaves.items()
            }
        )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def train(rows, folder, tiers=(), **changes):
    """(stored arrays of the last checkpoint, records of the run but for times, summary)."""
    every = {"evaluation__every": 3, "checkpoints": Checkpoints(every=6)}
    experiment = small_run.experiment(rows, **{**every, "tables__tiers": tiers, **changes})
    summary = loop.train(experiment, workdir=folder)
    records = [r for r in read_lines(folder / "metrics.jsonl") if r["kind"] in ("window", "evaluation")]
    found = {key: value for key, value in summary.items() if "logloss" in key or "parameters" in key}
    plain = small_run.experiment(rows, **{**every, **changes})
    return small_run.restored(plain, folder)[0], records, found


def assert_same_bits(one, other):
    assert jax.tree.structure(one[0]) == jax.tree.structure(other[0])
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(one[0])[0], jax.tree.leaves(other[0]), strict=True):
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)
    assert one[1:] == other[1:]


CASES = {
    "one device": {"placement__mesh": ONE},
    "ids ahead": {
        "placement__mesh": EIGHT,
        "tables__pipeline": "ids",
        "tables__optimizer": config.Adam(weight_decay=0.1),
    },
    "deduplicated": {
        "placement__mesh": ONE,
        "tables__dedup": (DedupGroup(features=("hour", "item"), rows_per_example=1.0),),
    },
    "in fixed point on eight": {"placement__mesh": EIGHT, "tables__accumulate": "exact"},
}


# XLA's quick code for tests rounds the dense part of this step in another way for tables of another size.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.compiled_as_users_do if case == "in fixed point on eight" else ())
        for case in CASES
    ],
)
def test_a_table_in_a_store_of_files_has_the_bits_of_one_on_the_devices(rows, tmp_path, case):
    """Losses, scores, rows and their optimizer states; read from the checkpoint by a run without tiers."""
    flat = train(rows, tmp_path / "flat", **CASES[case])
    (tmp_path / "rows").mkdir()
    store = Files(str(tmp_path / "rows"))
    tiers = tuple(dataclasses.replace(tier, store=store) for tier in BOTH)
    assert_same_bits(train(rows, tmp_path / "tiered", tiers, **CASES[case]), flat)
    if case == "one device":
        kept = np.load(tmp_path / "rows" / "item.rows.npy")
        np.testing.assert_array_equal(kept[1024:], flat[0]["tables"]["item"]["rows_tail"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((), (ITEMS,)), ((ITEMS,), ())],
    ids=["then tiers", "then none"],
)
def test_a_stopped_run_goes_on_to_the_same_bits_with_and_without_tiers(rows, tmp_path, before, after):
    flat = train(rows, tmp_path / "flat", placement__mesh=ONE)
    changes = {"evaluation__every": 3, "checkpoints": Checkpoints(every=6), "placement__mesh": ONE}
    half = small_run.experiment(rows, steps=6, tables__tiers=before, **changes)
    loop.train(half, workdir=tmp_path / "run")
    loop.train(small_run.experiment(rows, tables__tiers=after, **changes), workdir=tmp_path / "run", resume="must")
    stored, _ = small_run.restored(small_run.experiment(rows, **changes), tmp_path / "run")
    assert_same_bits((stored,), flat[:1])


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(rows, tmp_path):
    *_, whole = train(rows, tmp_path / "whole", (ITEMS,), **CASES["ids ahead"])
    changes = {"evaluation__every": 3, "checkpoints": Checkpoints(every=3), **CASES["ids ahead"]}
    killed = small_run.experiment(rows, tables__tiers=(ITEMS,), **changes)
    again = killed_run.train(killed, tmp_path / "killed", at=8)
    assert {key: again[key] for key in whole} == whole


@pytest.mark.slow
def test_a_run_is_scored_through_a_cache(rows, tmp_path):
    *_, summary = train(rows, tmp_path / "run", placement__mesh=ONE)
    tiered = small_run.experiment(rows, tables__tiers=(ITEMS,), placement__mesh=ONE)
    found = loop.evaluate(tiered, workdir=tmp_path / "run", split="test")
    assert found["test_logloss"] == summary["test_logloss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": (Tier(features=("item",), slots=40),)}, "has 40 slots, and a batch has [4-6][0-9] distinct ids"),
        ({"tiers": (Tier(features=("items",), slots=40),)}, "no table looks up the feature 'items'; there are shop"),
        ({"tiers": (ITEMS, ITEMS)}, "name all of them in one Tier"),
        ({"tiers": (ITEMS,), "pipeline": "stale"}, "Set tables.pipeline='ids'"),
        ({"tiers": (ITEMS,), "exchange": Exchange(overflow="count")}, "Set tables.exchange.overflow='fail'"),
        ({"tiers": (ITEMS,), "full_every": 12}, "Set --set tables.full_every=None"),
        ({"tiers": (ITEMS,), "dtype": "bfloat16"}, "Set --set tables.dtype=float32"),
        (
            {
                "tiers": (ITEMS,),
                "id_maps": (MappedFeatures(features=("item",), id_map=IdMapConfig(rows=1 + 64 * 8)),),
            },
            "Leave its features out of one of the two",
        ),
        (
            {
                "tiers": (ITEMS,),
                "optimizer": config.Adam(),
                "sharding": ShardingPlan(tables=(TablePlan(table="item", kind="column_wise", columns=2),)),
            },
            "cut into .* ranges of columns by tables.sharding",
        ),
    ],
)
def test_what_means_nothing_for_a_cache_is_refused(rows, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        named = {f"tables__{name}": value for name, value in changes.items()}
        loop.train(small_run.experiment(rows, placement__mesh=EIGHT, **named), workdir=tmp_path / "run")
    for arguments, message in (
        ({"features": ()}, "at least one feature; got \\(\\)"),
        ({"features": "item"}, "must be a tuple of at least one feature; got 'item'"),
        ({"slots": 0}, "at least 1; got 0"),
        ({"store": 3}, "such as HostMemory\\(\\); got 3"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(ITEMS, **arguments)


def test_an_id_out_of_range_is_named(rows, tmp_path):
    wrong = small_run.columns()["item"].copy()
    wrong[70] = 1101
    path = small_run.write(tmp_path / "rows.parquet", {"item": wrong})
    with pytest.raises(UserError, match=r"item.*1101"):
        loop.train(small_run.experiment(path, tables__tiers=(ITEMS,)), workdir=tmp_path / "run")


class Counted(ArrayRows):
    """A store of which there is a list, and that knows how many rows were read of it."""

    alive: ClassVar = weakref.WeakSet()
    beside: ClassVar = []  # how many others there were when one was built

    def __init__(self, arrays):
        super().__init__(arrays)
        self.rows_read = 0
        gc.collect()
        Counted.beside.append(len(Counted.alive))
        Counted.alive.add(self)

    def read(self, rows):
        self.rows_read += len(rows)
        return super().read(rows)


@dataclasses.dataclass(frozen=True)
class CountedMemory:
    def build(self, table, leaves):
        return Counted({name: np.zeros(x.shape, x.dtype) for name, x in leaves.items()})


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Rows times two, of all that a surgery reads."""

    def operate(self, trained, fresh):
        assert fresh.tables["item"].shape == (1101, 8)
        drawn = fresh.tables["item"]
        np.testing.assert_array_equal(drawn[7], drawn[...][7])
        np.testing.assert_array_equal(drawn[5:9, 2], drawn[...][5:9, 2])
        return dataclasses.replace(trained, tables={name: 2 * rows[...] for name, rows in trained.tables.items()})


@pytest.mark.slow
def test_phases_hand_tables_on_and_let_their_stores_go(rows, tmp_path):
    """With tiers after none, other slots, a surgery, and none after tiers."""
    counted = dataclasses.replace(ITEMS, store=CountedMemory())

    def run(folder, *tiers):
        phases = tuple(
            Phase(name=f"{number}", steps=3, changes={"tables.tiers": own}, surgery=Doubled() if number == 1 else None)
            for number, own in enumerate(tiers[1:])
        )
        experiment = small_run.experiment(rows, steps=3, placement__mesh=ONE, phases=phases, tables__tiers=tiers[0])
        return {key: value for key, value in loop.train(experiment, workdir=folder).items() if "logloss" in key}

    flat = run(tmp_path / "flat", (), (), (), ())
    assert run(tmp_path / "tiers", (), (counted,), (dataclasses.replace(counted, slots=99),), ()) == flat
    assert Counted.beside[-2:] == [0, 0]


@pytest.mark.slow
def test_a_checkpoint_reads_every_row_once_and_scoring_holds_one_cache_more(rows):
    experiment = small_run.experiment(
        rows, placement__mesh=ONE, tables__tiers=(Tier(features=("item",), slots=70, store=CountedMemory()),)
    )
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(ONE))
    state, _ = run.begin()
    (store,) = Counted.alive
    run.to_stored(state)
    assert store.rows_read == 1101
    stacks = {name: leaves["rows"] for name, leaves in state.tables["stacks"].items()}
    (shape,) = {x.shape for x in stacks.values()}
    assert len(stacks) == 1

    def alive():
        return sum(x.shape == shape and not x.is_deleted() for x in jax.live_arrays())

    before, most = alive(), []
    swap = run.tables.swap

    def counted(*arguments, **options):
        swapped = swap(*arguments, **options)
        most.append(alive() - before)
        return swapped

    run.tables.swap = counted
    run.score(state, "train")
    assert len(most) > 2
    # The first one of its pass, which training goes on with beside it, and no further one.
    assert max(most) == 1
    assert not stacks.popitem()[1].is_deleted()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["no item", "floats"])
def test_batches_that_packing_refuses_are_refused_by_it(rows, change):
    experiment = small_run.experiment(rows, placement__mesh=ONE, tables__tiers=(ITEMS,))
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(ONE))
    batch = next(data.train_batches(start_example=0, process_index=0, process_count=1))
    features = batch.features
    if change == "floats":
        features = dataclasses.replace(features, values=features.values.astype(np.float32))
    else:
        names = [name for name in features.keys if name != "item"]
        features = KeyedJagged.from_dense({name: features[name].values for name in names})
    run.begin()
    said = []
    for cache in (None, run.tables.training()):
        own = dataclasses.replace(batch, features=features)
        with pytest.raises(UserError) as error:
            convert.to_device(own if cache is None else cache.prepare(own), run.program)
        said.append(str(error.value))
    assert said[0] == said[1]
