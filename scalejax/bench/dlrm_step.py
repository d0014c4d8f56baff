"""A training step."""

import pathlib

from scalejax.bench.harness import Contest

CASES = ("b1024", "b8192", "criteo")
PEERS = ("torch", "torch-compile")


def on_cpu() -> bool:
    return True


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    raise NotImplementedError
