"""Fuzzes a reader: `python -m tests.fuzz npz --seconds 60`; `--bits 700` flips single bits instead, and
`--structures 200` writes files of the right form and any content.

Bytes come from atheris (extra `fuzz`), which learns from the lines of scalejax that an input reached in its child.
Status 1: some input ended in a traceback, a signal or a hang, or was read as something that it is not; those inputs
are in the folder that the last lines name.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

from . import child
from .readers import READERS, Reader

_BUCKETS = 1024


class Findings:
    """Counts ends and keeps the inputs whose end is not allowed, one of a kind."""

    def __init__(self, name: str, folder: pathlib.Path) -> None:
        self.name, self.folder = name, folder
        self.ends: collections.Counter[str] = collections.Counter()
        self._kept: set[str] = set()
        self.wrong = 0

    def add(self, end: child.End, data: bytes, intact: str) -> None:
        """One input, how it ended, and the digest of the intact sample where checksums cover it."""
        kind = end.kind
        if kind == "read":
            kind = "intact" if end.text == intact else "silent" if intact and READERS[self.name].checked else "read"
        self.ends[kind] += 1
        if kind in ("intact", "read", "refused"):
            return
        self.wrong += 1
        told = end.text.strip().splitlines()[-1] + "".join(end.text.strip().splitlines()[-3:-1])
        if told not in self._kept:
            self._kept.add(told)
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.name}-{len(self._kept)}"
            path.write_bytes(data)
            print(f"{kind}: {path}\n{end.text}", flush=True)

    def close(self) -> int:
        """Prints the counts; the exit status."""
        print(f"{self.name}: {dict(self.ends)}", flush=True)
        return int(self.wrong > 0)


def flip_bits(reader: Reader, count: int, findings: Findings) -> None:
    """Flips single bits at `count` places, the same in every run."""
    files = reader.sample()
    intact = child.intact(reader, files)
    data = files[reader.target]
    for bit in np.random.default_rng(0).permutation(8 * len(data))[:count].tolist():
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        findings.add(child.run_on(reader, files | {reader.target: bytes(damaged)}), bytes(damaged), intact)


def make_up(reader: Reader, structure: Any, count: int, findings: Findings) -> None:
    """Lets hypothesis make `count` files of the right form."""
    import hypothesis

    files = reader.sample()
    intact = child.intact(reader, files)

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(structure)
    def one_input(data: bytes) -> None:
        findings.add(child.run_on(reader, files | {reader.target: data}), data, intact if reader.checked else "")

    one_input()


def explore(reader: Reader, seconds: float, findings: Findings) -> None:
    """Lets atheris change bytes; ends the process."""
    import atheris

    files = reader.sample()
    intact = child.intact(reader, files)
    # Each line of scalejax that a child reached takes another branch here, which atheris sees.
    reached = []
    for first in range(0, _BUCKETS, 32):
        branches = "".join(f"    if {i} in seen:\n        n = {i}\n" for i in range(first, first + 32))
        scope: dict[str, Any] = {}
        exec(f"def reached(seen):\n{branches}", scope)
        reached.append(atheris.instrument_func(scope["reached"]))
    until = time.monotonic() + seconds

    def one_input(data: bytes) -> None:
        if time.monotonic() > until:
            status = findings.close()
            sys.stdout.flush()
            os._exit(status)
        end = child.run_on(reader, files | {reader.target: data}, trace=True)
        seen = {line % _BUCKETS for line in end.lines}
        for part in reached:
            part(seen)
        findings.add(end, data, intact)

    with tempfile.TemporaryDirectory() as corpus:
        (pathlib.Path(corpus) / "intact").write_bytes(files[reader.target])
        longest = max(4096, 2 * len(files[reader.target]))
        limits = [f"-max_len={longest}", "-seed=1", "-verbosity=0", "-timeout=1000", "-rss_limit_mb=0"]
        atheris.Setup([sys.argv[0], corpus, *limits], one_input)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--bits", type=int, help="flip so many single bits instead")
    parser.add_argument(
        "--structures", type=int, help="so many files of the right form, made up by hypothesis, instead"
    )
    parser.add_argument("--keep", type=pathlib.Path, help="where inputs are kept that ended badly")
    given = parser.parse_args()
    keep = given.keep or pathlib.Path(tempfile.mkdtemp(prefix="fuzz-"))
    findings = Findings(given.reader, keep)
    if given.structures is not None:
        from .structures import STRUCTURES

        # A well-formed npz of other content is no damage.
        reader = dataclasses.replace(READERS[given.reader], checked=False)
        make_up(reader, STRUCTURES[given.reader], given.structures, findings)
    elif given.bits is not None:
        flip_bits(READERS[given.reader], given.bits, findings)
    else:
        explore(READERS[given.reader], given.seconds, findings)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
