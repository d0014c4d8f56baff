"""Small steps compiled for every chip: what fits, which collectives, how many bytes, and what doubling does."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType, Mesh
from plan import small_programs

from scalejax.configs.recsys import dlrm
from scalejax.parallel import mesh as meshes
from scalejax.plan import explain_sharding, plan, plan_program, topology
from scalejax.plan.compiled.collectives import total
from scalejax.units import size

pytestmark = pytest.mark.aot

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


def _plan(name, mesh=None, **sizes):
    machine = topology.parse(name)
    device_mesh, warnings = topology.make_mesh(machine, None if mesh is None else meshes.parse_mesh(mesh))
    assert warnings == []
    return plan_program(small_programs.MlpProgram(device_mesh, **sizes), machine)


@pytest.mark.parametrize("name", CHIPS[::3])
def test_a_step_fits_and_its_exchange_moves_exactly_its_rows(name):
    found = _plan(name, batch=1024)
    devices = found.topology.devices
    assert found.memory.fits
    assert found.roofline is not None
    assert found.warnings == ()
    rows = {(c.kind, c.axis): c for c in found.collectives}
    # Ids, rows, gradients of rows; each device sends its share of the batch.
    exchange = rows["all-to-all", "fsdp"]
    assert exchange.count == 3
    assert exchange.bytes == (1024 // devices) * (4 + 2 * 128 * 4)
    # Three layers, gathered forward and backward or not at all (the compiler may choose to move activations).
    assert any(kind in ("all-gather", "all-reduce") for kind, _ in rows)
    # Three layers, forward and twice backward.
    assert found.flops == 3 * 3 * 2 * 1024 * 128 * 128
    assert 0 < found.mfu <= 1
    share = found.memory.bytes_per_chip
    assert share["tables"] == 1024 * 128 * 4 // found.topology.chips
    assert share["parameters"] == 3 * 128 * 128 * 4 // found.topology.chips


@pytest.mark.parametrize(("name", "data", "model"), [("v5e:4x4", 4, 4), ("v5p:2x2x2", 4, 2), ("tpu7x:2x2x1", 4, 2)])
def test_every_collective_keeps_its_bytes_on_every_chip(name, data, model):
    devices = topology.make_mesh(topology.parse(name))[0].devices.reshape(data, model)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    function, x = small_programs.every_collective(mesh, 256)
    found = {(c.kind, c.axis): (c.bytes, c.count) for c in total(explain_sharding(function.lower(x).compile()))}
    expected = small_programs.expected_collectives(data, model, 256)
    # The compiler may write a reduce-scatter or an all-gather as an all-reduce of equal size.
    gathered = {("all-gather", "data"), ("reduce-scatter", "data")}
    assert {k: v for k, v in found.items() if k not in gathered and k != ("all-reduce", "data")} == {
        k: v for k, v in expected.items() if k not in gathered
    }
    moved = [v for k, v in found.items() if k in gathered or k == ("all-reduce", "data")]
    assert sum(size for size, _ in moved) == sum(expected[k][0] for k in gathered)


def test_doubling_the_batch_doubles_compute_and_exchange_but_no_weights():
    small, large = (_plan("v5e:2x2", batch=batch) for batch in (2048, 4096))
    assert large.flops == 2 * small.flops
    assert large.roofline.compute_s == pytest.approx(2 * small.roofline.compute_s)
    bytes_of = [{c.kind: c.bytes for c in p.collectives} for p in (small, large)]
    assert bytes_of[1]["all-to-all"] == 2 * bytes_of[0]["all-to-all"]
    assert bytes_of[1]["all-gather"] == bytes_of[0]["all-gather"]
    # Where links limit the step, the prediction moves by what the exchange adds to them.
    assert small.roofline.limit == large.roofline.limit == "ici"
    # Half of each chip's bytes cross the middle of the 2x2 square, where each of its two rows has one link of 50 GB/s.
    added = (bytes_of[1]["all-to-all"] - bytes_of[0]["all-to-all"]) / 2 / 50e9
    assert large.roofline.predicted_step_s - small.roofline.predicted_step_s == pytest.approx(added)


def test_a_compute_bound_step_takes_twice_as_long_for_twice_the_batch():
    small, large = (_plan("v5e:1x1", batch=batch, width=1024, layers=1, rows=64) for batch in (2**13, 2**14))
    assert small.roofline.limit == large.roofline.limit == "compute"
    assert small.roofline.compute_s == pytest.approx(3 * 2 * 2**13 * 1024**2 / 197e12)
    assert large.roofline.predicted_step_s == pytest.approx(2 * small.roofline.predicted_step_s)


def test_temporaries_shrink_with_the_number_of_chips():
    four, sixteen = (_plan(name, batch=2**16, width=256) for name in ("v5p:2x2x1", "v5p:2x2x4"))
    kinds = [p.memory.bytes_per_chip for p in (four, sixteen)]
    assert kinds[1]["temporaries"] < 0.35 * kinds[0]["temporaries"]
    assert kinds[1]["tables"] * 4 == kinds[0]["tables"]


def test_a_table_that_is_too_large_does_not_fit_and_says_by_how_much():
    found = _plan("v5e:2x2", batch=1024, rows=2**28)
    assert not found.memory.fits
    assert found.roofline is None
    assert found.collectives == ()
    assert found.memory.bytes_per_chip["tables"] == 2**28 * 128 * 4 // 4
    assert found.memory.total_bytes > found.memory.hbm_bytes
    assert "RESOURCE_EXHAUSTED" in found.memory.message
    assert found.to_json()["fits"] is False


def test_a_recipe_that_does_not_fit_names_its_largest_tables():
    found = plan(dlrm.criteo(), "v5e:2x2")
    assert not found.memory.fits
    share = 40_000_000 // 4 * (128 + 1) * 4  # rows of 128 numbers and a mean of squares, over 4 devices
    assert f"C1 {size(share)}, C10 {size(share)}" in found.warnings[-1]


def test_two_slices_exchange_over_the_network():
    found = _plan("v5p:2x2x1,slices=2", batch=1024)
    assert found.mesh == {"replica": 2, "fsdp": 4}
    assert found.roofline.dcn_s > 0
    assert any("replica" in c.axes for c in found.collectives)


def test_planning_again_gives_the_same_plan():
    first, second = (dataclasses.replace(_plan("v6e:2x2", batch=1024), compile_s=0.0) for _ in range(2))
    assert first == second


def test_planning_leaves_the_compile_cache_as_it_was():
    before = jax.config.jax_enable_compilation_cache
    _plan("v5e:1x1", batch=64)
    assert jax.config.jax_enable_compilation_cache == before
