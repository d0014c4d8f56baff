"""Conversations on the command line: `scalejax generate --chat` and `--messages`."""

import datetime
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scalejax import json_reading
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.inference.sampling import TokenSampling
    from scalejax.inference.text import Completion, Writer
    from scalejax.models.llm.model_folder import LanguageModel

EXIT = "/exit"

Render = Callable[[Sequence[Mapping[str, object]]], str]


def renderer(model: "LanguageModel") -> Render:
    """How a model's tokenizer writes conversations; known before any parameter is loaded.

    Raises:
      UserError: it has no chat template.
    """
    from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer

    if not isinstance(model.tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"{model.path}: there is no chat template, as its tokenizer is none of Hugging Face. Use a model that is "
            "tuned for chat, or --prompt."
        )
    tokenizer = model.tokenizer.build()
    tokenizer.check_chat()
    return lambda messages: tokenizer.render_chat(messages, now=datetime.datetime.now())


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The conversation in a file of --messages.

    Raises:
      UserError: names the file and the message.
    """
    from scalejax.data.text import chat

    where = f"--messages {path}"
    try:
        content = json_reading.read(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f'{where}: cannot be read as JSON: {error}. Wanted for example [{{"role": "user", "content": "..."}}].'
        ) from error
    return chat.read_messages(content, where)


def answer(
    writer: "Writer", prompt: str, *, max_tokens: int, sampling: "TokenSampling", stop: Sequence[str]
) -> "Completion":
    """Shows the answer to a conversation as it comes, and what was read for it."""
    ids = writer.encode(prompt)
    writer.engine.check([ids], max_tokens)  # before anything is shown
    begin = time.perf_counter()
    found = writer.stream(
        prompt,
        max_tokens=max_tokens,
        show=lambda piece: print(piece, end="", flush=True),
        sampling=sampling,
        stop=stop,
    )
    print(flush=True)
    print(
        f"Prompt: {found.reused:,} tokens reused, {len(ids) - found.reused:,} read. {len(found.tokens):,} new in "
        f"{time.perf_counter() - begin:.2f} s.",
        file=sys.stderr,
    )
    return found


def converse(render: Render, reply: Callable[[str], "Completion"]) -> list["Completion"]:
    """Answers the lines of standard input, each in the conversation so far.

    Args:
      render: See `renderer`.
      reply: Answers a rendered conversation.
    """
    print(f'A line is a message. "{EXIT}", two empty lines or the end of the input end the chat.', file=sys.stderr)
    messages: list[dict[str, str]] = []
    found: list[Completion] = []
    empty = 0
    while (line := _line()) is not None and line != EXIT:
        empty = 0 if line else empty + 1
        if empty == 2:
            break
        if line:
            messages.append({"role": "user", "content": line})
            found.append(reply(render(messages)))
            messages.append({"role": "assistant", "content": found[-1].text})
    return found


def _line() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(f"--chat: the input is no text: {error}. Give lines of UTF-8.") from error
    return line.strip() if line else None
