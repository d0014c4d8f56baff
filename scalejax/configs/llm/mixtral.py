"""Mixtral (arXiv 2401.04088): a Llama whose MLPs are experts, of which every token takes two.

scalejax train mixtral-smoke
"""

import dataclasses
from typing import Any

from scalejax.configs.llm import llama
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.train.experiment import Experiment


def smoke() -> Experiment:
    """A few steps of a tiny Mixtral."""
    return _with(llama.smoke(), mlp=Experts(count=4, router=TopK(k=2)))


def text() -> Experiment:
    """A Mixtral of 4 layers with 8 experts on the sources of Python's standard library, byte by byte."""
    return _with(llama.tiny(), ffn_dim=256, mlp=Experts(count=8, router=TopK(k=2)))


def _with(experiment: Experiment, **changes: Any) -> Experiment:
    assert isinstance(experiment.model, LlamaConfig)
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))
