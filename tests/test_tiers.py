"""Tiers of the tests: every test is in one shard, shards are even, and the next one is the one that ran longest ago."""

import datetime
import json
import os
import re
import subprocess
import sys
import time
import zlib

import faults
import pytest
import tiers
from tiers import Budget, Run, Unit

TODAY = datetime.date(2026, 3, 1)
HISTORY = [f"{number:012x}" for number in range(300, 0, -1)]
"""The newest first."""


FIVE = [str(number) for number in range(1, 6)]


def ran(shard, ago, date="2026-03-01"):
    return Run(str(shard), HISTORY[ago], date, 600, "passed")


def test_every_file_is_in_the_shards_once_and_none_is_much_longer_than_another():
    pieces = tiers.units(tiers.sources(), tiers.read_durations())
    shards = tiers.pack(pieces)
    assert sorted(unit for shard in shards for unit in key(shard)) == sorted(key(pieces))
    assert {unit.file for unit in pieces} == set(tiers.sources())
    totals = [sum(unit.seconds for unit in shard) for shard in shards]
    assert max(totals) - min(totals) <= max(unit.seconds for unit in pieces)
    assert all(unit.seconds <= tiers.LONGEST for unit in pieces)


def key(units):
    return [(unit.file, unit.part, unit.parts) for unit in units]


def test_functions_and_files_that_were_never_measured_count_as_the_mean_of_the_others():
    sources = {
        "a.py": "def test_one(): ...\ndef test_two(): ...\n\nclass A:\n    def test_new(self): ...",
        "b.py": "async def test_b(): ...",
        "long.py": "def test_long(): ...",
        "new.py": "def test_c(): ...",
    }
    durations = {
        "a.py": {"test_one": [1.0, 2.0], "test_two": [3.0, 0.0], "test_gone": [100.0, 0.0]},
        "b.py": {"test_b": [3.0, 0.0]},
        "long.py": {"test_long": [1.0, 500.0]},
        "new.py": {"test_c": [0.0, 0.0]},
    }
    found = tiers.units(sources, durations)
    assert found[:2] == [Unit("a.py", 0, 1, 3.0), Unit("b.py", 0, 1, 0.0)]
    assert found[2:5] == [Unit("long.py", part, 3, 500.0 / 3) for part in range(3)]
    assert found[5:] == [Unit("new.py", 0, 1, (3.0 + 0.0 + 500.0) / 3)]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        '{"a.py": {"test_a": [NaN, 0]}}',
        '{"a.py": {"test_a": [-3, 0]}}',
        '{"a.py": {"test_a": 3}}',
        '{"a.py": ["test_a"]}',
        "[]",
    ],
)
def test_durations_that_cannot_be_read_are_said_once_and_files_count_alike(text, tmp_path, capsys):
    path = tmp_path / "durations.json"
    if text is not None:
        path.write_text(text)
    durations = tiers.read_durations(path)
    assert durations == {}
    assert capsys.readouterr().out.count("durations.json cannot be read") == 1
    assert {unit.seconds for unit in tiers.units({"a.py": "def test_a(): ...", "b.py": ""}, durations)} == {1.0}


def test_what_was_measured_takes_the_place_of_what_was_known(tmp_path):
    path, file = tmp_path / "durations.json", "tests/test_tiers.py"
    own = "test_what_was_measured_takes_the_place_of_what_was_known"
    marked = "test_the_parts_of_a_file_are_all_of_it_and_their_tests_stay"
    functions = {own: [9.0, 7.0], "test_gone": [1.0, 1.0], marked: [2.0, 1.0]}
    path.write_text(json.dumps({file: functions, "tests/test_gone.py": {"test": [1, 1]}}))
    tiers.store_durations({(file, own): [2.5, 0.0], (file, "test_gone"): [3.0, 0.0]}, path)
    assert json.loads(path.read_text()) == {file: {own: [2.5, 7.0], marked: [0.0, 3.0]}}


