"""Generation by a language model against transformers' greedy generation, and of requests that end at their own times.

A unit of a batch is 64 tokens after prompts of 32, read anew. Every step reads all parameters once, so the least time
is their bytes over the bandwidth of the memory; a copy, timed in the same run, says how much of that can be had.

    tiny, tiny-8, tiny-32   1, 8 or 32 texts of a model of 2.9 M parameters in float32, on a CPU
    requests                64 requests of 4 to 200 tokens (geometric, mean 48) in 8 slots; peers take batches of 8 in
                            the order in which they came, each as long as its longest: transformers, or this project
                            ("static")
    equal                   the same with requests of 48 tokens each, for which batches are the best there is
    prefix                  the first token after a prompt of 544 of which 512 were read before; the peer "unread" is
                            this project with a prompt of which nothing was
    8b                      the 8B shape of Llama 3.1 in bfloat16; for accelerators
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.bench import machine, peers, training_step
from scalejax.bench.harness import Contest, OutputsDiffer, Unsuited, best_seconds, repeated
from scalejax.inference.generate import Engine
from scalejax.inference.loop import Scheduler, make_loop
from scalejax.inference.requests import Request
from scalejax.models.llm.llama3 import SIZES, Llama, LlamaConfig
from scalejax.parallel import mesh as meshes
from scalejax.train.state import ModelShape

_BATCHES = {"tiny": 1, "tiny-8": 8, "tiny-32": 32, "8b": 1}
_IN_SLOTS = ("requests", "equal")
CASES = ("tiny", "tiny-8", "tiny-32", *_IN_SLOTS, "prefix", "8b")
PEERS = ("transformers", "static", "unread")

PROMPT, TOKENS = 32, 64
REQUESTS, SLOTS, MEAN = 64, 8, 48
PREFIX = 512

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts, and how many new tokens of each -> these."""

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
    """The contest of a case; parameters and prompts are random.

    Raises:
      Unsuited: a case for accelerators on a CPU, or a peer that it does not have.
      UserError: a peer on an accelerator.
    """
    device = jax.devices()[0]
    if case == "8b" and device.platform == "cpu":
        raise Unsuited("--case 8b takes minutes on a CPU. Run it on an accelerator, or choose tiny.")
    if against == "static" and case not in _IN_SLOTS:
        raise Unsuited(f"--against static: {case} is a batch. Compare it with transformers, or time requests.")
    if (case == "prefix") != (against == "unread") and against is not None:
        raise Unsuited(f"--against {against}: --case prefix has the peer unread, and no other has it.")
    if case == "prefix":
        contest = _prefix(device)
        return dataclasses.replace(contest, peer=contest.peer if against else None)
    if against == "transformers":
        training_step.check_peer_device(device)
    config = dataclasses.replace(SIZES["3.1-8b"], max_positions=8192) if case == "8b" else TINY
    engine = _engine(config, device, jnp.bfloat16 if case == "8b" else jnp.float32)
    assert config.vocabulary is not None
    draw = np.random.default_rng(0)
    count = _BATCHES.get(case, REQUESTS)
    prompts = draw.integers(0, config.vocabulary, (count, PROMPT)).tolist()
    lengths = [TOKENS if case in _BATCHES else MEAN] * count
    if case == "requests":
        lengths = np.clip(draw.geometric(1 / MEAN, count), 4, 200).tolist()

    def batches(generate: Generate) -> list[list[int]]:
        return [
            new[:length]
            for start in range(0, count, SLOTS)
            for new, length in zip(
                generate(prompts[start : start + SLOTS], max(lengths[start : start + SLOTS])),
                lengths[start : start + SLOTS],
                strict=True,
            )
        ]

    def whole(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return [list(c.tokens) for c in engine.generate(prompts, max_tokens=tokens)]

    def ours() -> list[list[int]]:
        return _in_slots(engine, prompts, lengths) if case in _IN_SLOTS else whole(prompts, TOKENS)

    figures = functools.partial(_figures, engine, prompts) if case not in _IN_SLOTS else dict
    contest = Contest(repeated(ours), examples=sum(lengths), device=machine.device_name(device), figures=figures)
    if against is None:
        return contest
    if against == "static":
        generate = whole
    else:
        arrays = {name: np.array(value) for name, value in engine.params.items()}
        module = peers.load("transformers_llama")
        generate = module.Generation(config, arrays, threads=len(machine.usable_cpus())).generate

    def theirs() -> list[list[int]]:
        return batches(generate) if case in _IN_SLOTS else generate(prompts, TOKENS)

    def check() -> None:
        for row, (mine, other) in enumerate(zip(ours(), theirs(), strict=True)):
            if mine != other:
                at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
                raise OutputsDiffer(f"token {at + 1} of text {row + 1} differs: {mine[at]} here, {other[at]} there")

    return dataclasses.replace(contest, peer=repeated(theirs), check=check)


def _prefix(device: Any) -> Contest:
    """A prompt whose beginning was read before, against one whose beginning was not."""
    engine = _engine(dataclasses.replace(TINY, max_positions=1024), device, jnp.float32)
    loop, draw = make_loop(engine, slots=1, kv_tokens=8192), np.random.default_rng(0)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(0, TINY.vocabulary or 0, count).tolist())

    def first_token(loop: Scheduler, prompt: tuple[int, ...]) -> tuple[int, ...]:
        loop.submit(Request(prompt=prompt, max_tokens=1))
        found: tuple[int, ...] = ()
        while loop.busy:
            for chunk in loop.step():
                found += chunk.tokens
        return found

    prefix = drawn(PREFIX)

    def check() -> None:
        prompt = prefix + drawn(PROMPT)
        first_token(loop, prompt)
        before = loop.stats
        mine, other = first_token(loop, prompt), first_token(make_loop(engine, slots=1, kv_tokens=1024), prompt)
        if mine != other or loop.stats.prefix_hits - before.prefix_hits < PREFIX:
            raise OutputsDiffer(f"{mine} after a prompt that was read before, {other} after one that was not")

    check()  # the prefix is read now
    return Contest(
        repeated(lambda: first_token(loop, prefix + drawn(PROMPT))),
        peer=repeated(lambda: first_token(loop, drawn(PREFIX + PROMPT))),
        check=check,
        examples=1,
        device=machine.device_name(device),
    )


