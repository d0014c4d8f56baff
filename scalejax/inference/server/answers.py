"""The answer to a body: texts grow as chunks come, and become the JSON of OpenAI, whole or piece by piece."""

import dataclasses
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scalejax.data.text.tokenizer import TextStream, Tokenizer
from scalejax.inference.requests import Chunk, TokenLogprobs
from scalejax.inference.server.protocol import ApiError, Asked
from scalejax.inference.text import GrowingText

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclasses.dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the loop reads it.

    Attributes:
      text: What is shown of it where it is part of the answer.
      ids: Its tokens.
    """

    text: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Place:
    """A token and where its text begins."""

    offset: int
    token: int
    logprobs: TokenLogprobs | None  # None of the first token of a prompt


class Choice:
    """One continuation.

    Attributes:
      index: Among those of the answer.
      ended: "stop", "length" or "error"; None = it goes on.
      message: Of an error.
    """

    def __init__(self, index: int, prompt: PreparedPrompt, growing: GrowingText, *, echo: bool) -> None:
        self.index = index
        self.ended: str | None = None
        self.message = ""
        self._growing = growing
        self._lead = prompt.text if echo else ""  # shown before what grows
        self._led = not echo
        self._leading = not echo
        self._places: list[_Place] = []  # that were not given out

    @property
    def tokens(self) -> int:
        """How many have come."""
        return self._growing.tokens

    def take(self, chunk: Chunk, leading: Sequence[_Place]) -> None:
        """Adds what came; `leading` are the tokens of the prompt, where they are shown with their logprobs."""
        if leading and not self._leading:
            self._leading = True
            self._places[:0] = leading
        for number, token in enumerate(chunk.tokens):
            if chunk.logprobs:
                offset = len(self._lead) + len(self._growing.text)
                self._places.append(_Place(offset, token, chunk.logprobs[number]))
            self._growing.push((token,))
            if self._growing.end is not None:
                break
        if chunk.ended is not None and chunk.ended != "error":
            self._growing.finish()
        self.ended = chunk.ended if self._growing.end is None else "stop"
        self.message = chunk.message

    def fresh(self) -> tuple[str, list[_Place]]:
        """The text that can be shown and was not, and the tokens that begin in it."""
        piece = self._growing.fresh()
        if not self._led and (piece or self.ended or self._places):
            piece, self._led = self._lead + piece, True
        end = self._growing.end
        if self.ended is None:
            end = self._growing.shown
        shown = [place for place in self._places if end is None or place.offset < len(self._lead) + end]
        self._places = self._places[len(shown) :]
        return piece, shown


class Answer:
    """To one body.

    Args:
      asked: What the body asks for.
      prompts: Its prompts.
      model: Name.
      tokenizer: For the texts of tokens.
      streams: One decoder for each continuation, the prompt's tokens behind it.
      stops: Texts to stop at.
    """

    def __init__(
        self,
        asked: Asked,
        prompts: Sequence[PreparedPrompt],
        *,
        model: str,
        tokenizer: Tokenizer,
        streams: Iterator[TextStream],
        stops: Sequence[str],
    ) -> None:
        self._asked, self._prompts, self._tokenizer = asked, prompts, tokenizer
        self._chat = asked.messages is not None
        self._leading: list[list[_Place]] = [[] for _ in prompts]
        self.choices = [
            Choice(number, prompts[number // asked.n], GrowingText(next(streams), stops), echo=asked.echo)
            for number in range(len(prompts) * asked.n)
        ]
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._opened: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether every continuation has ended."""
        return all(choice.ended is not None for choice in self.choices)

    def take(self, place: int, chunk: Chunk) -> Choice | None:
        """Adds what came for the prompt at `place`; returns the continuation, or None if it had ended already.

        One that has met a text to stop at goes on in the loop until it is cancelled there.
        """
        if chunk.prompt_logprobs is not None and not self._leading[place]:
            self._leading[place] = list(self._prompt_places(self._prompts[place], chunk.prompt_logprobs))
        choice = self.choices[place * self._asked.n + chunk.sample]
        if choice.ended is not None:
            return None
        choice.take(chunk, self._leading[place])
        return choice

    def whole(self) -> dict[str, Any]:
        """The JSON of an answer that is done."""
        choices = []
        for choice in self.choices:
            text, places = choice.fresh()
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(self._choice(choice, said, places, choice.ended))
        return {**self._head, "choices": choices, "usage": self._usage()}

    def events(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The events of a stream for what is new of a continuation."""
        text, places = choice.fresh()
        if self._chat and choice.index not in self._opened:
            self._opened.add(choice.index)
            yield self._event([self._choice(choice, {"delta": {"role": "assistant", "content": ""}}, [], None)])
        if choice.ended == "error":
            yield {**broken(choice.message).body, "index": choice.index}
            return
        if text or places or (choice.ended and not self._chat):
            said = {"delta": {"content": text}} if self._chat else {"text": text}
            yield self._event([self._choice(choice, said, places, None if self._chat else choice.ended)])
        if choice.ended and self._chat:
            yield self._event([self._choice(choice, {"delta": {}}, [], choice.ended)])

    def last_events(self) -> Iterator[dict[str, Any]]:
        """What comes after the last continuation has ended."""
        if self._asked.include_usage:
            yield {**self._event([]), "usage": self._usage()}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _usage(self) -> dict[str, int]:
        read = sum(len(prompt.ids) for prompt in self._prompts)
        made = sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _choice(
        self, choice: Choice, said: dict[str, Any], places: Sequence[_Place], ended: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._asked.logprobs is not None and (places or ended):
            logprobs = self._chat_logprobs(places) if self._chat else self._completion_logprobs(places)
        return {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": ended}

    def _prompt_places(self, prompt: PreparedPrompt, logprobs: Sequence[TokenLogprobs | None]) -> Iterator[_Place]:
        stream, offset = self._tokenizer.stream(), 0
        for token, its in zip(prompt.ids, logprobs, strict=True):
            yield _Place(min(offset, max(len(prompt.text) - 1, 0)), token, its)
            offset += len(stream.push((token,)))

    def _completion_logprobs(self, places: Sequence[_Place]) -> dict[str, Any]:
        return {
            "tokens": [self._name(place.token) for place in places],
            "token_logprobs": [None if p.logprobs is None else _finite(p.logprobs.logprob) for p in places],
            "top_logprobs": [None if p.logprobs is None else self._top(p.logprobs) for p in places],
            "text_offset": [place.offset for place in places],
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """By text; the most probable of tokens of one text, and the token itself, which need not be among them."""
        found: dict[str, float] = {}
        for token, logprob in (*logprobs.top, (logprobs.token, logprobs.logprob)):
            found.setdefault(self._name(token), _finite(logprob))
        return found

    def _chat_logprobs(self, places: Sequence[_Place]) -> dict[str, Any]:
        content = []
        for place in places:
            assert place.logprobs is not None
            top = [self._named(token, logprob) for token, logprob in place.logprobs.top]
            content.append({**self._named(place.token, place.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        if token >= self._tokenizer.vocabulary:  # a table may have more rows than the tokenizer has ids
            return f"<|{token}|>"
        return self._tokenizer.decode((token,), specials="show")


def broken(message: str) -> ApiError:
    """What is said of a continuation that could not go on."""
    return ApiError(message or "the continuation could not go on.", status=500, code="generation_failed")


def dump(data: object) -> bytes:
    """JSON in ASCII: texts of clients may hold halves of surrogate pairs, which no UTF-8 can."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
