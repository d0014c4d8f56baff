"""Generation of one text by a language model against transformers' greedy generation.

A unit is 64 tokens after a prompt of 32, the prompt read anew. Every token reads all parameters once, so the least time
is their bytes over the bandwidth of the memory; a copy, timed in the same run, says how much of that can be had.

    tiny        2.9 M parameters in float32, on a CPU
    8b          the 8B shape of Llama 3.1 in bfloat16; for accelerators
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.bench import machine, peers, training_step
from scalejax.bench.harness import Contest, OutputsDiffer, Unsuited, best_seconds, repeated
from scalejax.inference.generate import Engine
from scalejax.models.llm.llama3 import SIZES, Llama, LlamaConfig
from scalejax.parallel import mesh as meshes
from scalejax.train.state import ModelShape

CASES = ("tiny", "8b")
PEERS = ("transformers",)

PROMPT, TOKENS = 32, 64

TINY = LlamaConfig(
    layers=6,
    dim=192,
    ffn_dim=512,
    heads=6,
    kv_heads=2,
    vocabulary=1024,
    max_positions=256,
    rope_theta=10_000.0,
    remat="none",
)


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case; parameters and prompt are random.

    Raises:
      Unsuited: a case for accelerators on a CPU.
      UserError: a peer on an accelerator.
    """
    device = jax.devices()[0]
    if case == "8b" and device.platform == "cpu":
        raise Unsuited("--case 8b takes minutes on a CPU. Run it on an accelerator, or choose tiny.")
    if against is not None:
        training_step.check_peer_device(device)
    config = TINY if case == "tiny" else dataclasses.replace(SIZES["3.1-8b"], max_positions=8192)
    dtype = jnp.float32 if case == "tiny" else jnp.bfloat16
    engine = _engine(config, device, dtype)
    assert config.vocabulary is not None
    prompt = np.random.default_rng(0).integers(0, config.vocabulary, PROMPT).tolist()

    ours = Contest(
        repeated(lambda: engine.generate([prompt], max_tokens=TOKENS)),
        examples=TOKENS,
        device=machine.device_name(device),
        figures=functools.partial(_figures, engine, prompt),
    )
    if against is None:
        return ours
    arrays = {name: np.array(value) for name, value in engine.params.items()}
    theirs = peers.load("transformers_llama").Generation(config, arrays, threads=len(machine.usable_cpus()))

    def check() -> None:
        mine, other = engine.generate([prompt], max_tokens=TOKENS)[0].tokens, theirs.generate(prompt, TOKENS)
        if list(mine) != other:
            at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
            raise OutputsDiffer(f"token {at + 1} of {TOKENS} differs: {mine[at]} here, {other[at]} in the peer")

    return dataclasses.replace(ours, peer=repeated(lambda: theirs.generate(prompt, TOKENS)), check=check)


def _engine(config: LlamaConfig, device: Any, dtype: jax.typing.DTypeLike) -> Engine:
    def build() -> Llama:
        return Llama(config, nnx.Rngs(0), nn.Dtypes(dtype, dtype))

    shape = ModelShape.of(nnx.eval_shape(build))
    mesh = meshes.make_mesh(meshes.MeshShape(), [device])
    params = jax.jit(lambda: shape.split(build()))()
    return Engine(config, shape, params, mesh)


def _figures(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Milliseconds a token, the prompt taken out, and what part of the bandwidth of a copy that is."""
    seconds = {}
    for tokens in (1, 1 + TOKENS):
        engine.generate([prompt], max_tokens=tokens)
        start = time.perf_counter()
        engine.generate([prompt], max_tokens=tokens)
        seconds[tokens] = time.perf_counter() - start
    each = (seconds[1 + TOKENS] - seconds[1]) / TOKENS
    count = sum(
        p.nbytes for name, p in engine.params.items() if name != "embed/weight" or "head/weight" not in engine.params
    )
    rate = _copy_bytes_per_s()
    return {
        "ms_a_token": each * 1e3,
        "read_gb_per_s": count / each / 1e9,
        "copy_gb_per_s": rate / 1e9,
        "share_of_copy": count / each / rate,
    }


def _copy_bytes_per_s() -> float:
    """Bytes read and written a second by the best of five copies."""
    x = jnp.ones(2**26 if machine.on_cpu() else 2**30, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / best_seconds(lambda: copy(x).block_until_ready())
