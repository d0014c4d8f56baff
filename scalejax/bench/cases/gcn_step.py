"""The training step of a graph network on the bundled Cora against the same GCN in PyTorch.

One step is forward and backward over the whole graph and Adam. Nothing is dropped out, so that both sides compute the
same numbers from the same parameters.

    cora16      the GCN of Kipf and Welling: 2 layers, 16 wide
    cora256     256 wide
"""

import dataclasses

import jax
import numpy as np

from scalejax import optim
from scalejax.bench import machine, peers, training_step
from scalejax.bench.harness import Contest, OutputsDiffer, repeated
from scalejax.data.graphs import NodeData
from scalejax.data.graphs.dataset import NodeBatch
from scalejax.models.graph import GcnConfig
from scalejax.parallel import mesh as meshes
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment
from scalejax.train.runs import binding

CASES = ("cora16", "cora256")
PEERS = ("torch",)

LEARNING_RATE = 0.01

LOSS_TOLERANCE = 1e-5
"""Relative, over `CHECKED_STEPS` steps: float32 sums in another order."""

CHECKED_STEPS = 4


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case.

    Raises:
      UserError: a peer on an accelerator.
    """
    device = jax.devices()[0]
    if against is not None:
        training_step.check_peer_device(device)
    experiment = Experiment(
        model=GcnConfig(hidden=int(case.removeprefix("cora")), dropout=0.0),
        data=NodeData(normalization="symmetric"),
        steps=1_000_000,
        optimizer=optim.Adam(learning_rate=optim.Constant(value=LEARNING_RATE)),
    )
    nodes = experiment.data.build()
    mesh = meshes.make_mesh(None, [device])
    program = binding.bind(experiment, nodes.schema, mesh, nodes)
    batch = next(program.task.train_batches(nodes, mesh, 0))
    assert isinstance(batch, NodeBatch)
    placed, state, loss = convert.to_device(batch, program), program.init(), None
    parameters = {path: np.array(p) for path, p in state.params.items()}

    def steps(count: int) -> None:
        nonlocal state, loss
        for _ in range(count):
            state, loss = program.train_step(state, placed)
        jax.block_until_ready(state)

    adjacency = nodes.graph.adjacency
    alone = Contest(steps, examples=adjacency.shape[0], device=machine.device_name(device))
    if against is None:
        return alone
    theirs = peers.load("torch_gcn").TrainingStep(
        (adjacency.indptr, adjacency.indices, adjacency.values),
        (np.asarray(nodes.graph.features, np.float32), batch.nodes, batch.labels),
        parameters,
        learning_rate=LEARNING_RATE,
        threads=len(machine.usable_cpus()),
    )

    def check() -> None:
        for step in range(1, CHECKED_STEPS + 1):
            steps(1)
            mine, other = float(np.asarray(loss)), theirs.step()
            if not abs(mine - other) <= LOSS_TOLERANCE * abs(other):
                raise OutputsDiffer(f"losses of step {step} differ: {mine:.7f} here, {other:.7f} in the peer")

    return dataclasses.replace(alone, peer=repeated(theirs.step), check=check)
