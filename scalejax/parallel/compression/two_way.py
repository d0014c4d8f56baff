"""Two-way compressed sums of gradients with error feedback (BytePS-Compress, arXiv 2105.07829).

A device owns a chunk of the sum, as a parameter server would:

    worker  q = g + e;  all-to-all of C(q), a chunk to each owner;  residual e = q - C(q)
    owner   p = sum of the decoded chunks + E;  all-gather of C(p);  residual E = p - C(p)

so that all updates so far and all residuals add up to the uncompressed sum at every step. Links within a host are fast:
gradients are reduce-scattered there uncompressed, and the parts alone are compressed between hosts, indices of the mesh
axis `replica`.

Gradients are concatenated into buckets, in the order of their paths. Residuals belong to places in a bucket and not to
devices: on another number of devices those of workers are summed and handed out in equal parts, and those of owners are
cut anew.

In a training loop of one's own, inside a shard_map over `data`:

    reduction = compress_gradients(OneBit(), error_feedback="vanilla", axes=("data",))
    state = reduction.init(params, hosts=8)                        # outside; [8, ...], sharded over `data`
    gradients, state = reduction.update(gradients, state, key)     # inside; the mean over `data`

Source: Zhong, Xie, Zheng, Lin, "Compressed Communication for Distributed Training: Adaptive Methods and System", 2021.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError, check_one_of, check_whole
from scalejax.parallel import links
from scalejax.parallel.compression import arrivals
from scalejax.parallel.compression.compressors import (
    Blocks,
    Compressor,
    Fp16,
    Identity,
    LinearDithering,
    NaturalDithering,
    OneBit,
    Payload,
    RandomKEntries,
    TopKEntries,
)
from scalejax.parallel.gradients.blocks import Arrays, StepContext
from scalejax.parallel.gradients.scaling import global_norm
from scalejax.parallel.links import SentBytes

if TYPE_CHECKING:
    from jaxtyping import PyTree

_METHODS = ("traits", "check", "payload_bytes", "encode", "decode")
KnownCompressor = Identity | Fp16 | OneBit | TopKEntries | RandomKEntries | LinearDithering | NaturalDithering | Blocks
ErrorFeedback = Literal["vanilla", "corrected", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How gradients are summed over devices.

    Attributes:
      compressor: Of workers; a user's own is anything with the methods of `Compressor`.
      owner: The compressor of owners; None = the same.
      error_feedback: "vanilla" adds the residual to the next gradient; "corrected" times the learning rate it is
        of over this one, so that it is kept in units of the update; "none" drops it. For unbiased
        compressors "none" is enough. (The third kind of the released code, "sparse", is "vanilla" for `RandomKEntries`:
        an owner has residuals at the places that are sent alone, and there none.)
      momentum: Nesterov momentum on each worker before it compresses: m = momentum m + g, and g + momentum m is sent.
      double_momentum: Whether an optimizer may have momentum too.
      plain_below: Gradients of fewer bytes are not compressed.
      bucket_bytes: Most bytes of float32 that are compressed together.
    """

    compressor: KnownCompressor = OneBit()
    owner: KnownCompressor | None = None
    error_feedback: ErrorFeedback = "vanilla"
    momentum: float = 0.0
    double_momentum: Literal["refuse", "allow"] = "refuse"
    plain_below: int = 65_536
    bucket_bytes: int = 4_096_000

    def __post_init__(self) -> None:
        if self.error_feedback == "sparse":
            raise UserError(
                "Compression: error_feedback='sparse' of the released code is 'vanilla' here, with RandomKEntries and "
                "no other owner. Set error_feedback='vanilla' (--set strategy.compression.error_feedback=vanilla)."
            )
        check_one_of("Compression: error_feedback", self.error_feedback, get_args(ErrorFeedback))
        check_one_of("Compression: double_momentum", self.double_momentum, ("refuse", "allow"))
        object.__setattr__(self, "plain_below", check_whole("Compression: plain_below", self.plain_below, 0))
        object.__setattr__(self, "bucket_bytes", check_whole("Compression: bucket_bytes", self.bucket_bytes, 1))
        for field, compressor in (("compressor", self.compressor), ("owner", self.owner)):
            lacking = [name for name in _METHODS if not hasattr(compressor, name)]
            if (compressor, field) != (None, "owner") and (lacking or isinstance(compressor, type)):
                lacks = f"it has no {', '.join(lacking)}" if lacking else "it is a class"
                raise UserError(
                    f"Compression: {field} must be a compressor, such as OneBit() or TopKEntries(k=0.01); got "
                    f"{compressor!r}: {lacks}. `compressors.protocol.Compressor` says what one of yours needs."
                )
        if not isinstance(self.momentum, numbers.Real) or not 0 <= self.momentum < 1:
            raise UserError(f"Compression: momentum must be in [0, 1); got {self.momentum!r}.")

    def __str__(self) -> str:
        """The fields, the same in every process: compressors that do not say what they are go by their traits."""
        said = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            silent = hasattr(value, "traits") and type(value).__repr__ is object.__repr__
            said[field.name] = f"{type(value).__qualname__}({value.traits.name})" if silent else repr(value)
        return f"Compression({', '.join(f'{name}={value}' for name, value in said.items())})"

    @property
    def of_workers(self) -> Compressor:
        """The compressor of workers, scaled as the feedback wants it."""
        return self._scaled(self.compressor)

    @property
    def of_owners(self) -> Compressor:
        """The compressor of owners.

        Random places are the same both ways, so that owners send the sums at these places and scale nothing.
        """
        if self.owner is None and isinstance(self.compressor, RandomKEntries):
            return dataclasses.replace(self.compressor, scale="none")
        return self.of_workers if self.owner is None else self._scaled(self.owner)

    def _scaled(self, compressor: Compressor) -> Compressor:
        if isinstance(compressor, RandomKEntries) and compressor.scale == "by_feedback":
            return dataclasses.replace(compressor, scale="n/k" if self.error_feedback == "none" else "none")
        return compressor


