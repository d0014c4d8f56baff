"""DHEN beside its tables on two slices of a TPU and two hosts of GPUs: what crosses between them, what a chip holds."""

import dataclasses

import pytest
from aot import cuda_topology

from scalejax import plan
from scalejax.configs.recsys import dhen
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.runs import binding

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

SLICES = "v5p:2x2x2,slices=2"


def planned(sharding, form):
    experiment = dataclasses.replace(dhen.flights(), strategy=Fsdp(sharding=sharding, form=form))
    return plan.plan(experiment, SLICES), experiment


def dense_bytes(experiment):
    return 4 * experiment.model.task(experiment.data.schema()).dense_parameters()


def across(collectives):
    """Bytes between slices or hosts, without rows of tables and their ids."""
    return sum(c.bytes for c in collectives if "replica" in c.axes and c.kind != "all-to-all")


def bytes_of(collectives, kind, *axes):
    return sum(c.bytes for c in collectives if c.kind == kind and c.axes == axes)


@pytest.mark.parametrize("form", [pytest.param("implicit", marks=pytest.mark.slow), "explicit"])
def test_only_shards_of_dense_gradients_cross_between_slices(form):
    """Parameters are gathered within a slice, and what is summed between slices is 1/8 of the dense gradients."""
    found, experiment = planned("HYBRID_SHARD", form)
    assert found.mesh == {"replica": 2, "fsdp": 8}
    dense = dense_bytes(experiment)
    assert not [c for c in found.collectives if c.kind == "all-gather" and "replica" in c.axes and c.bytes > 2**16]
    gathered = bytes_of(found.collectives, "all-gather", "fsdp")
    assert across(found.collectives) < 1.3 * dense / 8
    if form == "explicit":
        assert dense <= gathered <= 1.01 * dense
        # What the compiler calls an all-reduce leaves every chip its shard.
        assert dense <= bytes_of(found.collectives, "all-reduce", "fsdp") <= 1.01 * dense
        assert across(found.collectives) >= dense / 8
    else:  # some parameters are gathered twice, and some gradients summed otherwise
        assert dense <= gathered <= 2.1 * dense
    assert found.roofline.dcn_s > 0
    assert found.memory.bytes_per_chip["parameters"] == (dense - 4) // 8 + 4  # the last bias is whole


@pytest.mark.slow
def test_what_is_sharded_over_all_chips_crosses_between_slices_more_than_twice_as_much():
    full, hybrid = (planned(sharding, "explicit")[0] for sharding in ("FULL_SHARD", "HYBRID_SHARD"))
    assert across(full.collectives) > 2 * across(hybrid.collectives)
    assert full.memory.bytes_per_chip["parameters"] < 0.7 * hybrid.memory.bytes_per_chip["parameters"]


@pytest.mark.slow
def test_a_replicated_dense_part_is_held_whole_and_summed_in_two_steps():
    """The compiler itself sums within a slice, shards of that between slices, and gathers; a chip holds all."""
    found, experiment = planned("NO_SHARD", "explicit")
    dense = dense_bytes(experiment)
    for kind in ("all-reduce", "all-gather"):
        assert dense <= bytes_of(found.collectives, kind, "fsdp") <= 1.01 * dense
    assert dense / 8 <= across(found.collectives) < 1.7 * dense / 8
    assert found.memory.bytes_per_chip["parameters"] == dense


@cuda_topology.needs_cuda_compiler
def test_gpus_of_two_hosts_gather_within_a_host_and_sum_shards_between_them():
    found, state = {}, {}
    for sharding in ("NO_SHARD", "HYBRID_SHARD", "FULL_SHARD"):
        experiment = dataclasses.replace(dhen.flights(), strategy=Fsdp(sharding=sharding, form="explicit"))
        mesh = make_mesh(MeshShape(replica=2, fsdp=8), cuda_topology.devices(2, 8))
        step, arguments = binding.bind(experiment, experiment.data.schema(), mesh, abstract=True).repeated_step()
        compiled = step.trace(*arguments).lower().compile()
        found[sharding] = plan.explain_sharding(compiled, mesh)
        state[sharding] = compiled.memory_analysis().argument_size_in_bytes
    dense, everywhere = dense_bytes(experiment), ("replica", "fsdp")
    cut = {"HYBRID_SHARD": bytes_of(found["HYBRID_SHARD"], "reduce-scatter", "fsdp")}
    assert cut["HYBRID_SHARD"] == dense - 4  # the last bias is whole
    assert bytes_of(found["HYBRID_SHARD"], "all-reduce", "replica") == cut["HYBRID_SHARD"] // 8
    assert 0.99 * dense < bytes_of(found["HYBRID_SHARD"], "all-gather", "fsdp") <= dense
    # Of 16 parts some parameters have none.
    cut["FULL_SHARD"] = bytes_of(found["FULL_SHARD"], "reduce-scatter", *everywhere)
    assert 0.97 * dense < bytes_of(found["FULL_SHARD"], "all-gather", *everywhere) <= dense
    assert 0.97 * dense < cut["FULL_SHARD"] < dense
    assert bytes_of(found["NO_SHARD"], "all-reduce", *everywhere) >= dense
    # Parameters and both moments of Adam.
    for sharding, parts in (("HYBRID_SHARD", 8), ("FULL_SHARD", 16)):
        assert state["NO_SHARD"] - state[sharding] == 3 * cut[sharding] * (parts - 1) // parts
