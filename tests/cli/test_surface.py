"""The command surface is frozen: a change of a command, an option or a default is a change of these files.

Rewrite them with `python -m tests.cli.test_surface` from the root of a checkout.
"""

import pathlib
import re

import pytest
import typer.testing

COMMANDS = (
    "",
    "recipes",
    "train",
    "eval",
    "generate",
    "serve",
    "convert",
    "quantize",
    "prune",
    "grow",
    "precision",
    "export",
    "report",
    "plan",
    "shard",
    "towers",
    "bench",
    "doctor",
)
GOLDEN = pathlib.Path(__file__).parent / "golden"


def help_text(command: str) -> str:
    """`scalejax COMMAND --help`, one line a paragraph or option, without what typer's versions lay out differently."""
    from scalejax.cli.app import app

    arguments = [command, "--help"] if command else ["--help"]
    result = typer.testing.CliRunner().invoke(
        app, arguments, prog_name="scalejax", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}
    )
    assert result.exit_code == 0, result.output
    text = re.sub(r" <(str|text|path|int|integer|list\[Path\])>", "", result.output)
    text = re.sub(r"\{(RECIPE|RUN_FOLDER|FOLDER|SOURCE|DEST|CHECKPOINT|OUT)\}", r"\1", text)
    text = re.sub(r"\n {10,}", " ", text)  # continued descriptions
    return "\n".join(re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_what_was_agreed(command):
    assert help_text(command) == (GOLDEN / f"{command or 'scalejax'}.txt").read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in COMMANDS:
        (GOLDEN / f"{name or 'scalejax'}.txt").write_text(help_text(name))
