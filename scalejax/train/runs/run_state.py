"""The state that a run begins or goes on with: what the host knows, and arrays of other models and of other meshes."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import offload
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.row_cache import Tiers
from scalejax.parallel.embedding.sharded_tables import State
from scalejax.parallel.embedding.stored import logical as stored
from scalejax.parallel.embedding.stored.conversion import MAPS
from scalejax.parallel.mesh import BATCH_AXES
from scalejax.train import architecture
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints import trained
from scalejax.train.checkpoints.array_store import AnyArray, Index, LazyArray
from scalejax.train.checkpoints.manifest import HostRecord
from scalejax.train.checkpoints.trained import Trained
from scalejax.train.experiment import Init, Surgery
from scalejax.train.metrics import sums as metric_sums
from scalejax.train.protocols import DataSet
from scalejax.train.state import TrainState
from scalejax.train.step import Program

AnyTables = EmbeddingCollection | Tiers
_SHOWN = 5  # features in a message


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far on the split that is scored at intervals; the earliest of equals.

    Attributes:
      step: Where; 0 before the first.
      value: On that split.
      final: On the final split at that step, where it is scored there.
    """

    step: int = 0
    value: float = 0.0
    final: float | None = None


@dataclasses.dataclass(frozen=True)
class HostState:
    """What a run knows on the host between two steps.

    Attributes:
      examples: Global example counter.
      data_from: Its value when the training stream of these data began.
      weight: Sum of the weights of all examples so far; of a language model the targets that it has learnt from.
      flops: Of the steps so far, as the model counts them.
      lifetime: Sums of the metrics that have values for the whole run, over all windows so far.
      progressive: The same over all days scored so far, before they were trained.
      best: The best evaluation so far.
    """

    examples: int = 0
    data_from: int = 0
    weight: float = 0.0
    flops: float = 0.0
    lifetime: Mapping[str, object] = dataclasses.field(default_factory=dict)
    progressive: Mapping[str, object] = dataclasses.field(default_factory=dict)
    best: Best = Best()

    @property
    def position(self) -> int:
        """In the training stream."""
        return self.examples - self.data_from

    def after(self, examples: int, flops: float = 0.0) -> "HostState":
        """One step later."""
        return dataclasses.replace(self, examples=self.examples + examples, flops=self.flops + flops)

    def to_dict(self) -> HostRecord:
        """As JSON values, exactly."""
        return {
            "examples": self.examples,
            "data_from": self.data_from,
            "weight": self.weight,
            "flops": self.flops,
            "lifetime": {name: metric_sums.to_json(sums) for name, sums in self.lifetime.items()},
            "progressive": {name: metric_sums.to_json(sums) for name, sums in self.progressive.items()},
            "best": {"step": self.best.step, "value": self.best.value, "final": self.best.final},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], like: Mapping[str, object]) -> "HostState":
        """The inverse of `to_dict`; `like` has host sums of each metric."""
        lifetime, progressive = (
            {name: metric_sums.from_json(sums, like[name]) for name, sums in values[key].items()}
            for key in ("lifetime", "progressive")
        )
        return cls(
            examples=int(values["examples"]),
            data_from=int(values.get("data_from", 0)),
            weight=float(values["weight"]),
            flops=float(values.get("flops", 0.0)),
            lifetime=lifetime,
            progressive=progressive,
            best=Best(**values["best"]),
        )


