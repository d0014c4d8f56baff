"""The manifest of a checkpoint: its run, its arrays, and the digest of each of its files."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

import jax
from numpy.typing import ArrayLike

from scalejax import json_reading
from scalejax.errors import UserError
from scalejax.train import disk

FORMAT_VERSION = 3
"""Raised when a reader of today could not read the checkpoints of tomorrow.

1: full ones; 2: of touched rows; 3: with frozen arrays, which are stored once for several checkpoints.
"""

_FULL_VERSION, _DELTA_VERSION = 1, 2

FILE = "manifest.json"
SCORES = "scores.json"
"""Evaluations come after a save, and a manifest does not change: checkpoints that build on it name its digest."""


class ArrayRecord(TypedDict):
    """Shape and dtype of an array; the dtype of a typed PRNG key names its implementation."""

    shape: list[int]
    dtype: str


class FileRecord(TypedDict):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class DeltaRecord(TypedDict):
    """`chain.Delta`."""

    base_step: int
    base_digest: str
    since: int
    whole: list[str]


class FrozenRecord(TypedDict):
    """`Frozen`."""

    folder: str
    digest: str
    names: list[str]


class BestRecord(TypedDict):
    """`run_state.Best`."""

    step: int
    value: float
    final: float | None


class HostRecord(TypedDict, total=False):
    """`run_state.HostState`; of a model alone only `examples`."""

    examples: int
    data_from: int
    weight: float
    flops: float
    lifetime: dict[str, list[ArrayLike]]
    progressive: dict[str, list[ArrayLike]]
    best: BestRecord


class Shaped(Protocol):
    """An array, or what is known of one before it is there."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> object: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` holds, besides the version of the format and its own digest."""

    step: int
    identity: dict[str, str]
    metrics: dict[str, float] | None
    host: HostRecord
    arrays: dict[str, ArrayRecord]
    files: dict[str, FileRecord]
    updates: int | None = None
    """Count of the updates of the tables, where rows know which update last touched them."""
    delta: DeltaRecord | None = None
    """See `chain.Delta`; None for a full checkpoint, which needs no other."""
    frozen: FrozenRecord | None = None
    """{"folder", "digest", "names"}: where the arrays are that do not change, beside the checkpoint; see `Frozen`."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Arrays that several checkpoints share, as they do not change: parameters that are not trained.

    Attributes:
      folder: Name of their folder, which has a manifest of its own, beside those of the checkpoints.
      digest: Of that manifest.
      names: Of the arrays.
    """

    folder: str
    digest: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> "Frozen | None":
        """What a checkpoint says of its frozen arrays; None = it has none."""
        said = manifest.frozen
        return None if said is None else cls(said["folder"], said["digest"], tuple(said["names"]))

    def to_dict(self) -> FrozenRecord:
        """As JSON values."""
        return {"folder": self.folder, "digest": self.digest, "names": list(self.names)}

    def read(self, checkpoints: pathlib.Path) -> Manifest:
        """The manifest of the folder.

        Args:
          checkpoints: Folder of all checkpoints.

        Raises:
          Damaged: it is missing, or not the one that was meant.
        """
        path = checkpoints / self.folder
        if not path.is_dir():
            raise Damaged(f"folder {path}, which holds the frozen parameters, is missing")
        found = read(path)
        if stored_digest(path) != self.digest:
            raise Damaged(f"folder {path} does not hold the frozen parameters that it held")
        return found


class Damaged(UserError):
    """A file of a checkpoint is missing or is not as it was written."""


def write(folder: pathlib.Path, manifest: Manifest) -> None:
    """Writes `manifest.json` atomically, with a digest of itself."""
    # The lowest that describes what is written, so that earlier versions of scalejax read all that they can.
    version = FORMAT_VERSION if manifest.frozen else _FULL_VERSION if manifest.delta is None else _DELTA_VERSION
    content = {"format_version": version, **dataclasses.asdict(manifest)}
    disk.write_atomically(
        folder / FILE, json.dumps({"sha256": _content_digest(content), "content": content}, indent=1) + "\n"
    )


def read(folder: pathlib.Path) -> Manifest:
    """Reads and checks `manifest.json`.

    Raises:
      Damaged: It is missing, cut short or altered.
      UserError: A newer scalejax wrote it, or the disk refuses.
    """
    content = _content(folder / FILE)
    # The digest is right, so this is a statement and not an accident.
    if content["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"checkpoint {folder} has format {content['format_version']} and this scalejax reads up to "
            f"{FORMAT_VERSION}: it was written by a newer version. Upgrade with `pip install -U scalejax`."
        )
    known = [field.name for field in dataclasses.fields(Manifest)]
    manifest = Manifest(**{name: content[name] for name in known if name in content})
    if folder.name.isdecimal() and folder.name != str(manifest.step):
        raise Damaged(f"folder {folder} holds the checkpoint of step {manifest.step}")
    if (folder / SCORES).exists():
        scores = _content(folder / SCORES)
        manifest = dataclasses.replace(manifest, metrics=scores["metrics"], host=scores["host"])
    return manifest


