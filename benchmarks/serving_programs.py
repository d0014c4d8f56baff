"""Programs of an engine for Llama 3 8B and 405B, compiled for TPUs: whether they fit, and what they hold and send.

    python benchmarks/serving_programs.py > benchmarks/results/serving_programs.md

Nothing runs. For each model and machine: a piece of a prompt behind a cache that is nearly full, by pass-KV and by
pass-Q, and a block of tokens for 16 slots or as many as there are devices along `context`. Decoding is compiled without
the sort of a vocabulary that top_p and top_k need, which takes the compiler minutes.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # chips are described, not looked for

import dataclasses
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax

from scalejax import units
from scalejax.bench import machine
from scalejax.inference import sampling
from scalejax.inference.ahead_of_time import AbstractEngine
from scalejax.models.llm import llama3
from scalejax.parallel.mesh import parse_mesh
from scalejax.plan import run, topology
from scalejax.plan.compiled import collectives, hlo

PIECE = 512
"""Tokens of a piece for each device along `context`, as the loop reads them."""

CASES = (
    ("3.1-8b", "v5p:4x4x4", "fsdp=1,context=8,tensor=8", 131_072),
    ("3.1-8b", "v5p:4x4x4", "fsdp=1,context=8,tensor=8", 1_048_576),
    ("3.1-8b", "v5p:8x8x16", "fsdp=1,context=128,tensor=8", 1_048_576),
    ("3.1-405b", "v5p:4x4x4", "fsdp=1,context=8,tensor=8", 131_072),
    ("3.1-405b", "v5p:4x4x4", "fsdp=1,context=8,tensor=8", 1_048_576),
    ("3.1-405b", "v5p:8x8x16", "fsdp=1,context=128,tensor=8", 131_072),
    ("3.1-405b", "v5p:8x8x16", "fsdp=1,context=128,tensor=8", 1_048_576),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One program."""

    model: str
    machine: str
    tokens: int
    program: str
    parameters: int
    kv: int
    beside: int | None
    sent: str
    compiled_s: float
    says: str


def rows(model: str, machine: str, mesh_text: str, tokens: int) -> Iterator[Row]:
    """Of one model on one machine."""
    mesh, _ = topology.make_mesh(topology.parse(machine), parse_mesh(mesh_text))
    config = dataclasses.replace(llama3.SIZES[model], max_positions=2 * tokens)
    engine = AbstractEngine.of(config, mesh, kv_tokens=tokens)
    ranks = engine.engine.programs.ranks
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {
        "piece, pass-KV": lambda: engine.read(1, PIECE * ranks, "pass_kv"),
        "piece, pass-Q": lambda: engine.read(1, PIECE * ranks, "pass_q"),
        "tokens": lambda: engine.decode(max(16, ranks)),
    }
    for name, lowered in programs.items():
        begin = time.monotonic()
        beside, sent, says = None, "", "fits"
        try:
            with run.no_compile_cache():
                compiled = lowered().compile()
        except jax.errors.JaxRuntimeError as error:
            wanted = re.search(r"\(([0-9.]+)G\) exceeds available HBM \(([0-9.]+)G\)", str(error))
            says = f"does not fit: {wanted[1]} GiB of {wanted[2]}" if wanted else str(error).splitlines()[0]
        else:
            memory = compiled.memory_analysis()
            beside = memory.temp_size_in_bytes if memory else None
            found = collectives.total(collectives.of_module(hlo.parse(compiled.as_text()), mesh))
            along = [c for c in found if "context" in c.axes]
            sent = "; ".join(f"{c.kind} {units.size(c.minimum_bytes)}" for c in along if c.minimum_bytes > 2**20)
        yield Row(
            model, f"{machine}, {mesh_text.removeprefix('fsdp=1,')}", tokens, name, engine.held_bytes, engine.kv_bytes,
            beside, sent, time.monotonic() - begin, says,
        )  # fmt: skip


def main() -> int:
    sampling.nucleus = lambda logits, top_p, top_k: logits
    print("# Programs of an engine, compiled for TPUs\n")
    print(f"`python benchmarks/serving_programs.py`, {machine.today()}, compiled on {machine.device_name(None)}, jax")
    print(f"{jax.__version__}. Nothing ran. Bytes of a chip; what is sent along `context` in one program, above 1 MiB;")
    print("seconds of the compiler. Decoding is compiled without the sort of a vocabulary that top_p and top_k need.\n")
    columns = (
        "model",
        "machine",
        "tokens in the cache",
        "program",
        "parameters",
        "keys and values",
        "beside them",
        "sent",
    )
    print("| " + " | ".join((*columns, "compiled", "")) + " |")
    print("|" + "---|" * (len(columns) + 2))
    for case in CASES:
        for row in rows(*case):
            beside = "" if row.beside is None else units.size(row.beside)
            print(
                f"| {row.model} | {row.machine} | {row.tokens:,} | {row.program} | {units.size(row.parameters)} "
                f"| {units.size(row.kv)} | {beside} | {row.sent} | {row.compiled_s:.0f} s | {row.says} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
