"""A server that listens: streams, clients that leave or do not read, signals, faults, and many clients at once."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
import urllib.parse

import chat_cases
import httpx2 as httpx
import jax
import pytest
import uvicorn
from fake_loop import TEXT
from fake_server import running

from scalejax.errors import UserError
from scalejax.inference import loop, text
from scalejax.inference.server import serving
from scalejax.inference.server.app import Server, ServerSettings
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh

HARMLESS = {"trust_env": False, "timeout": 300}
JSON = "Content-Type: application/json"
LONG = 10_000.0
"""Seconds that no test would wait for."""


@pytest.fixture(scope="module")
def endless():
    """A server whose model goes on for ever, a token each hundredth of a second."""
    with running(loop={"endless": True, "delay": 0.01}) as (_, address):
        yield address


def ask(address, **body):
    return httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 9} | body, **HARMLESS)


def stream(address, **body):
    asked = {"prompt": "a", "max_tokens": 9, "stream": True} | body
    return httpx.stream("POST", f"{address}/v1/completions", json=asked, **HARMLESS)


def events(response):
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def metric(address, name, **labels):
    labels = ",".join(f'{key}="{value}"' for key, value in sorted({"model_name": "tiny", **labels}.items()))
    for line in httpx.get(f"{address}/metrics", **HARMLESS).text.splitlines():
        if line.startswith(f"scalejax:{name}{{{labels}}} "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(name)


def wait_for(condition):
    """For as long as a test may take."""
    while not condition():
        time.sleep(0.02)


def wait_until_idle(address):
    wait_for(lambda: metric(address, "num_requests_running") == 0)


@pytest.mark.slow
def test_tokens_come_as_they_are_made(endless):
    before = metric(endless, "generation_tokens_total")
    with stream(endless, max_tokens=4000) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text, own = "", events(response)  # which would close the stream if nobody held it
        for event in own:
            text += event["choices"][0]["text"]
            if len(text) >= 50:
                break
        assert text == (TEXT * 2)[: len(text)]
        assert metric(endless, "num_requests_running") == 1
    wait_until_idle(endless)
    assert metric(endless, "generation_tokens_total") - before < 4000
    with stream(endless, max_tokens=50) as response:
        *tokens, end = events(response)
    assert "".join(token["choices"][0]["text"] for token in tokens) == (TEXT * 2)[:50]
    assert end == "[DONE]"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_slot(endless, streamed):
    aborted = metric(endless, "request_success_total", finished_reason="abort")
    before = metric(endless, "generation_tokens_total")
    address = urllib.parse.urlsplit(endless)
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": streamed}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: {len(body)}"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: metric(endless, "num_requests_running") == 1)
    wait_until_idle(endless)
    assert metric(endless, "generation_tokens_total") - before < 4000
    assert metric(endless, "request_success_total", finished_reason="abort") == aborted + 1


def test_a_stop_text_frees_the_slot_too(endless):
    before = metric(endless, "generation_tokens_total")
    body = ask(endless, stop=["quick"], max_tokens=4000).json()
    assert body["choices"][0]["text"] == "The "
    wait_until_idle(endless)
    assert metric(endless, "generation_tokens_total") - before < 4000


@pytest.mark.slow
def test_a_client_that_does_not_read_is_ended_and_others_go_on():
    with running(loop={"endless": True, "block": 32}, max_positions=10**7) as (_, url):
        address = urllib.parse.urlsplit(url)
        body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: {len(body)}"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.hostname, address.port))
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_for(lambda: metric(url, "num_requests_running") == 1)
            assert ask(url).json()["choices"][0]["text"] == TEXT[:9]
            wait_for(lambda: metric(url, "request_success_total", finished_reason="abort") == 1)
            wait_until_idle(url)
            client.settimeout(300)
            end = b""
            try:
                while piece := client.recv(2**16):
                    end = (end + piece)[-100:]
            except ConnectionResetError:
                pass
            assert b"[DONE]" not in end
        assert ask(url).json()["choices"][0]["text"] == TEXT[:9]


# Ends.


@pytest.mark.slow
def test_sigterm_lets_what_runs_finish_and_refuses_what_comes():
    with running(loop={"endless": True, "delay": 0.02}, drain_seconds=LONG) as (child, url):
        with stream(url, max_tokens=100) as response:
            own = events(response)
            next(own)
            child.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health", **HARMLESS).status_code == 503)
            refused = ask(url)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            *_, last, done = own
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert child.wait(300) == 0


@pytest.mark.slow
def test_what_does_not_finish_within_the_drain_is_told_so():
    with running(loop={"endless": True, "delay": 0.02}, drain_seconds=1, max_positions=10**7) as (child, url):
        with stream(url, max_tokens=10**6) as response:
            own = events(response)
            next(own)
            child.send_signal(signal.SIGTERM)
            *_, last = own
            assert last["error"]["code"] == "draining"
        assert child.wait(300) == 0


@pytest.mark.slow
def test_an_idle_server_ends_at_once_by_either_signal():
    for number in (signal.SIGTERM, signal.SIGINT):
        with running(drain_seconds=LONG) as (child, url), httpx.Client(**HARMLESS) as kept_alive:
            assert kept_alive.get(f"{url}/health").json() == {"status": "ok"}
            child.send_signal(number)
            assert child.wait(300) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once():
    slow = {"endless": True, "delay": 0.02}
    with running(loop=slow, drain_seconds=LONG) as (child, url), stream(url, max_tokens=4000) as response:
        own = events(response)  # which would close the stream if nobody held it
        next(own)
        child.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health", **HARMLESS).status_code == 503)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 128 + signal.SIGTERM  # 4000 tokens take 80 s


@pytest.mark.slow
def test_a_fault_of_the_device_tells_everyone_and_ends_with_status_1():
    with running(loop={"endless": True, "delay": 0.01}) as (child, url):
        with stream(url, max_tokens=4000) as response:
            own = events(response)
            next(own)
            broken = ask(url, prompt="crash")
            assert (broken.status_code, broken.json()["error"]["code"]) == (500, "device_fault")
            *_, last = own
            assert last["error"]["code"] == "device_fault"
        assert child.wait(300) == 1
        assert "the device is gone" in child.stderr.read()


def test_an_address_that_is_taken_is_refused():
    taken = serving.bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(UserError, match="Choose another port"):
        serving.bind("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(UserError, match="from 0"):
        serving.bind("127.0.0.1", 70_000)


# Many clients.


@pytest.mark.slow
def test_200_streaming_clients_get_what_they_asked_for():
    async def client(session, url, number):
        for turn in range(2):
            length = 5 + (number + turn) % 30
            asked = {"prompt": "a", "max_tokens": length, "stream": True}
            async with session.stream("POST", f"{url}/v1/completions", json=asked) as response:
                assert response.status_code == 200, await response.aread()
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
            assert "".join(pieces) == TEXT[:length]

    async def all_of_them(url):
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(limits=limits, **HARMLESS) as session:
            await asyncio.gather(*(client(session, url, number) for number in range(200)))

    with running(loop={"slots": 64, "delay": 0.002}) as (child, url):
        asyncio.run(all_of_them(url))
        wait_until_idle(url)
        assert metric(url, "request_success_total", finished_reason="length") == 400
        child.send_signal(signal.SIGTERM)
        assert child.wait(300) == 0


# The client of OpenAI.


@pytest.mark.slow
def test_the_client_of_openai_chats_streams_and_understands_refusals(endless):
    openai = pytest.importorskip("openai", reason="needs openai's client, which is no dependency")
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{endless}/v1", api_key="none", max_retries=0, http_client=http) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "hi"}]
        asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 9}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == TEXT[:9]
        assert [token.token for token in whole.choices[0].logprobs.content] == list(TEXT[:9])
        assert whole.usage.completion_tokens == 9
        turn = [*messages, whole.choices[0].message, {"role": "user", "content": "more"}]  # as it came
        assert client.chat.completions.create(**asked | {"messages": turn}).choices[0].finish_reason == "length"
        pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == TEXT[:9]
        assert pieces[-1].usage.completion_tokens == 9
        text = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, echo=True, logprobs=1, n=2)
        assert [choice.text for choice in text.choices] == [p + TEXT[s : s + 4] for p in "ab" for s in (0, 1)]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-9", prompt="a")
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            client.chat.completions.create(**asked, logit_bias={"5": 1})
        with pytest.raises(openai.APIError, match="not finite"):
            list(client.completions.create(model="tiny", prompt="nan", max_tokens=9, stream=True))


@contextlib.contextmanager
def in_this_process(server):
    """The address of a server on loopback, in a thread."""
    bound = serving.bind("127.0.0.1", 0)
    http = uvicorn.Server(uvicorn.Config(server.app, lifespan="off", log_config=None, access_log=False))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [bound]})
    server.thread.start()
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(20)
        assert server.thread.stop(20)
        bound.close()


@pytest.mark.slow
def test_the_client_of_openai_talks_with_a_model_in_this_process(tmp_path):
    openai = pytest.importorskip("openai", reason="needs openai's client, which is no dependency")
    pytest.importorskip("tokenizers", reason="needs the extra llm")
    pytest.importorskip("jinja2", reason="needs the extra llm")
    folder = chat_cases.write_model(tmp_path / "tiny", max_positions=256)
    mesh = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    writer = text.open_writer(model_folder.open_folder(folder), mesh)
    scheduler = loop.make_loop(writer.engine, slots=2, page=16)
    settings = ServerSettings(name="tiny", slots=2, max_queue=16, max_queue_tokens=1000)
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    with (
        in_this_process(Server(writer, scheduler, settings)) as address,
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        (whole,) = client.chat.completions.create(**asked, messages=messages).choices
        pieces = client.chat.completions.create(**asked, messages=messages, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        completed = client.completions.create(**asked, prompt=["ab", "cd"])
    assert streamed == whole.message.content
    prompt = writer.tokenizer.render_chat(messages)
    wanted = writer.complete([prompt, "ab", "cd"], max_tokens=12)
    assert [each.text for each in wanted] == [whole.message.content, *(choice.text for choice in completed.choices)]
    assert completed.usage.completion_tokens == len(wanted[1].tokens) + len(wanted[2].tokens)
