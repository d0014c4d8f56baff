"""The routes: bodies in, answers out, whole or as server-sent events; every refusal has the form of OpenAI's."""

import abc
import asyncio
import contextlib
import dataclasses
import datetime
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scalejax.errors import UserError
from scalejax.inference import requests as engine
from scalejax.inference.server import protocol
from scalejax.inference.server.answers import Answer, PreparedPrompt, broken, dump
from scalejax.inference.server.gate import Gate, Origins
from scalejax.inference.server.loop_thread import Fault, LoopThread, Overloaded, Ticket
from scalejax.inference.server.metrics import CONTENT_TYPE, Metrics
from scalejax.inference.server.protocol import ApiError, Asked
from scalejax.inference.text import Writer

LARGEST_BUFFER = 2**20
"""Bytes of events that may wait for a client that does not read."""

_RETRY_S = 1
FAULT = "the model's device has failed; this server ends."

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What whoever serves decides.

    Attributes:
      name: Of the model.
      slots: Of the loop: continuations at once.
      max_queue: Requests that may wait.
      max_queue_tokens: Tokens that their prompts may have together.
      api_key: That requests must show; None = none.
      metrics_prefix: Of the names of metrics.
      longest: Tokens that a prompt and its continuation may have by what there is of KV; None = as the model's.
      origins: Names of the server, and pages that may ask it.
    """

    name: str
    slots: int
    max_queue: int
    max_queue_tokens: int
    api_key: str | None = None
    metrics_prefix: str = "scalejax"
    longest: int | None = None
    origins: Origins = Origins()


class Service:
    """What a model behind HTTP has whatever it answers; `app` is the ASGI application.

    Args:
      loop: Does what is asked for.
      settings: See there.
      routes: Paths of the bodies that this kind of model answers, and what makes jobs of them.
      described: What /v1/models says of the model besides.
      failed: Called, in some thread, when the loop has failed.

    Attributes:
      draining: Whether new requests are refused.
      jobs: Bodies that are being answered.
      abort: Closes the connection with a client at once; whoever runs `app` sets it.
    """

    def __init__(
        self,
        loop: engine.AnyLoop,
        settings: ServerSettings,
        *,
        routes: Mapping[str, "MakeJob"],
        described: Mapping[str, object],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics(lambda: self.thread.stats, model=settings.name, prefix=settings.metrics_prefix)
        self.thread = LoopThread(
            loop,
            slots=settings.slots,
            max_queue=settings.max_queue,
            max_queue_tokens=settings.max_queue_tokens,
            begun=self.metrics.queued_s.observe,
            failed=failed,
        )
        self.draining = False
        self.jobs: set[Job] = set()
        self.abort: Callable[[tuple[str, int]], None] = lambda _: None
        model = {"id": settings.name, "object": "model", "created": int(time.time()), "owned_by": "scalejax"}
        self._described = {**model, **described}
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._guarded(self._metrics)),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{model:path}", self._guarded(self._model)),
                *(
                    Route(path, self._guarded(functools.partial(self._answer, make)), methods=["POST"])
                    for path, make in routes.items()
                ),
            ],
            middleware=[
                Middleware(Gate, settings.origins, _refusal),
                Middleware(
                    CORSMiddleware,
                    allow_origins=settings.origins.allowed,
                    allow_methods=("GET", "POST"),
                    allow_headers=("Authorization", "Content-Type"),
                ),
            ],
            exception_handlers={HTTPException: _of_http, ApiError: _of_error, Exception: _of_bug},
        )

    def end_all(self, error: ApiError) -> None:
        """Ends whatever is being answered with an error."""
        for job in list(self.jobs):
            job.fail(error)

    # The routes.

    async def _health(self, _: Request) -> Response:
        if self.thread.fault is not None:
            raise ApiError(FAULT, status=500, code="device_fault")
        self._check_taking()
        return _json({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._described]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["model"] != self.settings.name:
            raise ApiError(f"only {self.settings.name!r} is served here.", status=404, code="model_not_found")
        return _json(self._described)

    def _guarded(self, route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            key = self.settings.api_key
            given = request.headers.get("authorization", "")
            if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                raise ApiError(
                    "the API key is missing or wrong: Authorization: Bearer KEY.", status=401, code="invalid_api_key"
                )
            return await route(request)

        return guarded

    def _check_taking(self) -> None:
        if self.draining:
            raise ApiError("this server is about to end and takes no more requests.", status=503, code="draining")

    # From a body to its answer.

    async def _answer(self, make: "MakeJob", request: Request) -> Response:
        since = time.monotonic()
        self._check_taking()
        body = await _body(request)
        came = Came(since, asyncio.get_running_loop(), request.client)
        # A template, a tokenizer or many rows may take a while; others are answered meanwhile.
        job = await asyncio.to_thread(make, body, came)
        self._check_taking()
        self.jobs.add(job)
        try:
            await self.thread.admit(job.ticket)
        except BaseException as error:
            self.jobs.discard(job)
            if isinstance(error, UserError):
                raise ApiError(str(error), param=job.param) from error
            if isinstance(error, Overloaded):
                message = "too many requests wait already. Try again later."
                raise ApiError(message, status=429, code="overloaded") from error
            if isinstance(error, Fault):
                raise ApiError(FAULT, status=500, code="device_fault") from error
            raise
        return Reply(job)


@dataclasses.dataclass(frozen=True)
class Came:
    """How a body came.

    Attributes:
      since: When, by `time.monotonic`.
      home: The event loop that answers it.
      client: Its address.
    """

    since: float
    home: asyncio.AbstractEventLoop
    client: tuple[str, int] | None


MakeJob = Callable[[bytes, Came], "Job"]
"""Reads a body; raises ApiError for what is wrong in it. Runs in some thread."""


class Server(Service):
    """A language model behind HTTP.

    Args:
      writer: The model's tokenizer, and how prompts begin and end.
      loop: Continues requests.
      settings: See there.
      failed: Called, in some thread, when the loop has failed.
    """

    def __init__(
        self,
        writer: Writer,
        loop: engine.Loop,
        settings: ServerSettings,
        *,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.writer = writer
        self.longest = min(loop.max_positions, settings.longest or loop.max_positions)
        routes: dict[str, MakeJob] = {
            "/v1/completions": functools.partial(self._job, protocol.read_completion),
            "/v1/chat/completions": functools.partial(self._job, protocol.read_chat),
        }
        super().__init__(loop, settings, routes=routes, described={"max_model_len": self.longest}, failed=failed)

    def _job(self, read: Callable[[bytes, str], Asked], body: bytes, came: Came) -> "Job":
        writer, asked = self.writer, read(body, self.settings.name)
        most = self.settings.max_queue + self.settings.slots
        if len(asked.prompts) > most or len(asked.prompts) * asked.n > max(most, protocol.MOST_SAMPLES):
            raise ApiError(
                f"prompt has {len(asked.prompts)} entries, continued {asked.n} times each: at most {most} entries and "
                f"{max(most, protocol.MOST_SAMPLES)} continuations fit into one request. Send several.",
                param="prompt",
            )
        try:
            prompts = [self._prepared(prompt) for prompt in asked.prompts]
            if asked.messages is not None:
                prompts = [self._chat_prompt(asked)]
        except UserError as error:
            raise ApiError(str(error), param="messages" if asked.messages else "prompt") from error
        texts, ids = writer.split_stops(asked.stop)
        requests = [
            engine.Request(
                prompt=prompt.ids,
                # Where the prompt leaves no room, the loop says so.
                max_tokens=max(self.longest - len(prompt.ids), 1) if asked.max_tokens is None else asked.max_tokens,
                sampling=asked.sampling,
                samples=asked.n,
                stop=ids,
                logprobs=asked.logprobs,
                prompt_logprobs=asked.logprobs if asked.echo else None,
            )
            for prompt in prompts
        ]
        answer = Answer(
            asked,
            prompts,
            model=self.settings.name,
            tokenizer=writer.tokenizer,
            streams=(writer.stream_after(prompt.ids) for prompt in prompts for _ in range(asked.n)),
            stops=texts,
        )
        return TextJob(self, asked, requests, answer, came)

    def _prepared(self, prompt: str | tuple[int, ...]) -> PreparedPrompt:
        if isinstance(prompt, str):
            return PreparedPrompt(prompt, tuple(self.writer.encode(prompt)))
        vocabulary = self.writer.tokenizer.vocabulary
        for token in prompt:
            if not 0 <= token < vocabulary:
                raise UserError(f"prompt has token {protocol.show(token)}, but ids lie in 0 to {vocabulary - 1}.")
        return PreparedPrompt(self.writer.tokenizer.decode(prompt, specials="show"), prompt)

    def _chat_prompt(self, asked: Asked) -> PreparedPrompt:
        render = getattr(self.writer.tokenizer, "render_chat", None)
        if render is None:
            raise UserError("this model's tokenizer has no chat template. Use /v1/completions.")
        text = render(asked.messages, now=datetime.datetime.now())
        # The template has written what begins a text.
        return PreparedPrompt(text, tuple(self.writer.tokenizer.encode(text, specials="parse").tolist()))


class Job(abc.ABC):
    """A body that is being answered; all methods run on the event loop.

    Args:
      service: What answers it.
      requests: What the loop is asked for.
      came: See there.
      param: The field that is named where the loop refuses the requests.
      stream: Whether events are sent as they come.

    Attributes:
      ticket: What the loop is asked for.
    """

    def __init__(
        self, service: Service, requests: Sequence[engine.AnyRequest], came: Came, *, param: str, stream: bool = False
    ) -> None:
        self.param, self.stream = param, stream
        self.ticket = Ticket(requests, self._take, self._fault, came.home, came.since)
        self._service, self._client, self._since = service, came.client, came.since
        self._events = bytearray()  # that were not sent
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self._over = False

    def fail(self, error: ApiError) -> None:
        """Ends with an error, if it has not ended."""
        if self._over:
            return
        self._error = error
        self._put(dump(error.body))
        self._end()

    def close(self) -> None:
        """Whatever happened to the client: nothing is done for it any more."""
        if not self._over:
            self._end()
        self._service.jobs.discard(self)

    async def events(self) -> AsyncIterator[bytes]:
        """Those of the stream as they come, all that wait together: to a client that has left one write is enough."""
        while True:
            if not self._events:
                if self._over:
                    return
                self._news.clear()
                await self._news.wait()
                continue
            events, self._events = self._events, bytearray()
            yield bytes(events)

    async def whole(self) -> tuple[int, bytes]:
        """Status and body of an answer that is no stream."""
        while not self._over:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            return self._error.status, dump(self._error.body)
        return 200, dump(self._found())

    @abc.abstractmethod
    def _add(self, place: int, chunk: Any) -> None:
        """Takes what a step brought to the request at `place`."""

    @abc.abstractmethod
    def _found(self) -> object:
        """The JSON of the whole answer."""

    @abc.abstractmethod
    def _unended(self) -> int:
        """What is counted as ended when the job ends before it."""

    def _take(self, place: int, chunk: Any) -> None:
        if self._over:
            return
        try:
            self._add(place, chunk)
        except Exception:
            log.exception("an answer could not be made")
            self.fail(ApiError("the answer could not be made.", status=500, code="internal_error"))

    def _fault(self, _: Fault) -> None:
        """The loop has failed."""
        self.fail(ApiError(FAULT, status=500, code="device_fault"))

    def _put(self, data: bytes) -> None:
        if not self.stream:
            return
        if len(self._events) > LARGEST_BUFFER:
            self._end()
            if self._client is not None:
                self._service.abort(self._client)
            return
        self._events += b"data: " + data + b"\n\n"
        self._news.set()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._news.set()
        for _ in range(self._unended()):
            self._service.metrics.ended("abort" if self._error is None else "error")
        self._service.metrics.request_s.observe(time.monotonic() - self._since)
        self._service.thread.cancel(self.ticket)


class TextJob(Job):
    """One whose answer grows."""

    def __init__(
        self, server: Server, asked: Asked, requests: Sequence[engine.Request], answer: Answer, came: Came
    ) -> None:
        param = "messages" if asked.messages else "prompt"
        super().__init__(server, requests, came, param=param, stream=asked.stream)
        self._answer = answer
        self._last: dict[int, float] = {}  # when a continuation had its last tokens

    def _add(self, place: int, chunk: engine.Chunk) -> None:
        choice = self._answer.take(place, chunk)
        if choice is None:
            return None
        self._measure(choice.index, chunk)
        if choice.ended is not None:
            self._service.metrics.ended(choice.ended)
            if choice.ended == "error" and not self.stream:
                return self.fail(broken(choice.message))
        if self.stream:
            for event in self._answer.events(choice):
                self._put(dump(event))
        if self._over:  # its client does not read
            return None
        if choice.ended is not None and chunk.ended is None:
            self._service.thread.cancel(self.ticket, place, chunk.sample)
        if self._answer.done:
            for event in self._answer.last_events() if self.stream else ():
                self._put(dump(event))
            self._put(b"[DONE]")
            self._end()
        return None

    def _found(self) -> object:
        return self._answer.whole()

    def _unended(self) -> int:
        return sum(choice.ended is None for choice in self._answer.choices)

    def _measure(self, index: int, chunk: engine.Chunk) -> None:
        if not chunk.tokens:
            return
        now = time.monotonic()
        before = self._last.get(index)
        if before is None and not self._last:
            self._service.metrics.first_token_s.observe(now - self._since)
        elif before is not None:
            for _ in chunk.tokens:
                self._service.metrics.between_tokens_s.observe((now - before) / len(chunk.tokens))
        self._last[index] = now


class Reply(Response):
    """Sends the answer of a job, and ends the job when its client is gone."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        sending = asyncio.ensure_future(self._stream(send) if self._job.stream else self._whole(send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._job.close()
            for task in (gone, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _whole(self, send: Send) -> None:
        status, body = await self._job.whole()
        await _json(body, status)(_NO_SCOPE, _never, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in self._job.events():
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_NO_SCOPE: dict[str, Any] = {"type": "http"}


async def _never() -> Any:
    raise AssertionError("an answer reads nothing")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """What a client sends, up to the limit; of more, some is read so that the client hears why it is refused."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A page of another site can make a browser send a form, but not JSON without being asked first.
        raise ApiError(
            "the body must be JSON: Content-Type: application/json.", status=415, code="invalid_content_type"
        )
    found, size = bytearray(), 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size <= protocol.LARGEST_BODY:
                found += piece
            elif size > 16 * protocol.LARGEST_BODY:
                break
    except ClientDisconnect as error:
        raise ApiError("the body did not come whole.") from error
    if size > protocol.LARGEST_BODY:
        most = protocol.LARGEST_BODY >> 20
        raise ApiError(f"the body is larger than {most} MiB. Send less.", status=413, code="body_too_large")
    return bytes(found)


def _json(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = data if isinstance(data, bytes) else dump(data)
    return Response(body, status, headers, media_type="application/json")


async def _of_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refusal(error)


def _refusal(error: ApiError) -> Response:
    headers = {429: {"Retry-After": str(_RETRY_S)}, 401: {"WWW-Authenticate": "Bearer"}}
    return _json(error.body, error.status, headers.get(error.status))


async def _of_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(ApiError(str(error.detail), status=error.status_code).body, error.status_code, error.headers)


async def _of_bug(_: Request, error: Exception) -> Response:
    del error  # the server's log has it
    return _json(ApiError("a failure of the server.", status=500, code="internal_error").body, 500)
