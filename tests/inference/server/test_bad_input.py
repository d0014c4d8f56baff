"""Bad input on a server with a real loop, and templates that are hostile: one clear message, and it goes on."""

import concurrent.futures
import contextlib
import json

import jax
import pytest
from chat_cases import write_model, write_tokenizer
from fake_loop import FakeLoop, writer
from starlette.testclient import TestClient

from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.errors import UserError
from scalejax.inference import loop, text
from scalejax.inference.server.app import Server, ServerSettings
from scalejax.inference.server.protocol import LARGEST_BODY
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh

pytest.importorskip("tokenizers", reason="needs the extra llm")
pytest.importorskip("jinja2", reason="needs the extra llm")

POSITIONS, ROOM = 256, 128
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@contextlib.contextmanager
def served(writer, loop, slots):
    server = Server(writer, loop, ServerSettings(name="tiny", slots=slots, max_queue=16, max_queue_tokens=1000))
    server.thread.start()
    with TestClient(server.app, "http://localhost", raise_server_exceptions=False) as client:
        client.server = server
        yield client
        assert server.thread.stop(10)
    assert not server.jobs


@pytest.fixture(scope="module")
def open_model(tmp_path_factory):
    mesh = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])

    def opened(name, **fields):
        folder = write_model(tmp_path_factory.mktemp("models") / name, max_positions=POSITIONS, **fields)
        return text.open_writer(model_folder.open_folder(folder), mesh)

    return opened


@pytest.fixture(scope="module")
def model(open_model):
    return open_model("tiny")


@pytest.fixture(scope="module")
def real(model):
    with served(model, loop.make_loop(model.engine, slots=2, kv_tokens=ROOM, page=16), 2) as client:
        yield client


def check_error(response, status, param):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert error["param"] == param
    assert len(error["message"]) < 1000
    assert "Traceback" not in error["message"]
    return error["message"]


def changed(**fields):
    return {"prompt": "a", "max_tokens": 2} | fields


BAD = {
    "longer than the model": (changed(prompt="a" * POSITIONS), 400, "prompt", "at most 256 positions"),
    "longer than the pages": (changed(prompt="a" * ROOM), 400, "prompt", "the cache has room for 128"),
    "more to come than the model": (changed(max_tokens=POSITIONS), 400, "prompt", "at most 256 positions"),
    "more to come than the pages": (changed(max_tokens=ROOM), 400, "prompt", "the cache has room for 128"),
    "no prompt": (changed(prompt=None), 400, "prompt", "prompt must be a text"),
    "an empty list": (changed(prompt=[]), 400, "prompt", "no list empty"),
    "an empty prompt of ids": (changed(prompt=[[]]), 400, "prompt", "no list empty"),
    "an id behind the table": (changed(prompt=[5, 320]), 400, "prompt", "token 320"),
    "a negative id": (changed(prompt=[-1]), 400, "prompt", "token -1"),
    "a huge id": (changed(prompt=[2**31]), 400, "prompt", "token 2147483648"),
    "n of 0": (changed(n=0), 400, "n", "from 1 to 128; got 0"),
    "n of too many": (changed(n=129), 400, "n", "from 1 to 128; got 129"),
    "temperature below 0": (changed(temperature=-0.5), 400, "temperature", "from 0 to 2; got -0.5"),
    "temperature above 2": (changed(temperature=2.5), 400, "temperature", "from 0 to 2; got 2.5"),
    "another model": (changed(model="gpt-9"), 404, "model", "Ask for 'tiny'"),
    "no JSON": (b'{"prompt": "a"', 400, None, "the body is no JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, None, "the body is no JSON"),
    "too deep": (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None, "nested more than"),
    "a body of more than 4 MiB": (b" " * (LARGEST_BODY + 1), 413, None, "larger than 4 MiB"),
    "a role that is none": (
        {"messages": [{"role": "king", "content": "hi"}]},
        400,
        "messages[0].role",
        "got 'king'",
    ),
    "no role": ({"messages": [{"content": "hi"}]}, 400, "messages[0].role", "must be one of"),
    "no messages": ({"messages": []}, 400, "messages", "must be a list"),
    "a chat longer than the model": (
        {"messages": [{"role": "user", "content": "a" * POSITIONS}]},
        400,
        "messages",
        "at most 256 positions",
    ),
}


@pytest.mark.parametrize(("body", "status", "param", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_message_and_disturbs_nothing(real, body, status, param, words):
    before = real.server.thread.stats
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = real.post(path, content=content, headers={"content-type": "application/json"})
    assert words in check_error(response, status, param)
    assert real.get("/health").status_code == 200
    assert real.server.thread.stats == before


@pytest.mark.slow
def test_the_same_server_then_answers(real):
    assert real.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"]["completion_tokens"] <= 2
    assert real.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_session_of_another_model_is_refused(model, open_model):
    other = open_model("other", layers=2).in_session()
    with pytest.raises(UserError, match="session belongs to another model"):
        model.engine.generate([[5]], max_tokens=1, loop=other.loop)


# Templates.

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {
    "a failure": "{{ 1/0 }}",
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loops": LOOPS,
    "memory": "{{ 'a' * (messages | length * 10**10) }}",
    "memory, as it is compiled": "{{ 'a' * 10**10 }}",
    "memory, doubled": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "text": "{% for a in range(9999) %}{{ 'a' * 10**4 }}{% endfor %}",
    "no template at all": "{{ " + "(" * 10**5 + " }}",
    "what is not there": "{{ messages.first.role }}",
    "a way out of the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__()[0]() }}",
    "its own refusal": "{{ raise_exception('a' * 10**7) }}",
    "half a character": "{{ '\\ud800' }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_the_fault_of_the_request_and_the_server_goes_on(tmp_path, source):
    write_tokenizer(tmp_path, source)
    tokenizer = HuggingFaceTokenizer(path=str(tmp_path / "tokenizer.json")).build()
    fake = writer(tokenizer)
    with served(fake, FakeLoop(text="".join(chr(c) for c in range(33, 80))), 8) as client:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(client.post, "/v1/chat/completions", json=CHAT) for _ in range(2)]
            meanwhile = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            refused = [each.result() for each in asked]
        assert meanwhile.status_code == 200
        for response in refused:
            check_error(response, 400, "messages")
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200


@pytest.mark.slow
def test_a_template_that_is_hostile_to_some_messages_serves_the_others(tmp_path):
    write_tokenizer(tmp_path, "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}")
    tokenizer = HuggingFaceTokenizer(path=str(tmp_path / "tokenizer.json")).build()
    with served(writer(tokenizer), FakeLoop(), 8) as client:
        for content, status in (("hi", 200), ("loop", 400), ("hi", 200)):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            assert client.post("/v1/chat/completions", json=body).status_code == status
