"""The one way into what runs have saved: a model's arrays by path, opened from a run folder or written into one.

    model = open_run(pathlib.Path("runs/llama"))            # the newest checkpoint; its files are checked, none is read
    model.params["layers/mlp/up"].shape                     # known from the manifest
    model.params["layers/mlp/up"][3]                        # reads one layer
    model.tables["user"][...]                               # rows of a table, later updates among them
    write_run(pathlib.Path("runs/pruned"), dataclasses.replace(model, params=pruned))

What a model is good for stays outside: no mesh, no task and no experiment object is needed here, shapes and dtypes come
from the manifest. Only a run that goes on reads its whole state by `checkpoint.Checkpointer.restore`.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError, check_at_least
from scalejax.parallel.embedding.stored import logical
from scalejax.parallel.embedding.stored.conversion import COUNTS, MAPS
from scalejax.parallel.embedding.stored.tracking import TableRows
from scalejax.train import architecture, disk, distributed
from scalejax.train.checkpoints import array_store, chain, checkpoint, rows_file
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.array_store import AnyArray, Index, LazyArray
from scalejax.train.checkpoints.manifest import Damaged, Manifest

_RECORD, _CHECKPOINTS, _ARRAYS = "experiment.json", "checkpoints", "arrays"
_PARAMS, _VARIABLES, _AVERAGES, _TABLES = "params.", "variables.", "averages.", "tables."
_EXCHANGE, _COPY = "exchange.", ".value"
_OF_A_MODEL = (_PARAMS, _VARIABLES, _AVERAGES, _TABLES, _EXCHANGE)
_MAPS = f"{_TABLES}{MAPS}."
_UPDATES = f"{_TABLES}{COUNTS}.updates"
_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model, of whatever kind. Its arrays may be on disk or in memory (see `LazyArray`).

    Attributes:
      params: Path -> dense parameter.
      variables: Path -> what else the model holds, such as running means.
      averages: Name -> path -> average of a parameter over the steps of training.
      copies: Path -> the parameter as the model of the run computed with it, where its strategy keeps whole copies
        beside the master parameters (`gradients.blocks.WholeCopy`).
      tables: Name -> rows [V, dim] of an embedding table, in their dtype at rest.
      maps: Name of a table with an id map -> the arrays of the map, as in `id_map.State` (its counters are left out).
      updates: int32[], how often tables were updated, by which id maps tell the time; None = never.
      step: Of the checkpoint; of the newest where parameters are the mean of several.
      examples: On which it was trained.
      record: The content of experiment.json; None where there is none.
      architecture: Config of the model that parameters belong to, or its data (`architecture.of_run`), or None.
      identity: What a run must share with the checkpoint to restore it, see `Checkpointer`.
      digest: Of the checkpoint's manifest; "" for what was not opened from one.
      checkpoints: The folders that parameters come from, in the order of their steps.
      origin: What it came from, for messages.
    """

    params: Mapping[str, AnyArray]
    variables: Mapping[str, AnyArray] = dataclasses.field(default_factory=dict)
    averages: Mapping[str, Mapping[str, AnyArray]] = dataclasses.field(default_factory=dict)
    copies: Mapping[str, AnyArray] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, AnyArray] = dataclasses.field(default_factory=dict)
    maps: Mapping[str, Mapping[str, AnyArray]] = dataclasses.field(default_factory=dict)
    updates: AnyArray | None = None
    step: int
    examples: int = 0
    record: Mapping[str, object] | None = None
    architecture: object | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""
    checkpoints: tuple[pathlib.Path, ...] = ()
    origin: str


def open_run(path: pathlib.Path, step: int | None = None, average: int = 1) -> Trained:
    """Opens a checkpoint of a run. All its files are compared with their digests; arrays are read when indexed.

    Args:
      path: The run's folder.
      step: Which checkpoint; None = the newest.
      average: Give parameters as the mean of this checkpoint and the average - 1 before it (Polyak averaging, as
        Llama 3 ends its pre-training: the last checkpoints of a run whose learning rate goes to zero lie around one
        optimum, arXiv 2407.21783, section 3.4.3). All else is that of this checkpoint.

    Raises:
      UserError: it is no run folder, has no such checkpoint or too few of them, or a file is missing or damaged.
    """
    if not path.is_dir():
        raise UserError(f"RUN_FOLDER {path} does not exist. Give a folder that `scalejax train` wrote.")
    if not is_run(path):
        raise UserError(
            f"RUN_FOLDER {path} is no run folder: it holds no checkpoints and no {_RECORD}. Give a folder that "
            "`scalejax train` wrote."
        )
    found = open_checkpoints(path / _CHECKPOINTS, step, average)
    if not (path / _RECORD).is_file():
        return found
    record = disk.read_json(path / _RECORD)
    return dataclasses.replace(found, record=record, architecture=architecture.of_run(record, found.step))


