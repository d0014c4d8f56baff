"""The phases of a run: what each of them trains, and how the state of one becomes that of the next.

A run has one folder and one counter of steps. Each phase is an experiment of its own, the one before it with some
fields changed, and is compiled as such. Between two phases stands a checkpoint, which the earlier one has saved; the
later one begins from it, whether the run goes on or is started again.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from scalejax.errors import UserError
from scalejax.train import distributed
from scalejax.train.checkpoints.checkpoint import listed
from scalejax.train.experiment import DerivedValue, Experiment, Phase, StatefulSurgery, Surgery

_OPTIMIZED = ("optimizer", "trainable", "gradients.loss_scaling")
"""Fields with which the state of the optimizer begins anew."""

_SCORED = ("model", "data", "evaluation", "checkpoints.best_metric")
"""Fields with which scores are not those of the phase before any more."""

_FIXED = ("steps", "phases", "init", "seed", "log_every", "trackers", "checkpoints.every", "tables.full_every")
"""Fields that hold for the whole run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedPhase:
    """A phase in its place.

    Attributes:
      name: Of the phase; "" for what comes before the phases.
      experiment: The run as it is in this phase. Its `steps` are those of all phases that share the optimizer's state,
        as schedules count them.
      start: Steps of the run before this phase.
      stop: Steps of the run after it.
      optimizer_from: Step at which the optimizer and its schedules began.
      scores_from: Step from which scores can be compared: of one model, on the same data.
      surgery: What makes the model of this phase.
      pinned: Steps whose checkpoints this phase or a later one reads at its beginning, which are kept until its end.
      among: How many phases the run has.
      schedule: Of a run whose surgeries keep its optimizer the steps of all phases and what each makes of the model, as
        a text; it goes on with no other. "" = none.
    """

    name: str
    experiment: Experiment
    start: int
    stop: int
    optimizer_from: int
    scores_from: int
    surgery: Surgery | None = None
    pinned: frozenset[int] = frozenset()
    among: int = 1
    schedule: str = ""

    @property
    def keeps_optimizer(self) -> bool:
        """Whether the optimizer goes on from the phase before."""
        return self.optimizer_from < self.start


def resolved(experiment: Experiment) -> tuple[ResolvedPhase, ...]:
    """What a run does, in order.

    Raises:
      UserError: two phases have one name, or a change names no field, or one that cannot change.
    """
    names = [phase.name for phase in experiment.phases]
    if len(set(names)) != len(names):
        raise UserError(f"phases: names must differ; got {', '.join(names)}.")
    current = dataclasses.replace(experiment, phases=())
    found = [
        ResolvedPhase(name="", experiment=current, start=0, stop=experiment.steps, optimizer_from=0, scores_from=0)
    ]
    for phase in experiment.phases:
        before, current = current, _changed(current, phase, found[0].experiment)
        anew, other = (
            lost or any(_get(before, path) != _get(current, path) for path in paths)
            for lost, paths in (
                (phase.surgery is not None and not isinstance(phase.surgery, StatefulSurgery), _OPTIMIZED),
                (phase.surgery is not None, _SCORED),
            )
        )
        start = found[-1].stop
        found.append(
            ResolvedPhase(
                name=phase.name,
                experiment=current,
                start=start,
                stop=start + phase.steps,
                optimizer_from=start if anew else found[-1].optimizer_from,
                scores_from=start if other else found[-1].scores_from,
                surgery=phase.surgery,
            )
        )
    ends = {phase.optimizer_from: phase.stop for phase in found}
    stateful = [number for number, phase in enumerate(found) if isinstance(phase.surgery, StatefulSurgery)]
    models = [phase.experiment.model for phase in found]
    first = dict.fromkeys(text for model in models for text in _differences(model, models[0], "model"))
    words = [_words(before, phase) for before, phase in itertools.pairwise(found)]
    schedule = "; ".join([" ".join([f"{found[0].stop} steps", *first]), *words])
    return tuple(
        dataclasses.replace(
            phase,
            experiment=dataclasses.replace(phase.experiment, steps=ends[phase.optimizer_from] - phase.optimizer_from),
            pinned=frozenset(step for later in stateful if later >= number for step in _read_by(found, later)),
            among=len(found),
            schedule=schedule if stateful else "",
        )
        for number, phase in enumerate(found)
    )


