"""The step timer against a clock that is moved by hand."""

import math
import types

import pytest

from scalejax.train.reports import timing


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def forward(self, seconds):
        self.now += seconds


class Device:
    """Runs one step after the other, each for a given time, while the host goes on."""

    def __init__(self, clock):
        self.clock, self.free_at = clock, clock.now

    def run(self, seconds):
        self.free_at = done = max(self.clock.now, self.free_at) + seconds
        return types.SimpleNamespace(block_until_ready=lambda: self.clock.forward(max(0.0, done - self.clock.now)))


@pytest.fixture
def clock():
    return Clock()


def train(timer, device, clock, *, steps, device_s, wait_s=0.0, dispatch_s=0.001):
    for _ in range(steps):
        with timer.phase("data_wait"):
            clock.forward(wait_s)
        with timer.phase("dispatch"):
            clock.forward(dispatch_s)
            output = device.run(device_s)
        timer.step_done(examples=10, output=output)


def test_a_busy_device_sets_the_step_time_although_dispatch_returns_at_once(clock):
    timer = timing.StepTimer(clock=clock)
    train(timer, Device(clock), clock, steps=20, device_s=0.05)
    window = timer.window()
    assert window["step_p50_s"] == pytest.approx(0.05)
    assert window["step_p95_s"] == pytest.approx(0.05, abs=0.001)  # the first step also waits for its dispatch
    assert window["wall_s"] == pytest.approx(20 * 0.05 + 0.001)
    assert window["samples_per_s"] == pytest.approx(200 / window["wall_s"])
    assert window["dispatch_s"] == pytest.approx(0.02)
    assert window["blocked_s"] == pytest.approx(window["wall_s"] - 0.02)
    assert window["data_wait_share"] == 0


def test_other_amounts_are_counted_over_the_same_steps_and_time(clock):
    timer, device = timing.StepTimer(clock=clock, warmup_steps=2), Device(clock)
    for tokens in (1000, 1000, 10, 30):
        with timer.phase("dispatch"):
            output = device.run(0.5)
        timer.step_done(examples=2, output=output, amounts={"tokens": tokens})
    window = timer.window()
    assert window["tokens_per_s"] == pytest.approx(2040 / window["wall_s"])
    assert window["samples_per_s"] == pytest.approx(8 / window["wall_s"])
    summary = timer.summary()
    assert summary["tokens_per_s"] == pytest.approx(40 / 1.0)  # without the first two
    assert summary["samples_per_s"] == pytest.approx(4 / 1.0)


def test_slow_data_shows_as_waiting(clock):
    timer = timing.StepTimer(clock=clock)
    train(timer, Device(clock), clock, steps=20, device_s=0.01, wait_s=0.03)
    window = timer.window()
    assert window["step_p50_s"] == pytest.approx(0.031)
    assert window["data_wait_share"] == pytest.approx(0.03 / 0.031, rel=0.05)  # the last step is waited for too


def test_a_slow_step_is_the_95th_percentile_and_not_the_median(clock):
    timer, device = timing.StepTimer(clock=clock), Device(clock)
    train(timer, device, clock, steps=18, device_s=0.02)
    train(timer, device, clock, steps=2, device_s=0.5)
    window = timer.window()
    assert window["step_p50_s"] == pytest.approx(0.02)
    assert window["step_p95_s"] > 0.4


def test_compile_and_evaluation_count_apart(clock):
    timer, device = timing.StepTimer(clock=clock, warmup_steps=0), Device(clock)
    with timer.phase("compile"):
        clock.forward(7)
    train(timer, device, clock, steps=10, device_s=0.1)
    timer.window()
    with timer.phase("evaluation"):
        clock.forward(5)
    train(timer, device, clock, steps=10, device_s=0.1)
    window, summary = timer.window(), timer.summary()
    assert window["steps"] == 10
    assert window["evaluation_s"] == 5
    assert window["samples_per_s"] == pytest.approx(100, rel=0.02)
    assert summary["compile_s"] == 7
    assert summary["evaluation_s"] == 5
    assert summary["samples_per_s"] == pytest.approx(100, rel=0.02)
    assert summary["step_p95_s"] < 0.11
    assert summary["wall_s"] == pytest.approx(7 + 5 + 2, rel=0.01)


