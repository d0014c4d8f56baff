"""Llama 3 (arXiv 2407.21783).

scalejax train llama
"""

import dataclasses

from scalejax import optim
from scalejax.data.text import TextData
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.train.experiment import Checkpoints, DenseExperiment

_TINY = LlamaConfig(
    layers=4, dim=128, ffn_dim=384, heads=4, kv_heads=2, vocabulary=None, max_positions=1024, remat="none"
)


def tiny() -> DenseExperiment:
    """A Llama of 0.8 M parameters on the sources of Python's standard library, byte by byte."""
    return DenseExperiment(
        model=_TINY,
        data=TextData(length=256, batch_size=16),
        steps=800,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=3e-3, warmup=0.05, final=0.1), weight_decay=0.1),
        log_every=50,
        checkpoints=Checkpoints(every=400, best_metric="loss"),
    )


def smoke() -> DenseExperiment:
    """A few steps of a tiny Llama."""
    return dataclasses.replace(
        tiny(),
        model=dataclasses.replace(_TINY, layers=2, dim=32, ffn_dim=64, remat="full"),
        data=TextData(length=64, batch_size=8),
        steps=4,
        log_every=2,
    )
