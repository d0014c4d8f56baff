"""Parameters that travel block by block: how a step fetches them, and what its backward pass does with gradients.

The explicit way to run a step is a shard_map over the data axes in which a model fetches the parameters of one block
(a layer of its scanned, rematerialised body, or what lies outside of it) when it needs them:

    whole = gather(shards, state)          forward; once more in the backward pass where gathered copies are dropped
    d shards, next state = reduce(d whole, state)          the derivative of that: a reduction over devices

A `ParamExchange` is this pair. Plain sharding, data parallelism and compressed schemes are exchanges, and nothing else
of a step knows which it runs. Because the reduction *is* the derivative, it runs inside the backward scan, layer by
layer.

Where gradients are added up over parts first (accumulate="local"), the reduction runs once a step, after the backward
pass, on all parameters at once (`reduce_once`).

What an exchange remembers (residuals of error feedback, say) is an input of the gather, and its next value is the
"cotangent" of that input: through a scan it is stacked by layer as gradients are, and rematerialisation does not touch
it. It travels beside its parameter, in a `ShardWithState`, so that a model only has to scan over what it was given.

Gathering the whole tree before the loss would be ZeRO-2; only a gather inside the scanned body can drop a layer before
the next comes. There, rematerialisation decides what is kept: `ParamGather.remat` names the primitive of the gather,
since naming the gathered value (`checkpoint_name`) makes jax keep the unnamed one instead.

An exchange of one's own, whose gradients travel in bfloat16, on whatever devices there are:

    >>> import dataclasses, jax, jax.numpy as jnp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> from scalejax.parallel import fsdp
    >>> from scalejax.parallel.gradients import blocks
    >>> from scalejax.parallel.mesh import MeshShape, make_mesh
    >>> @dataclasses.dataclass(frozen=True, eq=False)
    ... class Narrow(blocks.Stateless):
    ...     plain: blocks.UncompressedExchange
    ...     def gather(self, shards, state):
    ...         return self.plain.gather(shards, state)
    ...     def reduce(self, gradients, state, kept):
    ...         narrow = {path: g.astype(jnp.bfloat16) for path, g in gradients.items()}
    ...         return self.plain.reduce(narrow, state, kept)
    >>> class NarrowFsdp(fsdp.Fsdp):
    ...     def exchange(self, layouts, axes):
    ...         return Narrow(super().exchange(layouts, axes))
    >>> def loss(params, batch, key, gather):
    ...     whole = gather(params)
    ...     return (batch @ whole["w"]).sum(), jnp.float32(batch.shape[0]), {}
    >>> mesh = make_mesh(MeshShape(fsdp=len(jax.devices())))
    >>> strategy, specs = NarrowFsdp(form="explicit"), {"w": P("fsdp")}
    >>> w = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, specs["w"]))
    >>> batch = jax.device_put(jnp.full((16, 8), 0.5), NamedSharding(mesh, P("fsdp")))
    >>> run = jax.jit(fsdp.gradients(loss, strategy, mesh=mesh, specs=specs))
    >>> total, weight, _, gradients = run({"w": w}, batch)
    >>> float(total), float(weight), gradients["w"].dtype.name, gradients["w"].tolist()[0]
    (128.0, 16.0, 'float32', [8.0, 8.0])
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalejax import compat
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.links import SentBytes
from scalejax.parallel.mesh import BATCH_AXES

if TYPE_CHECKING:
    from jaxtyping import PyTree

Arrays = dict[str, jax.Array]
States = dict[str, "PyTree"]
Gather = Callable[[Mapping[str, "jax.Array | ShardWithState"]], Arrays]
RematPolicy = Callable[..., Any]
"""jax's form of a rematerialisation policy: (primitive, *inputs, **parameters) -> what to do."""

Accumulate = Literal["communicate", "local"]
"""Whether gradients of every part of a batch are reduced over devices ("communicate"), or their local sum, once."""

DTypeName = Literal["float64", "float32", "bfloat16", "float16"]


