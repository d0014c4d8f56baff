"""What the loop of the engine is asked for, what it answers step by step, and what it offers whoever drives it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from scalejax.inference.sampling import GREEDY, TokenSampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue.

    Attributes:
      prompt: Token ids.
      max_tokens: New tokens, at most; 0 only with `prompt_logprobs`.
      sampling: How they are chosen.
      samples: Continuations, which share what is read of the prompt.
      stop: Ids that end a continuation and are no part of it.
      logprobs: None: none; n >= 0: of each chosen token and of the n most probable, at most 20.
      prompt_logprobs: The same of the tokens of the prompt.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: TokenSampling = GREEDY
    samples: int = 1
    stop: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def size(self) -> int:
        """See `AnyRequest`."""
        return len(self.prompt)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Of a token, by the model's distribution before the temperature.

    Attributes:
      token: Its id.
      logprob: Its log probability.
      top: (id, log probability), the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What a step of the loop brought to one continuation.

    Attributes:
      request: The number that `submit` returned.
      sample: 0 to samples - 1.
      tokens: New ones.
      logprobs: One a token where they are asked for.
      prompt_logprobs: In the first chunk where they are asked for; None for the first token.
      ended: Why the continuation is over; None = it goes on.
      message: Of an error, such as logits that are not finite.
      reused: Tokens of the prompt that were not read for it, as the cache had them.
    """

    request: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    ended: Literal["stop", "length", "error"] | None = None
    message: str = ""
    reused: int = 0


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of a loop; counters grow from the start of the process.

    Attributes:
      running: Continuations in slots.
      waiting: Requests that have not begun, or were put back.
      kv_usage: Share of the units in use, 0 to 1.
      prefix_queries: Prompt tokens that were looked up.
      prefix_hits: Of these, found in units that were read before.
      prompt_tokens: Read.
      generation_tokens: Generated.
      preemptions: Requests put back for want of units.
      compilations: Programs compiled since the warm-up.
    """

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    compilations: int


class AnyRequest(Protocol):
    """What any loop is asked for."""

    @property
    def size(self) -> int:
        """Of what must be read for it: tokens of a prompt, rows to score."""
        ...

    @property
    def samples(self) -> int:
        """Of its results, each with chunks of its own until one says that it has ended."""
        ...


class AnyChunk(Protocol):
    """What any loop answers, `Chunk` among it."""

    @property
    def request(self) -> int: ...

    @property
    def sample(self) -> int: ...

    @property
    def ended(self) -> str | None: ...


class LoopStats(Protocol):
    """What any loop counts, see `Stats`."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def compilations(self) -> int: ...


class AnyLoop(Protocol):
    """Does what many requests ask for, a step at a time. Not safe for threads: one thread owns it."""

    def check(self, request: Any) -> None:
        """Raises UserError for what can never be served: too long, ids outside of the vocabulary."""
        ...

    def submit(self, request: Any) -> int:
        """Checks a request and takes it; returns its number."""
        ...

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Frees the slots and units of a request at once, or of a sample of it that has begun; no more chunks come."""
        ...

    def step(self) -> Sequence[AnyChunk]:
        """What there is room for; [] where nothing is to do. Raises what a device raises."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        ...

    @property
    def stats(self) -> LoopStats: ...


class Loop(AnyLoop, Protocol):
    """Continues prompts: takes `Request`s, brings `Chunk`s; a step is one piece of prefill and one block of decode.

    Attributes:
      max_positions: Of the model.
      vocabulary: Ids lie in [0, vocabulary).
    """

    max_positions: int
    vocabulary: int

    def step(self) -> Sequence[Chunk]: ...
