"""A model whose next token is a hash of those before it, which it finds in the pages of a cache as a real one does.

So a loop can be tried without a device or a program: a page that is missing, or that holds tokens of another sequence,
fails at once or gives other tokens than `continued`.
"""

import dataclasses
import types
import zlib

import numpy as np

from scalejax.inference import loop, sampling
from scalejax.inference.programs import BLOCK, STOPPED, TokenBlock
from scalejax.nn import PageShape

VOCABULARY = 50


def next_token(seen, made, drawn):
    """Of the tokens that are seen, how many were made, and what draws them: temperature, seed, digest and sample."""
    salt = zlib.crc32(repr((made, drawn)).encode()) if drawn[0] else 0
    return zlib.crc32(np.asarray(seen, "<i4").tobytes(), salt) % VOCABULARY


def continued(prompt, count, window=None, chosen=sampling.GREEDY, sample=0):
    """What a prompt is continued with where it is alone."""
    drawn = (chosen.temperature, chosen.seed, sampling.digest(prompt), sample)
    text = [*prompt]
    for made in range(count):
        text.append(next_token(text[-window if window else 0 :], made, drawn))
    return tuple(text[len(prompt) :])


class Pages:
    """The state on the device: texts in the place of logits, and tokens in that of keys and values."""

    def __init__(self, slots, pages, window):
        self.window = window
        self.texts = [()] * slots
        self.cells = np.full((pages.pages, pages.page, 2), -1)  # position, token
        self.read_tokens = 0

    def write(self, table, first, position, token):
        page = self.cells.shape[1]
        self.cells[table[position // page - first], position % page] = position, token

    def seen(self, table, first, position):
        """The tokens that the one at a position sees, itself the last."""
        page, count = self.cells.shape[1], position + 1
        at = np.arange(max(0, count - (self.window or count)), count)
        number = at // page - first
        assert (number >= 0).all()
        positions, tokens = self.cells[table[number], at % page].T
        np.testing.assert_array_equal(positions, at)
        return tokens


@dataclasses.dataclass(frozen=True)
class FakePrograms:
    """In the place of `programs.Programs`, of one device."""

    window: int | None = None
    groups: int = 1
    ranks: int = 1

    def compiled(self):
        return 0

    def empty(self, slots, pages):
        return Pages(slots, pages, self.window)

    def read(self, params, tokens, reading, slots, state):
        rows = [row for row, slot in enumerate(slots) if slot < len(state.texts)]
        for row in rows:
            own = reading.positions[row] >= 0
            for position, token in zip(reading.positions[row][own], tokens[row][own], strict=True):
                state.write(reading.table[row], reading.first[row], position, token)
            state.read_tokens += own.sum()
        for row in rows:
            last = reading.positions[row, reading.last[row]]
            state.texts[slots[row]] = state.seen(reading.table[row], reading.first[row], last)
        return state

    def decode(self, params, state, slots, limit, told):
        rows, count = slots.sampling, 0
        tokens, ended = np.zeros((len(state.texts), BLOCK), np.int32), np.zeros(len(state.texts), np.int32)
        while count < limit and not ended.any():
            for slot in np.flatnonzero(slots.positions >= 0):
                drawn = tuple(x[slot].item() for x in (rows.temperature, rows.seed, rows.digest, rows.sample))
                tokens[slot, count] = next_token(state.texts[slot], int(slots.made[slot]) + count, drawn)
                if tokens[slot, count] in slots.stops[slot]:
                    ended[slot] = STOPPED
                    continue
                where = slots.table[slot], slots.first[slot], slots.positions[slot] + count
                state.write(*where, tokens[slot, count])
                state.texts[slot] = state.seen(*where)
            count += 1
        return state, TokenBlock(tokens, np.int32(count), ended, None)

    def fork(self, state, slots, source, target):
        texts = [*state.texts]
        for one, other in slots.T:
            if other < len(texts):
                texts[other] = state.texts[one]
        state.texts = texts
        copied = target[0] < len(state.cells)
        state.cells[target[0][copied]] = state.cells[source[0][copied]]
        return state


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    """What a loop asks of an architecture."""

    max_positions: int = 4096
    vocabulary: int = VOCABULARY
    window: int | None = None


def scheduler(*, units, slots, page=16, window=None, **more):
    """A loop of such a model."""
    engine = types.SimpleNamespace(
        config=FakeConfig(window=window),
        params={},
        choices=None,
        programs=FakePrograms(window),
        check=lambda prompts, max_tokens, least=1: None,
    )
    pages, choose = PageShape(units, page), lambda new, cached: "pass_kv"
    return loop.Scheduler(engine, slots=slots, pages=pages, choose=choose, **more)
