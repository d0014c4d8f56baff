"""`TrainState`: everything a step reads and writes, as a plain pytree of arrays."""

import dataclasses
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.gradient_scaling import LossScale
from scalejax.parallel.rules import Rules

Params = dict[str, jax.Array]
"""Dense parameters by path, "layers/0/fm/weight": the names that checkpoints and tables show."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of a run between two steps.

    Attributes:
      step: int32[], optimizer steps done.
      params: Dense parameters by path.
      optimizer: optax state over `params`.
      tables: Embedding rows and row states, as the collection's sharded view.
      metrics: Sums since the last line of metrics, a pytree of arrays.
      key: PRNG key of the run; a step uses fold_in(key, step).
      loss_scale: Factor on the loss and its history; None where losses are not scaled.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    tables: Any
    metrics: Any
    key: jax.Array
    loss_scale: LossScale | None = None


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The dense part without its arrays: how to take a model apart into named arrays and put it together.

    Attributes:
      params: Abstract parameters by path.
      logical_axes: Logical axis names per parameter, as the model declares them.
      graph: Static structure of the module.
      names: Paths in the order of `graph`'s leaves.
    """

    params: dict[str, jax.ShapeDtypeStruct]
    logical_axes: dict[str, tuple[str | None, ...]]
    graph: nnx.GraphDef[Any]
    names: tuple[str, ...]
    treedef: Any

    @classmethod
    def of(cls, model: nnx.Module) -> "ModelShape":
        """Reads the structure of a (possibly abstract) model.

        Raises:
          ValueError: the model holds state that is not `nnx.Param` (it would be lost between steps).
        """
        graph, state = nnx.split(model)
        params: dict[str, jax.ShapeDtypeStruct] = {}
        axes: dict[str, tuple[str | None, ...]] = {}
        for path, variable in nnx.to_flat_state(state):
            name = "/".join(str(part) for part in path)
            if not isinstance(variable, nnx.Param):
                raise ValueError(f"{type(model).__name__}: all state must be nnx.Param; {name} is {type(variable)}.")
            value = variable.get_value()
            params[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            axes[name] = tuple(variable.get_metadata().get("logical_axes", (None,) * len(value.shape)))
        return cls(params, axes, graph, tuple(params), jax.tree.structure(state))

    def take_apart(self, model: nnx.Module) -> Params:
        """Parameters of a model by path."""
        return dict(zip(self.names, jax.tree.leaves(nnx.state(model)), strict=True))

    def put_together(self, params: Params) -> nnx.Module:
        """A model with these parameters."""
        state = jax.tree.unflatten(self.treedef, [params[name] for name in self.names])
        return nnx.merge(self.graph, state)

    def shardings(self, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
        """Sharding per parameter under a rules table."""
        return {
            name: NamedSharding(mesh, rules.spec(self.logical_axes[name], value.shape, mesh))
            for name, value in self.params.items()
        }


def with_sharding(leaf: Any, sharding: NamedSharding) -> Any:
    """The shape and dtype of a leaf, in a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def optimizer_shardings(
    abstract: Any, params: dict[str, jax.ShapeDtypeStruct], shardings: dict[str, NamedSharding], mesh: Mesh
) -> Any:
    """Shardings of an optax state: a leaf that mirrors a parameter is sharded like it, the rest is replicated."""
    replicated = NamedSharding(mesh, P())

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = getattr(path[-1], "key", None) if path else None
        if name in params and params[name].shape == leaf.shape:
            return shardings[name]
        return replicated

    return jax.tree_util.tree_map_with_path(place, abstract)
