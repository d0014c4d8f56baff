"""Schedules as data; `build(steps)` gives an optax schedule (step -> value)."""

import dataclasses
from typing import get_args

import optax

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """The same value at every step."""

    value: float = 1.0

    def build(self, steps: int) -> optax.Schedule:
        del steps
        return optax.constant_schedule(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear from 0 to `peak` over the first `warmup` of the run, then cosine down to `final` * peak.

    Attributes:
      peak: Highest value.
      warmup: Fraction of the run's steps in [0, 1).
      final: Fraction of `peak` at the last step.
    """

    peak: float = 1.0
    warmup: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self)

    def build(self, steps: int) -> optax.Schedule:
        warm = round(self.warmup * steps)
        down = optax.cosine_decay_schedule(self.peak, max(1, steps - warm), alpha=self.final)
        return optax.join_schedules([optax.linear_schedule(0.0, self.peak, max(1, warm)), down], [warm])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupLinear:
    """Linear from 0 to `peak` over the first `warmup` of the run, then linear down to `final` * peak."""

    peak: float = 1.0
    warmup: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self)

    def build(self, steps: int) -> optax.Schedule:
        warm = round(self.warmup * steps)
        down = optax.linear_schedule(self.peak, self.final * self.peak, max(1, steps - warm))
        return optax.join_schedules([optax.linear_schedule(0.0, self.peak, max(1, warm)), down], [warm])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosineAnneal:
    """As `WarmupCosine`, but the last `anneal` of the run goes linearly from `final` * peak to 0.

    The cosine ends where annealing begins. This is how Llama 3 was trained (arXiv 2407.21783, section 3.4), whose
    checkpoints of the last phase are averaged (`inference.averaging`).

    Attributes:
      peak: Highest value.
      warmup: Fraction of the run's steps in [0, 1).
      final: Fraction of `peak` at the end of the cosine.
      anneal: Fraction of the run's steps in [0, 1 - warmup).
    """

    peak: float = 1.0
    warmup: float = 0.1
    final: float = 0.01
    anneal: float = 0.1

    def __post_init__(self) -> None:
        _check_warmup(self)
        if not 0.0 <= self.anneal < 1.0 - self.warmup:
            raise UserError(
                f"WarmupCosineAnneal: anneal must be a fraction of the run in [0, {1.0 - self.warmup:g}); got "
                f"{self.anneal}."
            )

    def build(self, steps: int) -> optax.Schedule:
        warm, last = round(self.warmup * steps), round(self.anneal * steps)
        up = optax.linear_schedule(0.0, self.peak, max(1, warm))
        down = optax.cosine_decay_schedule(self.peak, max(1, steps - warm - last), alpha=self.final)
        end = optax.linear_schedule(self.final * self.peak, 0.0, max(1, last))
        return optax.join_schedules([up, down, end], [warm, steps - last])


Schedule = Constant | WarmupCosine | WarmupLinear | WarmupCosineAnneal


def check_schedule(name: str, value: object) -> None:
    """Refuses what is no schedule, such as a number; one of the user's own has `build`."""
    if not hasattr(value, "build"):
        kinds = ", ".join(kind.__name__ for kind in get_args(Schedule))
        rate = value if isinstance(value, int | float) else 1e-3
        raise UserError(
            f"{name} must be a schedule ({kinds}); got {value!r}. A rate that stays the same is "
            f"optim.Constant(value={rate!r})."
        )


def _check_warmup(schedule: WarmupCosine | WarmupLinear | WarmupCosineAnneal) -> None:
    if not 0.0 <= schedule.warmup < 1.0:
        raise UserError(
            f"{type(schedule).__name__}: warmup must be a fraction of the run in [0, 1); got {schedule.warmup}."
        )
