"""`TrainState`: everything a step reads and writes, as a plain pytree of arrays."""

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NotRequired, TypedDict

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel.embedding.sharded_tables import State
from scalejax.parallel.embedding.stored import logical
from scalejax.parallel.gradients.blocks import States
from scalejax.parallel.gradients.compute import ROWS
from scalejax.parallel.gradients.scaling import LossScale
from scalejax.parallel.rules import Rules

Params = dict[str, jax.Array]
"""Parameters by path, "layers/0/fm/weight": the names that checkpoints and tables show."""

_STACKED = ("layers", "towers")
"""Logical axes along which the same tensor of several modules lies."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of a run between two steps.

    Attributes:
      step: int32[], optimizer steps done, skipped ones included.
      params: Parameters by path, trained and frozen.
      variables: State of the model that is no parameter, by path.
      optimizer: optax state over the trained parameters.
      averages: Name -> running averages of the trained parameters, by path.
      tables: Embedding rows and row states, as the collection's sharded view; {} where there are none.
      exchange: What the exchange of gradients remembers, {path: pytree of arrays [devices, ...]}.
      loss_scale: Factor on the loss and its history; None where losses are not scaled.
      metrics: Sums since the last line of metrics, a pytree of arrays.
      key: PRNG key of the run; a step uses fold_in(key, step).
    """

    step: jax.Array
    params: Params
    variables: Params
    optimizer: optax.OptState
    averages: dict[str, Params]
    tables: State
    exchange: States
    loss_scale: LossScale | None
    metrics: dict[str, Any]
    key: jax.Array


