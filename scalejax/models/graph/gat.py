"""GAT: graph attention networks (Velickovic et al., ICLR 2018).

    e_ij = leaky_relu(a_source . (h_j W) + a_target . (h_i W))        alpha_i = softmax_j(e_ij) over the row of i
    h'_i = elu(concatenation over heads of sum_j alpha_ij h_j W + b); of the last layer the mean over heads, no elu

Rows need self loops (`data.self_loops="add"`), as the paper has them. Weights of edges are not looked at.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph.aggregation import Graph, attend, num_rows
from scalejax.models.graph.layers import Network, NetworkConfig, glorot
from scalejax.models.graph.task import NodeTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatConfig(NetworkConfig):
    """Architecture; the defaults are the paper's for Cora.

    Attributes:
      hidden: Width of a head.
      heads: Heads of all layers but the last.
      out_heads: Heads of the last, whose mean is taken.
      slope: Of the leaky ReLU.
      dropout: Of attention weights, too.
    """

    hidden: int = 8
    heads: int = 8
    out_heads: int = 1
    slope: float = 0.2
    dropout: float = 0.6

    def task(self, schema: GraphSchema) -> NodeTask:
        """Binds the model to a graph.

        Raises:
          UserError: edges have weights, which attention would leave out.
        """
        if schema.weighted:
            raise UserError(
                "GAT weighs edges itself and would leave their own weights out. Set data.normalization=none."
            )
        return NodeTask(config=self, schema=schema)

    def build(self, schema: GraphSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Network:
        """The model for a graph."""
        layers = [
            GatLayer(
                *shape,
                rngs,
                combine="mean" if l + 1 == self.layers else "concatenate",
                slope=self.slope,
                dropout=self.dropout,
                dtypes=dtypes,
            )
            for l, shape in enumerate(self.shapes(schema))
        ]
        return Network(layers, jax.nn.elu)

    def shapes(self, schema: GraphSchema) -> list[tuple[int, int, int]]:
        """(inputs, heads, width of a head) of each layer."""
        inner = self.heads * self.hidden
        inputs = [schema.features, *[inner] * (self.layers - 1)]
        last = self.layers - 1
        return [
            (n, self.out_heads, schema.outputs) if l == last else (n, self.heads, self.hidden)
            for l, n in enumerate(inputs)
        ]


class GatLayer(nnx.Module):
    """Attention over the row of each node, several heads side by side."""

    def __init__(
        self,
        inputs: int,
        heads: int,
        outputs: int,
        rngs: nnx.Rngs,
        *,
        combine: Literal["concatenate", "mean"],
        slope: float,
        dropout: float,
        dtypes: nn.Dtypes = nn.FLOAT32,
    ):
        self.kernel = nnx.Param(
            glorot(rngs.params(), (inputs, heads * outputs), dtypes.params), logical_axes=("input", "hidden")
        )
        self.source = nnx.Param(glorot(rngs.params(), (heads, outputs), dtypes.params), logical_axes=("heads", "head"))
        self.target = nnx.Param(glorot(rngs.params(), (heads, outputs), dtypes.params), logical_axes=("heads", "head"))
        width = heads * outputs if combine == "concatenate" else outputs
        self.bias = nnx.Param(jnp.zeros(width, dtypes.params), logical_axes=("hidden",))
        self.combine, self.slope, self.dropout = combine, slope, dropout
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array, graph: Graph, *, key: jax.Array | None = None) -> jax.Array:
        """x: float[M, inputs]; graph: N rows that read M. Returns [N, heads * outputs], or [N, outputs]."""
        keys = (None, None) if key is None else jax.random.split(key)
        kernel, source, target, bias = (
            p[...].astype(self.compute_dtype) for p in (self.kernel, self.source, self.target, self.bias)
        )
        x = nn.dropout(x, self.dropout, keys[0]).astype(self.compute_dtype)
        h = (x @ kernel).reshape(x.shape[0], *source.shape)  # M H D
        wider = nn.wide(self.compute_dtype)  # scores and their softmax
        sources = jnp.einsum("mhd,hd->mh", h, source, preferred_element_type=wider)
        targets = jnp.einsum("nhd,hd->nh", h[: num_rows(graph)], target, preferred_element_type=wider)
        y = attend(graph, h, sources, targets, slope=self.slope, rate=self.dropout, key=keys[1]).astype(
            self.compute_dtype
        )
        y = y.reshape(y.shape[0], -1) if self.combine == "concatenate" else y.mean(1)
        return y + bias[None, :]
