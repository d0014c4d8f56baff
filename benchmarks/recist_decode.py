"""Grouping of peaks by a join of pairs on the device against the enumeration of K^4 groups in NumPy.

    python benchmarks/recist_decode.py > benchmarks/results/recist_decode.md

One picture with 40 objects at random places, K = 40 peaks a map of 128 x 128 cells, some above the threshold. Both find
the same groups with the same scores (checked here). The least time of several runs counts, the two taking turns: CPU
time, or where the join runs on an accelerator that of the clock.
"""

import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from scalejax.bench import machine
from scalejax.models.vision import keypoints
from scalejax.models.vision.enumerated import enumerated
from scalejax.models.vision.keypoints import Grouping

PEAKS, SIDE, LIVE, TURNS, CALLS = 40, 128, (6, 12, 24, 40), 9, 20


def case(live: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heights, cells and map of centres of one picture."""
    rng = np.random.default_rng(live)
    scores = np.sort(rng.uniform(0.1, 1, (4, PEAKS)).astype(np.float32))[:, ::-1]
    scores = np.where(np.arange(PEAKS) < live, scores, np.float32(0.05))
    middle, half = rng.integers(12, SIDE - 12, (PEAKS, 2)), rng.integers(3, 12, (PEAKS, 2))
    tops, lefts = middle - half * [0, 1], middle - half * [1, 0]
    cells = np.stack([tops, lefts, 2 * middle - tops, 2 * middle - lefts]).astype(np.int32)
    return scores, cells, rng.uniform(0, 1, (SIDE, SIDE)).astype(np.float32)


def seconds(run: Callable[[], object]) -> float:
    """Time of one call, a mean over some. CPU time of all threads: other programs on the machine change it little."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    calls, start = 0, clock()
    while calls < CALLS and clock() - start < 0.1:
        run()
        calls += 1
    return (clock() - start) / calls


def main() -> None:
    """Prints the table."""
    kept = (100, Grouping().boxes)
    print("# Grouping: a join of pairs against all of K^4\n")
    print(f"Device: {machine.device_name(jax.devices()[0])}, jax {jax.__version__}. Date: {machine.today()}.\n")
    print("```\npython benchmarks/recist_decode.py\n```\n")
    print(f"K = {PEAKS} peaks a map of {SIDE} x {SIDE}; least of {TURNS} runs that take turns. Joins that")
    print(f"keep the best {kept[0]} groups, and {kept[1]}, as recipes and ExtremeNet do; the enumeration sorts none.\n")
    print("| peaks above the threshold | groups | enumeration, ms | join, ms | ratio | join of 1000, ms | ratio |")
    print("|---" * 7 + "|")
    for live in LIVE:
        scores, cells, centres = case(live)
        placed = jax.device_put((scores[None], cells[None], centres[None]))
        how = Grouping(peaks=PEAKS)
        picked, expected = enumerated(scores, cells, centres, how)
        runs: list[Callable[[], object]] = [functools.partial(enumerated, scores, cells, centres, how)]
        for boxes in kept:
            join = functools.partial(group_of(boxes), *placed)
            found = np.asarray(join().scores[0])
            best = np.sort(expected)[::-1][:boxes]
            np.testing.assert_allclose(found[: len(best)], best, rtol=2e-6)
            assert not found[len(best) :].any()
            runs.append(functools.partial(waited, join))
        times = [[seconds(run) for run in runs] for _ in range(TURNS)]
        slow, *fast = (min(column) * 1e3 for column in zip(*times, strict=True))
        cells_of = " | ".join(f"{took:.2f} | {slow / took:.0f}" for took in fast)
        print(f"| {live} | {len(picked):,} | {slow:.1f} | {cells_of} |", flush=True)


def group_of(boxes: int) -> Callable[..., keypoints.Groups]:
    """The compiled join that keeps so many."""
    return jax.jit(functools.partial(keypoints.group, how=Grouping(peaks=PEAKS, boxes=boxes)))


def waited(join: Callable[[], keypoints.Groups]) -> object:
    """The join, until it is done."""
    return jax.block_until_ready(join())


if __name__ == "__main__":
    main()
