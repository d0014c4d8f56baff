"""The benchmark of packed blocks on GPUs, in its form for machines without one."""

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
        [sys.executable, "benchmarks/gpu_mx.py", "--smoke", "--seconds", "450", "--json", str(out)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["case"] == "checks"
    assert lines[0]["wrong"] == {}
    assert lines[0]["checked"] > 20
    timings = [line["case"] for line in lines if "bytes" in line]
    assert {case.split()[0].rstrip(",") for case in timings} >= {"copy", "quantize", "dequantize", "bfloat16", "nvfp4"}
    assert not [line for line in lines if "skipped" in line]
