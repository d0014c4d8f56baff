"""Continues many sequences at once: which of them are read, generated for, or wait (continuous batching).

A step is one piece of a prompt, of at most PIECE tokens of one or of several rows, and one block of tokens for all rows
that are read: of up to BLOCK, and not past the next row to finish. Where clients wait for tokens a block has as many as
fit `block_s` by the time that a token took in the last one, and one where a row is new or a prompt is being read. Rows
that have finished leave their slot, and those that wait enter. Where units run out the youngest is put back; it is read
again later, with the tokens that it had.
"""

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from scalejax import chips, nn
from scalejax.errors import UserError, check_at_least
from scalejax.inference import programs, sampling
from scalejax.inference.pages import Held, OutOfUnits, Places, Pool
from scalejax.inference.requests import Chunk, Request, Stats, TokenLogprobs
from scalejax.inference.steps import Steps
from scalejax.models.llm.architecture import LanguageConfig
from scalejax.nn.pages import KV_FORMATS, KvFormat
from scalejax.parallel import context_choice
from scalejax.parallel import mesh as meshes
from scalejax.parallel.context_choice import ContextCosts, Passed
from scalejax.train import distributed
from scalejax.train.state import Params

PIECE = 512
"""Tokens that are read at once, at most, for each device along `context`."""

LENGTHS = (32, 128, 512)
"""Of a row of a piece, for each device along `context`."""

PAGES = (16, 32, 64, 128)
"""Places that a page may have."""

CALIBRATION = 512
"""Random tokens after which the scales of float8 are set."""

BLOCK_S = 0.04
"""Seconds of a block where somebody reads along: tokens that come 25 times a second look steady."""

SCORED = 2048
"""Tokens of prompts that are scored in one step, at most, unless one prompt has more; and no more than the longest."""

_SCORES = 4
"""A cache leaves at most one part in so many of the memory to scores of prompts; what needs more is refused."""

_SPARE_MEMORY = 0.9
"""Share of the memory beside the parameters that a cache may take where nobody says how long it is."""


Choose = Callable[[int, int], Passed]
"""(new tokens, cached tokens) -> what goes round the devices along `context` when they are read."""


