"""A trained click model on one device: its tables and dense part as a checkpoint holds them, and its scores.

The mesh, the exchange and the optimizer of training are not here: a table is one array, and a lookup a gather.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import compat
from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import AnyBatch, expand_batch
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError
from scalejax.kernels import block_quant
from scalejax.kernels import embedding_bag as bags
from scalejax.kernels.block_quant import LaneRows, PackedRows
from scalejax.nn import counts
from scalejax.parallel.embedding.config import Pooling, TableConfig
from scalejax.train import phases
from scalejax.train.checkpoints import trained
from scalejax.train.experiment import Experiment
from scalejax.train.metrics import exact
from scalejax.train.protocols import DataSet
from scalejax.train.runs import binding
from scalejax.train.state import ModelShape
from scalejax.train.task import Task

Table = jax.Array | PackedRows
AnyTable = Table | LaneRows
"""Or laid out for lookups on a TPU."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Examples, as a click model takes them.

    Attributes:
      ids: Per feature int32[B, L] where every example has L ids, else int32[N], those of example 0 first.
      lengths: Per feature of the second kind int32[B], ids per example; slots past their sum are ignored.
      dense: float32[B, D].
    """

    ids: dict[str, jax.Array]
    lengths: dict[str, jax.Array]
    dense: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """A model at one step of its training.

    Attributes:
      task: The model bound to the columns of its data.
      configs: Its tables.
      shape: Structure of the dense part.
      tables: Name -> rows, float32[V, D].
      params: Path -> dense parameter, float32.
      step: Of the checkpoint.
    """

    task: Task
    configs: tuple[TableConfig, ...]
    shape: ModelShape
    tables: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    step: int

    @property
    def schema(self) -> Schema:
        """Columns of the data."""
        return self.task.schema

    @functools.cached_property
    def arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Tables and parameters on the device."""
        return (
            {n: jnp.asarray(a) for n, a in self.tables.items()},
            {n: jnp.asarray(a) for n, a in self.params.items()},
        )

    @functools.cached_property
    def score(self) -> Callable[[dict[str, jax.Array], dict[str, jax.Array], Inputs], jax.Array]:
        """jitted (tables, params, inputs) -> logits float32[B, T]."""

        def score(tables: dict[str, Table], params: dict[str, jax.Array], inputs: Inputs) -> jax.Array:
            return logits(self, tables, self.shape.merge(params), inputs)

        return jax.jit(score)


def load(run_folder: pathlib.Path, experiment: Experiment, step: int | None = None) -> ServedModel:
    """Reads a checkpoint of a run.

    Args:
      run_folder: Its folder.
      experiment: What the run is.
      step: Which checkpoint; None = the newest.

    Raises:
      UserError: it is no run of a click model, has an id map or unpooled tables, has no such checkpoint, or a damaged
        one.
    """
    experiment = phases.experiment_at(experiment, run_folder, step)
    task = binding.bound_task(experiment, experiment.data.schema())
    if not task.tables():
        raise UserError(
            f"RUN_FOLDER {run_folder} is a run of {type(experiment.model).__name__}, which has no embedding tables. "
            "Give a run of a click model, such as one of `scalejax train dlrm`; a language model is written with "
            "`scalejax convert`."
        )
    if experiment.tables.id_maps:
        names = ", ".join(name for entry in experiment.tables.id_maps for name in entry.features)
        raise UserError(
            f"RUN_FOLDER {run_folder}: features {names} have id maps, which this does not serve. Look their rows up "
            "with scalejax.train.checkpoints.publish.rows_of, or train with ids that are rows."
        )
    model = trained.open_run(run_folder, step)
    tables, params = ({name: array[...] for name, array in arrays.items()} for arrays in (model.tables, model.params))
    return bind(task, tables, params, model.step)


def bind(task: Task, tables: dict[str, np.ndarray], params: dict[str, np.ndarray], step: int = 0) -> ServedModel:
    """A model from its arrays.

    Raises:
      UserError: unpooled tables, or arrays that are not those of the task.
    """
    configs = task.tables()
    for config in configs:
        if config.pooling == "none":
            raise UserError(f"Table {config.name!r} is looked up unpooled, which this does not serve.")
    shape = ModelShape.of(counts.abstract(task.init))
    wanted = {f"table {c.name}": (c.rows, c.dim) for c in configs}
    wanted |= {f"parameter {name}": tuple(value.shape) for name, value in shape.params.items()}
    found = {f"table {name}": array.shape for name, array in tables.items()}
    found |= {f"parameter {name}": array.shape for name, array in params.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"{name} has shape {found.get(name)} in the checkpoint; the model says {wanted.get(name)}. Give the "
                "recipe that the run was trained with."
            )
    as_float32 = {name: np.asarray(array, np.float32) for name, array in tables.items()}
    return ServedModel(
        task, configs, shape, as_float32, {name: np.asarray(array, np.float32) for name, array in params.items()}, step
    )


