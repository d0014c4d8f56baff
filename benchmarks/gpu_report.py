"""What the benchmarks of GPU kernels have in common: their options, their lines, how a call and a copy are timed.

A line is a JSON object. A timing has the seconds of one call (median over turns, outputs awaited), the bytes that the
operation has to move by the formula it states, what that is per second, and as a share of the bandwidth of a copy in
the same run. What does not fit --seconds is named by a line with "skipped".
"""

import argparse
import concurrent.futures
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.bench import machine


class Report:
    """Writes lines, and knows when to stop."""

    def __init__(self, name: str, path: str | None, seconds: float, *, smoke: bool):
        device = jax.devices()[0]
        self.common = {
            "name": name,
            "device": machine.device_name(device),
            "jax": jax.__version__,
            "date": machine.today(),
            "commit": machine.commit(),
        }
        if smoke:
            self.common["smoke"] = "kernels interpreted, sizes tiny: times mean nothing"
        self.file = open(path, "w") if path else None  # noqa: SIM115 (open until the program ends)
        self.deadline = time.perf_counter() + seconds
        self.copy_bytes_per_s: float | None = None

    def line(self, **fields: Any) -> None:
        text = json.dumps({**self.common, **fields})
        print(text, flush=True)
        if self.file:
            self.file.write(text + "\n")
            self.file.flush()

    def timing(self, case: str, implementation: str, seconds: float, moved: int, formula: str, **more: Any) -> None:
        share = None if self.copy_bytes_per_s is None else moved / seconds / self.copy_bytes_per_s
        self.line(
            case=case, implementation=implementation, s=seconds, bytes=moved, bytes_formula=formula,
            bytes_per_s=moved / seconds, share_of_copy=share, **more,
        )  # fmt: skip

    def has_time_for(self, case: str, seconds: float) -> bool:
        if time.perf_counter() + seconds <= self.deadline:
            return True
        self.line(case=case, skipped=f"needs about {seconds:.0f} s more than --seconds leaves")
        return False


def timed(call: Callable[[], Any], *, turns: int = 9, turn_s: float = 0.05) -> float:
    """Seconds of one call: the median over turns of as many calls as last `turn_s`."""
    jax.block_until_ready(call())
    begun = time.perf_counter()
    jax.block_until_ready(call())
    repeats = max(1, min(100, int(turn_s / max(time.perf_counter() - begun, 1e-6))))
    found = []
    for _ in range(turns):
        begun = time.perf_counter()
        out = None
        for _ in range(repeats):
            out = call()  # one output lives at a time: they are gigabytes
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begun) / repeats)
    return statistics.median(found)


REPEATS = 200
"""Of `repeated`."""


def repeated(function: Callable[..., Any], repeats: int = REPEATS) -> Callable[..., Any]:
    """`repeats` calls in one program, for those that last no longer than the host takes to start one.

    Each waits for the one before, and none can be left out: operands and result pass a barrier together.
    """

    def again(_: Any, carried: Any) -> Any:
        arguments, _ = carried
        return jax.lax.optimization_barrier((arguments, function(*arguments)))

    return lambda *arguments: jax.lax.fori_loop(1, repeats, again, (arguments, function(*arguments)))[1]


def compiled(lowered: dict[Any, jax.stages.Lowered]) -> dict[Any, jax.stages.Compiled]:
    """Programs compiled side by side."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))


def copy(report: Report, *, smoke: bool) -> None:
    count = 2**16 if smoke else 2**30
    array = jnp.ones(count, jnp.float32)
    add_one = jax.jit(lambda x: x + 1)
    seconds = timed(lambda: add_one(array))
    report.copy_bytes_per_s = 2 * 4 * count / seconds
    report.timing("copy", "xla", seconds, 2 * 4 * count, "2 * 4 * numbers: one read, one write")


def options(description: str, *, seconds: float) -> argparse.ArgumentParser:
    """`json`, `seconds` and `smoke`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the lines here")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop starting new cases after this")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, kernels interpreted, on any device")
    return parser


def main(
    name: str,
    description: str,
    check: Callable[..., bool],
    time_cases: Callable[..., None],
    *,
    seconds: float,
) -> int:
    """A benchmark of kernels that a GPU alone runs at speed: checks, then a copy, then its cases.

    Args:
      name: Of the file, without its ending.
      description: For --help.
      check: (report, smoke=) -> whether kernels are right; where they are not, nothing is timed.
      time_cases: (report, smoke=) -> None.
      seconds: Default of --seconds.

    Returns:
      The exit status.
    """
    parser = options(description, seconds=seconds)
    parser.add_argument("--only", choices=["checks", "times"], help="one of the two parts (default: both)")
    arguments = parser.parse_args()
    if jax.devices()[0].platform != "gpu" and not arguments.smoke:
        print(f"{name}.py: jax sees no GPU here; --smoke runs anywhere.", file=sys.stderr)
        return 2
    report = Report(name, arguments.json, arguments.seconds, smoke=arguments.smoke)
    if arguments.only != "times" and not check(report, smoke=arguments.smoke):
        return 1
    if arguments.only == "checks":
        return 0
    copy(report, smoke=arguments.smoke)
    time_cases(report, smoke=arguments.smoke)
    return 0
