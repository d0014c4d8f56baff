"""The program that renders one chat template: `chat.ChatTemplate` starts it, and nothing imports it.

Lines of JSON come on standard input and each is answered by one, {"kind", "value"}, on standard output:

    {"folders", "memory_bytes", "memory_status", "text_bytes", "seconds"}    ready, or broken
    {"source"}                                                               compiled, or invalid
    {"variables", "now"}                                                     text, size, refused or failed

It ends when its input does, and with `memory_status` where memory, which is limited from "ready" on, does not suffice.
Who asks holds the clock; the alarm here, which no Python has to handle, is for a template that outlives who asked.
"""

import datetime
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any

_LONGEST_REASON = 500  # characters of what a template says
# What jinja2 imports when it is first needed.
_MODULES = ("jinja2.debug", "jinja2.ext", "jinja2.exceptions", "jinja2.sandbox", "pprint", "textwrap")


class _Refused(Exception):
    """What a template's raise_exception says."""


def _refuse(message: object) -> None:
    raise _Refused(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own, for text and not for HTML. The order of the arguments is that of transformers.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation() -> type:
    """The extension of the tag `generation`, around what an assistant says: its names are its own, as in a macro."""
    nodes = importlib.import_module("jinja2.nodes")

    class Generation(importlib.import_module("jinja2.ext").Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> str:
            return caller()

    return Generation


def _environment() -> Any:
    # The settings under which these templates are written.
    environment = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _rendered(template: Any, variables: dict[str, Any], text_bytes: int) -> tuple[str, str]:
    parts: list[str] = []
    size = 0
    for part in template.generate(variables):
        size += len(part.encode("utf-8", "surrogatepass"))
        if size > text_bytes:
            return "size", ""
        parts.append(part)
    return "text", "".join(parts)


def _say(kind: str, value: str = "") -> None:
    sys.stdout.write(json.dumps({"kind": kind, "value": value}) + "\n")
    sys.stdout.flush()


def _reason(error: Exception) -> str:
    return str(error)[:_LONGEST_REASON]


def _start(limits: dict[str, Any]) -> Any:
    sys.path += limits["folders"]
    for name in _MODULES:
        importlib.import_module(name)
    environment = _environment()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    return environment


def _answer(environment: Any, templates: list[Any], line: str, text_bytes: int) -> tuple[str, str]:
    wrong = "failed"
    try:
        request = json.loads(line)
        if "source" in request:
            wrong = "invalid"
            templates[:] = [environment.from_string(request["source"])]
            return "compiled", ""
        variables = request["variables"]
        if request["now"] is not None:
            variables = {"strftime_now": datetime.datetime.fromisoformat(request["now"]).strftime, **variables}
        return _rendered(templates[0], variables, text_bytes)
    except MemoryError:
        raise
    except _Refused as error:
        return "refused", _reason(error)
    except Exception as error:  # whatever a stranger's program raises
        return wrong, f"{type(error).__name__}: {_reason(error)}"


def _serve() -> None:
    limits = json.loads(sys.stdin.readline())
    try:
        environment = _start(limits)
    except (ImportError, OSError, ValueError) as error:
        return _say("broken", f"{type(error).__name__}: {_reason(error)}")
    _say("ready")
    templates: list[Any] = []
    try:
        while line := sys.stdin.readline():
            signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
            _say(*_answer(environment, templates, line, limits["text_bytes"]))
            signal.setitimer(signal.ITIMER_REAL, 0)
    except MemoryError:
        os._exit(limits["memory_status"])
    return None


if __name__ == "__main__":
    _serve()
