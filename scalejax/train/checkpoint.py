"""Checkpoints: saved in the background, complete or absent, checked before they are used, restored on any mesh.

    checkpoints/1000/manifest.json     what this is, of which run, and the SHA-256 of every other file
    checkpoints/1000/arrays/           the arrays, in orbax's format
    checkpoints/saving-2000/           being written, or left behind by a process that was killed

A checkpoint appears by one rename after its last byte, digests included, is on disk; only then are older ones
removed. So at any moment, whatever is killed, the folder lists complete checkpoints only, and never fewer than before.

orbax stores the arrays; what to keep, and when a step counts as saved, is decided here. Its own manager removes old
steps before digests of the new one could be written, and the digests are needed: with a flipped bit in a data file
orbax restored other numbers without a word (in 28 of 42 trials; its metadata files are protected).

A save copies the arrays to the host before it returns, so the caller may donate them to the next step at once.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import shutil
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from scalejax.errors import UserError
from scalejax.train import disk, distributed
from scalejax.train.experiment import Checkpoints

FORMAT_VERSION = 1
"""Raised when a reader of today could not read the checkpoints of tomorrow."""

_SAVING = "saving-"
_REMOVING = "removing-"
_ARRAYS = "arrays"
_MANIFEST = "manifest.json"

_BETTER_HIGH = frozenset({"auc"})

# Below this size a replicated array is written by one device alone: splitting it over the replicas costs a dispatch
# per slice on the training thread (8 CPU devices, 41 arrays: 27 ms a save against 6).
_SMALLEST_SPLIT_BYTES = 16 * 2**20


class Checkpointer:
    """The checkpoints of one run. Every process of the run makes one and calls the same methods in the same order.

    Making one touches no file. Only `save` writes, so another process may `restore` from a run in progress.
    """

    def __init__(self, folder: pathlib.Path, policy: Checkpoints, identity: dict[str, str]) -> None:
        """Describes the checkpoints of a run.

        Args:
          folder: Where the checkpoints are; in a run of several processes all of them must see it.
          policy: Which checkpoints to keep.
          identity: What a checkpoint must agree with to be restored: name -> short text or digest, for instance
            {"model": ..., "optimizer": ..., "data": ...}.
        Raises:
          UserError: The policy keeps fewer than one last checkpoint or a negative number of best ones.
        """
        if policy.keep_last < 1:
            raise UserError(f"checkpoints.keep_last must be 1 or more; got {policy.keep_last}.")
        if policy.keep_best < 0:
            raise UserError(f"checkpoints.keep_best must be 0 or more; got {policy.keep_best}.")
        self.folder = folder.absolute()
        self._policy = policy
        self._identity = dict(identity)
        self._store: ocp.AsyncCheckpointer | None = None
        self._finisher: threading.Thread | None = None
        self._error: BaseException | None = None
        self._newest_saved: int | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._finisher is not None:
            # The block's own error is the news, and other processes may not come to agree: only let the save end.
            self._finisher.join()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending; as process 0 sees them, on every process."""
        return distributed.on_primary(lambda: _listed(self.folder))

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, tree: Any, host: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Begins to save; returns when the arrays are copied and may be donated.

        Waits for the save before, if it still runs, and raises its error.

        Args:
          step: Optimizer step; must be greater than the latest saved.
          tree: Pytree of jax.Array in any sharding; what is stored is the global array.
          host: JSON values to store beside the arrays.
          metrics: The evaluation at this step, holding `policy.best_metric`; None where there was none, and then the
            checkpoint can only be kept as one of the last.
        Raises:
          UserError: The disk refused this save or the one before. Earlier checkpoints are intact.
          ValueError: The step is not newer than the latest, a leaf is no jax.Array, two leaves have one name, or
            `metrics` lacks the metric of the policy.
        """
        self.wait()
        if metrics is not None and self._policy.best_metric not in metrics:
            raise ValueError(f"save: metrics must hold {self._policy.best_metric!r}; got {sorted(metrics)}.")
        if self._newest_saved is None:
            self._prepare()
        if self._newest_saved is not None and step <= self._newest_saved:
            raise ValueError(f"save: step must be greater than the latest, {self._newest_saved}; got {step}.")
        arrays = _named_leaves(tree)
        for name, leaf in arrays.items():
            if not isinstance(leaf, jax.Array):
                raise ValueError(f"save: {name} must be a jax.Array; got {type(leaf).__name__}.")
        manifest = _Manifest(
            step=step,
            identity=self._identity,
            metrics=None if metrics is None else {name: float(value) for name, value in metrics.items()},
            host=host,
            arrays={name: _describe(leaf) for name, leaf in arrays.items()},
            files={},
        )
        json.dumps(host)  # raises here rather than in the background
        distributed.together(lambda: self._begin_arrays(step, arrays))
        self._finisher = threading.Thread(target=self._finish, args=(manifest,), name=f"checkpoint-{step}")
        self._finisher.start()
        self._newest_saved = step

    def wait(self) -> None:
        """Returns when the save in progress, if any, is complete.

        Raises:
          UserError: The disk refused it. Earlier checkpoints are intact.
        """
        if self._finisher is None:
            return
        self._finisher.join()
        self._finisher = None
        error, self._error = self._error, None
        if error is not None:
            self._newest_saved = None  # this step is not there; look again
        distributed.raise_together(error)

    def close(self) -> None:
        """Waits for the save in progress and ends the background threads.

        Raises:
          UserError: The disk refused the save in progress. Earlier checkpoints are intact.
        """
        try:
            self.wait()
        finally:
            if self._store is not None:
                self._store.close()
                self._store = None

    def restore(self, step: int | None, abstract_tree: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the mesh of `abstract_tree`, whatever mesh it was saved from.

        Args:
          step: Which; None = the newest. Never another one than asked for.
          abstract_tree: Pytree of jax.ShapeDtypeStruct with shardings.
        Returns:
          (the tree of arrays, the host values).
        Raises:
          UserError: There is no such checkpoint; it is of another model, other data or a newer scalejax; or a file
            is missing or damaged, in which case the message names the newest intact one.
        """
        self.wait()
        step = self._existing(step)
        folder = self.folder / str(step)
        manifest = distributed.together(lambda: self._checked_manifest(step, abstract_tree))
        distributed.together(lambda: self._check_files(step, manifest))
        targets = _named_leaves(abstract_tree)
        arrays = self._arrays_store().restore(
            folder / _ARRAYS,
            args=ocp.args.PyTreeRestore(
                item={name: _as_abstract_numbers(leaf) for name, leaf in targets.items()},
                restore_args={name: _restore_args(leaf) for name, leaf in targets.items()},
            ),
        )
        leaves = [_as_target(arrays[name], leaf) for name, leaf in targets.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves), manifest.host

    def metrics(self, step: int) -> dict[str, float] | None:
        """The evaluation that was saved with a step; None where there was none."""
        return _read_manifest(self.folder / str(step)).metrics

    def _arrays_store(self) -> ocp.AsyncCheckpointer:
        if self._store is None:
            _quiet_orbax()
            handler = ocp.type_handlers.ArrayHandler(
                min_slice_bytes_for_replica_parallel=_SMALLEST_SPLIT_BYTES,
                enable_write_sharding_file=False,  # the sharding always comes from the target
            )
            registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
            self._store = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
        return self._store

    def _prepare(self) -> None:
        """Before the first save: the folder exists, is seen by all, and holds no remains of a killed process."""

        def clear() -> int | None:
            with disk.explained(f"cannot save checkpoints to {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                for path in self.folder.iterdir():
                    if path.name.startswith((_SAVING, _REMOVING)):
                        shutil.rmtree(path)
            return max(_listed(self.folder), default=None)

        self._newest_saved = distributed.on_primary(clear)
        distributed.together(self._check_shared)

    def _check_shared(self) -> None:
        if not self.folder.is_dir():
            raise UserError(
                f"checkpoints: {self.folder} exists for process 0 but not for process {jax.process_index()}. Choose a "
                "--workdir on a file system that all processes share."
            )

    def _begin_arrays(self, step: int, arrays: dict[str, jax.Array]) -> None:
        try:
            self._arrays_store().save(
                self.folder / f"{_SAVING}{step}" / _ARRAYS,
                args=ocp.args.PyTreeSave({name: _as_numbers(leaf) for name, leaf in arrays.items()}),
            )
        except Exception as error:
            raise disk.explain(error, self._cannot_save(step)) or error from error

    def _finish(self, manifest: "_Manifest") -> None:
        """In the background: waits for the arrays; then, on process 0, makes the checkpoint appear."""
        try:
            self._arrays_store().wait_until_finished()
            if distributed.is_primary():
                self._commit(manifest)
                self._remove_others()
        except BaseException as error:
            self._error = disk.explain(error, self._cannot_save(manifest.step)) or error
            if distributed.is_primary():
                # A full disk should not stay full of a checkpoint that will never be.
                shutil.rmtree(self.folder / f"{_SAVING}{manifest.step}", ignore_errors=True)

    def _commit(self, manifest: "_Manifest") -> None:
        saving = self.folder / f"{_SAVING}{manifest.step}"
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            names = _files(saving)
            digests = list(pool.map(lambda name: _digest(saving / name, durable=True), names))
        _write_manifest(saving, dataclasses.replace(manifest, files=dict(zip(names, digests, strict=True))))
        for folder in saving.rglob("*"):
            if folder.is_dir():
                disk.sync_folder(folder)
        os.rename(saving, self.folder / str(manifest.step))
        disk.sync_folder(self.folder)

    def _remove_others(self) -> None:
        scores = {step: self._score(step) for step in _listed(self.folder)}
        for step in set(scores) - retained(scores, self._policy):
            doomed = self.folder / f"{_REMOVING}{step}"
            os.rename(self.folder / str(step), doomed)
            shutil.rmtree(doomed)

    def _score(self, step: int) -> float | None:
        try:
            metrics = _read_manifest(self.folder / str(step)).metrics
        except UserError:
            return None  # damaged; whoever restores it will be told
        return None if metrics is None else metrics[self._policy.best_metric]

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.folder} holds no checkpoint. Give the folder of a run that has saved one.")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise UserError(
                f"{self.folder} holds no checkpoint of step {step}; it has {', '.join(map(str, steps))}. "
                "Give one of these."
            )
        return step

    def _checked_manifest(self, step: int, abstract_tree: Any) -> "_Manifest":
        try:
            manifest = _read_manifest(self.folder / str(step))
        except _Damaged as damage:
            raise self._damaged(step, damage) from damage
        differences = [
            f"{name} is {_excerpt(manifest.identity.get(name), wanted)} in the checkpoint and "
            f"{_excerpt(wanted, manifest.identity.get(name))} here"
            for name, wanted in sorted(self._identity.items())
            if manifest.identity.get(name) != wanted
        ]
        differences += describe_mismatch(abstract_tree, manifest.arrays)
        if differences:
            shown = differences[:8] + ([f"and {len(differences) - 8} more"] if len(differences) > 8 else [])
            raise UserError(
                f"checkpoint {self.folder / str(step)} is of another model or other data: {'; '.join(shown)}. Use the "
                "recipe, the --set values and the data that the run began with (experiment.json in its folder), or "
                "begin a new run in another --workdir."
            )
        return manifest

    def _check_files(self, step: int, manifest: "_Manifest") -> None:
        # Every process reads a part; together they have read all.
        names = sorted(manifest.files)[jax.process_index() :: jax.process_count()]
        try:
            _check_files(self.folder / str(step), {name: manifest.files[name] for name in names})
        except _Damaged as damage:
            raise self._damaged(step, damage) from damage

    def _damaged(self, step: int, damage: "_Damaged") -> UserError:
        for earlier in reversed([other for other in _listed(self.folder) if other < step]):
            try:
                manifest = _read_manifest(self.folder / str(earlier))
                _check_files(self.folder / str(earlier), manifest.files)
            except UserError:
                continue
            advice = (
                f"The newest intact checkpoint before it is step {earlier}. To go on from there, move the folder "
                f"{self.folder / str(step)} away and run the same command again"
            )
            break
        else:
            advice = "No earlier checkpoint is intact. Bring the file back from a copy, or begin a new run"
        return UserError(f"checkpoint of step {step}: {damage}. {advice}.")

    def _cannot_save(self, step: int) -> str:
        return f"cannot save checkpoint {self.folder / str(step)} (earlier checkpoints are intact)"


