"""Builds the compiled functions of a run over one graph.

The graph is placed on the devices once and handed to every step: what it is normalised to and which edges are read was
settled on the host. A step takes the gradient of the mean loss over the labelled nodes of its batch; scoring is one
pass over the graph, from which all splits are read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from scalejax.data.graphs import NodeBatch, NodeDataSet
from scalejax.errors import UserError
from scalejax.parallel import gradient_scaling
from scalejax.parallel import mesh as meshes
from scalejax.train import dense_metrics, exact
from scalejax.train.experiment import GraphExperiment
from scalejax.train.precision import check_precision, init_model
from scalejax.train.protocols import GraphTask
from scalejax.train.state import ModelShape, Params, TrainState, optimizer_step, with_sharding


@dataclasses.dataclass(frozen=True, eq=False)
class GraphProgram:
    """The functions of one run.

    Attributes:
      experiment: The run.
      task: Its model bound to the graph.
      mesh: The devices over which nodes are cut.
      model: Structure of the model.
      placed: What the model reads of the graph, on the device.
      metric: What scores of a split have beside their loss: "accuracy" of classes, "auc" of tasks.
    """

    experiment: GraphExperiment
    task: GraphTask
    mesh: Mesh
    model: ModelShape
    placed: Any
    metric: Literal["accuracy", "auc"]

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer."""
        return self.experiment.optimizer.build(self.experiment.steps)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Where parameters and batches lie: everywhere, whole."""
        return meshes.replicated(self.mesh)

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        return jax.tree.map(lambda leaf: with_sharding(leaf, self.replicated), jax.eval_shape(self._create))

    def init(self) -> TrainState:
        """A fresh state, equal for equal seeds."""
        return jax.jit(self._create, out_shardings=self.replicated)()

    @functools.cached_property
    def train_step(self) -> Any:
        """jitted (state, placed graph, batch) -> (state, mean loss of the batch); the state is donated."""
        return jax.jit(self._train_step, donate_argnums=0, out_shardings=self.replicated)

    @functools.cached_property
    def score(self) -> Any:
        """jitted (state, placed graph, {split: (nodes, labels)}) -> {split: (sum of losses, how many, scored)}.

        "scored" is what `metric` comes from: the number of nodes that are right, or the logits of all tasks.
        """
        return jax.jit(self._score, out_shardings=self.replicated)

    def evaluate(
        self, state: TrainState, data: NodeDataSet, splits: Sequence[str], placed: Any = None
    ) -> dict[str, dict[str, float]]:
        """Scores splits in one pass over the graph.

        Args:
          state: Whose parameters are scored.
          data: The graph.
          splits: Some of its splits.
          placed: What the model reads, such as fewer edges; None = `placed` of the program.
        Returns:
          By split: "loss", `metric`, and "weight", how many losses the first is the mean of.
        """
        batches = {split: data.whole(split) for split in splits}
        fields = {split: (batch.nodes, batch.labels) for split, batch in batches.items()}
        scored = self.score(state, self.placed if placed is None else placed, meshes.put(fields, self.replicated))
        result = {}
        for split, (total, count, found) in jax.device_get(scored).items():
            labels = batches[split].labels
            value = exact.mean_auc(labels, found) if self.metric == "auc" else int(found) / len(labels)
            result[split] = {"loss": float(total) / int(count), self.metric: value, "weight": int(count)}
        return result

    def take_metrics(self, state: TrainState) -> tuple[TrainState, dense_metrics.DenseSums]:
        """The state with zeroed sums, and the sums."""
        return dataclasses.replace(state, metrics=self._zero_metrics()), state.metrics

    @functools.cached_property
    def _zero_metrics(self) -> Any:
        return jax.jit(dense_metrics.zeros, out_shardings=self.replicated)

    def place_batch(self, batch: NodeBatch) -> dict[str, Any]:
        """A batch on the devices: each has all of it, or one of the parts of its neighbourhood."""
        fields = {"nodes": batch.nodes, "labels": batch.labels, "epoch": np.int32(batch.epoch)}
        around = self._place_parts([*map(_arrays, batch.neighborhoods)])
        return meshes.put(fields, self.replicated) | {"neighborhood": around}

    def _place_parts(self, parts: list[Any]) -> Any:
        """Neighbourhoods that this process drew, one on each of its devices; None where there are none."""
        if self.mesh.size == 1 or not parts:
            return jax.device_put(parts[0], self.replicated) if parts else None

        def stacked(*arrays: Any) -> jax.Array:
            own = np.stack(arrays)
            whole = (self.mesh.size, *own.shape[1:])
            return jax.make_array_from_process_local_data(meshes.everywhere(self.mesh), own, whole)

        return jax.tree.map(stacked, *parts)

    def _create(self) -> TrainState:
        key = jax.random.key(self.experiment.seed)
        model = init_model(self.task, nnx.Rngs(jax.random.fold_in(key, 0)), self.experiment.precision, self.mesh)
        params = self.model.take_apart(model)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            optimizer=self.transformation.init(params),
            tables={},
            metrics=dense_metrics.zeros(),
            key=jax.random.fold_in(key, 1),
        )

    def _train_step(self, state: TrainState, placed: Any, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(state.key, state.step)

        def mean_loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            # Graphs in blocks find their mesh here.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                total, weight = self.task.loss(self.model.put_together(params), placed, batch, key=key)
            return total / weight, (total, weight)

        (loss, (total, weight)), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        norm = gradient_scaling.global_norm(grads)
        params, optimizer = optimizer_step(self.transformation, grads, state)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            optimizer=optimizer,
            metrics=dense_metrics.update(state.metrics, total, weight, norm, None),
        )
        return state, loss

    def _score(
        self, state: TrainState, placed: Any, splits: dict[str, tuple[jax.Array, jax.Array]]
    ) -> dict[str, tuple[jax.Array, jax.Array, jax.Array]]:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            logits = self.task.logits(self.model.put_together(state.params), placed).astype(jnp.float32)
        found = {}
        for split, (nodes, labels) in splits.items():
            here = logits[nodes]
            scored = (here.argmax(1) == labels).sum() if self.metric == "accuracy" else here
            found[split] = (*self.task.cross_entropy(here, labels), scored)
        return found


def build(experiment: GraphExperiment, data: NodeDataSet, mesh: Mesh | None = None) -> GraphProgram:
    """Binds an experiment to a graph and its devices, and places the graph there.

    Args:
      experiment: The run; its `data` are not read again.
      data: The graph.
      mesh: Devices; None = those that the experiment names, or the first.
    Raises:
      UserError: model and graph do not fit, mini-batches do not divide over the devices, a dtype would not do what it
        says, checkpoints go by a metric that the labels do not have, a split has no such metric, or there are several
        processes and no mesh.
    """
    if mesh is None:
        mesh = one_device() if experiment.mesh is None else meshes.make_mesh(experiment.mesh)
    meshes.check_processes(mesh)
    check_precision(experiment.precision)
    metric = "accuracy" if data.schema.labels == "class" else "auc"
    _check_metric(experiment, data, metric)
    if data.fanouts:
        meshes.check_batch(data.batch_size, mesh)
    task = experiment.model.task(data.schema)
    abstract = nnx.eval_shape(lambda: init_model(task, nnx.Rngs(0), experiment.precision, mesh))
    placed = task.place(data.graph, data.fanouts, mesh)
    return GraphProgram(experiment, task, mesh, ModelShape.of(abstract), placed, metric)


def _check_metric(experiment: GraphExperiment, data: NodeDataSet, metric: str) -> None:
    best, what = experiment.checkpoints.best_metric, {"accuracy": "classes", "auc": "binary tasks"}[metric]
    if best not in ("loss", metric):
        raise UserError(
            f"checkpoints.best_metric must be 'loss' or {metric!r} where labels are {what}; got {best!r}. Set "
            f"checkpoints.best_metric={metric}."
        )
    for name in ("eval_split", "final_split"):
        split = getattr(experiment, name)
        if metric == "auc" and data.num_examples(split) and not exact.both_known(data.whole(split).labels).any():
            raise UserError(
                f"{name}: split {split!r} has no task with a positive and a negative label, and so no AUC. Name "
                "another split, or put other nodes in it."
            )


def one_device() -> Mesh:
    """A mesh of the first device.

    Raises:
      UserError: there are several processes, which have one each.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes train one graph over all of their devices. Set mesh=MeshShape, or "
            "leave --processes out."
        )
    return meshes.make_mesh(meshes.MeshShape(), jax.local_devices()[:1])


def _arrays(neighborhood: Any) -> dict[str, Any]:
    """A neighbourhood as a pytree of arrays; positions among edges in 32 bits where the graph allows it."""
    hops = [
        {name: _narrow(value) if name == "edges" else value for name, value in vars(hop).items()}
        for hop in neighborhood.hops
    ]
    return {"nodes": neighborhood.nodes, "hops": tuple(hops), "seeds": neighborhood.seeds}


def _narrow(edges: np.ndarray) -> np.ndarray:
    return edges.astype(np.int32) if jnp.result_type(int) == jnp.int32 else edges