class LoadedModel(Protocol):
    """What a loop wants of a model on devices; `generate.Engine` is one."""

    @property
    def config(self) -> LanguageConfig: ...

    @property
    def params(self) -> Params: ...

    @property
    def choices(self) -> int | None:
        """Ids below this may be generated; None = all."""
        ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def programs(self) -> programs.Programs: ...

    @property
    def held_bytes(self) -> int:
        """Of the parameters on each device."""
        ...

    def check(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, least: int = 1) -> None:
        """Refuses prompts that are empty, too long or of other ids."""
        ...

    def device_bytes(self, array: jax.ShapeDtypeStruct, sharding: Sharding) -> int:
        """Of an array on each device."""
        ...

    def check_memory(self, needed: int, what: str) -> None:
        """Refuses what cannot be on a device."""
        ...


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One continuation.

    Attributes:
      number: Of its request.
      sample: Its number among those of the request.
      request: What was asked for.
      tokens: Those of the prompt and the new ones.
      followers: Samples that go on from the same prompt as soon as it is read.
      held: Its units.
      slot: Where it runs; None = it waits.
      reused: Tokens of the prompt that were not read for it.
    """

    number: int
    sample: int
    request: Request
    tokens: list[int]
    followers: list[int]
    held: Held = dataclasses.field(default_factory=Held)
    slot: int | None = None
    reused: int = 0

    @property
    def made(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_read(self) -> bool:
        return self.held.count == len(self.tokens)


class Scheduler:
    """A `requests.Loop` on the programs of an engine; it owns a cache.

    Attributes:
      engine: The model.
      max_positions: See `requests.Loop`.
      vocabulary: See `requests.Loop`.
      steps: What it does on devices. Of several processes each makes a loop, and one drives it, see `processes`.
    """

    def __init__(
        self,
        engine: LoadedModel,
        *,
        slots: int,
        pages: nn.PageShape,
        choose: Choose | None = None,
        block_s: float = math.inf,
        scored_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the cache.

        Args:
          engine: The model.
          slots: Continuations that run at once, a multiple of the devices that have pages of their own.
          pages: Size of the cache, those of all devices.
          choose: What goes round the devices along `context`; None = `default_choice`.
          block_s: Seconds that a block of tokens may take, see `make_loop`.
          scored_tokens: Of a prompt whose tokens can be scored, see `make_loop`.
          clock: Tells seconds.
        """
        self.engine = engine
        self._block_s, self._clock, self._scored_tokens = block_s, clock, scored_tokens
        self._token_s = 0.0  # of a token of all rows, by the last block
        self._choose = choose or default_choice(engine)
        self.vocabulary = engine.config.vocabulary or 0
        own = self._programs = engine.programs
        self._groups = own.groups
        self._places = Places(pages.page, own.ranks)
        self._unit = pages.page * own.ranks
        self._units = pages.pages // (own.groups * own.ranks)
        # With a window a sequence gives back what it does not see.
        room = self._units * self._unit if engine.config.window is None else engine.config.max_positions
        self.max_positions = min(engine.config.max_positions, room)
        self._lengths = tuple(length * own.ranks for length in LENGTHS)
        identity = f"{engine.config!r} {pages.format}"
        self._pools = [Pool(self._units, self._unit, identity, engine.config.window) for _ in range(own.groups)]
        self.steps = Steps(own, engine.params, slots=slots, pages=pages)
        if pages.format == "float8":
            count = min(CALIBRATION, self.max_positions)
            some = np.random.default_rng(0).integers(0, engine.choices or self.vocabulary, (1, count), np.int32)
            self.steps.calibrate(some)
        self._slots: list[_Sequence | None] = [None] * slots
        self._rows = sampling.RowSampling.greedy(slots)
        self._waiting: collections.deque[_Sequence] = collections.deque()
        self._numbers = itertools.count()
        self._queries = self._hits = self._read = self._generated = self._put_back = 0
        self._warm = 0

    # What whoever drives it calls.

    def check(self, request: Request) -> None:
        """See `requests.Loop`."""
        least = 1 if request.prompt_logprobs is None else 0
        self.engine.check([request.prompt], request.max_tokens, least=least)
        check_at_least("samples", request.samples, 1)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(request, name)
            if asked is not None and not 0 <= asked <= sampling.TOP:
                raise UserError(f"{name} must be from 0 to {sampling.TOP}; got {asked}.")
        if request.prompt_logprobs is not None:
            self._programs.check_likelihoods()
            if self._scored_tokens is not None and len(request.prompt) > self._scored_tokens:
                raise UserError(
                    f"the prompt has {len(request.prompt):,} tokens, but there is memory for scores of "
                    f"{self._scored_tokens:,} at once. Score parts of it."
                )
        needed, room = len(request.prompt) + request.max_tokens, self._units * self._unit
        if (window := self.engine.config.window) is not None:
            at_once = window + max(self._lengths[-1], programs.BLOCK) + 2 * self._unit
            if min(needed, at_once) > room:
                raise UserError(
                    f"the model's window has {window:,} tokens, for which a cache needs {at_once:,} tokens: it has "
                    f"room for {room:,}. Ask for fewer tokens, or make the cache larger."
                )
        elif needed > room:
            raise UserError(
                f"the prompt has {len(request.prompt):,} tokens, and {request.max_tokens:,} more make {needed:,}: the "
                f"cache has room for {room:,}. Shorten it, or ask for fewer tokens."
            )

    def submit(self, request: Request) -> int:
        """See `requests.Loop`."""
        self.check(request)
        return self.submit_samples(request, range(request.samples))

    def submit_samples(self, request: Request, numbers: Sequence[int]) -> int:
        """The same for samples of these numbers, of a request that was checked."""
        number = next(self._numbers)
        first, *others = numbers
        self._waiting.append(_Sequence(number, first, request, [*request.prompt], others))
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """See `requests.Loop`."""

        def gone(one: _Sequence) -> bool:
            return one.number == number and sample in (None, one.sample)

        self._waiting = collections.deque(one for one in self._waiting if not gone(one))
        for one in filter(gone, self._running):
            self._leave(one)

    @property
    def slots(self) -> int:
        """Continuations that run at once."""
        return len(self._slots)

    @property
    def busy(self) -> bool:
        """See `requests.Loop`."""
        return bool(self._waiting) or any(one is not None for one in self._slots)

    @property
    def stats(self) -> Stats:
        """See `requests.Loop`."""
        return Stats(
            running=len(self._running),
            waiting=len({one.number for one in self._waiting} - {one.number for one in self._running}),
            kv_usage=sum(pool.held for pool in self._pools) / (self._units * self._groups),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            prompt_tokens=self._read,
            generation_tokens=self._generated,
            preemptions=self._put_back,
            compilations=self._programs.compiled() - self._warm,
        )

    def step(self) -> list[Chunk]:
        """See `requests.Loop`."""
        chunks = self._scored()
        self._enter()
        self._read_piece()
        return chunks + self._generate()

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compiles every program that a step can want.

        Args:
          progress: Told after each how many there are of how many.
        """
        ways: tuple[Passed, ...] = ("pass_kv", "pass_q") if self._places.ranks > 1 else ("pass_kv",)
        shapes: list[tuple[int, int, Passed]] = [
            (rows, length, passed)
            for length in self._lengths
            for rows in sorted({1, self._most_rows(length)})
            for passed in ways
        ]
        widths = [1 << i for i in range(bucket(self._most_units).bit_length())]
        total, done = len(widths) * (len(shapes) + 1) + 1, 0
        nobody = np.full(len(self._slots), -1, np.int32)
        for width in widths:
            for each, length, passed in shapes:
                rows = each * self._groups
                tokens, last = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
                nothing, outside = np.full_like(tokens, -1), np.full_like(last, len(self._slots))
                table = np.zeros((rows, width), np.int32)
                self.steps.read(tokens, nothing, table, last, last, tokens, outside, passed)
                progress(done := done + 1, total)
            table = np.zeros((len(self._slots), width), np.int32)
            none = np.zeros_like(nobody)
            slots = programs.Slots(self._rows, none, nobody, self._stops([]), table, none, none)
            self.steps.decode(np.int32(1), np.bool_(False), *jax.tree.leaves(slots))
            progress(done := done + 1, total)
        self._fork([], 0)
        progress(total, total)
        self._warm = self._programs.compiled()

    # A step.

    @property
    def _running(self) -> list[_Sequence]:
        return [one for one in self._slots if one is not None]

    @property
    def _most_units(self) -> int:
        return min(self._units, -(-self.max_positions // self._unit))

    def _most_rows(self, length: int) -> int:
        """Rows of a piece of this length in each group."""
        return min(PIECE * self._places.ranks // length, len(self._slots) // self._groups)

    def _group(self, slot: int) -> int:
        return slot // (len(self._slots) // self._groups)

    def _pool(self, one: _Sequence) -> Pool:
        assert one.slot is not None
        return self._pools[self._group(one.slot)]

    def _scored(self) -> list[Chunk]:
        """Log probabilities of some prompts; requests that want no more are over."""
        unscored = [one for one in self._waiting if one.request.prompt_logprobs is not None]
        if not unscored:
            return []
        # Of one length and no more at once, so that others go on.
        length = _scored_length(len(unscored[0].request.prompt))
        alike = [one for one in unscored if _scored_length(len(one.request.prompt)) == length]
        chunks = []
        for one, found in zip(alike, self._likelihoods(alike, length), strict=False):
            over = one.request.max_tokens == 0
            for sample in (one.sample, *one.followers):
                ended = "length" if over else None
                chunks.append(Chunk(one.number, sample, (), prompt_logprobs=found, ended=ended))
            if over:
                self._waiting.remove(one)
            one.request = dataclasses.replace(one.request, prompt_logprobs=None)
        return chunks

    def _likelihoods(self, alike: Sequence[_Sequence], length: int) -> list[tuple[TokenLogprobs | None, ...]]:
        """Of the first of some prompts, as many as fit a step."""
        most = max(1, min(SCORED, _scored_length(self._scored_tokens or SCORED)) // length)
        rows = min(most, len(alike))
        tokens = np.zeros((1 if rows == 1 else most, length), np.int32)
        for row, one in enumerate(alike[:rows]):
            tokens[row, : len(one.request.prompt)] = one.request.prompt
        found = self.steps.likelihoods(tokens)
        return [
            (
                None,
                *(
                    _told(found, (row, at), token, one.request.prompt_logprobs or 0)
                    for at, token in enumerate(one.request.prompt[1:])
                ),
            )
            for row, one in enumerate(alike[:rows])
        ]

    def _enter(self) -> None:
        """Those that wait take slots, in their order, while there are units for what they have to read."""
        while self._waiting:
            free = [slot for slot, one in enumerate(self._slots) if one is None]
            if not free:
                return
            one = self._waiting[0]
            if one.request.prompt_logprobs is not None:
                return
            slot = max(free, key=lambda slot: (self._pools[self._group(slot)].usable, -slot))
            pool = self._pools[self._group(slot)]
            # Of the prompt alone, so that the bits of a continuation do not depend on its neighbours.
            held = pool.find(one.tokens, sampling.digest(one.request.prompt) % self._places.ranks)
            found = held.count
            try:
                pool.grow(held, self._at_first(held, len(one.tokens)))
            except OutOfUnits:
                pool.release(held, one.tokens)
                return
            self._waiting.popleft()
            self._queries += len(one.tokens)
            self._hits += found
            one.held, one.slot, one.reused = held, slot, min(found, len(one.request.prompt))
            self._take_slot(one)

    def _take_slot(self, one: _Sequence) -> None:
        assert one.slot is not None
        self._slots[one.slot] = one
        self._rows.put(one.slot, one.request.sampling, sampling.digest(one.request.prompt), one.sample)

    def _leave(self, one: _Sequence) -> None:
        assert one.slot is not None
        self._pool(one).release(one.held, one.tokens)
        self._slots[one.slot] = None
        self._rows.put(one.slot, sampling.GREEDY, 0, 0)
        one.slot = None

    def _read_piece(self) -> None:
        """The oldest of those that are not read, with others that are as short."""
        unread = sorted((one for one in self._running if not one.is_read), key=lambda one: one.number)
        for one in unread:
            # In turn, so that those that are put back, the youngest, come last and have no slot by then.
            while one.slot is not None and not self._has_room(one, self._at_first(one.held, len(one.tokens))):
                self._put_back_youngest(one)
        unread = [one for one in unread if one.slot is not None]
        if not unread:
            return

        pieces = {id(one): self._next_places(one) for one in unread}

        def fits(one: _Sequence, length: int) -> bool:
            return self._places.width(pieces[id(one)]) <= length

        length = next(length for length in self._lengths if fits(unread[0], length))
        most, by_group = self._most_rows(length), [[] for _ in range(self._groups)]
        for one in unread:
            rows = by_group[self._group(one.slot or 0)]
            if fits(one, length) and len(rows) < most:
                rows.append(one)
        each = most if any(len(rows) > 1 for rows in by_group) else 1
        width = bucket(
            max(
                -(-(one.held.count + len(pieces[id(one)])) // self._unit) - one.held.first
                for rows in by_group
                for one in rows
            )
        )
        shape = (each * self._groups, length)
        tokens, positions, places = (np.full(shape, fill, np.int32) for fill in (0, -1, 0))
        table = np.zeros((shape[0], width), np.int32)
        last, first = np.zeros(shape[0], np.int32), np.zeros(shape[0], np.int32)
        slots = np.full(shape[0], len(self._slots), np.int32)
        for group, rows in enumerate(by_group):
            for row, one in enumerate(rows, group * each):
                begin, own = one.held.count, pieces[id(one)]
                columns = self._places.columns(own, length)
                tokens[row, columns] = one.tokens[begin : begin + len(own)]
                positions[row, columns] = np.arange(begin, begin + len(own))
                places[row, columns] = own
                self._put_units(table[row], one)
                last[row], first[row], slots[row] = columns[-1], one.held.first, one.slot
        read = [*itertools.chain(*by_group)]
        passed = self._choose(sum(len(pieces[id(one)]) for one in read), sum(one.held.count for one in read))
        self.steps.read(tokens, positions, table, last, first, places, slots, passed)
        for one in read:
            count = len(pieces[id(one)])
            self._read += count
            self._pool(one).wrote(one.held, one.tokens, one.held.count + count)
            if one.is_read and one.followers:
                self._spread(one)

    def _next_places(self, one: _Sequence) -> np.ndarray:
        """The places of what can be read of a sequence at once."""
        most = self._lengths[-1]
        count = min(most, len(one.tokens) - one.held.count)
        places = self._places.next(one.held.count, count, one.held.rotation)
        while self._places.width(places) > most:  # where a unit that is not full is filled first
            count -= 1
            places = self._places.next(one.held.count, count, one.held.rotation)
        return places

    def _put_units(self, row: np.ndarray, one: _Sequence) -> None:
        found = one.held.units[: row.size]
        # Behind them one of its own: what another row has there may not be finite.
        row[:] = found[0]
        row[: len(found)] = found

    def _spread(self, one: _Sequence) -> None:
        """Further samples of a prompt that is read share its units; those that find no slot wait in front."""
        assert one.slot is not None
        group, pool = self._group(one.slot), self._pool(one)
        free = [slot for slot, other in enumerate(self._slots) if other is None and self._group(slot) == group]
        begun: list[tuple[_Sequence, tuple[int, int] | None]] = []
        later = []
        for sample in one.followers:
            other = _Sequence(one.number, sample, one.request, [*one.tokens], [])
            try:
                if not free:
                    raise OutOfUnits
                other.held, copy = pool.share(one.held)
            except OutOfUnits:
                later.append(other)
                continue
            other.slot = free.pop(0)
            self._queries += len(one.tokens)
            self._hits += len(one.tokens)
            other.reused = len(one.tokens)
            self._take_slot(other)
            begun.append((other, copy))
        one.followers = []
        self._waiting.extendleft(reversed(later))
        if begun:
            self._fork(begun, one.slot)

    def _fork(self, begun: Sequence[tuple[_Sequence, tuple[int, int] | None]], slot: int) -> None:
        count = len(self._slots)
        slots = np.full((2, count), count, np.int32)
        source = np.zeros((self._groups, count), np.int32)
        target = np.full_like(source, self._units)
        for at, (other, copy) in enumerate(begun):
            assert other.slot is not None
            slots[:, at] = slot, other.slot
            if copy is not None:
                group = self._group(other.slot)
                source[group, at], target[group, at] = copy[0], copy[1]
        slots[0] = np.minimum(slots[0], count - 1)
        self.steps.fork(slots, source, target)

    def _generate(self) -> list[Chunk]:
        """A block of tokens for all that are read."""
        ready = [one for one in self._running if one.is_read]
        if not ready:
            return []
        limit = min(self._block(ready), *(one.request.max_tokens - one.made for one in ready))
        ready, limit = self._with_room(ready, limit)
        if not ready:
            return []
        count = len(self._slots)
        made, positions, first, rotations = (np.full(count, fill, np.int32) for fill in (0, -1, 0, 0))
        table = np.zeros((count, bucket(max(len(one.held.units) for one in ready))), np.int32)
        for one in ready:
            made[one.slot], positions[one.slot] = one.made, len(one.tokens)
            first[one.slot], rotations[one.slot] = one.held.first, one.held.rotation
            self._put_units(table[one.slot], one)
        told = any(one.request.logprobs is not None for one in ready)
        slots = programs.Slots(self._rows, made, positions, self._stops(ready), table, first, rotations)
        begin = self._clock()
        block = self.steps.decode(np.int32(limit), np.bool_(told), *jax.tree.leaves(slots))
        self._token_s = (self._clock() - begin) / max(int(block.count), 1)
        made_now, ended, tokens = int(block.count), np.asarray(block.ended), np.asarray(block.tokens)
        likelihoods = block.likelihoods if told else None
        return [
            self._took(one, tokens[one.slot, :made_now].tolist(), int(ended[one.slot]), likelihoods) for one in ready
        ]

    def _block(self, ready: Sequence[_Sequence]) -> int:
        """Tokens of the next block of these rows."""
        if len(ready) < len(self._running):  # a prompt is being read
            return 1
        if math.isinf(self._block_s):
            return programs.BLOCK
        if any(one.made == 0 for one in ready):
            return 1
        return max(1, int(min(self._block_s / max(self._token_s, 1e-9), programs.BLOCK)))

    def _took(self, one: _Sequence, new: list[int], why: int, likelihoods: sampling.Likelihoods | None) -> Chunk:
        """What a block brought to a sequence."""
        if why:
            new = new[:-1]
        logprobs = ()
        if one.request.logprobs is not None and likelihoods is not None:
            top = one.request.logprobs
            logprobs = tuple(_told(likelihoods, (one.slot or 0, at), token, top) for at, token in enumerate(new))
        one.tokens += new
        self._generated += len(new)
        self._pool(one).wrote(one.held, one.tokens, len(one.tokens))
        ended, message = None, ""
        if why == programs.BROKEN:
            ended, message = "error", NOT_FINITE
        elif why == programs.STOPPED:
            ended = "stop"
        elif one.made == one.request.max_tokens:
            ended = "length"
        if why == programs.BROKEN:
            self._pool(one).discard(one.held)
        if ended:
            self._leave(one)
        return Chunk(
            one.number, one.sample, tuple(new), logprobs, ended=ended, message=message, reused=one.reused
        )  # fmt: skip

    def _with_room(self, ready: list[_Sequence], limit: int) -> tuple[list[_Sequence], int]:
        """Units for so many more tokens of each, for one where there are not so many; else the youngest make room."""
        while ready:
            for count in sorted({limit, 1}, reverse=True):
                try:
                    for one in ready:
                        self._pool(one).grow(one.held, len(one.tokens) + count)
                except OutOfUnits:
                    continue
                return ready, count
            # Of the group whose pool is short; it may be one that still reads its prompt.
            short = next(one for one in ready if not self._has_room(one, len(one.tokens) + 1))
            self._put_back_youngest(short)
            ready = [one for one in ready if one.slot is not None]
        return ready, limit

    def _has_room(self, one: _Sequence, count: int) -> bool:
        """Whether a sequence has units for so many tokens, now."""
        try:
            self._pool(one).grow(one.held, count)
        except OutOfUnits:
            return False
        return True

    def _put_back_youngest(self, short: _Sequence) -> None:
        """Of those that share a pool with one that is short of units."""
        group = self._group(short.slot or 0)
        youngest = max(
            (one for one in self._running if self._group(one.slot or 0) == group),
            key=lambda one: (one.number, one.sample),
        )
        self._leave(youngest)
        self._put_back += 1
        self._waiting.appendleft(youngest)

    def _at_first(self, held: Held, count: int) -> int:
        """Of so many tokens, those for which a sequence must have units to begin: with a window it gives some back."""
        return count if self.engine.config.window is None else min(count, held.count + self._lengths[-1])

    def _stops(self, ready: Sequence[_Sequence]) -> np.ndarray:
        """int32[slots, n]."""
        longest = max((len(one.request.stop) for one in ready), default=0)
        stops = np.full((len(self._slots), max(8, bucket(longest))), -1, np.int32)
        for one in ready:
            stops[one.slot, : len(one.request.stop)] = one.request.stop
        return stops


NOT_FINITE = (
    "the model's logits are not finite, so no token can be chosen. In float16 activations of many models overflow: "
    "choose --dtype bfloat16 or float32."
)


def default_choice(engine: LoadedModel) -> Choose:
    """Algorithm 5 of `context_choice` with the peaks of the chip; the smaller message where it is not known."""
    config, device = engine.config, engine.mesh.devices.flat[0]
    chip = chips.for_device_kind(device.device_kind)
    if chip is None:
        return functools.partial(context_choice.smaller_message, config.heads, config.kv_heads)
    dtype = jnp.dtype(engine.programs.compute_dtype)
    costs = ContextCosts(
        ranks=engine.programs.ranks,
        heads=config.heads,
        kv_heads=config.kv_heads,
        element_bytes=dtype.itemsize,
        flops_per_s=chip.matmul_flops_per_s(str(dtype)),
        bytes_per_s=chip.link_bytes_per_s,
    )
    return functools.partial(context_choice.by_message_and_return, costs)


def make_loop(
    engine: LoadedModel,
    *,
    slots: int = 8,
    kv_tokens: int | None = None,
    page: int = 64,
    kv_dtype: KvFormat = "compute",
    choose: Choose | None = None,
    block_s: float = math.inf,
    scored_tokens: int | None = None,
) -> Scheduler:
    """A loop with a cache of its own.

    Args:
      engine: The model on its devices.
      slots: Continuations that run at once; at least one for each group of devices with rows of its own.
      kv_tokens: Tokens that the cache has room for, all devices together; None = as many as the slots can have, or as
        the memory beside the parameters holds.
      page: Places of a page: 16, 32, 64 or 128.
      kv_dtype: How keys and values are stored, see `nn.pages`.
      choose: What goes round the devices along `context`, for instance a `context_choice.FittedChoice.choose`; None =
        `default_choice`.
      block_s: Seconds that a block of tokens may take, by the time of the last one, where somebody reads along:
        BLOCK_S. New rows then have a block of one token, so that the first does not wait for others.
      scored_tokens: Of the longest prompt whose tokens may be scored, for which memory is left: at most a quarter of
        what a cache of no given size would have, or what one of `kv_tokens` leaves. What is longer than fits is refused
        when it is asked for. None = of any length, for which nothing is left.

    Raises:
      UserError: an argument is out of range, or the cache does not fit the devices.
    """
    check_at_least("slots", slots, 1)
    if page not in PAGES:
        raise UserError(f"page must be {', '.join(map(str, PAGES))}; got {page}.")
    if kv_dtype not in KV_FORMATS:
        raise UserError(f"kv_dtype must be {', '.join(KV_FORMATS)}; got {kv_dtype}.")
    # Each device has pages of its own, and each along `context` decodes for slots of its own.
    devices = engine.programs.groups * engine.programs.ranks
    slots = -(-slots // devices) * devices
    each = -(-engine.config.max_positions // (page * engine.programs.ranks)) * engine.programs.ranks
    wanted = slots * each if kv_tokens is None else devices * -(-kv_tokens // (page * devices))

    def bytes_of(count: int) -> int:
        cache = engine.programs.cache(nn.PageShape(count, page, kv_dtype))
        shardings = engine.programs.cache_shardings(cache)
        return sum(jax.tree.leaves(jax.tree.map(engine.device_bytes, cache, shardings)))

    limit = meshes.device_memory_bytes(engine.mesh)
    if limit is not None:
        room = int((limit - engine.held_bytes) * _SPARE_MEMORY)
        if scored_tokens is not None:
            # One number for all processes: what one compiles, all have to.
            most = distributed.broadcast(room // _SCORES if kv_tokens is None else room - bytes_of(wanted))
            scored_tokens, scores = _scored_in(engine, scored_tokens, most)
            room -= scores
        if kv_tokens is None:
            wanted = max(devices, min(wanted, room // max(1, bytes_of(devices)) * devices))
    wanted = distributed.broadcast(wanted)  # machines may have memory of different sizes
    pages = nn.PageShape(wanted, page, kv_dtype)
    engine.check_memory(engine.held_bytes + bytes_of(wanted), f"the parameters and a cache of {wanted * page:,} tokens")
    return Scheduler(engine, slots=slots, pages=pages, choose=choose, block_s=block_s, scored_tokens=scored_tokens)


def _scored_in(engine: LoadedModel, longest: int, room: int) -> tuple[int, int]:
    """How long a prompt can be whose scores fit some bytes, and how many they take; 0, 0 where none can be scored."""
    length = _scored_length(longest)
    while length >= LENGTHS[0]:
        try:
            needed = engine.programs.likelihood_bytes(engine.params, 1, length)
        except UserError:  # the model cannot do without later tokens
            break
        if needed <= room:
            return min(length, longest), needed
        length //= 2
    return 0, 0


def _scored_length(tokens: int) -> int:
    """Of the rows in which a prompt is scored."""
    return bucket(max(tokens, LENGTHS[0]))


def _told(found: sampling.Likelihoods, at: tuple[int, ...], token: int, top: int) -> TokenLogprobs:
    pairs = zip(found.ids[at][:top].tolist(), found.values[at][:top].tolist(), strict=True)
    return TokenLogprobs(token, float(found.chosen[at]), tuple(pairs))


def bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length() if count > 1 else 1