def retained(scores: dict[int, float | None], policy: Checkpoints) -> set[int]:
    """The steps to keep: the last ones and the best ones.

    Args:
      scores: Step -> value of `policy.best_metric`, None where it was not evaluated. NaN is never among the best;
        of equal values the earlier step is better.
      policy: How many of each.
    """
    last = sorted(scores)[-policy.keep_last :]
    sign = -1.0 if policy.best_metric in _BETTER_HIGH else 1.0
    scored = [(sign * score, step) for step, score in scores.items() if score is not None and not math.isnan(score)]
    return set(last) | {step for _, step in sorted(scored)[: policy.keep_best]}


def describe_mismatch(abstract_tree: Any, stored: dict[str, dict[str, Any]]) -> list[str]:
    """Says how a tree differs from what a checkpoint holds; empty if it does not.

    Args:
      abstract_tree: Pytree of arrays or jax.ShapeDtypeStruct.
      stored: Name of a leaf -> {"shape": [...], "dtype": ...}, as in a manifest.
    """
    wanted = {name: _describe(leaf) for name, leaf in _named_leaves(abstract_tree).items()}
    differences = [
        f"{name} is {_short(stored[name])} in the checkpoint and {_short(wanted[name])} here"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    differences += [f"{name} {_short(wanted[name])} is not in the checkpoint" for name in wanted if name not in stored]
    differences += [f"{name} {_short(stored[name])} is only in the checkpoint" for name in stored if name not in wanted]
    return differences


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Manifest:
    """What `manifest.json` holds, besides the version of the format and its own digest."""

    step: int
    identity: dict[str, str]
    metrics: dict[str, float] | None
    host: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]


