"""A graph of 90 nodes in three classes, and runs over it."""

import pathlib
from typing import Any

import numpy as np
from changes import changed

from scalejax import optim
from scalejax.data import graphs
from scalejax.models.graph import GcnConfig
from scalejax.parallel.mesh import make_mesh
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Placement
from scalejax.train.runs import binding, scoring
from scalejax.train.step import Program

CLASSES = 3


def write_graph(file: pathlib.Path) -> str:
    """Writes a graph with most edges inside of the classes, and features that say little; returns its path."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), 30).astype(np.int32)
    inside = rng.integers(0, 30, (2, 400)) + 30 * rng.integers(0, CLASSES, 400)
    across = rng.integers(0, 90, (2, 60))
    edges = np.concatenate([inside, across], axis=1)
    adjacency = graphs.Adjacency.from_edges(edges[0], edges[1], shape=(90, 90)).with_reverse()
    features = rng.normal(size=(90, 8)) + 0.7 * np.eye(8)[labels]
    order = rng.permutation(90)
    splits = {"train": order[:30], "validation": order[30:60], "test": order[60:]}
    graphs.write_npz(file, graphs.NodeGraph(adjacency, features.astype(np.float32), labels, splits))
    return str(file)


def gcn(path: str, **changes: Any) -> Experiment:
    """A GCN over the whole graph on one device."""
    run = Experiment(
        model=GcnConfig(hidden=8),
        data=graphs.NodeData(path=path, features="as-is"),
        steps=24,
        optimizer=optim.AdamL2(learning_rate=optim.Constant(value=0.02), only="layers/0/"),
        placement=Placement(mesh=None),
        evaluation=Evaluation(every=2, final="best"),
        checkpoints=Checkpoints(every=0),
        log_every=4,
    )
    return changed(run, **changes)


def bind(run: Experiment, data: graphs.NodeDataSet | None = None) -> Program:
    """The program of a run on the mesh that it names."""
    data = data or run.data.build()
    assert data is not None
    return binding.bind(run, data.schema, make_mesh(run.placement.mesh), data)


def scores_of(program: Program, state: Any, data: graphs.NodeDataSet, split: str) -> dict[str, float]:
    """Scores of a split."""
    return scoring.score(program, state, iter([data.whole(split)])).measure()
