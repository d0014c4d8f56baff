"""A data set of a few hundred rows and a recipe on it: whole runs in a second or two."""

import dataclasses
import pathlib

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from changes import changed

from scalejax import optim
from scalejax.configs.recsys import wukong
from scalejax.data import Categorical, ParquetData
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Experiment
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run

ROWS = 640
FEATURES = (Categorical(name="shop", rows=37), Categorical(name="hour", rows=11), Categorical(name="item", rows=1101))
"""No number of rows divides by 8."""

RECIPE = """
import dataclasses
import pathlib
from scalejax.parallel.fsdp import Fsdp
from scalejax.train.experiment import Experiment, Phase
import small_run

def small() -> Experiment:
    return small_run.experiment(pathlib.Path(__file__).with_name("rows.parquet"))

@dataclasses.dataclass(frozen=True)
class FreshHead:
    def operate(self, trained, fresh):
        head = {path: array for path, array in fresh.params.items() if path.startswith("head/")}
        return dataclasses.replace(trained, params={**trained.params, **head})

def parted() -> Experiment:
    cut = {"data.batch_size": 32, "strategy": Fsdp(sharding="FULL_SHARD", replicate_below=0)}
    fresh = Phase(name="fresh", steps=3, changes=cut, surgery=FreshHead())
    head = Phase(name="head", steps=3, changes={"trainable": "head/.*"})
    return dataclasses.replace(small(), steps=6, phases=(fresh, head))
"""


def columns(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Columns of which the label depends on the shop and one number; 4 days of equal length."""
    rng = np.random.default_rng(0)
    ids = {f.name: rng.integers(f.rows, size=rows).astype(np.int32) for f in FEATURES}
    numbers = {name: rng.normal(size=rows).astype(np.float32) for name in ("price", "age")}
    label = rng.random(rows) < 1 / (1 + np.exp(-(ids["shop"] / 18 - 1) - numbers["price"]))
    return {**ids, **numbers, "label": label.astype(np.int8), "day": np.arange(rows) * 4 // rows}


def write(path: pathlib.Path, changed: dict[str, np.ndarray] | None = None) -> pathlib.Path:
    """Writes the columns, some of them replaced, in row groups of 160."""
    table = pa.table({**columns(), **(changed or {})})
    pq.write_table(table, path, row_group_size=160, write_page_checksum=True)
    return path


def write_recipe(folder: pathlib.Path) -> str:
    """Writes data and recipe file into a folder; returns the name of the recipe for the command line."""
    write(folder / "rows.parquet")
    (folder / "recipe.py").write_text(RECIPE)
    return f"{folder / 'recipe.py'}:small"


def data(path: pathlib.Path, **changes: object) -> ParquetData:
    """The data set on a file that `write` wrote."""
    whole = ParquetData(
        path=str(path),
        categorical=FEATURES,
        dense=("price", "age"),
        group="hour",
        time="day",
        batch_size=64,
        threads=1,
    )
    return dataclasses.replace(whole, **changes)


def experiment(path: pathlib.Path, **changes: object) -> Experiment:
    """Twelve steps of a tiny Wukong; a window every 4, an evaluation and a checkpoint every 6; changes as `changed`.

    Learning rates are constant: runs of any number of steps share one compiled step.
    """
    constant = {
        "optimizer": optim.AdamW(learning_rate=optim.Constant(value=1e-2)),
        "tables__schedule": optim.Constant(),
    }
    return changed(wukong.smoke(), **{"data": data(path), **constant, **changes})


def restored(experiment: Experiment, folder: pathlib.Path, step: int | None = None, devices: int | None = None):
    """(name -> array, host state as JSON values) of a checkpoint, the newest for None, on the first devices."""
    data = experiment.data.build()
    run = Run(binding.bind(experiment, data.schema, make_mesh(MeshShape(), jax.devices()[:devices])), data)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        state, host = run.restore(checkpoints, step)
    tree = run.to_stored(state)
    tree["key"] = jax.random.key_data(tree["key"])
    return jax.tree.map(np.asarray, tree), host.to_dict()
