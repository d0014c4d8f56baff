"""The manifest of a log that is clustered by session: it lies beside the files and is written last.

Every Parquet file of such a log names the rewrite it belongs to in its footer (`KEY`). A file that does is only read
where the manifest of the same rewrite stands beside it and all files of it are there with their sizes. So neither what
an interrupted rewrite left nor half a copy is ever taken for the log.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping

from scalejax import json_reading
from scalejax.errors import UserError

KEY = b"scalejax.clustered"
"""Key of the footer metadata that holds the identity of the rewrite."""

FILE = "clustered.json"

_FORMAT = 1
_AGAIN = "Copy the whole folder again, or run the rewrite again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """One file of a clustered log.

    Attributes:
      name: Inside the folder.
      rows: Rows.
      sessions: Sessions, none of which is in another file.
      bytes: Size.
      sha256: Hex digest.
    """

    name: str
    rows: int
    sessions: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredManifest:
    """What a rewrite by session made, and of what.

    Attributes:
      identity: Hex digest of the source's footers and the settings; the footer of every file has it.
      session: Column of the session.
      time: Column that orders the rows of a session.
      seed: Of the order of sessions.
      compression: Codec.
      source_bytes: Size of the source's files.
      source_codecs: Codecs of the source.
      groups: List columns whose repeats are left out, by groups: where the lists of a whole group are those of the row
        before, they are null. The first row of a row group has them all.
      files: In the order of their names.
    """

    identity: str
    session: str
    time: str
    seed: int
    compression: str
    source_bytes: int
    source_codecs: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    files: tuple[File, ...]

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(file.rows for file in self.files)

    @property
    def sessions(self) -> int:
        """Sessions of all files."""
        return sum(file.sessions for file in self.files)

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def saving(self) -> float | None:
        """Bytes of the source per byte of the result; None where their codecs differ, which would compare codecs."""
        return self.source_bytes / self.bytes if self.source_codecs == (self.compression,) else None

    def to_json(self) -> str:
        """The text of the manifest file, with a digest of its content."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        return json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n"


def read_manifest(folder: str | pathlib.Path) -> ClusteredManifest:
    """The manifest of a clustered log.

    Raises:
      UserError: it is missing, damaged, or of another version.
    """
    path = pathlib.Path(folder) / FILE
    try:
        record = json_reading.read(path)
        content = record["content"]
        intact = record["sha256"] == _digest(content)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: there is no {FILE}, so this is not a complete log clustered by session: an interrupted "
            f"rewrite, or part of a copy. {_AGAIN} (To keep rows of such a log apart from it, write them without the "
            f"metadata key {KEY.decode()!r}.)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged (not the JSON that was written). Run the rewrite again.") from error
    if not intact:
        raise UserError(f"{path}: is damaged (its digest differs). Run the rewrite again.")
    if content.pop("format") != _FORMAT:
        raise UserError(f"{path}: has another format than {_FORMAT}, which this version reads. Run the rewrite again.")
    files = tuple(File(**file) for file in content.pop("files"))
    groups = tuple(tuple(group) for group in content.pop("groups"))
    return ClusteredManifest(
        **{**content, "source_codecs": tuple(content["source_codecs"])}, groups=groups, files=files
    )


def check_complete(path: pathlib.Path, rewritten: Mapping[pathlib.Path, bytes | None]) -> ClusteredManifest | None:
    """Refuses files of a clustered log that is not complete; files of other origin pass.

    Returns the manifest of a clustered log, None for other files.

    Args:
      path: What the user named: a file, or a folder.
      rewritten: File -> what its footer has under `KEY`.
    Raises:
      UserError: naming the file and what is wrong.
    """
    folder = path if path.is_dir() else path.parent
    marked = [file for file, identity in rewritten.items() if identity is not None]
    if not marked and not (path.is_dir() and (folder / FILE).exists()):
        return None
    manifest = read_manifest(folder)
    listed = {folder / file.name: file for file in manifest.files}
    for file, identity in rewritten.items():
        if identity is None or identity.decode() != manifest.identity or file not in listed:
            raise UserError(
                f"{file}: is not a file of the clustered log whose {FILE} stands beside it. Keep one log in a folder."
            )
    for file, entry in listed.items():
        if path.is_dir() and file not in rewritten:
            raise UserError(f"{file}: is missing from a clustered log. {_AGAIN}")
        if file in rewritten and (size := file.stat().st_size) != entry.bytes:
            raise UserError(f"{file}: has {size} bytes instead of {entry.bytes}. {_AGAIN}")
    return manifest


def verify(folder: str | pathlib.Path) -> ClusteredManifest:
    """Reads every file of a clustered log and compares its digest; returns the manifest.

    Raises:
      UserError: naming the first file that is missing or not as it was written.
    """
    manifest = read_manifest(folder)
    for entry in manifest.files:
        file = pathlib.Path(folder) / entry.name
        if not file.exists():
            raise UserError(f"{file}: is missing from a clustered log. {_AGAIN}")
        if sha256(file) != entry.sha256:
            raise UserError(f"{file}: is damaged (its digest differs). {_AGAIN}")
    return manifest


def sha256(file: pathlib.Path) -> str:
    """Hex digest of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