def _in_slots(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """All requests through a loop of their own, which has read nothing yet."""
    loop = make_loop(engine, slots=SLOTS, kv_tokens=SLOTS * TINY.max_positions)
    for prompt, length in zip(prompts, lengths, strict=True):
        loop.submit(Request(prompt=tuple(prompt), max_tokens=length))
    found: list[list[int]] = [[] for _ in prompts]
    while loop.busy:
        for chunk in loop.step():
            found[chunk.request] += chunk.tokens
    return found


def _engine(config: LlamaConfig, device: Any, dtype: jax.typing.DTypeLike) -> Engine:
    def build() -> Llama:
        return Llama(config, nnx.Rngs(0), nn.Dtypes(dtype, dtype))

    shape = ModelShape.of(nnx.eval_shape(build))
    mesh = meshes.make_mesh(meshes.MeshShape(), [device])
    params = jax.jit(lambda: shape.split(build()))()
    return Engine(config, shape, params, mesh)


def _figures(engine: Engine, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds a step, the prompts taken out, and what part of the bandwidth of a copy that is."""
    seconds = {}
    for tokens in (1, 1 + TOKENS):
        engine.generate(prompts, max_tokens=tokens)
        start = time.perf_counter()
        engine.generate(prompts, max_tokens=tokens)
        seconds[tokens] = time.perf_counter() - start
    each = (seconds[1 + TOKENS] - seconds[1]) / TOKENS
    count = sum(
        p.nbytes for name, p in engine.params.items() if name != "embed/weight" or "head/weight" not in engine.params
    )
    rate = _copy_bytes_per_s()
    return {
        "ms_a_step": each * 1e3,
        "read_gb_per_s": count / each / 1e9,
        "copy_gb_per_s": rate / 1e9,
        "share_of_copy": count / each / rate,
    }


def _copy_bytes_per_s() -> float:
    """Bytes read and written a second by the best of five copies."""
    x = jnp.ones(2**26 if machine.on_cpu() else 2**30, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / best_seconds(lambda: copy(x).block_until_ready())
