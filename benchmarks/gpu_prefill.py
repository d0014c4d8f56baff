"""A long prompt and short turns behind it, on one GPU: Llama 3 8B's shape with random weights in bfloat16.

    python benchmarks/gpu_prefill.py --json prefill.json                      # 524,288 tokens: 69 GB of keys and values
    python benchmarks/gpu_prefill.py --tokens 2048 --turns 2 --shape tiny     # what a CPU can do, to see that it runs

Times are wall seconds of the loop that `generate` and `serve` use: the prompt to its first token, then turns of 1,024
new tokens each to theirs, compilation left out. The share of the peak counts products and causal attention.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import chips, nn
from scalejax.bench import machine
from scalejax.inference.generate import Engine
from scalejax.inference.loop import PIECE, Scheduler, make_loop
from scalejax.inference.programs import Slots
from scalejax.inference.requests import Request
from scalejax.inference.sampling import RowSampling
from scalejax.models.llm.llama3 import SIZES, Llama, LlamaConfig
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape

TURN, PAGE = 1_024, 128
SHAPES = {
    "8b": SIZES["3.1-8b"],
    "tiny": LlamaConfig(layers=2, dim=64, ffn_dim=128, heads=4, kv_heads=2, vocabulary=512, remat="none"),
}


def first_token(loop: Scheduler, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds until it came, and what it was."""
    loop.submit(Request(prompt=prompt, max_tokens=1))
    begin = time.perf_counter()
    found = [token for _ in iter(lambda: loop.busy, False) for chunk in loop.step() for token in chunk.tokens]
    return time.perf_counter() - begin, found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    room = given.tokens + (given.turns + 1) * (TURN + 1)
    config = dataclasses.replace(SHAPES[given.shape], max_positions=room)
    device = jax.devices()[0]

    def build() -> Llama:
        return Llama(config, nnx.Rngs(0), nn.Dtypes(jnp.bfloat16, jnp.bfloat16))

    shape = ModelShape.of(nnx.eval_shape(build))
    params = jax.jit(lambda: shape.split(build()))()
    engine = Engine(config, shape, params, make_mesh(MeshShape(), [device]))
    loop = make_loop(engine, slots=1, kv_tokens=room, page=PAGE)
    for exponent in range((-(-room // PAGE) - 1).bit_length() + 1):  # `warm_up` would compile three times as many
        tokens, row = np.zeros((1, PIECE), np.int32), np.zeros(1, np.int32)
        table = np.zeros((1, 1 << exponent), np.int32)
        loop.steps.read(tokens, tokens - 1, table, row, row, tokens, row + 1, "pass_kv")
        slots = Slots(RowSampling.greedy(1), row, row - 1, np.full((1, 8), -1, np.int32), table, row, row)
        loop.steps.decode(np.int32(1), np.bool_(False), *jax.tree.leaves(slots))
    draw = np.random.default_rng(0)
    prompt = tuple(draw.integers(0, config.vocabulary or 0, given.tokens).tolist())
    seconds, token = first_token(loop, prompt)
    turns = []
    for _ in range(given.turns):
        prompt = (*prompt, token, *draw.integers(0, config.vocabulary or 0, TURN).tolist())
        taken, token = first_token(loop, prompt)
        turns.append(taken)
    flops = 2 * config.parameters() * given.tokens + 2 * config.layers * config.heads * config.width * given.tokens**2
    chip = chips.for_device_kind(device.device_kind)
    result = {
        "device": machine.device_name(device),
        "date": machine.today(),
        "commit": machine.commit(),
        "tokens": given.tokens,
        "prompt_s": seconds,
        "turns_s": turns,
        "compilations": loop.stats.compilations,
        "share_of_peak": None if chip is None else flops / seconds / chip.bf16_flops_per_s,
    }
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