@pytest.mark.parametrize(
    ("runs", "shard"),
    [
        ([], 1),
        ([ran(1, 0)], 2),
        ([ran(shard, 10 - shard) for shard in (1, 2, 3, 4, 5)], 1),
        ([ran(3, 9), ran(1, 8), ran(2, 7), ran(5, 6), ran(4, 5)], 3),
        ([ran(3, 9), ran(3, 1), ran(1, 8), ran(2, 7), ran(5, 6), ran(4, 5)], 1),
        ([ran(1, 3), Run("2", "not a commit", "2026-02-01", 1, "passed")], 2),
        # Lines of three days were lost: the shards after the first are not run again and again in its place.
        ([ran(shard, 10 - shard, "2026-02-26") for shard in (1, 2, 3, 4, 5)], 4),
    ],
)
def test_the_next_shard_is_the_one_that_ran_longest_ago(runs, shard):
    assert tiers.due(runs, HISTORY, TODAY, FIVE) == str(shard)


def test_where_no_run_was_ever_committed_every_commit_has_the_next_shard():
    found = [tiers.due([], HISTORY[ago:], TODAY, FIVE) for ago in (5, 4, 3, 2, 1, 0)]
    assert found == ["1", "2", "3", "4", "5", "1"]


def test_steps_take_turns_whatever_shards_did_in_between():
    steps = ["python312", "notebooks", "documents"]
    assert (
        tiers.due([ran("notebooks", 9), ran("python312", 5), ran("documents", 2), ran(3, 0)], HISTORY, TODAY, steps)
        == "notebooks"
    )
    assert tiers.due([ran(3, 0), ran("python312", 0)], HISTORY, TODAY, steps) == "notebooks"


def test_lines_of_commits_that_are_not_in_the_history_count_as_never():
    runs = [ran(1, 120), Run("2", "not a commit", "2026-03-01", 1, "passed"), ran(3, 2)]
    assert tiers.ages(runs, HISTORY, FIVE) == {"1": 120, "2": None, "3": 2, "4": None, "5": None}
    assert tiers.ages(runs, [], FIVE) == dict.fromkeys(FIVE)


def test_a_record_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "full_tier.tsv"
    assert tiers.read_record(path) == []
    path.write_text(tiers.RECORD.read_text().splitlines()[0] + "\n3\tabc\t2026-03-01\t612\tpassed\n")
    assert tiers.read_record(path) == [Run("3", "abc", "2026-03-01", 612, "passed")]


def test_lines_that_are_no_runs_are_said_and_do_not_count(tmp_path, capsys):
    path, run = tmp_path / "full_tier.tsv", "3\tabc\t2026-03-01\t612\tpassed"
    damaged = [
        "<<<<<<< HEAD", "3\tabc", "x\tabc\t2026-03-01\t612\tpassed", "4\tabc\tyesterday\t612\tpassed",
        "4\tabc\t2026-03-01\t612\tperhaps", "",
    ]  # fmt: skip
    path.write_text("\n".join(["header", *damaged, run]) + "\n")
    assert tiers.read_record(path) == [Run("3", "abc", "2026-03-01", 612, "passed")]
    said = capsys.readouterr().out.splitlines()
    assert [re.search(r"line (\d) is no run", line).group(1) for line in said] == list("23456")


def test_a_shard_is_run_and_recorded_outside_of_a_checkout_too_and_counts_as_never(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiers, "RECORD", tmp_path / "full_tier.tsv")
    monkeypatch.setattr(tiers, "run_shard", lambda shard, options: 1)
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    for path in ("/nowhere", "/usr/bin:/bin"):  # without git, and with one that finds no checkout
        monkeypatch.setenv("PATH", path)
        assert tiers.main(["full", "--next", "--record"]) == 1
    lines = tiers.RECORD.read_text().splitlines()
    assert [re.sub(r"\t[-0-9]+", "", line) for line in lines] == ["1\tunknown\tfailed"] * 2
    assert tiers.main(["behind"]) == 0
    assert capsys.readouterr().out.endswith(f"commits: {', '.join(tiers.parts())}\n")