def inputs_of(batch: AnyBatch, schema: Schema) -> Inputs:
    """A host batch as `Inputs`; ids of jagged features are padded to a power of two, so that few programs compile.

    Raises:
      UserError: an id out of range, or weighted ids.
    """
    plain: ClickBatch = expand_batch(batch)
    features = plain.features
    features.validate(schema)
    if features.weights is not None:
        raise UserError("Ids with weights are not served. Train and score without weights.")
    ids: dict[str, jax.Array] = {}
    lengths: dict[str, jax.Array] = {}
    bounds, examples = features.feature_offsets(), len(plain)
    for f, feature in enumerate(schema.categorical):
        own = features.values[bounds[f] : bounds[f + 1]].astype(np.int32)
        if feature.length is not None:
            ids[feature.name] = jnp.asarray(own.reshape(examples, feature.length))
        else:
            room = 1 << max(0, int(own.size - 1).bit_length()) if own.size else 1
            ids[feature.name] = jnp.asarray(np.pad(own, (0, room - own.size)))
            lengths[feature.name] = jnp.asarray(features.lengths[f].astype(np.int32))
    return Inputs(ids, lengths, jnp.asarray(plain.dense))


def embed(configs: tuple[TableConfig, ...], tables: Mapping[str, AnyTable], inputs: Inputs) -> dict[str, jax.Array]:
    """Pooled rows of every feature, float32[B, D]; summed in float32, decoded where they are packed."""
    return {
        feature: _pooled(tables[config.name], inputs, feature, config.pooling)
        for config in configs
        for feature in config.features
    }


def _pooled(table: AnyTable, inputs: Inputs, feature: str, pooling: Pooling) -> jax.Array:
    assert pooling != "none"  # which `bind` refuses
    ids = inputs.ids[feature]
    if ids.ndim == 1:
        lengths = inputs.lengths[feature]
        if isinstance(table, PackedRows | LaneRows):
            return block_quant.quantized_bag(table, ids, lengths, pooling=pooling)
        return bags.embedding_bag(table, ids, lengths, pooling=pooling)
    examples, count = ids.shape
    if isinstance(table, LaneRows):  # whose kernel has bags, and no rows alone
        return block_quant.quantized_bag(table, ids.reshape(-1), jnp.full(examples, count), pooling=pooling)
    if count > 1 and not isinstance(table, PackedRows) and compat.platform() == "gpu":  # where a kernel adds rows up
        return bags.embedding_bag(table, ids.reshape(-1), jnp.full(examples, count), pooling=pooling)
    found = [_rows(table, ids[:, i]) for i in range(count)]
    total = sum(found[1:], found[0])
    return total / count if pooling == "mean" and count > 1 else total


def _rows(table: Table, ids: jax.Array) -> jax.Array:
    if isinstance(table, PackedRows):
        return block_quant.gather_quantized_rows(table, ids)
    return bags.gather_rows(table, ids).astype(jnp.float32)


def logits(model: ServedModel, tables: Mapping[str, AnyTable], module: nnx.Module, inputs: Inputs) -> jax.Array:
    """float32[B, T] of a dense part that may have been changed, see `operators`."""
    return module(embed(model.configs, tables, inputs), inputs.dense, key=None).astype(jnp.float32)


