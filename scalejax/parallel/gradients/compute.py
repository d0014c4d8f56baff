"""Gradients of a loss under a strategy: what a training step takes of its model, whatever the model is.

    found = gradients(loss, strategy, mesh=mesh, specs=specs)(params, batch, inputs=rows, variables=statistics)

Two forms, which a strategy chooses between:

    implicit   shardings under jit; parameters of a block are asked for whole, and the compiler places the collectives
    explicit   a shard_map over the data axes; parameters travel block by block through a `blocks.ParamExchange`

In both, `jax.vjp` takes the trained parameters, what the exchange remembers of them, and the `inputs`: arrays of the
examples whose gradients somebody else uses (embedding rows). Inputs enter and leave with their own sharding and are
never exchanged. Frozen parameters are fetched outside of what is differentiated, so that nothing of them is reduced.

A batch may be run in parts. Gradients and sums add up over the parts; outputs and gradients of inputs, which belong to
examples, are put together again; variables and the state of an exchange go from part to part.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError, check_at_least
from scalejax.numerics import flops
from scalejax.parallel import mesh as meshes
from scalejax.parallel.gradients import blocks
from scalejax.parallel.gradients.blocks import (
    Accumulate,
    Arrays,
    Gather,
    ParamExchange,
    ParamGather,
    ParamLayout,
    ShardWithState,
    States,
    StepContext,
    WholeCopy,
    axes_of,
)
from scalejax.parallel.mesh import BATCH_AXES

if TYPE_CHECKING:
    from jaxtyping import PyTree

ROWS = P(BATCH_AXES)
"""The sharding of what has a row for each example."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """The result of a loss function on a batch.

    Attributes:
      sum: float[]. Weighted sum of the losses of the examples; its gradient is taken.
      weight: float[]. What the sum is divided by to make it a mean: of examples, of targets, of nodes.
      sums: Further sums over the examples, name -> [].
      outputs: What metrics want of each example, name -> [B, ...].
    """

    sum: jax.Array
    weight: jax.Array
    sums: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    outputs: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """PRNG keys of a step.

    Attributes:
      step: The same for all devices and parts: for choices that hold for the whole step, such as a path of a supernet.
      examples: One for each device and part, for what examples draw by themselves, such as dropout. In evaluations one
        for each example, [B].
    """

    step: jax.Array
    examples: jax.Array

    def of_examples(self, count: int) -> jax.Array:
        """A key for each of the `count` examples of this batch, [B]; use it for what evaluation draws, too."""
        return self.examples if self.examples.ndim else jax.random.split(self.examples, count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossAndGradients:
    """Of the global batch; sums are over all devices and parts.

    Attributes:
      sum, weight, sums, outputs: As in `Loss`.
      params: Gradients of `scale` times the sum, of trained parameters alone, laid out as the master parameters.
      inputs: The same of the inputs, laid out as they are.
      variables: What the model's variables became.
      exchange: What the exchange remembers from here on.
      left_out: float32[], the sum over devices of the squares of what an exchange left out of its messages, in units of
        the gradients, 0 in steps that do not measure it; None = it is not measured.
    """

    sum: jax.Array
    weight: jax.Array
    sums: dict[str, jax.Array]
    outputs: dict[str, jax.Array]
    params: Arrays
    inputs: "PyTree"
    variables: Arrays
    exchange: States
    left_out: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss function.

    Attributes:
      params: {path: array, or a `Bundle` in its place}; each has to go through `gather` once, by block, before it is
        used.
      inputs: Rows of the examples of this part, as they were passed.
      variables: State of the model that is no parameter, by path.
      constants: What is the same in every step, and what is the same for all examples of this one.
      batch: Fields of the examples of this part.
      keys: None = nothing random.
      gather: Fetches parameters.
    """

    params: Mapping[str, jax.Array | ShardWithState]
    inputs: "PyTree"
    variables: Arrays
    constants: "PyTree"
    batch: "PyTree"
    keys: Keys | None
    gather: Gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Part:
    """What a part of the batch brings, or all of it, and what goes from part to part; see `GradientFunction`."""

    inputs: "PyTree"
    variables: Arrays
    exchange: States
    constants: "PyTree"
    batch: "PyTree"
    keys: Keys | None


