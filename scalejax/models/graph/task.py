"""What training minimises: the cross-entropy of the classes of nodes, or of their labels in binary tasks."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalejax.data.graphs import GraphSchema, NodeGraph
from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm import SparsePlan
from scalejax.models.graph.aggregation import Draws, Sampling, ambient_mesh, draws_of, graph_of, of_hop
from scalejax.parallel.graph import ShardedGraph, pad_nodes
from scalejax.parallel.mesh import everywhere, put, replicated


class GraphConfig(Protocol):
    """What a task knows of an architecture."""

    @property
    def layers(self) -> int: ...

    @property
    def train_sampling(self) -> Sampling | None: ...

    @property
    def eval_sampling(self) -> Sampling | None: ...

    def build(self, schema: GraphSchema, rngs: nnx.Rngs, **dtypes: Any) -> nnx.Module: ...

    def products(self, schema: GraphSchema) -> int: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """A graph on the devices.

    Attributes:
      features: float32[N, F], padded where the graph is in blocks.
      score: What scoring reads.
      train: What training reads, where that is a graph of all nodes; None = mini-batches bring their own.
      weights: float32[E] of all edges, which mini-batches pick from; None = there are none, or no mini-batches.
    """

    features: jax.Array
    score: SparsePlan | ShardedGraph
    train: SparsePlan | ShardedGraph | Draws | None
    weights: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeTask:
    """Classification of nodes with a graph network; implements `train.protocols.GraphTask`.

    Attributes:
      config: Architecture.
      schema: Sizes of the graph.
    """

    config: GraphConfig
    schema: GraphSchema

    def init(self, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> nnx.Module:
        """Builds the model."""
        return self.config.build(self.schema, rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)

    def place(self, graph: NodeGraph, fanouts: tuple[int, ...], mesh: Mesh) -> Placed:
        """Plans what training and scoring read, on the host, once, and puts it on the devices.

        Args:
          graph: The graph, with features.
          fanouts: Of mini-batches, () where there are none.
          mesh: Nodes and their rows are cut over its devices, if there are several. Each of several processes passes
            the same graph and plans all of it.
        Raises:
          UserError: fan-outs do not fit the layers, or edges would be drawn twice.
        """
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
        blocks, config, adjacency = mesh if mesh.size > 1 else None, self.config, graph.adjacency
        features = put(pad_nodes(jnp.asarray(graph.features, jnp.float32), mesh.size), everywhere(mesh))
        score = graph_of(adjacency, config.eval_sampling, blocks)
        if fanouts:
            weights = None if adjacency.values is None else put(adjacency.values, replicated(mesh))
            return Placed(features, score, None, weights)
        drawn = config.train_sampling
        if drawn is not None and drawn.draws > 1:
            return Placed(features, score, draws_of(adjacency, drawn, blocks), None)
        train = score if drawn == config.eval_sampling else graph_of(adjacency, drawn, blocks)
        return Placed(features, score, train, None)

    def logits(self, model: Any, placed: Placed) -> jax.Array:
        """float[N, C] of all nodes, nothing random, over what scoring reads."""
        return model(placed.features, placed.score)

    def cross_entropy(self, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sum of cross-entropies, how many) of logits [B, C] and labels: see `cross_entropy`."""
        return cross_entropy(logits, labels)

    def loss(
        self, model: Any, placed: Placed, batch: dict[str, Any], *, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sum of cross-entropies over the nodes of a batch, and how many.

        Args:
          model: What `init` returned.
          placed: What `place` returned.
          batch: "nodes" int32[B]; "labels" as in `data.graphs.NodeBatch`; "epoch" int32[]; "neighborhood", of a
            mini-batch as `data.graphs.Neighborhood` has it, or None. Parts of one, one for each device of the
            ambient mesh, are arrays with a first axis of parts.
          key: Drives dropout; None = evaluation.
        """
        around = batch["neighborhood"]
        if placed.train is not None:
            read = placed.train.of_epoch(batch["epoch"]) if isinstance(placed.train, Draws) else placed.train
            logits = model(placed.features, read, key=key)[batch["nodes"]]
        elif around["nodes"].ndim == 1:
            logits = _around(model, placed.features[around["nodes"]], around, placed.weights, key)
        else:
            logits = _around_in_parts(model, placed, around, key)
        return cross_entropy(logits, batch["labels"])

    def flops_per_step(self, nodes: int) -> int:
        """FLOPs of the matrices if all layers see so many nodes, forward and backward, 6 a multiply-accumulate.

        Aggregation is bound by memory and not counted, nor is it that inner layers of mini-batches see fewer nodes.
        """
        return 6 * nodes * self.config.products(self.schema)


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


def _around(model: Any, x: jax.Array, around: dict[str, Any], weights: jax.Array | None, key: Any) -> jax.Array:
    """Logits of the seeds of a neighbourhood whose nodes have features x."""
    rows = (x.shape[0], *(hop["indices"].shape[0] for hop in around["hops"]))
    hops = zip(around["hops"], rows[:-1], strict=True)
    graphs = tuple(of_hop(**hop, sources=sources, values=weights) for hop, sources in hops)
    return model(x, graphs, key=key)[around["seeds"]]


def _around_in_parts(model: Any, placed: Placed, around: dict[str, Any], key: Any) -> jax.Array:
    """Logits of the seeds, float[B, C], where each device has a part of the mini-batch, and all parameters."""
    mesh = ambient_mesh()
    axes = tuple(mesh.axis_names)
    structure, params = nnx.split(model)
    x = placed.features[around["nodes"]]  # parts n F, from whatever devices have them

    def of_part(params: Any, x: jax.Array, around: Any, weights: Any, key: Any) -> jax.Array:
        own_x, own = jax.tree.map(lambda array: array[0], (x, around))
        own_key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axes))
        return _around(nnx.merge(structure, params), own_x, own, weights, own_key)

    specs = (P(), P(axes), P(axes), P(), P())
    cut = jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=False)
    return cut(params, x, around, placed.weights, key)
