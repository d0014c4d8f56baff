"""What quantized checkpoints lose: a tiny Llama cast directly, calibrated, and with error diffusion.

    python benchmarks/quantized_checkpoints.py [--workdir FOLDER] [--markdown FILE]

Trains `llama-tiny` on 19 of 20 sources of Python's standard library, quantizes the run by `scalejax quantize` in one
format after another, and compares by `scalejax eval --text --against` on text of the others. Then a DLRM on the bundled
flights, scored with rules: weights, activations and tables cast directly. Nothing is timed. --workdir keeps runs and
numbers, and what it holds already is not made again.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax starts

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax
import typer.testing

from scalejax import configs
from scalejax.bench import machine
from scalejax.cli.app import app
from scalejax.data.text import sources
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run

HELD_OUT = 20  # one file in so many
PIECE = 2048  # characters of a file that are compared or calibrated on, so that many files take part
TOKENS = 32_768

WIDE = ("bdr_mx9", "mxint8", "mxfp8_e4m3", "bdr_mx6", "mxfp6_e2m3", "nvfp4")  # direct casts alone
NARROW = ("bdr_mx4", "mxfp4_e2m1")
WAYS = {"direct cast": (), "mse": ("--calibrate", "mse"), "error diffusion": ("--method", "error-diffusion")}
STATIC = {"fp8_e4m3:row": "fp8_e4m3", "int8:row": "int8", "nvfp4": "nvfp4"}  # formats of weights and of activations
CLICKS = ("bdr_mx9", "mxint8", "mxfp8_e4m3", "bdr_mx6", "bdr_mx4")

PAGE = """\
# Quantized checkpoints

`python benchmarks/quantized_checkpoints.py`

{device}, {today}, commit {commit}. `llama-tiny`, 400 steps of 4,096 bytes in float32, trained on 19 of 20
sources of Python's standard library. Predicted are {tokens:,} bytes of the others, the beginnings of files. All
matrices of the layers are in the format; embedding, head and norms stay. Loss in nats a byte; that of float32 is
{loss:.4f}, in rows of 512, twice what the model has seen in training.

{llama}

- bits: of a number of those matrices, scales included. KL: of the predictions of a byte, from those in float32, nats.
- direct cast: scales from the largest magnitude. mse: of several scales the one of least squared error. Error
  diffusion: calibrated on 16,384 bytes of training text, scales from the largest magnitude. Static activations: what
  these matrices multiply too, in the same format, each under one scale from the largest magnitude in that text.

## A DLRM cast directly

`scalejax train dlrm-flights`, one seed. The test split is scored with one rule for everything: weights, activations and
rows of tables in the format, sums in float32.

