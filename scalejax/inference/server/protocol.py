"""Bodies of OpenAI's completions and chat completions, and rows to score, read and checked.

What is wrong is named, nothing is ignored.
"""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from scalejax import json_reading
from scalejax.inference.sampling import GREEDY, TokenSampling

LARGEST_BODY = 4 * 2**20
"""Bytes."""

MOST_SAMPLES = 128
MOST_STOPS = 4
_LOGPROBS, _TOP_LOGPROBS = 5, 20
_LARGEST_FLOAT32 = 3.4028234e38
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What is known and not offered -> the values that ask for nothing. None always does.
_LACKED: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
}
_LACKED_BY_COMPLETIONS: Mapping[str, tuple[object, ...]] = {"suffix": ("",)}
_LACKED_BY_CHAT: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
# Of the platform, not of the model.
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class ApiError(Exception):
    """An answer that is an error.

    Args:
      message: For people.
      status: Of HTTP.
      param: The field of the body that is wrong.
      code: For programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        if self.status >= 500:
            kind = "server_error"
        else:
            kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
            kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a body asks for.

    Attributes:
      prompts: Texts or ids, each continued `n` times; () of a chat.
      messages: Of a chat; None = it is none.
      max_tokens: New tokens of each; None = as many as there is room for.
      n: Continuations of each prompt.
      sampling: How tokens are chosen.
      stop: Texts to end before.
      logprobs: As of `Request`.
      echo: Whether the prompt is part of the answer.
      stream: Whether pieces are sent as they come.
      include_usage: Whether a stream ends with the numbers of tokens.
    """

    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, object], ...] | None = None
    max_tokens: int | None
    n: int
    sampling: TokenSampling
    stop: tuple[str, ...]
    logprobs: int | None
    echo: bool = False
    stream: bool
    include_usage: bool


def read_completion(body: bytes, model: str) -> Asked:
    """What a body for /v1/completions asks of the model of this name.

    Raises:
      ApiError: it is no JSON, or a field is wrong, unknown or not offered.
    """
    fields = _Fields(body, model, {**_LACKED, **_LACKED_BY_COMPLETIONS})
    prompts = _prompts(fields.take("prompt"))
    logprobs = fields.integer("logprobs", None, 0, _LOGPROBS)
    echo = fields.boolean("echo", False)
    max_tokens = fields.integer("max_tokens", 16, 0, None)
    if max_tokens == 0 and (not echo or logprobs is None):
        raise ApiError("max_tokens may be 0 only with echo and logprobs. Ask for at least 1.", param="max_tokens")
    shared = fields.shared()
    best_of = fields.integer("best_of", None, 1, MOST_SAMPLES)
    if best_of not in (None, shared["n"]):
        raise ApiError(f"best_of={best_of}: this server has no best_of other than n. Leave it out.", param="best_of")
    fields.check_all_taken()
    return Asked(prompts=prompts, max_tokens=max_tokens, logprobs=logprobs, echo=echo, **shared)


def read_chat(body: bytes, model: str) -> Asked:
    """What a body for /v1/chat/completions asks of the model of this name.

    Raises:
      ApiError: it is no JSON, or a field is wrong, unknown or not offered.
    """
    fields = _Fields(body, model, {**_LACKED, **_LACKED_BY_CHAT})
    messages = _messages(fields.take("messages"))
    old = fields.integer("max_tokens", None, 1, None)
    max_tokens = fields.integer("max_completion_tokens", old, 1, None)
    if old not in (None, max_tokens):
        raise ApiError("max_tokens and max_completion_tokens differ. Give the second alone.", param="max_tokens")
    logprobs = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", None, 0, _TOP_LOGPROBS)
    if top is not None and not logprobs:
        raise ApiError("top_logprobs needs logprobs: true. Set it, or leave both out.", param="top_logprobs")
    shared = fields.shared()
    fields.check_all_taken()
    return Asked(messages=messages, max_tokens=max_tokens, logprobs=(top or 0) if logprobs else None, **shared)


@dataclasses.dataclass(frozen=True)
class AskedRows:
    """Rows for a click model, column by column.

    Attributes:
      count: Of rows.
      ids: Of each feature all ids, row after row.
      lengths: How many of them each row has, of features with a list of ids.
      dense: Numbers of each row.
    """

    count: int
    ids: dict[str, list[int]]
    lengths: dict[str, list[int]]
    dense: list[list[float]]


