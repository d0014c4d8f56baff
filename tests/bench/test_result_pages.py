"""Pages of `benchmarks/results` whose command takes seconds hold what it prints."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="runs in a checkout")

QUALITY = ["--runs", str(RESULTS / "click_runs.jsonl"), "--report"]
BASELINES = ["logistic regression", "gradient boosting", "MLP", "DLRM", "DCNv2", "Wukong", "cross, wider"]


def towers(base: str, *kinds: str) -> list[str]:
    """A report of a model over towers beside the flat one."""
    return [*QUALITY, "--against", base, "--forms", *(f"{base}, {kind}" for kind in kinds)]


def rows(printed: str) -> list[str]:
    """Of tables."""
    return [line for line in printed.splitlines() if line.startswith("|")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "least"),
    [
        ("dhen_plans", [], 7),
        ("tower_plans", [], 50),
        ("growth_pruning", ["--runs", str(RESULTS / "growth_pruning.jsonl"), "--report"], 2 * 10),
        ("quality", [*QUALITY], 13),
        ("quality", [*QUALITY, "--tables", "single", "pairs"], 19),
        ("quality", [*QUALITY, "--tables", "depths", "sizes", "experts"], 10),
        ("quality", [*QUALITY, "--split", "time"], 10),
        ("quality", [*QUALITY, "--split", "random-day"], 10),
        ("quality", [*QUALITY, "--split", "movielens", "--forms", *BASELINES], 10),
        (
            "quality",
            towers("DLRM", "2 towers", "4 towers", "8 towers", *(f"4 towers, CR {n}" for n in (1, 4, 8, 16))),
            10,
        ),
        ("quality", towers("DCNv2", "2 towers", "4 towers", "8 towers"), 6),
        ("quality", towers("DLRM, 4 towers", "diverse", "stride", "random"), 6),
        ("quality", [*towers("DLRM", "2 towers", "4 towers"), "--split", "movielens"], 5),
        ("quality", [*towers("DCNv2", "2 towers", "4 towers"), "--split", "movielens"], 5),
    ],
)
def test_a_page_has_every_row_that_its_command_prints(script, arguments, least, scripts, monkeypatch, capsys):
    """Of growth and pruning the runs are of the ways and schedules as they are."""
    module = scripts(script)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    module.main()
    printed, page = rows(capsys.readouterr().out), (RESULTS / f"{script}.md").read_text().splitlines()
    assert len(printed) >= least
    assert [row for row in printed if row not in page] == []
