"""Arrays of a pytree in a folder, by orbax: asynchronous, from any sharding, onto any other, or one at a time."""

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future

from scalejax.errors import UserError

# Below this size a replicated array is written by one device alone: splitting it over the replicas costs a dispatch
# per slice on the training thread (8 CPU devices, 41 arrays: 27 ms a save against 6).
_SMALLEST_SPLIT_BYTES = 16 * 2**20

_PIECE_BYTES = 4 * 2**20
"""What `write_each` compresses at a time, at least: arrays in one piece took four times their size of memory."""


Entry = int | slice | EllipsisType
Index = Entry | tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """An array that may be on disk: indexing gives a part of it in NumPy, `array[...]` all of it, anew each time.

    `jax.make_array_from_callback(array.shape, sharding, array.__getitem__)` places it on a mesh.

    Attributes:
      shape: Known before anything is read.
      dtype: Likewise.
      read: Index of integers and slices -> the part, which belongs to the caller.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, index: Index, /) -> np.ndarray:
        return self.read(index)


AnyArray = LazyArray | np.ndarray


def stored(folder: pathlib.Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> LazyArray:
    """An array in a folder that `ArrayStore.write` or `write_each` wrote; steps of slices are positive.

    Read by tensorstore, on which orbax stands: 1 MiB in 3 ms, where a restore by orbax takes 11 to 15 (2 CPU cores).
    What is read from disk are whole pieces, each what a device held, so take an array whole for many slices of it.
    Indexing raises UserError where it cannot be read.
    """

    def read(index: Index) -> np.ndarray:
        if not math.prod(shape):
            return np.empty(shape, dtype)[index]
        base = {"driver": "file", "path": f"{folder.absolute()}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        try:
            array: Any = tensorstore.open({"driver": "auto", "kvstore": store}, read=True).result()
            return array[_from_the_start(index, shape)].read().result()
        except ValueError as error:
            raise UserError(
                f"cannot read {name} of {folder}: {str(error).splitlines()[0]}. Open it anew: a run in progress "
                "removes older checkpoints, and a file that was damaged is then named."
            ) from error

    return LazyArray(shape, dtype, read)


def _from_the_start(index: Index, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """An index with one entry a dimension, none of which counts from the end: tensorstore knows no other."""
    given = index if isinstance(index, tuple) else (index,)
    at = next((number for number, entry in enumerate(given) if entry is ...), len(given))
    entries = [entry for entry in given if entry is not ...]
    before, after = entries[:at], entries[at:]
    whole = (*before, *[slice(None)] * (len(shape) - len(before) - len(after)), *after)
    places = [range(size)[entry] for entry, size in zip(whole, shape, strict=True)]
    return tuple(slice(p.start, max(p.start, p.stop), p.step) if isinstance(p, range) else p for p in places)


def write_each(folder: pathlib.Path, arrays: Mapping[str, AnyArray]) -> None:
    """Writes what `ArrayStore.write` does, in one process; an array is read when its turn comes, and then let go."""
    _quiet_orbax()
    # Nothing changes an array while it is written, so orbax need not copy it first.
    registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _OneByOne(deepcopy_host_arrays=False)))
    turns = {
        name: array if isinstance(array, LazyArray) else LazyArray(array.shape, array.dtype, array.__getitem__)
        for name, array in arrays.items()
        if math.prod(array.shape)
    }
    pieces = {name: ocp.SaveArgs(chunk_byte_size=_piece_bytes(array)) for name, array in turns.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as writer:
        writer.save(folder.absolute(), args=ocp.args.PyTreeSave(turns, save_args=pieces))


def _piece_bytes(array: LazyArray) -> int | None:
    """What orbax shall cut it into, by divisors of the longest axis: not where these may be the axis and 1."""
    cut = max(array.shape, default=1) % 64 == 0
    return max(_PIECE_BYTES, math.prod(array.shape) * array.dtype.itemsize // 64) if cut else None


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Writes arrays in turn, where orbax's own handlers take all of them at once."""

    def typestr(self) -> str:
        # By this name `ArrayStore.read`, whose registry knows no other, finds its handler for what was written here.
        return "jax.Array"

    async def serialize(
        self,
        values: Sequence[AnyArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        assert args is not None
        for value, info, one in zip(values, infos, args, strict=True):
            for written in await super().serialize([np.asarray(value[...])], [info], [one]):
                written.result()
        return []


class ArrayStore:
    """Writes and reads flat dictionaries of arrays. One write at a time."""

    def __init__(self) -> None:
        _quiet_orbax()
        handler = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=_SMALLEST_SPLIT_BYTES,
            enable_write_sharding_file=False,  # the sharding always comes from the target
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))

    def write(self, folder: pathlib.Path, arrays: dict[str, jax.Array]) -> None:
        """Begins to write; returns when the arrays are copied to the host and may be donated."""
        numbers = {name: _as_numbers(leaf) for name, leaf in arrays.items() if leaf.size}  # orbax refuses empty ones
        self._checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(numbers))

    def wait(self) -> None:
        """Returns when the write is complete on every process; raises its error."""
        self._checkpointer.wait_until_finished()

    def read(self, folder: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads arrays, of all that were written, into the shardings of `targets`; shapes and dtypes are unchanged."""
        numbers = {name: _as_abstract_numbers(name, leaf) for name, leaf in targets.items() if leaf.size}
        arguments = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in numbers.items()
        }
        arrays = self._checkpointer.restore(
            folder.absolute(), args=ocp.args.PyTreeRestore(item=numbers, restore_args=arguments, partial_restore=True)
        )
        return {name: _as_target(arrays.get(name), leaf) for name, leaf in targets.items()}

    def close(self) -> None:
        """Ends the background threads."""
        self._checkpointer.close()

    def discard(self) -> None:
        """Ends the background threads after a failure, whose other errors orbax would raise at its next use."""
        # Arrays fail one by one; orbax raises the first error, and asyncio would print the others when it forgets them.
        logging.getLogger("asyncio").addFilter(_not_of_forgotten_errors)
        with contextlib.suppress(Exception):
            self._checkpointer.close()


def _not_of_forgotten_errors(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_abstract_numbers(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise ValueError(f"restore: every leaf of abstract_tree needs a sharding; {name} has none.")
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _as_target(array: jax.Array | None, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if array is None:
        # Only arrays without elements are absent: `write` leaves them out.
        return jax.jit(lambda: jnp.empty(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
    if not _is_key(leaf):
        return array
    implementation = []  # only a traced or a real key can be asked for it
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=implementation[0])


def _quiet_orbax() -> None:
    """Keeps orbax's remarks off the terminal; its errors reach the user as exceptions, raised by `wait`."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _NotFromOrbax) for item in logger.filters):
            logger.addFilter(_NotFromOrbax())
    if not isinstance(sys.unraisablehook, _QuietHook):
        sys.unraisablehook = _QuietHook(sys.unraisablehook)


class _NotFromOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        # asyncio complains of the second and third write that failed, naming orbax's coroutine.
        source = record.getMessage() if record.name == "asyncio" else record.pathname
        return f"{os.sep}orbax{os.sep}" not in source


class _QuietHook:
    """When one write of several fails, orbax closes its event loop, and tensorstore then fails to report the others.

    Python prints a traceback for each, from a thread where nothing can catch it.
    """

    def __init__(self, following: Callable[["sys.UnraisableHookArgs"], object]) -> None:
        self._following = following

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed" and unraisable.object is None):
            self._following(unraisable)