class StoredState(TypedDict):
    """A `TrainState` as a checkpoint holds it: what is empty is left out, and tables know no mesh."""

    step: jax.Array
    params: Params
    variables: NotRequired[Params]
    optimizer: optax.OptState
    averages: NotRequired[dict[str, Params]]
    tables: NotRequired[logical.Tree]
    exchange: NotRequired[States]
    loss_scale: NotRequired[LossScale]
    metrics: dict[str, Any]
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A model without its arrays: how to take it apart into named arrays and put it together.

    Attributes:
      params: Abstract parameters by path.
      variables: Abstract variables that are no parameters, by path.
      logical_axes: Logical axis names of each of both, as the model declares them.
      graph: Static structure of the module.
      names: Paths in the order of `graph`'s leaves.
      statistics: Paths of the variables that are running means of batches (`nnx.BatchStat`).
    """

    params: dict[str, jax.ShapeDtypeStruct]
    variables: dict[str, jax.ShapeDtypeStruct]
    logical_axes: dict[str, tuple[str | None, ...]]
    graph: nnx.GraphDef[nnx.Module]
    names: tuple[str, ...]
    treedef: Any
    statistics: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nnx.Module) -> "ModelShape":
        """Reads the structure of a (possibly abstract) model.

        Raises:
          ValueError: the model holds a random state, which would be the same in every part of a step.
        """
        graph, state = nnx.split(model)
        params: dict[str, jax.ShapeDtypeStruct] = {}
        variables: dict[str, jax.ShapeDtypeStruct] = {}
        axes: dict[str, tuple[str | None, ...]] = {}
        names, statistics = [], []
        for path, variable in nnx.to_flat_state(state):
            name = "/".join(str(part) for part in path)
            if isinstance(variable, nnx.RngState):
                raise ValueError(
                    f"{type(model).__name__}: {name} is a random state. Draw with the keys that `loss` is given."
                )
            value = variable.get_value()
            kind = params if isinstance(variable, nnx.Param) else variables
            kind[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            axes[name] = tuple(variable.get_metadata().get("logical_axes", (None,) * len(value.shape)))
            names.append(name)
            if isinstance(variable, nnx.BatchStat):
                statistics.append(name)
        return cls(params, variables, axes, graph, tuple(names), jax.tree.structure(state), tuple(statistics))

    def split(self, model: nnx.Module) -> Params:
        """Parameters of a model by path."""
        return self._leaves(model, self.params)

    def variables_of(self, model: nnx.Module) -> Params:
        """Variables of a model that are no parameters, by path."""
        return self._leaves(model, self.variables) if self.variables else {}

    def _leaves(self, model: nnx.Module, wanted: Collection[str]) -> Params:
        leaves = zip(self.names, jax.tree.leaves(nnx.state(model)), strict=True)
        return {name: leaf for name, leaf in leaves if name in wanted}

    def merge(self, params: Mapping[str, object], variables: Mapping[str, object] | None = None) -> nnx.Module:
        """A model with these parameters, and variables if it has any."""
        values = {**params, **(variables or {})}
        state = jax.tree.unflatten(self.treedef, [values[name] for name in self.names])
        return nnx.merge(self.graph, state)

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(math.prod(value.shape) for value in self.params.values())

    @property
    def stacked(self) -> dict[str, int]:
        """Leading axes of the parameters along which tensors lie beside each other, by path, where there are any.

        Those are the layers of a scan and towers.
        """
        heads = {name: itertools.takewhile(_STACKED.__contains__, self.logical_axes[name]) for name in self.params}
        return {name: count for name, axes in heads.items() if (count := len(list(axes)))}

    def shardings(self, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
        """Sharding of each parameter under a rules table alone, as for inference."""
        return {
            name: NamedSharding(mesh, rules.spec(self.logical_axes[name], value.shape, mesh))
            for name, value in self.params.items()
        }

    @property
    def variable_specs(self) -> dict[str, P]:
        """Sharding of each variable: rows of the batch where its first logical axis says so, else whole."""
        return {name: ROWS if self.logical_axes[name][:1] == ("batch",) else P() for name in self.variables}

    def digest(self) -> str:
        """Short digest of names, shapes and dtypes of the parameters."""
        shapes = {name: (value.shape, str(value.dtype)) for name, value in self.params.items()}
        return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]

    def trained(self, pattern: str) -> frozenset[str]:
        """Paths of the parameters that a regular expression names whole.

        Raises:
          UserError: it is no regular expression, or names none.
        """
        try:
            found = frozenset(name for name in self.params if re.fullmatch(pattern, name))
        except re.error as error:
            raise UserError(f"trainable must be a regular expression of paths; got {pattern!r} ({error}).") from error
        if not found:
            shown = ", ".join(list(self.params)[:3])
            raise UserError(
                f"trainable={pattern!r} names none of the {len(self.params)} parameters ({shown}, ...). It is a "
                "regular expression of whole paths, such as 'head/.*'."
            )
        return found


def optimizer_step(
    transformation: optax.GradientTransformation, grads: Params, state: TrainState, stacked: Mapping[str, int]
) -> tuple[Params, optax.OptState]:
    """All parameters and the optimizer state after an update of those that have gradients.

    Args:
      transformation: The optimizer; `stacked` reaches it as an extra argument of optax, if it takes any.
      grads: {path: gradient}.
      state: Before the update.
      stacked: Leading axes of parameters, see `ModelShape.stacked`.
    """
    trained = {name: state.params[name] for name in grads}
    taking = optax.with_extra_args_support(transformation)
    updates, optimizer = taking.update(grads, state.optimizer, trained, stacked=stacked)
    changed: Any = optax.apply_updates(trained, updates)  # pyright: ignore[reportArgumentType]
    return {name: changed.get(name, p) for name, p in state.params.items()}, optimizer


def to_stored(state: TrainState) -> StoredState:
    """The state as named arrays that know no mesh, without tables; what is empty is left out."""
    stored: StoredState = {
        "step": state.step,
        "params": state.params,
        "optimizer": state.optimizer,
        "metrics": state.metrics,
        "key": state.key,
    }
    if state.variables:
        stored["variables"] = state.variables
    if state.averages:
        stored["averages"] = state.averages
    if state.exchange:
        stored["exchange"] = state.exchange
    if state.loss_scale is not None:
        stored["loss_scale"] = state.loss_scale
    return stored


def from_stored(stored: StoredState, abstract: TrainState, tables: State) -> TrainState:
    """The state of stored arrays; `abstract` knows the structure of the optimizer's, and tables are as given."""
    optimizer = jax.tree.unflatten(jax.tree.structure(abstract.optimizer), jax.tree.leaves(stored["optimizer"]))
    return TrainState(
        step=stored["step"],
        params=stored["params"],
        variables=stored.get("variables", {}),
        optimizer=optimizer,
        averages=stored.get("averages", {}),
        tables=tables,
        exchange=stored.get("exchange", {}),
        loss_scale=stored.get("loss_scale"),
        metrics=stored["metrics"],
        key=stored["key"],
    )


def with_sharding(leaf: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> Any:
    """The shape and dtype of a leaf, in a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def optimizer_shardings(
    abstract: optax.OptState,
    params: dict[str, jax.ShapeDtypeStruct],
    shardings: dict[str, NamedSharding],
    mesh: Mesh,
) -> object:
    """Shardings of an optax state: a leaf that mirrors a parameter is sharded like it, the rest is replicated."""
    replicated = NamedSharding(mesh, P())

    def place(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = getattr(path[-1], "key", None) if path else None
        if name in params and params[name].shape == leaf.shape:
            return shardings[name]
        return replicated

    return jax.tree_util.tree_map_with_path(place, abstract)
