"""The command line: `scalejax`, the same as `python -m scalejax`. One file per command.

`--help` and `recipes` import neither jax nor flax: a command imports what it needs when it runs, after
`environment.prepare` has set what jax reads at import.
"""

import os
import sys


def main() -> None:
    """Runs the command line and exits.

    Status 0: done. 1: a failure, or a bug (with its traceback). 2: a user's mistake. 130: Ctrl-C.
    """
    try:
        from scalejax.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "scalejax":
            raise
        message = f"the command line needs {error.name!r}, which is not installed: pip install 'scalejax[train]'"
        print(f"Error: {message}", file=sys.stderr)
        sys.exit(2)
    try:
        app(prog_name="scalejax")
    except SystemExit as stop:
        if stop.code != 130:
            raise
        # Threads of jax and of the input pipeline may be in the middle of something: an orderly end of the interpreter
        # would pull it away under them (seen: a segmentation fault during compilation). Files are closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
