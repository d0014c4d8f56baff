"""Wukong's training step against the same model in PyTorch."""

import functools
import pathlib

import numpy as np

from scalejax.bench import peers, training_step, workloads
from scalejax.bench.harness import Contest
from scalejax.data.examples.schema import Schema
from scalejax.models.recsys.wukong import WukongConfig

CASES = ("b1024", "b8192", "criteo")
PEERS = ("torch", "torch-compile")

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


def on_cpu() -> bool:
    """Whether this runs on the CPU whatever the accelerator."""
    return training_step.on_cpu()


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    """The contest of a case."""
    schema, batches = workloads.for_case(case, data)
    model = CRITEO if case == "criteo" else FLIGHTS
    make = None if against is None else functools.partial(torch_peer, model, schema, against == "torch-compile")
    return training_step.contest(model, schema, batches, make)


def torch_peer(
    model: WukongConfig, schema: Schema, compiled: bool, parameters: dict[str, np.ndarray], tables: list[np.ndarray]
) -> training_step.Peer:
    """The model in PyTorch, with our parameters and tables."""
    peer = peers.load("torch_wukong")
    module = peer.Wukong(
        model.dim,
        model.mlps_before_stack(schema)["bottom"],
        [(n, model.fmb_sizes(n)) for n in model.layer_inputs(schema)],
        model.lcb_outputs,
        model.rank,
        model.head_sizes(schema),
    )
    return training_step.torch_step(module, parameters, tables, compiled)