def write_scores(folder: pathlib.Path, metrics: dict[str, float], host: HostRecord) -> None:
    """Adds an evaluation to a checkpoint, and what the host knows since then, which `read` then gives.

    Args:
      folder: Of the complete checkpoint.
      metrics: Name -> value.
      host: JSON values.
    """
    content = {"metrics": metrics, "host": host}
    record = {"sha256": _content_digest(content), "content": content}
    disk.write_atomically(folder / SCORES, json.dumps(record, indent=1) + "\n")


def _content(path: pathlib.Path) -> dict[str, Any]:
    """What a file with a digest of itself holds."""
    try:
        with disk.explained(f"cannot read {path}"):
            record = json_reading.read(path)
        content = record["content"]
        intact = record["sha256"] == _content_digest(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"file {path} is missing") from error
    except UserError:
        # It is a ValueError as well, and says that the disk refused, not that the file is damaged.
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"file {path} is damaged") from error
    if not intact:
        raise Damaged(f"file {path} is damaged")
    return content


def stored_digest(folder: pathlib.Path) -> str:
    """The digest that `manifest.json` has of itself, by which other checkpoints name this one. `read` checks it."""
    path = folder / FILE
    try:
        with disk.explained(f"cannot read {path}"):
            return json_reading.read(path)["sha256"]
    except FileNotFoundError as error:
        raise Damaged(f"file {path} is missing") from error


def _content_digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_files(folder: pathlib.Path, files: dict[str, FileRecord]) -> None:
    """Compares files with the digests they were written with.

    Raises:
      Damaged: One is missing, cut short or altered.
    """
    # Threads are enough: hashing lets go of the interpreter's lock.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda item: _check_file(folder / item[0], item[1]), sorted(files.items())):
            pass


def _check_file(path: pathlib.Path, expected: FileRecord) -> None:
    try:
        actual = digest(path)
    except FileNotFoundError as error:
        raise Damaged(f"file {path} is missing") from error
    if actual["bytes"] != expected["bytes"]:
        raise Damaged(f"file {path} is damaged ({actual['bytes']} bytes, written with {expected['bytes']})")
    if actual != expected:
        raise Damaged(f"file {path} is damaged (its SHA-256 is not the one it was written with)")


def digest(path: pathlib.Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    with disk.explained(f"cannot read {path}"), open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def digests(folder: pathlib.Path) -> dict[str, FileRecord]:
    """Makes every file below a folder durable and digests it: path relative to the folder -> size and SHA-256."""

    def sync_and_digest(name: str) -> FileRecord:
        disk.sync(folder / name)
        return digest(folder / name)

    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(sync_and_digest, names), strict=True))


def describe_mismatch(abstract_tree: object, stored: dict[str, ArrayRecord]) -> list[str]:
    """Says how a tree differs from what a checkpoint holds; empty if it does not.

    Args:
      abstract_tree: Pytree of arrays or jax.ShapeDtypeStruct.
      stored: Name of a leaf -> {"shape": [...], "dtype": ...}, as in a manifest.
    """
    wanted = {name: describe(leaf) for name, leaf in named_leaves(abstract_tree).items()}
    differences = [
        f"{name} is {_short(stored[name])} in the checkpoint and {_short(wanted[name])} here"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    differences += [f"{name} {_short(wanted[name])} is not in the checkpoint" for name in wanted if name not in stored]
    differences += [f"{name} {_short(stored[name])} is only in the checkpoint" for name in stored if name not in wanted]
    return differences


def named_leaves(tree: object) -> dict[str, Any]:
    """Path of a leaf, joined by dots -> the leaf, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("checkpoint: two leaves of the tree have the same name; dots in keys can do that.")
    return named


def describe(leaf: Shaped) -> ArrayRecord:
    """Shape and dtype as JSON values; the dtype of a typed PRNG key names its implementation."""
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _short(description: ArrayRecord) -> str:
    return f"{description['dtype']}[{','.join(map(str, description['shape']))}]"


def differences(there: Mapping[str, str], here: Mapping[str, str | None]) -> list[str]:
    """What a checkpoint and a run do not share of what the run names, in words.

    Settings of the model, "model.NAME", that the checkpoint does not name are not compared: earlier ones name none.
    """
    return [
        f"{name} is {excerpt(there.get(name), wanted)} in the checkpoint and {excerpt(wanted, there.get(name))} here"
        for name, wanted in sorted(here.items())
        if there.get(name) != wanted and (name in there or not name.startswith("model."))
    ]


def excerpt(text: str | None, other: str | None) -> str:
    """A text short enough for a message, around the place where it begins to differ from the other."""
    if text is None:
        return "absent"
    if len(text) <= 60:
        return repr(text)
    same = next((at for at, (a, b) in enumerate(zip(text, other or "", strict=False)) if a != b), len(other or ""))
    begin = max(0, same - 20)
    return repr(("..." if begin else "") + text[begin : begin + 60] + ("..." if begin + 60 < len(text) else ""))
