"""DLRM's training step against the same model in PyTorch."""

import pathlib
from typing import Any

from scalejax.bench import peers, training_step
from scalejax.bench.harness import Contest
from scalejax.data.examples.schema import Schema
from scalejax.models.recsys.dlrm import DlrmConfig

CASES = ("b1024", "b8192", "criteo")
PEERS = ("torch", "torch-compile")
TAKES_DATA = True

FLIGHTS = DlrmConfig(dim=16, bottom_hidden=(64,), top_hidden=(128, 64))

CRITEO = DlrmConfig()
"""The model of Table 3 in the Wukong paper: 680,321 dense parameters on this schema."""


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    """The contest of a case."""
    return training_step.click_contest(case, against, data, {"flights": FLIGHTS, "criteo": CRITEO}, torch_module)


def torch_module(model: DlrmConfig, schema: Schema) -> Any:
    """The model in PyTorch."""
    sizes = model.mlp_sizes(schema)
    return peers.load("torch_dlrm").Dlrm(model.input_vectors(schema), sizes["bottom"], sizes["top"])
