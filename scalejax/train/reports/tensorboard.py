"""Scalars in TensorBoard's event files, written by the calling thread.

tensorboardX gives the message types and the checksum only. Its own writer hands events to a thread: on a full disk that
thread dies with a traceback and the next calls wait for ever, and two writers that open within a second share a file.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from scalejax.train import disk


class ScalarWriter:
    """Writes one event file of a folder; every call reaches the operating system before it returns.

    Args:
      folder: Made if need be.
      first_step: Events of earlier files from this step on are hidden: the run begins there again.
    Raises:
      UserError: the disk refuses.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboardX.proto.event_pb2 import (  # slow to import, and needed by one process only
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )

        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        with disk.explained(f"cannot write to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            others = len(list(folder.glob(f"{name}*")))
            self._path = folder / (f"{name}.{others}" if others else name)
            self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one value per tag."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: object) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()  # pyright: ignore[reportAttributeAccessIssue]
        length = struct.pack("<Q", len(data))
        record = length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        disk.append(self._file, record, self._path)
