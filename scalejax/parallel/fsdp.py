"""Fully sharded data parallelism (Zhao et al. 2023, arXiv 2304.11277) as named strategies.

    NO_SHARD             whole parameters on every device                               gradients: all-reduce
    SHARD_GRAD_OP        sharded over all data axes, gathered from forward to backward  gradients: reduce-scatter
    FULL_SHARD           sharded over all data axes, gathered twice                     gradients: reduce-scatter
    HYBRID_SHARD_ZERO2   as SHARD_GRAD_OP inside an index of `replica`                  reduce-scatter, then all-reduce
    HYBRID_SHARD         as FULL_SHARD inside an index of `replica`                     reduce-scatter, then all-reduce

What is sharded is the master parameter, its gradient and its optimizer state. Each parameter is cut along one of its
dimensions, so that names, shapes, norms and optimizers stay those of one device; nothing is flattened. A unit of the
paper is one layer of a scanned body, or what a model fetches at once outside of it.

Two forms, see `Fsdp.form`: the compiler places the collectives, or `parallel.gradients.blocks` does.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel.compression import quantized_exchange
from scalejax.parallel.compression.wire_formats import WireFormat, check_formats
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.gradients import blocks
from scalejax.parallel.gradients.blocks import Accumulate, Arrays, DTypeName, Gather, ShardWithState
from scalejax.parallel.gradients.compute import Keys, Loss, LossInputs
from scalejax.parallel.gradients.compute import gradients as every_gradient
from scalejax.parallel.mesh import BATCH_AXES
from scalejax.parallel.rules import LogicalAxes, ParameterPlacement, Rules
from scalejax.parallel.sdp4bit import Sdp4Bit

if TYPE_CHECKING:
    from jaxtyping import PyTree

Sharding = Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]

_SHARDED_OVER: dict[str, tuple[str, ...]] = {
    "NO_SHARD": (),
    "SHARD_GRAD_OP": BATCH_AXES,
    "FULL_SHARD": BATCH_AXES,
    "HYBRID_SHARD": tuple(axis for axis in BATCH_AXES if axis != "replica"),
    "HYBRID_SHARD_ZERO2": tuple(axis for axis in BATCH_AXES if axis != "replica"),
}
_AFTER_FORWARD: dict[str, Literal["drop", "keep"]] = {
    "NO_SHARD": "keep",
    "SHARD_GRAD_OP": "keep",
    "FULL_SHARD": "drop",
    "HYBRID_SHARD": "drop",
    "HYBRID_SHARD_ZERO2": "keep",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fsdp:
    """A strategy.

    Attributes:
      sharding: Which, see the table above.
      form: "implicit": shardings under jit, collectives placed by the compiler. "explicit": a shard_map over the data
        axes with one exchange a block; every collective is stated, and so are dtypes in which they run.
      param_dtype: Dtype in which parameters are gathered and given to the model; None = that of the master parameters.
        The shard is cast before it travels.
      reduce_dtype: Dtype in which gradients are summed over devices (explicit form); None = param_dtype, or that of the
        master parameters with accumulate="local", which adds up in it.
      gather_format: Block format in which parameters are gathered (explicit form); None = param_dtype. The model sees
        them as the format does, in param_dtype; master parameters stay as they are. See `QuantizedExchange`.
      reduce_format: Block format in which gradients travel to the device that adds them up, in float32 (explicit form);
        None = reduce_dtype. What is whole on every device, and sums over copies of a shard, stay in their dtype.
      output_dtype: Dtype of floating arrays in what the loss returns beside its sum and weight; None = as they are.
      accumulate: With several parts: reduce the gradients of each ("communicate"), or their local sum once ("local",
        explicit form; a whole gradient rests on each device).
      replicate_below: Parameters with fewer elements (of one layer) are not sharded: latency would cost more than the
        memory is worth.
    """

    sharding: Sharding = "FULL_SHARD"
    form: Literal["implicit", "explicit"] = "implicit"
    param_dtype: DTypeName | None = None
    reduce_dtype: DTypeName | None = None
    gather_format: WireFormat | None = None
    reduce_format: WireFormat | None = None
    output_dtype: DTypeName | None = None
    accumulate: Accumulate = "communicate"
    replicate_below: int = 0

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def remembers(self) -> str:
        """What the state of the exchange is of; a run goes on with no other."""
        return type(self).__name__

    @property
    def reduces(self) -> Literal["parts", "step"]:
        """Whether gradients are reduced in the backward pass of each part, or once a step."""
        return "step" if self.accumulate == "local" else "parts"

    @property
    def after_forward(self) -> Literal["drop", "keep"]:
        """Whether gathered parameters of a layer are dropped after its forward pass ("reshard after forward")."""
        return _AFTER_FORWARD[self.sharding]

    def axes(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The mesh axes over which this strategy shards parameters; those of size 1 left out."""
        return tuple(axis for axis in _SHARDED_OVER[self.sharding] if mesh.shape.get(axis, 1) > 1)

    def exchange(self, layouts: Mapping[str, blocks.ParamLayout], axes: tuple[str, ...]) -> blocks.ParamExchange:
        """How parameters travel in the explicit form."""
        plain = blocks.UncompressedExchange(
            layouts=layouts, axes=axes, param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype
        )
        if not self.formats:
            return plain
        return quantized_exchange.QuantizedExchange(
            plain=plain, gather_format=self.gather_format, reduce_format=self.reduce_format
        )

    def check_specs(self, specs: Mapping[str, P], mesh: Mesh, apart: Mapping[str, tuple[str, ...]]) -> None:
        """Refuses shardings of parameters that are not this strategy's.

        Args:
          specs: Path -> sharding, without the axes that `apart` names.
          mesh: The devices.
          apart: See `parallel.gradients.compute.gradients`.

        Raises:
          UserError: names a parameter.
        """
        _check_specs(self, mesh, specs, apart)
        _check_blocks(self, mesh, specs)

    @property
    def formats(self) -> dict[str, str]:
        """The fields that name a block format, with their names."""
        named = {"gather_format": self.gather_format, "reduce_format": self.reduce_format}
        return {field: format for field, format in named.items() if format is not None}