@pytest.mark.parametrize(
    ("statuses", "result", "status"),
    [((0, 0), "passed", 0), ((tiers.CUT, 0), "cut", 0), ((0, tiers.CUT), "cut", 0), ((tiers.CUT, 1), "failed", 1)],
)
def test_a_shard_that_is_cut_off_by_time_is_recorded_and_fails_only_where_a_test_did(
    statuses, result, status, tmp_path, monkeypatch
):
    found = iter(statuses)
    monkeypatch.setattr(tiers, "RECORD", tmp_path / "full_tier.tsv")
    monkeypatch.setattr(tiers, "pytest", lambda arguments: next(found))
    monkeypatch.setattr(
        tiers, "pack", lambda units: [[Unit("tests/a.py", 0, 1, 1.0), Unit("tests/multiprocess/b.py", 0, 1, 1.0)]]
    )
    assert tiers.main(["full", "--shard", "1", "--record", "--limit", "1"]) == status
    assert tiers.RECORD.read_text().split()[-1] == result


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "two"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_has_not_begun_by_a_time_is_left_out_and_a_failure_until_then_counts(processes, fails, tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "tiers.py", "over_a_second.toml"):
        (folder / name).write_text((tiers.ROOT / "tests" / name).read_text())
    # The first test moves the clock of its process far ahead, so that the second one has not begun in time.
    first = f"    now = time.time()\n    time.time = lambda: now + 5000\n    assert not {fails}\n"
    for name in "ab":  # a file for each process
        (folder / f"test_{name}.py").write_text(f"import time\n\ndef test_first():\n{first}\ndef test_last(): ...\n")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *processes, f"--until={time.time() + 2000}"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "did not run" in done.stdout
    assert done.returncode == (1 if fails else tiers.CUT), done.stdout + done.stderr


MEASURED = {
    ("tests/a.py", "test_a"): [1.4, 0.0],
    ("tests/a.py", "test_b"): [9.0, 0.0],
    ("tests/b.py", "test_c"): [0.9, 5.0],
}


def test_functions_over_a_second_are_named_unless_they_are_exceptions(monkeypatch):
    assert tiers.over_a_second(MEASURED) == ["   9.0 s  tests/a.py::test_b", "   1.4 s  tests/a.py::test_a"]
    monkeypatch.setattr(tiers, "read_over_a_second", lambda: {"tests/a.py::test_b": "a reason"})
    assert tiers.over_a_second(MEASURED) == ["   1.4 s  tests/a.py::test_a"]


def test_exceptions_are_functions_that_exist_with_a_fault_that_they_catch_or_a_reason():
    texts, known = tiers.sources(), faults.read_faults()
    caught = {name: f"{known[name].test}::{row[0]}" for name, row in faults.read_table().items() if name in known}
    for name, why in tiers.read_over_a_second().items():
        file, _, function = name.partition("::")
        assert function in tiers.functions_of(texts[file]), name
        assert why in known or len(why.split()) > 2, name
        assert caught.get(why, name) == name, f"{why} is caught by {caught[why]}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slow"], "invalid choice: 'slow'"),
        (["full"], "--shard --next is required"),
        (["full", "--shard", str(tiers.SHARDS + 1)], f"invalid choice: {tiers.SHARDS + 1}"),
        (["full", "--shard", "0"], "invalid choice: 0"),
        (["full", "--shard", "one"], "invalid int value: 'one'"),
        (["quick", "--shard", "1"], "unrecognized arguments: --shard 1"),
        (["default", "--record"], "unrecognized arguments: --record"),
        (["full", "--shard", "1", "--next"], "not allowed with"),
        (["due", "lunch"], "invalid choice: 'lunch'"),
        (["record", "notebooks", "3", "perhaps"], "invalid choice: 'perhaps'"),
    ],
)
def test_a_tier_or_shard_that_does_not_exist_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        tiers.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_parts_of_a_file_are_all_of_it_and_their_tests_stay():
    """Every test has the part that its own name gives, whatever others there are."""
    file = "tests/optim/test_optim.py"

    def collected(*options):
        run = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-o", "addopts="]
        quiet = ["--import-mode=importlib", "-q", *options, file]
        done = subprocess.run([*run, *quiet], cwd=tiers.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "::" in line]

    whole, parts = collected(), [collected(f"--part={file}={part}/2") for part in range(2)]
    assert sorted(test for part in parts for test in part) == sorted(whole)
    assert all(parts)
    for number, part in enumerate(parts):
        assert [zlib.crc32(test.encode()) % 2 for test in part] == [number] * len(part)


