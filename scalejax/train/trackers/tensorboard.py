"""Scalars in TensorBoard's event files, written by the calling thread.

tensorboardX gives the message types and the checksum only. Its own writer hands events to a thread: on a full disk that
thread dies with a traceback and the next calls wait for ever, and two writers that open within a second share a file.
"""

import dataclasses
import io
import os
import socket
import struct
import time
from collections.abc import Mapping

from scalejax.train import disk
from scalejax.train.trackers.protocol import TrackedRun

FOLDER = "tensorboard"
"""In a run folder."""


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Event files in the run folder. TensorBoard shows no SVG: pictures are in the report alone."""

    def build(self) -> "ScalarWriter":
        return ScalarWriter()


class ScalarWriter:
    """Writes one event file; every call reaches the operating system before it returns."""

    _file: io.FileIO

    def start(self, run: TrackedRun) -> None:
        """Opens the next event file; events of earlier ones after the step of the run are hidden.

        Raises:
          UserError: the disk refuses.
        """
        from tensorboardX.proto.event_pb2 import (  # slow to import, and needed by one process only
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )

        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        folder = run.folder / FOLDER
        with disk.explained(f"cannot write to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            others = len(list(folder.glob(f"{name}*")))
            self._path = folder / (f"{name}.{others}" if others else name)
            self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(Event(step=run.step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one value per tag."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def picture(self, step: int, name: str, svg: str) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: object) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()  # pyright: ignore[reportAttributeAccessIssue]
        length = struct.pack("<Q", len(data))
        record = length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        disk.append(self._file, record, self._path)