def _words(before: ResolvedPhase, phase: ResolvedPhase) -> str:
    """Steps of a phase, and what it makes of the model. What else it changes may change in any run that goes on."""
    words = [f"{phase.stop - phase.start} steps", phase.name]
    words += _differences(before.experiment.model, phase.experiment.model, "model")
    if dataclasses.is_dataclass(phase.surgery) and not isinstance(phase.surgery, type):
        # Fields that surgeries gain later, at their defaults, leave the text as it was.
        fields = [(f.name, getattr(phase.surgery, f.name), f.default) for f in dataclasses.fields(phase.surgery)]
        settings = [f"{name}={value}" for name, value, default in fields if value != default]
        words.append(f"by {type(phase.surgery).__name__}({', '.join(settings)})")
    return " ".join(word for word in words if word)


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    """Fields of a config that are not what they were, and what they are."""
    if before == now:
        return
    if dataclasses.is_dataclass(now) and type(before) is type(now):
        for field in dataclasses.fields(now):
            yield from _differences(getattr(before, field.name), getattr(now, field.name), f"{path}.{field.name}")
    elif isinstance(now, tuple) and isinstance(before, tuple) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(*pair, f"{path}.{number}")
    else:
        yield f"{path}={now}"


def _read_by(found: Sequence[ResolvedPhase], number: int) -> list[int]:
    """Ends of the phases before that a surgery may read: back to the last with this model, all where none has it.

    A model may differ from an earlier one in what a state does not show, such as dropout.
    """
    phase = found[number]
    if not (isinstance(phase.surgery, StatefulSurgery) and phase.surgery.reads_history):
        return []
    same = [n for n in range(number) if found[n].experiment.model == phase.experiment.model]
    return [one.stop for one in found[same[-1] if same else 0 : number]]


def named(experiment: Experiment, name: str, where: str) -> Experiment:
    """The run as it is in one of its phases; "" = in what comes before them.

    Raises:
      UserError: it has no such phase; begins with `where`.
    """
    found = {phase.name: phase.experiment for phase in resolved(experiment)}
    if name not in found:
        names = ", ".join(own for own in found if own)
        has = f"the phases {names}. Name one" if names else "no phases. Leave it out"
        raise UserError(f"{where}: the run has {has}.")
    return found[name]


def experiment_at(experiment: Experiment, run_folder: pathlib.Path, step: int | None = None) -> Experiment:
    """The run as it is in the phase that saved a checkpoint, see `phase_at`."""
    return phase_at(experiment, run_folder, step).experiment


def phase_at(experiment: Experiment, run_folder: pathlib.Path, step: int | None = None) -> ResolvedPhase:
    """The phase that saved a checkpoint.

    Args:
      experiment: The run.
      run_folder: Its folder.
      step: Of the checkpoint; None = the newest.
    """
    if step is None:
        step = distributed.on_primary(lambda: max(listed(run_folder / "checkpoints"), default=0))
    found = resolved(experiment)
    return next((phase for phase in found if step <= phase.stop), found[-1])


def _changed(experiment: Experiment, phase: Phase, first: Experiment) -> Experiment:
    for path, value in phase.changes.items():
        if any(f"{path}.".startswith(f"{fixed}.") or f"{fixed}.".startswith(f"{path}.") for fixed in _FIXED):
            raise UserError(
                f"phases: {phase.name!r} changes {path}, which holds for the whole run. Leave it out; it cannot change "
                f"any of {', '.join(_FIXED)}."
            )
        where = f"phases: {phase.name!r} changes {path}"
        if isinstance(value, DerivedValue):
            of = _get(first, path, where)
            try:
                value = value.derived(of)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        experiment = _replaced(experiment, path.split("."), value, where)
    return experiment


def _replaced(value: Any, path: list[str], new: object, where: str) -> Any:
    name, *rest = path
    own = _field(value, name, where)
    if rest:
        new = _replaced(own, rest, new, where)
    try:
        return dataclasses.replace(value, **{name: new})
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _get(value: object, path: str, where: str = "") -> Any:
    for name in path.split("."):
        value = _field(value, name, where)
    return value


def _field(value: Any, name: str, where: str) -> Any:
    is_config = dataclasses.is_dataclass(value) and not isinstance(value, type)
    fields = [field.name for field in dataclasses.fields(value)] if is_config else []
    if name not in fields:
        has = f"has the fields {', '.join(fields)}" if fields else "has none"
        raise UserError(f"{where}, but there is no field {name!r}: {type(value).__name__} {has}.")
    return getattr(value, name)
