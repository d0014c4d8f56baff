"""The planner benchmark without its peer."""

import numpy as np
import pytest

from scalejax.bench import harness, output
from scalejax.bench.cases import planner
from scalejax.errors import UserError


def test_a_run_gives_seconds_and_figures():
    contest = planner.prepare("t100-d16", None, None)
    ours, peer = harness.measure(contest, planner.EFFORT)
    assert len(ours) == 1
    assert peer == []
    figures = contest.figures()
    assert figures["bound_ms"] <= figures["ours_max_ms"]
    assert 1 <= figures["ours_balance"] < 1.1
    assert figures["ours_memory_share"] <= 1
    assert not any(name.startswith("peer") for name in figures)


def test_tables_are_drawn_around_their_traces():
    task = planner.make_task("t1000-d128", ((10.0, 5.0),))
    assert (len(task.tables), task.topology.devices, task.topology.hosts) == (1000, 128, 16)
    pooling = np.array([entry.ids_per_example for entry in task.statistics])
    # Log-normal with mean 10 and sigma 1: a standard deviation of 13.1; five standard errors.
    assert abs(pooling.mean() - 10) < 5 * 13.1 / np.sqrt(1000)
    assert 3.0e6 < np.mean([table.rows for table in task.tables]) < 5.5e6
    assert {table.dim for table in task.tables} == {4, 8, 16, 32, 64, 128}
    assert planner.make_task("t1000-d128", ((10.0, 5.0),)) == task


def test_traces_are_read_from_a_file(tmp_path):
    path = tmp_path / "traces.csv"
    path.write_text("file,mean_pooling,mean_reuse\na,15.8,6.9\nb,13.6,12.7\n")
    assert planner.read_traces(path) == ((15.8, 6.9), (13.6, 12.7))


@pytest.mark.parametrize("text", ["mean_pooling\n1\n", "mean_pooling,mean_reuse\n", "mean_pooling,mean_reuse\nx,2\n",
                                  "mean_pooling,mean_reuse\n1,0.5\n"])  # fmt: skip
def test_files_without_traces_are_refused(tmp_path, text):
    path = tmp_path / "traces.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--data: .*mean_pooling"):
        planner.prepare("t100-d16", None, path)
    with pytest.raises(UserError, match="--data: cannot read"):
        planner.read_traces(tmp_path / "absent.csv")


def test_figures_leave_with_the_results():
    result = harness.Result(name="planner", case="t100-d16", device="cpu", date="2026-01-02", commit="abc", ours_s=1.0,
                            peer=None, peer_s=None, ratio=None, spread=0.0, examples=100,
                            figures={"ours_balance": 1.25})  # fmt: skip
    assert output.from_json(output.to_json([result])) == [result]
    assert "| ours_balance | 1.25 |" in output.markdown([result], "scalejax bench planner")
