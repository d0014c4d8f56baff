"""The result of a plan: JSON fields, tables, and what a step does when its batch doubles."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from scalejax.parallel.links import SentBytes
from scalejax.plan import PlanResult, render, topology
from scalejax.plan.compiled.collectives import Collective
from scalejax.plan.compiled.memory import MemoryPlan
from scalejax.plan.compiled.roofline import Roofline

FIELDS = {  # what the benchmark contract of the design names
    "topology", "chips", "fits", "bytes_per_chip", "hbm_bytes", "flops", "collectives", "predicted_step_s", "mfu",
}  # fmt: skip


@pytest.fixture
def result():
    exchange = Collective(
        kind="all-to-all",
        axes=("fsdp",),
        group_size=8,
        bytes=2**20,
        count=3,
        minimum_bytes=917504,
        trip_count_known=True,
        groups=(tuple(range(8)),),
    )
    return PlanResult(
        topology=topology.parse("tpu7x:2x2x1"),
        mesh={"fsdp": 8},
        memory=MemoryPlan(fits=True, bytes_per_chip={"tables": 95 * 2**30, "batch": 2**20}, hbm_bytes=190 * 2**30),
        flops=10**15,
        model_flops=9 * 10**14,
        collectives=(exchange,),
        roofline=Roofline(compute_s=1e-3, hbm_s=2e-3, ici_s=3e-4, dcn_s=0.0),
        unsharded=(("layers/0/bias", (7, 3), "7 does not divide by fsdp=8"),),
        compile_s=1.5,
        warnings=("mesh splits an axis",),
    )


def _text(result):
    out = io.StringIO()
    render.render(result, Console(file=out, width=120))
    return out.getvalue()


def test_json_has_the_agreed_fields_and_survives_a_round_trip(result):
    found = json.loads(json.dumps(result.to_json()))
    assert set(found) >= FIELDS
    assert found["collectives"][0] == {
        "kind": "all-to-all", "axis": "fsdp", "bytes": 2**20, "count": 3, "group_size": 8, "minimum_bytes": 917504,
    }  # fmt: skip
    assert found["sent_bytes"] == {"within": 7 / 8 * 2**20, "between": 0}
    hosts = dataclasses.replace(
        result,
        mesh={"replica": 2, "fsdp": 4},
        collectives=tuple(
            dataclasses.replace(result.collectives[0], axes=axes, group_size=size)
            for axes, size in ((("replica", "fsdp"), 8), (("replica",), 2), (("fsdp",), 4))
        ),
    )
    assert hosts.sent == SentBytes((3 / 8 + 3 / 4) * 2**20, (1 / 2 + 1 / 2) * 2**20)
    assert found["predicted_step_s"] == 2e-3
    assert found["roofline"]["limit"] == "hbm"
    # Model FLOPs over time and the bfloat16 peak of 4 chips.
    assert found["mfu"] == pytest.approx(9e14 / (2e-3 * 4 * 2307e12))


def test_tables_show_memory_collectives_limit_and_what_did_not_divide(result):
    text = _text(result)
    for expected in ("tpu7x:2x2x1", "fits", "95 GiB", "50.00 %", "all-to-all", "2 ms <- limit", "limited by memory"):
        assert expected in text
    assert "at least 896 KiB a step within its host (an index of replica) and 0 B to other hosts." in text
    assert "layers/0/bias" in text
    assert "mesh splits an axis" in text


def test_a_step_that_does_not_fit_has_no_prediction(result):
    memory = dataclasses.replace(result.memory, fits=False, message="RESOURCE_EXHAUSTED: ... (300G) exceeds [15.75G]")
    result = dataclasses.replace(result, memory=memory, roofline=None, collectives=())
    found = result.to_json()
    assert (found["fits"], found["predicted_step_s"], found["mfu"]) == (False, None, None)
    text = _text(result)
    assert "does not fit" in text
    assert "exceeds [15.75G]" in text  # brackets are no markup
