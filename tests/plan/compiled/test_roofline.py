"""Least times against arithmetic on paper: one group, one torus, one network."""

import types

import numpy as np
import pytest

from scalejax.numerics import flops
from scalejax.plan import topology
from scalejax.plan.compiled import collectives, roofline, traffic
from scalejax.plan.compiled.collectives import Collective


def _mesh(name, **sizes):
    """Devices of a topology in the order of their coordinates, laid out as a mesh."""
    machine = topology.parse(name)
    shape = tuple(sizes.values())
    devices = [
        types.SimpleNamespace(coords=coords, core_on_chip=core, slice_index=index)
        for index in range(machine.slices)
        for coords in np.ndindex(*machine.shape)
        for core in range(machine.chip.devices_per_chip)
    ]
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return machine, types.SimpleNamespace(
        devices=grid.reshape(shape), axis_names=tuple(sizes), shape=sizes, size=len(devices)
    )


def _collective(kind, axes, mesh, payload, count=1):
    groups = collectives.positions_along(axes, mesh)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=len(groups[0]),
        bytes=payload * count,
        count=count,
        minimum_bytes=0,
        trip_count_known=True,
        groups=groups,
    )


def test_a_ring_uses_both_directions_and_a_line_one():
    # v5p:4x4x4 closes its axes; an all-gather over one of them has two links of 100 GB/s.
    machine, mesh = _mesh("v5p:4x4x4", a=4, b=16)
    ici, dcn = roofline.collective_seconds(_collective("all-gather", ("a",), mesh, 8e9, count=3), machine, mesh)
    assert (ici, dcn) == (pytest.approx(3 * 8e9 * 3 / 4 / 200e9), 0.0)
    # v5e:4x4 does not: one link of 50 GB/s.
    machine, mesh = _mesh("v5e:4x4", a=4, b=4)
    ici, _ = roofline.collective_seconds(_collective("all-gather", ("a",), mesh, 8e9), machine, mesh)
    assert ici == pytest.approx(8e9 * 3 / 4 / 50e9)


def test_a_group_over_several_axes_uses_all_their_links():
    machine, mesh = _mesh("v5p:4x4x4", a=64)
    ici, _ = roofline.collective_seconds(_collective("all-reduce", ("a",), mesh, 8e9), machine, mesh)
    assert ici == pytest.approx(2 * 8e9 * 63 / 64 / 600e9)


def test_all_to_all_is_limited_by_the_middle_of_the_torus():
    # 16 chips in a closed ring, 1 GB each: half of them send half their data across two cuts of one link each way,
    # 8 * 0.5 GB / 2 links.
    machine, mesh = _mesh("v5e:16x16", a=16, b=16)
    ici, _ = roofline.collective_seconds(_collective("all-to-all", ("a",), mesh, 1e9), machine, mesh)
    assert ici == pytest.approx(8 * 0.5e9 / 2 / 50e9)
    # Two chips: half of the data over one link.
    machine, mesh = _mesh("v5e:2x2", a=2, b=2)
    ici, _ = roofline.collective_seconds(_collective("all-to-all", ("a",), mesh, 1e9), machine, mesh)
    assert ici == pytest.approx(0.5e9 / 50e9)


def test_devices_of_one_chip_use_no_link_and_parallel_groups_share_one():
    machine, mesh = _mesh("tpu7x:2x2x1", a=4, core=2)
    inside = _collective("all-gather", ("core",), mesh, 1e9)
    assert roofline.collective_seconds(inside, machine, mesh) == (0.0, 0.0)
    # Two groups, one per core, over a 2x2 square with one link an axis.
    across = _collective("all-gather", ("a",), mesh, 1e9)
    assert roofline.collective_seconds(across, machine, mesh)[0] == pytest.approx(2 * 1e9 * 3 / 4 / 200e9)
    # One group of all 8: each chip receives three quarters once.
    together = _collective("all-gather", ("a", "core"), mesh, 1e9)
    assert roofline.collective_seconds(together, machine, mesh)[0] == pytest.approx(1e9 * 3 / 4 / 200e9)


def test_only_a_slices_share_crosses_the_network():
    machine, mesh = _mesh("v5p:2x2x1,slices=2", replica=2, fsdp=4)
    # 4 chips share what one slice sends: 2 * (1/2) of the payload, at 50 Gb/s each.
    reduced = _collective("all-reduce", ("replica", "fsdp"), mesh, 8e9)
    ici, dcn = roofline.collective_seconds(reduced, machine, mesh)
    assert dcn == pytest.approx(8e9 / 4 / 6.25e9)
    assert ici == pytest.approx(2 * 8e9 * 3 / 4 / 200e9)
    exchanged = _collective("all-to-all", ("replica",), mesh, 8e9)
    assert roofline.collective_seconds(exchanged, machine, mesh) == (0.0, pytest.approx(4e9 / 6.25e9))


def test_the_largest_term_is_the_prediction_and_is_named():
    machine, mesh = _mesh("v5e:2x2", a=4)
    work = flops.MatmulFlops({("bfloat16", "default"): int(4 * 197e12)}, 0)
    moved = traffic.Traffic(hbm_bytes=int(0.5 * 819e9), matmul_flops=0, unbounded_loops=())
    line = roofline.predict(machine, mesh, work, moved, [])
    assert (line.compute_s, line.hbm_s, line.ici_s, line.dcn_s) == (pytest.approx(1.0), pytest.approx(0.5), 0.0, 0.0)
    assert (line.predicted_step_s, line.limit) == (line.compute_s, "compute")
    # Work that several devices repeat is not in the trace but in the compiled program.
    repeated = traffic.Traffic(hbm_bytes=0, matmul_flops=int(3 * 393e12), unbounded_loops=())
    assert roofline.predict(machine, mesh, work, repeated, []).compute_s == pytest.approx(3.0)


def test_full_precision_costs_six_passes():
    machine, mesh = _mesh("v6e:2x2", a=4)
    idle = traffic.Traffic(hbm_bytes=0, matmul_flops=0, unbounded_loops=())

    def seconds(precision):
        return roofline.predict(
            machine, mesh, flops.MatmulFlops({("float32", precision): 10**15}, 0), idle, []
        ).compute_s

    assert seconds("highest") == pytest.approx(6 * seconds("default"))
