"""The benchmark of the GPU kernels, in its form for machines without a GPU."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_checks_every_kernel_and_reaches_every_case(tmp_path):
    out = tmp_path / "lines.jsonl"
    script = ROOT / "benchmarks" / "gpu_embedding.py"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--json", str(out)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["case"] == "checks"
    assert lines[0]["wrong"] == {}
    assert lines[0]["checked"] > 20
    assert all(line["smoke"] for line in lines)
    timings = [line for line in lines if "bytes" in line]
    assert {line["implementation"] for line in timings} == {"pallas_gpu", "xla"}
    kinds = {line["case"].split(",")[0] for line in timings}
    steps = {"forward and update", "forward and update and plan"}
    assert kinds == {"copy", "lookup", *steps, "fused", "table after table"}
    assert all(line["bytes_formula"] and line["s"] > 0 for line in timings)


@pytest.mark.slow
def test_without_a_gpu_nothing_is_timed():
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_embedding.py"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "jax sees no GPU here" in done.stderr
