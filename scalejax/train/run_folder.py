"""A run folder: one writer, files that survive a kill, and where a run goes on.

    experiment.json     what is run, as data                      metrics.jsonl   deterministic values, by step
    environment.json    versions, devices, flags, commit          timing.jsonl    seconds, by step
    summary.json        the closing table as one object           report.html     all of it to look at
    checkpoints/        see `checkpoint`                          tensorboard/    events
    measures.json       what is measured: titles, units       evaluation/     what was scored, and pictures of it
    run.lock            held by the process that writes       codebook.npz    and what else its data want kept

Which folder: `--workdir DIR` names it, and a run found there goes on by default (`--resume auto`). Without it every
start gets a new folder, runs/NAME-001, runs/NAME-002, ..., so that running a recipe twice never mixes two runs.

The order that makes a killed run go on to the same bits: write the window of step k, save checkpoint k, then write the
evaluation of step k and add it to the checkpoint. Whatever checkpoint survives, the windows up to its step are in the
file, and `begin` removes what comes after it.
"""

import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
import time
import types
from collections.abc import Mapping
from typing import Any, Literal

import jax

import scalejax
from scalejax import json_reading
from scalejax.errors import UserError
from scalejax.train import disk, distributed

Resume = Literal["auto", "never", "must", "stretch"]

MEASURES = "measures.json"

_LOCK_PATIENCE_S = 2.0
"""The kernel frees the lock of a killed process when its memory is gone, which takes a moment."""


def choose(workdir: pathlib.Path | None, recipe: str, resume: Resume, root: pathlib.Path | None = None) -> pathlib.Path:
    """The folder of a run; the same on every process.

    Args:
      workdir: The user's choice; None = a new numbered folder.
      recipe: Names the new folder; of `path.py:function` the letters and digits.
      resume: "must" needs a workdir: a new folder holds nothing to go on from.
      root: Where new folders are made; None = runs/ in the current folder.
    Raises:
      UserError: "must" without a workdir, or no folder can be made.
    """
    if workdir is not None:
        return workdir.absolute()
    root = pathlib.Path("runs") if root is None else root
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", recipe.replace(".py:", "-")).strip("-.") or "run"
    return pathlib.Path(distributed.on_primary(lambda: str(_new_folder(root, name, resume))))


