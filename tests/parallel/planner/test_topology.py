"""Machines as the planner sees them, and measured constants."""

import json

import pytest

from scalejax.errors import UserError
from scalejax.parallel.planner import Constants, HostTopology


def machine(**changes) -> HostTopology:
    fields = dict(
        devices=8,
        devices_per_host=4,
        memory_bytes=2**30,
        memory_bandwidth=1e12,
        intra_host_bandwidth=1e11,
        inter_host_bandwidth=1e10,
    )
    return HostTopology(**(fields | changes))


def test_an_exchange_sends_each_byte_where_it_goes():
    # Device by device: an eighth of a byte to each of the 8, at the rate of the network between the two.
    rates = {True: 1e11, False: 1e10}
    by_hand = sum(1 / 8 / rates[other // 4 == 0] for other in range(1, 8))
    assert machine().exchange_s_per_byte == pytest.approx(by_hand, rel=1e-12)
    assert machine(devices_per_host=8).exchange_s_per_byte == pytest.approx(7 / 8 / 1e11, rel=1e-12)


def test_a_gather_fetches_what_other_hosts_have_once_per_host():
    # 8 devices hold 1/8 each. A device fetches its quarter of the other host's half, 1/8, over the slow network, and
    # over the fast one the rest: 1 - 1/8 (its own) - 1/8.
    assert machine().gather_s_per_byte == pytest.approx((1 / 8) / 1e10 + (6 / 8) / 1e11, rel=1e-12)


def test_one_device_exchanges_nothing():
    alone = machine(devices=1, devices_per_host=1)
    assert alone.exchange_s_per_byte == alone.gather_s_per_byte == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": 0},
        {"devices": 6},
        {"memory_bytes": 0},
        {"memory_bandwidth": float("nan")},
        {"inter_host_bandwidth": -1.0},
        {"row_granule_bytes": 0},
        {"occurrence_s": -1e-9},
    ],
)
def test_refuses_machines_that_cannot_be(changes):
    with pytest.raises(UserError, match=f"Topology: .*{next(iter(changes))}"):
        machine(**changes)


def test_rows_are_fetched_in_whole_granules():
    assert [machine(row_granule_bytes=64).fetched_bytes(n) for n in (1, 64, 65, 512)] == [64, 64, 128, 512]


def test_measured_constants_replace_rates_and_say_so(tmp_path):
    path = tmp_path / "constants.json"
    Constants(device="H200", date="2026-11-21", memory_bandwidth=4e12, occurrence_s=1e-10).save(path)
    found = machine().with_constants(Constants.load(path))
    assert (found.memory_bandwidth, found.occurrence_s) == (4e12, 1e-10)
    assert found.intra_host_bandwidth == 1e11
    assert "measured on H200, 2026-11-21" in found.source
    assert "intra_host_bandwidth" in found.source  # what was not measured is named with where it comes from
    assert "rates as given" in found.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "as JSON"),
        ("[]", "got list"),
        ('{"date": "2026-11-21"}', "device, date"),
        ('{"device": "a", "date": "b", "hbm": 1}', "hbm"),
        ('{"device": "a", "date": "b", "occurrence_s": "fast"}', "occurrence_s .* 'fast'"),
        ('{"device": "a", "date": "b", "memory_bandwidth": true}', "memory_bandwidth .* True"),
    ],
)
def test_refuses_files_that_hold_no_constants(tmp_path, text, said):
    path = tmp_path / "constants.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        Constants.load(path)


def test_a_measured_rate_of_nothing_is_refused(tmp_path):
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({"device": "a", "date": "b", "memory_bandwidth": 0}))
    with pytest.raises(UserError, match="memory_bandwidth must be positive"):
        machine().with_constants(Constants.load(path))
