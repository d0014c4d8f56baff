"""The training step of a language model against transformers' Llama in PyTorch.

One step is forward, backward, clipping by the global norm and AdamW. Both sides start from the same parameters and
cycle through the same batches, which lie on the device already.

    tiny        0.74 M parameters, 16 rows of 64 characters, the model of `llama-shakespeare`; float32 on a CPU
    small       the same width over 256 positions
    1b          the 1B shape of Llama 3.2 in bfloat16, one row of 8,192 tokens; for accelerators
"""

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import chips, optim
from scalejax.bench import machine, peers, training_step
from scalejax.bench.harness import Contest, OutputsDiffer, Unsuited, best_seconds, repeated
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.models.llm.llama3 import SIZES, LlamaConfig
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.rules import LLM
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment, Gradients, Placement
from scalejax.train.runs import binding

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

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0

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
    ours = _Ours(model, device, rows, length)
    alone = Contest(ours.steps, examples=rows, device=machine.device_name(device), figures=ours.figures)
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


class _Ours:
    """Our side: the program that `scalejax train` runs, its state, and batches on the device."""

    def __init__(self, model: LlamaConfig, device: Any, rows: int, length: int) -> None:
        accelerated = device.platform != "cpu"
        experiment = Experiment(
            model=model,
            data=training_step.Given(batch_size=rows),
            steps=1_000_000,
            optimizer=optim.AdamW(learning_rate=optim.Constant(value=LEARNING_RATE), weight_decay=WEIGHT_DECAY),
            strategy=Fsdp(param_dtype="bfloat16" if accelerated else None),
            gradients=Gradients(clip=CLIP),
            placement=Placement(rules=LLM),
            xla_flags=("cpu-plain-products",),
        )
        assert model.vocabulary is not None
        schema = TokenSchema(model.vocabulary, length)
        self._model, self._rows, self._length = model, rows, length
        self._program = binding.bind(experiment, schema, meshes.make_mesh(experiment.placement.mesh, [device]))
        self._state = self._program.init()
        self.batches = [_random(schema, rows, seed) for seed in range(4)]
        placed = [convert.to_device(batch, self._program) for batch in self.batches]
        self._turn = itertools.cycle(placed)

    def step(self) -> float:
        """One step; the mean loss before it."""
        self._state, loss = self._program.train_step(self._state, next(self._turn))
        return float(loss)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._state, _ = self._program.train_step(self._state, next(self._turn))
        jax.block_until_ready(self._state)

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: np.array(value) for name, value in self._state.params.items()}

    def figures(self) -> dict[str, float]:
        """Tokens a second, and the share that the model's FLOPs have of what matrix products reach here."""
        start = time.perf_counter()
        self.steps(8)
        seconds = (time.perf_counter() - start) / 8
        tokens = self._rows * self._length
        flops = {kind: self._model.flops_per_token(self._length, kind) * tokens for kind in ("causal", "full")}
        rate = _matmul_flops_per_s(jnp.bfloat16 if not machine.on_cpu() else jnp.float32)
        found = {
            "tokens_per_s": tokens / seconds,
            "tflops_per_s_causal": flops["causal"] / seconds / 1e12,
            "tflops_per_s_full": flops["full"] / seconds / 1e12,
            "matmul_tflops_per_s": rate / 1e12,
            "share_of_matmul": flops["causal"] / seconds / rate,
        }
        chip = chips.for_device_kind(jax.devices()[0].device_kind)
        if chip is not None:
            found |= {f"mfu_{kind}": count / seconds / chip.bf16_flops_per_s for kind, count in flops.items()}
        return found


def _random(schema: TokenSchema, rows: int, seed: int) -> TokenBatch:
    tokens = np.random.default_rng(seed).integers(0, schema.vocabulary, (rows, schema.length + 1), np.int32)
    ones = np.ones((rows, schema.length), np.int32)
    return TokenBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=ones.astype(np.float32),
        segment_ids=ones,
        positions=np.cumsum(ones, axis=1, dtype=np.int32) - 1,
    )


def _matmul_flops_per_s(dtype: jax.typing.DTypeLike) -> float:
    """What a square matrix product reaches: the best of five."""
    side = 1024 if machine.on_cpu() else 8192
    x = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * side**3 / best_seconds(lambda: product(x, x).block_until_ready())
