"""The thread that owns the loop of the engine: requests go in through an inbox, chunks come out on event loops.

Between two steps the thread empties the inbox, in order; without anything to do it sleeps. What is admitted is decided
there as well, where the numbers of the loop are exact, so an answer takes a step at most.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from scalejax.errors import UserError
from scalejax.inference.requests import AnyChunk, AnyLoop, AnyRequest, LoopStats

_BATCHES = 8  # results of steps that an event loop may be behind, before the thread waits for it ...
_BEHIND_S = 1.0  # ... so long


class Overloaded(Exception):
    """The queue is full. The same request may be taken later."""


class Fault(Exception):
    """The loop has failed, and nothing will be served any more."""


Deliver = Callable[[int, Any], None]
"""Told the number of a request among those of its ticket, and what came."""


@dataclasses.dataclass(eq=False)
class Ticket:
    """Requests that are taken or refused together.

    Attributes:
      requests: What is asked for.
      deliver: Called on the event loop that admitted them.
      fail: Likewise, once, if the loop fails.
      home: That event loop.
      since: When they came, by `time.monotonic`.
      numbers: Of the loop, while they are in it.
    """

    requests: Sequence[AnyRequest]
    deliver: Deliver
    fail: Callable[[Fault], None]
    home: asyncio.AbstractEventLoop
    since: float
    numbers: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Entry:
    """A request in the loop."""

    ticket: Ticket
    place: int
    left: set[int]  # samples that go on
    begun: bool = False

    @property
    def request(self) -> AnyRequest:
        return self.ticket.requests[self.place]


class LoopThread:
    """See the module.

    Args:
      loop: Owned from `start` on.
      slots: Of the loop: continuations at once.
      max_queue: Requests that may wait.
      max_queue_tokens: Of their sizes together.
      begun: Told how many seconds a request waited, when it begins.
      failed: Told when the loop fails; both are called in the thread.

    Attributes:
      stats: Of the loop after its last step.
      fault: Why the loop failed; None = it did not.
    """

    def __init__(
        self,
        loop: AnyLoop,
        *,
        slots: int,
        max_queue: int,
        max_queue_tokens: int,
        begun: Callable[[float], None] = lambda _: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._slots, self._max_queue, self._max_queue_tokens = slots, max_queue, max_queue_tokens
        self._begun, self._failed = begun, failed
        self._wake = threading.Condition()
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._stopping = False
        self._entries: dict[int, _Entry] = {}  # in the order in which they were taken
        self._room = threading.Semaphore(_BATCHES)
        self._thread = threading.Thread(target=self._run, name="scalejax-loop", daemon=True)
        self.stats: LoopStats = loop.stats
        self.fault: BaseException | None = None

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its step; returns whether it did so in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._room.release()  # nobody may be there to take what it wants to hand out
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def admit(self, ticket: Ticket) -> None:
        """Takes the requests of a ticket into the loop, all or none.

        Raises:
          UserError: one of them can never be served.
          Overloaded: too much waits already.
          Fault: nothing is served any more.
        """
        home = ticket.home
        answer: asyncio.Future[None] = home.create_future()

        def tell(error: Exception | None) -> None:
            if not answer.done():
                answer.set_result(None) if error is None else answer.set_exception(error)

        def act() -> None:
            error: Exception | None = Fault()  # of what is neither taken nor refused
            try:
                if self.fault is None:
                    self._take(ticket)
                    error = None
            except (UserError, Overloaded) as refusal:
                error = refusal
            finally:
                _call(home, tell, error)

        self._post(act)
        try:
            await answer
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise

    def cancel(self, ticket: Ticket, place: int | None = None, sample: int | None = None) -> None:
        """Ends the requests of a ticket, or one of them, or a sample of it: slots are free after the step that runs."""
        self._post(lambda: self._drop(ticket, place, sample))

    # In the thread.

    def _run(self) -> None:
        try:
            while self._ready():
                if self._loop.busy:
                    self._hand_out(self._loop.step())
                self.stats = self._loop.stats
                self._tell_begun()
        except BaseException as error:  # of a device, or a bug: whoever runs the server hears of it
            with self._wake:
                self.fault = error
            self._fail()

    def _ready(self) -> bool:
        """Waits for something to do, and does what is in the inbox; returns whether to go on."""
        with self._wake:
            while not (self._inbox or self._stopping or self._loop.busy):
                self._wake.wait()
            count = len(self._inbox)
        for _ in range(count):
            self._inbox.popleft()()
        return not self._stopping

    def _post(self, act: Callable[[], None]) -> None:
        with self._wake:
            alive = self.fault is None
            if alive:
                self._inbox.append(act)
                self._wake.notify()
        if not alive:
            act()

    def _take(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            self._loop.check(request)
        waiting, tokens = self._queue()
        more = sum(request.size for request in ticket.requests)
        crowded = waiting + len(ticket.requests) > self._max_queue
        if crowded or (waiting > 0 and tokens + more > self._max_queue_tokens):
            raise Overloaded
        for place, request in enumerate(ticket.requests):
            number = self._loop.submit(request)
            ticket.numbers.append(number)
            self._entries[number] = _Entry(ticket, place, set(range(request.samples)))

    def _queue(self) -> tuple[int, int]:
        """Requests that wait longer than for the next step, and the tokens of their prompts: those that came last.

        The number is below 0 where slots stay free.
        """
        stats, entries = self._loop.stats, list(self._entries.values())
        waiting = stats.waiting - max(self._slots - stats.running, 0)
        return waiting, sum(entry.request.size for entry in entries[len(entries) - max(waiting, 0) :])

    def _drop(self, ticket: Ticket, place: int | None, sample: int | None) -> None:
        for number in list(ticket.numbers):
            entry = self._entries.get(number)
            if self.fault is not None or entry is None or place not in (None, entry.place):
                continue
            if sample is not None and sample not in entry.left:  # it ended meanwhile
                continue
            entry.left = set() if sample is None else entry.left - {sample}
            if not entry.left:
                self._forget(number)
            self._loop.cancel(number, sample)

    def _forget(self, number: int) -> None:
        self._entries.pop(number).ticket.numbers.remove(number)

    def _tell_begun(self) -> None:
        waiting = self.stats.waiting
        for entry in list(self._entries.values())[: max(len(self._entries) - waiting, 0)]:
            if not entry.begun:
                entry.begun = True
                self._begun(time.monotonic() - entry.ticket.since)

    def _hand_out(self, chunks: Sequence[AnyChunk]) -> None:
        found: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for chunk in chunks:
            entry = self._entries.get(chunk.request)
            if entry is None or chunk.sample not in entry.left:  # cancelled
                continue
            if not entry.begun:
                entry.begun = True
                self._begun(time.monotonic() - entry.ticket.since)
            ticket, place = entry.ticket, entry.place
            found.setdefault(ticket.home, []).append(lambda t=ticket, p=place, c=chunk: t.deliver(p, c))
            if chunk.ended is not None:
                entry.left.discard(chunk.sample)
            if not entry.left:
                self._forget(chunk.request)
        for home, calls in found.items():
            self._room.acquire(timeout=_BEHIND_S)
            _call(home, self._deliver, calls)

    def _deliver(self, calls: Sequence[Callable[[], None]]) -> None:
        self._room.release()
        for call in calls:
            call()

    def _fail(self) -> None:
        tickets = {id(entry.ticket): entry.ticket for entry in self._entries.values()}
        self._entries.clear()
        for ticket in tickets.values():
            _call(ticket.home, ticket.fail, Fault())
        while self._inbox:  # nobody adds to it any more
            self._inbox.popleft()()
        self._failed()


def _call(home: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed, and nobody listens
        home.call_soon_threadsafe(function, *args)
