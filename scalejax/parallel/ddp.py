"""Data parallelism with gradient buckets (Li et al. 2020, arXiv 2006.15704), as a `blocks.ParamExchange`.

Every device holds all parameters. Gradients are laid end to end into buckets, and each bucket is summed over devices by
one all-reduce: few large messages instead of many small ones, and several instead of one, so that the first can travel
while later gradients are computed. Buckets are filled in the reverse of the order in which a model fetches its
parameters, which is the order in which gradients become final.

Where the sums stand decides what can overlap: `accumulate="communicate"` cuts the gradients of each block into buckets
and sums them inside the backward pass, one layer while the next is computed; "local" cuts those of the whole tree after
it (PyTorch's `no_sync` until the last part), and only blocks outside of a scan are final before the end.

Also here: making replicas equal at the start, and finding out whether they still are.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.parallel import links
from scalejax.parallel.compression import two_way
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.gradients.blocks import (
    Accumulate,
    Arrays,
    DTypeName,
    ExplicitForm,
    ParamExchange,
    ParamLayout,
    Stateless,
    States,
    StepContext,
    axes_of,
    check_dtypes,
    summable,
)
from scalejax.parallel.links import SLOW_AXIS, SentBytes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, PyTree, UInt32

Tree = TypeVar("Tree")

MIB = 2**20
_BUCKET = "bucket {}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ddp(ExplicitForm):
    """A strategy: whole parameters on every device, gradients summed in buckets. Always in the explicit form.

    Attributes:
      bucket_bytes: Most bytes of gradients in a bucket; a parameter beyond that has a bucket of its own.
      accumulate: Sum the gradients of each part of a batch, inside its backward pass ("communicate"), or those of all
        parts at once after it ("local").
      param_dtype: Dtype in which parameters are given to the model; None = as they are.
      reduce_dtype: Dtype in which gradients are summed over devices; None = param_dtype, or that of the master
        parameters with accumulate="local", which adds up in it.
      output_dtype: Dtype of floating arrays in what the loss returns beside its sum and weight; None = as they are.
      compression: How large gradients travel compressed, once a step; None = they do not. In buckets of its own.
    """

    bucket_bytes: int = 25 * MIB
    accumulate: Accumulate = "communicate"
    param_dtype: DTypeName | None = None
    reduce_dtype: DTypeName | None = None
    output_dtype: DTypeName | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_at_least("Ddp: bucket_bytes", self.bucket_bytes, 1)
        check_one_of("Ddp: accumulate", self.accumulate, ("communicate", "local"))
        check_dtypes(
            "Ddp", param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, output_dtype=self.output_dtype
        )
        if self.compression is not None and self.reduce_dtype is not None:
            raise UserError(
                f"Ddp: reduce_dtype={self.reduce_dtype} beside compression: what is compressed is summed in float32. "
                "Leave reduce_dtype out; compression.compressor=Fp16 sends two bytes a value."
            )

    @property
    def remembers(self) -> str:
        """What the state of the exchange is of; a run goes on with no other."""
        return f"Ddp {self.compression}"

    @property
    def reduces(self) -> Literal["parts", "step"]:
        """Whether gradients are reduced in the backward pass of each part, or once a step."""
        return "step" if self.accumulate == "local" or self.compression is not None else "parts"

    @property
    def replicate_below(self) -> int:
        """Parameters of any size are whole."""
        return 0

    def axes(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The mesh axes over which parameters are sharded: none."""
        del mesh
        return ()

    def check_specs(self, specs: Mapping[str, P], mesh: Mesh, apart: Mapping[str, tuple[str, ...]]) -> None:
        """Refuses parameters that are not whole, those along which devices hold different ones aside.

        Raises:
          UserError: names one, and the strategy that shards.
        """
        del apart
        check_specs(specs, mesh)

    def exchange(self, layouts: Mapping[str, ParamLayout], axes: tuple[str, ...]) -> ParamExchange:
        """How parameters travel: they do not, and gradients go in buckets."""
        plain = Bucketed(
            layouts=layouts,
            axes=axes,
            bucket_bytes=self.bucket_bytes,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
        )
        return plain if self.compression is None else CompressedBuckets(plain=plain, compression=self.compression)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Bucketed(Stateless):
    """The exchange of `Ddp`; see there.

    Attributes:
      layouts: Path -> where it lies; parameters that are summed over different axes share no bucket.
      axes: The data axes of the mesh.
    """

    layouts: Mapping[str, ParamLayout]
    axes: tuple[str, ...]
    bucket_bytes: int
    param_dtype: jax.typing.DTypeLike | None = None
    reduce_dtype: jax.typing.DTypeLike | None = None

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, None]:
        del state
        return {path: p if self.param_dtype is None else p.astype(self.param_dtype) for path, p in shards.items()}, None

    def reduce(self, gradients: Arrays, state: States, kept: object) -> tuple[Arrays, States]:
        del kept
        if self.reduce_dtype is not None:
            gradients = {path: g.astype(self.reduce_dtype) for path, g in gradients.items()}
        summed: dict[tuple[str, ...], Arrays] = {}
        for path, gradient in gradients.items():
            over = tuple(axis for axis in self.axes if axis not in self.layouts[path].apart)
            summed.setdefault(over, {})[path] = gradient
        reduced = summed.pop((), {})
        for over, group in summed.items():
            for bucket in buckets(group, self.bucket_bytes):
                flat = jnp.concatenate([group[path].ravel() for path in bucket])
                total = jax.lax.psum(summable(flat), over).astype(flat.dtype)
                parts = jnp.split(total, np.cumsum([group[path].size for path in bucket])[:-1].tolist())
                reduced |= {path: part.reshape(group[path].shape) for path, part in zip(bucket, parts, strict=True)}
        return reduced, state


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CompressedBuckets:
    """The exchange of `Ddp` with `compression`: large gradients as `two_way` says, the others as `Bucketed`.

    Attributes:
      plain: How the others travel.
      compression: How the large ones do.
    """

    plain: Bucketed
    compression: Compression

    def gather(self, shards: Arrays, state: States) -> tuple[Arrays, None]:
        return self.plain.gather(shards, state)

    def reduce(self, gradients: Arrays, state: States, kept: object) -> tuple[Arrays, States]:
        raise AssertionError("compressed gradients are reduced once a step")

    def reduce_once(
        self, gradients: Arrays, state: States, context: StepContext | None
    ) -> tuple[Arrays, States, jax.Array | None]:
        slow, fast = self._axes()
        if self.compression.momentum and not slow:
            raise UserError(
                f"Ddp: compression.momentum={self.compression.momentum} is part of what travels between indices of "
                f"{SLOW_AXIS!r}, and the mesh has one. Set --set strategy.compression.momentum=0 and give the "
                f"optimizer momentum, or --set placement.mesh.{SLOW_AXIS}=N."
            )
        if not slow and state:
            gradients, state = self._settled(gradients, state, context)
        large = self._buckets(gradients) if slow else ()
        travelling = {path for bucket in large for path in bucket}
        reduced, _ = self.plain.reduce({path: g for path, g in gradients.items() if path not in travelling}, {}, None)
        new: States = {}
        # Residuals stay where any gradient of the step is not finite, whichever that is.
        finite = two_way.finite_everywhere(gradients.values(), self.plain.axes) if large else None
        left_out = None if context is None or context.measure is None else jnp.float32(0)
        for number, bucket in enumerate(large):
            name, own = _BUCKET.format(number), {path: gradients[path] for path in bucket}
            total, new[name], missed = two_way.reduced(
                self.compression,
                two_way.flat(own),
                state.get(name, {}),
                slow=slow,
                fast=fast,
                context=context,
                number=number,
                finite=finite,
            )
            reduced |= two_way.apart(total, own)
            left_out = jax.tree.map(jnp.add, left_out, missed)
        return (
            {path: reduced[path] for path in gradients},
            {**state, **{name: x for name, x in new.items() if x}},
            left_out,
        )

    def _settled(self, gradients: Arrays, state: States, context: StepContext | None) -> tuple[Arrays, States]:
        """Gradients of one host with the residuals that several left to it, which are 0 from then on."""
        finite = two_way.finite_everywhere(gradients.values(), self.plain.axes)
        for number, bucket in enumerate(self._buckets(gradients)):
            name, own = _BUCKET.format(number), {path: gradients[path] for path in bucket}
            own, left = two_way.settled(self.compression, own, state[name], self.plain.axes, context, finite)
            gradients, state = gradients | own, state | {name: left}
        return gradients, state

    def init(self, shards: Arrays) -> States:
        slow, fast = self._axes()
        hosts, local = (math.prod(jax.lax.axis_size(axis) for axis in axes) for axes in (slow, fast))
        found = {}
        large = self._buckets(shards)
        small = sorted(set(shards) - {path for bucket in large for path in bucket})
        if self.compression.momentum and small and slow:
            raise UserError(
                f"Ddp: compression.momentum={self.compression.momentum} is part of what travels compressed, and "
                f"{small[0]!r} and {len(small) - 1} more do not. Set --set strategy.compression.plain_below=0, or "
                "--set strategy.compression.momentum=0 and give the optimizer momentum."
            )
        for number, bucket in enumerate(large):
            values = sum(shards[path].size for path in bucket)
            found[_BUCKET.format(number)] = two_way.initial(self.compression, values, hosts, local)
        return {name: state for name, state in found.items() if state}

    def after_update(self, shards: Arrays, state: States, context: StepContext | None) -> States:
        del shards, context
        return state

    def seen(self, params: Arrays, state: States) -> Arrays:
        del state
        return params

    def rescaled(self, state: States, factor: jax.Array) -> States:
        scaled = ("worker", "owner", "momentum")
        return {
            bucket: {name: x * factor.astype(x.dtype) if name in scaled else x for name, x in own.items()}
            for bucket, own in state.items()
        }

    def resized(self, path: str, state: "PyTree", sizes: Mapping[str, int]) -> "PyTree":
        del path
        slow, _ = _slow_and_fast(tuple(axis for axis, size in sizes.items() if size > 1))
        hosts = math.prod(sizes[axis] for axis in slow)
        return two_way.resized(state, hosts, math.prod(sizes.values()) // hosts)

    def residual(self, params: Arrays, state: States, gradient_norm: jax.Array) -> jax.Array:
        del params
        return two_way.residual(state) / gradient_norm

    def remarks(self, params: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int]) -> tuple[str, ...]:
        if not self.plain.axes:
            return ("Ddp: there is one device, so that nothing travels and nothing is compressed.",)
        said = links.described("Ddp", self.sent(params, sizes))
        if self._axes()[0]:
            return (said,)
        return (
            f"Ddp: gradients are compressed between indices of {SLOW_AXIS}, and the mesh has one: they are summed as "
            f"they are. Set --set placement.mesh.{SLOW_AXIS}=N where links between hosts are slow.",
            said,
        )

    def sent(self, params: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int]) -> dict[str, SentBytes]:
        slow, _ = self._axes()
        large = self._buckets(params) if slow else ()
        travelling = {path for bucket in large for path in bucket}
        total = SentBytes()
        for path, x in params.items():
            if path not in travelling:
                axes = tuple(axis for axis in self.plain.axes if axis not in self.plain.layouts[path].apart)
                size = x.size * jnp.dtype(self.plain.reduce_dtype or x.dtype).itemsize
                total += links.sent("all-reduce", size, *links.levels(axes, sizes))
        levels = links.levels(self.plain.axes, sizes)
        for bucket in large:
            total += two_way.sent(self.compression, sum(params[path].size for path in bucket), *levels)
        return {"gradients": total}

    def _axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those over which gradients are compressed, and those over which they are summed before."""
        return _slow_and_fast(self.plain.axes)

    def _buckets(self, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> tuple[tuple[str, ...], ...]:
        """By path, so that residuals do not depend on the order in which a model fetches its parameters."""
        large = {
            path: jax.ShapeDtypeStruct(arrays[path].shape, jnp.float32)
            for path in sorted(arrays)
            if 4 * arrays[path].size >= max(1, self.compression.plain_below) and not self.plain.layouts[path].apart
        }
        return buckets(large, self.compression.bucket_bytes)


def _slow_and_fast(axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(axis for axis in axes if axis == SLOW_AXIS), tuple(axis for axis in axes if axis != SLOW_AXIS)


def buckets(arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct], bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Which arrays travel together: from the last to the first, in buckets of one dtype each.

    Args:
      arrays: Path -> anything with `size` and `dtype`.
      bucket_bytes: Most bytes of a bucket with more than one array.

    Returns:
      Paths by bucket, in the order in which buckets are full; those that never are come last.
    """
    open_buckets: dict[np.dtype, tuple[list[str], int]] = {}
    closed: list[list[str]] = []
    for path, array in reversed(list(arrays.items())):
        size = array.size * array.dtype.itemsize
        members, filled = open_buckets.pop(array.dtype, ([], 0))
        if members and filled + size > bucket_bytes:
            closed.append(members)
            members, filled = [], 0
        members.append(path)
        if filled + size >= bucket_bytes:
            closed.append(members)
        else:
            open_buckets[array.dtype] = (members, filled + size)
    return tuple(tuple(members) for members in (*closed, *(members for members, _ in open_buckets.values())))