def is_run(path: pathlib.Path) -> bool:
    """Whether this is a run folder."""
    return (path / _RECORD).is_file() or (path / _CHECKPOINTS).is_dir()


def open_checkpoints(folder: pathlib.Path, step: int | None = None, average: int = 1) -> Trained:
    """As `open_run`, from the folder of all checkpoints alone."""
    steps = _existing(folder, step, average)
    try:
        links = [Checkpoint.read(folder / str(manifest.step)) for manifest in chain.chain_to(folder, steps[-1])]
        opened = {link.manifest.step: link for link in links}
        opened |= {number: Checkpoint.read(folder / str(number)) for number in steps if number not in opened}
        part = (jax.process_index(), jax.process_count())
        own = [one.manifest for one in opened.values()]
        distributed.together(lambda: checkpoint.check_files(folder, own, part))
    except Damaged as damage:
        raise UserError(
            f"checkpoint {folder / str(steps[-1])}: {damage}. Bring the file back from a copy, or take another step: "
            f"there are {', '.join(map(str, checkpoint.listed(folder)))}."
        ) from damage
    averaged = [opened[number] for number in steps]
    found = merge(links, averaged[-1].frozen())
    origin = f"{'step' if average == 1 else 'the mean of steps'} {', '.join(map(str, steps))} in {folder}"
    each = averaged if average > 1 else []
    params = _means([merge([one], one.frozen()).params for one in each], origin) if each else found.params
    return dataclasses.replace(found, params=params, checkpoints=tuple(one.folder for one in averaged), origin=origin)


def open_dense(path: pathlib.Path, step: int) -> dict[str, LazyArray]:
    """Parameters, averages and what the optimizer knew at a step of a run, by the names of the checkpoint.

    Raises:
      UserError: as `open_run`.
    """
    folder = path / _CHECKPOINTS
    _existing(folder, step, 1)
    try:
        one = Checkpoint.read(folder / str(step))
        part = (jax.process_index(), jax.process_count())
        distributed.together(lambda: checkpoint.check_files(folder, [one.manifest], part))
        frozen = one.frozen()
    except Damaged as damage:
        raise UserError(f"checkpoint {folder / str(step)}: {damage}. Bring the file back from a copy.") from damage
    return {
        name: x for own in (one, frozen) if own for name, x in own.whole((_PARAMS, _AVERAGES, "optimizer.")).items()
    }


def write_run(path: pathlib.Path, trained: Trained) -> None:
    """Writes a run folder with one checkpoint, from which `open_run` gives the same bits.

    Arrays are read and written one at a time. The folder appears when it is complete.

    Args:
      path: Folder that is not there yet, or is empty.
      trained: The model. Without a record the folder has no experiment.json.

    Raises:
      UserError: the folder is there, an array cannot be read, or the disk refuses.
    """
    arrays = _by_name(trained)
    described = {name: manifests.describe(array) for name, array in arrays.items()}
    manifest = Manifest(
        step=trained.step,
        identity=dict(trained.identity),
        metrics=None,
        host={"examples": trained.examples},
        arrays=described,
        files={},
    )
    with disk.appearing(path) as folder:
        if trained.record is not None:
            disk.write_json(folder / _RECORD, trained.record)
        saving = folder / _CHECKPOINTS / "saving"
        try:
            array_store.write_each(saving / _ARRAYS, arrays)
            checkpoint.commit(saving, manifest)
        except UserError:
            raise
        except Exception as error:
            explanation = disk.explain(error, f"cannot write run folder {path}")
            if explanation is None:
                raise
            raise explanation from error


