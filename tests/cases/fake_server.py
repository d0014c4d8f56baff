"""A server in a process of its own, over the loop of `fake_loop`: `python -m fake_server '{"loop": {...}}'`."""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def main():
    from fake_loop import FakeLoop, writer

    from scalejax.inference.server import serving
    from scalejax.inference.server.app import Server, ServerSettings

    given = json.loads(sys.argv[1])
    loop = FakeLoop(**given.get("loop", {}))
    loop.max_positions = given.get("max_positions", loop.max_positions)
    settings = {"name": "tiny", "slots": loop.slots, "max_queue": 256, "max_queue_tokens": 100_000}
    status = serving.run(
        functools.partial(Server, writer(), loop, ServerSettings(**settings | given.get("settings", {}))),
        bound=serving.bind("127.0.0.1", 0),
        drain_seconds=given.get("drain_seconds", 30),
        ready=lambda address: print(address, flush=True),
    )
    sys.exit(status)


@contextlib.contextmanager
def running(**given):
    """The process, and the address that it listens at."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "cases")))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "fake_server", json.dumps(given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            address = child.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), child.stderr.read()
            yield child, address
        finally:
            if child.poll() is None:
                child.kill()


if __name__ == "__main__":
    main()
