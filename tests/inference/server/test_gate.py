"""Host, Origin and the length of a body: what a page of another site or a confused proxy sends is refused."""

import json
import socket

import pytest
from fake_loop import FakeLoop, writer
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from scalejax.errors import UserError
from scalejax.inference.server.app import Server, ServerSettings
from scalejax.inference.server.gate import Origins
from scalejax.inference.server.protocol import ApiError


def refused(origins, **headers):
    """The code, or None."""
    try:
        origins.check(Headers({"host": "localhost:8000", **headers}))
    except ApiError as error:
        return error.status, error.code
    return None


HOST, ORIGIN = (403, "host_not_allowed"), (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        ({}, None),
        ({"host": "127.0.0.1:8000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "LOCALHOST"}, None),
        ({"host": "evil.example:8000"}, HOST),
        ({"host": "127.0.0.1.evil.example"}, HOST),
        ({"host": "10.0.0.5"}, HOST),
        ({"host": "localhost@evil.example"}, HOST),
        ({"host": "["}, HOST),
        ({"host": ""}, HOST),
        ({"origin": "http://localhost:3000"}, None),
        ({"origin": "http://evil.example"}, ORIGIN),
        ({"origin": "null"}, ORIGIN),
        ({"host": "evil.example", "origin": "http://evil.example"}, HOST),
    ],
)
def test_only_this_machine_is_known_where_the_server_listens_on_loopback(headers, want):
    assert refused(Origins(), **headers) == want


def test_host_and_allow_origin_name_further_ones():
    origins = Origins("gpu.lan", ("https://chat.example.org",))
    assert refused(origins, host="gpu.lan:8000") is None
    assert refused(origins, host="chat.example.org") is None
    assert refused(origins, host="evil.example") == HOST
    assert refused(origins, origin="https://chat.example.org") is None
    assert refused(origins, origin="https://evil.example") == ORIGIN


def test_a_server_on_every_address_answers_to_addresses_and_the_name_of_the_machine():
    origins = Origins("0.0.0.0")
    assert refused(origins, host="10.0.0.5:8000") is None
    assert refused(origins, host=socket.gethostname()) is None
    assert refused(origins, host="evil.example") == HOST


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/path", "*", ""])
def test_an_origin_that_is_none_is_refused_at_the_start(origin):
    with pytest.raises(UserError, match="--allow-origin must be"):
        Origins(allowed=(origin,))


def test_what_is_refused_does_not_reach_a_route_and_pages_that_may_ask_are_told_so():
    settings = ServerSettings(name="tiny", slots=8, max_queue=16, max_queue_tokens=1000)
    origins = Origins(allowed=("https://chat.example.org",))
    server = Server(writer(), FakeLoop(), ServerSettings(**(vars(settings) | {"origins": origins})))
    with TestClient(server.app, "http://localhost", raise_server_exceptions=False) as client:
        response = client.get("/v1/models", headers={"host": "evil.example"})
        assert (response.status_code, response.json()["error"]["code"]) == HOST
        assert response.headers["connection"] == "close"
        both = {"content-length": "3", "transfer-encoding": "chunked", "content-type": "application/json"}
        response = client.post("/v1/completions", headers=both, content=b"abc")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "two_lengths")
        page = {"origin": "https://chat.example.org"}
        asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        for response in (client.get("/v1/models", headers=page), client.options("/v1/completions", headers=asked)):
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://chat.example.org"
        long = b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}"
        response = client.post("/v1/completions", headers={"content-type": "application/json"}, content=long)
        message = json.loads(response.content)["error"]["message"]
        assert message == "the body is no JSON: a number has more than 4,300 digits."
