"""Runs of a benchmark in a file, a JSON object a line, and the intervals of what is paired by seed.

Those that a file holds are not made again, and several processes may append to one.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from scipy import stats


class KeptRuns:
    """Lines of a file: what was run, and its figures."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All there are."""
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def first(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        """The first run with these values, None = it is not there."""
        return next((run for run in self.read() if wanted.items() <= run.items()), None)

    def append(self, run: dict[str, Any]) -> None:
        """Adds one."""
        with self._path.open("a") as file:
            file.write(json.dumps(run) + "\n")


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
