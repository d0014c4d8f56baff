"""The command line: `scalejax`, the same as `python -m scalejax`. One file per command.

`--help` imports neither jax nor flax: a command imports what it needs when it runs, after
`environment.prepare` has set what jax reads at import.
"""

import os
import sys
import threading

LEAVE_S = 10
"""How long a process of several that ends with an error waits for the others to end as well."""


def main() -> None:
    """Runs the command line and exits.

    Status 0: done. 1: a failure, or a bug (with its traceback). 2: a user's mistake. 75: a run was asked to end, or
    another process of it is gone, and the same command goes on. 130, 143: ended by SIGINT, SIGTERM without a save.
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
            if stop.code:
                _leave_in_time(stop.code if isinstance(stop.code, int) else 1)
            raise
        # Threads of jax and of the input pipeline may be in the middle of something: an orderly end of the interpreter
        # would pull it away under them (seen: a segmentation fault during compilation). Files are closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    except BaseException:
        if (peers := sys.modules.get("scalejax.train.peers")) is not None:
            peers.job.hold()
        _leave_in_time(1)
        raise


def _leave_in_time(status: int) -> None:
    """Ends this process soon if it is one of several.

    An error that all processes meet ends them all at once. One that a process meets alone leaves the others in the
    middle of a step; jax would let them and this one wait for each other for minutes. When this one is gone they fail.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return
    sys.modules["scalejax.train.peers"].job.leave(0 if status == os.EX_TEMPFAIL else status)
    timer = threading.Timer(LEAVE_S, os._exit, [status])
    timer.daemon = True
    timer.start()