class Gap(NamedTuple):
    """A relative change of NE, or of AUC.

    Attributes:
      value: As measured.
      low, high: 95 % interval.
    """

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Batches on the device and what became of their examples; N examples of weight > 0 in all, T tasks.

    Attributes:
      inputs: Batches.
      kept: bool[B] for each of them: examples of weight > 0.
      labels: float32[N, T].
      weights: float32[N].
    """

    inputs: tuple[Inputs, ...]
    kept: tuple[np.ndarray, ...]
    labels: np.ndarray
    weights: np.ndarray

    def scores(self, score: Callable[[Inputs], jax.Array]) -> np.ndarray:
        """float32[N, T]: `score(inputs)` of every batch.

        Raises:
          UserError: a score is not finite.
        """
        found = [np.asarray(score(inputs))[kept] for inputs, kept in zip(self.inputs, self.kept, strict=True)]
        whole = np.concatenate(found)
        if not np.isfinite(whole).all():
            raise UserError(
                f"The scores of {int((~np.isfinite(whole)).any(1).sum())} of {len(whole)} examples are not finite. "
                "Keep more operators in float32, and look for rows that are not finite."
            )
        return whole

    def ne(self, scores: np.ndarray) -> float:
        """Normalised entropy of scores; the mean over tasks where there are several."""
        p = exact.sigmoid(scores)
        tasks = range(self.labels.shape[1])
        return float(np.mean([exact.normalized_entropy(self.labels[:, t], p[:, t], self.weights) for t in tasks]))

    def gap(self, wanted: np.ndarray, found: np.ndarray) -> Gap:
        """NE of some scores over that of others on the same examples, minus 1, and how sure that is.

        The two losses of an example nearly agree, so the interval is that of the mean of their differences: a tenth of
        a percent of NE and less can be told from nothing with some 10^4 examples, though NE itself is known ten times
        worse.
        """
        a, b, y = wanted.astype(np.float64), found.astype(np.float64), self.labels.astype(np.float64)
        w = self.weights / self.weights.sum(dtype=np.float64)
        tasks = range(y.shape[1])
        entropy = np.array([exact.base_logloss(y[:, t], self.weights) for t in tasks])
        theirs, ours = (np.logaddexp(0, l) - l * y for l in (a, b))
        ne = float(np.mean((w @ theirs) / entropy))
        d = ((ours - theirs) / entropy).mean(axis=1) / ne
        mean = float(w @ d)
        half = 1.96 * float(np.sqrt(np.square(w) @ np.square(d - mean)))
        return Gap(mean, mean - half, mean + half)

    def auc_gap(self, wanted: np.ndarray, found: np.ndarray) -> Gap:
        """AUC of some scores over that of others on the same examples, minus 1, and how sure that is."""
        columns = [(self.labels[:, t], wanted[:, t], found[:, t]) for t in range(self.labels.shape[1])]
        influence = [
            exact.auc_influence(y, b, self.weights) - exact.auc_influence(y, a, self.weights) for y, a, b in columns
        ]
        half = 1.96 * float(np.sqrt(np.square(np.mean(influence, axis=0)).sum()))
        area = self.auc(wanted)
        moved = self.auc(found) - area
        return Gap(*(float(x / area) for x in (moved, moved - half, moved + half)))

    def auc(self, scores: np.ndarray) -> float:
        """Area under the curve; the mean over tasks where there are several."""
        tasks = range(self.labels.shape[1])
        return float(np.mean([exact.auc(self.labels[:, t], scores[:, t], self.weights) for t in tasks]))


def sample(data: DataSet[AnyBatch], split: str, schema: Schema, most: int) -> Labelled:
    """At most `most` examples of a split, drawn without replacement and always the same; all where there are no more.

    Files are in some order, mostly that of time: the first examples stand for themselves alone.

    Raises:
      UserError: there are none, or a batch is not what `inputs_of` takes.
    """
    batches, total = data.eval_batches(split), data.num_examples(split)
    if most >= total:
        return labelled(batches, schema)
    chosen = np.sort(np.random.default_rng(0).choice(total, most, replace=False))
    return labelled(_at(batches, chosen), schema)


def _at(batches: Iterator[AnyBatch], positions: np.ndarray) -> Iterator[ClickBatch]:
    """The examples at these ascending positions, in batches of one size, the last filled up with weight 0."""
    first, size, parts = 0, 0, []
    for batch in batches:
        plain = expand_batch(batch)
        size, stop = max(size, len(plain)), first + len(plain)
        begin, end = np.searchsorted(positions, (first, stop))
        parts.append(_take(plain, positions[begin:end] - first))
        first = stop
        if end == len(positions):
            break
    whole = ClickBatch(
        features=KeyedJagged.concatenate([part.features for part in parts]),
        dense=np.concatenate([part.dense for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
    )
    for start in range(0, len(whole), size):
        rows = np.arange(start, start + size)
        part = _take(whole, np.minimum(rows, len(whole) - 1))
        yield dataclasses.replace(part, weights=np.where(rows < len(whole), part.weights, np.float32(0)))


def _take(batch: ClickBatch, rows: np.ndarray) -> ClickBatch:
    return ClickBatch(
        features=batch.features.take(rows),
        dense=batch.dense[rows],
        labels=batch.labels[rows],
        weights=batch.weights[rows],
    )


def labelled(batches: Iterator[AnyBatch], schema: Schema) -> Labelled:
    """All examples of some batches.

    Raises:
      UserError: there are none, or a batch is not what `inputs_of` takes.
    """
    inputs, kept, labels, weights = [], [], [], []
    for batch in batches:
        inputs.append(inputs_of(batch, schema))
        keep = batch.weights > 0
        kept.append(keep)
        labels.append(batch.labels[keep])
        weights.append(batch.weights[keep])
    if not sum(map(len, labels)):
        raise UserError("There are no examples to score. Give a split that has some.")
    return Labelled(tuple(inputs), tuple(kept), np.concatenate(labels), np.concatenate(weights))
