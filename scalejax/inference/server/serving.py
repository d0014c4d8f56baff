"""Runs a server until a signal or a fault: binds, serves, lets what is running finish, and says how to exit."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from scalejax.errors import UserError, check_at_least
from scalejax.inference.server.app import FAULT, Service
from scalejax.inference.server.connection import BACKLOG, Connection
from scalejax.inference.server.protocol import ApiError

_FLUSH_S = 3  # for clients to read their last events
_STEP_S = 10.0  # for the step that runs


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine; port 0 = one that is free.

    Raises:
      UserError: the address is taken, or none of this machine.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port must be from 0 (any that is free) to 65535; got {port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            undo.pop_all()
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot be listened at ({error.strerror or error}). Choose another port, or "
            "0 for one that is free."
        ) from error
    return bound


def run(
    make: Callable[..., Service],
    *,
    bound: socket.socket,
    drain_seconds: float,
    ready: Callable[[str], None],
) -> int:
    """Serves until SIGTERM, SIGINT or a fault of the loop; returns the status to exit with.

    The first signal lets what is running finish, a second one ends the process at once.

    Args:
      make: Of the server, told what to call (`failed`) when its loop has failed.
      bound: Where to listen, of `bind`.
      drain_seconds: How long what is running may take to finish after a signal; the rest gets an error.
      ready: Told the address, once requests are served.
    """
    check_at_least("--drain-seconds", drain_seconds, 0)
    return asyncio.run(_run(make, bound, drain_seconds, ready))


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `_run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


async def _run(
    make: Callable[..., Service],
    bound: socket.socket,
    drain_seconds: float,
    ready: Callable[[str], None],
) -> int:
    here = asyncio.get_running_loop()
    over = asyncio.Event()

    def failed() -> None:
        here.call_soon_threadsafe(over.set)

    server = make(failed=failed)

    def on_signal(number: int) -> None:
        if server.draining:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + number)
        server.draining = True
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        here.add_signal_handler(number, on_signal, number)
    http = _Uvicorn(
        uvicorn.Config(
            server.app,
            http=Connection,
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_S,
            timeout_keep_alive=75,  # above the idle time of common proxies
        )
    )

    def abort(client: tuple[str, int]) -> None:
        for connection in list[Any](http.server_state.connections):
            if connection.client == tuple(client):
                connection.transport.abort()

    server.abort = abort
    server.thread.start()
    serving = asyncio.ensure_future(http.serve(sockets=[bound]))
    while not http.started and not serving.done():
        await asyncio.sleep(0.01)
    if http.started:
        host, port = bound.getsockname()[:2]
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    ending = asyncio.ensure_future(over.wait())
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    status = await _end(server, drain_seconds, over)
    http.should_exit = True
    await serving
    if not await asyncio.to_thread(server.thread.stop, _STEP_S):
        # An orderly end of the interpreter would pull jax away under the step that runs.
        print("The step of the model did not end in time.", file=sys.stderr, flush=True)
        os._exit(status)
    return status


async def _end(server: Service, drain_seconds: float, over: asyncio.Event) -> int:
    """Lets jobs finish; those that do not get an error. Returns the status of the process."""
    if server.thread.fault is None:
        print(f"Ending: {len(server.jobs)} running, at most {drain_seconds:g} s.", file=sys.stderr, flush=True)
        over.clear()  # a fault may still come
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while server.jobs and not over.is_set():
                    await asyncio.sleep(0.02)
        server.end_all(ApiError("this server is ending.", status=503, code="draining"))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_S):
            while server.jobs:
                await asyncio.sleep(0.02)
    if server.thread.fault is None:
        return 0
    print(f"Error: {FAULT} {server.thread.fault!r}", file=sys.stderr, flush=True)
    return 1
