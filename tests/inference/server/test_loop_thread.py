"""Requests of one body go into the loop together or not at all, and each hears of its own results."""

import asyncio
import time

import pytest
from fake_loop import TEXT, FakeLoop

from scalejax.errors import UserError
from scalejax.inference.requests import Request
from scalejax.inference.server.loop_thread import LoopThread, Overloaded, Ticket

GOOD, OTHER, EMPTY, LONG = b"good", b"other", b"", b"a" * 5000


class Body:
    """A ticket, and what it was told."""

    def __init__(self, *prompts, samples=1, max_tokens=3):
        self.requests = [Request(prompt=tuple(p), samples=samples, max_tokens=max_tokens) for p in prompts]
        self.texts = {(place, sample): b"" for place in range(len(prompts)) for sample in range(samples)}
        self.going = set(self.texts)
        self.faults, self.answer = [], None

    def deliver(self, place, chunk):
        self.texts[place, chunk.sample] += bytes(chunk.tokens)
        if chunk.ended is not None:
            self.going.remove((place, chunk.sample))

    async def ask(self, thread):
        home = asyncio.get_running_loop()
        self.ticket = Ticket(self.requests, self.deliver, self.faults.append, home, time.monotonic())
        try:
            await thread.admit(self.ticket)
        except (UserError, Overloaded) as refusal:
            self.answer = refusal

    @property
    def over(self):
        return self.answer is not None or bool(self.faults) or not self.going


def ask(loop, *bodies, slots=8, max_queue=16, max_queue_tokens=1000, cancel=None, **options):
    """Has the thread find all bodies in its inbox at its start, and waits until all are answered."""
    thread = LoopThread(loop, slots=slots, max_queue=max_queue, max_queue_tokens=max_queue_tokens, **options)

    async def all_of_them():
        asked = [asyncio.ensure_future(body.ask(thread)) for body in bodies]
        await asyncio.sleep(0)
        if cancel is not None:
            thread.cancel(*cancel())
        thread.start()
        async with asyncio.timeout(10):
            await asyncio.gather(*asked)
            while not all(body.over for body in bodies):
                await asyncio.sleep(0.001)

    asyncio.run(all_of_them())
    assert thread.stop(10)
    return thread


@pytest.mark.parametrize("wrong", [EMPTY, LONG])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_wrong_request_of_several_refuses_them_all_and_none_is_left_in_the_loop(wrong, place):
    loop, prompts = FakeLoop(), [GOOD, OTHER]
    prompts.insert(place, wrong)
    body, after = Body(*prompts), Body(GOOD)
    ask(loop, body, after)
    assert isinstance(body.answer, UserError)
    assert (body.ticket.numbers, set(body.texts.values())) == ([], {b""})
    assert loop.requests == after.requests
    assert after.answer is None


def test_results_are_told_by_the_place_of_their_request_and_their_sample():
    body = Body(GOOD, b"late", OTHER)
    several = Body(GOOD, OTHER, samples=2)
    ask(FakeLoop(), body, several)
    text = TEXT.encode()
    assert body.texts == {(0, 0): text[:3], (1, 0): text[10:13], (2, 0): text[:3]}
    assert several.texts == {(place, sample): text[sample : sample + 3] for place in (0, 1) for sample in (0, 1)}


def test_all_requests_of_a_body_need_room_in_the_queue():
    loop = FakeLoop(slots=2)
    # Two begin with the next step and may wait besides three others.
    bodies = [Body(GOOD, OTHER, GOOD), Body(OTHER, OTHER, OTHER), Body(GOOD, GOOD), Body(OTHER)]
    ask(loop, *bodies, slots=2, max_queue=3)
    assert [type(body.answer) for body in bodies] == [type(None), Overloaded, type(None), Overloaded]
    assert loop.requests == [*bodies[0].requests, *bodies[2].requests]


def test_the_tokens_of_all_requests_of_a_body_count_in_the_queue():
    bodies = [Body(b"a" * 900), Body(b"a" * 60), Body(b"a" * 60, b"a" * 60), Body(b"a" * 60, b"a" * 20)]
    ask(FakeLoop(slots=1), *bodies, slots=1, max_queue_tokens=150)
    # The first begins with the next step, and 60 wait: 120 more do not fit, and 80 do.
    assert [type(body.answer) for body in bodies] == [type(None), type(None), Overloaded, type(None)]


def test_one_request_of_a_body_is_ended_and_the_others_go_on():
    loop, body = FakeLoop(), Body(GOOD, OTHER, GOOD)
    body.going.remove((1, 0))
    ask(loop, body, cancel=lambda: (body.ticket, 1))
    assert body.texts == {(0, 0): TEXT[:3].encode(), (1, 0): b"", (2, 0): TEXT[:3].encode()}
    assert loop.cancelled == [1]


def test_a_fault_of_the_loop_is_told_once_to_every_body():
    failed, bodies = [], [Body(GOOD, OTHER), Body(GOOD, b"crash", OTHER)]
    thread = ask(FakeLoop(), *bodies, failed=lambda: failed.append(1))
    assert [len(body.faults) for body in bodies] == [1, 1]
    assert (failed, str(thread.fault)) == ([1], "the device is gone")


def test_every_request_of_a_body_begins_once():
    waited = []
    ask(FakeLoop(slots=2), Body(GOOD, OTHER, GOOD), Body(OTHER), slots=2, begun=waited.append)
    assert len(waited) == 4
    assert all(seconds >= 0 for seconds in waited)
