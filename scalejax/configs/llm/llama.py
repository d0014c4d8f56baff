"""Llama 3 (arXiv 2407.21783).

scalejax train llama
"""

import dataclasses
from typing import Any

from scalejax import optim
from scalejax.configs.llm import _common
from scalejax.data.text.files import TextData, TextSplit
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.staged import StagedData
from scalejax.data.text.stages import Stage
from scalejax.data.text.tokenizer import CharacterTokenizer
from scalejax.models.llm.llama3 import SIZES, LlamaConfig
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.train.experiment import Experiment

_TINY = LlamaConfig(
    layers=4, dim=128, ffn_dim=384, heads=4, kv_heads=2, vocabulary=None, max_positions=1024, remat="none", unroll=4
)


def tiny() -> Experiment:
    """A Llama of 0.8 M parameters on the sources of Python's standard library, byte by byte."""
    return _common.experiment(
        model=_TINY,
        data=TextData(length=256, batch_size=16, split=TextSplit(train=0.97, validation=0.015)),
        steps=400,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=3e-3, warmup=0.05, final=0.1), weight_decay=0.1),
        log_every=50,
        save_every=200,
    )


def tiny_sdp4bit() -> Experiment:
    """The same under SDP4Bit, on two hosts of what devices there are: --cpu-devices 8.

    It costs 5 %: a validation loss of 1.651 where `llama-tiny` ends at 1.572 (one seed each).
    """
    return _on_two_hosts(strategy=Sdp4Bit())


def tiny_clan() -> Experiment:
    """The same under CLAN, which is LANS on compressed gradients: of one bit between two hosts. --cpu-devices 8.

    One bit costs much in so few steps: a validation loss of 2.149 where `llama-tiny` ends at 1.572, and 2.389 with
    error feedback, whose residuals enter the second moments (one seed each, benchmarks/results/compression_effect.md).
    """
    rate = optim.WarmupCosine(peak=5e-3, warmup=0.05, final=0.1)
    return _on_two_hosts(
        strategy=Ddp(compression=Compression(error_feedback="none"), accumulate="local"),
        optimizer=optim.Lans(learning_rate=rate),
    )


def shakespeare() -> Experiment:
    """A Llama of 0.74 M parameters on the characters of tiny Shakespeare; validation loss 1.74 in 1,000 steps.

    Set data.path and data.tokenizer.path to the text (input.txt of the repository karpathy/char-rnn, also gzipped).
    """
    return _common.experiment(
        model=LlamaConfig(
            layers=4,
            dim=128,
            ffn_dim=344,
            heads=4,
            kv_heads=2,
            vocabulary=None,
            rope_theta=10_000.0,
            max_positions=256,
            init_scale=0.04,
            remat="none",
            unroll=4,
        ),
        data=TextData(
            path="input.txt",
            tokenizer=CharacterTokenizer(path="input.txt"),
            length=64,
            batch_size=16,
            packing="concatenate",
            order="random-crops",
            marks="none",
            split=TextSplit(train=0.9, validation=0.1, by="position"),
        ),
        steps=1000,
        optimizer=optim.AdamW(
            learning_rate=optim.WarmupCosine(peak=1.5e-3, warmup=0.03, final=0.1), b2=0.95, weight_decay=0.1
        ),
        log_every=50,
        eval_every=100,
        save_every=0,
    )


def pretrain_1b() -> Experiment:
    """The 1B shape of Llama 3.2 on text of yours: set data.path and data.tokenizer.path. For accelerators."""
    return _pretrain("3.2-1b", peak=3e-4, rows=256, steps=100_000)


def pretrain_8b() -> Experiment:
    """Llama 3 8B, 4 M tokens a step at first: set data.path and data.tokenizer.path. For accelerators."""
    return _pretrain("3.1-8b", peak=3e-4, rows=512, steps=1_200_000)


def pretrain_70b() -> Experiment:
    """Llama 3 70B: set data.path and data.tokenizer.path. For accelerators."""
    return _pretrain("3.1-70b", peak=1.5e-4, rows=1024, steps=1_200_000)


def pretrain_405b() -> Experiment:
    """Llama 3 405B, 4 to 16 M tokens a step: set path and tokenizer.path of data.stages.N.data. For accelerators.

    Rows of 4,096 tokens for the first 252 M tokens, then of 8,192; 16 M tokens a step after 2.87 T.
    """
    last = _rows("3.1-405b", 2048)
    stages = (
        Stage(from_tokens=0, data=dataclasses.replace(last, length=4096, batch_size=1024)),
        Stage(from_tokens=252_000_000, data=dataclasses.replace(last, batch_size=1024)),
        Stage(from_tokens=2_870_000_000_000, data=last),
    )
    whole = _pretrain("3.1-405b", peak=8e-5, rows=2048, steps=1_200_000)
    return dataclasses.replace(whole, data=StagedData(stages=stages))


def smoke() -> Experiment:
    """A few steps of a tiny Llama."""
    return dataclasses.replace(
        tiny(),
        model=dataclasses.replace(_TINY, layers=2, dim=32, ffn_dim=64, remat="full", unroll=1),
        data=TextData(length=64, batch_size=8),
        steps=4,
        log_every=2,
    )


def _on_two_hosts(**changes: Any) -> Experiment:
    whole = tiny()
    placement = dataclasses.replace(whole.placement, mesh=MeshShape(replica=2))
    return dataclasses.replace(whole, placement=placement, **changes)


def _pretrain(size: str, *, peak: float, rows: int, steps: int) -> Experiment:
    """The recipe of section 3.4 of the paper: rows of 8,192 tokens, AdamW with warm-up over 8,000 steps and a cosine.

    The paper does not print betas, weight decay and clipping; 0.9, 0.95, 0.1 and 1 are what is usual.
    """
    return _common.experiment(
        model=SIZES[size],
        data=_rows(size, rows),
        steps=steps,
        optimizer=optim.AdamW(
            learning_rate=optim.WarmupCosine(peak=peak, warmup=8_000 / steps, final=0.01),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
        ),
        strategy=dataclasses.replace(_common.SUMS_IN_FLOAT32, param_dtype="bfloat16"),
        eval_every=1000,
    )


def _rows(size: str, rows: int) -> TextData:
    """Rows of 8,192 tokens of text of the user's."""
    return TextData(
        path="text",
        tokenizer=HuggingFaceTokenizer(path="tokenizer.json"),
        vocabulary=SIZES[size].vocabulary,
        length=8192,
        batch_size=rows,
        packing="best-fit",
    )