class _Damaged(UserError):
    """A file of a checkpoint is missing or is not as it was written."""


def _write_manifest(folder: pathlib.Path, manifest: _Manifest) -> None:
    content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    disk.write_atomically(
        folder / _MANIFEST, json.dumps({"sha256": _content_digest(content), "content": content}, indent=1) + "\n"
    )


def _read_manifest(folder: pathlib.Path) -> _Manifest:
    path = folder / _MANIFEST
    try:
        record = json.loads(path.read_bytes())
        content = record["content"]
        intact = record["sha256"] == _content_digest(content)
    except FileNotFoundError as error:
        raise _Damaged(f"file {path} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"file {path} is damaged") from error
    if not intact:
        raise _Damaged(f"file {path} is damaged")
    # The digest is right, so this is a statement and not an accident.
    if content["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"checkpoint {folder} has format {content['format_version']} and this scalejax reads up to "
            f"{FORMAT_VERSION}: it was written by a newer version. Upgrade with `pip install -U scalejax`."
        )
    return _Manifest(**{field.name: content[field.name] for field in dataclasses.fields(_Manifest)})


def _content_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_files(folder: pathlib.Path, files: dict[str, dict[str, Any]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda name: _digest(folder / name, durable=False), files))
    for (name, expected), actual in zip(files.items(), found, strict=True):
        if actual is None:
            raise _Damaged(f"file {folder / name} is missing")
        if actual != expected:
            detail = (
                f"{actual['bytes']} bytes, written with {expected['bytes']}"
                if actual["bytes"] != expected["bytes"]
                else "its SHA-256 is not the one it was written with"
            )
            raise _Damaged(f"file {folder / name} is damaged ({detail})")


def _digest(path: pathlib.Path, *, durable: bool) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            if durable:
                os.fsync(file.fileno())
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except FileNotFoundError:
        return None


def _files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _listed(folder: pathlib.Path) -> list[int]:
    try:
        with disk.explained(f"cannot list checkpoints in {folder}"):
            return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return []


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("checkpoint: two leaves of the tree have the same name; dots in keys can do that.")
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _short(description: dict[str, Any]) -> str:
    return f"{description['dtype']}[{','.join(map(str, description['shape']))}]"


def _excerpt(text: str | None, other: str | None) -> str:
    """A text short enough for a message, around the place where it begins to differ from the other."""
    if text is None:
        return "absent"
    if len(text) <= 60:
        return repr(text)
    same = next((at for at, (a, b) in enumerate(zip(text, other or "", strict=False)) if a != b), len(other or ""))
    begin = max(0, same - 20)
    return repr(("..." if begin else "") + text[begin : begin + 60] + ("..." if begin + 60 < len(text) else ""))


def _as_numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_abstract_numbers(leaf: Any) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise ValueError("restore: every leaf of abstract_tree needs a sharding.")
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _restore_args(leaf: Any) -> ocp.ArrayRestoreArgs:
    numbers = _as_abstract_numbers(leaf)
    return ocp.ArrayRestoreArgs(sharding=numbers.sharding, global_shape=numbers.shape, dtype=numbers.dtype)


def _as_target(array: jax.Array, leaf: Any) -> jax.Array:
    if not _is_key(leaf):
        return array
    implementation = []  # only a traced or a real key can be asked for it
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=implementation[0])


def _quiet_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(item, _NotFromOrbax) for item in logger.filters):
        logger.addFilter(_NotFromOrbax())


class _NotFromOrbax(logging.Filter):
    """Keeps orbax's remarks off the terminal. Its errors reach the user as exceptions, raised again by `wait`."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname
