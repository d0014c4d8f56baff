"""The processes of a job watch each other, and agree on the steps at which all of them save or end.

Every process holds a TCP connection to process 0, on which fixed-size messages go from before jax starts until the job
ends: `join` finds out who is there, `Peers` keeps it so. A thread listens, because a main thread that waits for a
collective of a process that is gone is in native code and hears nothing. When one is gone, the thread ends this process
with one line and `os._exit`, within the timeout; jax's own watch would abort it later, with a page of C++.

Messages: a kind (one byte), a process, and a value of 16 bytes. Process 0 listens on the interface of the coordinator's
address, until all have joined. It greets whoever connects with a number drawn for that connection, and takes only who
answers in time with a message and its HMAC of both under the job's token, `$SCALEJAX_JOB_TOKEN`; all others are sent
away and hold up nobody. Then every process presents a second token that it got by way of jax, and one that presents
another, or none, ends the job. Nothing else is read, and nothing of it is interpreted.
"""

import contextlib
import datetime
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from scalejax.errors import TemporaryFailure, UserError

TIMEOUT_S = 30
"""Seconds without a word after which a process counts as gone; below jax's own, after which it aborts."""

GO_ON, SAVE, END = 0, 1, 2
"""What `Peers.reached` says of a step."""

TOKEN = "SCALEJAX_JOB_TOKEN"
"""Variable of the environment: a secret of the job, equal in all of its processes. Without it any program that speaks
this protocol may take the place of a process, which is found out when jax has started."""

_MESSAGE = struct.Struct("!cI16s")
_JOIN_BYTES = _MESSAGE.size + 32
"""Of a message and its HMAC."""

_GREETED = 256
"""Connections that may be silent at the same time while processes join; the oldest makes room."""

_ANSWER_S = 5.0
"""How long a connection may take to say who it is."""

_MOST = 1 << 20
"""Processes of a job."""

_LEAVE_S = 3.0
"""How long a process waits for another, that knows as much, to end by itself."""

# From all: here; a sign of life; the token; a wish to save or end; where it stands; done.
_JOIN, _ALIVE, _TOKEN, _ASK, _STANDS, _DONE = b"J", b"A", b"T", b"?", b"S", b"D"
# From process 0: a number to answer; another token; another number of processes; all are here; some are absent; where
# do you stand; the step to save or end at.
_GREETING, _REFUSED, _COUNTED, _BEGIN, _ABSENT, _WHERE, _POINT = b"H", b"R", b"#", b"B", b"N", b"W", b"P"
# Why a process is gone: closed, silent, stranger, ended with a status, asked to end with nothing to save.
_CLOSED, _SILENT, _STRANGER, _ENDED, _LEFT = b"C", b"L", b"X", b"E", b"F"

_WHY = {
    _CLOSED: "process {who} is gone since {since}: its connection closed, as when it is killed or its machine fails",
    _SILENT: "process {who} is silent since {since}, for more than {value} s: it was stopped, or cannot be reached",
    _STRANGER: "process {who} did not present the token of this job: another program spoke in its place",
    _ENDED: "process {who} ended with status {value}, and said why",
    _LEFT: "process {who} was asked to end before anything was trained that is not saved",
}


def _nothing() -> None:
    pass


class Peers:
    """The other processes of the job, as this one sees them. Until `watch` a process is alone.

    Attributes:
      process: Number of this one.
      count: Of all.
      again: The command that goes on, for the line with which a process ends.
      loses: What is lost where one is gone, for the same line.
      asked: Called, at process 0, when another process asks to end.
      token: What those of this job know, once jax has connected them; process 0 makes it.
    """

    def __init__(self) -> None:
        self.process, self.count, self.again = 0, 1, ""
        self.loses = "What was trained since the newest checkpoint is lost."
        self.asked: Callable[[], object] = _nothing
        self.token: int | None = None
        self._connections: dict[int, socket.socket] = {}
        self._timeout_s = float(TIMEOUT_S)
        self._agreed = threading.Condition()
        self._step, self._wanted = 0, GO_ON
        self._points: deque[tuple[int, int]] = deque()  # steps to come and what to do there; one at process 0
        self._standing: dict[int, int] | None = None  # while process 0 asks: where the others stand
        self._presented: set[int] = set()
        self._present_by = float("inf")
        self._done: set[int] = set()
        self._ending = False

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0."""
        return self.process == 0

    @property
    def address(self) -> str:
        """Of process 0, as the others reach it."""
        for connection in self._connections.values():
            return (connection.getsockname() if self.is_primary else connection.getpeername())[0]
        return "127.0.0.1"

    def watch(
        self, connections: dict[int, socket.socket], process: int, count: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Begins to watch.

        Args:
          connections: From `join`.
          process: Number of this one.
          count: Of all.
          timeout_s: Seconds of silence after which another one counts as gone.
        """
        self.process, self.count = process, count
        self._connections, self._timeout_s = connections, timeout_s
        self.token = secrets.randbits(127) if self.is_primary else None
        self._received = dict.fromkeys(connections, b"")
        for connection in connections.values():
            connection.settimeout(timeout_s)
            # Steps wait for these few bytes (`reached`), which TCP would otherwise hold back to send more at once.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connections:
            threading.Thread(target=self._listen, name="peers", daemon=True).start()

    # What the job's own threads say.

    def begin(self) -> None:
        """Another run: its steps count anew. Every process calls it before its first step."""
        with self._agreed:
            self._step, self._wanted, self._standing = 0, GO_ON, None
            self._points.clear()

    def present(self, token: int) -> None:
        """Says that this process is of the job, by the token of process 0, which came by way of jax."""
        if self.is_primary:
            self._present_by = time.monotonic() + self._timeout_s
        else:
            self._send(0, _TOKEN, value=token)

    def ask(self, what: int) -> None:
        """Asks that all save (`SAVE`) or end (`END`) after the same step, the next that none has passed."""
        if not self.is_primary:
            self._send(0, _ASK, value=what)
            return
        with self._agreed:
            if not self._points or self._points[0][1] < what:
                self._wanted = max(self._wanted, what)
            self._ask_where()

    def reached(self, step: int) -> int:
        """What all processes do after this step: `GO_ON`, `SAVE` or `END`. Call it at every step, in order."""
        with self._agreed:
            while self._standing is not None:  # the answers are milliseconds away, or a process is gone
                self._agreed.wait()
            self._step = step
            if not self._points or step < self._points[0][0]:
                return GO_ON
            _, what = self._points.popleft()
            if self._wanted:
                self._ask_where()
            return what

    def leave(self, status: int) -> None:
        """Tells the others that this process ends: with 0 in order, else so that they end too."""
        kind = _ENDED if status else _DONE
        self._ending = self._ending or bool(status)  # that others go is now this one's doing
        for process in self._connections:
            self._send(process, kind, who=self.process, value=status)

    def hold(self) -> None:
        """Where an error may be that of another process: gives the thread time to end this one with the reason."""
        if self._connections:
            time.sleep(_LEAVE_S)

    def end(self, status: int, line: str) -> NoReturn:
        """Ends all processes, from any thread; with status 75 at once, else the others may say what they met."""
        self._end(_LEFT if status == os.EX_TEMPFAIL else _ENDED, self.process, status, line, status)

    # What the thread hears.

    def _listen(self) -> None:
        pause = min(self._timeout_s / 6, 3.0)
        now, sent = time.monotonic(), 0.0
        heard = dict.fromkeys(self._connections, now)
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process)
            while True:
                if now - sent >= pause:
                    sent = now
                    # Also to those that are done: they wait in jax for this one, which may draw a report first.
                    for process in self._connections:
                        self._send(process, _ALIVE)
                for key, _ in selector.select(pause):
                    process, data = key.data, b""
                    with contextlib.suppress(OSError):
                        data = self._connections[process].recv(1 << 16)
                    heard[process] = time.monotonic()
                    if data:
                        self._hear(process, data)
                        continue
                    selector.unregister(key.fileobj)
                    if process not in self._done:
                        self._lost(_CLOSED, process)
                    self._done.add(process)
                before, now = now, time.monotonic()
                if now - before > 2 * pause:  # it is this process that was stopped
                    heard = dict.fromkeys(heard, now)
                for process in heard.keys() - self._done:
                    if now - heard[process] > self._timeout_s:
                        self._lost(_SILENT, process, round(self._timeout_s), ago_s=now - heard[process])
                    if now > self._present_by and process not in self._presented:
                        self._lost(_STRANGER, process)

    def _hear(self, process: int, data: bytes) -> None:
        data = self._received[process] + data
        whole = len(data) - len(data) % _MESSAGE.size
        self._received[process] = data[whole:]
        for kind, who, packed in _MESSAGE.iter_unpack(data[:whole]):
            value = int.from_bytes(packed, "big")
            if kind in _WHY:
                # What process 0 says of others it knows; another process speaks for itself alone.
                self._done |= {process} if kind == _ENDED else set()
                self._lost(kind, process if self.is_primary else who, value)
            elif kind == _DONE:
                self._done.add(process)
            elif kind == _TOKEN and self.is_primary:
                if not secrets.compare_digest(packed, _packed(self.token or 0)):
                    self._lost(_STRANGER, process)
                self._presented.add(process)
            elif kind == _ASK and self.is_primary:
                if value == END:
                    self.asked()
                self.ask(min(value, END))
            elif kind == _STANDS and self.is_primary:
                with self._agreed:
                    self._stands(process, value)
            elif kind == _WHERE and not self.is_primary:
                with self._agreed:
                    self._standing = {}
                    self._send(0, _STANDS, value=self._step)
            elif kind == _POINT and not self.is_primary:
                with self._agreed:
                    self._points.append((value, who))
                    self._standing = None
                    self._agreed.notify_all()

    def _ask_where(self) -> None:
        """Process 0 asks, unless it does so already or a step is agreed on that has not come."""
        if self._standing is not None or self._points:
            return
        self._standing = {}
        for process in self._connections:
            self._send(process, _WHERE)
        self._stands(0, self._step)

    def _stands(self, process: int, step: int) -> None:
        if self._standing is None:
            return
        self._standing[process] = step
        if len(self._standing) <= len(self._connections):
            return
        step, what = max(self._standing.values()) + 1, self._wanted
        self._points.append((step, what))
        self._standing, self._wanted = None, GO_ON
        for other in self._connections:
            self._send(other, _POINT, who=what, value=step)
        self._agreed.notify_all()

    def _lost(self, kind: bytes, who: int, value: int = 0, *, ago_s: float = 0.0) -> None:
        if self._ending:
            return
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s)
        why = _WHY[kind].format(who=who, since=now.isoformat(timespec="seconds"), value=value)
        lost = f" {self.loses}" if self.loses and kind != _LEFT else ""
        again = f" Go on with: {self.again}" if self.again else " Start all processes again with the same commands."
        status, again = (min(value, 255), "") if kind == _ENDED else (os.EX_TEMPFAIL, again)
        self._end(kind, who, value, f"Error: {why}.{lost}{again}", status)

    def _end(self, kind: bytes, who: int, value: int, line: str, status: int) -> NoReturn:
        self._ending = True
        for process in self._connections.keys() - {who}:
            self._send(process, kind, who=who, value=value)
        if kind == _ENDED and who != self.process:
            time.sleep(_LEAVE_S)  # an error that all meet: each says its own
        # Not `print`, nor `sys.exit` below: the main thread may hold a stream's lock, or never leave native code.
        os.write(2, f"{line}\n".encode())
        if self.is_primary and self._connections:
            # Process 0 holds jax's service, without which the others abort: they go first.
            self._wait_for_ends(who)
        os._exit(status)

    def _wait_for_ends(self, gone: int) -> None:
        waited = time.monotonic() + _LEAVE_S
        for process, connection in self._connections.items():
            while process != gone and (left := waited - time.monotonic()) > 0:
                try:
                    connection.settimeout(left)
                    if not connection.recv(1 << 16):
                        break
                except OSError:
                    break

    def _send(self, process: int, kind: bytes, *, who: int = 0, value: int = 0) -> None:
        with contextlib.suppress(OSError):  # the thread that listens finds it closed or silent
            self._connections[process].sendall(_message(kind, who, value))


job = Peers()
"""The processes of this one's job; `distributed.initialize` begins to watch them."""


def join(host: str, port: int, processes: int, process: int, timeout_s: float) -> dict[int, socket.socket]:
    """Connections to the other processes: at process 0 to all of them, elsewhere to process 0.

    Args:
      host: Of process 0.
      port: Free again when this returns.
      processes: How many there are.
      process: Which is this.
      timeout_s: Seconds that all have to come.

    Raises:
      TemporaryFailure: some did not come in time, which are named.
      UserError: the address cannot be found, or, elsewhere than at process 0, its token or number of processes differs.
    """
    deadline = time.monotonic() + timeout_s
    if process:
        return {0: _call(host, port, processes, process, deadline, timeout_s)}
    with _listener(host, port, deadline) as listener:
        here, remark = accept(listener, processes, deadline, _token())
    absent = sorted(set(range(1, processes)) - here.keys())
    for connection in here.values():
        with contextlib.suppress(OSError):  # one that is gone again is missed by those that watch
            connection.sendall(_message(_ABSENT, absent[0], len(absent)) if absent else _message(_BEGIN, 0, 0))
        if absent:
            connection.close()
    if absent:
        raise TemporaryFailure(
            f"{_named(absent)} of {processes} did not come within {timeout_s:g} s. Nothing was trained.{remark} Look "
            "at what became of it, and start all processes again with the same commands."
        )
    return here


def accept(
    listener: socket.socket, processes: int, deadline: float, token: bytes
) -> tuple[dict[int, socket.socket], str]:
    """Connections of those that `introduce` themselves in time, and a remark on the last one that was sent away."""
    here: dict[int, socket.socket] = {}
    greeted: dict[socket.socket, _Greeted] = {}  # oldest first
    remark = ""
    with selectors.DefaultSelector() as selector:

        def forget(connection: socket.socket) -> None:
            del greeted[connection]
            selector.unregister(connection)

        selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)
        while len(here) < processes - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 0.5)):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        greeted[connection] = _Greeted(secrets.randbits(127), token)
                        selector.register(connection, selectors.EVENT_READ, connection)
                        connection.send(_message(_GREETING, 0, greeted[connection].number))
                    continue
                connection: socket.socket = key.data
                answer = greeted.get(connection)
                if answer is None or not answer.complete(connection):
                    continue
                forget(connection)
                who, reply, why = answer.judge(processes)
                if reply is None:
                    if who in here:
                        here[who].close()  # one that was started again
                    here[who] = connection
                    connection.setblocking(True)
                    continue
                remark = why or remark
                with contextlib.suppress(OSError):
                    connection.send(reply)
                connection.close()
            now = time.monotonic()
            for connection, answer in list(greeted.items()):
                if len(greeted) > _GREETED or now > answer.until:
                    forget(connection)
                    connection.close()
    for connection in greeted:
        connection.close()
    return here, remark


class _Greeted:
    """A connection that has not said yet who it is."""

    def __init__(self, number: int, token: bytes) -> None:
        self.number, self.until = number, time.monotonic() + _ANSWER_S
        self._token, self._data = token, b""

    def complete(self, connection: socket.socket) -> bool:
        """Reads on; whether there is nothing more to wait for."""
        try:
            more = connection.recv(_JOIN_BYTES - len(self._data))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        self._data += more
        return not more or len(self._data) == _JOIN_BYTES

    def judge(self, processes: int) -> tuple[int, bytes | None, str]:
        """Which process it is, and for one that is none of this job the reply and a remark."""
        message, proof = self._data[: _MESSAGE.size], self._data[_MESSAGE.size :]
        if len(self._data) < _JOIN_BYTES or not hmac.compare_digest(proof, _proof(self._token, self.number, message)):
            remark = f" A program that called was sent away, as its ${TOKEN} is another, or it is none of this job."
            return 0, _message(_REFUSED, 0, 0), remark if self._data else ""
        kind, who, packed = _MESSAGE.unpack(message)
        count = int.from_bytes(packed, "big")
        if kind != _JOIN or not 1 <= who < max(count, processes) <= _MOST:
            return 0, _message(_REFUSED, 0, 0), ""
        if count != processes:
            remark = f" Process {who} was sent away: --processes is {count} there and {processes} for process 0."
            return who, _message(_COUNTED, 0, processes), remark
        return who, None, ""