class Chunks(NamedTuple):
    """How a bucket is cut: device (s, f), number f of host s, owns chunk s of part f.

    Attributes:
      hosts: Between which chunks travel compressed.
      local: Devices of a host.
      size: Values of a chunk; the last ones are filled up with zeros.
    """

    hosts: int
    local: int
    size: int

    @classmethod
    def of(cls, values: int, hosts: int, local: int) -> "Chunks":
        return cls(hosts, local, math.ceil(values / (hosts * local)))

    @property
    def values(self) -> int:
        """With the filling."""
        return self.hosts * self.local * self.size


State = dict[str, jax.Array]
"""Of a device and a bucket: "worker" and "momentum" float32[hosts, size], "owner" float32[size], "rate" float32[], the
learning rate to which the residuals of error_feedback="corrected" belong, and "values" int32[], how many the bucket has
without filling: other devices cut it otherwise."""


def initial(compression: Compression, values: int, hosts: int, local: int) -> State:
    """The state of a bucket on a device before the first step.

    Raises:
      UserError: rows that a compressor cannot compress, or whose residuals it would let grow (`Traits.growth`).
    """
    state: State = {}
    chunks = Chunks.of(values, hosts, local)
    for field, each in (("compressor", compression.of_workers), ("owner", compression.of_owners)):
        each.check(chunks.size)
        growth = each.traits.growth
        if compression.error_feedback != "none" and growth is not None and chunks.size >= growth.rows:
            field = "compressor" if compression.owner is None else field
            raise UserError(
                f"Compression: {field}: {each.traits.name}, with error_feedback={compression.error_feedback!r}: "
                f"residuals of rows of {chunks.size} values would grow without bound, because {growth.why}. Set "
                f"{growth.field}={growth.value!r} of it (--set strategy.compression.{field}.{growth.field}="
                f"{growth.value}), or error_feedback='none' (--set strategy.compression.error_feedback=none)."
            )
    if compression.error_feedback != "none":
        state |= {"worker": jnp.zeros((chunks.hosts, chunks.size)), "owner": jnp.zeros(chunks.size)}
    if compression.error_feedback == "corrected":
        state["rate"] = jnp.zeros(())
    if compression.momentum:
        state["momentum"] = jnp.zeros((chunks.hosts, chunks.size))
    state = {name: x.astype(jnp.float32) for name, x in state.items()}
    return state and {**state, "values": jnp.int32(values)}