Strategy = Fsdp | Ddp | Sdp4Bit


def place(
    params: Mapping[str, tuple[LogicalAxes, tuple[int, ...]]],
    strategy: Strategy,
    *,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    frozen: Collection[str] = (),
) -> tuple[ParameterPlacement, ...]:
    """Where each master parameter lies.

    The rules say which dimensions lie on the other axes (`tensor`). The axes of the strategy take one more dimension of
    each parameter: the one that the rules give to `fsdp`, if it divides, else the largest that divides. The axis
    "layers" of a scanned block is never taken, since a layer would then rest on one device.

    Experts stay on `expert`, and towers where the rules put them: devices along it hold different ones for good
    (`apart`), each sharded over the other axes of the strategy.

    Args:
      params: Path -> (logical axes, shape).
      strategy: The strategy.
      mesh: The devices.
      rules: Logical axis -> mesh axes; None = no axes but those of the strategy.
      frozen: Paths of those that are not trained. `Sdp4Bit`, which gathers nothing for a step, keeps them whole.

    Returns:
      One placement a parameter, with the reason where it stays whole on the data axes.
    """
    table = rules or Rules()
    others = Rules(
        axes=tuple(
            (name, axes if name in ("experts", "towers") else tuple(a for a in axes if a not in BATCH_AXES))
            for name, axes in table.axes
        ),
    )
    placed = []
    for name, (logical_axes, shape) in params.items():
        base = others.describe({name: (logical_axes, shape)}, mesh)[0]
        entries: list[str | tuple[str, ...] | None] = [*base.spec, *(None for _ in range(len(shape) - len(base.spec)))]
        apart = tuple(axis for entry in entries for axis in blocks.axes_of(entry) if axis in BATCH_AXES)
        over = tuple(axis for axis in strategy.axes(mesh) if axis not in apart)
        count = math.prod(mesh.shape[axis] for axis in over)
        reason = base.reason
        elements = math.prod(n for n, axis in zip(shape, logical_axes, strict=True) if axis != "layers")
        free = [
            dim
            for dim, (size, axis) in enumerate(zip(shape, logical_axes, strict=True))
            if axis != "layers" and entries[dim] is None and size % count == 0
        ]
        if over and elements < strategy.replicate_below:
            reason = _join(reason, f"{elements} elements are fewer than replicate_below={strategy.replicate_below}")
        elif over and name in frozen and isinstance(strategy, Sdp4Bit):
            reason = _join(reason, "it is not trained, and Sdp4Bit computes with whole parameters")
        elif over and not free:
            stated = "x".join(f"{axis}={mesh.shape[axis]}" for axis in over)
            reason = _join(reason, f"no free dimension of {shape} divides by {stated}")
        elif over:
            named = [dim for dim in free if "fsdp" in table.mesh_axes(logical_axes[dim])]
            taken = named[0] if named else max(free, key=lambda dim: shape[dim])
            entries[taken] = over if len(over) > 1 else next(iter(over))
        while entries and entries[-1] is None:
            entries.pop()
        placed.append(ParameterPlacement(name, shape, logical_axes, P(*entries), reason, apart))
    return tuple(placed)


