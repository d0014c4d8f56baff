"""Checkpoints: saved in the background, complete or absent, checked before they are used, restored on any mesh.

    checkpoints/1000/manifest.json     what this is, of which run, and the SHA-256 of every other file
    checkpoints/1000/arrays/           the arrays, in orbax's format
    checkpoints/1000/scores.json       the evaluation at this step, which comes after the save
    checkpoints/1000/rows/             in checkpoints of touched rows (`save_delta`): those rows, see `rows_file`
    checkpoints/frozen-1000/           arrays that do not change, stored once for the checkpoints that name it
    checkpoints/saving-2000/           being written, or left behind by a process that was killed
    checkpoints/damaged-3000/          was found damaged, and an older one was restored in its place

A checkpoint appears by one rename after its last byte, digests included, is on disk; only then are older ones
removed. So at any moment, whatever is killed, the folder lists complete checkpoints only, and never fewer than before.

orbax stores the arrays; what to keep, and when a step counts as saved, is decided here. Its own manager removes old
steps before digests of the new one could be written, and the digests are needed: with a flipped bit in a data file
orbax restored other numbers without a word (in 28 of 42 trials; its metadata files are protected).

A save copies the arrays to the host before it returns, so the caller may donate them to the next step at once. What
does not change is written before the first save of a phase begins.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp

from scalejax.errors import UserError, check_at_least
from scalejax.parallel.embedding.config import UPDATED
from scalejax.parallel.embedding.stored import tracking
from scalejax.parallel.embedding.stored.tracking import TableRows
from scalejax.train import disk, distributed
from scalejax.train.checkpoints import chain, rows_file
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.array_store import ArrayStore
from scalejax.train.checkpoints.manifest import Damaged, FileRecord, HostRecord, Manifest, Shaped

Tree = TypeVar("Tree")

_SAVING = "saving-"
_REMOVING = "removing-"
_FROZEN = "frozen-"
_DAMAGED = "damaged-"
_ARRAYS = "arrays"
_TABLES = "tables"


class RetentionPolicy(Protocol):
    """Which checkpoints are kept: attributes as in `train.experiment.Checkpoints`."""

    @property
    def keep_last(self) -> int: ...

    @property
    def keep_best(self) -> int: ...

    @property
    def best_metric(self) -> str | None: ...


class Checkpointer:
    """The checkpoints of one run. Every process of the run makes one and calls the same methods in the same order.

    Making one touches no file. Only `save` writes, so another process may `restore` from a run in progress.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        policy: RetentionPolicy,
        identity: dict[str, str],
        *,
        full_every: int | None = None,
        better: Literal["low", "high"] = "low",
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """Describes the checkpoints of a run.

        Args:
          folder: Where the checkpoints are; in a run of several processes all of them must see it.
          policy: Which checkpoints to keep.
          identity: What a checkpoint must agree with to be restored: name -> short text or digest, for instance
            {"model": ..., "optimizer": ..., "data": ...}.
          full_every: Steps between full checkpoints, where the others may hold touched rows alone; see `base_updates`.
          better: Which values of the metric of the policy are better.
          frozen: Names of leaves that no step changes: they are stored once.
        Raises:
          UserError: The policy keeps fewer than one last checkpoint or a negative number of best ones.
        """
        check_at_least("checkpoints.keep_last", policy.keep_last, 1)
        check_at_least("checkpoints.keep_best", policy.keep_best, 0)
        self.folder = folder.absolute()
        self._full_every = full_every
        self._store: ArrayStore | None = None
        self._finisher: threading.Thread | None = None
        self._error: BaseException | None = None
        self._newest_saved: int | None = None
        self.complete = 0
        """The newest step that this object saved and that is on disk, as process 0 knows; 0 before the first."""
        self._base: tuple[int, int] | None = None  # step and updates of the checkpoint that the state comes from
        self._intact: int | None = None  # the step whose files have been compared with their digests
        self.become(policy, identity, better=better, frozen=frozen)

    def become(
        self,
        policy: RetentionPolicy,
        identity: dict[str, str],
        *,
        better: Literal["low", "high"] = "low",
        frozen: frozenset[str] = frozenset(),
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        """From here on the checkpoints are those of another phase, see `__init__`; the next one is a full one.

        Those of the steps `pinned` are kept whatever the policy says.
        """
        self.wait()
        self._policy = policy
        self._better: Literal["low", "high"] = better
        self._identity = dict(identity)
        self._frozen, self._frozen_at = frozen, None
        self._pinned = pinned
        self._base = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The block's own error is the news, and other processes may not come to agree: only let the save end.
        if self._finisher is not None:
            self._finisher.join()
        if self._store is not None:
            self._store.discard()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending; as process 0 sees them, on every process."""
        return distributed.on_primary(lambda: listed(self.folder))

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def back_to_intact(self) -> int:
        """The newest step whose checkpoint is intact, with all that it builds on.

        Those above it are renamed to damaged-STEP (`damaged` lists them): they are damaged, or build on one that is. So
        a run goes on, and what might yet be repaired stays.

        Raises:
          UserError: no checkpoint is intact, or one is of a newer scalejax or cannot be read; nothing is renamed.
        """
        steps, damages = self.steps(), []
        for step in reversed(steps):
            if (damage := self._damage(step)) is None:
                break
            damages.append(damage)
        else:
            raise UserError(
                f"{self.folder}: no checkpoint is intact ({', '.join(map(str, steps))}); of the newest: {damages[0]}. "
                "Bring the file back from a copy, or begin a new run in another --workdir."
            )
        above = [other for other in steps if other > step]
        distributed.on_primary(lambda: self._set_aside(above))
        self._intact = step
        return step

    def damaged(self) -> list[str]:
        """Names of the folders of checkpoints that were found damaged, see `back_to_intact`."""
        return distributed.on_primary(lambda: sorted(path.name for path in self.folder.glob(f"{_DAMAGED}*")))

    def _damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint or what it builds on; every process reads its part of the files."""

        def found() -> str | None:
            try:
                links = chain.chain_to(self.folder, step)
                check_files(self.folder, links, (jax.process_index(), jax.process_count()))
            except Damaged as damage:
                return str(damage)
            return None

        return next((damage for damage in distributed.gather(distributed.together(found)) if damage), None)

    def _set_aside(self, steps: list[int]) -> None:
        with disk.explained(f"cannot rename damaged checkpoints in {self.folder}"):
            for step in reversed(steps):  # never a base before what builds on it
                name = f"{_DAMAGED}{step}"
                times = sum(path.name == name or path.name.startswith(f"{name}-") for path in self.folder.iterdir())
                os.rename(self.folder / str(step), self.folder / (f"{name}-{times + 1}" if times else name))

    def base_updates(self, step: int) -> int | None:
        """Updates of the tables at the checkpoint that a delta at this step would be made from.

        None where a full checkpoint is due: `full_every` says so, or the newest one, with a count of updates, was
        neither saved nor restored by this object.
        """
        # `latest` lists what is complete, and the save before may still be under way.
        self.wait()
        every = self._full_every
        if every is None or self._base is None or step % every == 0:
            return None
        return self._base[1] if self._base[0] == self.latest() else None

    def save_delta(
        self,
        step: int,
        tree: object,
        rows: Iterable[TableRows],
        host: HostRecord,
        metrics: dict[str, float] | None = None,
        *,
        abstract_tree: object,
        updates: int,
    ) -> None:
        """As `save`, with only those rows of tables that were updated since the newest checkpoint.

        Restoring it needs that one too, and gives what a full checkpoint would. The rows are written before this
        returns, block by block; everything else as in `save`.

        Args:
          step: Optimizer step.
          tree: What is stored in full: the tree without tracked tables.
          rows: Of this process: `tracking.touched_rows(..., since=base_updates(step))`.
          host: JSON values.
          metrics: As in `save`.
          abstract_tree: What a restore gives, as in `restore`.
          updates: Of the tables.

        Raises:
          UserError: As `save`.
          ValueError: As `save`, or `base_updates` is None: there is nothing to build on.
        """
        since = self.base_updates(step)
        if since is None or self._base is None:
            raise ValueError(f"save_delta: at step {step} a full checkpoint is due; see base_updates.")
        whole = manifests.named_leaves(tree)
        delta = chain.Delta(self._base[0], "", since, tuple(name for name in whole if name not in self._frozen))
        described = manifests.named_leaves(abstract_tree)
        self._save(step, whole, described, host, metrics, updates=updates, delta=delta, rows=rows)

    def save(
        self,
        step: int,
        tree: object,
        host: HostRecord,
        metrics: dict[str, float] | None = None,
        *,
        updates: int | None = None,
    ) -> None:
        """Begins to save; returns when the arrays are copied and may be donated.

        Waits for the save before, if it still runs, and raises its error.

        Args:
          step: Optimizer step; must be greater than the latest saved.
          tree: Pytree of jax.Array in any sharding; what is stored is the global array.
          host: JSON values to store beside the arrays.
          metrics: The evaluation at this step, holding `policy.best_metric`, or with that first where the policy names
            none; None where there was none, or it comes later (`add_scores`): until then the checkpoint can only be
            kept as one of the last.
          updates: Of the tables, where their rows are tracked; `save_delta` can then build on this checkpoint.
        Raises:
          UserError: The disk refused this save or the one before. Earlier checkpoints are intact.
          ValueError: The step is not newer than the latest, a leaf is no jax.Array, two leaves have one name, or
            `metrics` lacks the metric of the policy.
        """
        arrays = manifests.named_leaves(tree)
        self._save(step, arrays, arrays, host, metrics, updates=updates, delta=None, rows=())

    def _save(
        self,
        step: int,
        arrays: dict[str, Any],
        described: Mapping[str, Shaped],
        host: HostRecord,
        metrics: dict[str, float] | None,
        *,
        updates: int | None,
        delta: chain.Delta | None,
        rows: Iterable[TableRows],
    ) -> None:
        self.wait()
        self._check_metrics(metrics)
        if self._newest_saved is None:
            self._prepare()
        if self._newest_saved is not None and step <= self._newest_saved:
            raise ValueError(f"save: step must be greater than the latest, {self._newest_saved}; got {step}.")
        for name, leaf in arrays.items():
            if not isinstance(leaf, jax.Array):
                raise ValueError(f"save: {name} must be a jax.Array; got {type(leaf).__name__}.")
        self._keep_frozen(step, arrays)
        arrays = {name: leaf for name, leaf in arrays.items() if name not in self._frozen}
        manifest = Manifest(
            step=step,
            identity=self._identity,
            metrics=None if metrics is None else {name: float(value) for name, value in metrics.items()},
            host=json.loads(json.dumps(host)),  # a copy, and what is no JSON raises here rather than in the background
            arrays={name: manifests.describe(leaf) for name, leaf in described.items()},
            files={},
            updates=updates,
            delta=None if delta is None else delta.to_dict(),
            frozen=None if self._frozen_at is None else self._frozen_at.to_dict(),
        )
        distributed.together(lambda: self._begin_arrays(step, step, arrays))
        if delta is not None:
            distributed.together(lambda: self._write_rows(step, rows))
        self._finisher = threading.Thread(target=self._finish, args=(manifest,), name=f"checkpoint-{step}")
        self._finisher.start()
        self._newest_saved = step
        self._base = None if updates is None else (step, updates)

    def add_scores(self, step: int, host: HostRecord, metrics: dict[str, float]) -> None:
        """Adds the evaluation at the step that was saved last, in the background, when that save is complete.

        Args:
          step: Of a checkpoint.
          host: JSON values that take the place of those that were saved.
          metrics: As in `save`.

        Raises:
          ValueError: `metrics` lacks the metric of the policy.
        """
        self._check_metrics(metrics)
        saving, host = self._finisher, json.loads(json.dumps(host))

        def finish() -> None:
            if saving is not None:
                saving.join()
            if self._error is None and distributed.is_primary():
                try:
                    manifests.write_scores(self.folder / str(step), {k: float(v) for k, v in metrics.items()}, host)
                except BaseException as error:
                    doing = f"cannot add scores to checkpoint {self.folder / str(step)}"
                    self._error = disk.explain(error, doing) or error
                else:
                    self._remove_after(step)

        # It joins the thread of the save itself, so that `wait` need know only the newest one.
        self._finisher = threading.Thread(target=finish, name=f"scores-{step}")
        self._finisher.start()

    def _check_metrics(self, metrics: dict[str, float] | None) -> None:
        if metrics is not None and (best := self._policy.best_metric) is not None and best not in metrics:
            raise ValueError(f"save: metrics must hold {best!r}; got {sorted(metrics)}.")

    def wait(self) -> None:
        """Returns when the save in progress, if any, is complete.

        Raises:
          UserError: The disk refused it. Earlier checkpoints are intact.
        """
        if self._finisher is None:
            return
        self._finisher.join()
        self._finisher = None
        # What failed in the background is raised here, where all processes come by, and not where it happened.
        error, self._error = self._error, None
        try:
            distributed.raise_together(error)
        except BaseException:
            self._newest_saved = self._base = None  # that step is not there: look again
            raise

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

    def restore(self, step: int | None, abstract_tree: Tree) -> tuple[Tree, HostRecord]:
        """Reads a checkpoint onto the mesh of `abstract_tree`, whatever mesh it was saved from.

        Rows that are tracked here and were not when it was saved count as never updated. The next checkpoint is then a
        full one (`base_updates`), which covers what was not counted.

        Args:
          step: Which; None = the newest. Never another one than asked for.
          abstract_tree: Pytree of jax.ShapeDtypeStruct with shardings.
        Returns:
          (the tree of arrays, the host values).
        Raises:
          UserError: There is no such checkpoint; it is of another model, other data or a newer scalejax; or a file
            is missing or damaged, in which case the message names the newest intact one.
        """
        return self._restore(step, abstract_tree, self._identity, "refused")

    def read(
        self, step: int | None, leaves: dict[str, jax.ShapeDtypeStruct]
    ) -> tuple[dict[str, jax.Array], HostRecord]:
        """As `restore`, of some of the arrays that a checkpoint holds, by name."""
        return self._restore(step, leaves, self._identity, "ignored")

    def shapes(self, step: int | None) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of a checkpoint, by name; step None = the newest."""
        step = self._existing(step)
        manifest = distributed.together(lambda: manifests.read(self.folder / str(step)))
        return {name: tuple(described["shape"]) for name, described in manifest.arrays.items()}

    def _restore(
        self, step: int | None, abstract_tree: object, identity: dict[str, str], others: Literal["refused", "ignored"]
    ) -> tuple[Any, HostRecord]:
        self.wait()
        step = self._existing(step)
        links = distributed.together(lambda: self._checked_chain(step, abstract_tree, identity, others))
        if step != self._intact:
            distributed.together(lambda: self._check_files(step, links))
        manifest = links[-1]
        targets = manifests.named_leaves(abstract_tree)
        fresh = _untracked_marks(manifest, targets)
        frozen = manifests.Frozen.of(manifest)
        shared = {name: leaf for name, leaf in targets.items() if frozen is not None and name in frozen.names}
        stored = {name: leaf for name, leaf in targets.items() if name not in fresh and name not in shared}
        arrays = self._arrays_store().read(self.folder / str(links[0].step) / _ARRAYS, stored)
        arrays |= {name: _zeros(leaf) for name, leaf in fresh.items()}
        if frozen is not None:
            if shared:
                arrays |= self._arrays_store().read(self.folder / frozen.folder / _ARRAYS, shared)
            self._frozen_at = frozen if set(frozen.names) == self._frozen else None
        for link in links[1:]:
            self._apply_rows(link, arrays)
        if (delta := chain.delta_of(manifest)) is not None:
            whole = {name: targets[name] for name in delta.whole if name in targets}
            arrays |= self._arrays_store().read(self.folder / str(step) / _ARRAYS, whole)
        self._base = None if manifest.updates is None else (step, manifest.updates)
        leaves = [arrays[name] for name in targets]
        return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves), manifest.host

    def _apply_rows(self, link: Manifest, arrays: dict[str, jax.Array]) -> None:
        for rows in rows_file.read(self.folder / str(link.step)):
            prefix = f"{_TABLES}.{rows.table}."
            leaves = {
                f"{name}_{part}": arrays[f"{prefix}{name}_{part}"]
                for name in rows.leaves
                for part in ("body", "tail")
                if f"{prefix}{name}_{part}" in arrays
            }
            written = tracking.write_stored(leaves, rows)
            arrays |= {f"{prefix}{name}": array for name, array in written.items()}

    def metrics(self, step: int) -> dict[str, float] | None:
        """The evaluation that was saved with a step; None where there was none."""
        try:
            return manifests.read(self.folder / str(step)).metrics
        except Damaged as damage:
            raise self._damaged(step, damage) from damage

    def _arrays_store(self) -> ArrayStore:
        if self._store is None:
            self._store = ArrayStore()
        return self._store

    def _prepare(self) -> None:
        """Before the first save: the folder exists, is seen by all, and holds no remains of a killed process."""

        def clear() -> int | None:
            with disk.explained(f"cannot save checkpoints to {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                for path in self.folder.iterdir():
                    if path.name.startswith((_SAVING, _REMOVING)):
                        shutil.rmtree(path)
            return max(listed(self.folder), default=None)

        self._newest_saved = distributed.on_primary(clear)
        distributed.together(self._check_shared)

    def _check_shared(self) -> None:
        if not self.folder.is_dir():
            raise UserError(
                f"checkpoints: {self.folder} exists for process 0 but not for process {jax.process_index()}. Choose a "
                "--workdir on a file system that all processes share."
            )

    def _keep_frozen(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Stores what does not change, unless the checkpoint that the state comes from had done so."""
        if self._frozen_at is not None or not self._frozen:
            return
        name, own = f"{_FROZEN}{step}", {name: arrays[name] for name in sorted(self._frozen)}
        described = {name: manifests.describe(leaf) for name, leaf in own.items()}
        manifest = Manifest(step=step, identity=self._identity, metrics=None, host={}, arrays=described, files={})
        distributed.together(lambda: self._begin_arrays(step, name, own))

        def finish() -> str:
            with disk.explained(self._cannot_save(step)):
                shutil.rmtree(self.folder / name, ignore_errors=True)  # of a process killed before its checkpoint
                commit(self.folder / f"{_SAVING}{name}", manifest, name)
                return manifests.stored_digest(self.folder / name)

        with self._abandoned_on_error(step, name):
            distributed.together(self._arrays_store().wait)
            digest = distributed.on_primary(finish)
        self._frozen_at = manifests.Frozen(name, digest, tuple(own))

    def _begin_arrays(self, step: int, name: int | str, arrays: dict[str, jax.Array]) -> None:
        with self._abandoned_on_error(step, name):
            self._arrays_store().write(self.folder / f"{_SAVING}{name}" / _ARRAYS, arrays)

    def _write_rows(self, step: int, rows: Iterable[TableRows]) -> None:
        with self._abandoned_on_error(step, step):
            rows_file.write(self.folder / f"{_SAVING}{step}", jax.process_index(), rows)

    @contextlib.contextmanager
    def _abandoned_on_error(self, step: int, name: int | str) -> Iterator[None]:
        """What is written under `name` for a step goes with a failure, of which the message names the step."""
        try:
            yield
        except Exception as error:
            self._abandon(name)
            explanation = disk.explain(error, self._cannot_save(step))
            if explanation is None:
                raise
            raise explanation from error

    def _finish(self, manifest: Manifest) -> None:
        """In the background: waits for the arrays; then, on process 0, makes the checkpoint appear."""
        try:
            self._arrays_store().wait()
            if distributed.is_primary():
                self._commit(manifest)
                self.complete = manifest.step
        except BaseException as error:
            self._error = disk.explain(error, self._cannot_save(manifest.step)) or error
            self._abandon(manifest.step)
        else:
            self._remove_after(manifest.step)

    def _abandon(self, step: int | str) -> None:
        """After a failure. A full disk should not stay full of a checkpoint that will never be."""
        if self._store is not None:
            self._store.discard()
            self._store = None
        if distributed.is_primary():
            _remove_for_good(self.folder / f"{_SAVING}{step}")

    def _commit(self, manifest: Manifest) -> None:
        saving = self.folder / f"{_SAVING}{manifest.step}"
        if (delta := chain.delta_of(manifest)) is not None:
            digest = self._digest_of_base(manifest.step, delta.base_step)
            manifest = dataclasses.replace(manifest, delta=dataclasses.replace(delta, base_digest=digest).to_dict())
        commit(saving, manifest)

    def _digest_of_base(self, step: int, base_step: int) -> str:
        base = self.folder / str(base_step)
        try:
            manifests.read(base)
            return manifests.stored_digest(base)
        except (UserError, OSError) as error:
            advice = "Run the same command again"
            if isinstance(error, Damaged):
                advice = f"Bring the file back from a copy, or move {base} away, and run the same command again"
            raise UserError(
                f"cannot save checkpoint {self.folder / str(step)}: it would hold only the rows updated since step "
                f"{base_step}, and that one cannot be read: {str(error).removesuffix('.')}. {advice}; it goes on from "
                "the newest checkpoint."
            ) from error

    def _remove_after(self, step: int) -> None:
        """In the background, after a step is complete: what cannot be removed is an error, and not one of the save."""
        if not distributed.is_primary():
            return
        try:
            self._remove_others()
        except BaseException as error:
            doing = f"checkpoint {self.folder / str(step)} is complete, but those before it cannot be removed"
            self._error = disk.explain(error, doing) or error

    def _remove_others(self) -> None:
        """Removes what the policy does not keep, and no manifest that was read needs.

        One that cannot be read may need any checkpoint before it, and may be the best. So while it is kept, nothing
        before it is removed; nor is it itself, unless its file is damaged and will not come back by itself.
        """
        found: dict[int, Manifest] = {}
        unread: dict[int, Exception] = {}
        for step in listed(self.folder):
            try:
                found[step] = manifests.read(self.folder / str(step))
            except (UserError, OSError) as error:
                unread[step] = error  # whoever restores it will be told
        bases = {step: delta.base_step for step, read in found.items() if (delta := chain.delta_of(read)) is not None}
        best = self._policy.best_metric or next((name for read in found.values() for name in read.metrics or ()), "")
        # Of other data or before a surgery a score says nothing of what is trained now.
        since = self._identity.get("scores_from")
        compared = {step: read.identity.get("scores_from") == since for step, read in found.items()}
        scores = {step: (read.metrics or {}).get(best) if compared[step] else None for step, read in found.items()}
        scores |= dict.fromkeys(unread)
        kept = retained(scores, self._policy, self._better) | (scores.keys() & self._pinned)
        kept |= {step for step, error in unread.items() if not isinstance(error, Damaged)}
        kept = chain.with_bases(kept, {step: bases.get(step) for step in scores})
        newest_unread = max(unread.keys() & kept, default=-1)
        doomed_steps = [step for step in scores.keys() - kept if step > newest_unread]
        for step in sorted(doomed_steps, reverse=True):  # never a base before what needs it
            doomed = self.folder / f"{_REMOVING}{step}"
            # The rename takes it off the list at once: a kill while files are removed leaves no half of one there.
            os.rename(self.folder / str(step), doomed)
            shutil.rmtree(doomed)
        # A manifest that cannot be read may name any of the folders of frozen arrays.
        if not unread:
            named = {read.frozen["folder"] for read in map(found.get, kept) if read is not None and read.frozen}
            for path in self.folder.glob(f"{_FROZEN}*"):
                if path.name not in named:
                    shutil.rmtree(path)

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

    def _checked_chain(
        self, step: int, abstract_tree: object, identity: dict[str, str], others: Literal["refused", "ignored"]
    ) -> list[Manifest]:
        try:
            links = chain.chain_to(self.folder, step)
        except Damaged as damage:
            raise self._damaged(step, damage) from damage
        manifest = links[-1]
        # A run without phases has no entry "phase", and must not go on from a checkpoint that has one.
        differences = manifests.differences(manifest.identity, {"phase": None, **identity})
        changed = any(difference.startswith("model.") for difference in differences)
        fresh = _untracked_marks(manifest, manifests.named_leaves(abstract_tree))
        here = {name: manifests.describe(leaf) for name, leaf in fresh.items()}
        held = manifest.arrays | here
        if others == "ignored":
            held = {name: held[name] for name in manifests.named_leaves(abstract_tree) if name in held}
        differences += manifests.describe_mismatch(abstract_tree, held)
        if "key" not in manifest.arrays and "key" in manifests.named_leaves(abstract_tree):
            raise UserError(
                f"checkpoint {self.folder / str(step)} holds a model and no state of training, as `write_run` leaves "
                f"it. Begin another run with it: --set init={self.folder.parent} --workdir ANOTHER."
            )
        if differences:
            shown = differences[:8] + ([f"and {len(differences) - 8} more"] if len(differences) > 8 else [])
            raise UserError(
                f"checkpoint {self.folder / str(step)} is of another model or other data: {'; '.join(shown)}. Use the "
                "recipe, the --set values and the data that the run began with (experiment.json in its folder), or "
                f"begin a new run in another --workdir"
                f"{', with init= and a surgery such as surgery.experts.Upcycle' if changed else ''}."
            )
        return links

    def _check_files(self, step: int, links: list[Manifest]) -> None:
        try:
            check_files(self.folder, links, (jax.process_index(), jax.process_count()))
        except Damaged as damage:
            raise self._damaged(step, damage) from damage

    def _damaged(self, step: int, damage: Damaged) -> UserError:
        steps = listed(self.folder)
        for earlier in reversed([other for other in steps if other < step]):
            try:
                check_files(self.folder, chain.chain_to(self.folder, earlier))
            except UserError:
                continue
            # All of them: those in between are damaged too, or need what is.
            above = [str(self.folder / str(other)) for other in steps if other > earlier]
            folders = ("the folder " if len(above) == 1 else "the folders ") + ", ".join(above)
            advice = (
                f"The newest intact checkpoint before it is step {earlier}. To go on from there, move {folders} away "
                "and run the same command again"
            )
            break
        else:
            advice = "No earlier checkpoint is intact. Bring the file back from a copy, or begin a new run"
        return UserError(f"checkpoint of step {step}: {damage}. {advice}.")

    def _cannot_save(self, step: int | str) -> str:
        return f"cannot save checkpoint {self.folder / str(step)} (earlier checkpoints are intact)"


def commit(saving: pathlib.Path, manifest: Manifest, name: str | None = None) -> None:
    """Makes a checkpoint appear under its step when its last byte, digests included, is on disk.

    Args:
      saving: Folder that holds all but its manifest, beside the other checkpoints.
      manifest: What it is; the digests of its files are filled in.
      name: Of the folder that appears; None = the step.
    """
    manifests.write(saving, dataclasses.replace(manifest, files=manifests.digests(saving)))
    # Files were synced as they were digested, and `saving` with its manifest; the names in its folders were not.
    for folder in saving.rglob("*"):
        if folder.is_dir():
            disk.sync(folder)
    os.rename(saving, saving.with_name(name or str(manifest.step)))
    disk.sync(saving.parent)


def check_files(folder: pathlib.Path, checkpoints: Iterable[Manifest], part: tuple[int, int] = (0, 1)) -> None:
    """Compares the files of checkpoints, those of their frozen arrays among them, with their digests.

    Args:
      folder: Of all checkpoints.
      checkpoints: Their manifests.
      part: (i, n): of every n files only the i-th, so that n processes together read all.

    Raises:
      Damaged: One is missing, cut short or altered.
    """
    folders: dict[pathlib.Path, dict[str, FileRecord]] = {}
    for manifest in checkpoints:
        folders[folder / str(manifest.step)] = manifest.files
        if (frozen := manifests.Frozen.of(manifest)) is not None and folder / frozen.folder not in folders:
            folders[folder / frozen.folder] = frozen.read(folder).files
    for path, files in folders.items():
        manifests.check_files(path, {name: files[name] for name in sorted(files)[part[0] :: part[1]]})


def _untracked_marks(manifest: Manifest, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the leaves to restore, the numbers of updates of rows that were not tracked when a checkpoint was saved."""
    if manifest.updates is not None:
        return {}
    ends = tuple(f".{UPDATED}_{part}" for part in ("body", "tail"))
    return {
        name: leaf
        for name, leaf in targets.items()
        if name.startswith(f"{_TABLES}.") and name.endswith(ends) and name not in manifest.arrays
    }


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def retained(
    scores: dict[int, float | None], policy: RetentionPolicy, better: Literal["low", "high"] = "low"
) -> set[int]:
    """The steps to keep: the last ones and the best ones.

    Args:
      scores: Step -> value of `policy.best_metric`, None where it was not evaluated. NaN is never among the best;
        of equal values the earlier step is better.
      policy: How many of each.
    """
    last = sorted(scores)[-policy.keep_last :]
    sign = -1.0 if better == "high" else 1.0
    scored = [(sign * score, step) for step, score in scores.items() if score is not None and not math.isnan(score)]
    return set(last) | {step for _, step in sorted(scored)[: policy.keep_best]}


def _remove_for_good(folder: pathlib.Path, tries: int = 25, pause_s: float = 0.1) -> None:
    """Removes a folder that failed writes may still be filling from their threads, until it stays away.

    If it does not within a few seconds, the next run in this folder removes it before it saves.
    """
    absent = 0
    for _ in range(tries):
        shutil.rmtree(folder, ignore_errors=True)
        absent = 0 if folder.exists() else absent + 1
        if absent == 3:
            return
        time.sleep(pause_s)


def listed(folder: pathlib.Path) -> list[int]:
    """Steps with a complete checkpoint in a folder, ascending; none if there is no such folder."""
    try:
        with disk.explained(f"cannot list checkpoints in {folder}"):
            names = [path.name for path in folder.iterdir()]
            return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))
    except FileNotFoundError:
        return []
