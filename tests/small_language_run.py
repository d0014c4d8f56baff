"""A language model of a few thousand parameters on a few documents, for tests of training."""

import dataclasses
import pathlib

import numpy as np

from scalejax import optim
from scalejax.data.text import TextData, TextSplit
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.train.experiment import Checkpoints, DenseExperiment

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


def experiment(folder: pathlib.Path, **changes: object) -> DenseExperiment:
    """Twelve steps of eight rows of 32 tokens, checkpoints every four."""
    data = TextData(
        path=str(folder),
        length=32,
        batch_size=8,
        split=TextSplit(train=0.7, validation=0.2),
        folder=str(folder.parent / "cache"),
    )
    whole = DenseExperiment(
        model=MODEL,
        data=data,
        steps=12,
        optimizer=optim.AdamW(learning_rate=optim.Constant(value=1e-2)),
        log_every=4,
        checkpoints=Checkpoints(every=4, keep_last=3, best_metric="loss"),
    )
    return dataclasses.replace(whole, **changes)
