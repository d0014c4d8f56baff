"""GCN: graph convolutional networks (Kipf and Welling, ICLR 2017).

    H_0 = X        H_(l+1) = relu(A dropout(H_l) W_l + b_l), the last layer without relu

A holds the weights of edges, which the data set has normalised: D^-1/2 (A + I) D^-1/2 with "symmetric", the mean over a
row with "right". W is multiplied first, as its output is usually narrower than its input. Weights start as Glorot and
Bengio's uniform, biases at 0, as in PyG.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph.aggregation import Graph, Sampling, aggregate
from scalejax.models.graph.layers import glorot, layer_graphs, widths
from scalejax.models.graph.task import NodeTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class GcnConfig:
    """Architecture.

    Attributes:
      layers: Graph convolutions.
      hidden: Width between them.
      dropout: Share of the inputs of each layer that is zeroed in training.
      train_sampling: Edges that training reads; None = all.
      eval_sampling: Edges that scoring reads; None = all.
    """

    layers: int = 2
    hidden: int = 16
    dropout: float = 0.5
    train_sampling: Sampling | None = None
    eval_sampling: Sampling | None = None

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

    def build(self, schema: GraphSchema, rngs: nnx.Rngs, **dtypes: Any) -> "Gcn":
        """The model for a graph."""
        return Gcn(self, schema, rngs, **dtypes)

    def products(self, schema: GraphSchema) -> int:
        """Multiply-accumulates of the matrices, a node."""
        sizes = widths(schema, self.layers, self.hidden)
        return sum(a * b for a, b in itertools.pairwise(sizes))


class GcnLayer(nnx.Module):
    """y = A x W + b."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any):
        self.kernel = nnx.Param(glorot(rngs.params(), (inputs, outputs), param_dtype), logical_axes=("input", "hidden"))
        self.bias = nnx.Param(jnp.zeros(outputs, param_dtype), logical_axes=("hidden",))
        self.compute_dtype = jnp.dtype(compute_dtype)

    def __call__(self, x: jax.Array, graph: Graph) -> jax.Array:
        """x: float[M, inputs]; graph: N rows that read M. Returns compute_dtype[N, outputs]."""
        h = x.astype(self.compute_dtype) @ self.kernel[...].astype(self.compute_dtype)
        y = aggregate(graph, h, reduce="sum").astype(self.compute_dtype)
        return y + self.bias[...].astype(self.compute_dtype)[None, :]


class Gcn(nnx.Module):
    """The whole network."""

    def __init__(
        self,
        config: GcnConfig,
        schema: GraphSchema,
        rngs: nnx.Rngs,
        *,
        param_dtype: Any = jnp.float32,
        compute_dtype: Any = jnp.float32,
    ):
        sizes = widths(schema, config.layers, config.hidden)
        self.layers = nnx.List(
            [
                GcnLayer(a, b, rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)
                for a, b in itertools.pairwise(sizes)
            ]
        )
        self.dropout = config.dropout

    def __call__(self, x: jax.Array, graph: Graph | tuple[Graph, ...], *, key: jax.Array | None = None) -> jax.Array:
        """Logits.

        Args:
          x: float[M, F], features of the nodes that the first layer reads.
          graph: What every layer reads, or one graph a layer, outermost first.
          key: Drives dropout; None = evaluation.
        Returns:
          float[N, classes] of the rows of the last graph.
        """
        for l, (layer, read) in enumerate(zip(self.layers, layer_graphs(graph, len(self.layers)), strict=True)):
            x = nn.dropout(x, self.dropout, None if key is None else jax.random.fold_in(key, l))
            x = layer(x, read)  # M F -> N hidden
            if l + 1 < len(self.layers):
                x = jax.nn.relu(x)
        return x