def reduced(
    compression: Compression,
    gradient: jax.Array,
    state: State,
    *,
    slow: tuple[str, ...],
    fast: tuple[str, ...],
    context: StepContext | None,
    number: int = 0,
    finite: jax.Array | None = None,
) -> tuple[jax.Array, State, jax.Array | None]:
    """The sum of a bucket over devices, and the next state; inside a shard_map over both kinds of axes.

    Where a gradient of any device is not finite, or a compressor makes NaN of it, the sum is NaN on all devices, and
    their states stay. Compressors take float32 and give it; sums and residuals have the dtype of the gradient, so that
    tests in float64 see them without their roundings.

    Args:
      compression: How.
      gradient: float32[n] of this device.
      state: As `initial` made it.
      slow: Axes over which chunks are compressed.
      fast: Axes over which gradients are summed uncompressed, before.
      context: Of the step; None where no compressor takes a key and error_feedback is not "corrected".
      number: Of the bucket.
      finite: bool[], of `finite_everywhere` of the gradients of the step; None = this one is all.

    Returns:
      float32[n], the next state, and the squared compression errors of this device, of both its messages, or None
      where they are not measured.
    """
    n, hosts, local = gradient.shape[0], _size(slow), _size(fast)
    chunks = Chunks.of(n, hosts, local)
    part = jnp.pad(gradient, (0, chunks.values - n)).reshape(local, hosts * chunks.size)
    part = jax.lax.psum_scatter(part, fast, scatter_dimension=0) if fast else part[0]
    rows, new = part.reshape(hosts, chunks.size), dict(state)
    finite = finite_everywhere([rows], (*slow, *fast)) if finite is None else finite
    if compression.momentum:
        new["momentum"] = compression.momentum * state["momentum"] + rows
        rows = rows + compression.momentum * new["momentum"]
    rate = _rate(compression, context)
    factor = _correction(state, rate)
    keys = _keys(compression, context, number, (*slow, *fast))
    given = rows
    if "worker" in state:
        rows = rows + factor * state["worker"]
    payload = compression.of_workers.encode(rows.astype(jnp.float32), keys[0])
    if "worker" in state:
        new["worker"] = rows - compression.of_workers.decode(payload, chunks.size, keys[0])
    left_out = [_left_out(context, given, compression.of_workers, payload, keys[0])]
    arrived = jax.tree.map(lambda x: jax.lax.all_to_all(x, slow, 0, 0, tiled=True), payload)
    decode = functools.partial(_decode_row, compression.of_workers, n=chunks.size, key=keys[0])
    total = given = arrivals.summed(arrived, decode, chunks.size, rows.dtype)
    if "owner" in state:
        total = total + factor * state["owner"]
    payload = compression.of_owners.encode(total[None].astype(jnp.float32), keys[1])
    if "owner" in state:
        new["owner"] = total - compression.of_owners.decode(payload, chunks.size, keys[1])[0]
    left_out.append(_left_out(context, given[None], compression.of_owners, payload, keys[1]))
    gathered = jax.tree.map(lambda x: arrivals.gathered(x[0], slow), payload)
    whole = compression.of_owners.decode(gathered, chunks.size, keys[1]).ravel()
    whole = jax.lax.all_gather(whole, fast, axis=0, tiled=True, to=arrivals.gathered_to(fast)) if fast else whole
    # The gathered sum is the same on all devices.
    finite = finite & jnp.isfinite(whole).all()
    if rate is not None:
        new["rate"] = rate
        # A step at a rate of 0 applies nothing and leaves nothing out: what earlier ones left out is still to come.
        new = {name: x if name == "momentum" else jnp.where(rate > 0, x, state[name]) for name, x in new.items()}
    new = {name: jnp.where(finite, x, state[name]) for name, x in new.items()}
    left_out = jax.tree.map(lambda *squares: sum(squares), *left_out)
    return jnp.where(finite, whole[:n], jnp.nan), new, left_out


