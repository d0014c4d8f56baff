"""Conversations to text by the Jinja template of a checkpoint, in a process of its own (extra `llm`).

A template is a program that comes with a checkpoint. It is compiled and rendered by `chat_child.py`: in jinja2's
immutable sandbox, which lets it reach nothing but what it is given (messages and variables), and in a child process
without jax, whose memory, time and text are limited and which is replaced after a breach. What it makes is what
transformers makes. It knows no clock, so that equal messages give equal text: the time, for `strftime_now`, comes from
whoever asks, and where nobody gives one, templates that look for that name take their fixed date.

What messages hold is data: it is written into the text, and never read as a template.
"""

import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from scalejax.errors import UserError

LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|{{ 'eom' if message.expects_result else 'eot' }}_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3's messages, for a `tokenizer.json` of that family that comes without a template: a header with the role, an
empty line, the content, and the end of the turn (or of the message: `expects_result` marks a call of a tool)."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of the messages that come from users, see `read_messages`."""

MEMORY_BYTES = 2**29
"""Of addresses that the process of a template may use."""

TEXT_BYTES = 2**23
"""Of a conversation's text, in UTF-8."""

SECONDS = 1.0
"""For compiling a template, and for each text."""

_START_SECONDS = 60.0
_MEMORY_STATUS = 3
_LONGEST_ANSWER = 6 * TEXT_BYTES + 2**12  # JSON has up to six bytes for one
_PROGRAM = pathlib.Path(__file__).with_name("chat_child.py")


