"""Meshes: one vocabulary of axes for every system.

    replica   across slices or hosts: data parallel, outer axis of HSDP      fsdp      shards parameters and batch
    expert    shards experts and batch                                        context   shards the sequence
    tensor    shards features                                                 stage     shards layers

A mesh always has all six axes (most of size 1), in this order, so that a PartitionSpec never has to ask which exist.
The batch is sharded over `BATCH_AXES`; embedding lookups shard it over all of `AXES`.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError, check_at_least

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Shaped

Tree = TypeVar("Tree")

AXES = ("replica", "fsdp", "expert", "context", "tensor", "stage")
BATCH_AXES = ("replica", "fsdp", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices per axis; at most one axis may be -1: whatever is left."""

    replica: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    stage: int = 1

    def resolve(self, devices: int) -> tuple[int, ...]:
        """Axis sizes for a number of devices, in the order of `AXES`.

        Raises:
          UserError: the sizes do not multiply to `devices`.
        """
        sizes = [getattr(self, axis) for axis in AXES]
        for axis, size in zip(AXES, sizes, strict=True):
            if size != -1 and size < 1:
                raise UserError(f"MeshShape: {axis} must be at least 1, or -1 for whatever is left; got {size}.")
        if sizes.count(-1) > 1:
            raise UserError(f"MeshShape: at most one axis may be -1; got {self}.")
        fixed = math.prod(s for s in sizes if s != -1)
        if -1 in sizes and devices % fixed == 0:
            sizes[sizes.index(-1)] = devices // fixed
        if math.prod(sizes) != devices:
            stated = ", ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True) if s != 1) or "all axes 1"
            raise UserError(
                f"MeshShape: axis sizes must multiply to the {devices} devices at hand; got {stated}. "
                "Change the number of devices, or the sizes: fsdp=-1 takes whatever is left (train: "
                "--set placement.mesh.fsdp=-1, eval, prune and grow: --mesh fsdp=-1)."
            )
        return tuple(sizes)


def parse_mesh(text: str) -> MeshShape:
    """Reads mesh sizes such as `fsdp=8,tensor=2`; an axis that is not named has size 1, and `-1` takes what is left.

    Raises:
      UserError: an axis does not exist, is named twice, or its size is no whole number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not re.fullmatch(r"-?\d+", size):
            raise UserError(f"mesh: must look like fsdp=8,tensor=2; got {part!r} in {text!r}. Give AXIS=SIZE.")
        if axis not in AXES:
            near = difflib.get_close_matches(axis, AXES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The axes are {', '.join(AXES)}."
            raise UserError(f"mesh: axis must be one of {', '.join(AXES)}; got {axis!r} in {text!r}. {hint}")
        if axis in sizes:
            raise UserError(f"mesh: each axis may be given once; got {axis} twice in {text!r}. Drop one of them.")
        sizes[axis] = int(size)
    return MeshShape(**{"fsdp": 1, **sizes})


def mesh_text(mesh: MeshShape) -> str:
    """A mesh as `parse_mesh` reads it, axes of size 1 left out."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n != 1) or "fsdp=1"


