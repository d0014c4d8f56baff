"""Printing and writing the output of commands."""

import contextlib
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import rich.console
import rich.progress

from scalejax.errors import UserError


def console(*, stderr: bool = False) -> rich.console.Console:
    """Tables and progress go to standard output; in a pipe they are plain and as wide as they need to be."""
    out = rich.console.Console(highlight=False, soft_wrap=False, stderr=stderr)
    return out if out.is_terminal else rich.console.Console(highlight=False, width=160, stderr=stderr)


def transfer(console: rich.console.Console) -> rich.progress.Progress:
    """A bar for tasks that are counted in bytes; none where the console is no terminal."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def print_next(commands: Mapping[tuple[str, ...], str], where: str = "", notes: Sequence[str] = ()) -> None:
    """Says what can be done now, and what each command is for.

    Args:
      commands: Words of a command -> what it does. Each must work where this is printed.
      where: Where they work, if not here.
      notes: What could be done with something installed.
    """
    texts = {shlex.join(words): what for words, what in commands.items()}
    width = max(map(len, texts))
    print(f"Next{where}:")
    for text, what in texts.items():
        print(f"  {text:<{width}}  {what}")
    for note in notes:
        print(f"  ({note})")


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def write_json(path: pathlib.Path, data: object) -> None:
    """Writes JSON to the file that --json names.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--json {path}: cannot be written ({error.strerror}). Give a file in a folder that exists and is writable."
        ) from error


@contextlib.contextmanager
def native_output_to_stderr() -> Iterator[TextIO]:
    """Sends what C++ libraries print on standard output (Gloo does) to standard error: JSON must stay JSON.

    Yields standard output as it was.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with os.fdopen(kept, "w", closefd=False) as stream:
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)