def check_dtypes(strategy: str, **dtypes: str | None) -> None:
    """Refuses names of dtypes in which nothing travels.

    Args:
      strategy: Name of what has these fields, for the message.
      **dtypes: Field -> value.

    Raises:
      UserError: names the field.
    """
    for field, dtype in dtypes.items():
        if dtype is not None and dtype not in get_args(DTypeName):
            raise UserError(
                f"{strategy}: {field} must be one of {', '.join(get_args(DTypeName))}, or None; got {dtype!r}."
            )


GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced", "decode_shards")
"""Names of the primitives that make parameters whole."""

_MOVES = frozenset(
    ("transpose", "reshape", "convert_element_type", "squeeze", "expand_dims", "broadcast_in_dim", "copy")
)
"""Names of primitives that give an array another form: cheap to do again, of activations, too."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepContext:
    """What an exchange that runs once a step knows of the step.

    Attributes:
      step: int32[], steps of the optimizer before this one.
      key: PRNG key of this step, the same on all devices.
      learning_rate: float32[], of this step; None = there is not one.
      measure: bool[], whether this step measures what its exchange leaves out; None = no step does.
    """

    step: jax.Array
    key: jax.Array
    learning_rate: jax.Array | None = None
    measure: jax.Array | None = None

    def left_out(self, missed: Callable[[], jax.Array]) -> jax.Array:
        """float32[]: the sum of squares of `missed()`, 0 in steps that do not measure; with `measure` alone.

        It is computed anew from what is there anyway, in a branch of its own: other steps pay nothing, and the bits of
        a step do not depend on whether it measures.

        Args:
          missed: What the others make of what this device sends, less what it had to send.
        """
        assert self.measure is not None
        return jax.lax.cond(self.measure, lambda: jnp.square(missed()).sum(), lambda: jnp.float32(0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeCopy:
    """A part of the state of a parameter that has its shape, whole along the data axes and the same on all devices.

    It lies on other axes of the mesh as the parameter does, and a checkpoint has it once.
    """

    value: jax.Array


class ParamExchange(Protocol):
    """How the parameters of a block travel; runs inside a shard_map over the data axes.

    One that remembers nothing inherits `Stateless`.

    `shards` and gradients are {path: array} of one block. Arrays of a scanned block are those of one layer; where all
    layers are reduced at once (`accumulate="local"`) they are stacked along a first axis, and so is their state. The
    order of a dict is that in which parameters are fetched.
    """

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, "PyTree"]:
        """Makes parameters whole.

        Args:
          shards: What this device holds, in the dtype of the master parameters.
          state: {path: pytree of arrays} for the paths that have one.

        Returns:
          {path: the parameter} and whatever `reduce` needs of this, a pytree of arrays.
        """
        ...

    def reduce(self, gradients: Arrays, state: States, kept: "PyTree") -> tuple[Arrays, States]:
        """Sums gradients over all data devices, each device getting the part that it holds.

        Args:
          gradients: {path: gradient of the whole parameter, of this device's examples}.
          state: What `gather` was given.
          kept: What `gather` returned beside the parameters; None where it runs once for several gathers.

        Returns:
          {path: gradient of the shard}, in any dtype, and the next state: shapes and dtypes as before. Only arrays of
          floating point can change; others (a random key, a mask) stay as they are.
        """
        ...

    def reduce_once(
        self, gradients: Arrays, state: States, context: "StepContext | None"
    ) -> tuple[Arrays, States, jax.Array | None]:
        """As `reduce`, of gradients that were added up over all parts of a step: once a step, outside of any scan.

        Called in place of `reduce` where the strategy says so (`reduces`).

        Args:
          gradients: {path: gradient of the whole parameter}, all layers of a scanned block along a first axis.
          state: Of all paths.
          context: None where the caller gave no keys.

        Returns:
          What `reduce` does, and float32[]: the sum of squares of what this device left out of its messages, in units
          of the gradients; None = nothing was measured.
        """
        ...

    def init(self, shards: Arrays) -> States:
        """What a device remembers before the first step.

        Args:
          shards: {path: what this device holds} of the trained parameters.

        Returns:
          {path: pytree of arrays} for the paths that have a state. A `WholeCopy` is one array for all devices.
        """
        ...

    def after_update(self, shards: Arrays, state: States, context: "StepContext | None") -> States:
        """What a device remembers after the optimizer has run: once a step, whatever the number of parts.

        Args:
          shards: What this device holds of the new master parameters.
          state: As `reduce` returned it.
          context: None where the caller gave no keys.
        """
        ...

    def seen(self, params: Arrays, state: States) -> Arrays:
        """The parameters that `gather` gives to the model, for scoring; called outside of any shard_map.

        Args:
          params: The master parameters.
          state: Of all paths.
        """
        ...

    def rescaled(self, state: States, factor: jax.Array) -> States:
        """What is remembered once gradients arrive times a further factor: that of a scaled loss has moved.

        What is in units of gradients (residuals) has to follow; called after `after_update`, also where a step was
        skipped.

        Args:
          state: {path: pytree of arrays [devices, ...], or of `WholeCopy`}.
          factor: float[], the new factor on the loss over the old.

        Raises:
          UserError: this scheme has no rule for that.
        """
        ...

    def resized(self, path: str, state: "PyTree", sizes: Mapping[str, int]) -> "PyTree":
        """The state of a parameter on other devices.

        Args:
          path: Of the parameter, or whatever else the state is called.
          state: Pytree of NumPy arrays [devices before, ...].
          sizes: Of the axes whose product is the number of devices now, the first the slowest to change.

        Returns:
          Pytree of arrays [devices, ...].

        Raises:
          UserError: this scheme has no rule for that.
        """
        ...


@runtime_checkable
class CompressedExchange(ParamExchange, Protocol):
    """One that compresses what travels once a step, and says how much that is and what it leaves out."""

    def remarks(self, params: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int]) -> tuple[str, ...]:
        """What a user should know before the first step: bytes by level, or why nothing is compressed.

        Args:
          params: {path: the parameter, whole along the data axes}, of those that are trained.
          sizes: Of all axes of the mesh.

        Raises:
          UserError: the mesh lacks a level that the strategy asks for.
        """
        ...

    def sent(self, params: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int]) -> Mapping[str, SentBytes]:
        """{what travels: bytes that a device sends a step}; arguments as `remarks`."""
        ...

    def residual(self, params: Arrays, state: States, gradient_norm: jax.Array) -> jax.Array:
        """float32[]: the norm of the residuals, over that of what they are residuals of.

        Args:
          params: The master parameters.
          state: {path: pytree of arrays [devices, ...], or of `WholeCopy`}.
          gradient_norm: float[], of the gradient, in the units of the state.
        """
        ...


class ExplicitForm:
    """The part of a strategy that states its collectives itself and gathers nothing in a step of the model."""

    @property
    def form(self) -> Literal["explicit"]:
        """Exchanges are collectives that a program states itself."""
        return "explicit"

    @property
    def after_forward(self) -> Literal["keep"]:
        """Nothing is gathered, so there is nothing to drop."""
        return "keep"


class Stateless:
    """The part of an `ParamExchange` that remembers nothing between steps."""

    def reduce_once(
        self: ParamExchange, gradients: Arrays, state: States, context: "StepContext | None"
    ) -> tuple[Arrays, States, None]:
        del context
        return (*self.reduce(gradients, state, None), None)

    def init(self, shards: Arrays) -> States:
        del shards
        return {}

    def after_update(self, shards: Arrays, state: States, context: "StepContext | None") -> States:
        del shards, context
        return state

    def seen(self, params: Arrays, state: States) -> Arrays:
        del state
        return params

    def rescaled(self, state: States, factor: jax.Array) -> States:
        del factor
        if not state:
            return state
        raise UserError(
            f"{type(self).__name__}: what it remembers of gradients has no rule for another factor on the loss, so "
            "that gradients.loss_scaling does not go with this strategy. Set --set gradients.loss_scaling=none, or "
            "give the exchange a `rescaled`."
        )

    def resized(self, path: str, state: "PyTree", sizes: Mapping[str, int]) -> "PyTree":
        del state
        devices = math.prod(sizes.values())
        raise UserError(
            f"{type(self).__name__}: the state of {path!r} has no rule for another number of devices, {devices}. Go on "
            "with as many as before."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardWithState:
    """A parameter and what travels beside it.

    Attributes:
      shard: What this device holds.
      state: What the exchange remembers of this parameter, a pytree of arrays; None = nothing.
      sink: Zeros of the shape of the whole parameter: where its gradient arrives if it is not to be reduced yet.
    """

    shard: jax.Array
    state: "PyTree" = None
    sink: jax.Array | None = None

    def __getitem__(self, index: object) -> "ShardWithState":
        """The bundle itself: modules read a parameter as `p[...]`, and leave it at that until it is gathered."""
        if index is not Ellipsis:
            raise TypeError(f"A parameter must be gathered before it is used; got the index {index!r}.")
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class ParamGather:
    """The `gather` that a loss is given: {path: shard or `ShardWithState`} of one block to {path: whole parameter}.

    Attributes:
      exchange: How parameters travel.
      after_forward: Whether gathered copies are dropped after the forward pass of their layer and fetched again for
        its backward pass, or kept.
      primitives: Names of the primitives whose results are the gathered copies.
      frozen: Paths of parameters that are not trained: gathered, and nothing of them is reduced.
      order: Paths in the order in which a loss, as it was traced, fetched them.
    """

    exchange: ParamExchange
    after_forward: Literal["drop", "keep"] = "drop"
    primitives: tuple[str, ...] = GATHERS
    frozen: frozenset[str] = frozenset()
    order: list[str] = dataclasses.field(default_factory=list, init=False, repr=False)

    def __call__(self, params: Mapping[str, Any]) -> Arrays:
        self.order.extend(path for path in params if path not in self.order)
        whole: Arrays = {}
        if frozen := {path: p for path, p in params.items() if path in self.frozen}:
            # Not by `_fetch`, whose derivative would reduce gradients that nobody wants.
            whole = jax.lax.stop_gradient(self.exchange.gather(frozen, {})[0])
        bundles = {
            path: p if isinstance(p, ShardWithState) else ShardWithState(p)
            for path, p in params.items()
            if path not in frozen
        }
        if bundles:
            whole |= _fetch(
                self.exchange,
                {path: b.shard for path, b in bundles.items()},
                {path: b.state for path, b in bundles.items() if b.state is not None},
                {path: b.sink for path, b in bundles.items() if b.sink is not None},
            )
        return {path: whole[path] for path in params}

    def remat(self, policy: RematPolicy | None) -> RematPolicy | None:
        """A rematerialisation policy like `policy`, but for gathered parameters.

        Args:
          policy: jax's form, (primitive, *inputs, **parameters) -> what to do; None = everything is kept.
        """
        if not self.primitives or (self.after_forward == "keep" and policy is None):
            return policy
        gathered = self.after_forward == "keep"

        def adapted(primitive: Primitive, *args: Any, **kwargs: Any) -> Any:
            if primitive.name in self.primitives:
                return gathered
            if not gathered and primitive.name in _MOVES:
                # What is kept of a turned or cast parameter would be as large as the parameter that is dropped.
                return False
            return True if policy is None else policy(primitive, *args, **kwargs)

        return adapted


@compat.custom_vjp(0)
def _fetch(exchange: ParamExchange, shards: Arrays, state: States, sinks: Arrays) -> Arrays:
    return exchange.gather(shards, state)[0]


def _fetch_forward(exchange: ParamExchange, shards: Arrays, state: States, sinks: Arrays) -> tuple[Arrays, "PyTree"]:
    gathered, kept = exchange.gather(shards, state)
    # Of shards and sinks shapes and dtypes are all that the backward pass needs.
    like = jax.tree.map(lambda x: _Static((x.shape, x.dtype)), (shards, sinks))
    return gathered, (like, None if sinks else kept, state)


def _fetch_backward(exchange: ParamExchange, saved: "PyTree", gradients: Arrays) -> tuple[Arrays, States, Arrays]:
    (shards, sinks), kept, state = saved
    if sinks:
        # The gradient leaves by the sink, whole and not yet summed; what the shard gets is read by nobody.
        zeros = {path: jnp.zeros(*like.value) for path, like in shards.items()}
        arrived = {path: gradients[path].astype(like.value[1]) for path, like in sinks.items()}
        return zeros, jax.tree.map(_unchanged, state), arrived
    reduced, changed = exchange.reduce(gradients, state, kept)
    reduced = {path: reduced[path].astype(like.value[1]) for path, like in shards.items()}
    changed = jax.tree.map(lambda old, new: new if _floating(old) else _unchanged(old), state, changed)
    return reduced, changed, {}


_fetch.defvjp(_fetch_forward, _fetch_backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: tuple[tuple[int, ...], jax.typing.DTypeLike]


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def on_device(state: States) -> States:
    """The state [devices, ...], as a shard_map gives it, as that of this device: without its first axis."""
    return jax.tree.map(lambda x: x if isinstance(x, WholeCopy) else x[0], state, is_leaf=is_whole_copy)


def of_devices(state: States) -> States:
    """The inverse of `on_device`."""
    return jax.tree.map(lambda x: x if isinstance(x, WholeCopy) else x[None], state, is_leaf=is_whole_copy)


def is_whole_copy(x: object) -> bool:
    return isinstance(x, WholeCopy)


def changed_states(state: States, new: States) -> States:
    """The next state: arrays that are not of floating point stay."""
    return jax.tree.map(lambda old, new: new if _floating(old) else old, state, new)


def _unchanged(x: jax.Array) -> jax.Array:
    """The cotangent that leaves a state as it is: itself, or what jax wants for arrays that have none."""
    return x if _floating(x) else jnp.zeros(x.shape, jax.dtypes.float0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """Where a parameter lies on the data axes.

    Attributes:
      ndim: Dimensions of the master parameter, the layer axis of a scanned block included.
      sharded: ((dimension of the master parameter, mesh axes), ...), data axes alone.
      apart: Axes along which devices hold different parts of it, or different parameters, for good: the loss itself
        runs over them.
      automatic: ((dimension, mesh axes), ...) of the axes whose collectives the compiler places.
      sides: ((mesh axis, see `mesh.torus_sides`), ...).
    """

    ndim: int
    sharded: tuple[tuple[int, tuple[str, ...]], ...]
    apart: tuple[str, ...] = ()
    automatic: tuple[tuple[int, tuple[str, ...]], ...] = ()
    sides: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def dimensions(self, ndim: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The same for an array of `ndim` dimensions: the master parameter, or one layer of it."""
        return tuple((dim - (self.ndim - ndim), axes) for dim, axes in self.sharded)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class UncompressedExchange(Stateless):
    """The exchange without any compression: all_gather forward, reduce-scatter backward, all-reduce of what is whole.

    Attributes:
      layouts: Path -> where it lies.
      axes: The axes over which gradients are summed: the data axes, and those that the loss itself runs over.
      param_dtype: Dtype in which parameters travel and are handed to the model; None = that of the master parameters.
      reduce_dtype: Dtype in which gradients are summed; None = that in which they arrive: param_dtype, or the dtype of
        the master parameters where they have been added up over parts before.
    """

    layouts: Mapping[str, ParamLayout]
    axes: tuple[str, ...]
    param_dtype: jax.typing.DTypeLike | None = None
    reduce_dtype: jax.typing.DTypeLike | None = None

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, None]:
        del state
        return {path: self._gather(path, shard) for path, shard in shards.items()}, None

    def reduce(self, gradients: Arrays, state: States, kept: "PyTree") -> tuple[Arrays, States]:
        del kept
        return {path: self._reduce(path, gradient) for path, gradient in gradients.items()}, state

    def _gather(self, path: str, x: jax.Array) -> jax.Array:
        if self.param_dtype is not None:
            x = x.astype(self.param_dtype)  # before it travels
        for dim, axes in self.layouts[path].dimensions(x.ndim):
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    def _reduce(self, path: str, x: jax.Array) -> jax.Array:
        x = x if self.reduce_dtype is None else x.astype(self.reduce_dtype)
        dtype = x.dtype
        x = summable(x)
        rest = tuple(axis for axis in self.axes if axis not in self.layouts[path].apart)
        # Scattered first, so that no more than a shard is summed over the other axes.
        for dim, axes in self.layouts[path].dimensions(x.ndim):
            x = sum_and_scatter(x, axes, dim, dict(self.layouts[path].sides))
            rest = tuple(axis for axis in rest if axis not in axes)
        return (jax.lax.psum(x, rest) if rest else x).astype(dtype)


