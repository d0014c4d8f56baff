"""The Wukong recipes, compiled for every TPU: they fit, exchange rows and fill in the plan. Criteo takes 2 minutes."""

import dataclasses

import pytest

from scalejax import plan
from scalejax.configs.recsys import wukong

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    ("recipe", "topology"),
    [(wukong.flights, "v5e:2x2"), (wukong.flights, "tpu7x:2x2x1"), (wukong.criteo, "v5p:2x2x1")],
)
def test_wukong_compiles_and_fits(recipe, topology, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # Criteo's logs are not here
    experiment = recipe()
    found = plan.plan(experiment, topology).to_json()
    assert found["fits"]
    assert found["chips"] == 4
    assert found["mesh"] == {"fsdp": found["devices"]}
    assert sum(found["bytes_per_chip"].values()) < found["hbm_bytes"]
    assert {"parameters", "optimizer state", "tables", "table optimizer state", "batch"} <= set(found["bytes_per_chip"])
    kinds = {(c["kind"], c["axis"]): c for c in found["collectives"]}
    # Ids, rows and gradients of rows travel by all_to_all; nothing gathers the batch or a table.
    assert kinds["all-to-all", "fsdp"]["count"] >= 3
    assert ("all-gather", "fsdp") not in kinds or kinds["all-gather", "fsdp"]["bytes"] < 2**20
    # Dense gradients are summed.
    assert any(kind in ("all-reduce", "reduce-scatter") for kind, _ in kinds)
    assert found["predicted_step_s"] == max(found["roofline"][f"{term}_s"] for term in ("compute", "hbm", "ici", "dcn"))
    assert 0 < found["mfu"] < 1
    # Compiled work contains at least the forward and backward pass of the model's dense part.
    assert found["flops"] >= 0.9 * found["model_flops"]


def test_doubling_the_batch_doubles_the_flops_and_no_parameters():
    small = wukong.smoke()
    large = dataclasses.replace(small, data=dataclasses.replace(small.data, batch_size=2 * small.data.batch_size))
    first, second = (plan.plan(e, "v6e:2x2") for e in (small, large))
    assert second.flops == 2 * first.flops
    assert second.model_flops == 2 * first.model_flops
    assert second.memory.bytes_per_chip["parameters"] == first.memory.bytes_per_chip["parameters"]
    assert second.roofline.compute_s == pytest.approx(2 * first.roofline.compute_s, rel=0.05)
