"""The task of graph networks: cross-entropy of the classes of nodes, or of their labels in binary tasks."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from scalejax.data.graphs import GraphSchema, Neighborhood, NodeBatch, NodeDataSet, NodeGraph
from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm import SparsePlan
from scalejax.kernels.types import AnyArray
from scalejax.models.graph.aggregation import Draws, Sampling, ambient_mesh, blocks_of, draws_of, graph_of, of_hop
from scalejax.nn import counts
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.graph import ShardedGraph
from scalejax.parallel.mesh import check_batch, everywhere, local_positions, put, replicated
from scalejax.train.metrics import exact
from scalejax.train.metrics.classification import Accuracy, MeanAuc
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import Metric
from scalejax.train.task import Batch, Field, Gather, Keys, Loss, TaskBase, Work

Tree = TypeVar("Tree")


class GraphConfig(Protocol):
    """The part of the config of an architecture that a task knows."""

    @property
    def layers(self) -> int: ...

    @property
    def train_sampling(self) -> Sampling | None: ...

    @property
    def eval_sampling(self) -> Sampling | None: ...

    def build(self, schema: GraphSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedGraph:
    """A graph on the devices, or as arrays or shapes on the way there.

    Attributes:
      features: float32[N, F], padded where the graph is in blocks.
      score: What scoring reads.
      train: What training reads, where that is a graph of all nodes; None = mini-batches bring their own.
      weights: float32[E] of all edges, which mini-batches pick from; None = there are none, or no mini-batches.
    """

    features: AnyArray
    score: SparsePlan | ShardedGraph
    train: SparsePlan | ShardedGraph | Draws | None
    weights: AnyArray | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeTask(TaskBase):
    """Classification of nodes with a graph network; a `train.task.Task`.

    All devices see all nodes of a batch, or each a part of a mini-batch with what surrounds it: graphs in blocks have
    shard_maps of their own.

    Attributes:
      config: Architecture.
      schema: Sizes of the graph.
    """

    config: GraphConfig
    schema: GraphSchema
    unit: str = "nodes"
    planned_from: Literal["schema", "data"] = "data"

    def fields(self) -> dict[str, object]:
        """Nodes and labels of a batch, and what surrounds its parts, see `data.graphs.NodeBatch`."""
        tasks = () if self.schema.labels == "class" else (self.schema.outputs,)
        return {
            "nodes": Field(shape=(None,), dtype="int32", scope="step"),
            "labels": Field(shape=(None, *tasks), dtype="int32", scope="step"),
            "epoch": Field(shape=(), dtype="int32", scope="step"),
            "neighborhood": {
                "nodes": _of_device(None),
                "hops": tuple(self._hop() for _ in range(self.config.layers)),
                "seeds": _of_device(None),
            },
        }

    def _hop(self) -> dict[str, Field]:
        own = {"indices": _of_device(None, None), "edges": _of_device(None, None, dtype=_wide())}
        return own | {name: _of_device(None) for name in ("counts", "degrees")}

    def check(self, experiment: Any, mesh: Mesh, data: NodeDataSet | None = None) -> None:
        """Refuses strategies that cut examples: nodes are not independent of each other.

        Raises:
          UserError: names the field.
        """
        strategy, gradients = experiment.strategy, experiment.gradients
        if strategy.form == "explicit":
            raise UserError(
                f"strategy={type(strategy).__name__} in its explicit form cuts examples over devices, but "
                f"{type(self.config).__name__} reads a graph that is cut by its nodes. Use "
                "strategy=Fsdp(form='implicit')."
            )
        if gradients.microbatch is not None:
            raise UserError(
                f"gradients.microbatch={gradients.microbatch!r} cuts batches into parts, but a step of "
                f"{type(self.config).__name__} is one pass over a graph. Leave it None, or set data.fanouts for "
                "mini-batches."
            )
        if experiment.data.fanouts:
            check_batch(experiment.data.batch_size, mesh)
        if data is None or self.schema.labels == "class":
            return
        for name in ("split", "final_split"):
            split = getattr(experiment.evaluation, name)
            if data.num_examples(split) and not exact.both_known(data.whole(split).labels).any():
                raise UserError(
                    f"evaluation.{name}: split {split!r} has no task with a positive and a negative label, and so no "
                    "AUC. Name another split, or put other nodes in it."
                )

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        """Builds the model."""
        return self.config.build(self.schema, rngs, dtypes)

    def constants(self, data: NodeDataSet, mesh: Mesh) -> PlacedGraph:
        """See `place`.

        Raises:
          UserError: as `place`.
        """
        return self.place(data.graph, data.fanouts, mesh)

    def host_fields(self, batch: NodeBatch, drawn: Mapping[str, object]) -> dict[str, object]:
        """Arrays of a batch; parts of its neighbourhood stacked, one for each device of this process."""
        parts = [_arrays(part) for part in batch.neighborhoods]
        around = jax.tree.map(lambda *arrays: np.stack(arrays), *parts) if parts else None
        return {
            "nodes": batch.nodes.astype(np.int32),
            "labels": batch.labels.astype(np.int32),
            "epoch": np.int32(batch.epoch),
            "neighborhood": around,
            **drawn,
        }

    def train_batches(self, data: NodeDataSet, mesh: Mesh, start_example: int) -> Iterator[NodeBatch]:
        """Batches in as many parts as there are devices."""
        return data.train_batches(start_example=start_example, parts=mesh.size, local_parts=local_positions(mesh))

    def place(self, graph: NodeGraph, fanouts: tuple[int, ...], mesh: Mesh) -> PlacedGraph:
        """Plans what training and scoring read, on the host, once, and puts it on the devices.

        Args:
          graph: The graph, with features.
          fanouts: Of mini-batches, () where there are none.
          mesh: Nodes and their rows are cut over its devices, if there are several. Each of several processes passes
            the same graph and plans all of it.
        Raises:
          UserError: fan-outs do not fit the layers, or edges would be drawn twice.
        """
        return _laid_out(self._made(graph, fanouts, mesh.size), mesh, put)

    def abstract_constants(self, data: NodeDataSet, mesh: Mesh) -> PlacedGraph:
        """What `constants` places, as shapes: made on the host, whatever devices the mesh has.

        Raises:
          UserError: as `place`.
        """
        return _laid_out(self._made(data.graph, data.fanouts, mesh.size), mesh, _shapes)

    def _made(self, graph: NodeGraph, fanouts: tuple[int, ...], devices: int) -> PlacedGraph:
        """The graph for so many devices, before it is placed."""
        self._check_draws(fanouts)
        config, adjacency, drawn = self.config, graph.adjacency, self.config.train_sampling

        def read(sampling: Sampling | None) -> SparsePlan | ShardedGraph:
            return blocks_of(adjacency, sampling, devices) if devices > 1 else graph_of(adjacency, sampling)

        features = np.asarray(graph.features, np.float32)
        if missing := -len(features) % devices:
            features = np.pad(features, ((0, missing), (0, 0)))
        score = read(config.eval_sampling)
        if fanouts:
            return PlacedGraph(features, score, None, adjacency.values)
        if drawn is not None and drawn.draws > 1:
            return PlacedGraph(features, score, draws_of(adjacency, drawn, devices), None)
        return PlacedGraph(features, score, score if drawn == config.eval_sampling else read(drawn), None)

    def _check_draws(self, fanouts: tuple[int, ...]) -> None:
        if fanouts and len(fanouts) != self.config.layers:
            raise UserError(
                f"data.fanouts must have one number for each of the {self.config.layers} layers, outermost first; got "
                f"{fanouts}."
            )
        if fanouts and self.config.train_sampling is not None:
            raise UserError(
                "data.fanouts and model.train_sampling both draw the edges that training reads. Set one of them: "
                "--set model.train_sampling=none, or --set data.fanouts=[]."
            )

    def logits(self, model: Any, placed: PlacedGraph) -> jax.Array:
        """float[N, C] of all nodes, nothing random, over what scoring reads."""
        return model(placed.features, placed.score)

    def loss(self, model: Any, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """Sum of cross-entropies over the nodes of a batch, and how many; see `cross_entropy`.

        Args:
          model: What `init` returned, its parameters whole.
          batch: Nodes, and the graph as `place` returned it; "neighborhood" is None where all of that is read.
          keys: Drive dropout; None = evaluation.
          gather: Not used: the step fetches parameters.
        Returns:
          The sum, the number, and the output "logits", float32[B, C].
        """
        del gather
        placed, around, key = batch.constants, batch.fields["neighborhood"], None if keys is None else keys.examples
        if batch.purpose == "evaluation":
            logits = self.logits(model, placed)[batch["nodes"]]
        elif placed.train is not None:
            read = placed.train.of_epoch(batch["epoch"]) if isinstance(placed.train, Draws) else placed.train
            logits = model(placed.features, read, key=key)[batch["nodes"]]
        elif around["nodes"].shape[0] == 1:
            around = jax.tree.map(lambda array: array[0], around)
            logits = _around(model, placed.features[around["nodes"]], around, placed.weights, key)
        else:
            logits = _around_in_parts(model, placed, around, key)
        total, count = cross_entropy(logits, batch["labels"])
        return Loss(total, count.astype(total.dtype), outputs={"logits": logits.astype(jnp.float32)})

    def weight(self, batch: Batch) -> jax.Array:
        """Labels that are known."""
        return (batch["labels"] >= 0).sum().astype(jnp.float32)

    def metrics(self) -> tuple[Metric, ...]:
        """Accuracy of classes, or the mean AUC of tasks, and the loss."""
        if self.schema.labels == "class":
            return (Accuracy(unit="nodes"), MeanLoss(unit="nodes"))
        return (MeanAuc(), MeanLoss(unit="labels"))

    def eval_batches(self, data: NodeDataSet, mesh: Mesh, split: str) -> Iterator[NodeBatch]:
        """One batch of all nodes of the split: scoring reads the whole graph."""
        del mesh
        yield data.whole(split)

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """Of some nodes; FLOPs depend on how many nodes of the graph a step reads, see `describe`."""
        return Work(flops=0, count=shapes["nodes"][0])

    def describe(self, data: NodeDataSet) -> dict[str, object]:
        """Sizes of the graph, and FLOPs of a step."""
        return {
            "nodes": self.schema.nodes,
            "edges": data.graph.adjacency.num_edges,
            "flops_per_step": self.flops_per_step(data.nodes_per_step),
        }

    def flops_per_step(self, nodes: int) -> int:
        """FLOPs of the matrices if all layers see so many nodes, forward and backward, 6 a multiply-accumulate.

        Each matrix meets each node once. Aggregation is bound by memory and not counted, nor is it that inner layers of
        mini-batches see fewer nodes.
        """
        return 6 * nodes * counts.parameters(counts.abstract(self.config.build, self.schema), axes=2)


def _laid_out(made: PlacedGraph, mesh: Mesh, lay: Callable[[Any, NamedSharding], Any]) -> PlacedGraph:
    """A graph as `lay` lays it on the devices: nodes and blocks over all of them, the rest everywhere."""
    cut, whole = everywhere(mesh), replicated(mesh)
    of_graph = cut if mesh.size > 1 else whole
    score = lay(made.score, of_graph)
    # One graph for both is placed once.
    train = score if made.train is made.score else lay(made.train, of_graph)
    return PlacedGraph(lay(made.features, cut), score, train, lay(made.weights, whole))


def _shapes(tree: Tree, sharding: NamedSharding) -> Tree:
    def shape(x: AnyArray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding)

    return jax.tree.map(shape, tree)


def _of_device(*shape: int | None, dtype: DTypeLike = "int32") -> Field:
    return Field(shape=shape, dtype=dtype, scope="device")


def _wide() -> np.dtype:
    """The dtype of positions among edges: 64 bits where jax has them."""
    return np.dtype(jnp.result_type(int))


def _arrays(neighborhood: Neighborhood) -> dict[str, object]:
    """A neighbourhood as a pytree of arrays."""
    hops = [
        {name: value.astype(_wide()) if name == "edges" else value for name, value in vars(hop).items()}
        for hop in neighborhood.hops
    ]
    return {"nodes": neighborhood.nodes, "hops": tuple(hops), "seeds": neighborhood.seeds}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of cross-entropies in float32, or float64 for float64, and how many there are.

        int32[B], a class each       logsumexp(logits[b]) - logits[b, label]           one for each node
        int32[B, T], binary tasks    -log sigmoid(l) for 1, -log sigmoid(-l) for 0     one for each known label

    Args:
      logits: float[B, C], or float[B, T].
      labels: As above; -1 = the label of a task that is not known.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if labels.ndim == 1:
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - picked).sum(), jnp.asarray(labels.shape[0], jnp.int32)
    losses = jax.nn.softplus(jnp.where(labels == 1, -logits, logits))
    known = labels >= 0
    return jnp.where(known, losses, 0).sum(), known.sum(dtype=jnp.int32)


def _around(
    model: nnx.Module, x: AnyArray, around: dict[str, Any], weights: AnyArray | None, key: jax.Array | None
) -> jax.Array:
    """Logits of the seeds of a neighbourhood whose nodes have features x."""
    rows = (x.shape[0], *(hop["indices"].shape[0] for hop in around["hops"]))
    hops = zip(around["hops"], rows[:-1], strict=True)
    graphs = tuple(of_hop(**hop, sources=sources, values=weights) for hop, sources in hops)
    return model(x, graphs, key=key)[around["seeds"]]


def _around_in_parts(
    model: nnx.Module, placed: PlacedGraph, around: dict[str, Any], key: jax.Array | None
) -> jax.Array:
    """Logits of the seeds, float[B, C], where each device has a part of the mini-batch, and all parameters."""
    mesh = ambient_mesh()
    axes = tuple(mesh.axis_names)
    structure, params = nnx.split(model)
    x = placed.features[around["nodes"]]  # parts n F, from whatever devices have them

    def of_part(
        params: nnx.State[Any, Any],
        x: AnyArray,
        around: dict[str, Any],
        weights: AnyArray | None,
        key: jax.Array | None,
    ) -> jax.Array:
        own_x, own = jax.tree.map(lambda array: array[0], (x, around))
        own_key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axes))
        return _around(nnx.merge(structure, params), own_x, own, weights, own_key)

    specs = (P(), P(axes), P(axes), P(), P())
    cut = jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=False)
    return cut(params, x, around, placed.weights, key)