def introduce(connection: socket.socket, process: int, processes: int, token: bytes) -> None:
    """Says to the process that `accept`s which one this is.

    Raises:
      OSError: another program answered, or nobody.
    """
    kind, _, packed = _MESSAGE.unpack(_exactly(connection))
    if kind != _GREETING:
        raise OSError("another program answered")
    message = _message(_JOIN, process, processes)
    connection.sendall(message + _proof(token, int.from_bytes(packed, "big"), message))


def _proof(token: bytes, number: int, message: bytes) -> bytes:
    """What shows that a message answers a greeting, and comes from who knows the token."""
    return hmac.digest(token, _packed(number) + message, "sha256")


def _token() -> bytes:
    return os.environ.get(TOKEN, "").encode()


def _call(host: str, port: int, processes: int, process: int, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        connection = None
        try:
            _, _, _, _, address = _resolve(host, port, deadline)
            connection = socket.create_connection(address[:2], timeout=max(0.1, deadline - time.monotonic()))
            introduce(connection, process, processes, _token())
            # Process 0 says who is absent; it may have come later than this one.
            connection.settimeout(max(0.1, deadline - time.monotonic()) + timeout_s)
            kind, who, packed = _MESSAGE.unpack(_exactly(connection))
            break
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() + 0.1 >= deadline:
                raise TemporaryFailure(
                    f"--coordinator {host}:{port}: process {process} found process 0 absent: nobody answered there "
                    f"within {timeout_s:g} s ({getattr(error, 'strerror', None) or error}). Start process 0 with the "
                    "same --coordinator, and check that its machine and port can be reached from here."
                ) from error
            time.sleep(0.1)
    if kind == _BEGIN:
        return connection
    connection.close()
    if kind == _REFUSED:
        raise UserError(
            f"process {process} was sent away by process 0: ${TOKEN} differs from that of process 0, or only one of "
            "them has it. Give all processes the same."
        )
    if kind == _COUNTED:
        raise UserError(
            f"--processes is {int.from_bytes(packed, 'big')} for process 0 and {processes} for process {process}. "
            "Start all with the same number."
        )
    if kind == _ABSENT:
        others = int.from_bytes(packed, "big") - 1
        more = f" and {others} more" if others else ""
        raise TemporaryFailure(
            f"process {who}{more} of {processes} did not come in time, says process 0. Nothing was trained. Look at "
            "what became of it, and start all processes again with the same commands."
        )
    raise TemporaryFailure(
        f"--coordinator {host}:{port}: process {process} was answered by another program than process 0. Start all "
        "processes again with the same commands."
    )


def _resolve(host: str, port: int, deadline: float) -> tuple[Any, ...]:
    """What `socket.getaddrinfo` says first; on Kubernetes the name of a pod comes a moment after the pod."""
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            message = f"--coordinator {host}:{port}: {host!r} cannot be found ({error.strerror})."
            if "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise UserError(f"{message} Give the address of the machine of process 0.") from error
            if time.monotonic() + 0.5 > deadline:
                raise TemporaryFailure(
                    f"{message} Look at what became of the pod of process 0, and whether a headless Service gives it "
                    "that name. Start all processes again with the same commands."
                ) from error
            time.sleep(0.5)


def _listener(host: str, port: int, deadline: float) -> socket.socket:
    """On the interface of an address; on all, as jax, where the address is none of this machine but leads to it."""
    family, _, _, _, address = _resolve(host, port, deadline)
    listener = socket.socket(family, socket.SOCK_STREAM)
    # The connections of this job keep the port in use after this listener has closed, and jax listens on it next.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        # All processes of a job may call at once, and they are registered one at a time.
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def _message(kind: bytes, who: int, value: int) -> bytes:
    return _MESSAGE.pack(kind, who, _packed(value))


def _packed(value: int) -> bytes:
    return value.to_bytes(16, "big")


def _exactly(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < _MESSAGE.size and (more := connection.recv(_MESSAGE.size - len(data))):
        data += more
    if len(data) < _MESSAGE.size:
        raise OSError("the connection was closed")
    return data


def _named(processes: Iterable[int]) -> str:
    numbers = [str(process) for process in processes]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
