"""Signal to quantization noise of every operator's output, alone and in the whole model.

    SQNR = 10 log10( sum y^2 / sum (y - y')^2 ) dB

"alone": the lowered operator is given what the float operator was given. "within": both models run, and what went
wrong before an operator goes on in it. An operator that is poor alone wants another precision; one that is fine alone
and poor within has its trouble before it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalejax.inference.recommendation import lowering, operators
from scalejax.inference.recommendation.click_model import Inputs, embed, logits
from scalejax.inference.recommendation.lowering import Lowered

SCORE = "score"
"""Name of the last line: the logits."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One table, operator, or the logits.

    Attributes:
      kind: "table", "operator" or "score".
      name: Name or path.
      precision: As chosen; "" for the score.
      alone: SQNR in dB; infinite where nothing changed, minus infinity where an output is not finite any more, NaN
        where all outputs are zero or it was not called.
      within: The same in the whole.
    """

    kind: str
    name: str
    precision: str
    alone: float
    within: float


def diagnose(lowered: Lowered, batches: Sequence[Inputs]) -> list[Line]:
    """SQNR of every table (its pooled rows), operator and the logits over some batches, in the order of the model."""
    model, sums = lowered.model, _Sums()
    found = operators.find(model.shape)
    for batch in batches:
        tables, params = model.arrays
        for config in model.configs:
            theirs = embed((config,), {config.name: tables[config.name]}, batch)
            ours = embed((config,), {config.name: lowered.arrays.tables[config.name]}, batch)
            for feature in config.features:
                for where in ("alone", "within"):
                    sums.add(("table", config.name, where), theirs[feature], ours[feature])
        module, low = model.shape.merge(params), lowering.module_of(model, lowered.arrays)
        float_calls, low_calls = operators.record(module, found), operators.record(low, found)
        score = logits(model, tables, module, batch)
        sums.add((SCORE, SCORE, "within"), score, logits(model, lowered.arrays.tables, low, batch))
        spare = lowering.module_of(model, lowered.arrays)
        for path, recorder in float_calls.items():
            operator = operators.get(spare, found[path].keys)
            for (args, kwargs, result), (_, _, other) in zip(recorder.calls, low_calls[path].calls, strict=True):
                sums.add(("operator", path, "alone"), result, operator(*args, **kwargs))
                sums.add(("operator", path, "within"), result, other)
    lines = [
        Line("table", n, p, sums.db(("table", n, "alone")), sums.db(("table", n, "within")))
        for n, p in lowered.precisions.tables.items()
    ]
    lines += [
        Line("operator", n, p, sums.db(("operator", n, "alone")), sums.db(("operator", n, "within")))
        for n, p in lowered.precisions.operators.items()
    ]
    return [*lines, Line(SCORE, SCORE, "", np.nan, sums.db((SCORE, SCORE, "within")))]


class _Sums:
    """Energies of signals and of noises, in float64."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], np.ndarray] = {}

    def add(self, name: tuple[str, str, str], signal: object, other: object) -> None:
        a, b = np.asarray(signal, np.float64), np.asarray(other, np.float64)
        self._sums[name] = self._sums.get(name, np.zeros(2)) + np.array([np.square(a).sum(), np.square(a - b).sum()])

    def db(self, name: tuple[str, str, str]) -> float:
        signal, noise = self._sums.get(name, (0.0, 0.0))
        if not signal:
            return float("nan")
        if not np.isfinite(noise):
            return -float("inf")
        return float("inf") if not noise else float(10 * np.log10(signal / noise))
