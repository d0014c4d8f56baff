"""Whatever becomes of a file: it is read as what it is, or refused by one `UserError`.

Each input is read in a forked child, and not from this process, which has threads: `python -m fuzz` does it.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import scalejax

TESTS = pathlib.Path(__file__).parent.parent


def fuzz(reader: str, *options: str) -> None:
    command = [sys.executable, "-m", "fuzz", reader, *options]
    package = pathlib.Path(scalejax.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"\n{reader}: {{" in f"\n{done.stdout}"


@pytest.mark.slow
def test_the_intact_sample_has_time_for_the_imports_of_its_reader() -> None:
    program = """
import pathlib, time
from fuzz import child, readers
child.SECONDS = 0.2
slow = readers.Reader(lambda folder: None, "none", lambda folder: time.sleep(0.6) or "read")
assert child.intact(slow, {}) == "read"
assert child.run_on(slow, {}).kind == "hang"
"""
    subprocess.run([sys.executable, "-c", program], cwd=TESTS, check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "bits"),
    [
        *((reader, "700") for reader in ("arrow", "arrow-format-1")),
        *((reader, "150") for reader in ("corpus", "manifest", "npz", "rows")),
    ],
)
def test_a_flipped_bit_is_harmless_or_refused(reader: str, bits: str) -> None:
    fuzz(reader, "--bits", bits)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["npz", "safetensors", "shards", "plan", "towers", "jsonl", "edges", "parquet"])
def test_files_of_the_right_form_are_read_or_refused(reader: str) -> None:
    fuzz(reader, "--structures", "40")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed (extra fuzz)")
@pytest.mark.parametrize(
    "reader",
    ["arrow", "arrow-format-1", "parquet", "npz", "edges-gz", "ogb", "jsonl", "criteo", "safetensors", "manifest"],
)
def test_no_bytes_end_in_anything_but_data_or_one_error(reader: str, tmp_path: pathlib.Path) -> None:
    fuzz(reader, "--seconds", "4", "--keep", str(tmp_path))
