"""Several processes with one engine: process 0 has the loop, the others do on their devices what it announces.

Each operation goes to every other process as one message on a TCP connection of its own: an operation's name, its
arrays as they are in memory, and nothing that is run or unpickled. All processes then start the same program, whose
collectives meet. Whoever ends is noticed by `train.peers`, which ends the others.
"""

import contextlib
import json
import math
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalejax.errors import TemporaryFailure, UserError
from scalejax.inference.steps import OPERATIONS, Steps
from scalejax.train import distributed, peers

_HEADER = struct.Struct("!I")
_DTYPES = ("int32", "uint32", "float32", "bool")
_END = "end"
_JOIN_S = 30.0
_TOKEN_BYTES = 16


class Followers:
    """The other processes, at process 0; a `steps.Others`."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections

    def announce(self, name: str, arguments: tuple[Any, ...]) -> None:
        """See `Others`."""
        message = encoded(name, arguments)
        for connection in self._connections:
            try:
                connection.sendall(message)
            except OSError as error:
                self.hold()
                raise TemporaryFailure(f"a process of this engine is gone ({error.strerror}).") from error

    def hold(self) -> None:
        """See `Others`."""
        peers.job.hold()

    def end(self) -> None:
        """Lets them end with status 0."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # one that is gone already
                connection.sendall(encoded(_END, ()))
            connection.close()


def call_others() -> Followers:
    """Connects process 0 with all others, which call `called` at the same time.

    Raises:
      TemporaryFailure: they do not come.
    """
    host = peers.job.address
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    token = secrets.token_bytes(_TOKEN_BYTES)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(peers.job.count)
        distributed.broadcast([listener.getsockname()[1], token.hex()])
        found, _ = peers.accept(listener, peers.job.count, time.monotonic() + _JOIN_S, token)
    if len(found) < peers.job.count - 1:
        raise TemporaryFailure(
            f"{len(found) + 1} of {peers.job.count} processes came within {_JOIN_S:g} s. Start all again."
        )
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Followers(list(found.values()))


def check_alike(**described: object) -> None:
    """Refuses processes that were started differently; every process calls it.

    Args:
      described: What has to be the same in all, by the name of its option.

    Raises:
      UserError: names the first that is not.
    """
    everywhere = distributed.gather({name: str(value) for name, value in described.items()})
    for name in described:
        values = [one[name] for one in everywhere]
        other = next((process for process, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise UserError(
                f"{name} is {values[0]} for process 0 and {values[other]} for process {other}. Start all processes "
                "with the same command but for --process-id."
            )


def called() -> socket.socket:
    """The connection of another process to process 0, see `call_others`."""
    port, token = distributed.broadcast(None)
    connection = socket.create_connection((peers.job.address, port), timeout=_JOIN_S)
    peers.introduce(connection, peers.job.process, peers.job.count, bytes.fromhex(token))
    connection.settimeout(None)
    return connection


def follow(steps: Steps, connection: socket.socket) -> None:
    """Does what process 0 announces until it says that this is all.

    Raises:
      TemporaryFailure: the connection ended before.
    """
    while True:
        try:
            name, arguments = received(connection)
        except OSError as error:
            peers.job.hold()
            raise TemporaryFailure(f"process 0 is gone ({error.strerror or error}).") from error
        if name == _END:
            return
        if name not in OPERATIONS:
            raise ValueError(f"follow: the operation must be one of {', '.join(OPERATIONS)}; got {name!r}.")
        try:
            getattr(steps, name)(*arguments)
        except Exception:
            peers.job.hold()
            raise


def encoded(name: str, arguments: tuple[Any, ...]) -> bytes:
    """A message: the length of what describes it, that, and the arrays."""
    described = [a if isinstance(a, str) else [str(a.dtype), *a.shape] for a in arguments]
    header = json.dumps([name, described]).encode()
    arrays = (np.ascontiguousarray(a).tobytes() for a in arguments if not isinstance(a, str))
    return b"".join((_HEADER.pack(len(header)), header, *arrays))


def received(connection: socket.socket) -> tuple[str, list[Any]]:
    """The next message: a name and its arguments.

    Raises:
      OSError: the connection ended.
      ValueError: an array is of a type that no operation takes.
    """
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    name, described = json.loads(bytes(_exactly(connection, length)))
    found = []
    for one in described:
        if isinstance(one, str):
            found.append(one)
            continue
        dtype, *shape = one
        if dtype not in _DTYPES:
            raise ValueError(f"follow: arrays must be {', '.join(_DTYPES)}; got {dtype!r}.")
        data = _exactly(connection, math.prod(shape) * np.dtype(dtype).itemsize)
        array = np.frombuffer(data, dtype).reshape(shape)
        found.append(array if shape else array[()])
    return name, found


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, had = memoryview(data), 0
    while had < count:
        more = connection.recv_into(view[had:])
        if not more:
            raise ConnectionError("the connection ended")
        had += more
    return data