def gradients(
    loss: Callable[
        [Mapping[str, jax.Array | ShardWithState], "PyTree", jax.Array | None, Gather],
        tuple[jax.Array, jax.Array, dict[str, jax.Array]],
    ],
    strategy: Strategy,
    *,
    mesh: Mesh,
    specs: Mapping[str, P],
    parts: int = 1,
    handled: tuple[str, ...] = (),
) -> Callable[..., tuple[jax.Array, jax.Array, dict[str, jax.Array], Arrays]]:
    """Gradients of a loss of parameters alone under a strategy; to be called under jit.

    `parallel.gradients.compute` is the whole of it: inputs, frozen parameters, variables, exchanges with memory.

    Args:
      loss: (params, batch, key, gather) -> (sum, weight, sums). `params` are {path: array, or a `Bundle` in its place};
        the loss passes each of them through `gather` once, by block, before it uses it.
      strategy: The strategy.
      mesh: The devices.
      specs: Path -> sharding of the master parameter, see `place`.
      parts: Passes over equal cuts of the batch, their gradients added up.
      handled: See `parallel.gradients.compute.gradients`.

    Returns:
      A function (params, batch, key=None, scale=1.0) -> (sum, weight, sums, gradients). params are {path: array} in the
      shardings `specs`; arrays of the batch are [B, ...], sharded over the batch axes. sum, weight and sums are over
      the global batch; gradients are those of scale times the sum, in dtype and sharding of the parameters.

    Raises:
      UserError: the parameters are not sharded as the strategy says, or, on call, the batch does not divide.
    """

    def of_given(given: LossInputs) -> tuple[Loss, Arrays]:
        total, weight, sums = loss(given.params, given.batch, given.keys and given.keys.examples, given.gather)
        return Loss(total, weight, sums), {}

    run = every_gradient(of_given, strategy, mesh=mesh, specs=specs, parts=parts, handled=handled)

    def of_params(
        params: Arrays, batch: "PyTree", key: jax.Array | None = None, scale: jax.typing.ArrayLike = 1.0
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], Arrays]:
        keys = None if key is None else Keys(key, key)
        found = run(params, batch, keys=keys, scale=scale)
        sums = found.sums
        if strategy.output_dtype is not None:
            sums = jax.tree.map(lambda x: _cast_floating(x, strategy.output_dtype), sums)
        return found.sum, found.weight, sums, found.params

    return of_params


def sharded_init(init: Callable[..., Arrays], *, mesh: Mesh, specs: Mapping[str, P]) -> Callable[..., Arrays]:
    """A jitted `init` whose parameters are born sharded: no device ever holds more than what it keeps.

    Every device computes the random numbers of its own shard, so that the result does not depend on the mesh.

    Args:
      init: (key, ...) -> {path: array}.
      mesh: The devices.
      specs: Path -> sharding.

    Raises:
      UserError: jax is set up so that random numbers depend on the sharding.
    """
    check_random()
    return jax.jit(init, out_shardings={path: NamedSharding(mesh, spec) for path, spec in specs.items()})


def check_random() -> None:
    """Refuses a jax whose random numbers depend on how they are sharded.

    Raises:
      UserError: names the setting.
    """
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError(
            "jax_threefry_partitionable is off, so that parameters would depend on the mesh and each device would "
            "compute all of them. Leave it at its default, True."
        )


