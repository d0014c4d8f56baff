"""MLPerf's DLRM-DCNv2 on a part of a pod: it fits, and its exchange moves what the sizes of its tables say."""

import math

import pytest

from scalejax import plan
from scalejax.configs.recsys import dcnv2

pytestmark = [pytest.mark.aot, pytest.mark.slow]  # minutes of compilation each

# Rows and ids per example of the 26 tables of MLPerf's multi-hot Criteo logs (training rules of DLRM-DCNv2).
ROWS = [40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3067956, 405282, 10, 2209, 11938, 155, 4,
        976, 14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973, 108, 36]  # fmt: skip
IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
BATCH, DIM = 65_536, 128


def exchange_bytes(devices):
    """Ids, rows and gradients of one device: twice what even ids need of every bucket, and 8.

    The ids of a table with fewer rows than there are devices go to as many devices as it has rows, one row after the
    other, where the next table begins beside it; all buckets are as large as the fullest.
    """
    wanted = [8] * devices
    for ids, rows in zip(IDS, ROWS, strict=True):
        slots = BATCH // devices * ids
        for device in range(devices):
            wanted[device] += slots if rows == 1 else min(slots, math.ceil(2 * slots / min(devices, rows)))
    return devices * max(wanted) * (4 + 2 * 4 * DIM)


def test_it_fits_and_its_exchange_moves_what_the_tables_say(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the logs are not here
    found = plan.plan(dcnv2.criteo(), "v5p:4x4x4")
    assert found.memory.fits
    tables = found.memory.bytes_per_chip["tables"]
    assert tables == pytest.approx(sum(ROWS) * DIM * 4 / found.topology.chips, rel=0.05)
    moved = {c.kind: c for c in found.collectives if c.kind == "all-to-all"}
    assert moved["all-to-all"].count == 3
    assert moved["all-to-all"].bytes == pytest.approx(exchange_bytes(found.topology.devices), rel=0.05)