class RunFolder:
    """The files of one run, held by one writer. On other processes than 0 nothing is locked and nothing written.

    Use it as a context manager, in this order: make it (locks), `resume_step`, restore, `begin`, `write_summary`. The
    lines in between are for `events.EventWriter`, the report for `report.write_report`.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Makes the folder if need be and locks it.

        Raises:
          UserError: Another process writes to it; it cannot be written; a file stands in its place; no space is left.
        """
        self.path = path.absolute()
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        distributed.together(self._make_and_lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def resume_step(self, resume: Resume, latest: int | None, *, steps: int) -> int | None:
        """The step to restore; None = begin.

        Args:
          resume: "auto" goes on from the newest intact checkpoint or begins; "never" begins, and only in a folder
            without a run; "must" goes on from the newest one, which must be there and intact; "stretch" is "auto", and
            other steps than before stretch the schedules.
          latest: The newest checkpoint in the folder; None if there is none.
          steps: How many the run is to have.
        Raises:
          UserError: The folder and the wish do not fit.
        """

        def decide() -> int | None:
            recorded = self.path / "experiment.json"
            if recorded.exists() and is_earlier(disk.read_json(recorded)):
                raise UserError(
                    f"{self.path} holds a run of an earlier scalejax, whose experiments had other fields: it can be "
                    "read (eval, generate, convert, export), but not trained further. Train in another --workdir."
                )
            if resume == "must" and latest is None:
                raise UserError(
                    f"--resume must: {self.path} holds no checkpoint to go on from. Give the folder of a run that has "
                    "saved one, or use --resume auto to begin here."
                )
            if resume == "never" and (latest is not None or (self.path / "experiment.json").exists()):
                state = "no checkpoint yet" if latest is None else f"its newest checkpoint is step {latest}"
                raise UserError(
                    f"--resume never: {self.path} already holds a run ({state}). Choose another --workdir, or use "
                    "--resume auto to go on with it."
                )
            if latest is not None and latest > steps:
                raise UserError(
                    f"steps={steps}: {self.path} has already been trained for {latest} steps. Give more steps to go "
                    "on, or another --workdir to begin again."
                )
            return latest

        return distributed.on_primary(decide)

    def begin(self, experiment: Mapping[str, object], environment: Mapping[str, object], step: int | None) -> list[str]:
        """Records what is run and cuts metrics and timing back to the restored step.

        Call it after the restore has succeeded: what it removes cannot be written again by a run that fails to start.

        Args:
          experiment: The resolved experiment as JSON values.
          environment: `environment_record(...)`.
          step: The restored step; None when the run begins.
        Returns:
          What differs from the experiment before, one line each ("steps: 1000 -> 2000"); the old record is kept as
          experiment-until-STEP.json.
        Raises:
          UserError: A run of another experiment stands here without a checkpoint; metrics are damaged; the disk
            refuses.
        """

        def record() -> list[str]:
            changes = self._record_experiment(experiment, step)
            disk.write_json(self.path / "environment.json", environment)
            for name in ("metrics.jsonl", "timing.jsonl"):
                cut_back(self.path / name, -1 if step is None else step)
            # A summary speaks of the end of a run, and this one has just begun again.
            with disk.explained(f"cannot write to run folder {self.path}"):
                (self.path / "summary.json").unlink(missing_ok=True)
            return changes

        return distributed.on_primary(record)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Writes summary.json, one object.

        Raises:
          UserError: The disk refuses.
        """
        if self._lock is not None:
            disk.write_json(self.path / "summary.json", summary)

    def write_measures(self, described: Mapping[str, object]) -> None:
        """Writes measures.json: names, titles, units and directions of what the run measures, and advice of its task.

        Raises:
          UserError: The disk refuses.
        """
        if self._lock is not None:
            disk.write_json(self.path / MEASURES, described)

    def _make_and_lock(self) -> None:
        if distributed.is_primary():
            with disk.explained(f"cannot write to run folder {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(self.path / "run.lock")

    def _record_experiment(self, experiment: Mapping[str, object], step: int | None) -> list[str]:
        path = self.path / "experiment.json"
        if not path.exists():
            disk.write_json(path, experiment)
            return []
        before = disk.read_json(path)
        changes = differences(before, disk.finite(experiment))
        if not changes:
            return []
        if step is None:
            shown = "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
            raise UserError(
                f"{self.path} holds another experiment that has saved no checkpoint yet ({shown}). Choose another "
                "--workdir, or remove that folder."
            )
        disk.write_json(self.path / f"experiment-until-{step}.json", before)
        disk.write_json(path, experiment)
        return changes


def is_earlier(record: object) -> bool:
    """Whether an experiment.json is of before there was one kind of experiment, see `configs.earlier`."""
    experiment = record.get("experiment") if isinstance(record, dict) else None
    fields = experiment.get("fields") if isinstance(experiment, dict) else None
    return isinstance(fields, dict) and "mesh" in fields


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; none if it does not exist. A last line that a kill cut short is left out.

    Raises:
      UserError: A line before the last is damaged.
    """
    return [record for record, _ in _complete_lines(path)]


def cut_back(path: pathlib.Path, step: int) -> None:
    """Removes the lines after a step, and a last line that a kill cut short, without touching the bytes of the rest.

    Raises:
      UserError: A line before the last is damaged, or the disk refuses.
    """
    if not path.exists():
        return
    kept = b"".join(line for record, line in _complete_lines(path) if record["step"] <= step)
    if kept != path.read_bytes():
        disk.write_atomically(path, kept)


def differences(before: object, after: object, path: str = "") -> list[str]:
    """What differs between two JSON values, one line each: "steps: 1000 -> 2000"."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for key in [*before, *(key for key in after if key not in before)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in after:
                lines.append(f"{where}: {json.dumps(before[key])} -> absent")
            elif key not in before:
                lines.append(f"{where}: absent -> {json.dumps(after[key])}")
            else:
                lines += differences(before[key], after[key], where)
        return lines
    if path.rpartition(".")[2] == "type" and is_one_class(before, after):
        return []
    # Through JSON, so that a tuple equals the list it is stored as.
    old, new = json.dumps(before), json.dumps(after)
    return [] if old == new else [f"{path}: {old} -> {new}"]


def is_one_class(before: object, after: object) -> bool:
    """Whether two recorded types are one class: modules of scalejax move between versions, names of classes stay."""
    names = str(before), str(after)
    own = all(name.startswith("scalejax.") for name in names)
    return names[0] == names[1] or (own and names[0].rpartition(".")[2] == names[1].rpartition(".")[2])


def environment_record(mesh: dict[str, int], compiler_options: Mapping[str, object] | None = None) -> dict[str, Any]:
    """What a result may depend on besides the experiment: versions, devices, flags, commit. No host names.

    Args:
      mesh: Axis -> size.
      compiler_options: Those of XLA that the run itself sets.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "libtpu")
    devices = jax.devices()
    return {
        "scalejax": scalejax.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "processes": jax.process_count(),
        "mesh": mesh,
        "flags": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") or name.startswith(("JAX_", "NCCL_"))
        },
        "compiler_options": compiler_options or {},
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _new_folder(root: pathlib.Path, name: str, resume: Resume) -> pathlib.Path:
    with disk.explained(f"cannot make a run folder in {root.absolute()}"):
        root.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(rf"{re.escape(name)}-(\d+)")
        numbers = [int(match[1]) for path in root.iterdir() if (match := pattern.fullmatch(path.name))]
        newest = max(numbers, default=0)
        if resume == "must":
            advice = f"for instance --workdir {root / f'{name}-{newest:03d}'}" if newest else "none was begun here"
            raise UserError(f"--resume must: give the folder of the run to go on with by --workdir ({advice}).")
        while True:
            newest += 1
            path = root.absolute() / f"{name}-{newest:03d}"
            try:
                path.mkdir()
            except FileExistsError:
                continue  # another start took this number in the meantime
            return path


def _lock(path: pathlib.Path) -> int:
    """Locks a file for as long as this process lives, however it ends; returns the open descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(_held_message(path)) from error
                time.sleep(0.05)
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise UserError(
                        f"{path} cannot be locked: its file system has no locks ({os.strerror(error.errno)}). Choose "
                        "a --workdir on another file system."
                    ) from error
                raise
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": started}) + "\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _held_message(path: pathlib.Path) -> str:
    try:
        holder = json_reading.read(path)
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, OSError):
        who = "another process"
    return f"run folder {path.parent} is being written by {who}. Wait for it or end it, or choose another --workdir."


def _complete_lines(path: pathlib.Path) -> list[tuple[dict[str, Any], bytes]]:
    try:
        with disk.explained(f"cannot read {path}"):
            data = path.read_bytes()
    except FileNotFoundError:
        return []
    complete, _, _ = data.rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            record = json_reading.parse(line)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: line {number} is damaged. Bring the file back from a copy, or remove that line."
            ) from error
        records.append((record, line + b"\n"))
    return records


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that runs, "+" if files differ from it; None for an installed package."""
    root = pathlib.Path(scalejax.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or a checkout of another user
