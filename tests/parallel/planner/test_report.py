"""Reports: readable, and plain values for programs."""

import dataclasses
import io
import json

import pytest
from planner_cases import machine, table
from rich.console import Console

from scalejax.parallel.planner import TableConstraints, plan
from scalejax.parallel.planner.report import Attempt, ranges
from scalejax.units import duration, size


def planned(tables=6):
    pairs = [table(f"t{i}", 1000 * (i + 1), 64, pooling=1.0 + i) for i in range(tables)]
    constraints = (TableConstraints(table="t0", kinds=("row_wise",)),)
    return plan([t for t, _ in pairs], [s for _, s in pairs], machine(), 512, constraints)


def text_of(report, **options):
    console = Console(file=io.StringIO(), width=250)
    report.render(console, **options)
    return console.file.getvalue()


def test_the_text_names_every_table_its_place_and_why():
    report = planned().report
    text = text_of(report)
    for line in report.tables:
        row = next(row for row in text.splitlines() if f" {line.table} " in row)
        assert line.kind in row
        assert line.why in row
        assert size(line.bytes) in row
    assert "8 devices in 2 hosts, 512 examples a step" in text
    assert f"balance {report.balance:.3f}" in text
    assert "fits" in text
    assert "no plan can be below" in text


def test_what_is_left_out_is_counted():
    text = text_of(planned(12).report, most_rows=5)
    assert "and 7 more" in text  # tables
    assert "and 3 more" in text  # devices


def test_tries_of_one_kind_are_one_line_with_the_best_of_them():
    report = dataclasses.replace(
        planned().report,
        attempts=tuple(
            Attempt(proposal=name, partitioner="greedy", max_s=seconds)
            for name, seconds in (("greedy", 3.0), ("uniform", 2.5), ("greedy", 2.0), ("greedy", None))
        ),
    )
    lines = text_of(report).split("Proposals, best first")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert rows == [["greedy", "greedy", "3", "2 s"], ["uniform", "greedy", "1", "2.5 s"]]


def test_json_holds_plain_values_that_add_up():
    report = planned().report
    found = json.loads(json.dumps(report.to_json()))
    assert found["fits"] is True
    assert [t["table"] for t in found["tables"]] == [f"t{i}" for i in range(6)]
    assert found["tables"][0]["kind"] == "row_wise"
    assert found["tables"][0]["ranks"] is None
    assert len(found["devices"]) == 8
    assert max(d["total_s"] for d in found["devices"]) == found["max_s"]
    for device in found["devices"]:
        assert sum(device["seconds"].values()) == pytest.approx(device["total_s"])
        parts = device["table_bytes"] + device["padding_bytes"] + device["buffer_bytes"]
        assert parts == device["memory_bytes"] == found["memory_bytes"]
    assert sum(d["table_bytes"] for d in found["devices"]) == sum(t["bytes"] for t in found["tables"])


@pytest.mark.parametrize(("ranks", "shown"), [((3,), "3"), ((3, 4, 5, 9), "3-5, 9"), ((1, 0), "1, 0")])
def test_ranks_are_shown_as_ranges(ranks, shown):
    assert ranges(ranks) == shown


def test_units():
    assert [size(12), size(1536), size(5 * 2**40)] == ["12 B", "1.5 KiB", "5 TiB"]
    assert [duration(0.0125), duration(3e-6), duration(0)] == ["12.5 ms", "3 us", "0 ns"]
