"""A precision for every table and operator: the cheapest found whose normalised entropy stays within a budget.

    1  score every choice alone: how much the NE of a calibration slice changes when only this one is lowered
    2  begin with everything as narrow as it can be
    3  while the NE gap of the whole may be above the budget: raise the choice that gives back most NE per cost, by 1
    4  then try to lower every raised choice once more, the most expensive first, as long as the gap stays within it
    5  confirm on examples that the search has not seen

Additive estimates from step 1 order the raises of step 3; every step measures the whole. "May be": the upper end of the
95 % interval of the gap decides, so that luck on the slice buys nothing; a small slice asks for wider precisions. The
paper names such a search and its budget of a few hundredths of a percent of NE; the steps are chosen here.
"""

import dataclasses
from collections.abc import Callable, Sequence

from scalejax.errors import UserError
from scalejax.inference.recommendation.click_model import Gap
from scalejax.inference.recommendation.precision import Precisions

Name = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class PrecisionStudy:
    """What a search asks of a model.

    Attributes:
      start: Any choice; where all is widest is found from `choices`.
      names: All that has a precision.
      choices: Name -> its precisions, the widest first; only those that the search may take.
      cost: (name, precision) -> bytes, or seconds of an example.
      gap: Precisions -> NE on the calibration slice over that in float32, minus 1, with its interval.
      gap_held_out: The same on other examples.
    """

    start: Precisions
    names: Sequence[Name]
    choices: Callable[[Name], Sequence[str]]
    cost: Callable[[Name, str], float]
    gap: Callable[[Precisions], Gap]
    gap_held_out: Callable[[Precisions], Gap]


@dataclasses.dataclass(frozen=True)
class PrecisionChoice:
    """The end of a search.

    Attributes:
      precisions: The choice.
      gap: Of the calibration slice.
      held_out_gap: Of other examples.
      sensitivity: (name, precision) -> gap when only this one is lowered so far.
      path: What the search did, one record a step: {"step", "name", "from", "to", "gap", "cost"}.
    """

    precisions: Precisions
    gap: Gap
    held_out_gap: Gap
    sensitivity: dict[tuple[Name, str], float]
    path: list[dict[str, object]]


def widest(study: PrecisionStudy) -> Precisions:
    """Everything in its first choice."""
    return _all(study, 0)


def narrowest(study: PrecisionStudy) -> Precisions:
    """Everything in its last choice."""
    return _all(study, -1)


def cost(study: PrecisionStudy, precisions: Precisions) -> float:
    """The cost of the whole model."""
    return sum(study.cost(name, precisions.of(name)) for name in study.names)


def search(study: PrecisionStudy, *, budget: float, log: Callable[[str], None] = lambda _: None) -> PrecisionChoice:
    """Runs it.

    Args:
      study: The model.
      budget: Largest gap, relative: 5e-4 is 0.05 % of NE.
      log: Given a line a step.

    Raises:
      UserError: the budget is negative.
    """
    if not budget >= 0:
        raise UserError(f"search: budget must be at least 0, a share of NE such as 5e-4; got {budget}.")
    wide = widest(study)
    sensitivity: dict[tuple[Name, str], float] = {}
    for name in study.names:
        for chosen in study.choices(name)[1:]:
            sensitivity[name, chosen] = study.gap(wide.with_one(name, chosen)).value
        if len(study.choices(name)) > 1:
            log(f"alone: {name[1]} in {study.choices(name)[-1]}: {sensitivity[name, study.choices(name)[-1]]:+.3%}")
    path: list[dict[str, object]] = []

    def move(step: str, name: Name, before: str, after: str, now: Gap, precisions: Precisions) -> None:
        record = {"step": step, "name": list(name), "from": before, "to": after, "gap": now.value, "high": now.high}
        path.append({**record, "cost": cost(study, precisions)})
        log(f"{step}: {name[1]} from {before} to {after}: gap {now.value:+.4%}, at most {now.high:+.4%}")

    current = narrowest(study)
    now = study.gap(current)
    path.append({"step": "narrowest", "gap": now.value, "high": now.high, "cost": cost(study, current)})
    raised: set[Name] = set()
    while now.high > budget:
        options = [(name, wider) for name in study.names if (wider := _wider(study, name, current.of(name)))]
        if not options:
            break  # all is as wide as it may be
        name, wider = max(options, key=lambda o: _worth(study, sensitivity, current, *o))
        before = current.of(name)
        current = current.with_one(name, wider)
        raised.add(name)
        now = study.gap(current)
        move("raise", name, before, wider, now, current)
    for name in sorted(raised, key=lambda n: -study.cost(n, current.of(n))):
        while (narrower := _narrower(study, name, current.of(name))) is not None:
            trial = current.with_one(name, narrower)
            then = study.gap(trial)
            if then.high > budget:
                break
            before, current, now = current.of(name), trial, then
            move("lower", name, before, narrower, now, current)
    return PrecisionChoice(current, now, study.gap_held_out(current), sensitivity, path)


def _all(study: PrecisionStudy, index: int) -> Precisions:
    precisions = study.start
    for name in study.names:
        precisions = precisions.with_one(name, study.choices(name)[index])
    return precisions


def _wider(study: PrecisionStudy, name: Name, chosen: str) -> str | None:
    known = study.choices(name)
    at = known.index(chosen)
    return known[at - 1] if at else None


def _narrower(study: PrecisionStudy, name: Name, chosen: str) -> str | None:
    known = study.choices(name)
    at = known.index(chosen)
    return known[at + 1] if at + 1 < len(known) else None


def _worth(
    study: PrecisionStudy, sensitivity: dict[tuple[Name, str], float], current: Precisions, name: Name, wider: str
) -> float:
    """NE given back by a raise, by the additive estimate, over what it costs."""
    chosen = current.of(name)
    gained = sensitivity[name, chosen] - sensitivity.get((name, wider), 0.0)
    price = study.cost(name, wider) - study.cost(name, chosen)
    if price <= 0:
        return float("inf") if gained > 0 else gained
    return gained / price if gained > 0 else gained * price  # the cheapest of those that give nothing back
