"""Tiers of the tests: every test is in one shard, shards are even, and the next one is the one that ran longest ago."""

import datetime
import json
import subprocess
import sys
import zlib

import pytest
import tiers
from tiers import Run, Unit

TODAY = datetime.date(2026, 3, 1)
HISTORY = [f"{number:012x}" for number in range(300, 0, -1)]
"""The newest first."""


def ran(shard, ago, date="2026-03-01"):
    return Run(shard, HISTORY[ago], date, 600, "passed")


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
    }
    found = tiers.units(sources, durations)
    assert found[:2] == [Unit("a.py", 0, 1, 9.0), Unit("b.py", 0, 1, 3.0)]
    assert found[2:5] == [Unit("long.py", part, 3, 167.0) for part in range(3)]
    assert found[5] == Unit("new.py", 0, 1, (9.0 + 3.0 + 501.0) / 3)


@pytest.mark.parametrize("text", [None, "{", '{"a.py": {"test_a": 3}}', '{"a.py": ["test_a"]}', "[]"])
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
    path.write_text(
        json.dumps({file: {own: [9.0, 7.0], "test_gone": [1.0, 1.0]}, "tests/test_gone.py": {"test": [1, 1]}})
    )
    tiers.store_durations({(file, own): [2.5, 0.0], (file, "test_gone"): [3.0, 0.0]}, path)
    assert json.loads(path.read_text()) == {file: {own: [2.5, 7.0]}}


@pytest.mark.parametrize(
    ("runs", "shard"),
    [
        ([], 1),
        ([ran(1, 0)], 2),
        ([ran(shard, 10 - shard) for shard in (1, 2, 3, 4, 5)], 1),
        ([ran(3, 9), ran(1, 8), ran(2, 7), ran(5, 6), ran(4, 5)], 3),
        ([ran(3, 9), ran(3, 1), ran(1, 8), ran(2, 7), ran(5, 6), ran(4, 5)], 1),
        ([ran(1, 3), Run(2, "not a commit", "2026-02-01", 1, "passed")], 2),
        # Lines of three days were lost: the shards after the first are not run again and again in its place.
        ([ran(shard, 10 - shard, "2026-02-26") for shard in (1, 2, 3, 4, 5)], 4),
    ],
)
def test_the_next_shard_is_the_one_that_ran_longest_ago(runs, shard):
    assert tiers.next_shard(runs, HISTORY, TODAY) == shard


def test_lines_of_commits_that_are_not_in_the_history_count_as_never():
    runs = [ran(1, 120), Run(2, "not a commit", "2026-03-01", 1, "passed"), ran(3, 2)]
    assert tiers.ages(runs, HISTORY) == {1: 120, 2: None, 3: 2, 4: None, 5: None}
    assert tiers.ages(runs, []) == dict.fromkeys(range(1, 6))


def test_a_record_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "full_tier.tsv"
    assert tiers.read_record(path) == []
    path.write_text(tiers.RECORD.read_text().splitlines()[0] + "\n3\tabc\t2026-03-01\t612\tpassed\n")
    assert tiers.read_record(path) == [Run(3, "abc", "2026-03-01", 612, "passed")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slow"], "invalid choice: 'slow'"),
        (["full"], "--shard N or --next"),
        (["full", "--shard", "6"], "invalid choice: 6"),
        (["quick", "--shard", "1"], "--shard N or --next"),
        (["full", "--shard", "1", "--next"], "not allowed with"),
    ],
)
def test_a_tier_or_shard_that_does_not_exist_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        tiers.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


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
        assert not test or test in tiers.functions_of(texts[file]), name
        seconds += known.get(test, (0, 0))[0] if test else sum(unmarked for unmarked, _ in known.values())
    assert 60 < seconds < 2 * 150