Moving = TypeVar("Moving")
_Sums = tuple[jax.Array, jax.Array, dict[str, jax.Array], Arrays]
"""Sum, weight, further sums and gradients of parameters."""

_Scanned = tuple["PyTree", Arrays, "PyTree", Any]
"""Inputs, variables by row, batch and key of a part."""

LossFunction = Callable[[LossInputs], tuple[Loss, Arrays]]
"""Returns what it found out and the next variables."""


class Strategy(Protocol):
    """How parameters and gradients travel: see `fsdp.Fsdp` and `ddp.Ddp`."""

    @property
    def form(self) -> Literal["implicit", "explicit"]: ...

    @property
    def after_forward(self) -> Literal["drop", "keep"]: ...

    @property
    def accumulate(self) -> Accumulate: ...

    @property
    def reduces(self) -> Literal["parts", "step"]:
        """Whether gradients are reduced in the backward pass of each part, or once a step by `reduce_once`."""
        ...

    @property
    def param_dtype(self) -> jax.typing.DTypeLike | None: ...

    def axes(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The mesh axes over which parameters are sharded."""
        ...

    def exchange(self, layouts: Mapping[str, ParamLayout], axes: tuple[str, ...]) -> ParamExchange:
        """How parameters travel in the explicit form."""
        ...

    def check_specs(self, specs: Mapping[str, P], mesh: Mesh, apart: Mapping[str, tuple[str, ...]]) -> None:
        """Refuses shardings of parameters that are not this strategy's; `specs` are without axes of `apart`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientFunction:
    """The gradients of a loss; call it under jit. See `gradients`, which makes and checks it."""

    loss: LossFunction
    strategy: Strategy
    mesh: Mesh
    specs: Mapping[str, P]
    trained: frozenset[str]
    parts: int
    handled: tuple[str, ...]
    apart: Mapping[str, tuple[str, ...]]
    input_specs: "PyTree[P]"
    variable_specs: Mapping[str, P]

    def __call__(
        self,
        params: Arrays,
        batch: "PyTree",
        *,
        inputs: "PyTree" = None,
        variables: Arrays | None = None,
        exchange: States | None = None,
        constants: "PyTree" = None,
        keys: Keys | None = None,
        context: StepContext | None = None,
        scale: jax.typing.ArrayLike = 1.0,
    ) -> LossAndGradients:
        """Takes the gradients of one global batch.

        Args:
          params: {path: array} in the shardings `specs`.
          batch: Pytree of arrays [B, ...], sharded over the batch axes.
          inputs: Pytree of arrays [B, ...] in the shardings `input_specs`.
          variables: {path: array} in the shardings `variable_specs`.
          exchange: What `init_exchange` made, or the last call returned.
          constants: Pytree of arrays, the same on every device and for every part.
          keys: None = nothing random.
          context: For exchanges that draw or go by the step; None = this one does not.
          scale: Factor on the sum before its gradient is taken.

        Raises:
          UserError: rows do not divide, or the loss never fetched a parameter or lost a variable.
        """
        variables = variables or {}
        by_row = [x for path, x in variables.items() if path in self._by_row]
        check_cut((batch, inputs, by_row), self.mesh, self.parts)
        whole = _Part(inputs, variables, exchange or {}, constants, batch, keys)
        scale = jnp.asarray(scale)
        if self.strategy.form == "implicit":
            return self._laid_out(self._implicit(params, whole, scale))
        return self._laid_out(self._explicit(params, whole, scale, context))

    def init_exchange(self, params: Arrays) -> States:
        """What the exchange remembers before the first step: {path: pytree of arrays [devices, ...]}; call under jit.

        The arrays are sharded as `exchange_specs` says.

        Args:
          params: The master parameters.
        """
        if self.strategy.form == "implicit":
            return {}
        scheme = self.scheme(params)
        trained = {path: p for path, p in params.items() if path in self.trained}
        return self._on_devices(lambda shards, state: scheme.init(shards), trained, {})

    def after_update(self, params: Arrays, exchange: States, context: StepContext | None = None) -> States:
        """What the exchange remembers after the optimizer has changed the parameters; call under jit.

        Args:
          params: The new master parameters.
          exchange: As `LossAndGradients.exchange`.
          context: As the gradients had it.
        """
        if not exchange:
            return exchange
        scheme = self.scheme(params)
        trained = {path: p for path, p in params.items() if path in self.trained}
        return self._on_devices(lambda shards, state: scheme.after_update(shards, state, context), trained, exchange)

    def seen(self, params: Arrays, exchange: States) -> Arrays:
        """The parameters that the model computes with, for scoring: those of the master, or what replaces them."""
        return {**params, **self.scheme(params).seen(params, exchange)} if exchange else params

    def rescaled(
        self, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct], exchange: States, factor: jax.Array
    ) -> States:
        """What the exchange remembers where the next gradients are those of `scale` times a further factor.

        Args:
          params: The master parameters, arrays or shapes.
          exchange: As `after_update` returned it.
          factor: float[], the next scale over this one.

        Raises:
          UserError: the exchange has no rule for that.
        """
        return self.scheme(params).rescaled(exchange, factor) if exchange else exchange

    def exchange_specs(self, exchange: States) -> States:
        """The sharding of each array that an exchange remembers, a tree of `PartitionSpec`s.

        The first axis has an index for each device of the data axes and of those that the loss handles. A `WholeCopy`
        lies as its parameter does, but for the data axes.
        """
        each = P((*BATCH_AXES, *self.handled))

        def spec(path: str, leaf: object) -> "PyTree[P]":
            return WholeCopy(_without(self.specs[path], BATCH_AXES)) if blocks.is_whole_copy(leaf) else each  # pyright: ignore[reportArgumentType]

        return {
            path: jax.tree.map(functools.partial(spec, path), state, is_leaf=blocks.is_whole_copy)
            for path, state in exchange.items()
        }

    @functools.cached_property
    def _by_row(self) -> frozenset[str]:
        """Paths of the variables whose rows are those of the batch."""
        first = {path: axes_of(spec[0]) for path, spec in self.variable_specs.items() if len(spec)}
        return frozenset(path for path, axes in first.items() if any(axis in BATCH_AXES for axis in axes))

    @functools.cached_property
    def _over(self) -> tuple[str, ...]:
        return blocks.data_axes(self.mesh)

    @functools.cached_property
    def _manual(self) -> frozenset[str]:
        """Axes of the shard_map: data axes, those of size 1 and those that the loss handles."""
        mesh, over = self.mesh, self._over
        manual = {axis for axis in mesh.axis_names if axis in over + self.handled or mesh.shape[axis] == 1}
        # A shard_map inside adds what is automatic, and XLA of jax 0.12 dies where that does not come last in the mesh.
        automatic = [axis for axis in mesh.axis_names if axis not in manual]
        if automatic:
            after = mesh.axis_names[mesh.axis_names.index(automatic[0]) :]
            manual -= {axis for axis in after if mesh.shape[axis] == 1}
        return frozenset(manual)

    def _inside(self, spec: P) -> P:
        """What a sharding says of the manual axes."""
        return P(*(tuple(a for a in axes_of(entry) if a in self._manual) or None for entry in spec))

    def _where(self, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> dict[str, ParamLayout]:
        specs = {path: self.specs[path] for path in params}
        ndims = {path: len(p.shape) for path, p in params.items()}
        return blocks.layouts(specs, ndims, self.mesh, self.handled, self.apart)

    def scheme(self, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> ParamExchange:
        """The exchange of these parameters, arrays or shapes."""
        return self.strategy.exchange(self._where(params), self._over + self.handled)

    def compressed(self, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> blocks.CompressedExchange | None:
        """The exchange of these parameters if it compresses once a step."""
        scheme = self.scheme(params) if self.strategy.form == "explicit" else None
        return scheme if isinstance(scheme, blocks.CompressedExchange) else None

    def whole(self, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Trained parameters as a device has them once they are gathered: whole along the data axes alone."""
        found = {}
        for path in (path for path in params if path in self.trained):
            shape = list(params[path].shape)
            for dim, entry in enumerate(self.specs[path]):
                shape[dim] //= math.prod(self.mesh.shape[axis] for axis in axes_of(entry) if axis not in BATCH_AXES)
            found[path] = jax.ShapeDtypeStruct(tuple(shape), params[path].dtype)
        return found

    def _on_devices(self, function: Callable[[Arrays, States], States], params: Arrays, state: States) -> States:
        """`function` of what each device holds."""

        def local(params: Arrays, state: States) -> States:
            return blocks.of_devices(function(params, blocks.on_device(state)))

        inside = {path: self._inside(self.specs[path]) for path in params}
        mapped = functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            axis_names=self._manual,
            check_vma=False,
            in_specs=(inside, self._manual_specs(state)),
        )
        # Which arrays are there decides how they lie.
        shapes = jax.eval_shape(mapped(local, out_specs=P()), params, state)
        return mapped(local, out_specs=self._manual_specs(shapes))(params, state)

    def _manual_specs(self, state: States) -> States:
        """`exchange_specs` inside of the shard_map."""
        return jax.tree.map(self._inside, self.exchange_specs(state), is_leaf=lambda x: isinstance(x, P))

    def _laid_out(self, found: LossAndGradients) -> LossAndGradients:
        """Says of what goes round from step to step that it stays where it was: parts are joined on data axes alone."""
        sharding = functools.partial(NamedSharding, self.mesh)
        by_input = jax.tree.map(sharding, self.input_specs, is_leaf=lambda x: isinstance(x, P))
        by_variable = {path: sharding(self.variable_specs.get(path, P())) for path in found.variables}
        return dataclasses.replace(
            found,
            inputs=jax.lax.with_sharding_constraint(found.inputs, by_input),
            variables=jax.lax.with_sharding_constraint(found.variables, by_variable),
        )

    def _pulled(
        self,
        params: Callable[[Moving], Mapping[str, jax.Array | ShardWithState]],
        moving: Moving,
        part: _Part,
        fetch: Gather,
        scale: jax.Array,
    ) -> LossAndGradients:
        """Of one part, with the gradients of `moving` for those of the parameters, which `params` makes of it."""

        def value(moving: Moving, inputs: "PyTree") -> tuple[jax.Array, tuple[Loss, Arrays]]:
            given = LossInputs(params(moving), inputs, part.variables, part.constants, part.batch, part.keys, fetch)
            loss, new = self.loss(given)
            if set(new) != set(part.variables):
                raise UserError(
                    f"gradients: the loss was given the variables {sorted(part.variables)} and returned {sorted(new)}. "
                    "Return each of them, changed or not."
                )
            return loss.sum, (loss, new)

        total, pull, (loss, new) = jax.vjp(value, moving, part.inputs, has_aux=True)
        # The factor enters as the cotangent: the loss that is returned stays free of it.
        pulled, of_inputs = pull(scale.astype(total.dtype))
        return LossAndGradients(total, loss.weight, loss.sums, loss.outputs, pulled, of_inputs, new, part.exchange)

    def _explicit(
        self, params: Arrays, whole: _Part, scale: jax.Array, context: StepContext | None
    ) -> LossAndGradients:
        where, over, handled = self._where(params), self._over, self.handled
        scheme = self.scheme(params)
        inside = {path: self._inside(self.specs[path]) for path in params}
        rows, remembered = ROWS, self._manual_specs(whole.exchange)
        held = {path: self._inside(self.variable_specs.get(path, P())) for path in whole.variables}
        input_specs = jax.tree.map(self._inside, self.input_specs, is_leaf=lambda x: isinstance(x, P))
        once = self.strategy.reduces == "step"

        def local(params: Arrays, own: _Part, scale: jax.Array, context: StepContext | None) -> LossAndGradients:
            state, keys = blocks.on_device(own.exchange), own.keys
            if keys is not None and over:
                # Not over the stages of a pipeline, which run on the same examples and draw alike for them.
                keys = Keys(keys.step, jax.random.fold_in(keys.examples, jax.lax.axis_index(over)))
            frozen = frozenset(params) - self.trained
            fetch = ParamGather(scheme, self.strategy.after_forward, frozen=frozen)
            one = functools.partial(self._explicit_part, fetch, where, params, scale)

            def cut(x: jax.Array) -> jax.Array:
                return x.reshape(self.parts, x.shape[0] // self.parts, *x.shape[1:])

            def join(x: jax.Array) -> jax.Array:
                return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

            found = self._in_parts(one, dataclasses.replace(own, exchange=state, keys=keys), cut, join)
            _check_fetched(fetch, params)
            gradients, state, left_out = found.params, found.exchange, None
            if once:
                fetched = {path: gradients[path] for path in fetch.order if path in gradients}
                gradients, changed, left_out = scheme.reduce_once(fetched, state, context)
                gradients = {path: g.astype(params[path].dtype) for path, g in gradients.items()}
                state = blocks.changed_states(state, changed)
            total, weight, sums = found.sum, found.weight, found.sums
            if over + handled:
                total, weight, sums, left_out = jax.lax.psum((total, weight, sums, left_out), over + handled)
            outputs, inputs = found.outputs, found.inputs
            if handled:
                # Stages that do not count hold zeros of these, so that a sum is the value of the one that does.
                outputs, inputs = jax.lax.psum((outputs, inputs), handled)
            return LossAndGradients(
                sum=total,
                weight=weight,
                sums=sums,
                outputs=outputs,
                params=gradients,
                inputs=inputs,
                variables=found.variables,
                exchange=blocks.of_devices(state),
                left_out=left_out,
            )

        moving_specs: dict[str, PyTree[P]] = {"inputs": input_specs, "variables": held, "exchange": remembered}
        part_specs: dict[str, PyTree[P]] = {**moving_specs, "constants": P(), "batch": rows, "keys": P()}
        found_specs: dict[str, PyTree[P]] = {
            **dict.fromkeys(("sum", "weight", "sums", "left_out"), P()),
            "outputs": rows,
            "params": {path: inside[path] for path in inside if path in self.trained},
            **moving_specs,
        }
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(inside, _Part(**part_specs), P(), P()),
            out_specs=LossAndGradients(**found_specs),
            axis_names=self._manual,
            check_vma=False,  # what a gather returns is equal everywhere and its derivative is written out
        )(params, whole, scale, context)

    def _explicit_part(
        self, fetch: ParamGather, where: Mapping[str, ParamLayout], params: Arrays, scale: jax.Array, part: _Part
    ) -> LossAndGradients:
        """Of one part: gradients of the shards, or of whole parameters if they are not to be reduced yet."""
        sizes = {axis: jax.lax.axis_size(axis) for axis in self._over}
        state, once = part.exchange, self.strategy.reduces == "step"

        def sink(path: str) -> jax.Array:
            shape = list(params[path].shape)
            for dim, over in where[path].sharded:
                shape[dim] *= math.prod(sizes[axis] for axis in over)
            return jnp.zeros(shape, params[path].dtype)

        def bundled(moving: dict[str, "PyTree"]) -> dict[str, jax.Array | ShardWithState]:
            if once:
                given = {path: ShardWithState(params[path], state.get(path), moving[path]) for path in moving}
            else:
                given = {path: ShardWithState(*moving[path]) if path in state else moving[path][0] for path in moving}
            return {**params, **given}

        trained = [path for path in params if path in self.trained]
        if once:
            return self._pulled(bundled, {path: sink(path) for path in trained}, part, fetch, scale)
        moving = {path: (params[path], state.get(path)) for path in trained}
        found = self._pulled(bundled, moving, part, fetch, scale)
        gradients = {path: g for path, (g, _) in found.params.items()}
        changed = blocks.changed_states(state, {path: found.params[path][1] for path in state})
        return dataclasses.replace(found, params=gradients, exchange=changed)

    def _implicit(self, params: Arrays, whole: _Part, scale: jax.Array) -> LossAndGradients:
        """Shardings and constraints: parameters of a block are asked for whole, their gradients in shards."""
        strategy, mesh, specs = self.strategy, self.mesh, self.specs
        ndims = {path: p.ndim for path, p in params.items()}
        constrained = functools.partial(_Constrained, mesh=mesh, specs=specs, ndims=ndims, apart=self.apart)
        # Where nothing is sharded there is nothing to drop, and no rematerialisation is to be asked for.
        primitives = ("sharding_constraint",) if strategy.axes(mesh) else ()
        frozen = frozenset(params) - self.trained
        moving = ParamGather(constrained(param_dtype=strategy.param_dtype), "drop", primitives, frozen)
        # Of all layers at once, before the loss; its blocks then find whole parameters, and only cut their gradients.
        cutting = ParamGather(constrained(moves=False), "keep", (), frozen)
        keep = strategy.after_forward == "keep"
        fetch = cutting if keep else moving

        def given(trained: Arrays) -> Arrays:
            return moving({**params, **trained}) if keep else {**params, **trained}

        def one(part: _Part) -> LossAndGradients:
            trained = {path: p for path, p in params.items() if path in self.trained}
            found = self._pulled(given, trained, part, fetch, scale)
            grads = {
                path: jax.lax.with_sharding_constraint(g, NamedSharding(mesh, specs[path]))
                for path, g in found.params.items()
            }
            return dataclasses.replace(found, params=grads)

        def cut(x: jax.Array) -> jax.Array:
            return meshes.cut(x, mesh, self.parts)

        def join(x: jax.Array) -> jax.Array:
            return meshes.join(x, mesh)

        found = self._in_parts(one, whole, cut, join)
        _check_fetched(fetch, params)
        return found

    def _in_parts(
        self,
        one: Callable[[_Part], LossAndGradients],
        whole: _Part,
        cut: Callable[[jax.Array], jax.Array],
        join: Callable[[jax.Array], jax.Array],
    ) -> LossAndGradients:
        """Adds up what `one` returns for each of `parts` equal cuts of the batch.

        `cut` is [B, ...] -> [parts, B / parts, ...], and `join` puts rows together again.
        """
        if self.parts == 1:
            return one(whole)
        keys = whole.keys
        rows = {path: x for path, x in whole.variables.items() if path in self._by_row}
        carried = {path: x for path, x in whole.variables.items() if path not in self._by_row}
        inputs, rows, batch = jax.tree.map(cut, (whole.inputs, rows, whole.batch))
        numbers = jnp.arange(self.parts)
        # In the explicit form on top of the number of the device, so that no two parts draw alike.
        each = None if keys is None else jax.vmap(lambda i: jax.random.fold_in(keys.examples, i))(numbers)

        def part(state: States, carried: Arrays, scanned: _Scanned) -> LossAndGradients:
            inputs, rows, batch, key = scanned
            own = None if keys is None else Keys(keys.step, key)
            return one(_Part(inputs, {**carried, **rows}, state, whole.constants, batch, own))

        def added(found: LossAndGradients) -> _Sums:
            return found.sum, found.weight, found.sums, found.params

        def step(
            carry: tuple[_Sums, States, Arrays], scanned: _Scanned
        ) -> tuple[tuple[_Sums, States, Arrays], tuple[Arrays, "PyTree", Arrays]]:
            sums, state, carried = carry
            found = part(state, carried, scanned)
            new = {path: x for path, x in found.variables.items() if path not in self._by_row}
            kept = {path: x for path, x in found.variables.items() if path in self._by_row}
            carry = jax.tree.map(jnp.add, sums, added(found)), found.exchange, new
            return carry, (found.outputs, found.inputs, kept)

        scanned = (inputs, rows, batch, each)
        first = jax.tree.map(lambda x: x[0], scanned)
        traced, found = jax.make_jaxpr(part, return_shape=True)(whole.exchange, carried, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), added(found))
        # On a CPU gradients of convolutions take ten times as long inside of a loop.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        unroll = self.parts if on_cpu and flops.has_convolutions(traced) else 1
        begun = (zeros, whole.exchange, carried)
        ((total, weight, sums, params), state, carried), stacked = jax.lax.scan(step, begun, scanned, unroll=unroll)
        outputs, inputs, rows = jax.tree.map(join, stacked)
        return LossAndGradients(total, weight, sums, outputs, params, inputs, {**carried, **rows}, state)


def gradients(
    loss: LossFunction,
    strategy: Strategy,
    *,
    mesh: Mesh,
    specs: Mapping[str, P],
    trained: Collection[str] | None = None,
    parts: int = 1,
    handled: tuple[str, ...] = (),
    apart: Mapping[str, tuple[str, ...]] | None = None,
    input_specs: "PyTree[P]" = ROWS,
    variable_specs: Mapping[str, P] | None = None,
) -> GradientFunction:
    """Gradients of a loss under a strategy.

    Args:
      loss: (`LossInputs`) -> (`Loss`, next variables).
      strategy: How parameters and gradients travel.
      mesh: The devices.
      specs: Path -> sharding of the master parameter, see `fsdp.place`. No state or gradient of a scanned block may be
        sharded along its layers over a data axis.
      trained: Paths of the parameters that are trained; None = all.
      parts: Passes over equal cuts of each device's examples.
      handled: In the explicit form further axes that are manual because the loss has collectives of its own over them:
        `stage`, for a pipeline. What it finds is then added up over them too, so that it must be zero where a device
        does not count (`pipeline.on_last_stage`).
      apart: Path -> data axes along which devices hold different parts for good, such as the experts of a layer:
        neither gathered nor summed over these axes. In the explicit form the loss is given the part of its device.
      input_specs: Shardings of the inputs, a pytree prefix of them.
      variable_specs: Path -> sharding of a variable; those that have none are whole on every device, and a loss has to
        change them alike everywhere. A sharding over the batch axes says that their rows are those of the batch.

    Raises:
      UserError: the parameters are not sharded as the strategy or `apart` says, or a path is not known.
    """
    apart = {path: tuple(a for a in axes if mesh.shape[a] > 1) for path, axes in (apart or {}).items()}
    check_at_least("gradients: parts", parts, 1)
    for field, paths in (("trained", trained or ()), ("apart", apart)):
        for path in paths:
            if path not in specs:
                raise UserError(f"gradients: {field} names {path!r}, and specs do not. Name paths of parameters.")
    for path, axes in apart.items():
        over = {axis for entry in specs[path] for axis in axes_of(entry)} & set(BATCH_AXES)
        if not over.issuperset(axes):
            raise UserError(
                f"gradients: apart says that {path!r} differs along {'+'.join(axes)}, but its sharding names "
                f"{'+'.join(sorted(over)) or 'none'} of the data axes. Shard a dimension of it over each of those."
            )
    strategy.check_specs({path: _without(spec, apart.get(path, ())) for path, spec in specs.items()}, mesh, apart)
    if parts > 1 and strategy.reduces == "step" and strategy.accumulate == "communicate":
        raise UserError(
            f"gradients: {type(strategy).__name__} compresses the sum of all parts, once a step, and its "
            f"accumulate='communicate' says that each of {parts} parts travels. Set --set strategy.accumulate=local."
        )
    if strategy.form == "explicit":
        _check_stages(mesh, specs, handled)
        _check_narrow_sums(mesh, strategy)
    elif handled:
        raise UserError(
            f"gradients: handled={handled} needs form='explicit'; in the implicit form a loss that uses "
            "`pipeline.pipelined` needs nothing."
        )
    return GradientFunction(
        loss=loss,
        strategy=strategy,
        mesh=mesh,
        specs=specs,
        trained=frozenset(specs if trained is None else trained),
        parts=parts,
        handled=tuple(axis for axis in handled if mesh.shape[axis] > 1),
        apart=apart,
        input_specs=input_specs,
        variable_specs=dict(variable_specs or {}),
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Constrained(blocks.Stateless):
    """The exchange of the implicit form: it only says what should lie where."""

    mesh: Mesh
    specs: Mapping[str, P]
    ndims: Mapping[str, int]
    apart: Mapping[str, tuple[str, ...]]
    param_dtype: jax.typing.DTypeLike | None = None
    moves: bool = True

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, None]:
        del state
        if not self.moves:
            return shards, None
        whole = {}
        for path, x in shards.items():
            if self.param_dtype is not None:
                x = self._constrain(path, x.astype(self.param_dtype), ())  # cast, then moved
            apart = self.apart.get(path, ())
            whole[path] = self._constrain(path, x, tuple(axis for axis in BATCH_AXES if axis not in apart))
        return whole, None

    def reduce(self, gradients: Arrays, state: States, kept: object) -> tuple[Arrays, States]:
        del kept
        return {path: self._constrain(path, g, ()) for path, g in gradients.items()}, state

    def _constrain(self, path: str, x: jax.Array, without: tuple[str, ...]) -> jax.Array:
        entries = list(self.specs[path])[self.ndims[path] - x.ndim :]
        around = jax.sharding.get_abstract_mesh()
        without += tuple(around.manual_axes)  # a pipeline may surround this
        spec = P(*(tuple(a for a in axes_of(entry) if a not in without) or None for entry in entries))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec) if around.empty else spec)


def check_cut(rows: object, mesh: Mesh, parts: int) -> None:
    """Refuses a batch that does not divide into parts of equal size on every device.

    Raises:
      UserError: names the sizes.
    """
    shards = meshes.batch_shards(mesh)
    for size in {x.shape[0] for x in jax.tree.leaves(rows)}:
        if size % (shards * parts):
            stated = ", ".join(f"{a}={mesh.shape[a]}" for a in BATCH_AXES if mesh.shape.get(a, 1) > 1) or "one device"
            below, above = size // (shards * parts) * shards * parts, -(-size // (shards * parts)) * shards * parts
            raise UserError(
                f"gradients: a batch of {size} does not divide into {parts} parts on {shards} devices ({stated}). "
                f"The nearest sizes that do: {f'{below} or {above}' if below else above}; or change parts or the mesh."
            )


def _check_fetched(fetch: ParamGather, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> None:
    """Gradients of a parameter that did not go through `gather` would be summed over no device, without a word."""
    missing = [path for path in params if path not in fetch.order]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"The loss never fetched {', '.join(map(repr, missing[:3]))}{more}: every parameter has to go through "
            "`gather` before it is used, or its gradients would not be summed over devices. Call "
            "gather({path: parameter, ...}) in the model, or let the step fetch all of them (fetches = 'whole')."
        )


def _check_narrow_sums(mesh: Mesh, strategy: Strategy) -> None:
    """Refuses what makes XLA for CPUs end the process; `blocks.summable` mends the sums that a program states itself.

    Raises:
      UserError: gradients of 16 bits would be summed over `context`, by a collective that the compiler places.
    """
    dtype = strategy.param_dtype
    narrow = dtype is not None and jnp.dtype(dtype).itemsize < 4
    if narrow and mesh.shape["context"] > 1 and mesh.devices.flat[0].platform == "cpu":
        raise UserError(
            f"gradients: param_dtype={jnp.dtype(dtype).name} beside context={mesh.shape['context']} on CPUs, where XLA "
            "ends the process over sums of 16 bits that it places itself (jaxlib 0.10 to 0.12). Set --set "
            "strategy.param_dtype=none here; accelerators need nothing."
        )


def _check_stages(mesh: Mesh, specs: Mapping[str, P], handled: tuple[str, ...]) -> None:
    """A loss that knows nothing of stages would run through the layers of its own stage alone."""
    for path, spec in specs.items():
        if "stage" not in handled and mesh.shape["stage"] > 1 and any("stage" in axes_of(e) for e in spec):
            raise UserError(
                f"gradients: {path!r} is sharded over stage={mesh.shape['stage']}, which the explicit form runs only "
                "for a loss that is a pipeline (`pipeline.run_stages`): pass handled=('stage',). Otherwise use "
                "form='implicit', or a mesh with stage=1."
            )


def _without(spec: P, axes: tuple[str, ...]) -> P:
    return P(*(tuple(a for a in axes_of(entry) if a not in axes) or None for entry in spec)) if axes else spec