def test_the_quick_tier_names_what_there_is_and_takes_less_than_three_minutes():
    """On two idle cores, by the durations that are stored, with some for collection."""
    texts, durations, seconds = tiers.sources(), tiers.read_durations(), 0.0
    for name in tiers.QUICK:
        file, _, test = name.partition("::")
        known = durations.get(file, {})
        assert file in texts, name
        assert not test or test in tiers.functions_of(texts[file]), name
        seconds += known.get(test, (0, 0))[0] if test else sum(unmarked for unmarked, _ in known.values())
    assert 60 < seconds < 2 * 150


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        ((), {"a-1", "b-2", "b-3"}),
        (("*-1",), {"a-1", "b-1"}),
        (("a-3", "b-*"), {"a-3", "b-1", "b-2", "b-3"}),
    ],
)
def test_cases_of_the_default_tier_are_those_that_are_named_or_have_every_value(patterns, kept):
    product = {f"{x}-{y}": {"x": x, "y": y} for x in "ab" for y in (1, 2, 3)}
    found = tiers.default_cases(product, patterns)
    if patterns:
        assert found == kept
    else:
        assert len(found) == len(kept)
        assert {value for name in found for value in product[name].values()} == {"a", "b", 1, 2, 3}
    with pytest.raises(ValueError, match=r"no case is named 'c-\*', of a-1, "):
        tiers.default_cases(product, ("a-1", "c-*"))


NAMED = re.compile(r"(?<![\w./-])tests/[\w./-]*\w(?:::\w+)?")


def test_what_ci_names_is_there_and_runs_by_default_unless_marks_are_named():
    texts, durations = tiers.sources(), tiers.read_durations()
    named = {
        (script.name, name) for script in (tiers.ROOT / ".ci").iterdir() for name in NAMED.findall(script.read_text())
    }
    assert len(named) > 20
    for script, name in named:
        file, _, test = name.partition("::")
        assert (tiers.ROOT / file).exists(), f"{script}: {name}"
        assert not test or test in tiers.functions_of(texts[file]), f"{script}: {name}"
        assert script != "wheel.sh" or not test or durations[file][test][0] > 0, f"{script}: {name} is slow"


def test_every_file_is_in_one_system_and_every_pattern_is_of_some_file():
    budgets, files = tiers.read_budgets(), tiers.sources()
    for file in files:
        assert len(tiers.systems_of(file, budgets)) == 1, file
    for system, budget in budgets.items():
        for pattern in budget.files:
            assert any(tiers.fnmatch.fnmatchcase(file, f"tests/{pattern}") for file in files), (system, pattern)
    assert [system for system, budget in budgets.items() if not budget.files] == ["house"]


BUDGETS = {"one": Budget(("a/*",), 10.0, 100.0), "rest": Budget((), 5.0, 50.0)}
KNOWN = {
    "tests/a/test_a.py": {"test_a": [4.0, 9.0]},
    "tests/a/test_slow.py": {"test_slow": [0.0, 9.0]},
    "tests/test_b.py": {"test_b": [4.0, 0.0]},
}


@pytest.mark.parametrize(
    ("measured", "full", "over"),
    [
        ({"tests/a/test_a.py": 11.0, "tests/test_b.py": 5.0}, False, ["one: 11 s of 10 s"]),
        ({"tests/a/test_a.py": 11.0, "tests/a/test_new.py": 1.0}, False, ["one: 12 s of 10 s"]),
        ({"tests/a/test_slow.py": 99.0}, False, []),  # a part of its files
        ({"tests/a/test_a.py": 99.0}, True, []),
        ({"tests/a/test_a.py": 90.0, "tests/a/test_slow.py": 11.0}, True, ["one: 101 s of 100 s"]),
        ({"tests/test_b.py": 5.1}, False, ["rest: 5 s of 5 s"]),
        ({}, False, []),
    ],
)
def test_a_system_over_its_budget_is_named_if_all_of_it_ran(measured, full, over):
    assert [line.removesuffix(" (budgets.toml)") for line in tiers.over_budget(measured, full, KNOWN, BUDGETS)] == over
    assert tiers.over_budget(measured, full, KNOWN, {}) == []


@pytest.mark.parametrize("text", [None, "[", '[one]\nfiles = ["a"]\n', "one = 3\n"])
def test_budgets_that_cannot_be_read_are_none(text, tmp_path, capsys):
    path = tmp_path / "budgets.toml"
    if text is not None:
        path.write_text(text)
    assert tiers.read_budgets(path) == {}
    assert capsys.readouterr().out.count("budgets.toml cannot be read") == 1
