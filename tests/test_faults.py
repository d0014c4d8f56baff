"""Faults that can be planted, and what the driver makes of what it is told."""

import dataclasses
import re

import faults
import pytest


@pytest.fixture(scope="module")
def known():
    return faults.read_faults()


def test_every_fault_can_be_planted_and_has_tests(known):
    for fault in known.values():
        source = (faults.ROOT / fault.file).read_text()
        assert fault.planted(source) != source, fault.name
        assert (faults.ROOT / fault.test).is_file(), fault.name
        assert fault.file.startswith("scalejax/"), fault.name
        assert re.fullmatch(r"[a-z0-9-]+", fault.name)


def test_every_folder_of_the_package_has_a_fault(known):
    folders = {path.parent.name for path in (faults.ROOT / "scalejax").glob("*/__init__.py")}
    assert folders == {fault.file.split("/")[1] for fault in known.values()}


def test_the_table_has_a_row_for_each_fault_in_order(known):
    assert list(faults.read_table()) == list(known), "python -m tests.faults NAME --write"


def test_a_fault_whose_text_is_gone_or_not_alone_is_named(known):
    first = next(iter(known.values()))
    for text, count in (("nowhere in this file", 0), ("\n", "[0-9]{2,}")):
        stale = dataclasses.replace(first, text=text)
        with pytest.raises(faults.Mistake, match=rf"{first.name}.*{first.file}; it occurs {count} times"):
            faults.chosen({first.name: stale}, [])


def test_an_unknown_name_is_answered_with_those_that_there_are(known, capsys):
    assert faults.main(["nothing-of-the-kind"]) == 2
    said = capsys.readouterr().err
    assert "'nothing-of-the-kind' is no fault" in said
    assert all(name in said for name in known)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[fault]]\nname = "one"\n', "fault 1, 'one': .*missing"),
        (2 * '[[fault]]\nname = "a"\nfile = "f"\ntext = "t"\nwrong = "w"\ntest = "t"\n', "two faults are called 'a'"),
    ],
)
def test_a_list_with_a_mistake_is_refused(text, words, tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(faults.Mistake, match=words):
        faults.read_faults(path)


@pytest.mark.parametrize(
    ("status", "line", "test"),
    [
        (0, "1 passed", None),
        (5, "3 deselected", None),
        (1, "FAILED tests/nn/test_norm.py::test_a[x - 1] - AssertionError: a[0] - b", "test_a[x - 1]"),
        (1, "FAILED tests/nn/test_norm.py::test_a[x-1]", "test_a[x-1]"),
        (1, "ERROR tests/nn/test_norm.py::test_a - fixture", "test_a"),
        (2, "ERROR tests/nn/test_norm.py - NameError: x", "(the file cannot be imported)"),
        (-6, "Fatal Python error: Aborted", "(the process dies)"),
        (4, "ERROR: not found: tests/nn/test_norm.py::test_gone", None),
    ],
)
def test_the_failing_test_is_read_from_what_pytest_says(status, line, test):
    assert faults.first_failure(status, f".....\n{line}\n1 line more", "tests/nn/test_norm.py") == test


def test_a_pytest_that_cannot_run_is_no_catch():
    with pytest.raises(faults.Mistake, match=r"status 4:(?s:.*)no such option"):
        faults.first_failure(4, "no such option", "tests/nn/test_norm.py")


def test_rows_of_faults_that_were_run_are_replaced_and_of_those_that_are_gone_removed(known, tmp_path):
    one, two = list(known)[:2]
    some = {name: known[name] for name in (one, two)}
    path = tmp_path / "faults.md"
    path.write_text("| gone | f | `t` | full | 3 |\n")
    faults.write_table(some, {one: faults.Outcome(caught_by="test_a[x|y]", tier="default", seconds=4.4)}, path)
    assert faults.read_table(path) == {one: ("test_a", "default", "4"), two: faults.NOT_RUN}
    faults.write_table(some, {two: faults.Outcome(caught_by="", tier="none", seconds=9)}, path)
    assert faults.read_table(path) == {one: ("test_a", "default", "4"), two: ("", "none", "9")}
    assert path.read_text().startswith("# Planted faults\n\n")


def test_faults_are_spread_over_folders_by_lines_of_code(known):
    """At least one for every thousand lines, and 160 in all."""
    assert len(known) >= 160
    for folder in (faults.ROOT / "scalejax").iterdir():
        lines = sum(path.read_text().count("\n") for path in folder.rglob("*.py"))
        assert sum(fault.file.startswith(f"scalejax/{folder.name}/") for fault in known.values()) >= lines // 1000, (
            folder
        )