def check_specs(specs: Mapping[str, P], mesh: Mesh) -> None:
    """Refuses parameters that are not whole.

    Raises:
      UserError: names one, and the strategy that shards.
    """
    for path, spec in specs.items():
        over = [axis for entry in spec for axis in axes_of(entry) if mesh.shape[axis] > 1]
        if over:
            raise UserError(
                f"Ddp: {path!r} is sharded over {'+'.join(over)}, but buckets need whole parameters. Use "
                "Fsdp(sharding='NO_SHARD', form='explicit') beside other axes, or a strategy that shards (--set "
                "strategy=Fsdp)."
            )


def broadcast(tree: Tree, mesh: Mesh) -> Tree:
    """Gives every device the values that the first device of the mesh holds, to the bit.

    Args:
      tree: Pytree of arrays that are whole on every device (P()), whatever each device, or each process, holds.
      mesh: The devices; the first belongs to process 0.

    Returns:
      The same shapes and dtypes, equal on all devices.
    """
    axes = tuple(mesh.axis_names)

    def first(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(first(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if x.dtype == jnp.bool_:
            return first(x.astype(jnp.uint8)) != 0
        # As integers: a sum with zeros would turn -0.0 into 0.0.
        bits = _bits(x)
        mine = jnp.where(jax.lax.axis_index(axes) == 0, bits, jnp.zeros_like(bits))
        return jax.lax.bitcast_convert_type(jax.lax.psum(mine, axes), x.dtype)

    run = jax.shard_map(lambda tree: jax.tree.map(first, tree), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(run)(tree)


def differing(params: Mapping[str, jax.Array], specs: Mapping[str, P], mesh: Mesh) -> dict[str, "Bool[Array, '']"]:
    """Compares the copies of parameters by checksums of their bits; a few numbers travel, whatever the size.

    A change of one element always changes its checksum; several changes cancel with a chance of 2**-32.

    Args:
      params: Path -> array.
      specs: Path -> sharding. Copies are what differs along axes that it does not name.
      mesh: The devices.

    Returns:
      Path -> bool[], whether some copies of that parameter differ. May be called under jit.
    """
    axes = tuple(mesh.axis_names)

    def local(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        found = {}
        for path, p in params.items():
            own = {axis for entry in specs[path] for axis in axes_of(entry)}
            over = tuple(axis for axis in axes if axis not in own)
            mine = checksum(p)
            differs = jax.lax.pmax(mine, over) != jax.lax.pmin(mine, over) if over else jnp.zeros((), bool)
            found[path] = jax.lax.pmax(differs.astype(jnp.int32), axes) > 0
        return found

    run = jax.shard_map(
        local, mesh=mesh, in_specs=({path: specs[path] for path in params},), out_specs=P(), check_vma=False
    )
    return run(dict(params))


def checksum(x: jax.Array) -> "UInt32[Array, '']":
    """uint32: the sum of all 32-bit words of an array, each times an odd number of its own, modulo 2**32."""
    words = _bits(x).ravel().astype(jnp.uint32)
    # An odd factor can be inverted modulo 2**32, so that no change of one word is lost in its product.
    odd = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return (words * odd).sum(dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    """An array as unsigned integers of at most 32 bits; 64-bit numbers become pairs along a last axis."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))