def settled(
    compression: Compression,
    gradients: Arrays,
    state: State,
    axes: tuple[str, ...],
    context: StepContext | None,
    finite: jax.Array,
) -> tuple[Arrays, State]:
    """Gradients of a device of a single host, with its residuals, and its state without them.

    Nothing is compressed there, so that residuals of several hosts, as `resized` cuts them, are applied at once. A
    device adds its part of them to its own gradients, before these are summed.

    Args:
      compression: Whose residuals they are.
      gradients: Of the bucket.
      state: float32 "worker"[1, size] and "owner"[size].
      axes: Of the devices of the host.
      context: Of the step.
      finite: bool[], of `finite_everywhere`; residuals stay where it is False.
    """
    rate = _rate(compression, context)
    own = _correction(state, rate) * (state["worker"][0] + state["owner"])
    place = (jax.lax.axis_index(axes) if axes else 0) * own.size

    def add() -> Arrays:
        whole = jax.lax.dynamic_update_slice(jnp.zeros(_size(axes) * own.size, own.dtype), own, (place,))
        parts = apart(whole[: sum(g.size for g in gradients.values())], gradients)
        return {path: g + parts[path].astype(g.dtype) for path, g in gradients.items()}

    gradients = jax.lax.cond(own.any(), add, lambda: gradients)
    finite = finite if rate is None else finite & (rate > 0)
    left = {name: jnp.where(finite, 0, state[name]) for name in ("worker", "owner")}
    return gradients, {**state, **left}


def finite_everywhere(gradients: Iterable[jax.Array], axes: tuple[str, ...]) -> jax.Array:
    """bool[]: whether all gradients of all devices of the axes are finite."""
    own = jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()
    return jax.lax.pmin(own.astype(jnp.int32), axes) > 0


def resized(state: Mapping[str, np.ndarray], hosts: int, local: int) -> dict[str, np.ndarray]:
    """The states of a bucket on another number of devices: the sum of the residuals of workers is kept.

    Args:
      state: {name: [devices before, ...]} of `State`.
      hosts, local: Of the devices now.

    Returns:
      {name: [hosts * local, ...]}.
    """
    chunks, found = Chunks.of(int(state["values"][0]), hosts, local), {}
    for name, x in state.items():
        if name in ("values", "rate"):
            found[name] = np.repeat(x[:1], hosts * local)
            continue
        if name == "owner":
            # Device (s, f) has chunk s of part f; parts lie behind each other.
            per_host = state["worker"].shape[1]
            flat = x.reshape(per_host, -1, x.shape[-1]).swapaxes(0, 1).ravel()
        else:
            before = x.shape[1]
            flat = x.reshape(before, -1, before * x.shape[-1]).sum(axis=0).ravel()  # over hosts; parts in a row
        flat = np.pad(flat, (0, max(0, chunks.values - flat.size)))[: chunks.values].astype(x.dtype)
        parts = flat.reshape(local, hosts, chunks.size)
        if name == "owner":
            found[name] = parts.swapaxes(0, 1).reshape(hosts * local, chunks.size)
        else:
            found[name] = np.tile(parts[None] / hosts, (hosts, 1, 1, 1)).reshape(hosts * local, hosts, chunks.size)
    return {name: x.astype(state[name].dtype) for name, x in found.items()}


def residual(state: Mapping[str, State]) -> jax.Array:
    """float32[]: the norm of all residuals of workers and owners, of states [devices, ...] by bucket."""
    return global_norm([own[name] for own in state.values() for name in ("worker", "owner") if name in own])


def sent(compression: Compression, values: int, hosts: int, local: int) -> SentBytes:
    """Bytes that a device sends of a bucket: between hosts to owners and back, and within hosts before and after."""
    chunks = Chunks.of(values, hosts, local)
    there, back = (each.payload_bytes(chunks.size) for each in (compression.of_workers, compression.of_owners))
    compressed = links.sent("all-to-all", hosts * there, hosts, 1) + links.sent("all-gather", hosts * back, hosts, 1)
    scattered, gathered = (links.sent(kind, 4 * chunks.values, 1, local) for kind in ("reduce-scatter", "all-gather"))
    return scattered + compressed + gathered


def _left_out(
    context: StepContext | None, given: jax.Array, compressor: Compressor, payload: Payload, key: jax.Array | None
) -> jax.Array | None:
    """float32[]: the squared compression error of a message; None = not measured."""
    if context is None or context.measure is None:
        return None
    return context.left_out(lambda: compressor.decode(payload, given.shape[1], key) - given)


def _decode_row(compressor: Compressor, row: Mapping[str, jax.Array], n: int, key: jax.Array | None) -> jax.Array:
    return compressor.decode({name: x[None] for name, x in row.items()}, n, key)[0]


