"""How long the first token of a stream takes, what short blocks cost, and what scores of prompts need of memory.

    python benchmarks/serving_latency.py --markdown benchmarks/results/serving_latency.md

Streams: 8 rows of 97 tokens after prompts of 32, by a model of 35 M parameters in float32 with random weights, through
the loop of the server. They take blocks of 1 token, of 32, and of as many as fit 40 ms. All are run once, and then in
turn; what is printed are medians. Memory: of the program that scores one prompt with the vocabulary of Llama 3, as XLA
compiled it for this device, beside one that has the logits of all positions at once.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scalejax import nn
from scalejax.bench import machine
from scalejax.inference.generate import Engine
from scalejax.inference.loop import BLOCK_S, make_loop
from scalejax.inference.requests import Request
from scalejax.inference.sampling import Likelihoods
from scalejax.models.llm.llama3 import Llama, LlamaConfig
from scalejax.parallel import mesh as meshes
from scalejax.train.state import ModelShape

ROWS, TOKENS, PROMPT = 8, 97, 32
MODEL = LlamaConfig(
    layers=8, dim=512, ffn_dim=1536, heads=8, kv_heads=4, vocabulary=8192, max_positions=256, remat="none"
)
SCORED = LlamaConfig(
    layers=1, dim=64, ffn_dim=64, heads=2, kv_heads=1, vocabulary=128_256, max_positions=16_384, remat="none"
)
BLOCKS = {"1 token": 0.0, "32 tokens": math.inf, "40 ms": BLOCK_S}


def engine(config: LlamaConfig) -> Engine:
    """With random weights, on the first device."""

    def build() -> Llama:
        return Llama(config, nnx.Rngs(0), nn.Dtypes(jnp.float32, jnp.float32))

    shape = ModelShape.of(nnx.eval_shape(build))
    mesh = meshes.make_mesh(meshes.MeshShape(), jax.devices()[:1])
    return Engine(config, shape, jax.jit(lambda: shape.split(build()))(), mesh)


def stream(model: Engine, block_s: float, seed: int) -> tuple[float, float, float, int]:
    """Seconds to the first token of the first and of the last row, CPU seconds of all of them, and blocks."""
    loop = make_loop(model, slots=ROWS, kv_tokens=ROWS * 256, block_s=block_s)
    for prompt in np.random.default_rng(seed).integers(0, MODEL.vocabulary or 0, (ROWS, PROMPT)).tolist():
        loop.submit(Request(prompt=tuple(prompt), max_tokens=TOKENS))
    first: dict[int, float] = {}
    begin, cpu, blocks = time.perf_counter(), time.process_time(), 0
    while loop.busy:
        chunks = loop.step()
        blocks += any(chunk.tokens for chunk in chunks)
        for chunk in chunks:
            if chunk.tokens:
                first.setdefault(chunk.request, time.perf_counter() - begin)
    return min(first.values()), max(first.values()), time.process_time() - cpu, blocks


def score_bytes(tokens: int) -> tuple[int, int]:
    """Temporary bytes of the scores of a prompt: from the logits of all positions, and as the loop asks for them."""
    shape = ModelShape.of(nnx.eval_shape(lambda: Llama(SCORED, nnx.Rngs(0), nn.Dtypes(jnp.bfloat16, jnp.bfloat16))))
    programs = Engine(SCORED, shape, {}, meshes.make_mesh(meshes.MeshShape(), jax.devices()[:1])).programs
    rows = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    whole = jax.jit(lambda params, rows: Likelihoods.of(programs.forward(params, rows)[0, :-1], rows[0, 1:]))
    found = []
    for program in (whole, programs.likelihoods):
        memory: Any = program.lower(shape.params, rows).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
        found.append(memory.temp_size_in_bytes)
    return found[0], found[1]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model, times = engine(MODEL), {name: [] for name in BLOCKS}
    for turn in range(given.rounds + 1):
        for name, block_s in BLOCKS.items():
            found = stream(model, block_s, turn)
            if turn:  # the first compiles
                times[name].append(found)
    count = sum(p.size for p in jax.tree.leaves(dict(model.params))) / 1e6
    device, day = machine.device_name(jax.devices()[0]), time.strftime("%Y-%m-%d")
    lines = [
        "# serving_latency",
        "",
        f"`python benchmarks/serving_latency.py`: {device}, {day}, jax {jax.__version__}, medians of {given.rounds}.",
        "",
        f"{ROWS} streams of {TOKENS} tokens after prompts of {PROMPT} that came together, a model of {count:.0f} M",
        "parameters in float32:",
        "",
        "| blocks of | first token of the first stream | of the last | CPU seconds of all | blocks |",
        "|---|---|---|---|---|",
    ]
    for name, found in times.items():
        first, last, cpu, blocks = (statistics.median(column) for column in zip(*found, strict=True))
        lines.append(f"| {name} | {first:.2f} s | {last:.2f} s | {cpu:.2f} | {blocks:.0f} |")
    lines += [
        "",
        f"Temporary memory of the scores of one prompt, vocabulary of {SCORED.vocabulary:,}, compiled:",
        "",
        "| tokens | logits of all positions | blocks of 64 |",
        "|---|---|---|",
    ]
    for tokens in (512, 2048, 8192):
        lines.append(f"| {tokens:,} | " + " | ".join(f"{b / 2**30:.2f} GiB" for b in score_bytes(tokens)) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.markdown is not None:
        given.markdown.write_text(text)


if __name__ == "__main__":
    main()