def matched(trained: Trained, shapes: Mapping[str, jax.ShapeDtypeStruct], where: str) -> dict[str, AnyArray]:
    """Parameters for a model, in the order in which it names them, and those variables that it asks for.

    Args:
      trained: Where they come from.
      shapes: Path -> what the model has; dtypes may differ.
      where: What asked for them, for the message: "init=runs/llama".

    Raises:
      UserError: parameters are missing, are there beside those of the model, or have other shapes.
    """
    params = {**trained.params, **{path: x for path, x in trained.variables.items() if path in shapes}}
    shaped = [
        f"{path} is {list(params[path].shape)} there and {list(wanted.shape)} in the model"
        for path, wanted in shapes.items()
        if path in params and tuple(params[path].shape) != tuple(wanted.shape)
    ]
    complaints = {
        "it lacks": [path for path in shapes if path not in params],
        "it has, and the model has not,": [path for path in params if path not in shapes],
        "of other shapes:": shaped,
    }
    said = [f"{what} {_some(names)}" for what, names in complaints.items() if names]
    if said:
        raise UserError(
            f"{where}: {trained.origin} does not fit the model: {'; '.join(said)}. Give a run of the same model, or "
            f"the model of that run (see {_RECORD} in its folder); or a surgery that makes the one of the other, as "
            "surgery.units.ResizeUnits does of other hidden widths and surgery.experts.Upcycle of another number of "
            "experts."
        )
    return {path: params[path] for path in shapes}


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """One folder of arrays, and of rows where it builds on another. `merge` makes a model of them.

    Attributes:
      folder: Its folder, anywhere.
      manifest: What it says of itself.
      digest: Of the manifest.
    """

    folder: pathlib.Path
    manifest: Manifest
    digest: str

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Checkpoint":
        """Reads and checks the manifest, as `manifest.read`."""
        return cls(folder, manifests.read(folder), manifests.stored_digest(folder))

    def check(self) -> None:
        """Compares all files with their digests, as `manifest.check_files`."""
        manifests.check_files(self.folder, self.manifest.files)

    def rows(self, table: str | None = None) -> Iterator[TableRows]:
        """Rows that were updated since the checkpoint before, of one table or of all."""
        return (rows_file.read_block(*one) for one in self._blocks if table in (None, one[1]["table"]))

    @functools.cached_property
    def _blocks(self) -> list[tuple[pathlib.Path, rows_file.Block]]:
        return rows_file.blocks(self.folder)  # of a full checkpoint there are none

    def frozen(self) -> "Checkpoint | None":
        """The arrays that several checkpoints share, this one among them; None = it has all of its own."""
        said = manifests.Frozen.of(self.manifest)
        if said is None:
            return None
        return Checkpoint(self.folder.parent / said.folder, said.read(self.folder.parent), said.digest)

    def whole(
        self, parts: tuple[str, ...] = (_PARAMS, _VARIABLES, _AVERAGES, _TABLES, _EXCHANGE)
    ) -> dict[str, LazyArray]:
        """Name -> array that is here in full, of those whose names begin with one of `parts`."""
        delta, frozen = chain.delta_of(self.manifest), manifests.Frozen.of(self.manifest)
        known = self.manifest.arrays
        elsewhere = set() if frozen is None else set(frozen.names)
        return {
            name: array_store.stored(
                self.folder / _ARRAYS, name, tuple(known[name]["shape"]), jnp.dtype(known[name]["dtype"])
            )
            for name in (known if delta is None else delta.whole)
            if name.startswith(parts) and name not in elsewhere
        }


def merge(links: Sequence[Checkpoint], frozen: Checkpoint | None = None) -> Trained:
    """The model of a checkpoint and those that it builds on, whose files have been checked.

    Args:
      links: In the order of their steps. Where the first builds on one that is not here, tables of which it has only
        some rows are left out.
      frozen: The arrays that it shares with others; None = they are left out.
    """
    newest = links[-1]
    arrays, base = newest.whole() | ({} if frozen is None else frozen.whole()), links[0].whole()
    averages: dict[str, dict[str, AnyArray]] = {}
    maps: dict[str, dict[str, AnyArray]] = {}
    for name, array in arrays.items():
        average, _, path = name.removeprefix(_AVERAGES).partition(".")
        if name.startswith(_AVERAGES):
            averages.setdefault(average, {})[path] = array
        table, _, leaf = name.removeprefix(_MAPS).rpartition(".")
        if name.startswith(_MAPS) and leaf != "counts":
            maps.setdefault(table, {})[leaf] = array
    tables: dict[str, AnyArray] = {}
    for table, parts in parts_of_tables(base | arrays).items():
        whole = parts[0] in arrays
        tables[table] = _table(table, [(arrays if whole else base)[part] for part in parts], () if whole else links)
    return Trained(
        params=_below(_PARAMS, arrays),
        variables=_below(_VARIABLES, arrays),
        averages=averages,
        copies={name.removesuffix(_COPY): x for name, x in _below(_EXCHANGE, arrays).items() if name.endswith(_COPY)},
        tables=tables,
        maps=maps,
        updates=arrays.get(_UPDATES),
        step=newest.manifest.step,
        examples=newest.manifest.host.get("examples", 0),
        identity=newest.manifest.identity,
        digest=newest.digest,
        checkpoints=(newest.folder,),
        origin=f"checkpoint {newest.folder}",
    )