def _rate(compression: Compression, context: StepContext | None) -> jax.Array | None:
    """float32[]: the learning rate of this step, where feedback is corrected by it."""
    if compression.error_feedback != "corrected":
        return None
    if context is None or context.learning_rate is None:
        raise UserError(
            "Compression: error_feedback='corrected' goes by the learning rate of every step, and there is none: the "
            "caller gave none, or the optimizer has several. Use error_feedback='vanilla'."
        )
    return context.learning_rate


def _correction(state: State, rate: jax.Array | None) -> jax.Array | float:
    """What residuals are multiplied by before they are added to a gradient of this step."""
    if rate is None:
        return 1.0
    known = (state["rate"] > 0) & (rate > 0)
    return jnp.where(known, state["rate"] / jnp.where(known, rate, 1), 1)


def _keys(
    compression: Compression, context: StepContext | None, number: int, axes: tuple[str, ...]
) -> tuple[jax.Array | None, jax.Array | None]:
    """uint32[2] of workers and of owners. Shared keys are the same for both: owners send the places they summed."""
    if not _draws(compression):
        return None, None
    if context is None:
        raise _no_key(compression)
    kinds = [compressor.traits.keys for compressor in (compression.of_workers, compression.of_owners)]
    key = jax.random.fold_in(context.key, number)
    found: list[jax.Array | None] = []
    for way, kind in enumerate(kinds):
        own = (
            key if kind == "shared" else jax.random.fold_in(jax.random.fold_in(key, 1 + way), jax.lax.axis_index(axes))
        )
        found.append(None if kind == "none" else jax.random.bits(own, (2,), jnp.uint32))
    return found[0], found[1]


def _draws(compression: Compression) -> bool:
    return any(each.traits.keys != "none" for each in (compression.of_workers, compression.of_owners))


def _no_key(compression: Compression) -> UserError:
    named = next(
        each.traits.name for each in (compression.of_workers, compression.of_owners) if each.traits.keys != "none"
    )
    return UserError(
        f"Compression: {named} is random and needs a key. Pass context=StepContext(step, key) to the gradients, or a "
        "key to `update`."
    )


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def flat(arrays: Arrays) -> jax.Array:
    """float32[n] of arrays, concatenated.

    Raises:
      UserError: one is of 64 bits, or of no real numbers.
    """
    for path, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError(
                f"Compression: the gradient of {path!r} is {x.dtype}, whose mean would be cut to it. Leave parameters "
                "out that are no real numbers, or cast it to float32."
            )
        if x.dtype == jnp.float64:
            raise UserError(
                f"Compression: compressors take float32, and the gradient of {path!r} is float64. Keep master "
                "parameters in float32."
            )
    return jnp.concatenate([x.astype(jnp.float32).ravel() for x in arrays.values()])


