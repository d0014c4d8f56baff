"""Plants faults in a copy of the package, one at a time, and reports which tests catch them.

    python -m tests.faults                      # all of tests/faults.toml
    python -m tests.faults ties-go-up --write   # some, by name; their rows go to the table in tests/faults.md
    python -m tests.faults --affected           # only: does tests/affected.py name the nearest tests of their files?

The copy has what git tracks, as it is now. Of each fault the nearest file of tests runs in a process of its own until a
test fails: the test that the table names, then the default tier, and the rest of the file where that catches nothing.
The test that failed runs once more without the fault, and has to pass. A fault that nothing catches changes nothing,
and then it is no fault, or asks for a test. No run takes more than --limit seconds.

Compiled programs are kept with those of the checkout; JAX_COMPILATION_CACHE_DIR names another folder.
"""

import argparse
import dataclasses
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Literal

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAULTS, TABLE = ROOT / "tests" / "faults.toml", ROOT / "tests" / "faults.md"

LIMIT_S = 120
"""Seconds that a run of tests may take."""

TITLE = """# Planted faults

Mistakes that developers make and that corrupt results in silence, some in every folder of the package by its lines of
code, and the tests that catch them. Written by `python -m tests.faults --write`.

"""
HEAD = ("fault", "file", "caught by", "tier", "seconds")
NOT_RUN = ("", "not run", "")

_FAILED = r"^(?:FAILED|ERROR) \S+?\.py(?:::([^\[\s]+(?:\[.*?\](?= - |$))?))?(?: - .*)?$"
"""A line of pytest's summary: the test, with its case in brackets, is behind the file."""

Tier = Literal["default", "full", "none", "late"]
"""What catches a fault; "none" = nothing, "late" = nothing that ended in time."""


