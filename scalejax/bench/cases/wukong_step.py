"""Wukong's training step against the same model in PyTorch."""

import pathlib
from typing import Any

from scalejax.bench import peers, training_step
from scalejax.bench.harness import Contest
from scalejax.data.examples.schema import Schema
from scalejax.models.recsys.wukong import WukongConfig

CASES = ("b1024", "b8192", "criteo")
PEERS = ("torch", "torch-compile")
TAKES_DATA = True

FLIGHTS = WukongConfig(
    dim=16,
    layers=2,
    fm_outputs=8,
    lcb_outputs=9,
    rank=12,
    fmb_hidden=(128,),
    head_hidden=(128, 64),
    bottom_hidden=(64,),
)

CRITEO = WukongConfig(dim=128, layers=2, fm_outputs=8, lcb_outputs=8, rank=24, fmb_hidden=(512,), head_hidden=(512,))
"""Of the grid that the paper searched on Criteo Terabyte (appendix A); about 60 GFLOP a step of 4,096 examples."""


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    """The contest of a case."""
    return training_step.click_contest(case, against, data, {"flights": FLIGHTS, "criteo": CRITEO}, torch_module)


def torch_module(model: WukongConfig, schema: Schema) -> Any:
    """The model in PyTorch."""
    return peers.load("torch_wukong").Wukong(
        model.dim,
        model.mlps_before_stack(schema)["bottom"],
        [(n, model.fmb_sizes(n)) for n in model.layer_inputs(schema)],
        model.lcb_outputs,
        model.rank,
        model.head_sizes(schema),
    )