def read_rows(body: bytes, model: str, signature: Mapping[str, Any]) -> AskedRows:
    """The rows of a body for /v1/score, of an exported click model with this signature.

    Raises:
      ApiError: it is no JSON, or a field or a value of a row is wrong or unknown.
    """
    fields = _Fields(body, model, {})
    rows = fields.take("rows")
    fields.check_all_taken()
    features: Mapping[str, Any] = signature["features"]
    if not isinstance(rows, list) or not rows:
        wanted = '[{"ids": {' + ", ".join(f'"{name}": ...' for name in features) + '}, "dense": [...]}]'
        raise ApiError(f"rows must be a list such as {wanted}; got {show(rows)}.", param="rows")
    found = AskedRows(len(rows), {name: [] for name in features}, {}, [])
    for number, row in enumerate(rows):
        where = f"rows[{number}]"
        if not isinstance(row, dict) or not set(row) <= {"ids", "dense"}:
            raise ApiError(f"{where} must be an object with ids and dense; got {show(row)}.", param=where)
        given = row.get("ids", {})
        if not isinstance(given, dict) or given.keys() != features.keys():
            wanted = ", ".join(features)
            raise ApiError(f"{where}.ids must have the features {wanted}; got {show(given)}.", param=f"{where}.ids")
        for name, feature in features.items():
            values = _ids_of(given[name], feature, f"{where}.ids.{name}")
            found.ids[name] += values
            if feature["length"] is None:
                found.lengths.setdefault(name, []).append(len(values))
        found.dense.append(_numbers(row.get("dense", []), signature["dense"], f"{where}.dense"))
    return found


def _ids_of(value: Any, feature: Mapping[str, Any], where: str) -> list[int]:
    length, most = feature["length"], feature["rows"]
    values: list[Any] = [value] if length == 1 and not isinstance(value, list) else value
    if not isinstance(values, list) or length not in (None, len(values)):
        wanted = "a list of ids" if length is None else f"a list of {length} ids" if length > 1 else "an id"
        raise ApiError(f"{where} must be {wanted}; got {show(value)}.", param=where)
    for each in values:
        if not _is_id(each) or not 0 <= each < most:
            raise ApiError(f"{where} must have integers from 0 to {most - 1}; got {show(each)}.", param=where)
    return values


def _numbers(value: Any, names: Sequence[str], where: str) -> list[float]:
    if not isinstance(value, list) or len(value) != len(names):
        wanted = f"{len(names)} numbers ({', '.join(names)})" if names else "left out or empty"
        raise ApiError(f"{where} must be {wanted}; got {show(value)}.", param=where)
    for each in value:
        if not isinstance(each, int | float) or isinstance(each, bool) or not abs(each) <= _LARGEST_FLOAT32:
            raise ApiError(f"{where} must have numbers of float32; got {show(each)}.", param=where)
    return value


