"""Arrays of a pytree in a folder, by orbax: asynchronous, from any sharding, onto any other."""

import contextlib
import logging
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

# Below this size a replicated array is written by one device alone: splitting it over the replicas costs a dispatch
# per slice on the training thread (8 CPU devices, 41 arrays: 27 ms a save against 6).
_SMALLEST_SPLIT_BYTES = 16 * 2**20


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


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_abstract_numbers(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise ValueError(f"restore: every leaf of abstract_tree needs a sharding; {name} has none.")
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _as_target(array: jax.Array | None, leaf: Any) -> jax.Array:
    if array is None:
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

    def __init__(self, following: Any) -> None:
        self._following = following

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed" and unraisable.object is None):
            self._following(unraisable)
