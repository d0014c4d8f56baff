"""Graph networks planned by the TPU compiler: memory, FLOPs and collectives over one chip and over four."""

import math

import pytest
from changes import changed
from small_graph_run import gcn, write_graph

from scalejax import configs
from scalejax.kernels.sampled_spmm import Csr
from scalejax.models.graph import GcnConfig, GraphSageConfig
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.graph import shard_graph
from scalejax.plan import plan

pytestmark = pytest.mark.aot

NODES, FEATURES, HIDDEN, CLASSES = 2708, 1433, 16, 7


def test_a_gcn_over_cora_is_planned_on_one_chip():
    found = plan(configs.load("gcn-cora", []), "v5e:1x1")
    assert found.memory.fits
    assert found.collectives == ()
    assert found.mesh == {}
    kinds = found.memory.bytes_per_chip
    parameters = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    assert kinds["parameters"] == 4 * parameters
    assert kinds["optimizer state"] == pytest.approx(2 * 4 * parameters, abs=64)
    assert kinds["batch"] == 2 * 140 * 4 + 4
    # Features, and edges both ways with their weights.
    assert kinds["constants"] > 4 * NODES * FEATURES
    # Forward, and what the derivative by each kernel takes; that by the input is taken in the second layer alone.
    forward = [2 * NODES * FEATURES * HIDDEN, 2 * NODES * HIDDEN * CLASSES]
    assert found.flops >= 2 * forward[0] + 3 * forward[1]
    assert found.flops == pytest.approx(2 * forward[0] + 3 * forward[1], rel=0.05)
    assert found.model_flops == found.flops
    assert found.roofline is not None
    assert found.roofline.predicted_step_s > 0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_graph(tmp_path_factory.mktemp("graph") / "graph.npz")


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
def test_a_gcn_over_four_chips_exchanges_the_rows_that_blocks_read(path, sharding):
    experiment = gcn(path, model=GcnConfig(hidden=8, dropout=0.0), strategy=Fsdp(sharding=sharding))
    found = plan(experiment, "v5e:2x2")
    assert found.memory.fits
    assert found.mesh == {"fsdp": 4}
    rows = {(c.kind, c.axis): c for c in found.collectives}
    # A halo in each layer forward, and its transpose backward.
    exchange = rows["all-to-all", "fsdp"]
    adjacency = experiment.data.build().graph.adjacency
    room = shard_graph(_csr(adjacency), 4).send.shape[2]
    assert exchange.count == 4
    assert exchange.bytes == 2 * (8 + 3) * 4 * room * 2  # in bfloat16, and every pair has the room of the largest
    # Sums of gradients, and gathers where parameters are cut.
    assert any(kind in ("all-reduce", "reduce-scatter") for kind, _ in rows)
    kinds = found.memory.bytes_per_chip
    pieces = 4 if sharding == "FULL_SHARD" else 1
    assert kinds["parameters"] == 4 * (8 * 8 // pieces + 8 // pieces + 8 * 3 // pieces + 3)


def _csr(adjacency):
    return Csr(adjacency.indptr, adjacency.indices, adjacency.values, shape=adjacency.shape)


def test_mini_batches_are_planned_by_parts(path):
    experiment = gcn(path, model=GraphSageConfig(hidden=8))
    experiment = changed(experiment, data__normalization="none", data__fanouts=(3, 2), data__batch_size=16)
    one, four = (plan(experiment, name) for name in ("v5e:1x1", "v5e:2x2"))
    assert one.memory.fits
    assert four.memory.fits
    assert four.roofline is not None
    assert math.isfinite(four.roofline.predicted_step_s)
    # A quarter of the seeds, and the neighbourhoods of these.
    assert four.memory.bytes_per_chip["batch"] < one.memory.bytes_per_chip["batch"]