def _check_options(own: Fsdp) -> None:
    """Refuses options that do not go together.

                             implicit    explicit    NO_SHARD    beside
        param_dtype          yes         yes         yes         gather_format: not "float64"
        reduce_dtype         refused     yes         yes         reduce_format: "float32" alone
        accumulate="local"   refused     yes         yes
        gather_format        refused     yes         refused
        reduce_format        refused     yes         refused

    What a mesh adds is refused in `_check_specs` (shardings of another strategy) and `_check_blocks` (blocks of a
    format that would lie on several devices); what a model adds, see docs/parallelism.md, "What composes with what".

    Raises:
      UserError: names the fields.
    """

    def refuse(when: bool, why: str) -> None:
        if when:
            raise UserError(f"Fsdp: {why}")

    implicit = own.form == "implicit"
    shardings = ", ".join(_SHARDED_OVER)
    refuse(own.sharding not in _SHARDED_OVER, f"sharding must be one of {shardings}; got {own.sharding!r}.")
    refuse(own.form not in ("implicit", "explicit"), f"form must be 'implicit' or 'explicit'; got {own.form!r}.")
    refuse(
        own.accumulate not in ("communicate", "local"),
        f"accumulate must be 'communicate' or 'local'; got {own.accumulate!r}.",
    )
    blocks.check_dtypes(
        "Fsdp", param_dtype=own.param_dtype, reduce_dtype=own.reduce_dtype, output_dtype=own.output_dtype
    )
    refuse(
        implicit and own.accumulate == "local",
        "accumulate='local' needs form='explicit': under jit with shardings a gradient that is not yet "
        "summed over devices cannot be said. Set form='explicit', or accumulate='communicate'.",
    )
    refuse(
        implicit and own.reduce_dtype is not None,
        f"reduce_dtype={own.reduce_dtype!r} needs form='explicit': in the implicit form the compiler "
        "sums in the dtype of the matrix product. Set form='explicit', or leave reduce_dtype out.",
    )
    refuse(own.replicate_below < 0, f"replicate_below must be at least 0; got {own.replicate_below}.")
    check_formats("Fsdp", gather_format=own.gather_format, reduce_format=own.reduce_format)
    for field, format in own.formats.items():
        refuse(
            implicit,
            f"{field}={format!r} needs form='explicit': in the implicit form the compiler places the "
            f"collectives and knows dtypes alone. Set form='explicit', or leave {field} out.",
        )
        refuse(
            own.sharding == "NO_SHARD",
            f"{field}={format!r} needs parameters that are sharded: under NO_SHARD nothing is gathered, "
            "and whole gradients are summed by all-reduces, which cannot add up encoded numbers. Name another "
            f"sharding, such as FULL_SHARD, or leave {field} out.",
        )
    refuse(
        own.gather_format is not None and own.param_dtype == "float64",
        f"gather_format={own.gather_format!r} decodes to 32 bits at most; got param_dtype='float64'. "
        "Leave one of them out.",
    )
    refuse(
        own.reduce_format is not None and own.reduce_dtype not in (None, "float32"),
        f"what travels in reduce_format={own.reduce_format!r} is added up in float32; got "
        f"reduce_dtype={own.reduce_dtype!r}. Leave one of them out.",
    )


def _check_specs(strategy: Fsdp, mesh: Mesh, specs: Mapping[str, P], apart: Mapping[str, tuple[str, ...]]) -> None:
    for path, spec in specs.items():
        allowed = tuple(axis for axis in strategy.axes(mesh) if axis not in apart.get(path, ()))
        used = {a for entry in spec for a in blocks.axes_of(entry) if a in BATCH_AXES and mesh.shape[a] > 1}
        if used and used != set(allowed):
            said = "+".join(a for a in BATCH_AXES if a in used)
            meant = "over " + "+".join(allowed) if allowed else "over no data axis"
            raise UserError(
                f"gradients: {path!r} is sharded over {said}, but {strategy.sharding} on this mesh shards {meant} or "
                "leaves a parameter whole. Take the specs of `fsdp.place`, or name the strategy that fits them."
            )


def _check_blocks(strategy: Fsdp, mesh: Mesh, specs: Mapping[str, P]) -> None:
    """Refuses parameters whose blocks would lie on several devices."""
    for (field, format), (path, spec) in itertools.product(strategy.formats.items(), specs.items()):
        named = [tuple(a for a in blocks.axes_of(entry) if mesh.shape[a] > 1) for entry in spec]
        beside = sorted({a for axes in named for a in axes if a not in (*BATCH_AXES, "stage")})
        if beside:
            stated = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in beside)
            raise UserError(
                f"Fsdp: {path!r} is cut over {stated} as well, which the compiler places: blocks of {format} would "
                f"straddle devices. Use a mesh with {', '.join(f'{a}=1' for a in beside)}, or leave {field} out."
            )
        cut = [str(dim) for dim, axes in enumerate(named) if any(a in BATCH_AXES for a in axes)]
        if len(cut) > 1:
            raise UserError(
                f"Fsdp: {path!r} is cut along dimensions {' and '.join(cut)}, and parameters that travel in {format} "
                f"along one. Take the specs of `fsdp.place`, or leave {field} out."
            )


def _cast_floating(x: jax.Array, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _join(*reasons: str) -> str:
    return "; ".join(reason for reason in reasons if reason)
