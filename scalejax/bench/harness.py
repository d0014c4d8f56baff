"""Times two ways of doing the same work, turn by turn, and says how they compare.

A *turn* repeats one unit of work (a training step, a batch) until it lasts long enough to be timed, after one untimed
unit that warms caches up again. Turns alternate: ours, the peer, ours, ... so that whatever else the machine does
falls on both. Outputs are compared before anything is timed.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Contest:
    """The same work, twice, ready to be timed.

    Attributes:
      ours: Does n units and returns when their outputs are there (not when they are merely enqueued).
      examples: Examples in one unit.
      device: Where it runs.
      peer: The same in another library; None times ours alone.
      check: Raises `OutputsDiffer` unless both sides compute the same; called once, before timing, if there is a peer.
      close: Gives back what the contest holds (worker processes, files).
      figures: What else is worth knowing of what was run, by name; called once, after timing.
    """

    ours: Callable[[int], None]
    examples: int
    device: str
    peer: Callable[[int], None] | None = None
    check: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    figures: Callable[[], dict[str, float]] = dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One line of a benchmark.

    Attributes:
      name: Benchmark.
      case: Its case.
      device: What it ran on.
      date: YYYY-MM-DD.
      commit: Commit of scalejax.
      ours_s: Seconds per unit of work, median over turns.
      peer: Name and version of the peer, or None.
      peer_s: Seconds per unit for the peer, median over turns.
      ratio: peer_s / ours_s: above 1 is faster than the peer.
      spread: Interquartile range over turns, as a share of the median: of the ratio of neighbouring turns, or of our
        own time where there is no peer.
      examples: Examples in one unit of work.
      figures: What else was found, by name.
    """

    name: str
    case: str
    device: str
    date: str
    commit: str
    ours_s: float
    peer: str | None
    peer_s: float | None
    ratio: float | None
    spread: float
    examples: int
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


class OutputsDiffer(AssertionError):
    """Ours and the peer do not compute the same thing, so timing them would mean nothing."""


class Unsuited(UserError):
    """The case is for another device than the one at hand: an error where it was asked for, else it is skipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    Attributes:
      turns: Turns per side.
      turn_s: Seconds that a turn should last at least.
      warm_up: Untimed units before every turn; 0 also leaves out those that find out how many units fill a turn, so
        that every turn is one unit.
    """

    turns: int = 15
    turn_s: float = 0.25
    warm_up: int = 1


def measure(
    contest: Contest,
    effort: Effort,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Checks that outputs are equal, then times both sides in alternating turns.

    Args:
      contest: What to time.
      effort: How long.
      clock: Seconds; tests pass their own.
      progress: Called after every turn of one side.

    Returns:
      Seconds per unit, one for each turn: ours, the peer's (empty without a peer).

    Raises:
      OutputsDiffer: the two sides do not compute the same.
    """
    if contest.peer is not None:
        contest.check()
    sides = [contest.ours] if contest.peer is None else [contest.ours, contest.peer]
    units = [_units_per_turn(side, effort.turn_s, clock) if effort.warm_up else 1 for side in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(effort.turns):
        for side, count, into in zip(sides, units, seconds, strict=True):
            if effort.warm_up:
                side(effort.warm_up)
            start = clock()
            side(count)
            into.append((clock() - start) / count)
            progress()
    return seconds[0], seconds[1] if len(seconds) == 2 else []


def summarize(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float | None, float | None, float]:
    """(ours_s, peer_s, ratio, spread) of turns, as `Result` defines them."""
    ours_s = statistics.median(ours)
    if not peer:
        return ours_s, None, None, relative_spread(ours)
    peer_s = statistics.median(peer)
    return ours_s, peer_s, peer_s / ours_s, relative_spread([p / o for p, o in zip(peer, ours, strict=True)])


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def repeated(run: Callable[[], object]) -> Callable[[int], None]:
    """One unit of work as so many of them."""

    def several(count: int) -> None:
        for _ in range(count):
            run()

    return several


class Timed:
    """One side of a contest that remembers how long its turns took.

    Args:
      run: Does n units, as in `Contest`.
      clock: Seconds; `time.process_time` are those of this process on all cores, which others on the machine disturb
        less.
    """

    def __init__(self, run: Callable[[int], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._run = run
        self._clock = clock
        self._turns: list[tuple[int, float]] = []

    def __call__(self, count: int) -> None:
        start = self._clock()
        self._run(count)
        self._turns.append((count, (self._clock() - start) / count))

    def seconds(self) -> float:
        """Seconds of one unit, over the turns that were long."""
        longest = max(count for count, _ in self._turns)
        return statistics.median(seconds for count, seconds in self._turns if count == longest)


def best_seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The least of five runs by a clock, after one that is not timed."""
    run()
    found = []
    for _ in range(5):
        start = clock()
        run()
        found.append(clock() - start)
    return min(found)


def _units_per_turn(side: Callable[[int], None], turn_s: float, clock: Callable[[], float]) -> int:
    """Units that fill a turn, found by doubling; the runs themselves are the warm-up."""
    side(1)
    side(1)
    count = 1
    while True:
        start = clock()
        side(count)
        took = clock() - start
        if took >= turn_s:
            return count
        count = max(count + 1, min(2 * count, int(count * turn_s / took) + 1 if took > 0 else 2 * count))
