"""DHEN's training step, crosses beside factorization machines, against the same model in PyTorch."""

import pathlib
from typing import Any

from scalejax.bench import peers, training_step
from scalejax.bench.harness import Contest
from scalejax.data.examples.schema import Schema
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.interactions import FactorizationMachine, FeatureCross, LayerInputs

CASES = ("b1024", "b8192", "criteo")
PEERS = ("torch", "torch-compile")
TAKES_DATA = True


def stack(dim: int, n: int, cross_rank: int | None, rank: int, hidden: tuple[int, ...], mlps: tuple[int, ...]) -> Any:
    """Two layers of n vectors in and out."""
    machine = FactorizationMachine(outputs=n, rank=rank, hidden=hidden)
    layer = EnsembleLayer(modules=(FeatureCross(outputs=n, rank=cross_rank), machine), ensemble="sum")
    return DhenConfig(dim=dim, layers=(layer,), repeats=2, head_hidden=mlps, bottom_hidden=mlps[-1:])


FLIGHTS = stack(16, 10, None, 12, (128,), (128, 64))
CRITEO = stack(128, 27, 256, 24, (512,), (512,))


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    """The contest of a case."""
    return training_step.click_contest(case, against, data, {"flights": FLIGHTS, "criteo": CRITEO}, torch_module)


def torch_module(model: DhenConfig, schema: Schema) -> Any:
    """The model in PyTorch."""
    cross, machine = model.layers[0].modules
    assert isinstance(cross, FeatureCross)
    assert isinstance(machine, FactorizationMachine)
    n = model.input_vectors(schema)
    return peers.load("torch_dhen").Dhen(
        model.dim,
        model.mlps_before_stack(schema)["bottom"],
        model.repeats,
        n,
        cross.rank,
        machine.rank,
        machine.sizes(LayerInputs(n=n, d=model.dim)),
        model.head_sizes(schema),
    )
