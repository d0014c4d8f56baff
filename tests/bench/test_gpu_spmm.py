"""The benchmark of the GPU kernel of sparse products, in its form for machines without a GPU."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def _run(*arguments):
    return subprocess.run(
        [sys.executable, "benchmarks/gpu_spmm.py", *arguments],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_small_form_checks_the_kernel_and_reaches_every_case(tmp_path):
    out = tmp_path / "lines.jsonl"
    done = _run("--smoke", "--json", str(out), "--seconds", "400")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["case"] == "checks"
    assert lines[0]["wrong"] == {}
    assert lines[0]["checked"] == 4
    assert all(line["smoke"] for line in lines)
    timings = [line for line in lines if "bytes" in line]
    assert {line["case"].split(",")[0] for line in timings} == {"copy", "exact", "sampled", "tiles"}
    assert {line["case"].split(", ")[-1] for line in timings if line["case"].startswith("sampled")} == {
        "bucket", "fastrand", "ell",
    }  # fmt: skip
    assert all(line["bytes_formula"] and line["s"] > 0 for line in timings)
    assert any(line["case"].startswith("best exact over") and line["ratio"] > 0 for line in lines)


@pytest.mark.slow
def test_graphs_have_as_many_edges_as_those_that_they_are_named_after():
    program = (
        "import numpy as np, gpu_spmm as g\n"
        "for graph in g.GRAPHS.values():\n"
        "    degrees = graph.degrees(np.random.default_rng(0))\n"
        "    print(degrees.size, degrees.sum(), degrees.min() > 0 and degrees.max() <= graph.most)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "benchmarks", env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    published = [(132_534, 2 * 39_561_252), (232_965, 114_615_892)]
    for line, (nodes, edges) in zip(done.stdout.splitlines(), published, strict=True):
        found = line.split()
        assert int(found[0]) == nodes
        assert abs(int(found[1]) / edges - 1) < 1e-4
        assert found[2] == "True"


@pytest.mark.slow
def test_without_a_gpu_nothing_is_timed():
    done = _run()
    assert done.returncode == 2
    assert "jax sees no GPU here" in done.stderr
