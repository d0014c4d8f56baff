"""A click model on hosts of GPUs by arithmetic: the published models and batches give the published steps."""

import dataclasses

import pytest

from scalejax.errors import UserError
from scalejax.plan.arithmetic import gpu_hosts
from scalejax.plan.arithmetic.tower_steps import GENERATIONS, PUBLISHED_MODELS, steps
from scalejax.plan.gpu_steps import ClickWork, OverTowers, plan_on_gpus
from scalejax.plan.planner_machines import find_gpus

DCN = PUBLISHED_MODELS["dcn"]
WORK = ClickWork(
    parameters=1e6, flops=DCN.flops, width=26 * 128, towers=OverTowers(count=8, flops=62.60e6, compression=1.0)
)
H100 = find_gpus("h100:8x8")
BATCH = 64 * 16_384


def test_the_published_model_has_the_published_breakdown():
    """DCN on 64 H100, Fig. 1: 29.4 ms of computation, 11.5 of exposed exchange; 21.8 and 2.5 over towers."""
    found = plan_on_gpus(WORK, H100, BATCH)
    rest = 29.4e-3 * 0.021 / 0.704
    assert found.examples == 16_384
    assert found.steps_by_route() == {
        "flat": pytest.approx(29.4e-3 + 11.5e-3 + rest),
        "two_level": pytest.approx(29.4e-3 + 2.5e-3 + rest),
        "towers": pytest.approx(21.8e-3 + 2.5e-3 + rest),
    }
    assert found.routes == steps(DCN, GENERATIONS["h100"], 8)


def test_a_step_goes_by_examples_and_by_width():
    found = plan_on_gpus(WORK, H100, BATCH)
    half = plan_on_gpus(WORK, H100, BATCH // 2)
    narrow = plan_on_gpus(dataclasses.replace(WORK, width=26 * 64), H100, BATCH)
    slope = (29.4e-3 - 21.8e-3) / (DCN.flops - 62.60e6) * DCN.flops  # what goes by FLOPs
    for route, seconds in found.steps_by_route().items():
        assert half.steps_by_route()[route] == pytest.approx(seconds / 2)
    assert narrow.routes.flat_s - slope == pytest.approx((found.routes.flat_s - slope) / 2)


def test_the_dense_part_is_that_of_equal_layers():
    """130 million parameters a layer, as many FLOPs as take 20 ms a layer on an A100: the ratios of DHEN's Fig. 6."""
    machine = find_gpus("a100-40gb:32x8")
    # 20 ms at 22 % of 156 TFLOP/s, forward and backward three times forward, for 16,384 examples.
    share = 3 * 16_384 / ((29.4e-3 - 21.8e-3) / (DCN.flops - 62.60e6)) / 989e12
    work = ClickWork(parameters=16 * 130e6, flops=16 * 20e-3 * share * 156e12 / 3 / 16_384, width=1000, layers=16)
    found = plan_on_gpus(work, machine, 256 * 16_384)
    layer = gpu_hosts.DenseLayer(parameters=130e6, compute_s=20e-3)
    for strategy, estimate in found.dense.items():
        expected = gpu_hosts.estimate(layer, 16, strategy, machine)
        assert estimate.step_s == pytest.approx(expected.step_s)
        assert estimate.memory_bytes == pytest.approx(expected.memory_bytes)
    assert set(found.steps_by_route()) == {"flat", "two_level"}
    assert found.dense["FULL_SHARD"].step_s / found.dense["HYBRID_SHARD"].step_s == pytest.approx(1.18, rel=0.02)


def test_what_no_figure_is_of_is_refused():
    def refused(match, machine="h100:8x8", batch=BATCH):
        with pytest.raises(UserError, match=match):
            plan_on_gpus(WORK, find_gpus(machine), batch)

    refused("two or more hosts of 8; got h100:8x4. Try h100:8x8", "h100:8x4")
    refused("two or more hosts of 8; got h200:1x8. Try h200:2x8", "h200:1x8")
    refused("1,000 examples do not divide over the 64 GPUs .*batch_size=1024", batch=1000)
    for batch in (24 * 100, BATCH):  # which no number of examples would mend
        refused("8 towers do not go evenly on 3 hosts. Take h100:8x8", "h100:3x8", batch)