def test_steps_in_flight_are_timed_before_something_else_waits(clock):
    timer, device = timing.StepTimer(clock=clock), Device(clock)
    for _ in range(4):
        train(timer, device, clock, steps=5, device_s=0.1)
        with timer.phase("blocked"):  # as for metrics: they arrive when all steps are done
            clock.forward(max(0.0, device.free_at - clock.now) + 0.02)
        with timer.phase("evaluation"):
            clock.forward(3)
    window = timer.window()
    assert window["step_p50_s"] == pytest.approx(0.1)
    assert window["step_p95_s"] < 0.13  # the first step after a wait bears what the wait left to do
    assert window["evaluation_s"] == 12
    assert window["blocked_s"] == pytest.approx(20 * 0.1 + 4 * 0.02, rel=0.02)


def test_warm_up_steps_are_left_out_of_the_rate_unless_there_is_nothing_else(clock):
    timer, device = timing.StepTimer(clock=clock, warmup_steps=5), Device(clock)
    train(timer, device, clock, steps=5, device_s=1.0)
    timer.window()
    assert timer.summary()["measured_steps"] == 5
    assert timer.summary()["samples_per_s"] == pytest.approx(10, rel=0.01)
    train(timer, device, clock, steps=5, device_s=0.1)
    assert timer.summary()["measured_steps"] == 5
    assert timer.summary()["samples_per_s"] == pytest.approx(100, rel=0.02)


def test_without_outputs_a_step_ends_when_its_dispatch_returns(clock):
    timer = timing.StepTimer(clock=clock)
    for _ in range(4):
        with timer.phase("dispatch"):
            clock.forward(0.2)
        timer.step_done(examples=1)
    assert timer.window()["step_p50_s"] == pytest.approx(0.2)


def test_steps_that_are_found_complete_at_once_have_a_mean_and_no_median(clock):
    timer = timing.StepTimer(clock=clock, in_flight=8)
    for _ in range(3):  # as in a short run: the device is done before anybody waits for it
        with timer.phase("dispatch"):
            timer.step_done(examples=1, output=types.SimpleNamespace(block_until_ready=lambda: clock.forward(1e-5)))
    clock.forward(9)
    window, summary = timer.window(), timer.summary()
    for found in (window, summary):
        assert found["step_mean_s"] == pytest.approx(3, rel=1e-3)
        assert math.isnan(found["step_p50_s"])
        assert math.isnan(found["step_p95_s"])


def test_a_run_in_pieces_is_added_up(clock):
    windows = []
    for compile_s, device_s in ((7, 0.1), (3, 0.3)):
        timer = timing.StepTimer(clock=clock, warmup_steps=0)
        timer.goes_on_from(windows)
        with timer.phase("compile"):
            clock.forward(compile_s)
        train(timer, Device(clock), clock, steps=10, device_s=device_s, dispatch_s=0)
        summary = timer.summary()
        windows = [timer.window()]
    assert summary["compile_s"] == pytest.approx(10)
    assert summary["wall_s"] == pytest.approx(7 + 1 + 3 + 3)
    assert summary["samples_per_s"] == pytest.approx(200 / 4)
    assert summary["step_mean_s"] == pytest.approx(0.2)
    assert summary["measured_steps"] == 20


def test_an_empty_window_is_undefined_and_not_a_division_by_zero(clock):
    timer = timing.StepTimer(clock=clock)
    assert timer.window()["steps"] == 0
    assert timer.summary()["measured_steps"] == 0


def test_peak_memory_is_named_for_what_it_is():
    device = types.SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 5})
    silent = types.SimpleNamespace(memory_stats=lambda: None)  # CPU
    assert set(timing.peak_memory([silent])) == {"peak_rss_bytes"}
    both = timing.peak_memory([silent, device])
    assert both["peak_device_bytes"] == 5
    assert 10e6 < both["peak_rss_bytes"] < 1e12
