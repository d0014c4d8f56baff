"""Bodies and answers, without a network: what is asked for is answered, what is wrong is named."""

import asyncio
import concurrent.futures
import contextlib
import json
import time

import hypothesis
import hypothesis.strategies as st
import pytest
from fake_loop import TEXT, FakeLoop, writer
from starlette.testclient import TestClient

from scalejax.data.text.tokenizer import ByteTokenizer
from scalejax.inference.requests import TokenLogprobs
from scalejax.inference.server.app import Server, ServerSettings


def settings(**changes):
    return ServerSettings(**{"name": "tiny", "slots": 8, "max_queue": 16, "max_queue_tokens": 1000} | changes)


@contextlib.contextmanager
def served(loop=None, tokenizer=None, **changes):
    server = Server(writer(tokenizer), loop or FakeLoop(), settings(**changes))
    server.thread.start()
    with TestClient(
        server.app, "http://localhost", raise_server_exceptions=False
    ) as client:  # one event loop for all requests
        client.server = server
        yield client
        assert server.thread.stop(10)
    assert not server.jobs


@pytest.fixture
def serve():
    """serve(loop, **settings) -> a client."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **changes: stack.enter_context(served(*given, **changes))


@pytest.fixture(scope="module")
def lasting():
    with served() as client:
        yield client


def complete(client, **body):
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 9} | body)


def chat(client, content="hi", **body):
    messages = [{"role": "user", "content": content}]
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 9} | body)


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_error(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


# What is asked for.


def test_a_completion(serve):
    client = serve()
    body = complete(client).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": TEXT[:9], "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}  # <|bos|>a
    whole = complete(client, max_tokens=100).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (TEXT, "stop")
    assert len(complete(client, max_tokens=None).json()["choices"][0]["text"]) == 16


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[256, 97, 98]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompts_are_texts_or_ids_or_several(serve, prompt, ids):
    client = serve(loop := FakeLoop())
    body = complete(client, prompt=prompt, n=2).json()
    assert [list(request.prompt) for request in loop.requests] == ids
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert [choice["text"] for choice in body["choices"]] == [TEXT[:9], TEXT[1:10]] * len(ids)
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_sampling_reaches_the_loop(serve):
    client = serve(loop := FakeLoop())
    complete(client, temperature=0.5, top_p=0.9, top_k=7, seed=2**32 + 5, n=2, logprobs=3, stop=["x", "<|pad|>"])
    (request,) = loop.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 5)
    assert (request.samples, request.logprobs, request.prompt_logprobs) == (2, 3, None)
    assert request.stop == (257, 258)
    complete(client, temperature=0, top_p=0.5)
    complete(client)
    complete(client)
    greedy, one, other = (request.sampling for request in loop.requests[1:])
    assert (greedy.temperature, one.temperature) == (0, 1)
    assert one.seed != other.seed  # nobody asked for the same text twice


def test_streams_are_the_answer_in_pieces(serve):
    client = serve()
    got = events(complete(client, stream=True, n=2, stream_options={"include_usage": True}))
    for index in (0, 1):
        own = [choice for event in got for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == TEXT[index : index + 9]
        assert [choice["finish_reason"] for choice in own] == [None] * 8 + ["length"]
    assert got[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}
    assert all(event["usage"] is None for event in got[:-1])
    assert len({event["id"] for event in got}) == 1


def test_a_chat_is_rendered_and_answered(serve):
    client = serve(loop := FakeLoop())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": parts, "name": "x"}]
    messages.append({"role": "assistant", "content": "c", "refusal": None, "tool_calls": []})
    body = client.post("/v1/chat/completions", json={"messages": messages, "max_completion_tokens": 3}).json()
    (request,) = loop.requests
    assert bytes(request.prompt[1:]) == b"system:S|user:a\nb|assistant:c|assistant:"
    assert request.prompt[0] == 256
    assert request.prompt.count(256) == 1  # once: the template writes it
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": TEXT[:3]}, "length")
    chat(client, max_tokens=None)
    assert loop.requests[-1].max_tokens == 4096 - len(loop.requests[-1].prompt)


def test_a_chat_streams_deltas(serve):
    got = events(chat(serve(), stream=True))
    choices = [event["choices"][0] for event in got]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT[:9]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {event["object"] for event in got} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "want"), [("quick", "The "), (["zzz", "brown", "quick b"], "The "), (["fox", "ox"], "The quick brown ")]
)
def test_a_stop_text_ends_within_a_step_and_is_never_shown(serve, stream, stop, want):
    client = serve(loop := FakeLoop(endless=True, delay=0.001))
    response = complete(client, stop=stop, stream=stream, max_tokens=2000)
    choices = [choice for event in (events(response) if stream else [response.json()]) for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == want
    assert choices[-1]["finish_reason"] == "stop"
    if stream:  # what may be the beginning of a stop text is held back
        assert all("qu" not in choice["text"] for choice in choices) or "quick" in want
    wait_for(lambda: not loop.busy)
    assert loop.cancelled == [(0, 0)]
    # One more step may run while the text is looked at, and its successor before the cancellation is read.
    found = len(want) + max(len(text) for text in ([stop] if isinstance(stop, str) else stop))
    assert loop.counted["generation_tokens"] <= found + 10


def test_a_stop_text_ends_its_prompt_and_no_other(serve):
    client = serve(loop := FakeLoop(endless=True, delay=0.001))
    prompts = ["now", "late"]  # whose text begins behind its 10th character
    body = complete(client, prompt=prompts, stop="quick", max_tokens=2000).json()
    assert [choice["text"] for choice in body["choices"]] == ["The ", TEXT[10:] + "The "]
    wait_for(lambda: not loop.busy)
    assert loop.cancelled == [(0, 0), (1, 0)]
    assert loop.counted["generation_tokens"] <= (9 + 10) + (35 + 9 + 10)


def test_a_stop_text_ends_its_sample_and_no_other_of_its_prompt(serve):
    client = serve(loop := FakeLoop(endless=True, delay=0.001))
    # The second sample never begins with "T"; it goes on alone, and the slot of the first is free.
    body = complete(client, stop="The quick", n=2, max_tokens=40).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("", "stop"),
        ((TEXT[1:] + TEXT[:1])[:40], "length"),
    ]
    assert loop.cancelled == [(0, 0)]
    assert loop.counted["generation_tokens"] <= 40 + len("The quick") + 10
    assert complete(client, n=8).status_code == 200  # all slots are free


def test_a_continuation_that_has_ended_is_told_once_while_others_of_its_prompt_go_on(serve):
    client = serve(loop := FakeLoop(endless=True))
    # The text of the second sample begins with the second character.
    got = events(complete(client, stop="The q", n=2, stream=True, max_tokens=200))
    ends = [(choice["index"], choice["finish_reason"]) for event in got for choice in event["choices"]]
    assert [end for end in ends if end[1]] == [(0, "stop"), (1, "stop")]
    texts = ["".join(c["text"] for event in got for c in event["choices"] if c["index"] == i) for i in (0, 1)]
    assert texts == ["", TEXT[1:]]
    assert metrics(client)['scalejax:request_success_total{finished_reason="stop",model_name="tiny"}'] == 2
    assert loop.cancelled == [(0, 0), (0, 1)]


def wait_for(condition):
    while not condition():
        time.sleep(0.005)


def test_half_characters_wait_for_their_other_half(serve):
    client = serve(FakeLoop(text="é€𝄞"))
    got = events(complete(client, stream=True, max_tokens=20))
    assert [choice["text"] for event in got for choice in event["choices"]] == ["é", "€", "𝄞"]
    assert complete(client, max_tokens=3).json()["choices"][0]["text"] == "é\ufffd"


# Log probabilities.


def test_logprobs_of_completions_name_tokens_and_where_they_begin(serve):
    client = serve()
    (choice,) = complete(client, max_tokens=3, logprobs=2).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"T": -0.5, "U": -1.5}, {"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}],
        "text_offset": [0, 1, 2],
    }
    got = events(complete(client, max_tokens=3, logprobs=0, stream=True))
    streamed = [choice["logprobs"] for event in got for choice in event["choices"]]
    assert [each["tokens"] for each in streamed] == [["T"], ["h"], ["e"]]
    assert [each["top_logprobs"] for each in streamed] == [[{"T": -0.5}], [{"h": -0.5}], [{"e": -0.5}]]


def test_tokens_behind_a_stop_text_have_no_logprobs(serve):
    client = serve()
    for stream in (False, True):
        response = complete(client, max_tokens=30, logprobs=0, stop="quick", stream=stream)
        found = events(response) if stream else [response.json()]
        tokens = [t for event in found for c in event["choices"] if c["logprobs"] for t in c["logprobs"]["tokens"]]
        assert "".join(tokens) == "The "


def test_logprobs_of_chats(serve):
    (choice,) = chat(serve(), max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"]
    top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in (("T", -0.5), ("U", -1.5))]
    assert choice["logprobs"] == {"content": [{**top[0], "top_logprobs": top}], "refusal": None}


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_a_prompt_as_lm_evaluation_harness_asks(serve, max_tokens, stream):
    client = serve()
    asked = {"prompt": [[97, 98, 99], [100, 101]], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    response = complete(client, temperature=0, seed=1234, stream=stream, **asked)
    found = events(response) if stream else [response.json()]
    choices = [choice for event in found for choice in event["choices"]]
    texts, tokens, values = ["", ""], [[], []], [[], []]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"]:
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
            values[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [prompt + TEXT[:max_tokens] for prompt in ("abc", "de")]
    assert tokens == [[*prompt, *TEXT[:max_tokens]] for prompt in ("abc", "de")]
    assert values == [[None] + [-0.5] * (len(prompt) - 1 + max_tokens) for prompt in ("abc", "de")]
    if not stream:
        assert choices[0]["logprobs"]["text_offset"] == list(range(3 + max_tokens))
        assert choices[0]["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.5}]


def test_a_logprob_of_minus_infinity_is_json(serve, monkeypatch):
    monkeypatch.setattr("fake_loop.logprobs", lambda token, top: TokenLogprobs(token, float("-inf"), ()))
    (choice,) = complete(serve(), max_tokens=1, logprobs=1).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


def test_events_that_wait_together_are_sent_together():
    async def ask(server):
        body = json.dumps({"prompt": "a", "max_tokens": 3, "n": 8, "stream": True}).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        asked, sent = [{"type": "http.request", "body": body}], []

        async def receive():
            return asked.pop() if asked else await asyncio.Event().wait()

        async def send(message):
            if message.get("body"):
                sent.append(message["body"])

        await server.app(scope | {"client": None}, receive, send)
        return sent

    # After a client has left, writes of one turn of the event loop would each be a line of its log.
    server = Server(writer(), FakeLoop(block=3), settings())
    server.thread.start()
    sent = asyncio.run(ask(server))
    assert server.thread.stop(10)
    assert b"".join(sent).count(b"data: ") == 8 + 1
    assert len(sent) == 1


# What is refused.

WRONG = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "a" * 4096}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ["a"] * 25}, "prompt"),
    ({"prompt": ["a"] * 20, "n": 7}, "prompt"),
    ({"max_tokens": 4095}, "prompt"),
    ({"max_tokens": 10**30}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 9}, "prompt"),  # more than the loop has slots
    ({"best_of": 2}, "best_of"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"suffix": "x"}, "suffix"),
    ({"strop": ["x"]}, "strop"),
    ({"\ud800": 1}, "\ud800"),
]
WRONG_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "hi", "tool_calls": [{}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ({"max_completion_tokens": 5}, "max_tokens"),  # differs from max_tokens
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"echo": True}, "echo"),
]


def test_what_is_wrong_is_named_and_disturbs_nobody(serve):
    client = serve(loop := FakeLoop())
    for body, param in WRONG:
        text = json.dumps({"prompt": "a"} | body)
        headers = {"content-type": "application/json"}
        check_error(client.post("/v1/completions", content=text, headers=headers), 400, param)
    for body, param in WRONG_CHATS:
        check_error(chat(client, **body), 400, param)
    assert not loop.requests
    assert complete(client).json()["choices"][0]["text"] == TEXT[:9]


def test_what_is_lacked_is_accepted_where_it_asks_for_nothing(serve):
    client = serve()
    none = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "suffix": "", "user": "me"}
    assert complete(client, **none).status_code == 200
    assert complete(client, **dict.fromkeys(none)).status_code == 200
    none = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert chat(client, **none, metadata={"a": "b"}, store=False).status_code == 200


def test_malformed_bodies_routes_and_models(serve):
    client = serve()
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b"1", b"\xff", b"[" * 10_000, b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}"):
        check_error(client.post("/v1/completions", content=content, headers=headers), 400)
    check_error(client.post("/v1/completions", data={"prompt": "a"}), 415)
    check_error(client.post("/v1/completions", content=b" " * (4 * 2**20 + 1), headers=headers), 413)
    just = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert client.post("/v1/completions", content=just.ljust(4 * 2**20), headers=headers).status_code == 200
    check_error(complete(client, model="gpt-9"), 404, "model", "model_not_found")
    check_error(client.get("/v1/completions"), 405)
    check_error(client.get("/nothing"), 404)
    check_error(client.get("/v1/models/other"), 404)
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]


def test_a_tokenizer_without_a_template_says_so(serve):
    client = serve(tokenizer=ByteTokenizer().build())
    assert "no chat template" in check_error(chat(client), 400, "messages")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PATHS = {
    "/v1/completions": ({"prompt": "a", "max_tokens": 1}, WRONG),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        WRONG_CHATS + WRONG[17:],
    ),
}
BODIES = st.sampled_from(sorted(PATHS)).flatmap(
    lambda path: st.tuples(
        st.just(path),
        st.dictionaries(
            st.sampled_from(sorted({name for body, _ in PATHS[path][1] for name in body} | {"model", "user"})),
            JSON,
            min_size=1,
            max_size=2,
        ),
    )
)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(body=BODIES, cut=st.just(None) | st.integers(0, 40))
def test_no_body_ends_in_a_failure_of_the_server(lasting, body, cut):
    path, fields = body
    content = json.dumps(PATHS[path][0] | fields)[:cut].encode()
    response = lasting.post(path, content=content, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (response.status_code, content)
        check_error(response, response.status_code)


# Who may ask, and when there is too much.


def test_a_key_is_wanted_everywhere_but_for_health(serve):
    client = serve(api_key="secret")
    assert client.get("/health").json() == {"status": "ok"}
    for headers in ({}, {"authorization": "Bearer secre"}, {"authorization": "secret"}, {"authorization": "Bearer ö"}):
        headers = {name: value.encode("latin-1") for name, value in headers.items()}
        check_error(client.get("/v1/models", headers=headers), 401, code="invalid_api_key")
        check_error(client.get("/metrics", headers=headers), 401)
        check_error(client.post("/v1/completions", json={"prompt": "a"}, headers=headers), 401)
    assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.slow
def test_a_full_queue_refuses_at_once_and_what_was_taken_finishes(serve):
    client = serve(FakeLoop(slots=2, delay=0.02), slots=2, max_queue=3)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda _: complete(client, max_tokens=20), range(12)))
    refused = [response for response in got if response.status_code == 429]
    taken = [response for response in got if response.status_code == 200]
    assert len(refused) + len(taken) == 12
    assert 5 <= len(taken) < 12  # two run, three wait
    for response in refused:
        check_error(response, 429, code="overloaded")
        assert int(response.headers["retry-after"]) >= 1
    assert all(response.json()["choices"][0]["text"] == TEXT[:20] for response in taken)
    check_error(complete(client, prompt=["a"] * 6), 400, "prompt")  # never fits
    assert complete(client).status_code == 200


@pytest.mark.slow
def test_tokens_that_wait_are_bounded_too(serve):
    client = serve(FakeLoop(slots=1, delay=0.02), slots=1, max_queue=100, max_queue_tokens=500)
    assert complete(client, prompt="a" * 900).status_code == 200  # nothing waits: it is taken, however long
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: complete(client, prompt="a" * 200, max_tokens=20), range(8)))
    codes = [response.status_code for response in got]
    assert set(codes) == {200, 429}
    assert codes.count(200) <= 4


@pytest.mark.slow
def test_a_full_queue_still_says_what_can_never_fit(serve):
    client = serve(FakeLoop(slots=1, delay=0.02), slots=1, max_queue=1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(complete, client, max_tokens=30) for _ in range(2)]
        wait_for(lambda: client.server.thread.stats.waiting == 1)
        check_error(complete(client), 429)
        check_error(complete(client, max_tokens=4096), 400, "prompt")
        assert [each.result().status_code for each in running] == [200, 200]


# What fails.


def test_logits_that_are_not_finite_end_their_row_alone(serve):
    client = serve(FakeLoop(delay=0.005))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        other = pool.submit(complete, client, max_tokens=40)
        message = check_error(complete(client, prompt="nan", max_tokens=40), 500, code="generation_failed")
        assert "not finite" in message
        assert other.result().json()["choices"][0]["text"] == TEXT[:40]
    *good, bad = events(complete(client, prompt="nan", stream=True, max_tokens=40))
    assert "".join(choice["text"] for event in good for choice in event["choices"]) == TEXT[:3]
    assert bad["error"]["code"] == "generation_failed"
    assert bad["index"] == 0
    prompts = events(complete(client, prompt=["nan", "good"], stream=True, max_tokens=9))
    texts = [choice["text"] for event in prompts for choice in event.get("choices", ()) if choice["index"] == 1]
    assert "".join(texts) == TEXT[:9]


def test_a_fault_of_the_device_ends_everything(serve):
    client = serve(FakeLoop(delay=0.005))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        other = pool.submit(complete, client, max_tokens=40)
        wait_for(lambda: client.server.thread.stats.running)
        check_error(complete(client, prompt="crash"), 500, code="device_fault")
        check_error(other.result(), 500, code="device_fault")
    check_error(client.get("/health"), 500, code="device_fault")
    check_error(complete(client), 500, code="device_fault")
    assert "gone" in repr(client.server.thread.fault)


def test_draining_takes_nothing_new(serve):
    client = serve()
    client.server.draining = True
    check_error(client.get("/health"), 503, code="draining")
    check_error(complete(client), 503)
    assert client.get("/v1/models").status_code == 200


# Metrics.


def metrics(client):
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


@pytest.mark.parametrize("prefix", ["scalejax", "vllm"])
def test_metrics_have_the_names_of_vllm(serve, prefix):
    client = serve(metrics_prefix=prefix)
    complete(client, n=2)
    events(complete(client, stream=True, stop="quick", max_tokens=50))
    complete(client, prompt="nan")
    wait_for(lambda: not client.server.thread.stats.running)
    found = metrics(client)
    plain = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"]
    plain += ["prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"]
    plain += ["compilations_total"]
    for name in plain:
        assert f'{prefix}:{name}{{model_name="tiny"}}' in found, name
    assert found[f'{prefix}:prompt_tokens_total{{model_name="tiny"}}'] == 2 + 2 + 4
    ends = {
        reason: found[f'{prefix}:request_success_total{{finished_reason="{reason}",model_name="tiny"}}']
        for reason in ("stop", "length", "error", "abort")
    }
    assert ends == {"stop": 1, "length": 2, "error": 1, "abort": 0}
    counts = {"time_to_first_token_seconds": 3, "e2e_request_latency_seconds": 3, "request_queue_time_seconds": 3}
    for name, count in counts.items():
        assert found[f'{prefix}:{name}_count{{model_name="tiny"}}'] == count, name
    assert found[f'{prefix}:inter_token_latency_seconds_count{{model_name="tiny"}}'] >= 16
