"""The arithmetic of the harness, on a clock that tests turn themselves."""

import pytest

from scalejax.bench import harness


class Clock:
    """A clock and work that takes known time on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def work(self, who: str, seconds: float):
        def run(units: int) -> None:
            self.log.append((who, units))
            self.now += units * seconds

        return run


def contest(ours, peer=None, check=lambda: None):
    return harness.Contest(ours=ours, peer=peer, check=check, examples=1, device="clock")


def test_times_are_per_unit_of_work():
    clock = Clock()
    effort = harness.Effort(turns=3, turn_s=1.0)
    ours, peer = harness.measure(contest(clock.work("ours", 0.125), clock.work("peer", 0.5)), effort, clock=clock)
    assert ours == [0.125] * 3
    assert peer == [0.5] * 3


def test_turns_of_both_sides_alternate_and_each_starts_with_an_untimed_unit():
    clock = Clock()
    effort = harness.Effort(turns=2, turn_s=1.0)
    harness.measure(contest(clock.work("ours", 0.5), clock.work("peer", 1.0)), effort, clock=clock)
    assert clock.log[-8:] == [("ours", 1), ("ours", 2), ("peer", 1), ("peer", 1)] * 2


def test_a_turn_lasts_at_least_as_long_as_asked():
    clock = Clock()
    harness.measure(contest(clock.work("ours", 0.003)), harness.Effort(turns=1, turn_s=0.25), clock=clock)
    assert clock.log[-1][1] * 0.003 >= 0.25


def test_nothing_is_timed_when_outputs_differ():
    clock = Clock()

    def differ() -> None:
        raise harness.OutputsDiffer("logits")

    with pytest.raises(harness.OutputsDiffer):
        harness.measure(
            contest(clock.work("ours", 1.0), clock.work("peer", 1.0), check=differ), harness.Effort(), clock=clock
        )
    assert clock.log == []


def test_what_a_side_remembers_of_its_turns_is_the_median_of_the_long_ones():
    seconds, clock = iter([5.0, 4.0, 0.9, 0.5, 0.8]), Clock()

    def run(units: int) -> None:
        clock.now += units * next(seconds)

    side = harness.Timed(run, clock)
    for units in (1, 1, 4, 4, 4):  # those of one unit warm up
        side(units)
    assert side.seconds() == pytest.approx(0.8)


def test_ratio_above_one_means_faster_than_the_peer():
    ours_s, peer_s, ratio, spread = harness.summarize([1.0, 2.0, 9.0], [4.0, 8.0, 36.0])
    assert (ours_s, peer_s, ratio) == (2.0, 8.0, 4.0)
    assert spread == 0.0  # both sides slowed down together, the ratio did not move


def test_spread_is_the_interquartile_range_over_the_median():
    # Quartiles of 1..5 are 2, 3, 4.
    assert harness.relative_spread([5.0, 1.0, 3.0, 2.0, 4.0]) == pytest.approx(2 / 3)
    assert harness.relative_spread([7.0]) == 0.0


def test_without_a_peer_there_is_no_ratio_and_the_spread_is_our_own():
    assert harness.summarize([1.0, 2.0, 3.0, 4.0, 5.0], []) == (3.0, None, None, pytest.approx(2 / 3))
