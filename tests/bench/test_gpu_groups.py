"""The benchmark of integer groups on GPUs, in its form for machines without one."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_checks_every_kernel_and_reaches_every_case(tmp_path):
    out = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_groups.py", "--smoke", "--seconds", "450", "--json", str(out)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["case"] == "checks"
    assert lines[0]["wrong"] == {}
    assert lines[0]["checked"] == 4
    # A copy, kernels and XLA, one other size, compressors both ways.
    assert len([line for line in lines if "bytes" in line]) == 1 + 2 * 4 + 4 + 2 * 7
    assert not [line for line in lines if "skipped" in line]