class ChatTemplate:
    """A template and the process that renders it, which starts with the first text and ends with this object.

    Threads may share one; their texts are rendered one after another.

    Args:
      source: Jinja.
      where: Where it comes from, for messages.
    """

    def __init__(self, source: str, where: str) -> None:
        self._source, self._where = source, where
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        reply: Literal["open", "none"] = "open",
        variables: Mapping[str, object] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: Each with "role" and "content", and whatever else the template knows; what JSON can hold.
          reply: "open" = ends with the header of the answer that is to be generated.
          variables: More for the template; it finds None for tools and documents where they are not given.
          now: What the template has for the time; None = `strftime_now` is not defined.
        Raises:
          UserError: it is no Jinja template, jinja2 is not installed, a message lacks its role, or the template
            refuses the messages, fails on them, or takes more time, memory or text than it may.
        """
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise UserError(
                    f"messages[{number}] has no role; got {dict(message)!r}. Wanted for example "
                    '{"role": "user", "content": "..."}.'
                )
        none = {"tools": None, "documents": None}
        given = {"messages": [dict(m) for m in messages], "add_generation_prompt": reply == "open"}
        time = None if now is None else now.isoformat()
        try:
            request = _line({"variables": none | dict(variables or {}) | given, "now": time})
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"messages and variables must hold what JSON can hold ({error}). Give text, numbers, lists and "
                "dictionaries."
            ) from error
        with self._lock:
            kind, value = self._answer(request)
        if kind == "text":
            return value
        if kind == "refused":
            raise UserError(f"{self._where}: its chat template refuses these messages: {value}")
        raise UserError(
            f"{self._where}: its chat template fails on these messages ({value}). Look at the fields that it expects."
        )

    def close(self) -> None:
        """Ends the process; a further text starts another."""
        with self._lock:
            self._replace()

    def _answer(self, request: bytes) -> tuple[str, str]:
        try:
            if self._child is None or not self._child.serves():
                self._replace()
                self._child = _Child(self._where)
                kind, value = self._child.ask(_line({"source": self._source}), SECONDS)
                if kind != "compiled":
                    raise UserError(f"{self._where}: its chat template is no valid Jinja ({value}). Copy it again.")
            kind, value = self._child.ask(request, SECONDS)
            if kind not in ("text", "refused", "failed"):
                raise _Breach(f"makes more than the {TEXT_BYTES >> 20} MiB of text that it may")
        except _Breach as breach:
            self._replace()
            raise UserError(
                f"{self._where}: its chat template {breach}. Shorten the messages; if it is so with short ones too, "
                "copy the template again from a source that you trust."
            ) from None
        except BaseException:  # also Ctrl-C, after which an answer would be taken for that of the next request
            self._replace()
            raise
        return kind, value

    def _replace(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def read_messages(content: object, where: str) -> list[dict[str, Any]]:
    """Checks a conversation that a user gave.

    Args:
      content: Of JSON: a list of {"role": one of `ROLES`, "content": text, ...}.
      where: Where it stands, for messages.
    Raises:
      UserError: names the first message that is not as wanted, by its number from 0.
    """
    wanted = f'Wanted {{"role": {" | ".join(ROLES)}, "content": text}}.'
    if not isinstance(content, list) or not content:
        raise UserError(f"{where}: must be a list of at least one message; got {_short(content)}. {wanted}")
    for number, message in enumerate(content):
        here = f"{where}: messages[{number}]"
        if not isinstance(message, dict):
            raise UserError(f"{here} must be an object; got {_short(message)}. {wanted}")
        if message.get("role") not in ROLES:
            raise UserError(f"{here}.role must be one of {', '.join(ROLES)}; got {_short(message.get('role'))}.")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{here}.content must be text; got {_short(message.get('content'))}. {wanted}")
    return content


class _Breach(Exception):
    """What a template did that it may not, as the rest of a sentence."""


class _Child:
    """The process of one template.

    Raises:
      UserError: jinja2 is not installed, or the process does not start.
    """

    def __init__(self, where: str) -> None:
        folders = _folders()
        self._owner = os.getpid()
        # Isolated, without the packages around it and the environment, and out of reach of the terminal's Ctrl-C.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{where}: no process can be started for its chat template: {error}.") from error
        self.end = weakref.finalize(self, _end, self._process, self._owner)
        memory = {"memory_bytes": MEMORY_BYTES, "memory_status": _MEMORY_STATUS}
        limits = {"folders": folders, **memory, "text_bytes": TEXT_BYTES, "seconds": 2 * SECONDS}
        try:
            kind, value = self.ask(_line(limits), _START_SECONDS)
        except _Breach as breach:
            kind, value = "broken", f"it {breach}"
        except BaseException:
            self.end()
            raise
        if kind != "ready":
            self.end()
            raise UserError(
                f"{where}: the process for its chat template does not start ({value}). Is there memory for one, and "
                "is jinja2 whole (pip install --force-reinstall jinja2 markupsafe)?"
            )

    def serves(self) -> bool:
        """Whether it is there, and was started by this process and not by the one that forked it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes, seconds: float) -> tuple[str, str]:
        """The kind of the answer to a line, and its value.

        Raises:
          _Breach: there is no answer, or none in time.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline(_LONGEST_ANSWER)
        except OSError:  # it has gone
            line = b""
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            raise _Breach(f"takes longer than the {seconds:.0f} s that it may")
        if not line:
            raise _Breach(_ended(process.wait()))
        try:
            answer = json.loads(line)
            kind, value = answer["kind"], answer["value"]
        except (ValueError, TypeError, KeyError, RecursionError):
            kind = value = None
        if not isinstance(kind, str) or not isinstance(value, str):
            raise _Breach("does not answer in the form that its process was given")
        return kind, value


def _ended(status: int) -> str:
    if status == _MEMORY_STATUS:
        return f"takes more than the {MEMORY_BYTES >> 20} MiB of memory that it may"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"ended the process that renders it ({how}), whose limit is {MEMORY_BYTES >> 20} MiB of memory"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what it did not read is of no use
            assert pipe is not None
            pipe.close()


def _folders() -> list[str]:
    """Where the child finds what it imports."""
    found = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UserError(
                "a chat template needs the library jinja2, which is not installed: pip install 'scalejax[llm]'."
            )
        found.append(str(pathlib.Path(spec.origin).parent.parent))
    return list(dict.fromkeys(found))


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
