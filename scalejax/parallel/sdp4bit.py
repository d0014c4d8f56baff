"""SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526): sharded data parallelism whose exchanges travel in 4 bits.

Master parameters and the optimizer are sharded over all data axes; every device holds a whole copy besides, with which
the model computes. Once a step,

    gradients   a reduce-scatter in two hops: 8 bits within an index of `replica`, 4 bits between (`gradients`)
    weights     an all-gather in 4 bits: the owner of a shard quantizes master minus copy, and every device, the owner
                too, adds the dequantized difference to its copy (`weights`)

This is error feedback in disguise: the rounding error of a difference is part of the next one. Gradients are rounded
stochastically, after a Hadamard transform that spreads outliers over 32 values; the transform is linear, so that one
before the first hop and one after the second are enough.

Gradients and weights are concatenated into buckets, so that groups do not depend on the shapes of parameters. Buckets
are independent of each other: the first hop of one can overlap the second hop of another.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax import units
from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.kernels import group_quantize
from scalejax.kernels.group_quantize import IntGroups, Transform, check_group_size
from scalejax.parallel import links
from scalejax.parallel.compression import arrivals, codec
from scalejax.parallel.ddp import MIB, buckets
from scalejax.parallel.gradients import blocks
from scalejax.parallel.gradients.blocks import Arrays, DTypeName, ParamLayout, States, StepContext, WholeCopy, axes_of
from scalejax.parallel.gradients.scaling import global_norm
from scalejax.parallel.links import SLOW_AXIS, SentBytes
from scalejax.parallel.mesh import BATCH_AXES

if TYPE_CHECKING:
    from jaxtyping import PyTree

Weights = Literal["plain", "quantized", "differences"]
Hops = Literal["plain", "one_level", "two_level"]
Bits = Literal[4, 8, 32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sdp4Bit(blocks.ExplicitForm):
    """A strategy. Always in the explicit form; gradients of several parts are added up before they travel, once a step.

    Attributes:
      weights: What brings the whole copies up to date: the master parameters in `param_dtype` ("plain"), the same
        quantized ("quantized", qW in the paper, which loses accuracy), or quantized differences ("differences", qWD).
      gradients: Reduced in their dtype ("plain"), in one all_to_all over all data axes ("one_level"), or in one over
        the axes within an index of `replica` and one over `replica` ("two_level").
      transform: Of gradients before they are quantized.
      weight_bits, weight_group: Of weights; groups share a scale.
      fast_bits, fast_group: Of the hop within an index of `replica`; 32 bits = float32, not quantized.
      slow_bits, slow_group: Of the hop between indices of `replica`, and of "one_level".
      weight_rounding: "stochastic", as in the released code, or "nearest"; gradients are always rounded stochastically.
      gradients_from_step: Gradients travel in their dtype before this step.
      bucket_bytes: Most bytes of float32 that travel together.
      param_dtype: Of the copy, with which the model computes; None = that of the master parameters.
      output_dtype: Dtype of floating arrays in what the loss returns beside its sum and weight; None = as they are.
      replicate_below: Parameters with fewer elements (of one layer) are whole on every device and not quantized.
    """

    weights: Weights = "differences"
    gradients: Hops = "two_level"
    transform: Transform = "hadamard"
    weight_bits: Bits = 4
    weight_group: int = 2048
    fast_bits: Bits = 8
    fast_group: int = 128
    slow_bits: Bits = 4
    slow_group: int = 128
    weight_rounding: Literal["stochastic", "nearest"] = "stochastic"
    gradients_from_step: int = 0
    bucket_bytes: int = 256 * MIB
    param_dtype: DTypeName | None = "bfloat16"
    output_dtype: DTypeName | None = None
    replicate_below: int = 0

    WITHOUT: ClassVar[Mapping[str, str]] = {
        "sharding": "every device keeps a whole copy between steps, 2 bytes a parameter in bfloat16: no FULL_SHARD"
    }
    """Fields of other strategies that this one cannot have, and why."""

    def __post_init__(self) -> None:
        for field, choices in (("weights", Weights), ("gradients", Hops)):
            check_one_of(f"Sdp4Bit: {field}", getattr(self, field), get_args(choices))
        check_one_of("Sdp4Bit: transform", self.transform, get_args(Transform))
        check_one_of("Sdp4Bit: weight_rounding", self.weight_rounding, ("stochastic", "nearest"))
        blocks.check_dtypes("Sdp4Bit", param_dtype=self.param_dtype, output_dtype=self.output_dtype)
        check_at_least("Sdp4Bit: gradients_from_step", self.gradients_from_step, 0)
        check_at_least("Sdp4Bit: bucket_bytes", self.bucket_bytes, 1)
        check_at_least("Sdp4Bit: replicate_below", self.replicate_below, 0)
        for kind in ("weight", "fast", "slow"):
            self.format(kind)

    def format(self, kind: Literal["weight", "fast", "slow"]) -> IntGroups | None:
        """How values travel on a way; None = as float32.

        Raises:
          UserError: there are no such bits, or groups cannot have that size.
        """
        bits, size = getattr(self, f"{kind}_bits"), getattr(self, f"{kind}_group")
        check_one_of(f"Sdp4Bit: {kind}_bits", bits, get_args(Bits))
        check_group_size(f"Sdp4Bit: {kind}_group", size)
        return None if bits == 32 else IntGroups(bits=bits, size=size)

    @property
    def accumulate(self) -> Literal["local"]:
        """Gradients of all parts are reduced once a step: quantizing each part would add its noise each time."""
        return "local"

    @property
    def remembers(self) -> str:
        """What the state of the exchange depends on; a run resumes with no other. Gradients have no residuals."""
        how = "" if self.weights == "plain" else f" of {self.weight_bits} bits in groups of {self.weight_group}"
        return f"Sdp4Bit weights={self.weights}{how}"

    @property
    def reduces(self) -> Literal["step"]:
        """Gradients are reduced once a step."""
        return "step"

    @property
    def reduce_dtype(self) -> None:
        """Gradients that are not quantized are summed in the dtype of the master parameters."""
        return

    def axes(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The mesh axes over which master parameters are sharded."""
        return tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)

    def check_specs(self, specs: Mapping[str, P], mesh: Mesh, apart: Mapping[str, tuple[str, ...]]) -> None:
        """Refuses parameters of which devices hold different ones, and those cut along several dimensions of data axes.

        Raises:
          UserError: names one.
        """
        if apart:
            raise UserError(
                f"Sdp4Bit: devices along {'+'.join(next(iter(apart.values())))} hold different parameters for good "
                f"({next(iter(apart))!r}), of which there are no whole copies. Use --set strategy=Fsdp."
            )
        for path, spec in specs.items():
            named = [tuple(a for a in axes_of(entry) if mesh.shape[a] > 1) for entry in spec]
            if any("stage" in axes for axes in named):
                raise UserError(
                    f"Sdp4Bit: devices along stage={mesh.shape['stage']} hold different layers of {path!r}, of which "
                    "there are no whole copies. Use a mesh with stage=1, or --set strategy=Fsdp."
                )
            if sum(any(axis in BATCH_AXES for axis in axes) for axes in named) > 1:
                raise UserError(f"Sdp4Bit: {path!r} is cut along several dimensions. Take the specs of `fsdp.place`.")

    def exchange(self, layouts: Mapping[str, ParamLayout], axes: tuple[str, ...]) -> "Sdp4BitExchange":
        """How parameters travel."""
        return Sdp4BitExchange(
            strategy=self,
            plain=blocks.UncompressedExchange(layouts=layouts, axes=axes, param_dtype=self.param_dtype),
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sdp4BitExchange:
    """The exchange of `Sdp4Bit`; see there.

    Attributes:
      strategy: The formats.
      plain: The exchange of what is not quantized, and the layout of parameters.
    """

    strategy: Sdp4Bit
    plain: blocks.UncompressedExchange

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, None]:
        rest, _ = self.plain.gather({path: x for path, x in shards.items() if path not in state}, {})
        return {path: state[path].value if path in state else rest[path] for path in shards}, None

    def reduce(self, gradients: Arrays, state: States, kept: object) -> tuple[Arrays, States]:
        raise AssertionError("Sdp4Bit reduces once a step")

    def reduce_once(
        self, gradients: Arrays, state: States, context: StepContext | None
    ) -> tuple[Arrays, States, jax.Array | None]:
        cut = self._by_axes(gradients) if self.strategy.gradients != "plain" else {}
        quantized = [(axes, {path: gradients[path] for path in paths}) for axes, paths in cut.items()]
        travelling = {path for _, part in quantized for path in part}
        reduced, _ = self.plain.reduce({path: g for path, g in gradients.items() if path not in travelling}, {}, None)
        none = left_out = None if context is None or context.measure is None else jnp.float32(0)
        for (axes, others), part in quantized:
            by_bits = self._on_each(functools.partial(self._reduced, axes, others), context, P())
            if not self.strategy.gradients_from_step:
                found, missed = by_bits(part)
            elif context is None:
                raise _no_context("gradients_from_step")
            else:
                found, missed = jax.lax.cond(
                    context.step < self.strategy.gradients_from_step,
                    lambda part: (_float32(self.plain.reduce(part, {}, None)[0]), none),
                    by_bits,
                    part,
                )
            reduced |= found
            left_out = jax.tree.map(jnp.add, left_out, missed)
        return {path: reduced[path] for path in gradients}, state, left_out

    def init(self, shards: Arrays) -> States:
        for path, x in shards.items():
            if x.dtype == jnp.float64 and (self.strategy.weights, self.strategy.gradients) != ("plain", "plain"):
                raise UserError(
                    f"Sdp4Bit quantizes float32, and {path!r} is float64. Set --set "
                    "precision.params=float32, or weights=plain and gradients=plain."
                )
        return {path: WholeCopy(x) for path, x in self.plain.gather(shards, {})[0].items()}

    def after_update(self, shards: Arrays, state: States, context: StepContext | None) -> States:
        cut = self._by_axes(shards) if self.strategy.weights != "plain" else {}
        travelling = {path for paths in cut.values() for path in paths}
        copies, _ = self.plain.gather({path: x for path, x in shards.items() if path not in travelling}, {})
        for (axes, _), paths in cut.items():
            update = self._on_each(functools.partial(self._updated, axes), context)
            copies |= update({path: shards[path] for path in paths}, {path: state[path].value for path in paths})[0]
        # A master that is not finite makes its group NaN on all devices alike, and all of them keep their copies.
        finite = functools.reduce(jnp.logical_and, (jnp.isfinite(x).all() for x in copies.values()))
        return {path: WholeCopy(jnp.where(finite, copies[path], state[path].value)) for path in state}

    def seen(self, params: Arrays, state: States) -> Arrays:
        return {path: state[path].value.astype(p.dtype) for path, p in params.items() if path in state}

    def rescaled(self, state: States, factor: jax.Array) -> States:
        del factor  # copies are no gradients
        return state

    def resized(self, path: str, state: "PyTree", sizes: Mapping[str, int]) -> "PyTree":
        del path, sizes  # one copy for all devices
        return state

    def residual(self, params: Arrays, state: States, gradient_norm: jax.Array) -> jax.Array:
        del gradient_norm  # an error of parameters
        masters = {path: params[path].astype(jnp.float32) for path in state}
        missed = {path: x - state[path].value.astype(jnp.float32) for path, x in masters.items()}
        return global_norm(missed) / global_norm(masters)

    def remarks(self, params: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int]) -> tuple[str, ...]:
        if not self.plain.axes:
            return ("Sdp4Bit: there is one device, so that nothing travels; the model computes with its copy.",)
        dtype = self.strategy.param_dtype
        copies = sum(x.size * jnp.dtype(dtype or x.dtype).itemsize for x in params.values())
        whole = {path: 4 * x.size for path, x in params.items() if not self.plain.layouts[path].sharded}
        said = (
            links.described("Sdp4Bit", self.sent(params, sizes)),
            f"Sdp4Bit: every device holds a whole copy of the parameters, {units.size(copies)}, beside its shard of "
            "the masters; Fsdp needs none.",
        )
        if not whole:
            return said
        return (
            *said,
            f"Sdp4Bit: {units.size(sum(whole.values()))} of gradients travel in float32, of parameters that are below "
            f"replicate_below or that the devices divide in no dimension: {', '.join(list(whole)[:3])}"
            f"{f' and {len(whole) - 3} more' if len(whole) > 3 else ''}.",
        )

    def sent(self, params: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int]) -> dict[str, SentBytes]:
        cut, all_axes = self._by_axes(params), self.plain.axes
        whole = sum(4 * x.size for path, x in params.items() if not self.plain.layouts[path].sharded)
        gradients = links.sent("all-reduce", whole, *links.levels(all_axes, sizes))
        weights = SentBytes()
        for (axes, _), paths in cut.items():
            count = math.prod(sizes[axis] for axis in axes)
            rest = links.levels(tuple(axis for axis in all_axes if axis not in axes), sizes)
            for bucket in buckets({path: params[path] for path in paths}, self.strategy.bucket_bytes):
                values = sum(params[path].size for path in bucket) // count
                there, shard = self._sent_gradients(axes, values, sizes)
                gradients += there + links.sent("all-reduce", 4 * shard, *rest)
                weights += self._sent_weights(axes, values, sizes)
        return {"gradients": gradients, "weights": weights}

    def _sent_gradients(self, axes: tuple[str, ...], values: int, sizes: Mapping[str, int]) -> tuple[SentBytes, int]:
        """Bytes for a bucket of so many values a shard, and values of a shard with padding."""
        s, (hosts, local) = self.strategy, links.levels(axes, sizes)
        if s.gradients == "plain":
            return links.sent("reduce-scatter", 4 * values * hosts * local, hosts, local), values
        self._check_levels(axes)
        two = s.gradients == "two_level"
        first, second = s.format("fast") if two else None, s.format("slow")
        multiple = math.lcm(*(f.size for f in (first, second) if f is not None), group_quantize.TRANSFORM)
        shard = -(-values // multiple) * multiple
        payload = hosts * local * shard
        if not two:
            return links.sent("all-to-all", payload * _bytes(second), hosts, local), shard
        fast = links.sent("all-to-all", payload * _bytes(first), 1, local)
        return fast + links.sent("all-to-all", payload / local * _bytes(second), hosts, 1), shard

    def _sent_weights(self, axes: tuple[str, ...], values: int, sizes: Mapping[str, int]) -> SentBytes:
        s, (hosts, local) = self.strategy, links.levels(axes, sizes)
        format = s.format("weight")
        if s.weights == "plain":
            size = values * jnp.dtype(s.param_dtype or jnp.float32).itemsize
        else:
            multiple = 1 if format is None else format.size
            size = -(-values // multiple) * multiple * _bytes(format)
        return links.sent("all-gather", hosts * local * size, hosts, local)

    def _check_levels(self, axes: tuple[str, ...]) -> None:
        """Refuses two levels on a mesh that has one."""
        if self.strategy.gradients == "two_level" and not (SLOW_AXIS in axes and len(axes) > 1):
            stated = "+".join(axes)
            raise UserError(
                f"Sdp4Bit: gradients='two_level' needs several indices of {SLOW_AXIS!r} and several "
                f"devices in each; this mesh cuts data over {stated} alone. Set --set placement.mesh.{SLOW_AXIS}=N "
                "beside fsdp, or --set strategy.gradients=one_level."
            )

    def _by_axes(self, paths: Iterable[str]) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]]:
        """Those that are sharded, by the data axes over which they are, and by others.

        Devices along the others hold the same values of a parameter that is not cut over them; in a bucket with others
        that are, they would round it differently.
        """
        found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for path in paths:
            layout = self.plain.layouts[path]
            if layout.sharded:
                others = tuple(sorted(axis for _, axes in layout.automatic for axis in axes))
                found.setdefault((layout.sharded[0][1], others), []).append(path)
        return found

    def _on_each(self, run: Callable[..., Any], context: StepContext | None, *more: P) -> Callable[..., Any]:
        """`run(context, *arrays)` of what each device holds: groups straddle none, and kernels see all of it.

        Args:
          run: Returns a tuple; its first item has the paths of the first arrays, and lies along other axes as they do.
          context: Of the step.
          *more: Where the other items lie.
        """
        mesh = jax.sharding.get_abstract_mesh()
        automatic = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
        if all(mesh.shape[axis] == 1 for axis in automatic):
            return functools.partial(run, context)

        def specs(arrays: Arrays) -> dict[str, P]:
            found = {}
            for path in arrays:
                layout = self.plain.layouts[path]
                entries = dict(layout.automatic)
                found[path] = P(*(entries.get(dim) for dim in range(layout.ndim)))
            return found

        def call(*trees: Arrays) -> Any:
            # Devices along the automatic axes share random bits, for different values.
            return jax.shard_map(
                run,
                in_specs=(P(), *(specs(tree) for tree in trees)),
                out_specs=(specs(trees[0]), *more),
                axis_names=automatic,
                check_vma=False,
            )(context, *trees)

        return call

    def _reduced(
        self, axes: tuple[str, ...], others: tuple[str, ...], context: StepContext | None, gradients: Arrays
    ) -> tuple[Arrays, jax.Array | None]:
        """Shards of the sums over devices, and the squared rounding errors, if these are measured.

        Args:
          axes: Over which gradients are summed and cut.
          others: Over which they are cut besides.
          context: Of the step.
          gradients: What this device holds.
        """
        s, reduced, left_out = self.strategy, {}, []
        self._check_levels(axes)
        slow = (SLOW_AXIS,) if s.gradients == "two_level" else axes
        fast = tuple(axis for axis in axes if axis not in slow)
        first, second = s.format("fast") if fast else None, s.format("slow")
        multiple = math.lcm(*(f.size for f in (first, second) if f is not None), group_quantize.TRANSFORM)
        rest = tuple(axis for axis in self.plain.axes if axis not in axes)
        for number, bucket in enumerate(buckets(gradients, s.bucket_bytes)):
            flat = self._flat({path: gradients[path] for path in bucket})
            # A row for each device.
            x = _filled(flat.rows({path: gradients[path] for path in bucket}, jnp.float32), multiple)
            seeds = self._seeds(context, axes, 2 * number, first or second)
            if fast:
                # Rows of one slow index stay together, and shards arrive where they belong.
                x = x.reshape(_size(slow), _size(fast), -1).swapaxes(0, 1).reshape(_size(fast), -1)
                n, first_sent = x.shape[1], _encoded(x, first, seeds, s.transform)
                left_out.append(
                    self._left_out(context, functools.partial(_transformed, x, s.transform), first_sent, first)
                )
                arrived = _exchanged(first_sent, fast)
                seeds = self._seeds(context, axes, 2 * number + 1, second)
                sent = _passed_on(arrived, n, first, second, seeds, _size(slow))
                given = functools.partial(_summed_rows, arrived, n, first, _size(slow))
            else:
                sent = _encoded(x, second, seeds, s.transform)
                given = functools.partial(_transformed, x, s.transform)
            left_out.append(self._left_out(context, given, sent, second))
            x = _summed(_exchanged(sent, slow), x.size // _size(axes), second, s.transform)
            x = jax.lax.psum(x, rest) if rest else x
            reduced |= flat.shards(x[: flat.length])
        missed = jax.tree.map(lambda *squares: sum(squares), *left_out)
        return reduced, jax.lax.psum(missed, others) if others else missed

    def _left_out(
        self, context: StepContext | None, given: Callable[[], jax.Array], sent: jax.Array, format: IntGroups | None
    ) -> jax.Array | None:
        """float32[]: the squared rounding errors, in units of gradients; None = not measured."""
        if context is None or context.measure is None:
            return None
        if format is None:
            return jnp.float32(0)

        def missed() -> jax.Array:
            x = given()
            groups = group_quantize.from_bytes(sent, x.shape[-1], format)
            return group_quantize.dequantize(groups, format, implementation=codec.implementation(x)) - x

        squares = context.left_out(missed)
        return squares / (group_quantize.TRANSFORM if self.strategy.transform == "hadamard" else 1)  # H H = 32 I

    def _updated(
        self, axes: tuple[str, ...], context: StepContext | None, shards: Arrays, before: Arrays
    ) -> tuple[Arrays]:
        """The copies after the owners' messages."""
        s, copies = self.strategy, {}
        format = s.format("weight")
        for number, bucket in enumerate(buckets(shards, max(1, s.bucket_bytes // _size(axes)))):
            flat = self._flat({path: before[path] for path in bucket})
            own = {path: shards[path].astype(jnp.float32) for path in bucket}
            if s.weights == "differences":
                mine = flat.shards_of({path: before[path].astype(jnp.float32) for path in bucket})
                own = {path: own[path] - mine[path] for path in bucket}
            base, sent = None, flat.row(own)
            if s.weights == "differences":
                halves = all(before[path].dtype == jnp.bfloat16 for path in bucket)
                base = flat.rows({path: before[path] for path in bucket}, jnp.bfloat16 if halves else jnp.float32)
            if format is None:
                arrived = arrivals.gathered(sent, axes)
                moved = arrived if base is None else base.astype(jnp.float32) + arrived
            else:
                sent = _filled(sent, format.size)
                seed = None
                if s.weight_rounding == "stochastic":
                    seed = self._seeds(context, axes, -1 - number, format)
                groups = arrivals.gathered(_encoded(sent, format, seed, "none"), axes)
                groups = group_quantize.from_bytes(groups, sent.shape[-1], format)
                how = codec.implementation(sent)
                if base is None:
                    moved = group_quantize.dequantize(groups, format, implementation=how)
                else:
                    base = _filled(base, format.size)
                    moved = group_quantize.dequantize_add(base, groups, format, implementation=how)
            for path, x in flat.whole(moved[:, : flat.length]).items():
                copies[path] = x.astype(before[path].dtype)
        return (copies,)

    def _seeds(
        self, context: StepContext | None, axes: tuple[str, ...], number: int, format: IntGroups | None
    ) -> jax.Array | None:
        """uint32[2] of this device; None for values that are not quantized."""
        if format is None:
            return None
        if context is None:
            raise _no_context("stochastic rounding")
        key = jax.random.fold_in(jax.random.fold_in(context.key, np.uint32(number % 2**32)), jax.lax.axis_index(axes))
        return jax.random.bits(key, (2,), jnp.uint32)

    def _flat(self, whole: Mapping[str, jax.Array]) -> "_Flat":
        ((_, axes),) = self.plain.layouts[next(iter(whole))].sharded
        dims = {path: self.plain.layouts[path].sharded[0][0] for path in whole}
        return _Flat({path: x.shape for path, x in whole.items()}, dims, axes)


@dataclasses.dataclass(frozen=True)
class _Flat:
    """Parameters concatenated, shard by shard.

    Attributes:
      shapes: Of the whole parameters.
      dims: Which dimension of each is cut.
      axes: Over which.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dims: Mapping[str, int]
    axes: tuple[str, ...]

    @property
    def length(self) -> int:
        """Values of all shards of a device."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) // _size(self.axes) for shape in self.shapes.values()]

    def rows(self, whole: Arrays, dtype: jax.typing.DTypeLike) -> jax.Array:
        """`dtype`[devices, length] of whole arrays."""
        count = _size(self.axes)
        parts = [jnp.moveaxis(whole[path], dim, 0).reshape(count, -1) for path, dim in self.dims.items()]
        return jnp.concatenate([part.astype(dtype) for part in parts], axis=1)

    def row(self, shards: Arrays) -> jax.Array:
        """[length] of the shards of this device."""
        return jnp.concatenate([jnp.moveaxis(shards[path], dim, 0).ravel() for path, dim in self.dims.items()])

    def shards(self, row: jax.Array) -> Arrays:
        """The inverse of `row`."""
        parts = jnp.split(row, np.cumsum(self._sizes)[:-1].tolist())
        return {path: self._joined(path, part[None]) for path, part in zip(self.shapes, parts, strict=True)}

    def whole(self, rows: jax.Array) -> Arrays:
        """The inverse of `rows`."""
        parts = jnp.split(rows, np.cumsum(self._sizes)[:-1].tolist(), axis=1)
        return {path: self._joined(path, part) for path, part in zip(self.shapes, parts, strict=True)}

    def shards_of(self, whole: Arrays) -> Arrays:
        """What this device holds of whole arrays."""
        index, found = jax.lax.axis_index(self.axes), {}
        for path, dim in self.dims.items():
            size = self.shapes[path][dim] // _size(self.axes)
            found[path] = jax.lax.dynamic_slice_in_dim(whole[path], index * size, size, dim)
        return found

    def _joined(self, path: str, parts: jax.Array) -> jax.Array:
        """[shards, values of one] -> the parameter, or as much of it."""
        shape, dim = list(self.shapes[path]), self.dims[path]
        first = shape.pop(dim) // _size(self.axes) * parts.shape[0]
        return jnp.moveaxis(parts.reshape(first, *shape), 0, dim)


def _float32(arrays: Arrays) -> Arrays:
    return {path: x.astype(jnp.float32) for path, x in arrays.items()}


def _transformed(x: jax.Array, transform: Transform) -> jax.Array:
    return group_quantize.hadamard(x) if transform == "hadamard" else x


def _encoded(x: jax.Array, format: IntGroups | None, seed: jax.Array | None, transform: Transform) -> jax.Array:
    """float32[..., n] -> its bytes on the wire, or itself where it is not quantized."""
    if format is None:
        return _transformed(x, transform)
    how = codec.implementation(x)
    return group_quantize.to_bytes(group_quantize.quantize(x, format, seed, transform=transform, implementation=how))


def _exchanged(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-to-all: [devices, ...], a row for each device of the axes -> the rows of all of them for this one."""
    return jax.lax.all_to_all(rows, axes, 0, 0, tiled=True)


def _summed(arrived: jax.Array, n: int, format: IntGroups | None, transform: Transform) -> jax.Array:
    """[devices, ...], n values each -> float32[n], summed in the order of devices."""
    if format is not None:
        groups, how = group_quantize.from_bytes(arrived, n, format), codec.implementation(arrived)
        return group_quantize.dequantize_sum(groups, format, transform=transform, implementation=how)
    total = arrivals.summed(arrived, lambda row: row, n)
    return _transformed(total, transform) / (group_quantize.TRANSFORM if transform == "hadamard" else 1)


def _summed_rows(arrived: jax.Array, n: int, format: IntGroups | None, rows: int) -> jax.Array:
    return _summed(arrived, n, format, "none").reshape(rows, -1)


def _passed_on(
    arrived: jax.Array, n: int, format: IntGroups | None, to: IntGroups | None, seed: jax.Array | None, rows: int
) -> jax.Array:
    """[devices, ...], n values each -> their sum on the wire of the second hop, cut into rows."""
    if format is None or to is None:
        return _encoded(_summed_rows(arrived, n, format, rows), to, seed, "none")
    groups = group_quantize.from_bytes(arrived, n, format)
    groups = jax.tree.map(lambda array: array.reshape(array.shape[0], rows, -1), groups)
    how = codec.implementation(arrived)
    return group_quantize.to_bytes(group_quantize.requantize(groups, format, to, seed, implementation=how))


def _bytes(format: IntGroups | None) -> float:
    """Of a value; None = as float32."""
    return 4.0 if format is None else format.bytes_per_value


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def _filled(x: jax.Array, multiple: int) -> jax.Array:
    """The last axis padded with zeros to a multiple."""
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _no_context(what: str) -> UserError:
    return UserError(
        f"Sdp4Bit: {what} needs the step and a key. Pass context=StepContext(step, key) to the gradients and to "
        "`after_update`, or set weight_rounding='nearest' and gradients='plain'."
    )
