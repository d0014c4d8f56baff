"""Files that a crash leaves either old or new, and disk errors said in the user's terms."""

import contextlib
import errno
import io
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from scalejax import json_reading
from scalejax.errors import UserError

_ADVICE = {
    errno.ENOSPC: ("the disk is full", "Free some space there, or choose a --workdir on another disk"),
    errno.EDQUOT: ("the disk quota is used up", "Free some space there, or choose a --workdir on another disk"),
    errno.EFBIG: (
        "the file is larger than this process may write",
        "Raise the limit (ulimit -f), or choose another disk",
    ),
    errno.EROFS: ("the file system is read-only", "Choose a --workdir that can be written"),
    errno.EACCES: ("no permission", "Choose a --workdir that can be written, or change its owner"),
    errno.EPERM: ("not permitted", "Choose a --workdir that can be written, or change its owner"),
    errno.ENOTDIR: ("part of the path is a file, not a folder", "Choose another --workdir, or move that file away"),
    errno.EEXIST: ("a file stands where a folder is needed", "Choose another --workdir, or move that file away"),
    errno.EIO: ("the disk reported an input/output error", "Check the disk; earlier checkpoints may still be readable"),
    errno.ENAMETOOLONG: ("the path is too long", "Choose a shorter --workdir"),
}


def explain(error: BaseException, doing: str) -> UserError | None:
    """The message for an error that a disk caused; None if no disk did.

    Args:
      error: What was raised. Libraries that write from C++ keep only the text of the system's error, so the texts of
        the whole chain of causes are searched as well as `errno`.
      doing: What failed, for instance "cannot save checkpoint /data/run/checkpoints/100".
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            number = link.errno
        else:
            number = next((known for known in _ADVICE if os.strerror(known) in str(link)), None)
        if number in _ADVICE:
            what, advice = _ADVICE[number]
            return UserError(f"{doing}: {what} ({os.strerror(number)}). {advice}.")
        # Not __context__: what was being handled when this arose may have nothing to do with it.
        link = link.__cause__ if link.__cause__ is not link else None
    return None


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns disk errors of the block into `UserError`s that begin with `doing`."""
    try:
        yield
    except OSError as error:
        explanation = explain(error, doing)
        if explanation is None:
            raise
        raise explanation from error


def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file under another name, syncs it and renames it, so that no reader ever sees half of it.

    Raises:
      UserError: The folder is not there, or the disk is full, read-only or otherwise refuses; the old file, if any, is
        untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = content.encode() if isinstance(content, str) else content
    with explained(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                raise UserError(f"cannot write {path}: its folder does not exist. Make it, or name another.") from error
            raise
        sync(path.parent)


def check_new(target: pathlib.Path) -> None:
    """Raises UserError where `appearing` could not make a folder, since it or a file is there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already. Name a folder that is not, or an empty one.")


@contextlib.contextmanager
def appearing(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write into, which becomes `target` when the block ends well and is gone when it does not."""
    check_new(target)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}). Choose a folder that can.") from error
    try:
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{target}: cannot be written ({error.strerror}). Choose another folder or disk.") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def append(file: io.FileIO, data: bytes, path: pathlib.Path) -> None:
    """Hands all bytes to the operating system at once.

    Args:
      file: Unbuffered.
      data: What to write.
      path: Of the file, for messages.
    Raises:
      UserError: The disk refuses.
    """
    with explained(f"cannot write {path}"):
        written = file.write(data)
        if written < len(data):  # only a full disk takes less than asked; the next call says so
            file.write(data[written:])


def sync(path: pathlib.Path) -> None:
    """Makes the bytes of a file, or the names in a folder, durable. Neither does the other."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(value: object) -> object:
    """A copy in which NaN and infinities are None: JSON has no word for them, and many readers refuse Python's."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes JSON, indented, atomically; numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """Reads JSON.

    Raises:
      UserError: The file is missing or is not JSON.
    """
    try:
        with explained(f"cannot read {path}"):
            return json_reading.read(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist. Give the folder of a run.") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged: not JSON ({error}). Restore it from a copy, or move it away.") from error
