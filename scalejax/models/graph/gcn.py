"""GCN: graph convolutional networks (Kipf and Welling, ICLR 2017).

    H_0 = X        H_(l+1) = relu(A dropout(H_l) W_l + b_l), the last layer without relu

A holds the weights of edges, which the data set has normalised: D^-1/2 (A + I) D^-1/2 with "symmetric", the mean over a
row with "right". W is multiplied first, as its output is usually narrower than its input. Weights start as Glorot and
Bengio's uniform, biases at 0, as in PyG.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph.aggregation import Graph, aggregate
from scalejax.models.graph.layers import Network, NetworkConfig, glorot, widths
from scalejax.models.graph.task import NodeTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class GcnConfig(NetworkConfig):
    """Architecture."""

    def task(self, schema: GraphSchema) -> NodeTask:
        """Binds the model to a graph.

        Raises:
          UserError: edges have no weights.
        """
        if not schema.weighted:
            raise UserError(
                "GCN sums neighbours by the weights of edges, and this graph has none. Set data.normalization to "
                "symmetric or right."
            )
        return NodeTask(config=self, schema=schema)

    def build(self, schema: GraphSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Network:
        """The model for a graph."""
        sizes = itertools.pairwise(widths(schema, self.layers, self.hidden))
        return Network([GcnLayer(a, b, rngs, dropout=self.dropout, dtypes=dtypes) for a, b in sizes], jax.nn.relu)


class GcnLayer(nnx.Module):
    """y = A dropout(x) W + b."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, *, dropout: float, dtypes: nn.Dtypes = nn.FLOAT32):
        self.kernel = nnx.Param(
            glorot(rngs.params(), (inputs, outputs), dtypes.params), logical_axes=("input", "hidden")
        )
        self.bias = nnx.Param(jnp.zeros(outputs, dtypes.params), logical_axes=("hidden",))
        self.dropout, self.compute_dtype = dropout, dtypes.compute

    def __call__(self, x: jax.Array, graph: Graph, *, key: jax.Array | None = None) -> jax.Array:
        """x: float[M, inputs]; graph: N rows that read M. Returns compute_dtype[N, outputs]."""
        x = nn.dropout(x, self.dropout, key).astype(self.compute_dtype)
        h = x @ self.kernel[...].astype(self.compute_dtype)
        y = aggregate(graph, h, reduce="sum").astype(self.compute_dtype)
        return y + self.bias[...].astype(self.compute_dtype)[None, :]
