"""Runs in which a click model shrinks and grows in turn, to train with fewer FLOPs and to end whole.

    alternate(experiment, ((64, 1.0), (160, 0.5), (64, 1.0), (128, 0.5), (96, 1.0)), multiple=8)

The widths are those of the config: every field of it, and of the configs in it, that is named `hidden` or ends in
`_hidden`, but for those in fields whose metadata say "stacked", as the modules of towers, whose units stay (see
`units`). Where such a field is None and its metadata have "of_dim", the width is that many times the model's `dim`. So
a model that was cut is an ordinary smaller one, and its checkpoint opens anywhere.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from scalejax import optim
from scalejax.errors import UserError, check_whole
from scalejax.surgery.units import Growth, ResizeUnits, Score
from scalejax.train.experiment import Experiment, Phase


def kept_width(width: int, share: float, multiple: int = 1) -> int:
    """The ceil(share * width) best units of a layer rounded up to a multiple, but no more than there are."""
    units = max(1, math.ceil(share * width - 1e-9))  # 0.1 * 30 is a little more than 3
    return min(width, -(-units // multiple) * multiple)


def narrowed(config: Any, share: float, multiple: int = 1) -> Any:
    """The config of a model of whose hidden layers this share of the units is left, see `kept_width`.

    Raises:
      UserError: it has no hidden widths, one is below the multiple, or the share is not above 0 and at most 1.
    """
    check_whole("multiple", multiple, 1)
    if not 0 < share <= 1:
        raise UserError(f"share must be above 0 and at most 1, the part of the hidden units that stays; got {share}.")
    new, count = _narrowed(config, share, multiple, type(config).__name__, None)
    if not count:
        raise UserError(
            f"{type(config).__name__} has no MLP with a hidden layer (a field `hidden`, or one that ends in `_hidden`) "
            "whose units could be cut. Give a model with hidden widths, such as a DLRM."
        )
    return new


def _narrowed(value: Any, share: float, multiple: int, where: str, dim: int | None) -> tuple[Any, int]:
    """The value with fewer units in its hidden layers, and how many of these it has; `dim` is that of the model."""
    if isinstance(value, tuple):
        parts = [_narrowed(part, share, multiple, f"{where}.{number}", dim) for number, part in enumerate(value)]
        return tuple(part for part, _ in parts), sum(count for _, count in parts)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value, 0
    changes, total = {}, 0
    dim = getattr(value, "dim", dim)
    for field in dataclasses.fields(value):
        own, path = getattr(value, field.name), f"{where}.{field.name}"
        if field.metadata.get("stacked"):
            continue
        if field.name != "hidden" and not field.name.endswith("_hidden"):
            changes[field.name], count = _narrowed(own, share, multiple, path, dim)
            total += count
            continue
        if own is None and "of_dim" in field.metadata:
            assert dim is not None, path
            own = field.metadata["of_dim"] * dim
        widths = [width for width in (own if isinstance(own, tuple) else (own,)) if width is not None]
        if small := [width for width in widths if width < multiple]:
            raise UserError(
                f"{path} has a width of {small[0]}, below the multiple of {multiple} that widths are rounded up to. "
                "Give a smaller multiple, or a wider layer."
            )
        total += len(widths)
        kept = tuple(kept_width(width, share, multiple) for width in widths)
        if kept != tuple(widths):  # what is whole stays as it is said, None too
            changes[field.name] = kept if isinstance(own, tuple) else kept[0]
    return dataclasses.replace(value, **changes), total  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenShare:
    """In a phase, the model that the run begins with, of whose hidden units this share is left. See `narrowed`.

    `--set model...` so holds in all phases. A `train.experiment.DerivedValue`.

    Attributes:
      share: Of the units of each hidden layer.
      multiple: Widths are rounded up to it.
    """

    share: float
    multiple: int = 1

    def derived(self, first: Any) -> Any:
        """See `train.experiment.DerivedValue`."""
        return first if self.share == 1 else narrowed(first, self.share, self.multiple)


def alternate(
    experiment: Experiment,
    schedule: Sequence[tuple[int, float]],
    *,
    multiple: int = 1,
    growth: Growth = "zero",
    score: Score = "norm",
) -> Experiment:
    """The experiment in phases of which each has a share of the hidden units of its model.

    Args:
      experiment: Of the whole model; its steps are those of the schedule instead.
      schedule: (steps, share of the units) of each phase; the first and the last are whole.
      multiple: Widths of cut layers are rounded up to it: 128 on TPU, 8 or 16 for tensor cores of GPUs.
      growth, score: See `ResizeUnits`.

    Raises:
      UserError: the schedule does not begin or end with the whole model, `narrowed` refuses, or the optimizer corrects
        moments by steps that it cannot count for each number.
    """
    if experiment.phases:
        raise UserError(f"alternate: the experiment has {len(experiment.phases)} phases of its own. Leave them out.")
    pairs = "pairs (steps, share of the units). Write one such as ((64, 1.0), (160, 0.5), (96, 1.0))."
    if len(schedule) < 2:
        raise UserError(f"alternate: the schedule has {len(schedule)} entries, and must have two or more {pairs}")
    for number, pair in enumerate(schedule):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], float | int)):
            raise UserError(f"alternate: the schedule's entry {number} is {pair!r}, and all must be {pairs}")
        check_whole(f"alternate: steps of phase {number}", pair[0], 1)
    if schedule[0][1] != 1 or schedule[-1][1] != 1:
        shares = ", ".join(f"{share:g}" for _, share in schedule)
        which = "first" if schedule[0][1] != 1 else "last"
        raise UserError(
            "alternate: a schedule begins and ends with the whole model, a share of 1, so that what goes on to learn "
            f"from new data has all of its units; got the shares {shares}. Add a {which} phase with the share 1."
        )
    surgery = ResizeUnits(growth=growth, score=score)
    phases = []
    for number, (steps, share) in enumerate(schedule[1:], 1):
        change, before = HiddenShare(share=share, multiple=multiple), schedule[number - 1][1]
        change.derived(experiment.model)  # refuses widths that cannot be cut
        # Whether widths change is seen by the share: those of the model may be set later.
        phases.append(
            Phase(
                name=f"{number}-{'same' if share == before else 'cut' if share < before else 'grow'}",
                steps=steps,
                changes={"model": change},
                surgery=None if share == before else surgery,
            )
        )
    optimizer = _counting_each(experiment.optimizer)
    return dataclasses.replace(experiment, steps=schedule[0][0], optimizer=optimizer, phases=tuple(phases))


def _counting_each(optimizer: Any) -> Any:
    """The optimizer with steps that are counted for each number, where moments are corrected by them."""
    if isinstance(optimizer, optim.ByPath):
        rules = [dataclasses.replace(rule, optimizer=_counting_each(rule.optimizer)) for rule in optimizer.rules]
        return dataclasses.replace(optimizer, rules=tuple(rules))
    if hasattr(optimizer, "counts"):
        return dataclasses.replace(optimizer, counts="each")
    if not isinstance(optimizer, optim.Sgd):
        raise UserError(
            f"alternate: optimizer={type(optimizer).__name__} counts its steps once for all parameters, and units that "
            "grow need a count of their own. Take Adam or AdamW, which have that, or Sgd, which needs none, alone or "
            "in the rules of ByPath."
        )
    return optimizer