def sum_and_scatter(x: jax.Array, axes: tuple[str, ...], dim: int, sides: Mapping[str, tuple[int, ...]]) -> jax.Array:
    """The sum over devices along axes, of which each keeps its cut of a dimension; inside a shard_map.

    Over one side of a torus after the other: of a reduce-scatter over several sides the compilers for TPUs make an
    all-reduce, which moves twice the bytes, and cut its result.

    Args:
      x: What each device adds.
      axes: Mesh axes.
      dim: The dimension.
      sides: Mesh axis -> see `mesh.torus_sides`.
    """
    if all(len(sides.get(axis, ())) < 2 for axis in axes):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    for axis in axes:
        size = jax.lax.axis_size(axis)
        places = np.arange(size).reshape(sides.get(axis, (size,)))
        for side in range(places.ndim):
            groups = np.moveaxis(places, side, -1).reshape(-1, places.shape[side]).tolist()
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return x


def summable(x: jax.Array) -> jax.Array:
    """x as XLA can sum it over devices, inside a shard_map.

    XLA for CPU aborts the process on sums of 16-bit floats where some axis of the mesh is automatic (jaxlib 0.10 to
    0.12: "Invalid binary instruction opcode copy"). It computes such sums in float32 anyway, so there it is given that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    partly = any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in mesh.manual_axes)
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow and partly and compat.device_kind() == "cpu" else x


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh that shard the batch, those of size 1 left out."""
    return tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)


