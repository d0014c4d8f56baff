"""The training step of a language model against transformers' Llama in PyTorch.

One step is forward, backward, clipping by the global norm and AdamW. Both sides start from the same parameters and
cycle through the same batches, which lie on the device already.

    tiny        0.74 M parameters, 16 rows of 64 characters, the model of `llama-shakespeare`; float32 on a CPU
    small       the same width over 256 positions
    1b          the 1B shape of Llama 3.2 in bfloat16, one row of 8,192 tokens; for accelerators
"""

import dataclasses
import functools
import itertools
import time

import jax
import jax.numpy as jnp

from scalejax import chips
from scalejax.bench import machine, peers, training_step
from scalejax.bench.harness import Contest, OutputsDiffer, Unsuited, best_seconds, repeated
from scalejax.bench.token_step import CLIP, LEARNING_RATE, WEIGHT_DECAY, TokenStep
from scalejax.data.text.tokens import TokenSchema
from scalejax.models.llm.llama3 import SIZES, LlamaConfig

CASES = ("tiny", "small", "1b")
PEERS = ("transformers", "transformers-compile")

TINY = LlamaConfig(
    layers=4,
    dim=128,
    ffn_dim=344,
    heads=4,
    kv_heads=2,
    vocabulary=65,
    rope_theta=10_000.0,
    max_positions=256,
    remat="none",
    unroll=4,
)

LOSS_TOLERANCE = 2e-5
"""Relative, on the mean loss of equal parameters: float32 sums in another order."""

TRAINED_TOLERANCE = 1e-3
"""The same after four steps: Adam's first steps are gradients over their own size, where rounding decides near 0."""

CHECKED_STEPS = 4


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case; its batches are random tokens.

    Raises:
      Unsuited: a case for accelerators on a CPU.
      UserError: a peer on an accelerator.
    """
    device = jax.devices()[0]
    if case == "1b" and device.platform == "cpu":
        raise Unsuited("--case 1b takes minutes a step on a CPU. Run it on an accelerator, or choose tiny or small.")
    if against is not None:
        training_step.check_peer_device(device)
    model, rows, length = {
        "tiny": (TINY, 16, 64),
        "small": (TINY, 16, 256),
        "1b": (dataclasses.replace(SIZES["3.2-1b"], remat="dots"), 1, 8192),
    }[case]
    assert model.vocabulary is not None
    ours = TokenStep(model, device, rows, TokenSchema(model.vocabulary, length))
    figures = functools.partial(_figures, ours, length)
    alone = Contest(ours.steps, examples=rows, device=machine.device_name(device), figures=figures)
    if against is None:
        return alone
    peer = peers.load("transformers_llama")
    theirs = peer.TrainingStep(
        model,
        ours.parameters(),
        peer.Settings(
            threads=len(machine.usable_cpus()),
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            clip=CLIP,
            compiled=against == "transformers-compile",
        ),
    )
    turn = itertools.cycle([theirs.place(batch) for batch in ours.batches])

    def check() -> None:
        for step in range(CHECKED_STEPS):
            tolerance = LOSS_TOLERANCE if step == 0 else TRAINED_TOLERANCE
            mine, other = ours.step(), float(theirs.step(next(turn)))
            if not abs(mine - other) <= tolerance * abs(other):
                raise OutputsDiffer(f"losses of step {step + 1} differ: {mine:.7f} here, {other:.7f} in the peer")

    return dataclasses.replace(alone, peer=repeated(lambda: theirs.step(next(turn))), check=check)


def _figures(ours: TokenStep, length: int) -> dict[str, float]:
    """Tokens a second, and the share that the model's FLOPs have of what matrix products reach here."""
    start = time.perf_counter()
    ours.steps(8)
    seconds = (time.perf_counter() - start) / 8
    flops = {kind: ours.model.flops_per_token(length, kind) * ours.tokens for kind in ("causal", "full")}
    rate = _matmul_flops_per_s(jnp.bfloat16 if not machine.on_cpu() else jnp.float32)
    found = {
        "tokens_per_s": ours.tokens / seconds,
        "tflops_per_s_causal": flops["causal"] / seconds / 1e12,
        "tflops_per_s_full": flops["full"] / seconds / 1e12,
        "matmul_tflops_per_s": rate / 1e12,
        "share_of_matmul": flops["causal"] / seconds / rate,
    }
    chip = chips.for_device_kind(jax.devices()[0].device_kind)
    if chip is not None:
        found |= {f"mfu_{kind}": count / seconds / chip.bf16_flops_per_s for kind, count in flops.items()}
    return found


def _matmul_flops_per_s(dtype: jax.typing.DTypeLike) -> float:
    """What a square matrix product reaches: the best of five."""
    side = 1024 if machine.on_cpu() else 8192
    x = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * side**3 / best_seconds(lambda: product(x, x).block_until_ready())
