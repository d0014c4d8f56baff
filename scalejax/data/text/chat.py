"""Conversations to text by the Jinja template of a checkpoint, in a sandbox (extra `llm`).

A template is a program that comes with a checkpoint. jinja2's immutable sandbox lets it reach nothing but what it is
given: messages and variables. It knows no clock, so that equal messages give equal text; templates that write the date
take it from the variable date_string.
"""

import importlib
import json
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


class ChatTemplate:
    """A compiled template.

    Args:
      source: Jinja.
      where: Where it comes from, for messages.
    Raises:
      UserError: it is no Jinja template, or jinja2 is not installed.
    """

    def __init__(self, source: str, where: str) -> None:
        try:
            sandbox = importlib.import_module("jinja2.sandbox")
        except ModuleNotFoundError as error:
            raise UserError(
                "a chat template needs the library jinja2, which is not installed: pip install 'scalejax[llm]'."
            ) from error
        # The settings under which these templates are written.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._where = where
        self._errors = importlib.import_module("jinja2.exceptions").TemplateError
        try:
            self._template = environment.from_string(source)
        except self._errors as error:
            raise UserError(f"{where}: its chat template is no valid Jinja ({error}). Copy it again.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        reply: Literal["open", "none"] = "open",
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: Each with "role" and "content", and whatever else the template knows.
          reply: "open" = ends with the header of the answer that is to be generated.
          variables: More for the template.
        Raises:
          UserError: a message lacks its role, or the template refuses them.
        """
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise UserError(
                    f"messages[{number}] has no role; got {dict(message)!r}. Wanted for example "
                    '{"role": "user", "content": "..."}.'
                )
        given = {"messages": [dict(m) for m in messages], "add_generation_prompt": reply == "open"}
        try:
            return self._template.render(**(dict(variables or {}) | given))
        except _Refused as error:
            raise UserError(f"{self._where}: its chat template refuses these messages: {error}") from error
        except (self._errors, TypeError, ValueError, KeyError, OverflowError) as error:
            raise UserError(
                f"{self._where}: its chat template fails on these messages ({type(error).__name__}: {error}). Look at "
                "the fields that it expects."
            ) from error


class _Refused(Exception):
    """What a template's raise_exception says."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Unlike jinja2's own, for text and not for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
