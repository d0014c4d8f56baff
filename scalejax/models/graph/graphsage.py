"""GraphSAGE with the mean aggregator (Hamilton et al., NeurIPS 2017).

    h'_v = relu(h_v W_self + mean_{u in N(v)} h_u W_neighbors + b), the last layer without relu

Two matrices, as in PyG and DGL; the paper concatenates h_v and the mean before one matrix, which is the same. A node
without neighbours adds nothing. Dropout is on the input and on hidden layers. The paper's normalisation of h'_v to
length 1 is left out, as DGL's and OGB's examples do.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph.aggregation import Graph, aggregate, num_rows
from scalejax.models.graph.layers import Network, NetworkConfig, glorot, widths
from scalejax.models.graph.task import NodeTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSageConfig(NetworkConfig):
    """Architecture."""

    def task(self, schema: GraphSchema) -> NodeTask:
        """Binds the model to a graph.

        Raises:
          UserError: edges have weights, which a mean would leave out.
        """
        if schema.weighted:
            raise UserError(
                "GraphSAGE takes the mean of neighbours and would leave the weights of edges out. Set "
                "data.normalization=none."
            )
        return NodeTask(config=self, schema=schema)

    def build(self, schema: GraphSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Network:
        """The model for a graph."""
        sizes = itertools.pairwise(widths(schema, self.layers, self.hidden))
        return Network([SageLayer(a, b, rngs, dropout=self.dropout, dtypes=dtypes) for a, b in sizes], jax.nn.relu)


class SageLayer(nnx.Module):
    """y = x W_self + mean(x) W_neighbors + b, of x after dropout."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, *, dropout: float, dtypes: nn.Dtypes = nn.FLOAT32):
        self.own = nnx.Param(glorot(rngs.params(), (inputs, outputs), dtypes.params), logical_axes=("input", "hidden"))
        self.neighbors = nnx.Param(
            glorot(rngs.params(), (inputs, outputs), dtypes.params), logical_axes=("input", "hidden")
        )
        self.bias = nnx.Param(jnp.zeros(outputs, dtypes.params), logical_axes=("hidden",))
        self.dropout, self.compute_dtype = dropout, dtypes.compute

    def __call__(self, x: jax.Array, graph: Graph, *, key: jax.Array | None = None) -> jax.Array:
        """x: float[M, inputs]; graph: N rows that read M. Returns compute_dtype[N, outputs]."""
        x = nn.dropout(x, self.dropout, key).astype(self.compute_dtype)
        own, neighbors, bias = (p[...].astype(self.compute_dtype) for p in (self.own, self.neighbors, self.bias))
        if own.shape[1] < own.shape[0]:  # the mean of products is the product of the mean; aggregate the narrower
            mean = aggregate(graph, x @ neighbors, reduce="mean").astype(self.compute_dtype)
        else:
            mean = aggregate(graph, x, reduce="mean").astype(self.compute_dtype) @ neighbors
        return x[: num_rows(graph)] @ own + mean + bias[None, :]
