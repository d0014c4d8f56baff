"""A connection of the server: what its client owes must come in time, and there is room for those that are served.

A client owes headers, and then a body. While it does, and between two requests, its connection may be closed: at a
deadline, or for another one where there are as many as there may be.
"""

import asyncio
import http
import resource
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from scalejax.inference.server.answers import dump
from scalejax.inference.server.protocol import ApiError

HEADERS_S = 10.0
"""In which the headers of a request must have come, from the connection or their first byte on."""

BODY_S = 60.0
"""In which a body must have come behind them."""

BACKLOG = 64
"""Connections that are accepted at once, before any of them is looked at."""

_SHARE_OF_FILES = 0.5  # that connections may have of the files that the process may open


def most_connections() -> int:
    """By the limit of open files, which may be changed while the process runs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft * _SHARE_OF_FILES)


class Connection(H11Protocol):
    """See the module."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._deadline: asyncio.TimerHandle | None = None
        self._owed: str | None = None  # what the deadline is of
        self._idle_since = self.loop.time()

    @property
    def is_served(self) -> bool:
        """Whether its request has come whole and its answer has not gone."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes it, in place of the one that has been idle for longest where there are too many."""
        super().connection_made(transport)
        others = [each for each in self._all() if each is not self and not each.transport.is_closing()]
        if len(others) >= most_connections():
            idle = [each for each in others if not each.is_served]
            last = min(idle, key=lambda each: each._idle_since, default=self)
            last.refuse(ApiError("too many connections. Try again later.", status=503, code="overloaded"))
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        """An answer has gone."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        super().connection_lost(exc)
        self._set_deadline()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self.refuse(ApiError(msg))

    def refuse(self, error: ApiError) -> None:
        """Answers with an error, unless an answer has begun, and closes."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = dump(error.body)
            head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
            fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + fields.encode() + body)
        self.transport.close()

    def _all(self) -> "set[Connection]":
        return cast("set[Connection]", self.connections)

    def _set_deadline(self) -> None:
        """For what the client owes; it begins when it starts to owe it."""
        owed = None
        if not self.transport.is_closing():
            owed = {h11.IDLE: "headers", h11.SEND_BODY: "body"}.get(self.conn.their_state)
        if owed == self._owed:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._owed, self._deadline = owed, None
        if owed is not None:
            seconds = HEADERS_S if owed == "headers" else BODY_S
            error = ApiError(f"the {owed} did not come within {seconds:g} s.", status=408)
            self._deadline = self.loop.call_later(seconds, self.refuse, error)
