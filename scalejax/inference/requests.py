"""What the loop of the engine is asked for, what it answers step by step, and what it offers whoever drives it."""

import dataclasses
from typing import Literal, Protocol

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
      watched: Whoever asks looks for texts to stop at, so tokens come one by one.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: TokenSampling = GREEDY
    samples: int = 1
    stop: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    watched: bool = False


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


class Loop(Protocol):
    """Continues many requests at once, a step at a time. Not safe for threads: one thread owns it.

    Attributes:
      max_positions: Of the model.
      vocabulary: Ids lie in [0, vocabulary).
    """

    max_positions: int
    vocabulary: int

    def check(self, request: Request) -> None:
        """Raises UserError for what can never be served: too long, ids outside of the vocabulary."""
        ...

    def submit(self, request: Request) -> int:
        """Checks a request and takes it; returns its number."""
        ...

    def cancel(self, number: int) -> None:
        """Frees the slots and units of a request at once; it has no more chunks."""
        ...

    def step(self) -> list[Chunk]:
        """One piece of prefill and one block of decode; [] where nothing is to do. Raises what a device raises."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        ...

    @property
    def stats(self) -> Stats: ...
