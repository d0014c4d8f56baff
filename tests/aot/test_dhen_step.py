"""DHEN beside its tables on two slices of a TPU and two hosts of GPUs: what crosses between them, what a chip holds."""

import dataclasses

import pytest
from aot import cuda_topology

from scalejax import plan
from scalejax.configs.recsys import dhen
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.runs import binding

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

SLICES = "v5p:2x2x2,slices=2"


def planned(sharding, form):
    experiment = dataclasses.replace(dhen.flights(), strategy=Fsdp(sharding=sharding, form=form))
    return plan.plan(experiment, SLICES), experiment


def dense_bytes(experiment):
    return 4 * experiment.model.task(experiment.data.schema()).dense_parameters()


def across(collectives):
    """Bytes between slices or hosts, without rows of tables and their ids."""
    return sum(c.bytes for c in collectives if "replica" in c.axes and c.kind != "all-to-all")


@pytest.mark.parametrize("form", [pytest.param("implicit", marks=pytest.mark.slow), "explicit"])
def test_only_shards_of_dense_gradients_cross_between_slices(form):
    """Parameters are gathered within a slice, and what is summed between slices is 1/8 of the dense gradients."""
    found, experiment = planned("HYBRID_SHARD", form)
    assert found.mesh == {"replica": 2, "fsdp": 8}
    dense = dense_bytes(experiment)
    gathered = [c for c in found.collectives if c.kind == "all-gather" and c.bytes > 2**16]
    assert gathered
    assert all(c.axes == ("fsdp",) for c in gathered)
    assert 0.9 * dense < sum(c.bytes for c in gathered) < 2.1 * dense
    assert across(found.collectives) < 1.3 * dense / 8
    if form == "explicit":  # the implicit form sums some gradients in ways of its own
        assert across(found.collectives) > 0.9 * dense / 8
    assert found.roofline.dcn_s > 0
    assert found.memory.bytes_per_chip["parameters"] < 1.1 * dense / 8 + 2**16


@pytest.mark.slow
def test_a_replicated_dense_part_is_held_whole_and_summed_in_two_steps():
    """The compiler itself sums within a slice, shards of that between slices, and gathers; a chip holds all."""
    found, experiment = planned("NO_SHARD", "explicit")
    dense = dense_bytes(experiment)
    gathered = sum(c.bytes for c in found.collectives if c.kind == "all-gather" and c.axes == ("fsdp",))
    assert 0.9 * dense < gathered < 1.1 * dense
    assert 0.9 * dense / 8 < across(found.collectives) < 2 * dense / 8
    assert found.memory.bytes_per_chip["parameters"] > 0.99 * dense


@cuda_topology.needs_cuda_compiler
def test_gpus_of_two_hosts_gather_within_a_host_and_sum_shards_between_them():
    experiment = dataclasses.replace(dhen.flights(), strategy=Fsdp(sharding="HYBRID_SHARD", form="explicit"))
    mesh = make_mesh(MeshShape(replica=2, fsdp=8), cuda_topology.devices(2, 8))
    step, arguments = binding.bind(experiment, experiment.data.schema(), mesh, abstract=True).repeated_step()
    found = plan.explain_sharding(step.trace(*arguments).lower().compile(), mesh)
    dense = dense_bytes(experiment)
    gathered = [c for c in found if c.kind == "all-gather" and c.bytes > 2**16]
    assert all(c.axes == ("fsdp",) for c in gathered)
    assert 0.9 * dense < sum(c.bytes for c in gathered) < 2.1 * dense
    assert 0.9 * dense / 8 < across(found) < 1.3 * dense / 8
