"""Files that unpack to more than they are: gzip, zstd, deflate and npz, with a bound on how much more.

A file of a few megabytes that unpacks to more than a machine has (a "bomb") is refused where it is read. Deflate can
gain a factor of 1032, and tables and texts gain 2 to 50, so what unpacks to `LARGEST_RATIO` times its size is none of
these, unless it is small anyway.
"""

import gzip
import io
import math
import pathlib
import zipfile
import zlib
from typing import IO, Any, Protocol

import numpy as np

LARGEST_RATIO = 500
ALWAYS_BYTES = 2**28
"""What any file may unpack to, however small it is."""

_ZIP_END = 22  # bytes of the record that ends an archive without a comment


def check_ratio(unpacked: int, packed: int) -> None:
    """Refuses a file that unpacks to more than it should.

    Args:
      unpacked: Bytes so far.
      packed: Bytes of the file.
    Raises:
      OSError: there are too many.
    """
    if unpacked > max(ALWAYS_BYTES, LARGEST_RATIO * packed):
        raise OSError(
            f"it unpacks to more than {LARGEST_RATIO} times its {packed:,} bytes, as no table and no text does; if it "
            "is right, name what you have unpacked from it yourself"
        )


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


def open_unpacked(path: pathlib.Path) -> IO[bytes]:
    """A file as it is, or what `.gz` or `.zst` was made of; reading too much of it is an OSError (`check_ratio`)."""
    if path.suffix == ".gz":
        stream: _Stream = gzip.open(path, "rb")  # noqa: SIM115  closed by its reader
    elif path.suffix == ".zst":
        import pyarrow as pa

        stream = pa.input_stream(str(path), compression="zstd")
    else:
        return open(path, "rb")
    return io.BufferedReader(_Bounded(stream, path.stat().st_size), 1 << 17)


class _Bounded(io.RawIOBase):
    def __init__(self, stream: _Stream, packed: int) -> None:
        self._stream, self._packed, self._given = stream, packed, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._given += len(data)
        check_ratio(self._given, self._packed)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def inflated(data: bytes) -> bytes:
    """What a deflate stream without a header was made of; what follows it is left out.

    Raises:
      OSError: it unpacks to far more than it has (`check_ratio`), or ends early.
      zlib.error: it is damaged.
    """
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    found = stream.decompress(data, max(ALWAYS_BYTES, LARGEST_RATIO * len(data)) + 1)
    check_ratio(len(found), len(data))
    if not stream.eof:
        raise OSError("its deflated part ends early")
    return found


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an npz, by name.

    Raises:
      ValueError: it is damaged, has objects in it (which numpy would have to unpickle, which runs code), two arrays of
        one name, or an array of another size than its header says.
      OSError: it cannot be read, or unpacks to far more than it has (`check_ratio`).
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_ratio(sum(member.file_size for member in members), path.stat().st_size)
            # A damaged length in the table of contents can swallow what follows in it, which zipfile does not notice.
            file.seek(-_ZIP_END, io.SEEK_END)
            end = file.read(_ZIP_END)
            if end[:4] != b"PK\x05\x06" or int.from_bytes(end[10:12], "little") != min(len(members), 0xFFFF):
                raise ValueError("its table of contents is damaged")
            arrays = {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except OSError:
        # The disk's own errors, and those of `check_ratio`, are no damage of the file.
        raise
    except Exception as error:  # zipfile, zlib, numpy and Python's parser each raise their own for a damaged file
        raise ValueError(str(error) or type(error).__name__) from error
    if len(arrays) < len(members):
        raise ValueError("two arrays have one name")
    return arrays


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        # numpy would make room for the array before it finds out.
        wanted, there = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
        if wanted != there and not dtype.hasobject:
            raise ValueError(f"{member.filename} has {there} bytes for an array of {wanted}")
    with archive.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        stream.read(1)  # at the end of a member its checksum is compared
        return array
