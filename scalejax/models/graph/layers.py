"""Parts that the graph networks have in common."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from flax import nnx

from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph.aggregation import Graph, Sampling


def glorot(key: jax.Array, shape: tuple[int, int], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Uniform in ± sqrt(6 / (rows + columns)) (Glorot and Bengio, 2010)."""
    limit = (6 / sum(shape)) ** 0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What the architectures of this folder have in common.

    Attributes:
      layers: Layers.
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

    FREE = ("dropout", "train_sampling", "eval_sampling")

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in dataclasses.fields(self):
            if field.type in ("int", int) and getattr(self, field.name) < 1:
                raise UserError(f"{name}: {field.name} must be at least 1; got {getattr(self, field.name)}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"{name}: dropout must lie in [0, 1); got {self.dropout}.")


def widths(schema: GraphSchema, layers: int, hidden: int) -> list[int]:
    """Width of the features, of what lies between layers, and of the logits."""
    return [schema.features, *[hidden] * (layers - 1), schema.outputs]


def layer_graphs(graph: Graph | tuple[Graph, ...], layers: int) -> tuple[Graph, ...]:
    """One graph a layer.

    Raises:
      UserError: there are more or fewer than layers.
    """
    graphs = graph if isinstance(graph, tuple) else (graph,) * layers
    if len(graphs) != layers:
        raise UserError(
            f"the model has {layers} layers and got {len(graphs)} graphs. Give data.fanouts one number a layer, "
            "outermost first."
        )
    return graphs


class Network(nnx.Module):
    """Layers one after another, an activation between them; dropout is the layers' own."""

    def __init__(self, layers: Sequence[nnx.Module], activation: Callable[[jax.Array], jax.Array]):
        self.layers = nnx.List(layers)
        self.activation = activation

    def __call__(self, x: jax.Array, graph: Graph | tuple[Graph, ...], *, key: jax.Array | None = None) -> jax.Array:
        """Logits.

        Args:
          x: float[M, F], features of the nodes that the first layer reads.
          graph: What every layer reads, or one graph a layer, outermost first.
          key: Drives dropout; None = evaluation.
        Returns:
          float[N, outputs] of the rows of the last graph.
        """
        for l, (layer, read) in enumerate(zip(self.layers, layer_graphs(graph, len(self.layers)), strict=True)):
            x = layer(x, read, key=None if key is None else jax.random.fold_in(key, l))  # M F -> N hidden
            if l + 1 < len(self.layers):
                x = self.activation(x)
        return x
