"""DLRM's training step against the same model in PyTorch."""

import functools
import pathlib

import numpy as np

from scalejax.bench import peers, training_step, workloads
from scalejax.bench.harness import Contest
from scalejax.data.examples.schema import Schema
from scalejax.models.recsys.dlrm import DlrmConfig

CASES = ("b1024", "b8192", "criteo")
PEERS = ("torch", "torch-compile")

FLIGHTS = DlrmConfig(dim=16, bottom_hidden=(64,), top_hidden=(128, 64))

CRITEO = DlrmConfig()
"""The model of Table 3 in the Wukong paper: 680,321 dense parameters on this schema."""


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
    model: DlrmConfig, schema: Schema, compiled: bool, parameters: dict[str, np.ndarray], tables: list[np.ndarray]
) -> training_step.Peer:
    """The model in PyTorch, with our parameters and tables."""
    sizes = model.mlp_sizes(schema)
    module = peers.load("torch_dlrm").Dlrm(model.input_vectors(schema), sizes["bottom"], sizes["top"])
    return training_step.torch_step(module, parameters, tables, compiled)
