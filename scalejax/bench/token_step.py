"""The training step of a language model as `scalejax train` runs it, on batches of random tokens."""

import itertools
from typing import Any

import jax
import numpy as np

from scalejax import optim
from scalejax.bench import training_step
from scalejax.data.text.modalities import ModalityMap
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.rules import LLM
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment, Gradients, Placement
from scalejax.train.runs import binding

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0


class TokenStep:
    """The program, its state, and batches on the device: forward, backward, clipping by the global norm and AdamW.

    Args:
      model: With a vocabulary.
      device: Where it runs.
      rows: Of a batch.
      schema: Of the batches. Where it has modalities, every row has as many tokens of each as its capacities, the last
        as many as remain.
    """

    def __init__(self, model: LlamaConfig, device: Any, rows: int, schema: TokenSchema) -> None:
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
        self.model, self.tokens = model, rows * schema.length
        self._program = binding.bind(experiment, schema, meshes.make_mesh(experiment.placement.mesh, [device]))
        self._state = self._program.init()
        self.batches = [random_batch(schema, rows, seed) for seed in range(4)]
        placed = [convert.to_device(batch, self._program) for batch in self.batches]
        self._turn = itertools.cycle(placed)

    def step(self) -> float:
        """One step; the mean loss before it."""
        self._state, loss = self._program.train_step(self._state, next(self._turn))
        return float(loss)

    def steps(self, count: int) -> None:
        """So many steps, complete when it returns."""
        for _ in range(count):
            self._state, _ = self._program.train_step(self._state, next(self._turn))
        jax.block_until_ready(self._state)

    def parameters(self) -> dict[str, np.ndarray]:
        """By path, on the host."""
        return {name: np.array(value) for name, value in self._state.params.items()}


def random_batch(schema: TokenSchema, rows: int, seed: int) -> TokenBatch:
    """Rows of one document each, without padding."""
    rng, shape = np.random.default_rng(seed), (rows, schema.length + 1)
    tokens, modality = rng.integers(0, schema.vocabulary, shape, np.int32), None
    if schema.ranges:
        names = schema.modalities
        counts = [schema.capacity(number) for number in range(len(names) - 1)]
        kinds = np.repeat(np.arange(len(names)), [*counts, schema.length - sum(counts)])
        kinds = np.stack([rng.permutation(kinds) for _ in range(rows)])
        kinds = np.concatenate([kinds, kinds[:, :1]], 1)
        of_ids = np.asarray(ModalityMap(ranges=schema.ranges).of_ids)
        for number in range(len(names)):
            own = kinds == number
            tokens[own] = rng.choice(np.flatnonzero(of_ids == number), own.sum())
        modality = kinds[:, :-1].astype(np.int8)
    ones = np.ones((rows, schema.length), np.int32)
    return TokenBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=ones.astype(np.float32),
        segment_ids=ones,
        positions=np.cumsum(ones, axis=1, dtype=np.int32) - 1,
        modality=modality,
    )