def apart(x: jax.Array, like: Arrays) -> Arrays:
    """The inverse of `flat`."""
    parts = jnp.split(x, np.cumsum([a.size for a in like.values()])[:-1].tolist())
    return {path: part.reshape(like[path].shape) for path, part in zip(like, parts, strict=True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """See `compress_gradients`.

    Attributes:
      compression: How gradients are summed.
      slow, fast: Axes of the shard_map over which they are compressed, and summed uncompressed before.
    """

    compression: Compression
    slow: tuple[str, ...]
    fast: tuple[str, ...]

    def init(self, params: "PyTree", *, hosts: int, local: int = 1) -> "PyTree":
        """The state before the first step: [devices, ...], to be sharded over all axes, slow ones first.

        Args:
          params: Pytree of arrays or shapes, as the gradients.
          hosts: Devices along the slow axes.
          local: Devices along the fast axes.

        Raises:
          UserError: counts that are none, `local` without fast axes, or what `initial` refuses.
        """
        hosts, local = check_whole("init: hosts", hosts, 1), check_whole("init: local", local, 1)
        if local > 1 and not self.fast:
            raise UserError(
                f"init: local={local} are devices along the axes `fast` of compress_gradients, and there are none. "
                f"Leave local out: hosts are all devices along {self.slow}."
            )
        values = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
        state = initial(self.compression, values, hosts, local)
        return {name: jnp.tile(x[None], (hosts * local, *(1 for _ in x.shape))) for name, x in state.items()}

    def update(
        self,
        gradients: "PyTree",
        state: "PyTree",
        key: jax.Array | None = None,
        learning_rate: jax.typing.ArrayLike | None = None,
    ) -> tuple["PyTree", "PyTree"]:
        """The mean of gradients over all devices, and the next state; inside the shard_map, whatever its check_vma.

        Args:
          gradients: Pytree of arrays of this device.
          state: What `init` made, as the shard_map gives it: [1, ...].
          key: PRNG key, the same on all devices and another one in every step; None where no compressor takes one.
          learning_rate: Of this step, for error_feedback="corrected".

        Raises:
          UserError: axes that the shard_map does not have, the state of other devices or parameters, gradients that
            are no real numbers or were summed over devices already, no key where one is wanted.
        """
        if key is None and _draws(self.compression):
            raise _no_key(self.compression)
        leaves, treedef = jax.tree.flatten_with_path(gradients)
        named = {jax.tree_util.keystr(path): x for path, x in leaves}
        devices, context = self._checked(named, state), None
        if key is not None or learning_rate is not None:
            rate = None if learning_rate is None else jnp.asarray(learning_rate, jnp.float32)
            context = StepContext(jnp.int32(0), jax.random.key(0) if key is None else key, rate)
        total, state, _ = reduced(
            self.compression,
            flat(named) / devices,
            {name: x[0] for name, x in state.items()},
            slow=self.slow,
            fast=self.fast,
            context=context,
        )
        mean = [x.astype(like.dtype) for x, (_, like) in zip(apart(total, named).values(), leaves, strict=True)]
        return jax.tree.unflatten(treedef, mean), {name: x[None] for name, x in state.items()}

    def _checked(self, gradients: Arrays, state: "PyTree") -> int:
        """The number of devices. Refuses what `update` does."""
        axes = (*self.slow, *self.fast)
        try:
            hosts, local = _size(self.slow), _size(self.fast)
        except NameError as error:
            raise UserError(
                f"update: there is no mesh axis of one of the names {', '.join(axes)} here. Call it inside a shard_map "
                "over these axes, or give compress_gradients those of yours."
            ) from error
        values = sum(x.size for x in gradients.values())
        like = jax.eval_shape(lambda: initial(self.compression, values, hosts, local))
        wanted = {name: [1, *x.shape] for name, x in like.items()}
        given = {name: list(x.shape) for name, x in state.items()}
        if given != wanted:
            raise UserError(
                f"update: the state has {given}; gradients of {values} values on this mesh want {wanted}. Make it "
                f"with init(params, hosts={hosts}, local={local}), and shard its first axis over {', '.join(axes)}."
            )
        if arrivals.gathered_to(axes) == "invarying":
            for path, x in gradients.items():
                alike = [axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying]
                if alike:
                    raise UserError(
                        f"update: the gradient of {path!r} is the same along {', '.join(alike)}: under check_vma=True "
                        "jax.grad sums over devices that have the same parameters. Differentiate by "
                        f'jax.lax.pcast(params, {axes}, to="varying"), or give the shard_map check_vma=False.'
                    )
        return hosts * local


def compress_gradients(
    compressor: KnownCompressor,
    *,
    owner: KnownCompressor | None = None,
    error_feedback: ErrorFeedback = "vanilla",
    momentum: float = 0.0,
    axes: str | Sequence[str],
    fast: str | Sequence[str] = (),
) -> GradientReduction:
    """A compressed mean of gradients for a shard_map of one's own. All gradients are one bucket.

    Args:
      compressor, owner, error_feedback, momentum: As in `Compression`.
      axes: Over which gradients are compressed; one name, or several.
      fast: Over which they are summed uncompressed, before.

    Raises:
      UserError: as `Compression`; no axes, or an axis twice.
    """
    compression = Compression(compressor=compressor, owner=owner, error_feedback=error_feedback, momentum=momentum)
    slow, quick = ((given,) if isinstance(given, str) else tuple(given) for given in (axes, fast))
    if not slow or len({*slow, *quick}) < len(slow) + len(quick):
        raise UserError(
            f"compress_gradients: axes={axes!r} and fast={fast!r} must be different names, at least one of them in "
            'axes. Name the axes of your shard_map: axes="data".'
        )
    return GradientReduction(compression=compression, slow=slow, fast=quick)
