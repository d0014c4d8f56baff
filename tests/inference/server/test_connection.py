"""Connections whose clients do not send what they owe, and more connections than there may be."""

import types

import pytest
import uvicorn
from uvicorn.server import ServerState

from scalejax.inference.server import connection
from scalejax.inference.server.connection import BODY_S, HEADERS_S, Connection


class Clock:
    """An event loop of which only the time is wanted; it is moved by hand."""

    def __init__(self):
        self.now, self.calls, self.tasks = 0.0, [], 0

    def time(self):
        return self.now

    def call_later(self, seconds, function, *args):
        call = types.SimpleNamespace(at=self.now + seconds, act=lambda: function(*args))
        call.cancel = lambda: self.calls.remove(call) if call in self.calls else None
        self.calls.append(call)
        return call

    def create_task(self, task, **_):
        task.close()
        self.tasks += 1
        return Task()

    def pass_time(self, seconds):
        self.now += seconds
        for call in [call for call in self.calls if call.at <= self.now]:
            self.calls.remove(call)
            call.act()


class Task:
    def add_done_callback(self, _):
        pass


class Transport:
    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        assert not self.closed
        self.written += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, _):
        return None

    def pause_reading(self):
        pass

    resume_reading = pause_reading


@pytest.fixture
def connect():
    """connect() -> a connection; all of them are of one server and one clock."""
    clock, state = Clock(), ServerState()

    async def app(scope, receive, send):
        raise AssertionError

    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None)

    def connect():
        one = Connection(config, state, {}, _loop=clock)
        one.connection_made(Transport())
        return one

    connect.clock = clock
    return connect


@pytest.fixture
def room(monkeypatch):
    """room(n): so many connections there may be."""
    return lambda count: monkeypatch.setattr(connection, "most_connections", lambda: count)


def drip(one, data, seconds):
    for byte in data:
        one.data_received(bytes([byte]))
        one.loop.pass_time(seconds)


def test_headers_that_come_byte_by_byte_end_at_their_deadline(connect):
    silent, slow = connect(), connect()
    drip(slow, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-a: "[: int(HEADERS_S)], 0.99)
    assert not slow.transport.closed
    connect.clock.pass_time(1)
    for one in (silent, slow):
        assert one.transport.closed
        assert one.transport.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b'"message":"the headers did not come within 10 s."' in one.transport.written
    assert connect.clock.tasks == 0


def test_a_body_that_comes_byte_by_byte_ends_at_its_deadline_though_its_answer_has_gone(connect):
    waiting, answered = connect(), connect()
    for one in (waiting, answered):
        one.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
    answered.cycle.response_complete = True
    answered.conn.send(connection.h11.Response(status_code=404, headers=[(b"content-length", b"0")]))
    connect.clock.pass_time(HEADERS_S)
    for _ in range(59):
        waiting.data_received(b"a")
        answered.data_received(b"a")
        assert not waiting.transport.closed
        connect.clock.pass_time((BODY_S - HEADERS_S) / 60)
    connect.clock.pass_time(1)
    assert b"408 Request Timeout" in waiting.transport.written
    assert answered.transport.closed
    assert answered.transport.written == b""  # its client has had an answer


def test_nothing_is_owed_while_a_request_is_answered_and_between_two(connect):
    one = connect()
    one.data_received(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    connect.clock.pass_time(1000)
    assert not one.transport.closed
    assert one.is_served


def test_a_new_connection_takes_the_place_of_the_longest_idle_one_and_never_of_one_that_is_served(connect, room):
    room(3)
    served = connect()
    served.data_received(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    connect.clock.pass_time(1)
    first = connect()
    connect.clock.pass_time(1)
    second = connect()
    second.data_received(b"GET /x HTTP/1.1\r\nHost: x")
    third = connect()
    assert [one.transport.closed for one in (served, first, second, third)] == [False, True, False, False]
    assert b"503 Service Unavailable" in first.transport.written
    for one in (second, third):
        one.data_received(b"\r\n\r\n" if one is second else b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    late = connect()
    assert late.transport.closed
    assert b"too many connections" in late.transport.written
    assert not any(one.transport.closed for one in (served, second, third))


def test_what_is_no_http_is_refused_in_the_form_of_all_refusals(connect):
    one = connect()
    one.data_received(b"nonsense\r\n\r\n")
    assert one.transport.written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b'"error":{"message":"Invalid HTTP request received."' in one.transport.written
    assert one.transport.closed
