"""DHEN beside its tables on two slices of a TPU: what crosses between slices, and what a chip holds."""

import dataclasses

import pytest

from scalejax import plan
from scalejax.configs.recsys import dhen
from scalejax.parallel.fsdp import Fsdp

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

SLICES = "v5p:2x2x2,slices=2"


def planned(sharding, form):
    experiment = dataclasses.replace(dhen.flights(), strategy=Fsdp(sharding=sharding, form=form))
    return plan.plan(experiment, SLICES), experiment


def dense_bytes(experiment):
    return 4 * experiment.model.task(experiment.data.schema()).dense_parameters()


def across_slices(found):
    """Bytes between slices, without rows of tables and their ids."""
    return sum(c.bytes for c in found.collectives if "replica" in c.axes and c.kind != "all-to-all")


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
    assert across_slices(found) < 1.3 * dense / 8
    if form == "explicit":  # the implicit form sums some gradients in ways of its own
        assert across_slices(found) > 0.9 * dense / 8
    assert found.roofline.dcn_s > 0
    assert found.memory.bytes_per_chip["parameters"] < 1.1 * dense / 8 + 2**16


@pytest.mark.slow
def test_a_replicated_dense_part_is_held_whole_and_summed_in_two_steps():
    """The compiler itself sums within a slice, shards of that between slices, and gathers; a chip holds all."""
    found, experiment = planned("NO_SHARD", "explicit")
    dense = dense_bytes(experiment)
    gathered = sum(c.bytes for c in found.collectives if c.kind == "all-gather" and c.axes == ("fsdp",))
    assert 0.9 * dense < gathered < 1.1 * dense
    assert 0.9 * dense / 8 < across_slices(found) < 2 * dense / 8
    assert found.memory.bytes_per_chip["parameters"] > 0.99 * dense