def parts_of_tables(names: Iterable[str]) -> dict[str, list[str]]:
    """Table -> names of the arrays of a checkpoint that hold its rows, in their order (see `embedding.stored`)."""
    found: dict[str, list[str]] = {}
    for part in ("body", "tail"):
        end = f".rows_{part}"
        for name in names:
            if name.startswith(_TABLES) and name.endswith(end):
                found.setdefault(name[len(_TABLES) : -len(end)], []).append(name)
    return found


def _table(name: str, parts: Sequence[LazyArray], links: Sequence[Checkpoint]) -> LazyArray:
    """Consecutive ranges of rows as one array, with the rows that checkpoints hold written over them in turn."""
    bounds = [0, *itertools.accumulate(part.shape[0] for part in parts)]

    def rows_between(start: int, stop: int) -> np.ndarray:
        spans = [np.clip((start, stop), *ends) - ends[0] for ends in itertools.pairwise(bounds)]
        found = [part[low:high] for part, (low, high) in zip(parts, spans, strict=True) if low < high]
        array = np.concatenate(found or [parts[0][:0]]) if len(found) != 1 else found[0]
        for rows in (rows for link in links for rows in link.rows(name) if "rows" in rows.leaves):
            columns, values = rows.leaves["rows"]
            inside = (start <= rows.numbers) & (rows.numbers < stop)
            array[rows.numbers[inside] - start, slice(*columns) if columns else slice(None)] = values[inside]
        return array

    def read(index: Index) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice) and first.step in (None, 1):  # of a range of rows no more is read
            start, stop, _ = first.indices(bounds[-1])
            return rows_between(start, max(start, stop))[(slice(None), *rest)]
        return rows_between(0, bounds[-1])[index]

    return LazyArray((bounds[-1], *parts[0].shape[1:]), parts[0].dtype, read)


def _mean(arrays: Sequence[AnyArray]) -> LazyArray:
    """The mean of equal arrays, added up in float64 and rounded once."""

    def read(index: Index) -> np.ndarray:
        total = np.array(arrays[0][index], np.float64)
        for array in arrays[1:]:
            total += array[index]
        total /= len(arrays)
        return total.astype(arrays[0].dtype)

    return LazyArray(arrays[0].shape, arrays[0].dtype, read)


def rows_of(array: AnyArray, start: int, stop: int) -> LazyArray:
    """Some consecutive rows of an array."""
    return LazyArray((stop - start, *array.shape[1:]), array.dtype, lambda index: array[start:stop][index])


def _means(each: Sequence[Mapping[str, AnyArray]], words: str) -> dict[str, AnyArray]:
    described = [{path: manifests.describe(array) for path, array in params.items()} for params in each]
    if any(one != described[0] for one in described):
        raise UserError(f"--average: {words} cannot be taken: they hold other parameters. Average fewer.")
    return {path: _mean([params[path] for params in each]) for path in each[0]}


def _existing(folder: pathlib.Path, step: int | None, average: int) -> list[int]:
    """The last `average` checkpoints up to a step; the same on every process."""
    check_at_least("--average", average, 1)
    steps = distributed.on_primary(lambda: checkpoint.listed(folder))
    if not steps:
        raise UserError(f"{folder} holds no checkpoint. Train first, or give another run folder.")
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: {folder} has {', '.join(map(str, steps))}. Name one of these.")
    found = [s for s in steps if step is None or s <= step]
    if len(found) < average:
        raise UserError(
            f"--average {average}: {folder} has {len(found)} checkpoints up to there ({', '.join(map(str, found))}). "
            "Average fewer, or keep more (--set checkpoints.keep_last=N when training)."
        )
    return found[-average:]


def _by_name(trained: Trained) -> dict[str, AnyArray]:
    """Arrays under the names that they have in a checkpoint: the inverse of `merge`."""
    arrays: dict[str, AnyArray] = {"step": np.array(trained.step, np.int32)}
    arrays |= {_PARAMS + path: array for path, array in trained.params.items()}
    arrays |= {_VARIABLES + path: array for path, array in trained.variables.items()}
    for name, average in trained.averages.items():
        arrays |= {f"{_AVERAGES}{name}.{path}": array for path, array in average.items()}
    for name, table in trained.tables.items():
        start = 0
        for part, rows in logical.parts(table.shape[0]).items():
            arrays[f"{_TABLES}{name}.rows_{part}"] = rows_of(table, start, start + rows)
            start += rows
    if trained.updates is not None:
        arrays[_UPDATES] = trained.updates
    for name, leaves in trained.maps.items():
        arrays |= {f"{_MAPS}{name}.{leaf}": array for leaf, array in leaves.items()}
    return arrays


def _below(prefix: str, arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