class Mistake(Exception):
    """What was asked for cannot be done; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake that a developer might make.

    Attributes:
      name: Short, of letters, digits and -.
      file: Path from the root.
      text: What is replaced; it occurs once in the file.
      wrong: What stands there then.
      test: The nearest file of tests.
    """

    name: str
    file: str
    text: str
    wrong: str
    test: str

    def planted(self, source: str) -> str:
        """The text of the file with the fault.

        Raises:
          Mistake: what it replaces does not occur exactly once.
        """
        count = source.count(self.text)
        if count != 1:
            raise Mistake(
                f"fault {self.name!r}: its text must occur once in {self.file}; it occurs {count} times. Write into "
                f"{FAULTS.name} what stands there now in place of {self.text!r}."
            )
        return source.replace(self.text, self.wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault.

    Attributes:
      caught_by: The test that failed, without its file; "" = none.
      tier: See `Tier`.
      seconds: Of all runs.
    """

    caught_by: str
    tier: Tier
    seconds: float

    @property
    def cells(self) -> tuple[str, str, str]:
        """In a row of the table, which has no room for the case of a test."""
        return self.caught_by.partition("[")[0], self.tier, f"{self.seconds:.0f}"


def read_faults(path: pathlib.Path = FAULTS) -> dict[str, Fault]:
    """All faults by name.

    Raises:
      Mistake: one lacks a field or has another one, or two have one name.
    """
    found: dict[str, Fault] = {}
    for number, fields in enumerate(tomllib.loads(path.read_text())["fault"], start=1):
        try:
            fault = Fault(**fields)
        except TypeError as error:
            raise Mistake(f"{path.name}: fault {number}, {fields.get('name', 'without a name')!r}: {error}.") from error
        if fault.name in found:
            raise Mistake(f"{path.name}: two faults are called {fault.name!r}. Rename one of them.")
        found[fault.name] = fault
    return found


def chosen(faults: Mapping[str, Fault], names: Sequence[str]) -> list[Fault]:
    """Those of these names, or all, none of them stale.

    Raises:
      Mistake: there is no fault of a name, or the text of one does not occur exactly once.
    """
    for name in names:
        if name not in faults:
            raise Mistake(f"NAME {name!r} is no fault of {FAULTS.name}. There are: {', '.join(faults)}.")
    found = [faults[name] for name in names] if names else list(faults.values())
    for fault in found:
        fault.planted((ROOT / fault.file).read_text())
    return found


def copy_checkout(folder: pathlib.Path) -> None:
    """Copies the files that git tracks, as they are now; of links, the links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def run_tests(folder: pathlib.Path, test: str, options: Sequence[str], *, limit_s: float) -> str | None:
    """The first of some tests, a file or a function of one, that fails in a copy; None = none does, or there is none.

    Raises:
      Mistake: pytest could not run.
      subprocess.TimeoutExpired: it takes longer.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(folder)
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, test]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes) as process:
        try:
            output = process.communicate(timeout=limit_s)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
            raise
    return first_failure(process.returncode, output, test)


def first_failure(status: int, output: str, test: str) -> str | None:
    """The test that a run of pytest says to have failed.

    Raises:
      Mistake: pytest could not run.
    """
    if status in (0, 5) or (status == 4 and "ERROR: not found:" in output):  # 5: the file has no tests of this tier
        return None
    named = re.search(_FAILED, output, re.MULTILINE)
    if named:
        return named[1] or "(the file cannot be imported)"
    if status < 0:
        return "(the process dies)"
    raise Mistake(f"pytest of {test} ended with status {status}:\n{output[-2000:]}")


def try_out(fault: Fault, folder: pathlib.Path, limit_s: float, known: str = "") -> Outcome:
    """Plants a fault in a copy, runs its tests, and takes it out again.

    Args:
      fault: The fault.
      folder: The copy.
      limit_s: Seconds that a run of tests may take.
      known: Function that caught it last time; it runs first.

    Raises:
      Mistake: what catches it fails without it, too; or pytest could not run.
    """
    from tests.tiers import FULL

    path = folder / fault.file
    sound = path.read_text()
    runs: list[tuple[Tier, str, list[str]]] = [("default", fault.test, []), ("full", fault.test, ["-m", FULL])]
    if known and not known.startswith("("):
        runs.insert(0, ("default", f"{fault.test}::{known}", []))
    begun = time.monotonic()
    caught_by, options = None, list[str]()
    tier: Tier = "none"
    try:
        _put(path, fault.planted(sound))
        for of, test, options in runs:
            if caught_by := run_tests(folder, test, options, limit_s=limit_s):
                tier = of
                break
    except subprocess.TimeoutExpired:
        tier = "late"
    finally:
        _put(path, sound)
    seconds = time.monotonic() - begun
    if caught_by:
        function = f"{fault.test}::{caught_by.partition('[')[0]}"  # pytest does not find every case by its name
        again = fault.test if caught_by.startswith("(") else function
        if without := run_tests(folder, again, options, limit_s=3 * limit_s):
            raise Mistake(f"{fault.test}::{without} fails without {fault.name!r}, too. Repair it first.")
    return Outcome(caught_by=caught_by or "", tier=tier, seconds=seconds)


def _put(path: pathlib.Path, text: str) -> None:
    """Python takes compiled code for that of a file of equal size and second."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def not_reached(faults: Sequence[Fault]) -> list[str]:
    """A line for each fault for which `tests.affected` does not name the nearest tests."""
    from tests.affected import tests_of

    found = []
    for fault in faults:
        sound = (ROOT / fault.file).read_text()
        named = {test.partition("::")[0] for test in tests_of({fault.file: (sound, fault.planted(sound))})}
        if fault.test not in named:
            found.append(f"{fault.name}: tests.affected does not name {fault.test} for {fault.file}")
    return found


def table(faults: Mapping[str, Fault], outcomes: Mapping[str, Sequence[str]]) -> str:
    """The rows of all faults, in their order; of those that have no outcome, that they were not run."""
    rows = [HEAD, tuple("---" for _ in HEAD)]
    for name, fault in faults.items():
        caught_by, *others = outcomes.get(name, NOT_RUN)
        rows.append((name, fault.file.removeprefix("scalejax/"), f"`{caught_by}`" if caught_by else "", *others))
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def read_table(path: pathlib.Path = TABLE) -> dict[str, tuple[str, ...]]:
    """{name: caught by, tier, seconds}"""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == len(HEAD) and cells[0] not in (HEAD[0], "---"):
            found[cells[0]] = (cells[2].strip("`"), *cells[3:])
    return found


def write_table(faults: Mapping[str, Fault], outcomes: Mapping[str, Outcome], path: pathlib.Path = TABLE) -> None:
    """Puts the rows of what was run into the table; rows of faults that are gone go."""
    rows = read_table(path) | {name: outcome.cells for name, outcome in outcomes.items()}
    path.write_text(TITLE + table(faults, rows))


def try_all(faults: Sequence[Fault], limit_s: float, processes: int) -> Iterator[tuple[Fault, Outcome]]:
    """Outcomes, as they come. Each process has a copy of its own."""
    rows = read_table()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(processes) as pool:
        copies: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
        for number in range(processes):
            copy_checkout(pathlib.Path(folder) / str(number))
            copies.put(pathlib.Path(folder) / str(number))

        def in_a_copy(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                return try_out(fault, copy, limit_s, rows.get(fault.name, NOT_RUN)[0])
            finally:
                copies.put(copy)

        runs = {pool.submit(in_a_copy, fault): fault for fault in faults}
        try:
            for run in as_completed(runs):
                yield runs[run], run.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if nothing catches a fault or affected tests lack one, or 2 if something cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Plants faults and runs their tests.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault of tests/faults.toml; none = all")
    parser.add_argument("--affected", action="store_true", help="look what tests/affected.py names, and plant nothing")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="that a run of tests may take")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="side by side")
    parser.add_argument("--write", action="store_true", help="rewrite the table in tests/faults.md")
    given = parser.parse_args(arguments)
    outcomes: dict[str, Outcome] = {}
    try:
        faults = read_faults()
        asked = chosen(faults, given.names)
        if given.affected:
            unnamed = not_reached(asked)
            print("\n".join([f"{len(asked) - len(unnamed)} of {len(asked)} faults have their tests named", *unnamed]))
            return 1 if unnamed else 0
        for fault, outcome in try_all(asked, given.limit, given.processes):
            outcomes[fault.name] = outcome
            by = f"{fault.test}::{outcome.caught_by}" if outcome.caught_by else f"nothing in {fault.test}"
            print(f"{fault.name}: caught by {by} ({outcome.tier}, {outcome.seconds:.0f} s)", flush=True)
            if given.write:
                write_table(faults, outcomes)
    except Mistake as error:
        print(f"tests.faults: {error}", file=sys.stderr)
        return 2
    why = {"none": "nothing catches it", "late": f"nothing catches it in {given.limit:g} seconds"}
    wrong = [f"{name}: {why[outcome.tier]}" for name, outcome in outcomes.items() if outcome.tier in why]
    by_default = sum(outcome.tier == "default" for outcome in outcomes.values())
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} faults are caught, {by_default} by the default tier")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