def make_mesh(shape: MeshShape | None, devices: Sequence[Any] | None = None) -> Mesh:
    """Builds a mesh of all devices, every axis of type Auto; of the first device alone where the shape is None.

    On a pod the devices of a process need not be consecutive along the mesh (v5e:4x4 has 0 0 1 1 1 1 0 2 3 3 3 3 2 2 2
    0): see `reading_order`.

    Raises:
      UserError: the sizes do not multiply to the devices, or there is no shape and there are several processes.
    """
    if shape is None and jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes train over all of their devices, and placement.mesh is none: one device. "
            "Set --set placement.mesh=MeshShape, or leave --processes out."
        )
    devices = list(jax.devices() if devices is None else devices)
    if shape is None:
        shape, devices = MeshShape(), devices[:1]
    return jax.make_mesh(shape.resolve(len(devices)), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def torus_sides(mesh: Mesh | AbstractMesh, axis: str) -> tuple[int, ...]:
    """Chips along each side of the torus over which an axis of the mesh lies, that which changes least often first.

    One number, the size of the axis, where it lies along one side, over several slices, or on devices without places.
    """
    size = mesh.shape[axis]
    if isinstance(mesh, AbstractMesh):
        return (size,)
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(size, -1)[:, 0]
    if size == 1 or not hasattr(devices[0], "coords"):
        return (size,)
    places = np.array([device.coords for device in devices])
    turns = (np.diff(places, axis=0) != 0).sum(axis=0)
    sides = [len(set(places[:, k])) for k in np.argsort(turns, kind="stable")]
    return tuple(side for side in sides if side > 1) if math.prod(sides) == size else (size,)


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Examples (dimension 0) over the batch axes."""
    return NamedSharding(mesh, P(BATCH_AXES))


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Devices over which the examples of a batch are spread."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def manual_batch_axes() -> tuple[str, ...]:
    """The batch axes that are manual here, as in the explicit form of a step: a device sees its own examples alone."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in BATCH_AXES if axis in manual)


def sum_over_batch(total: jax.Array) -> jax.Array:
    """A sum over the examples here made one over the global batch.

    Where the batch axes are manual it is summed over them; where they are automatic the compiler already does so.
    """
    axes = manual_batch_axes()
    return jax.lax.psum(total, axes) if axes else total


def fewest_parts(rows: int, most: int) -> int:
    """Into how many equal parts the rows of a device are cut, so that each has at most `most`: the fewest that divide.

    1 where there are no rows, which is refused elsewhere.
    """
    return next((parts for parts in range(1, rows + 1) if rows % parts == 0 and rows // parts <= most), 1)


def cut(x: "Shaped[Array, 'batch ...']", mesh: Mesh | AbstractMesh, parts: int) -> "Shaped[Array, '{parts} rows ...']":
    """[B, ...] -> [parts, B / parts, ...], every device cutting its own examples, so that nothing moves."""
    shards = batch_shards(mesh)
    each = x.shape[0] // (shards * parts)  # not -1: there may be nothing in a row
    x = x.reshape(shards, parts, each, *x.shape[1:]).swapaxes(0, 1)
    x = x.reshape(parts, shards * each, *x.shape[3:])
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, BATCH_AXES)))


def join(x: "Shaped[Array, 'parts rows ...']", mesh: Mesh | AbstractMesh) -> "Shaped[Array, 'batch ...']":
    """The inverse of `cut`."""
    parts, shards = x.shape[0], batch_shards(mesh)
    each = x.shape[1] // shards
    x = x.reshape(parts, shards, each, *x.shape[2:]).swapaxes(0, 1)
    x = x.reshape(shards * parts * each, *x.shape[3:])
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, P())


def everywhere(mesh: Mesh) -> NamedSharding:
    """Dimension 0 over all axes: how lookups see examples, and how tables lie."""
    return NamedSharding(mesh, P(tuple(mesh.axis_names)))


@overload
def put(tree: np.ndarray, sharding: NamedSharding) -> jax.Array: ...
@overload
def put(tree: Tree, sharding: NamedSharding) -> Tree: ...
def put(tree: object, sharding: NamedSharding) -> object:
    """Host arrays on the devices; every process passes the same ones, and each puts the parts of its own devices.

    Nothing is sent between processes. Nothing is compared either, as `jax.device_put` would do with all of it.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def parts(array: jax.typing.ArrayLike) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(parts, tree)


def steps_in_flight(mesh: Mesh) -> int:
    """Steps that may be queued on the devices of this process.

    Virtual CPU devices share one pool of threads, and the collectives of two queued steps can wait for each other there
    for ever (seen with 8 devices on 2 cores).
    """
    local = mesh.local_devices
    return 1 if len(local) > 1 and local[0].platform == "cpu" else 3


def host_memory_bytes() -> int | None:
    """Physical memory of this machine; None where the system does not say."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_memory_bytes(mesh: Mesh) -> int | None:
    """Memory that a device of this process may use; CPU devices share that of the machine. None = unknown."""
    local = mesh.local_devices
    if not local:
        return None
    if local[0].platform == "cpu":
        host = host_memory_bytes()
        return None if host is None else host // len(local)
    found = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    known = [limit for limit in found if limit]
    return min(known) if known else None


