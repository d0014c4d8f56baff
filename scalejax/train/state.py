"""`TrainState`: everything a step reads and writes, as a plain pytree of arrays."""

import dataclasses
import hashlib
import math
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

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(math.prod(value.shape) for value in self.params.values())

    def digest(self) -> str:
        """Short digest of names, shapes and dtypes of the parameters."""
        shapes = {name: (value.shape, str(value.dtype)) for name, value in self.params.items()}
        return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]

    def shardings(self, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
        """Sharding per parameter under a rules table."""
        return {
            name: NamedSharding(mesh, rules.spec(self.logical_axes[name], value.shape, mesh))
            for name, value in self.params.items()
        }


def optimizer_step(
    transformation: optax.GradientTransformation, grads: Params, state: TrainState
) -> tuple[Params, optax.OptState]:
    """Parameters and optimizer state after an update."""
    updates, optimizer = transformation.update(grads, state.optimizer, state.params)
    params: Any = optax.apply_updates(state.params, updates)  # pyright: ignore[reportArgumentType]
    return params, optimizer


def to_stored(state: TrainState) -> dict[str, Any]:
    """The state as named arrays that know no mesh, without tables."""
    return {
        "step": state.step,
        "params": state.params,
        "optimizer": state.optimizer,
        "metrics": state.metrics,
        "key": state.key,
        **({} if state.loss_scale is None else {"loss_scale": state.loss_scale}),
    }


def from_stored(stored: dict[str, Any], abstract: TrainState, tables: Any) -> TrainState:
    """The state of stored arrays; `abstract` knows the structure of the optimizer's, and tables are as given."""
    optimizer = jax.tree.unflatten(jax.tree.structure(abstract.optimizer), jax.tree.leaves(stored["optimizer"]))
    return TrainState(**{**stored, "optimizer": optimizer, "tables": tables})


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
