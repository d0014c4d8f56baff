"""Time and host memory of `scalejax convert` on a random checkpoint of a published shape, there and back.

    python benchmarks/convert_memory.py 3.1-8b --folder FOLDER --results benchmarks/results/convert.md

Each conversion runs in a process of its own, whose peak RSS (VmHWM) is set against the largest file of the checkpoint.
What comes back is compared with what was made, file by file, bit by bit. The folder needs room for two copies.
"""

import argparse
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np

from scalejax import units
from scalejax.bench import machine
from scalejax.models.llm import safetensors
from scalejax.models.llm.llama3 import SIZES, LlamaConfig, huggingface
from scalejax.models.llm.llama3.huggingface import SpecialTokens

_CHILD = """
import pathlib, sys
from scalejax.cli import main
try:
    main()
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    print("VmHWM", next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)
"""


def make_checkpoint(folder: pathlib.Path, config: LlamaConfig, shard_bytes: int) -> None:
    """Writes random bfloat16 weights as Hugging Face would have them."""
    folder.mkdir(parents=True)
    sizes = huggingface.sizes(config)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    shapes = {
        entry.name.replace("{layer}", str(layer)): entry.tensor_shape(sizes)
        for entry in huggingface.entries(config)
        for layer in range(config.layers if entry.stacked else 1)
    }
    noise = np.random.default_rng(0).normal(scale=0.02, size=2**22).astype(bfloat16)

    def produce(name: str) -> np.ndarray:
        turn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % noise.size
        return np.resize(np.roll(noise, turn), shapes[name])

    plan = tuple(safetensors.Written(name, bfloat16, shape) for name, shape in shapes.items())
    safetensors.write_folder(folder, plan, produce, shard_bytes=shard_bytes)
    content = huggingface.write_config(config, SpecialTokens(bos=1, eos=(2,)), "bfloat16")
    (folder / "config.json").write_text(json.dumps(content))


def convert(source: pathlib.Path, target: pathlib.Path) -> tuple[float, int]:
    """Seconds and peak RSS in bytes of one conversion."""
    begin = time.perf_counter()
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    command = [sys.executable, "-c", _CHILD, "convert", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    seconds = time.perf_counter() - begin
    return seconds, 1024 * int(done.stderr.split("VmHWM ")[1].split()[0])


def digests(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every tensor."""
    tensors = safetensors.open_folder(folder)
    return {name: hashlib.sha256(memoryview(tensor.read().tobytes())).hexdigest() for name, tensor in tensors.items()}


def main() -> None:
    """Runs the benchmark and writes its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--shard-bytes", type=int, default=safetensors.SHARD_BYTES)
    given = parser.parse_args()
    theirs, ours, back = (given.folder / name for name in ("theirs", "ours", "back"))
    config = SIZES[given.size]
    begin = time.perf_counter()
    make_checkpoint(theirs, config, given.shard_bytes)
    print(f"made {theirs} in {time.perf_counter() - begin:.0f} s", flush=True)
    made = digests(theirs)
    largest = max(tensor.file.stat().st_size for tensor in safetensors.open_folder(theirs).values())
    total = 2 * config.parameters()
    rows = []

    def row(what: str, source: pathlib.Path, target: pathlib.Path) -> None:
        seconds, peak = convert(source, target)
        rate = f"{total / seconds / 1e6:.0f} MB/s"
        rows.append(f"| {what} | {seconds:.0f} s | {rate} | {units.size(peak)} | {peak / largest:.2f} |")
        print(rows[-1], flush=True)

    row("Hugging Face to model folder", theirs, ours)
    shutil.rmtree(theirs)
    row("model folder to Hugging Face", ours, back)
    shutil.rmtree(ours)
    same = digests(back) == made
    shutil.rmtree(back)
    print(f"bit-identical after the round trip: {same}")
    if not same:
        sys.exit(1)
    if given.results is not None:
        _write(given.results, given, config, largest, rows)


def _write(path: pathlib.Path, given: argparse.Namespace, config: LlamaConfig, largest: int, rows: list[str]) -> None:
    lines = [
        "# Converting a checkpoint",
        "",
        f"A random bfloat16 checkpoint of the shape {given.size} ({config.parameters():,} parameters, "
        f"{units.size(2 * config.parameters())}, files of at most {units.size(largest)}), there and back, each way in "
        "a process of its own. What came back was identical to the bit.",
        "",
        f"{machine.device_name(None)}, which others used too, {machine.today()}, commit {machine.commit()}, Python "
        f"{platform.python_version()}, `python benchmarks/convert_memory.py {given.size} --folder FOLDER --results "
        "benchmarks/results/convert.md`.",
        "",
        "| conversion | time | rate | peak RSS of the process | of the largest file |",
        "|---|---|---|---|---|",
        *rows,
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
