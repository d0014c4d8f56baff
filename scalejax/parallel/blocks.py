"""Parameters that travel block by block: how a step fetches them, and what its backward pass does with gradients.

The explicit way to run a step is a shard_map over the data axes in which a model fetches the parameters of one block
(a layer of its scanned, rematerialised body, or what lies outside of it) when it needs them:

    whole = gather(shards, state)          forward; once more in the backward pass where gathered copies are dropped
    d shards, next state = reduce(d whole, state)          the derivative of that: a reduction over devices

An `Exchange` is this pair. Plain sharding, data parallelism and compressed schemes are exchanges, and nothing else of a
step knows which it runs. Because the reduction *is* the derivative, it runs inside the backward scan, layer by layer.

What an exchange remembers (residuals of error feedback, say) is an input of the gather, and its next value is the
"cotangent" of that input: through a scan it is stacked by layer as gradients are, and rematerialisation does not touch
it. It travels beside its parameter, in a `Bundle`, so that a model only has to scan over what it was given.

Gathering the whole tree before the loss would be ZeRO-2; only a gather inside the scanned body can drop a layer before
the next comes. There, rematerialisation decides what is kept: `Fetch.remat` names the primitive of the gather, since
naming the gathered value (`checkpoint_name`) makes jax keep the unnamed one instead.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalejax import compat
from scalejax.errors import UserError
from scalejax.parallel.mesh import BATCH_AXES

Arrays = dict[str, jax.Array]
States = dict[str, Any]
Gather = Callable[[Any], Arrays]
Loss = Callable[[Any, Any, Any, Gather], tuple[jax.Array, jax.Array, Any]]
"""(params, batch, key, gather) -> (sum, weight, aux). `params` are {path: array, or a `Bundle` in its place}; the loss
passes each of them through `gather` once, by block, before it uses it. aux is a pytree of sums."""
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


class Exchange(Protocol):
    """How the parameters of a block travel; runs inside a shard_map over the data axes.

    `shards` and gradients are {path: array} of one block. Arrays of a scanned block are those of one layer; where all
    layers are reduced at once (`accumulate="local"`) they are stacked along a first axis, and so is their state. The
    order of a dict is that in which parameters are fetched.
    """

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, Any]:
        """Makes parameters whole.

        Args:
          shards: What this device holds, in the dtype of the master parameters.
          state: {path: pytree of arrays} for the paths that have one.

        Returns:
          {path: the parameter} and whatever `reduce` needs of this, a pytree of arrays.
        """
        ...

    def reduce(self, gradients: Arrays, state: States, kept: Any) -> tuple[Arrays, States]:
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bundle:
    """A parameter and what travels beside it.

    Attributes:
      shard: What this device holds.
      state: What the exchange remembers of this parameter, a pytree of arrays; None = nothing.
      sink: Zeros of the shape of the whole parameter: where its gradient arrives if it is not to be reduced yet.
    """

    shard: Any
    state: Any = None
    sink: Any = None

    def __getitem__(self, index: Any) -> "Bundle":
        """The bundle itself: modules read a parameter as `p[...]`, and leave it at that until it is gathered."""
        if index is not Ellipsis:
            raise TypeError(f"A parameter must be gathered before it is used; got the index {index!r}.")
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class Fetch:
    """The `gather` that a loss is given: {path: shard or `Bundle`} of one block to {path: whole parameter}.

    Attributes:
      exchange: How parameters travel.
      after_forward: Whether gathered copies are dropped after the forward pass of their layer and fetched again for
        its backward pass, or kept.
      primitives: Names of the primitives whose results are the gathered copies.
      order: Paths in the order in which a loss, as it was traced, fetched them.
    """

    exchange: Exchange
    after_forward: Literal["drop", "keep"] = "drop"
    primitives: tuple[str, ...] = GATHERS
    order: list[str] = dataclasses.field(default_factory=list, init=False, repr=False)

    def __call__(self, params: Mapping[str, Any]) -> Arrays:
        self.order.extend(path for path in params if path not in self.order)
        bundles = {path: p if isinstance(p, Bundle) else Bundle(p) for path, p in params.items()}
        return _fetch(
            self.exchange,
            {path: b.shard for path, b in bundles.items()},
            {path: b.state for path, b in bundles.items() if b.state is not None},
            {path: b.sink for path, b in bundles.items() if b.sink is not None},
        )

    def remat(self, policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """A rematerialisation policy like `policy`, but for gathered parameters.

        Args:
          policy: jax's form, (primitive, *inputs, **parameters) -> what to do; None = everything is kept.
        """
        if not self.primitives or (self.after_forward == "keep" and policy is None):
            return policy
        gathered = self.after_forward == "keep"

        def adapted(primitive: Any, *args: Any, **kwargs: Any) -> Any:
            if primitive.name in self.primitives:
                return gathered
            return True if policy is None else policy(primitive, *args, **kwargs)

        return adapted


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(exchange: Exchange, shards: Arrays, state: States, sinks: Arrays) -> Arrays:
    return exchange.gather(shards, state)[0]


def _fetch_forward(exchange: Exchange, shards: Arrays, state: States, sinks: Arrays) -> tuple[Arrays, Any]:
    gathered, kept = exchange.gather(shards, state)
    # Of shards and sinks shapes and dtypes are all that the backward pass needs.
    like = jax.tree.map(lambda x: _Static((x.shape, x.dtype)), (shards, sinks))
    return gathered, (like, None if sinks else kept, state)


def _fetch_backward(exchange: Exchange, saved: Any, gradients: Arrays) -> tuple[Arrays, States, Arrays]:
    (shards, sinks), kept, state = saved
    if sinks:
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
    value: Any


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _changed(state: States, new: States) -> States:
    return jax.tree.map(lambda old, new: new if _floating(old) else old, state, new)


def _unchanged(x: jax.Array) -> Any:
    """The cotangent that leaves a state as it is: itself, or what jax wants for arrays that have none."""
    return x if _floating(x) else jnp.zeros(x.shape, jax.dtypes.float0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a parameter lies on the data axes.

    Attributes:
      ndim: Dimensions of the master parameter, the layer axis of a scanned block included.
      sharded: ((dimension of the master parameter, mesh axes), ...), data axes alone.
      apart: Axes that the loss itself runs over and along which devices hold different parts of it for good.
    """

    ndim: int
    sharded: tuple[tuple[int, tuple[str, ...]], ...]
    apart: tuple[str, ...] = ()

    def dimensions(self, ndim: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The same for an array of `ndim` dimensions: the master parameter, or one layer of it."""
        return tuple((dim - (self.ndim - ndim), axes) for dim, axes in self.sharded)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plain:
    """The exchange without any compression: all_gather forward, reduce-scatter backward, all-reduce of what is whole.

    Attributes:
      layouts: Path -> where it lies.
      axes: The axes over which gradients are summed: the data axes, and those that the loss itself runs over.
      param_dtype: Dtype in which parameters travel and are handed to the model; None = that of the master parameters.
      reduce_dtype: Dtype in which gradients are summed; None = that in which they arrive: param_dtype, or the dtype of
        the master parameters where they have been added up over parts before.
    """

    layouts: Mapping[str, Layout]
    axes: tuple[str, ...]
    param_dtype: Any = None
    reduce_dtype: Any = None

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, Any]:
        del state
        return {path: self._gather(path, shard) for path, shard in shards.items()}, None

    def reduce(self, gradients: Arrays, state: States, kept: Any) -> tuple[Arrays, States]:
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
        for dim, axes in self.layouts[path].dimensions(x.ndim):
            x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
            rest = tuple(axis for axis in rest if axis not in axes)
        return (jax.lax.psum(x, rest) if rest else x).astype(dtype)


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
    specs: Mapping[str, P], ndims: Mapping[str, int], mesh: Mesh, handled: tuple[str, ...] = ()
) -> dict[str, Layout]:
    """Where parameters lie on the data axes.

    Args:
      specs: Sharding of each master parameter.
      ndims: Dimensions of each.
      mesh: The devices.
      handled: Axes that the loss itself runs over.

    Raises:
      UserError: a dimension is sharded over another axis first and over a data axis second.
    """
    over = data_axes(mesh)
    found = {}
    for path, spec in specs.items():
        sharded, apart = [], []
        for dim, entry in enumerate(spec):
            axes = tuple(a for a in axes_of(entry) if mesh.shape[a] > 1)
            mine = tuple(axis for axis in axes if axis in over)
            if mine and axes[: len(mine)] != mine:
                raise UserError(
                    f"specs: dimension {dim} of {path!r} is sharded over {'+'.join(axes)}; a step with explicit "
                    f"exchanges needs the data axes first. Use {(*mine, *(a for a in axes if a not in mine))}."
                )
            if mine:
                sharded.append((dim, mine))
            apart += [axis for axis in axes if axis in handled]
        found[path] = Layout(ndim=ndims[path], sharded=tuple(sharded), apart=tuple(apart))
    return found


def exchanged_gradients(
    loss: Loss,
    make_exchange: Callable[[Mapping[str, Layout], tuple[str, ...]], Exchange],
    *,
    mesh: Mesh,
    specs: Mapping[str, P],
    parts: int = 1,
    accumulate: Accumulate = "communicate",
    after_forward: Literal["drop", "keep"] = "drop",
    handled: tuple[str, ...] = (),
) -> Callable[..., tuple[jax.Array, jax.Array, Any, Arrays, States]]:
    """Gradients of a loss whose parameters travel by an exchange.

    The step is a shard_map over the data axes, axes of size 1 and those that are `handled`; the others stay automatic,
    so that the compiler places what tensor parallelism needs.

    Args:
      loss: See `Loss`.
      make_exchange: (layout of each parameter, axes to sum over) -> the exchange.
      mesh: The devices.
      specs: Sharding of the master parameters, by path. No state or gradient of a scanned block may be sharded along
        its layers over a data axis.
      parts: Passes over equal cuts of each device's examples.
      accumulate: Whether gradients are reduced in every pass or once. "local" holds a whole gradient on each device.
      after_forward: What becomes of gathered parameters, see `Fetch`.
      handled: Further axes that are manual because the loss has collectives of its own over them: `stage`, for a
        pipeline. Its sum, weight and aux are then added up over them too, so that they must be zero where a device does
        not count (`pipeline.on_last_stage`).

    Returns:
      A function (params, state, batch, key, scale) -> (sum, weight, aux, gradients, next state). Arrays of the batch
      are [B, ...], sharded over `BATCH_AXES`; arrays of the state, {path: pytree}, are
      [devices, shape on one device], the first axis sharded over `BATCH_AXES` and `handled`. sum, weight and aux are
      summed over devices and parts. Gradients are those of `scale` times the sum, laid out as the master parameters.
      Each device and part gets a key of its own.
    """
    over = data_axes(mesh)
    handled = tuple(axis for axis in handled if mesh.shape[axis] > 1)
    manual = {axis for axis in mesh.axis_names if axis in over + handled or mesh.shape[axis] == 1}
    # A shard_map inside adds what is automatic, and XLA of jax 0.12 dies where that does not come last in the mesh.
    automatic = [axis for axis in mesh.axis_names if axis not in manual]
    if automatic:
        after = mesh.axis_names[mesh.axis_names.index(automatic[0]) :]
        manual -= {axis for axis in after if mesh.shape[axis] == 1}
    rows, each = P(BATCH_AXES), P((*BATCH_AXES, *handled))

    def run(
        params: Arrays, state: States, batch: Any, key: Any = None, scale: Any = 1.0
    ) -> tuple[jax.Array, jax.Array, Any, Arrays, States]:
        where = layouts(specs, {path: p.ndim for path, p in params.items()}, mesh, handled)
        exchange = make_exchange(where, over + handled)
        inside = {
            path: P(*(tuple(a for a in axes_of(entry) if a in manual) or None for entry in specs[path]))
            for path in params
        }

        def local(params: Arrays, state: States, batch: Any, key: Any, scale: Any) -> Any:
            state = jax.tree.map(lambda x: x[0], state)
            if key is not None and over:
                key = jax.random.fold_in(key, jax.lax.axis_index(over))
            fetch = Fetch(exchange, after_forward)
            one = functools.partial(_part, loss, fetch, where, accumulate, over, scale)
            total, weight, aux, gradients, state = _sum_over_parts(one, params, state, batch, key, parts)
            if accumulate == "local":
                fetched = {path: gradients[path] for path in (*fetch.order, *gradients)}
                gradients, changed = exchange.reduce(fetched, state, None)
                gradients = {path: g.astype(params[path].dtype) for path, g in gradients.items()}
                state = _changed(state, changed)
            if over + handled:
                total, weight, aux = jax.lax.psum((total, weight, aux), over + handled)
            return total, weight, aux, gradients, jax.tree.map(lambda x: x[None], state)

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(inside, each, rows, P(), P()),
            out_specs=(P(), P(), P(), inside, each),
            axis_names=manual,
            check_vma=False,  # what a gather returns is equal everywhere and its derivative is written out
        )(params, state, batch, key, jnp.asarray(scale))

    return run


def _part(
    loss: Loss,
    fetch: Fetch,
    where: Mapping[str, Layout],
    accumulate: Accumulate,
    axes: tuple[str, ...],
    scale: jax.Array,
    params: Arrays,
    state: States,
    batch: Any,
    key: Any,
) -> tuple[jax.Array, jax.Array, Any, Arrays, States]:
    """Loss and gradients of one part: of the shards, or of the whole parameters if they are not to be reduced yet."""
    sizes = {axis: jax.lax.axis_size(axis) for axis in axes}

    def sink(path: str) -> jax.Array:
        shape = list(params[path].shape)
        for dim, over in where[path].sharded:
            shape[dim] *= math.prod(sizes[axis] for axis in over)
        return jnp.zeros(shape, params[path].dtype)

    def value(moving: dict[str, Any]) -> tuple[jax.Array, Any]:
        if accumulate == "local":
            given = {path: Bundle(params[path], state.get(path), moving[path]) for path in params}
        else:
            given = {path: Bundle(*moving[path]) if path in state else moving[path][0] for path in params}
        total, weight, aux = loss(given, batch, key, fetch)
        return total, (weight, aux)

    if accumulate == "local":
        total, pull, (weight, aux) = jax.vjp(value, {path: sink(path) for path in params}, has_aux=True)
        return total, weight, aux, pull(scale.astype(total.dtype))[0], state
    moving = {path: (p, state.get(path)) for path, p in params.items()}
    total, pull, (weight, aux) = jax.vjp(value, moving, has_aux=True)
    (pulled,) = pull(scale.astype(total.dtype))
    changed = _changed(state, {path: pulled[path][1] for path in state})
    return total, weight, aux, {path: g for path, (g, _) in pulled.items()}, changed


def _sum_over_parts(one: Callable[..., Any], params: Arrays, state: States, batch: Any, key: Any, parts: int) -> Any:
    """Adds up what `one` returns for each of `parts` equal cuts of the batch; the state goes from cut to cut."""
    if parts == 1:
        return one(params, state, batch, key)
    batch = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
    keys = None if key is None else jax.random.split(key, parts)

    def step(carry: Any, part: Any) -> tuple[Any, None]:
        sums, state = carry
        *new, state = one(params, state, *part)
        return (jax.tree.map(jnp.add, sums, tuple(new)), state), None

    first = jax.tree.map(lambda x: x[0], (batch, keys))
    shapes = jax.eval_shape(one, params, state, *first)[:-1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tuple(shapes))
    (sums, state), _ = jax.lax.scan(step, (zeros, state), (batch, keys))
    return *sums, state


def axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
