"""Builds the compiled functions of a run over one graph.

The graph is placed on the devices once and handed to every step: what it is normalised to and which edges are read was
settled on the host. A step takes the gradient of the mean loss over the labelled nodes of its batch; scoring is one
pass over the graph, from which all splits are read.
"""

import dataclasses
import functools
from typing import Any

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
from scalejax.train import dense_metrics
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
    """

    experiment: GraphExperiment
    task: GraphTask
    mesh: Mesh
    model: ModelShape
    placed: Any

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
        """jitted (state, placed graph, nodes, labels) -> (sum of losses, nodes that are right), of whole splits."""
        return jax.jit(self._score, out_shardings=self.replicated)

    def take_metrics(self, state: TrainState) -> tuple[TrainState, dense_metrics.DenseSums]:
        """The state with zeroed sums, and the sums."""
        fresh = jax.device_put(dense_metrics.zeros(), self.replicated)
        return dataclasses.replace(state, metrics=fresh), state.metrics

    def place_batch(self, batch: NodeBatch) -> dict[str, Any]:
        """A batch on the devices: each has all of it, or one of the parts of its neighbourhood."""
        fields = {"nodes": batch.nodes, "labels": batch.labels, "epoch": np.int32(batch.epoch)}
        around, where = [_arrays(part) for part in batch.neighborhoods], self.replicated
        if len(around) > 1:
            around, where = [jax.tree.map(lambda *parts: np.stack(parts), *around)], meshes.everywhere(self.mesh)
        neighborhood = jax.device_put(around[0], where) if around else None
        return jax.device_put(fields, self.replicated) | {"neighborhood": neighborhood}

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
        self, state: TrainState, placed: Any, nodes: dict[str, jax.Array], labels: dict[str, jax.Array]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            logits = self.task.logits(self.model.put_together(state.params), placed).astype(jnp.float32)
        found = {}
        for split, chosen in nodes.items():
            here = logits[chosen]
            losses = optax.softmax_cross_entropy_with_integer_labels(here, labels[split])
            found[split] = (losses.sum(), (here.argmax(1) == labels[split]).sum())
        return found


def build(experiment: GraphExperiment, data: NodeDataSet, mesh: Mesh | None = None) -> GraphProgram:
    """Binds an experiment to a graph and its devices, and places the graph there.

    Args:
      experiment: The run; its `data` are not read again.
      data: The graph.
      mesh: Devices; None = those that the experiment names, or the first.
    Raises:
      UserError: model and graph do not fit, mini-batches do not divide over the devices, a dtype would not do what it
        says, or there are several processes.
    """
    if jax.process_count() > 1:
        raise UserError("a graph is trained by one process. Leave --processes out.")
    if mesh is None:
        mesh = one_device() if experiment.mesh is None else meshes.make_mesh(experiment.mesh)
    check_precision(experiment.precision)
    if data.fanouts:
        meshes.check_batch(data.batch_size, mesh)
    task = experiment.model.task(data.schema)
    abstract = nnx.eval_shape(lambda: init_model(task, nnx.Rngs(0), experiment.precision, mesh))
    placed = task.place(data.graph, data.fanouts, mesh)
    return GraphProgram(experiment, task, mesh, ModelShape.of(abstract), placed)


def one_device() -> Mesh:
    """A mesh of the first device."""
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
