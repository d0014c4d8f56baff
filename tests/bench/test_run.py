"""What `bench.run` promises: the fields of a result, and clear refusals."""

import dataclasses
import datetime
import io
import json
import re
import subprocess
import sys
import threading
import time

import pytest
import rich.console

from scalejax import bench
from scalejax.bench import harness, machine, output
from scalejax.errors import UserError

FIELDS = ["name", "case", "device", "date", "commit", "ours_s", "peer", "peer_s", "ratio", "spread"]


class Stub:
    """A benchmark of two cases whose peer takes longer."""

    CASES = ("small", "large")
    PEERS = ("torch",)
    ON_CPU = True
    TAKES_DATA = True

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.data: list[object] = []

    def prepare(self, case, against, data) -> harness.Contest:
        self.data.append(data)
        return harness.Contest(
            ours=lambda units: time.sleep(1e-4 * units),
            peer=None if against is None else lambda units: time.sleep(3e-4 * units),
            check=lambda: None,
            examples=64,
            device="cpu (stub)",
            close=lambda: self.closed.append(case),
        )


@pytest.fixture
def stub(monkeypatch):
    stub = Stub()
    monkeypatch.setattr(bench, "_benchmark", lambda name: stub)
    return stub


QUICK = harness.Effort(turns=3, turn_s=1e-3)


def test_json_holds_one_object_a_case_with_the_agreed_fields(stub, tmp_path):
    path = tmp_path / "result.json"
    returned = bench.run("wukong_step", against="torch", json_path=path, effort=QUICK)
    written = json.loads(path.read_text())
    assert [row["case"] for row in written] == ["small", "large"]
    for row in written:
        assert list(row)[: len(FIELDS)] == FIELDS
        assert row["name"] == "wukong_step"
        assert row["peer"] == "torch"
        assert row["ratio"] == pytest.approx(row["peer_s"] / row["ours_s"])
        assert row["ours_s"] > 0
        datetime.date.fromisoformat(row["date"])
    assert output.from_json(path.read_text()) == returned


def test_without_a_peer_its_fields_are_null(stub, tmp_path):
    path = tmp_path / "result.json"
    bench.run("wukong_step", cases=["small"], json_path=path, effort=QUICK)
    (row,) = json.loads(path.read_text())
    assert (row["peer"], row["peer_s"], row["ratio"]) == (None, None, None)


class Partial(Stub):
    """Its second case is for another device, and its third does not compute the same as its peer."""

    CASES = ("small", "huge", "wrong")

    def prepare(self, case, against, data):
        if case == "huge":
            raise harness.Unsuited("--case huge takes minutes on a CPU.")
        contest = super().prepare(case, against, data)
        if case == "small":
            return contest

        def differ() -> None:
            raise harness.OutputsDiffer("logits")

        return dataclasses.replace(contest, check=differ)


def test_a_case_for_another_device_is_skipped_and_what_was_measured_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_benchmark", lambda name: Partial())
    path, shown = tmp_path / "result.json", io.StringIO()
    console = rich.console.Console(file=shown, width=160)
    with pytest.raises(harness.OutputsDiffer):
        bench.run("wukong_step", against="torch", json_path=path, console=console, effort=QUICK)
    lines = shown.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["wukong_step small", "wukong_step huge"]
    assert lines[1].endswith("skipped. --case huge takes minutes on a CPU.")
    assert [row["case"] for row in json.loads(path.read_text())] == ["small"]
    with pytest.raises(UserError, match="--case huge takes minutes"):  # asked for, it is a mistake
        bench.run("wukong_step", cases=["small", "huge"], effort=QUICK)


@pytest.mark.parametrize(("name", "case"), [("llama_step", "1b"), ("llama_decode", "8b")])
def test_the_large_cases_of_language_models_are_not_for_a_cpu(name, case):
    with pytest.raises(harness.Unsuited):
        bench._benchmark(name).prepare(case, None)


def test_the_bar_is_drawn_without_a_thread_beside_what_is_timed():
    console = rich.console.Console(file=io.StringIO(), force_terminal=True)
    before = threading.active_count()
    with bench._progress(console, "wukong_step small", 2) as advance:
        advance()
        assert threading.active_count() == before
    assert "wukong_step small" in console.file.getvalue()


def test_contests_are_closed_also_when_outputs_differ(stub, monkeypatch):
    def differ(*_, **__):
        raise harness.OutputsDiffer("logits")

    monkeypatch.setattr(harness, "measure", differ)
    with pytest.raises(harness.OutputsDiffer):
        bench.run("wukong_step", effort=QUICK)
    assert stub.closed == ["small"]


def test_the_users_data_reaches_the_benchmark(stub, tmp_path):
    bench.run("data_pipeline", cases=["small"], data=tmp_path, effort=QUICK)
    assert stub.data == [tmp_path]


def test_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"got 'wukong'.*Did you mean wukong_step"):
        bench.run("wukong")


@pytest.mark.parametrize("name", bench.names())
def test_unknown_case_and_peer_are_refused_before_anything_runs(name):
    with pytest.raises(UserError, match=r"--case of .* got 'b3'"):
        bench.run(name, cases=["b3"])
    with pytest.raises(UserError, match=r"--against of .* got 'tensorflow'"):
        bench.run(name, against="tensorflow")


def test_a_result_file_that_cannot_be_written_is_refused_before_measuring(stub, tmp_path):
    with pytest.raises(UserError, match=r"--json: folder .*missing does not exist"):
        bench.run("wukong_step", json_path=tmp_path / "missing" / "result.json")
    with pytest.raises(UserError, match="--json: cannot write"):
        bench.run("wukong_step", json_path=tmp_path)
    assert stub.data == []


def test_a_missing_peer_names_the_script_that_installs_it():
    # torch may be installed where this runs: a fresh interpreter that refuses to import it is not.
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from scalejax import errors\nfrom scalejax.bench import peers\n"
        "try:\n    peers.load('torch_training')\n"
        "except errors.UserError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch, which is not installed" in done.stdout
    assert "benchmarks/peers.sh" in done.stdout


@pytest.mark.slow
def test_no_peer_library_is_imported_until_it_is_asked_for():
    code = (
        "import importlib, sys\nfrom scalejax import bench\n"
        "[importlib.import_module(f'scalejax.bench.cases.{name}') for name in bench.names()]\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_markdown_shows_command_device_and_ratio():
    result = harness.Result(
        name="wukong_step",
        case="b1024",
        device="cpu (x, 2 threads)",
        date="2026-01-02",
        commit="abc",
        ours_s=0.002,
        peer="torch",
        peer_s=0.003,
        ratio=1.5,
        spread=0.031,
        examples=1024,
    )
    text = output.markdown([result], "scalejax bench wukong_step --against torch")
    assert "`scalejax bench wukong_step --against torch`" in text
    assert "cpu (x, 2 threads), 2026-01-02, commit abc" in text
    assert re.search(r"\| wukong_step \| b1024 \| 2 ms \| torch \| 3 ms \| 1\.50 \| 3\.1% \| 512,000 \|", text)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (5e-6, "5 us"), (0.0123, "12.3 ms"), (2.0, "2 s"), (0.9996, "1 s"), (0.999, "999 ms")],
)
def test_durations_carry_a_unit(seconds, shown):
    assert output.duration(seconds) == shown


def test_threads_are_held_inside_the_block_and_given_back():
    before = machine.usable_cpus()
    with machine.cpu_threads(1) as count:
        assert count == 1
        assert len(machine.usable_cpus()) == 1
    assert machine.usable_cpus() == before
