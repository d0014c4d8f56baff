"""Constants measured on the devices at hand."""

import jax
import pytest

from scalejax.parallel.planner import Constants, measure
from scalejax.parallel.planner.measure import fit_rate, measure_constants


def test_the_fit_finds_rate_and_cost_of_an_id_again():
    moved = [80.0, 150.0, 300.0, 600.0]
    rate, occurrence_s = fit_rate(moved, [2e-10 + m / 1e12 for m in moved])
    assert rate == pytest.approx(1e12)
    assert occurrence_s == pytest.approx(2e-10)


def test_an_id_never_costs_less_than_its_bytes():
    rate, occurrence_s = fit_rate([100.0, 200.0], [1e-10, 3e-10])
    assert occurrence_s == 0
    assert rate == pytest.approx((100**2 + 200**2) / (100 * 1e-10 + 200 * 3e-10))


def test_times_without_a_trend_are_refused():
    with pytest.raises(RuntimeError, match="must grow with the bytes"):
        fit_rate([100.0, 200.0], [2e-10, 1e-10])


def test_constants_of_this_machine_can_be_kept(tmp_path, monkeypatch):
    # Everything runs, by a clock that no other program can disturb: a nanosecond for each byte of the result.
    monkeypatch.setattr(measure, "_median_s", lambda run, repeats: run().nbytes * 1e-9)
    found = measure_constants(table_bytes=2**24, ids=2**14, exchange_bytes=2**16, repeats=3)
    found.save(tmp_path / "constants.json")
    assert Constants.load(tmp_path / "constants.json") == found
    assert found.device == jax.local_devices()[0].device_kind
    # A quarter of a byte of result for each byte of an id's row of 4-byte numbers, in bags of 16.
    bytes_of_result = [4 * width / 16 for width in measure.WIDTHS]
    moved = [4 + 4 * width + out for width, out in zip(measure.WIDTHS, bytes_of_result, strict=True)]
    assert found.memory_bandwidth == pytest.approx(fit_rate(moved, [1e-9 * b for b in bytes_of_result])[0], rel=1e-6)
    n = jax.local_device_count()
    assert n > 1  # tests run on several virtual devices
    # n devices send (n - 1)/n of what they hold; the result is what all hold.
    assert found.intra_host_bandwidth == pytest.approx((n - 1) / n / n * 1e9)
    assert found.inter_host_bandwidth is None
