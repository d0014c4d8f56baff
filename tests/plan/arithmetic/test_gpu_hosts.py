"""Strategies of sharding on hosts of GPUs: closed forms, and the bars of DHEN's Fig. 6."""

import dataclasses

import pytest

from scalejax.errors import UserError
from scalejax.plan.arithmetic import gpu_hosts
from scalejax.plan.arithmetic.gpu_hosts import DenseLayer, estimate
from scalejax.plan.planner_machines import find_gpus

CLUSTER = find_gpus("a100-40gb:32x8")
LAYER = DenseLayer(parameters=130e6, compute_s=20e-3)
STRATEGIES = ("NO_SHARD", "HYBRID_SHARD", "FULL_SHARD")
FIG_6 = {1: 1.16, 8: 1.14, 16: 1.18, 24: 1.33, 32: 1.20}
"""HYBRID_SHARD over FULL_SHARD by layers, read off the bars; NO_SHARD is 1.35, 1.33 and 1.36 up to 16 layers."""


@pytest.mark.parametrize("layers", FIG_6)
def test_the_order_and_size_of_the_published_ratios(layers):
    replicated, hybrid, sharded = (estimate(LAYER, layers, s, CLUSTER) for s in STRATEGIES)
    assert replicated.step_s < hybrid.step_s < sharded.step_s
    assert sharded.step_s / hybrid.step_s >= 1.1
    assert sharded.step_s / hybrid.step_s == pytest.approx(FIG_6[layers], rel=0.13)
    assert sharded.step_s / replicated.step_s == pytest.approx(1.35, rel=0.05)
    assert replicated.fits == (layers <= 16)  # published: out of memory at 24 layers
    assert hybrid.fits
    assert hybrid.memory_bytes < replicated.memory_bytes / 6 + 1e9


def test_is_its_closed_form():
    gather = 260e6 * 255 / 256 / 74e9
    found = estimate(LAYER, 3, "FULL_SHARD", CLUSTER)
    assert found.step_s == pytest.approx(3 * (20e-3 + 2 * gather))
    assert found.memory_bytes == pytest.approx(3 * 130e6 * 16 / 256 + 2 * 260e6)
    slow = dataclasses.replace(LAYER, compute_s=1e-3)
    found = estimate(slow, 1, "HYBRID_SHARD", CLUSTER)
    inside, between = 260e6 * 7 / 8 / 163e9, 2 * 260e6 / 8 * 31 / 32 / 25e9
    assert found.exposed_s == pytest.approx(2 * inside + (inside + between - 2e-3 / 3))
    alone = estimate(LAYER, 1, "NO_SHARD", find_gpus("a100-40gb:1x1"))
    assert alone.step_s == LAYER.compute_s


def test_bandwidth_lies_between_what_was_measured():
    assert gpu_hosts.bus_bytes_per_s(2) == gpu_hosts.bus_bytes_per_s(8) == 163e9
    assert gpu_hosts.bus_bytes_per_s(64) == pytest.approx(91e9)
    assert 81e9 > gpu_hosts.bus_bytes_per_s(181) > 74e9
    assert gpu_hosts.bus_bytes_per_s(4096) == 65e9


def test_what_cannot_be_is_refused():
    with pytest.raises((UserError, ValueError), match="strategy must be one of"):
        estimate(LAYER, 1, "HSDP", CLUSTER)
    with pytest.raises((UserError, ValueError), match="layers must be at least 1"):
        estimate(LAYER, 0, "NO_SHARD", CLUSTER)
