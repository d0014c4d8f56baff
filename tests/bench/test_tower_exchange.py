"""The script that measures exchanges over slow links, in its smallest form; what it leaves behind; what it found."""

import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs in a checkout")


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("tower_exchange")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def permitted(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "Linux alone has namespaces" if sys.platform != "linux" else script.slow_links.not_permitted()
    if reason is not None:
        pytest.skip(f"network namespaces with limited links: {reason}")
    monkeypatch.delenv("XLA_FLAGS")  # bits of two programs are compared, as users compile them


def processes_of(mark: str) -> list[str]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if mark in text and int(path.parent.name) != os.getpid():
            found.append(text)
    return found


def interfaces() -> list[str]:
    return sorted(path.name for path in pathlib.Path("/sys/class/net").iterdir())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_measures_every_form_between_namespaces_and_leaves_none(script: Any, permitted: None) -> None:
    before, task = interfaces(), script.Task(hosts=2, mbit=200, turns=1, examples=512, tables=4, dim=16)
    found = script.run(task)
    rows = script.rows(found)
    assert [row.name for row in rows] == ["flat", "c = 1", "c = 2", "c = 4", "c = 8"]
    # Two devices of 512 examples with four vectors of 16 numbers, there and back, and their ids; half of it crosses.
    numbers = [(1, 1), (1, 2), (2, 2), (4, 2), (8, 2)]  # compression, numbers for an id
    assert [row.sent for row in rows] == [2 * 512 / 2 * 4 * 4 * (2 * 16 / c + n) for c, n in numbers]
    for row in rows:
        # All of it went over the links, with headers and acknowledgements, and not over the loopback.
        assert 0.98 * row.sent < row.on_wire < 1.5 * row.sent + 50_000
        # A bucket lets 28 kB through at once, and the rest at its rate.
        assert row.seconds > (row.sent - 28_000) * 8 / 200e6
    assert interfaces() == before
    assert not processes_of(json.dumps(dataclasses.asdict(task)))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_everything_ends_with_the_script_however_it_ends(permitted: None) -> None:
    mark = '"mbit": 77.0'
    command = [sys.executable, "benchmarks/tower_exchange.py", "--hosts", "2", "--mbit", "77"]
    script = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len([p for p in processes_of(mark) if "--host" in p]) < 2 and script.poll() is None:
            time.sleep(0.05)
        assert len(processes_of(mark)) >= 3
    finally:
        script.send_signal(signal.SIGKILL)
        script.wait()
    while processes_of(mark):  # as long as a test may take
        time.sleep(0.05)


def test_without_namespaces_it_says_why_and_gives_bytes_over_rate(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    script.main(["--hosts", "2", "--mbit", "100", "--examples", "256"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Network namespaces with limited links are not permitted here: tc not found."
    # 2 x 256 examples, 16 tables of 128 numbers there and back and 4 or 8 bytes an id, half of it for the other host.
    assert said[2].split() == ["flat", "4.211", "MB", "a", "host", "336.9", "ms"]
    assert said[-1].split()[:5] == ["c", "=", "8", "0.557", "MB"]


@pytest.fixture
def written() -> list[dict[str, Any]]:
    return json.loads((RESULTS / "tower_exchange.json").read_text())


def test_what_was_written_is_what_was_measured(script: Any, written: list[dict[str, Any]]) -> None:
    page = (RESULTS / "tower_exchange.md").read_text()
    for found in written:
        assert script.table(found) in page


def test_times_at_100_megabits_are_those_of_the_formula(script: Any, written: list[dict[str, Any]]) -> None:
    slow = [found for found in written if found["mbit"] == 100]
    assert [found["hosts"] for found in slow] == [2, 4]
    for found in slow:
        rows = {row.name: row for row in script.rows(found)}
        for name, row in rows.items():
            assert 0.75 < row.seconds / row.formula < 1.25, (found["hosts"], name)
        assert rows["c = 4"].over_flat > 2.5
