"""Machines for the planner, from the chip table."""

import pytest

from scalejax import chips
from scalejax.errors import UserError
from scalejax.plan.planner_machines import topology


def test_a_torus_exchanges_by_its_links_and_its_middle():
    cube = topology("v5p:4x4x4")
    assert (cube.devices, cube.devices_per_host, cube.hosts) == (64, 4, 16)
    assert cube.memory_bytes == chips.V5P.usable_hbm_bytes
    # Rings of 4: half of what 64 chips send crosses the middle, a quarter in each direction, over 2 x 16 links.
    sent, link = 64.0, 100e9
    seconds = sent / 4 / (2 * 16 * link)
    assert cube.intra_host_bandwidth == cube.inter_host_bandwidth == pytest.approx(1.0 / seconds)
    # v6e:8x16: the long axis closes (2 x 8 links in its middle), and 2 + 1 links a chip are no limit.
    assert topology("v6e:8x16").inter_host_bandwidth == pytest.approx(128 / (128 / 4 / (2 * 8 * 100e9)) / 128)


def test_slices_are_hosts_joined_by_the_network():
    found = topology("v5e:4x4,slices=2")
    assert (found.devices, found.devices_per_host, found.hosts) == (32, 16, 2)
    assert found.inter_host_bandwidth == chips.V5E.dcn_bytes_per_s < found.intra_host_bandwidth


def test_two_devices_of_a_chip_share_it():
    found = topology("tpu7x:2x2x1")
    assert (found.devices, found.devices_per_host) == (8, 8)
    assert found.memory_bytes == chips.TPU7X.usable_hbm_bytes // 2
    assert found.memory_bandwidth == chips.TPU7X.hbm_bytes_per_s / 2


@pytest.mark.parametrize("name", sorted(chips.GPUS))
def test_gpus_are_hosts_of_nvlink(name):
    found = topology(f"{name}:16x8")
    chip = chips.GPUS[name]
    assert (found.devices, found.devices_per_host) == (128, 8)
    assert found.name == f"{name}:16x8"
    assert found.memory_bandwidth == chip.hbm_bytes_per_s
    assert (found.intra_host_bandwidth, found.inter_host_bandwidth) == (chip.link_bytes_per_s, chip.dcn_bytes_per_s)


def test_memory_can_be_kept_for_the_rest_of_the_program():
    assert topology("h200:1x8", reserved_bytes=41 * 10**9).memory_bytes == 100 * 10**9
    with pytest.raises(UserError, match="reserved_bytes must lie in"):
        topology("h200:1x8", reserved_bytes=141 * 10**9)


@pytest.mark.parametrize("name", ["h100", "h300:2x8", "h100:0x8", "v5p:2x2"])
def test_unknown_machines_are_refused_and_gpus_named(name):
    with pytest.raises(UserError, match="h100:2x8"):
        topology(name)


def test_gpus_are_found_by_their_device_kind():
    for chip in chips.GPUS.values():
        assert chips.for_device_kind(chip.device_kind) is chip