def placed(arrays: Mapping[str, AnyArray], like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Arrays on the devices, in the dtypes and shardings of `like`; of each a device's part is read at a time."""

    def read(array: AnyArray, dtype: np.dtype) -> Callable[[Index | None], np.ndarray]:
        return lambda index: np.asarray(array[... if index is None else index]).astype(dtype)

    return {
        path: jax.make_array_from_callback(x.shape, x.sharding, read(arrays[path], x.dtype)) for path, x in like.items()
    }


def _earlier(seen: AnyArray, updates: AnyArray | None) -> AnyArray:
    """int32: when ids were seen last, by a clock that begins when the other one stood at `updates`."""
    now = 0 if updates is None else int(updates[...])
    return LazyArray(seen.shape, seen.dtype, lambda index: seen[index] - np.int32(now))


def nothing(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros, or any key."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    make = (lambda: jax.random.key(0)) if is_key else (lambda: jnp.zeros(leaf.shape, leaf.dtype))
    return jax.jit(make, out_shardings=leaf.sharding)()


def opened(program: Program, init: Init) -> Trained:
    """The model that parameters begin with.

    Raises:
      UserError: it is no run folder, or another one than was meant.
    """
    path = pathlib.Path(init.path)
    if not trained.is_run(path):
        if (init.step, init.average, init.digest) != (None, 1, None):
            raise UserError(
                f"init={path} is no run folder, and so step, average and digest mean nothing. Leave them out."
            )
        return program.task.open_folder(path)
    found = trained.open_run(path, init.step, init.average)
    if init.digest is not None and not (init.digest and found.digest.startswith(init.digest)):
        raise UserError(
            f"init={path}: {found.origin} has the digest {found.digest[:12]}..., and init.digest is "
            f"{init.digest!r}. Give the run that was meant, or its digest."
        )
    return found


def with_model(
    program: Program, tables: AnyTables | None, state: TrainState, source: Trained, surgery: Surgery | None, where: str
) -> TrainState:
    """The state with parameters, variables and rows of tables of another model, one array at a time."""
    model = program.model
    if surgery is not None:
        source = surgery.operate(source, as_trained(program, tables, state))
    else:
        settings = {name: value for name, value in program.task.identity().items() if name in source.identity}
        if different := manifests.differences(source.identity, settings):
            raise UserError(
                f"{where}: {source.origin} is of another model: {'; '.join(different)}. Set what it was trained with, "
                "or give a surgery that makes the one of the other: surgery.heads.NewHead for other classes, "
                "surgery.experts.Upcycle for new routers."
            )
    # Rows of the batch begin anew: they belong to examples.
    variables = {path: v for path, v in state.variables.items() if model.variable_specs[path] == P()}
    arrays = trained.matched(source, model.params | {path: model.variables[path] for path in variables}, where)
    state = dataclasses.replace(
        state,
        params=placed(arrays, state.params),
        variables=state.variables | placed(arrays, variables),
    )
    averages = {name: placed(arrays, average) for name, average in state.averages.items()}
    state = dataclasses.replace(state, averages=averages)
    return state if tables is None else with_rows(program, tables, state, source, where)


def check_architecture(program: Program, source: Trained, init: Init) -> None:
    """Compares the config of the model with that of the parameters, whose shapes do not tell all.

    Raises:
      UserError: fields differ that no surgery makes anew; names each with both values.
    """
    if source.architecture is None or (remade := remakes(init.surgery)) is None:
        return
    model = program.experiment.model
    found = [str(one) for one in architecture.differences(model, source.architecture, remade=remade) if not one.shaped]
    if found:
        raise UserError(
            f"init={init.path}: {source.origin} is of another model, though its arrays have the same shapes: "
            f"{'; '.join(found)}. Set what it was trained with; a phase may change the model later on."
        )


def check_ids(data: DataSet[object], source: Trained, where: str) -> None:
    """Refuses rows of tables whose ids have another meaning in these data.

    Raises:
      UserError: ids are ranks in the data, and those of the trained rows were others.
    """
    counted = getattr(data, "counted", ())
    if counted and source.tables and source.identity.get("data") != data.fingerprint():
        more = f" and {len(counted) - _SHOWN} more" if len(counted) > _SHOWN else ""
        raise UserError(
            f"{where}: {source.origin} was trained on other data, and no run keeps which value has which id: those of "
            f"{', '.join(counted[:_SHOWN])}{more} are counted anew in each table, so that rows would be those of other "
            "values. Leave init out and train on all rows in one table; or begin with the same file, split and order."
        )


def remakes(surgery: Surgery | None) -> tuple[str, ...] | None:
    """Fields of the model that a surgery makes anew, see `Surgery`; None = any."""
    return () if surgery is None else getattr(surgery, "REMAKES", None)


def with_rows(program: Program, tables: AnyTables, state: TrainState, source: Trained, where: str) -> TrainState:
    """The state with the rows of tables of another model, and its id maps."""
    rest = tables.to_stored(state.tables)
    return dataclasses.replace(state, tables=tables_of(program, tables, source, rest, where))


def tables_of(program: Program, tables: AnyTables, source: Trained, rest: stored.Tree, where: str) -> State:
    """Tables with the rows and id maps of another model, and all else of the stored tree `rest`."""
    assert program.collection is not None
    tree = {name: dict(leaves) for name, leaves in rest.items()}
    for table in tables.tables:
        rows, wanted = source.tables.get(table.name), (table.rows, table.dim)
        if rows is None or tuple(rows.shape) != wanted:
            has = "no such table" if rows is None else f"{list(rows.shape)}"
            raise UserError(
                f"{where}: table {table.name!r} is {list(wanted)} in the model, and {source.origin} has {has}. "
                "Give a run of the same model and data."
            )
        start, leaves = 0, tree[table.name]
        for part, count in stored.parts(table.rows).items():
            own = trained.rows_of(rows, start, start + count)
            leaves |= placed({f"rows_{part}": own}, {f"rows_{part}": leaves[f"rows_{part}"]})
            start += count
    for table in program.collection.mapped_tables:
        if table.name not in source.maps:
            raise UserError(
                f"{where}: table {table.name!r} has an id map, and {source.origin} has none for it, so that "
                "nobody knows whose its rows are. Give a run with the same tables.id_maps."
            )
        maps, leaves = tree[MAPS][table.name], dict(source.maps[table.name])
        for leaf in leaves.keys() & {"seen", "candidate_seen"}:  # updates of these tables begin at 0
            leaves[leaf] = _earlier(leaves[leaf], source.updates)
        tree[MAPS][table.name] = maps | placed(leaves, {leaf: maps[leaf] for leaf in maps if leaf != "counts"})
    return tables.from_stored(tree)


def on_host(program: Program, arrays: Mapping[str, jax.Array]) -> dict[str, AnyArray]:
    """Arrays of which each is brought to the host when it is indexed, and stays there."""
    # Every process does this, in the same order: a surgery reads alike on all of them.
    read = functools.cache(lambda path: np.asarray(program.on_all(offload.fetch(arrays[path], arrays[path].sharding))))
    return {path: LazyArray(x.shape, x.dtype, lambda index, path=path: read(path)[index]) for path, x in arrays.items()}


def as_trained(program: Program, tables: AnyTables | None, state: TrainState) -> Trained:
    """A state as an opened model, see `on_host`."""
    lazy = functools.partial(on_host, program)
    logical = {} if tables is None else tables.to_logical(state.tables)
    rows: dict[str, AnyArray] = lazy({name: leaves["rows"] for name, leaves in logical.items()})
    if isinstance(tables, Tiers):
        for name, x in tables.in_stores.items():
            rows[name] = LazyArray(x.shape, x.dtype, functools.partial(tables.read, name))
    return Trained(
        params=lazy(state.params),
        variables=lazy(state.variables),
        tables=rows,
        step=0,
        identity=program.task.identity(),
        origin="the model as it is drawn",
    )


def resized(program: Program, held: Mapping[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """The state of the exchange as it is stored, if that was on another number of devices, by name; else {}.

    Args:
      held: Shapes of what is stored, by name.
    """
    own = manifests.named_leaves({"exchange": program.abstract_state().exchange})
    found = {
        name: jax.ShapeDtypeStruct(held.get(name, leaf.shape), leaf.dtype, sharding=program.replicated)
        for name, leaf in own.items()
    }
    others = [name for name, leaf in own.items() if found[name].shape != leaf.shape]
    if any(len(found[name].shape) != len(own[name].shape) for name in others):
        return {}  # of another model: restoring says so
    return found if others else {}


def resize(program: Program, arrays: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], tuple[str, ...]]:
    """What of the state of the exchange is that of another number of devices, for those of this mesh; and remarks."""
    abstract, taken = program.abstract_state().exchange, program.gradients(1)
    scheme = taken.scheme(program.model.params)
    sizes = {axis: program.mesh.shape[axis] for axis in (*BATCH_AXES, *taken.handled)}
    resized: dict[str, jax.Array] = {}
    remarks: tuple[str, ...] = ()
    for path, like in abstract.items():
        own = manifests.named_leaves({"exchange": {path: like}})
        stored = [arrays[name] for name in own if name in arrays]
        if all(x.shape == leaf.shape for x, leaf in zip(stored, own.values(), strict=False)):
            continue
        before, devices = stored[0].shape[0], next(iter(own.values())).shape[0]
        state = jax.tree.unflatten(jax.tree.structure(like), [np.asarray(x) for x in stored])
        new = jax.tree.leaves(scheme.resized(path, state, sizes))
        for (name, leaf), x in zip(own.items(), new, strict=True):
            if np.shape(x) != leaf.shape:
                raise UserError(
                    f"{type(scheme).__name__}: the state {name} of {before} devices became {list(np.shape(x))} on "
                    f"{devices}, where {list(leaf.shape)} is wanted. Go on with as many devices as before."
                )
        resized |= {name: jax.device_put(x, leaf.sharding) for (name, leaf), x in zip(own.items(), new, strict=True)}
        remarks = (
            f"What the exchange of gradients remembers was that of {before} devices; on {devices} it is kept as "
            f"{type(scheme).__name__} says.",
        )
    return resized, remarks
