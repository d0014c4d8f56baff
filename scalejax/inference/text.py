"""Text continued with a language model and its tokenizer."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from scalejax.data.text.tokenizer import TextStream, Tokenizer, check_vocabulary
from scalejax.errors import UserError
from scalejax.inference import generate
from scalejax.inference.generate import Continuation, Ended, Engine
from scalejax.inference.loop import BLOCK_S, Scheduler, make_loop
from scalejax.inference.sampling import GREEDY, TokenSampling, check_samples
from scalejax.models.llm.model_folder import LanguageModel

_SESSION = 16_384  # tokens that the cache of a conversation has room for, at most
_CONTEXT = 8  # tokens of a prompt on which the text of the next may depend


@dataclasses.dataclass(frozen=True)
class Completion:
    """A prompt and what came after it.

    Attributes:
      prompt: The prompt.
      text: The text after it, without what ended it.
      tokens: The new tokens; where a text of `stop` ended it, those of that text are among them.
      ended: "stop" or "length".
      reused: Tokens of the prompt that the engine had read before, for another prompt.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    ended: Ended
    reused: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Writer:
    """Continues text.

    Attributes:
      engine: The model on its devices.
      tokenizer: Its tokenizer.
      begin: Tokens before each prompt.
      stop_ids: Tokens that end a text.
      loop: Where single texts are continued, so that what was read of one is not read again of the next; None = each in
        a cache of its own.
    """

    engine: Engine
    tokenizer: Tokenizer
    begin: tuple[int, ...]
    stop_ids: tuple[int, ...]
    loop: Scheduler | None = None

    def in_session(self) -> "Writer":
        """This with a cache that outlives a text, for a conversation."""
        tokens = min(self.engine.config.max_positions, _SESSION)
        return dataclasses.replace(self, loop=make_loop(self.engine, slots=1, kv_tokens=tokens, block_s=BLOCK_S))

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        sampling: TokenSampling = GREEDY,
        stop: Sequence[str] = (),
        samples: int = 1,
        batch_size: int = 8,
    ) -> list[Completion]:
        """Continues every prompt `samples` times; those of one prompt are next to each other.

        Args:
          prompts: Texts, in which names of special tokens are such tokens.
          max_tokens: New tokens of each, at most.
          sampling: How they are chosen.
          stop: A text ends before one of these, or at the special token of this name.
          samples: Continuations of each prompt.
          batch_size: Texts that are generated at once.

        Raises:
          UserError: as `Engine.generate`, or several samples are asked for that would all be the same.
        """
        check_samples(samples, sampling)
        encoded = {prompt: self.encode(prompt) for prompt in prompts}
        self.engine.check([encoded[prompt] for prompt in prompts], max_tokens)  # before any text is made
        asked = [(prompt, number) for prompt in prompts for number in range(samples)]
        found: list[Completion] = []
        texts, ids = self.split_stops(stop)
        for start in range(0, len(asked), batch_size):
            part = asked[start : start + batch_size]
            ids_of = [encoded[prompt] for prompt, _ in part]
            watch = _Watch([self.stream_after(ids) for ids in ids_of], texts)
            got = self.engine.generate(
                ids_of,
                max_tokens=max_tokens,
                sampling=sampling,
                stop=ids,
                samples=[number for _, number in part],
                progress=watch if texts else None,
            )
            found += [
                self._completion(prompt, encoded[prompt], c, texts) for (prompt, _), c in zip(part, got, strict=True)
            ]
        return found

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int,
        show: Callable[[str], None],
        sampling: TokenSampling = GREEDY,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Continues one prompt and shows the text as it comes; arguments as of `complete`.

        Args:
          prompt: Text.
          max_tokens: New tokens, at most.
          show: Told every new piece of text; never half a character, nor the beginning of a text of `stop`.
          sampling: How tokens are chosen.
          stop: As in `complete`.
        """
        texts, stop_ids = self.split_stops(stop)
        ids = self.encode(prompt)
        watch = _Watch([self.stream_after(ids)], texts, show)
        (got,) = self.engine.generate(
            [ids], max_tokens=max_tokens, sampling=sampling, stop=stop_ids, progress=watch, loop=self.loop
        )
        completion = self._completion(prompt, ids, got, texts)
        show(completion.text[watch.shown :])
        return completion

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt, with those that begin a text before it unless it has them."""
        ids = self.tokenizer.encode(prompt, specials="parse").tolist()
        return ids if tuple(ids[: len(self.begin)]) == self.begin else [*self.begin, *ids]

    def split_stops(self, stop: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Texts at which to stop, and tokens: names of special tokens are these."""
        if "" in stop:
            raise UserError("--stop must be a text of at least one character. Leave it out, or name one.")
        special = self.tokenizer.special_ids
        texts = tuple(text for text in stop if text not in special)
        return texts, (*self.stop_ids, *(special[text] for text in stop if text in special))

    def stream_after(self, ids: Sequence[int]) -> TextStream:
        """For the tokens behind a prompt: what a token says may depend on the one before, as its space does."""
        stream = self.tokenizer.stream()
        stream.push(ids[-_CONTEXT:])
        return stream

    def _completion(self, prompt: str, ids: Sequence[int], got: Continuation, texts: tuple[str, ...]) -> Completion:
        text = GrowingText(self.stream_after(ids), texts)
        text.push(got.tokens)
        text.finish()
        ended = got.ended if text.end is None else "stop"
        return Completion(prompt, text.text[: text.end], got.tokens[: text.tokens], ended, got.reused)


def open_writer(model: LanguageModel, mesh: Mesh, *, dtype: str | None = None, **more: Any) -> Writer:
    """Puts a model and its tokenizer together.

    Args:
      model: Opened.
      mesh: The devices.
      dtype: Of parameters and products; None = as stored (products of a run on CPU in float32).
      **more: See `generate.load`.

    Raises:
      UserError: the model has no tokenizer, or one of another vocabulary; or it does not fit the devices.
    """
    if model.tokenizer is None:
        raise UserError(
            f"{model.path} has no tokenizer.json. Copy the files of the tokenizer into it (tokenizer.json, "
            "tokenizer_config.json)."
        )
    tokenizer = model.tokenizer.build()
    assert model.config.vocabulary is not None
    check_vocabulary(tokenizer, model.config.vocabulary, f"{model.path}: vocabulary")
    engine = generate.load(model, mesh, dtype=dtype, choices=tokenizer.vocabulary, **more)
    begin = tokenizer.bos if model.begins == "bos" else None
    ends = dict.fromkeys([*model.tokens.eos, *tokenizer.stop_ids])
    return Writer(engine, tokenizer, () if begin is None else (begin,), tuple(ends))


class GrowingText:
    """The text of one continuation as its tokens come, up to the first of the texts to stop at.

    Args:
      stream: Decodes the tokens.
      stops: Texts to stop at.

    Attributes:
      text: What the tokens say so far; it grows no more once a text to stop at was met.
      end: Where the first of these begins; None = none was met.
      tokens: How many were taken.
      shown: Characters that `fresh` has given out.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.end: int | None = None
        self.tokens = 0
        self._stream, self._stops = stream, tuple(stops)
        # So many characters at the end may be the beginning of a text to stop at.
        self._held = max((len(stop) - 1 for stop in self._stops), default=0)
        self.shown = 0

    def push(self, tokens: Iterable[int]) -> None:
        """Takes new tokens, up to the one with which a text to stop at is whole."""
        for token in tokens:
            if self.end is not None:
                return
            self.tokens += 1
            self._grow(self._stream.push((token,)))

    def finish(self) -> None:
        """No token comes any more: nothing is held back."""
        if self.end is None:
            self._grow(self._stream.finish())
            self._held = 0

    def fresh(self) -> str:
        """What can be shown and was not: never half a character, nor the beginning of a text to stop at."""
        safe = max(len(self.text) - self._held, self.shown) if self.end is None else self.end
        piece = self.text[self.shown : safe]
        self.shown = safe
        return piece

    def _grow(self, piece: str) -> None:
        begin = max(len(self.text) - self._held, 0)
        self.text += piece
        self.end = _first(self.text, self._stops, begin) if piece else None


class _Watch:
    """Sees tokens as they come: shows the text of the first row, and ends when every row has met a stop text."""

    def __init__(
        self, streams: Sequence[TextStream], texts: tuple[str, ...], show: Callable[[str], None] | None = None
    ) -> None:
        self._rows = [GrowingText(stream, texts) for stream in streams]
        self._read = [0] * len(streams)
        self._show = show
        self.shown = 0

    def __call__(self, out: list[list[int]]) -> bool:
        for number, (row, tokens) in enumerate(zip(self._rows, out, strict=True)):
            row.push(tokens[self._read[number] :])
            self._read[number] = len(tokens)
        if self._show is not None and (piece := self._rows[0].fresh()):
            self._show(piece)
            self.shown += len(piece)
        return any(row.end is None for row in self._rows)


def _first(text: str, stops: tuple[str, ...], begin: int) -> int | None:
    """Where the first of the stops begins, of those that begin at `begin` or later."""
    found = [at for at in (text.find(stop, begin) for stop in stops) if at >= 0]
    return min(found, default=None)