class _Fields:
    """The fields of a body; each is taken once, so that those that nobody takes are found."""

    def __init__(self, body: bytes, model: str, lacked: Mapping[str, tuple[object, ...]]) -> None:
        try:
            found = json_reading.parse(body)
        except ValueError as error:
            raise ApiError(f"the body is no JSON: {error}.", code="invalid_json") from None
        if not isinstance(found, dict):
            raise ApiError(f"the body must be a JSON object; got {show(found)}.", code="invalid_json")
        # null is what clients send for what is not set.
        self._fields = {name: value for name, value in cast(dict[str, Any], found).items() if value is not None}
        for name, nothing in lacked.items():
            value = self.take(name)
            if value is not None and not any(type(value) is type(each) and value == each for each in nothing):
                raise ApiError(
                    f"{name}={show(value)}: this server does not have {name}. Leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )
        for name in _WITHOUT_EFFECT:
            self.take(name)
        named = self.take("model")
        if named is not None and named != model:
            raise ApiError(
                f"model={show(named)} is not served here. Ask for {model!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def take(self, name: str) -> Any:
        """The value of a field; None where it is not there, or null."""
        return self._fields.pop(name, None)

    def check_all_taken(self) -> None:
        for name in self._fields:
            raise ApiError(
                f"{show(name)} is no field that this server knows. Leave it out.",
                param=name[:100],
                code="unknown_parameter",
            )

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise ApiError(f"{name} must be true or false; got {show(value)}.", param=name)
        return default if value is None else value

    def integer(self, name: str, default: int | None, least: int, most: int | None) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < least
            or (most is not None and value > most)
        ):
            wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ApiError(f"{name} must be an integer {wanted}; got {show(value)}.", param=name)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ApiError(f"{name} must be a number from {least:g} to {most:g}; got {show(value)}.", param=name)
        return float(value)

    def shared(self) -> dict[str, Any]:
        """The arguments of `Asked` that both kinds of body have."""
        stream = self.boolean("stream", False)
        return {
            "n": self.integer("n", 1, 1, MOST_SAMPLES),
            "sampling": self._sampling(),
            "stop": self._stop(),
            "stream": stream,
            "include_usage": self._include_usage(stream),
        }

    def _sampling(self) -> TokenSampling:
        temperature = self.number("temperature", 1.0, 0.0, 2.0)
        top_p = self.number("top_p", 1.0, 0.0, 1.0)
        top_k = self.integer("top_k", 0, 0, None)
        seed = self.integer("seed", None, -(2**63), 2**64)
        if top_p == 0:
            raise ApiError("top_p must be above 0. For the most probable token set temperature: 0.", param="top_p")
        if temperature == 0:
            return GREEDY  # which no other field changes
        drawn = secrets.randbits(32) if seed is None else seed % 2**32
        return TokenSampling(temperature=temperature, top_p=top_p, top_k=min(top_k or 0, 2**31 - 1), seed=drawn)

    def _stop(self) -> tuple[str, ...]:
        value = self.take("stop")
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list)
            or len(texts) > MOST_STOPS
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise ApiError(
                f"stop must be a text or a list of at most {MOST_STOPS}, none of them empty; got {show(value)}.",
                param="stop",
            )
        return tuple(texts)

    def _include_usage(self, stream: bool) -> bool:
        value = self.take("stream_options")
        if value is None:
            return False
        if not stream:
            raise ApiError("stream_options needs stream: true. Set it, or leave both out.", param="stream_options")
        known = isinstance(value, dict) and set(value) <= {"include_usage", "include_obfuscation"}
        if not known or not all(isinstance(each, bool | None) for each in value.values()):
            raise ApiError(
                f'stream_options must be {{"include_usage": true or false}}; got {show(value)}.',
                param="stream_options",
            )
        return bool(value.get("include_usage"))


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    several: list[Any] = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
    texts = [each for each in several if isinstance(each, str)]
    ids = [tuple[int, ...](each) for each in several if _is_ids(each)]
    found = texts or ids
    if len(found) < len(several):
        raise ApiError(
            "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids, no list "
            f"empty; got {show(value)}.",
            param="prompt",
        )
    return tuple(found)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _messages(value: Any) -> tuple[Mapping[str, object], ...]:
    if not isinstance(value, list) or not value:
        raise ApiError(
            f'messages must be a list such as [{{"role": "user", "content": "..."}}]; got {show(value)}.',
            param="messages",
        )
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(value))


def _message(message: Any, where: str) -> Mapping[str, object]:
    if not isinstance(message, dict):
        raise ApiError(f"{where} must be an object with role and content; got {show(message)}.", param=where)
    # What a client got as an answer may come back with its empty fields.
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    if not isinstance(role := fields.pop("role", None), str) or role not in _ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(_ROLES)}; got {show(role)}.", param=f"{where}.role")
    content = fields.pop("content", None)
    if isinstance(content, list):
        parts = [_text_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise ApiError(f"{where}.content must be a text; got {show(content)}.", param=f"{where}.content")
    known: dict[str, object] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if isinstance(fields.get(name), str):
            known[name] = fields.pop(name)
    for name in fields:
        raise ApiError(
            f"{where}: this server has no {show(name)} in messages. Leave it out.",
            param=where,
            code="unsupported_parameter",
        )
    return known


def _text_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ApiError(f'{where} must be {{"type": "text", "text": "..."}}; got {show(part)}.', param=where)
    return text


def show(value: object, most: int = 60) -> str:
    """The beginning of a value as it may stand in a message."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    text = ascii(value if not isinstance(value, Sequence) else value[:most])
    return text if len(text) <= most else text[:most] + "..."