def layouts(
    specs: Mapping[str, P],
    ndims: Mapping[str, int],
    mesh: Mesh,
    handled: tuple[str, ...] = (),
    apart: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, ParamLayout]:
    """Where parameters lie on the data axes.

    Args:
      specs: Sharding of each master parameter.
      ndims: Dimensions of each.
      mesh: The devices.
      handled: Axes that the loss itself runs over.
      apart: Path -> data axes along which devices hold different parameters.

    Raises:
      UserError: a dimension is sharded over another axis first and over a data axis second.
    """
    over = data_axes(mesh)
    sides = tuple((axis, meshes.torus_sides(mesh, axis)) for axis in over)
    found = {}
    for path, spec in specs.items():
        sharded, kept, automatic = [], [], []
        alone = (apart or {}).get(path, ())
        for dim, entry in enumerate(spec):
            axes = tuple(a for a in axes_of(entry) if mesh.shape[a] > 1)
            kept += [axis for axis in axes if axis in handled or axis in alone]
            axes = tuple(axis for axis in axes if axis not in alone)
            mine = tuple(axis for axis in axes if axis in over)
            if mine and axes[: len(mine)] != mine:
                raise UserError(
                    f"specs: dimension {dim} of {path!r} is sharded over {'+'.join(axes)}; a step with explicit "
                    f"exchanges needs the data axes first. Use {(*mine, *(a for a in axes if a not in mine))}."
                )
            if mine:
                sharded.append((dim, mine))
            if rest := tuple(axis for axis in axes if axis not in (*mine, *handled)):
                automatic.append((dim, rest))
        found[path] = ParamLayout(
            ndim=ndims[path], sharded=tuple(sharded), apart=tuple(kept), automatic=tuple(automatic), sides=sides
        )
    return found


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
