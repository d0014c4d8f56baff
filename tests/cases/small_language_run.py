"""A language model of a few thousand parameters on a few documents, for tests of training."""

import math
import pathlib
from typing import Any

import jax
import numpy as np
from changes import changed

from scalejax import optim
from scalejax.data.text.files import TextData, TextSplit
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.rules import LLM
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Gradients, Placement
from scalejax.train.runs.run import Run
from scalejax.train.runs.run_state import HostState
from scalejax.train.state import TrainState

MODEL = LlamaConfig(
    layers=2, dim=16, ffn_dim=32, heads=4, kv_heads=2, vocabulary=None, max_positions=64, loss_positions=8
)


def write(folder: pathlib.Path) -> pathlib.Path:
    """Documents of 20 to 120 letters; a letter is mostly followed by the next one of the alphabet."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(48):
        steps = np.where(random.random(random.integers(20, 120)) < 0.8, 1, random.integers(0, 26))
        letters = (random.integers(0, 26) + np.cumsum(steps)) % 26
        (folder / f"{number:02}.txt").write_text("".join(chr(97 + letter) for letter in letters))
    return folder


def experiment(folder: pathlib.Path, **changes: object) -> Experiment:
    """Twelve steps of eight rows of 32 tokens, checkpoints every four; changes as `changed`."""
    data = TextData(
        path=str(folder),
        length=32,
        batch_size=8,
        split=TextSplit(train=0.7, validation=0.2),
        folder=str(folder.parent / "cache"),
    )
    whole = Experiment(
        model=MODEL,
        data=data,
        steps=12,
        optimizer=optim.AdamW(learning_rate=optim.Constant(value=1e-2)),
        gradients=Gradients(clip=1.0),
        placement=Placement(rules=LLM),
        evaluation=Evaluation(final_split="validation"),
        checkpoints=Checkpoints(every=4, keep_last=3),
        xla_flags=("cpu-plain-products",),
        log_every=4,
    )
    return changed(whole, **changes)


def bind(folder: pathlib.Path, shape: MeshShape, **changes: Any) -> Run:
    """A run of `experiment` on as many devices as a mesh of stated sizes has."""
    made = experiment(folder, **changes)
    sizes = [getattr(shape, axis) for axis in ("replica", "fsdp", "expert", "context", "tensor", "stage")]
    return Run.bind(made, made.data.build(), make_mesh(shape, jax.devices()[: math.prod(sizes)]))


def steps(run: Run, state: TrainState, host: HostState, count: int) -> tuple[TrainState, list[float]]:
    """The state after some steps, and their losses."""
    losses = []
    with run.feed(host, count) as feed:
        for _ in range(count):
            feed.take()
            state, loss = feed.step(state)
            losses.append(float(loss))
    return state, losses