def check_batch(batch_size: int, mesh: Mesh, over: Literal["batch axes", "all axes"] = "all axes") -> None:
    """Refuses a global batch that does not divide over the mesh.

    Args:
      batch_size: Examples of a step.
      mesh: The mesh.
      over: Embedding lookups divide the batch over "all axes", models without them over the "batch axes".

    Raises:
      UserError: names the axes and their sizes.
    """
    check_at_least("batch_size", batch_size, 1)
    over_batch = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    checks = [(BATCH_AXES, over_batch, "the batch axes")]
    if over == "all axes":
        checks.append((tuple(mesh.axis_names), mesh.size, "all axes (embedding lookups use every device)"))
    for axes, count, what in checks:
        if batch_size % count:
            sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes if mesh.shape.get(axis, 1) > 1)
            below, above = batch_size // count * count, (batch_size // count + 1) * count
            nearest = f"{below} or {above}" if below else f"{above}"
            raise UserError(
                f"batch_size {batch_size} does not divide over {what}: {sizes} make {count} shards. The nearest sizes "
                f"that do: {nearest}; set it with --set data.batch_size=N (eval: --batch-size N), or change the mesh "
                "with --set placement.mesh.AXIS=N (eval and plan: --mesh AXIS=N,...)."
            )


def check_processes(mesh: Mesh) -> None:
    """Refuses a mesh on which processes would have to read the same examples.

    Each process reads its own part of every global batch, so a shard of the batch must lie inside one process, and all
    processes must have equally many.

    Raises:
      UserError: names the processes of a shard, or the numbers of shards.
    """
    advice = (
        "Give the axes that cut the batch (replica, fsdp, expert) the devices that cross processes, so that context, "
        "tensor and stage stay inside one: --set placement.mesh.AXIS=N (eval: --mesh AXIS=N,...)."
    )
    shards = _processes(mesh)
    for number, shard in enumerate(shards):
        if np.any(shard != shard[0]):
            raise UserError(
                f"mesh {_sizes(mesh)}: shard {number} of the batch lies on devices of the processes "
                f"{', '.join(map(str, np.unique(shard)))}, but each process reads examples of its own. {advice}"
            )
    processes, counts = np.unique(shards[:, 0], return_counts=True)
    if np.any(counts != counts[0]):
        have = ", ".join(f"process {p} has {n}" for p, n in zip(processes, counts, strict=True))
        raise UserError(
            f"mesh {_sizes(mesh)}: processes must have equally many shards of the batch; {have}. Start each process "
            "with as many devices as the others."
        )


def reading_order(mesh: Mesh, examples: int) -> np.ndarray:
    """int[examples]: where along the mesh the examples of a global batch lie, in the order of the file.

    Process i reads the i-th consecutive part of every global batch, and puts its examples on its devices in their order
    along the mesh, where devices of other processes may lie between them. `array[reading_order(mesh, len(array))]`
    brings what a step computed of each example into the order in which the examples were read.
    """
    shards = np.arange(examples).reshape(batch_shards(mesh), -1)
    return shards[np.argsort(_processes(mesh)[:, 0], kind="stable")].reshape(-1)


def local_positions(mesh: Mesh) -> list[int]:
    """Where the devices of this process lie along the flattened mesh."""
    return [i for i, d in enumerate(mesh.devices.flat) if d.process_index == d.client.process_index()]


def _processes(mesh: Mesh) -> np.ndarray:
    """int[shards of the batch, devices of a shard]: the process of each device."""
    return np.array([device.process_index for device in mesh.devices.flat]).reshape(batch_shards(mesh), -1)


def _sizes(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size != 1) or "of one device"
