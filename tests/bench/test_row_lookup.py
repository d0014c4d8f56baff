"""The benchmark of lookups in packed rows, in its small form."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_reaches_every_case(tmp_path):
    out = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "row_lookup.py"), "--smoke", "--seconds", "400", "--json", str(out)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = {line["case"].rsplit(", ", 1)[1] for line in lines if "speedup" in line}
    assert kinds == {"float32", "float16", "int8", "int4"}
    assert sum("speedup" in line for line in lines) == 3 * 3 * 4
    assert all(line["s"] > 0 and line["smoke"] for line in lines)
