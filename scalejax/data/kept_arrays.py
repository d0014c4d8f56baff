"""Arrays that are made once, kept in a private folder and mapped from there.

A folder holds one file an array, plain numbers one after another, and `about`, a JSON object with their types, sizes
and checksums, and its own. It is written beside its place and renamed, so what has its name is whole. Nothing is
pickled.
"""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from scalejax import json_reading
from scalejax.errors import UserError

Verify = Literal["checksums", "sizes"]

_MAKING = ".making-"
_VERIFIED_AT_ONCE = 1 << 24


class ArrayWriter:
    """Writes the arrays of a folder piece by piece.

    Args:
      path: An empty folder.
      dtypes: Name -> type of each array.
    """

    def __init__(self, path: pathlib.Path, dtypes: Mapping[str, DTypeLike]) -> None:
        self._path = path
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self._sums = {name: hashlib.sha256() for name in dtypes}
        self.sizes = dict.fromkeys(dtypes, 0)

    def append(self, name: str, values: ArrayLike) -> None:
        """Adds values to the end of an array."""
        array = np.asarray(values, self._dtypes[name])
        data = array.tobytes()
        with open(self._path / name, "ab") as file:
            file.write(data)
        self._sums[name].update(data)
        self.sizes[name] += array.size

    def finish(self, **more: object) -> None:
        """Brings everything to disk and writes `about`, with `more` in it."""
        for name in self._dtypes:
            with open(self._path / name, "ab") as file:
                os.fsync(file.fileno())
        arrays = {
            name: {"dtype": dtype.name, "size": self.sizes[name], "sha256": self._sums[name].hexdigest()}
            for name, dtype in self._dtypes.items()
        }
        about = {"arrays": arrays} | more
        with open(self._path / "about", "w") as file:
            file.write(json.dumps(about | {"sha256": _digest(about)}, indent=1))
            file.flush()
            os.fsync(file.fileno())


def open_arrays(path: pathlib.Path, verify: Verify) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a folder, mapped read-only, and what `about` says.

    Args:
      path: The folder.
      verify: "checksums" = read everything once and compare; "sizes" = look at the sizes of files alone.
    Raises:
      UserError: it does not hold what was written.
    """
    try:
        about = json_reading.read(path / "about")
        if about.pop("sha256", None) not in (_digest(about), None):  # earlier versions wrote none
            raise ValueError("about has another checksum than when it was written")
        arrays = {name: _open(path / name, described, verify) for name, described in about["arrays"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, str(error)) from error
    return arrays, about


def damaged(path: pathlib.Path, what: str) -> UserError:
    """What to say of a folder that does not hold what was written."""
    return UserError(f"{path}: is damaged ({what}). Delete this folder; it is made anew.")


def kept(folder: pathlib.Path, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder `name` in `folder`, filled by `make` if it is not there.

    Two processes may make the same; the first to finish is taken, and both are equal.

    Raises:
      UserError: the folder cannot be written, or others than this user can write it.
    """
    target = folder / name
    try:
        _make_private(folder)
        if target.is_dir():
            return target
        _clear(folder)
        # `_clear` reads host and process from the name, and removes it when that process is no more.
        mine = f"{_MAKING}{socket.gethostname()}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=mine, dir=folder) as made:  # mode 0700
            inside = pathlib.Path(made) / "made"
            inside.mkdir(mode=0o700)
            make(inside)
            try:
                os.rename(inside, target)
            except OSError:
                if not target.is_dir():  # else another process was first
                    raise
    except OSError as error:
        raise UserError(
            f"{folder}: tokenised text cannot be kept there ({error.strerror}). Set data.folder to a folder that can "
            f"be written; {_free(folder)} are free in this one."
        ) from error
    return target


def _digest(about: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _open(path: pathlib.Path, described: Mapping[str, Any], verify: Verify) -> np.ndarray:
    dtype, size = np.dtype(described["dtype"]), described["size"]
    if dtype.kind not in "biuf" or type(size) is not int:
        raise ValueError(f"{path.name} has {size} numbers of type {dtype}")
    if (found := path.stat().st_size) != dtype.itemsize * size:
        raise ValueError(f"{path.name} has {found} bytes, not {dtype.itemsize * size}")
    if size == 0:  # nothing to map
        return np.zeros(0, dtype)
    if verify == "checksums":
        sums = hashlib.sha256()
        with open(path, "rb") as file:
            while data := file.read(_VERIFIED_AT_ONCE):
                sums.update(data)
        if sums.hexdigest() != described["sha256"]:
            raise ValueError(f"{path.name} has another checksum than when it was written")
    return np.memmap(path, dtype, mode="r", shape=(size,))


def _make_private(folder: pathlib.Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user. Set data.folder to a folder of yours.")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        raise UserError(
            f"{folder} can be written by others (mode {mode:04o}), who could change what a model is trained on. Take "
            "the right away (chmod go-w), or set data.folder to a folder that only you can write."
        )


def _clear(folder: pathlib.Path) -> None:
    """Removes what processes of this machine that are no more were making: it may be as large as a corpus."""
    here = f"{_MAKING}{socket.gethostname()}-"
    for left in folder.glob(f"{here}*"):
        try:
            os.kill(int(left.name.removeprefix(here).partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):  # it runs as another user, or is none of ours
            continue


def _free(folder: pathlib.Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
