"""Held-out loss of a trained small Llama whose keys and values are stored in int8 and float8, beside the compute dtype.

    python benchmarks/kv_formats.py --json benchmarks/results/kv_formats.json \\
        --markdown benchmarks/results/kv_formats.md [--run RUN_FOLDER]

Without --run the recipe `llama-shakespeare` is trained first, on the bundled text with rows of 256 characters. Tokens
of the held-out text are read one by one through a cache of pages, as in generation, so that each attends to what was
stored of all before it. Exits with 1 where a loss grows by more than its limit.
"""

import argparse
import importlib.resources
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np

from scalejax.bench import machine
from scalejax.cli import folders
from scalejax.data.text import sources
from scalejax.inference import compare, generate
from scalejax.parallel.mesh import MeshShape, make_mesh

LIMITS = {"int8": 0.005, "float8": 0.01}
"""Of the growth of the loss."""

SETS = ("data.length=256", "evaluation.every=500")
HELD_OUT = 0.1  # of the text, its end: what the recipe leaves for validation


def train(folder: pathlib.Path, text: pathlib.Path) -> None:
    """Trains the recipe into a folder."""
    sets = (f"data.path={text}", f"data.tokenizer.path={text}", *SETS)
    command = [sys.executable, "-m", "scalejax", "train", "llama-shakespeare", "--workdir", str(folder)]
    subprocess.run([*command, *(part for each in sets for part in ("--set", each))], check=True, cwd=ROOT)


def measure(folder: pathlib.Path, text: pathlib.Path, rows: int) -> dict[str, float]:
    """Losses by format, of the last of the rows of the text; "whole": of whole rows, without a cache."""
    model = folders.open_model(folder, recipe=None, step=None)
    engine = generate.load(model, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]), dtype="float32")
    assert model.tokenizer is not None
    tokenizer, length = model.tokenizer.build(), engine.config.max_positions

    (file,) = sources.find_texts(str(text), sources.SUFFIXES)
    ids = np.concatenate([tokenizer.encode(block.text) for block in sources.read_documents(file, "text")])
    held = ids[-int(len(ids) * HELD_OUT) :]
    held = held[: len(held) // length * length].reshape(-1, length).astype(np.int32)[:rows]
    found = {"tokens": held.size - len(held), "whole": compare.score(engine, held).loss}
    for kept in ("compute", *LIMITS):
        found[kept] = compare.score_cached(engine, held, kept).loss
    return found


def markdown(found: dict[str, float]) -> str:
    """For benchmarks/results."""
    what = {"compute": "float32, as computed", "int8": "int8, a scale for each token and head"}
    what["float8"] = "float8 (e4m3), a scale for each layer"
    lines = [
        "# Formats of keys and values",
        "",
        "`python benchmarks/kv_formats.py --json benchmarks/results/kv_formats.json --markdown "
        "benchmarks/results/kv_formats.md`",
        "",
        f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}",
        "",
        "The Llama of 0.74 M parameters of `llama-shakespeare`, trained with rows of 256 characters (1,000 steps of",
        "16) on the first nine tenths of tiny Shakespeare. Loss in nats a character over",
        f"{found['tokens']:,.0f} characters of the last tenth, in rows of 256 that each begin anew; tokens are read",
        "one by one through a cache of pages of 64, in which keys and values lie in the format. Of whole rows without",
        f"a cache the loss is {found['whole']:.5f}.",
        "",
        "| keys and values | loss | growth | limit |",
        "|---|---|---|---|",
    ]
    for kept in ("compute", *LIMITS):
        growth = found[kept] / found["compute"] - 1
        limit = f"{LIMITS[kept]:.1%}" if kept in LIMITS else ""
        lines.append(f"| {what[kept]} | {found[kept]:.5f} | {growth:+.3%} | {limit} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description="Held-out loss by the format of keys and values.")
    parser.add_argument("--run", type=pathlib.Path, help="trained before, as described above")
    parser.add_argument("--rows", type=int, default=1000, help="of 256 tokens, at most")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    options = parser.parse_args(argv)
    text = pathlib.Path(str(importlib.resources.files("scalejax.data") / "bundled" / "tiny_shakespeare.txt.gz"))
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or pathlib.Path(temporary) / "run"
        if options.run is None:
            train(run, text)
        found = measure(run, text, options.rows)
    made = markdown(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(made)
    print(made)
    wrong = [kept for kept, limit in LIMITS.items() if not found[kept] / found["compute"] - 1 <= limit]
    if wrong:
        sys.exit(f"wrong: the loss grows too much with {', '.join(wrong)}")


if __name__ == "__main__":
    main()