{clicks}
"""


def run(*arguments: object) -> str:
    """A command of scalejax."""
    done = typer.testing.CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exit_code:
        raise SystemExit(f"scalejax {' '.join(map(str, arguments))}: {done.output} {done.exception!r}")
    return done.output


def write_texts(folder: pathlib.Path) -> None:
    """training/, held_out.txt and, last of all, calibration.txt."""
    (folder / "training").mkdir(exist_ok=True)
    held, calibration = [], []
    for number, file in enumerate(sources.find_texts(None, sources.SUFFIXES)):
        text = "".join(block.text for block in sources.read_documents(file, "text"))
        if number % HELD_OUT == 0:
            held.append(text[:PIECE])
            continue
        (folder / "training" / f"{number:04}.txt").write_text(text, encoding="utf-8")
        if number % HELD_OUT == 1:
            calibration.append(text[:PIECE])
    (folder / "held_out.txt").write_text("".join(held), encoding="utf-8")
    (folder / "calibration.txt").write_text("".join(calibration[-16:]), encoding="utf-8")


def train(folder: pathlib.Path) -> pathlib.Path:
    """A run of llama-tiny; goes on from the newest checkpoint where there is one."""
    run("train", "llama-tiny", "--set", f"data.path={folder / 'training'}", "--workdir", folder / "run")
    return folder / "run"


def quantized(folder: pathlib.Path, source: pathlib.Path, format: str, *options: str) -> dict[str, Any]:
    """What `eval --against` says of a quantized run, beside the bits of a number."""
    looked = "--method" in options or "--activations" in options
    more = (*options, *(("--text", folder / "calibration.txt") if looked else ()))
    with tempfile.TemporaryDirectory() as temporary:
        out, report, found = (pathlib.Path(temporary) / name for name in ("out", "report.json", "found.json"))
        run("quantize", source, out, "--format", format, *more, "--json", report)
        text = ("--text", folder / "held_out.txt", "--tokens", TOKENS)
        run("eval", source, "--against", out, *text, "--json", found)
        rows = [row for row in json.loads(report.read_text()) if row["format"]]
        bits = 8 * sum(row["bytes_after"] for row in rows) / sum(row["numbers"] for row in rows)
        return json.loads(found.read_text()) | {"bits": bits}


def clicks() -> dict[str, float]:
    """NE on the test split of a DLRM trained in float32, by format."""
    experiment = configs.load("dlrm-flights", ["evaluation.every=0"])
    data: Any = experiment.data.build()
    mesh = make_mesh(experiment.placement.mesh or MeshShape(), jax.devices()[:1])
    trainer = Run(binding.bind(experiment, data.schema, mesh), data)
    state, host = trainer.begin()
    with trainer.feed(host, experiment.steps) as feed:
        for _ in range(experiment.steps):
            feed.take()
            state, _ = feed.step(state)
    found = {}
    for format in ("float32", *CLICKS):
        named = None if format == "float32" else format
        rules = () if named is None else (QuantizationRule(weight_qtype=named, act_qtype=named, tail="pad"),)
        cast = binding.bind(dataclasses.replace(experiment, quantization=rules), data.schema, mesh)
        scores = scoring.score(cast, state, data.eval_batches("test"))
        found[format] = float(scores.measure()["ne"])
    return found


def line(format: str, way: str, found: dict[str, Any], exact: float) -> str:
    cells = f"{found['bits']:.2f} | {found['after']['loss']:.4f} | {found['after']['loss'] - exact:+.4f}"
    return f"| {format} | {way} | {cells} | {found['divergence']:.5f} | {100 * found['agreement']:.1f} % |"


def measure(folder: pathlib.Path) -> dict[str, Any]:
    """All numbers, by name; kept in results.json."""
    kept, begun = folder / "results.json", time.monotonic()
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def add(name: str, make: Callable[[], Any]) -> None:
        if name not in results:
            results[name] = make()
            kept.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{time.monotonic() - begun:4.0f} s  {name}", file=sys.stderr, flush=True)

    if not (folder / "calibration.txt").exists():
        write_texts(folder)
    source = train(folder)
    for format in (*WIDE, *NARROW):
        for way in WAYS if format in NARROW else ("direct cast",):
            add(f"{format}, {way}", functools.partial(quantized, folder, source, format, *WAYS[way]))
    for format, inputs in STATIC.items():
        add(f"{format}, direct cast", functools.partial(quantized, folder, source, format))
        made = functools.partial(quantized, folder, source, format, "--activations", inputs)
        add(f"{format}, static activations", made)
    add("clicks", clicks)
    return results


def page(results: dict[str, Any]) -> str:
    first = results[f"{WIDE[0]}, direct cast"]["before"]
    rows = ["| format | | bits | loss | minus float32 | KL | same byte |", "|---|---|---|---|---|---|---|"]
    for name, found in results.items():
        if ", " in name:
            format, _, way = name.partition(", ")
            rows.append(line(format, way, found, first["loss"]))
    ne = results["clicks"]
    lines = ["| | NE | minus float32 |", "|---|---|---|", f"| float32 | {ne['float32']:.5f} | |"]
    lines += [f"| {name} | {ne[name]:.5f} | {100 * (ne[name] / ne['float32'] - 1):+.4f} % |" for name in CLICKS]
    return PAGE.format(
        device=machine.device_name(jax.devices()[0]),
        today=machine.today(),
        commit=machine.commit(),
        tokens=first["tokens"],
        loss=first["loss"],
        llama="\n".join(rows),
        clicks="\n".join(lines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, help="default: a temporary folder")
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.workdir or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = page(measure(folder))
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
