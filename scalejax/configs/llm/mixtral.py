"""Mixtral (arXiv 2401.04088): a Llama whose MLPs are experts, of which every token takes two.

scalejax train mixtral-smoke
"""

import dataclasses
from typing import Any

from scalejax import optim
from scalejax.configs.llm import _common, llama
from scalejax.data.text.files import TextData
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.train.experiment import Experiment


def smoke() -> Experiment:
    """A few steps of a tiny Mixtral."""
    return _with(llama.smoke(), mlp=Experts(count=4, router=TopK(k=2)))


def text() -> Experiment:
    """A Mixtral of 4 layers with 8 experts on the sources of Python's standard library, byte by byte."""
    return _with(llama.tiny(), ffn_dim=256, mlp=Experts(count=8, router=TopK(k=2)))


def pretrain_8x7b() -> Experiment:
    """Mixtral 8x7B, 4 M tokens a step: set data.path and data.tokenizer.path. For accelerators.

    The architecture is that of config.json of mistralai/Mixtral-8x7B-v0.1. How it was trained is not published: the
    batch, optimizer and rate are those of Llama 3 8B, rows and capacity those of MaxText's runs.
    """
    vocabulary, steps = 32_000, 1_000_000
    return _common.experiment(
        model=LlamaConfig(
            layers=32,
            dim=4096,
            ffn_dim=14_336,
            heads=32,
            kv_heads=8,
            vocabulary=vocabulary,
            rope_theta=1e6,
            max_positions=32_768,
            norm_eps=1e-5,
            mlp=Experts(count=8, router=TopK(k=2, balance=0.02, capacity_factor=1.25), execution="batched"),
        ),
        data=TextData(
            path="text",
            tokenizer=HuggingFaceTokenizer(path="tokenizer.json"),
            vocabulary=vocabulary,
            length=4096,
            batch_size=1024,
            packing="best-fit",
        ),
        steps=steps,
        optimizer=optim.AdamW(
            learning_rate=optim.WarmupCosine(peak=3e-4, warmup=8_000 / steps, final=0.01),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
        ),
        strategy=dataclasses.replace(_common.SUMS_IN_FLOAT32, param_dtype="bfloat16"),
        eval_every=1000,
    )


def _with(experiment: Experiment, **changes: Any) -> Experiment:
    assert isinstance(experiment.model, LlamaConfig)
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))
