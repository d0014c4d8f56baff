"""What training minimises: the cross-entropy of the classes of nodes."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalejax.data.graphs import GraphSchema, NodeGraph
from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm import SparsePlan
from scalejax.models.graph.aggregation import Sampling, graph_of, of_hop
from scalejax.parallel.graph import ShardedGraph, pad_nodes
from scalejax.parallel.mesh import everywhere


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
      train: What training reads.
      score: What scoring reads.
    """

    features: jax.Array
    train: SparsePlan | ShardedGraph
    score: SparsePlan | ShardedGraph


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
          mesh: Nodes and their rows are cut over its devices, if there are several.
        Raises:
          UserError: fan-outs do not fit the layers or the mesh, or edges would be drawn twice.
        """
        if fanouts and mesh.size > 1:
            raise UserError(
                f"data.fanouts draws mini-batches for one device, and the mesh has {mesh.size}. Set --set mesh=none, "
                "or --set data.fanouts=[] to read the whole graph, cut over the devices."
            )
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
        blocks = mesh if mesh.size > 1 else None
        train = graph_of(graph.adjacency, self.config.train_sampling, blocks)
        same = self.config.train_sampling == self.config.eval_sampling
        score = train if same else graph_of(graph.adjacency, self.config.eval_sampling, blocks)
        features = pad_nodes(jnp.asarray(graph.features, jnp.float32), mesh.size)
        return Placed(jax.device_put(features, everywhere(mesh)), train, score)

    def logits(self, model: Any, placed: Placed) -> jax.Array:
        """float[N, C] of all nodes, nothing random, over what scoring reads."""
        return model(placed.features, placed.score)

    def loss(
        self, model: Any, placed: Placed, batch: dict[str, Any], *, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sum of cross-entropies over the nodes of a batch, and their number.

        Args:
          model: What `init` returned.
          placed: What `place` returned.
          batch: "nodes" and "labels" int32[B], and "neighborhood" as `data.graphs.Neighborhood` has it, or None.
          key: Drives dropout; None = evaluation.
        """
        around = batch["neighborhood"]
        if around is None:
            logits = model(placed.features, placed.train, key=key)[batch["nodes"]]
        else:
            assert isinstance(placed.train, SparsePlan)  # `place` refuses fan-outs on several devices
            values, rows = placed.train.csr.values, (around["nodes"].shape[0], *(_rows(h) for h in around["hops"]))
            graphs = tuple(
                of_hop(**hop, sources=sources, values=values)
                for hop, sources in zip(around["hops"], rows[:-1], strict=True)
            )
            logits = model(placed.features[around["nodes"]], graphs, key=key)[around["seeds"]]
        return cross_entropy(logits, batch["labels"]).sum(), jnp.asarray(batch["labels"].shape[0], jnp.float32)

    def flops_per_step(self, nodes: int) -> int:
        """FLOPs of the matrices, forward and backward, 6 a multiply-accumulate; aggregation is bound by memory."""
        return 6 * nodes * self.config.products(self.schema)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """float32[B] of logits [B, C] and labels int32[B]."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


def _rows(hop: dict[str, jax.Array]) -> int:
    return hop["indices"].shape[0]
