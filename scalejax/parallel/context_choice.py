"""pass-KV or pass-Q for T new tokens after P cached ones: by a cost model, or by a line fitted to measurements.

Yang et al. 2025, arXiv 2411.01783, section 3.4 and appendices C and D. With m = T / (T + P), the miss rate, n devices,
H and K heads of queries and keys, e bytes an element, C FLOP/s and BW bytes/s of a device:

    Algorithm 1   pass-KV if T >= T* or m >= 2 K / H                            T* = n C K e / (2 H BW)
    Algorithm 5   pass-KV if T >= T* or m >  2 K / H - 4 T BW / (n C e)         the all-to-all of pass-Q counted
    fitted        pass-KV if T >= T* or a ln T + b ln m + c > 0

From T* on, keys and values travel behind the attention of T queries, whatever P is. Below it queries are the smaller
message where m < 2 K / H, but their results come back in an all-to-all behind which nothing hides. Of a ragged batch T
and P are the sums over its rows.

Algorithm 5 is strict here, where the paper has >=: its own table has a row at equality (T = 3,200) in which pass-Q is
6 % faster. The a, b and c that the paper prints are not here: they choose pass-Q for every row of that table, where it
is up to 11 % slower. `calibrate` fits them to what a machine does.
"""

import dataclasses
import fractions
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from scalejax.errors import UserError, check_at_least

Passed = Literal["pass_kv", "pass_q"]
"""What goes round the ring."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCosts:
    """A model of attention and a machine. Peaks are a start; what a machine reaches gives better thresholds.

    Attributes:
      ranks: Devices along `context`.
      heads: Query heads of the model.
      kv_heads: Heads of keys and values.
      element_bytes: Bytes of an element of queries, keys and values.
      flops_per_s: Of attention on one device.
      bytes_per_s: Of one device to the next.
    """

    ranks: int
    heads: int
    kv_heads: int
    element_bytes: float
    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise UserError(f"ContextCosts: {field.name} must be a number above 0; got {value}.")

    @property
    def hidden_from(self) -> float:
        """T*: new tokens from which on pass-KV hides its transfers, for any P (equation 2)."""
        return float(_hidden_from(_exact(self)))

    @property
    def queries_hidden_from(self) -> float:
        """T + P from which on pass-Q hides the transfers of queries (equation 3)."""
        return self.ranks * self.flops_per_s * self.element_bytes / (4 * self.bytes_per_s)

    @property
    def equal_messages_at(self) -> float:
        """Miss rate at which queries are as many bytes as keys and values (equation 1)."""
        return 2 * self.kv_heads / self.heads


def smaller_message(heads: int, kv_heads: int, new: int, cached: int) -> Passed:
    """Equation 1 alone, where nothing is known of a machine: pass-KV if m >= 2 K / H.

    Args:
      heads: H, query heads of the model.
      kv_heads: K, heads of keys and values.
      new: T >= 1.
      cached: P >= 0.
    """
    return _passed(_miss_rate(new, cached) >= fractions.Fraction(2 * kv_heads, heads))


def by_message(costs: ContextCosts, new: int, cached: int) -> Passed:
    """Algorithm 1: the smaller message, if pass-KV does not hide its own.

    Args:
      costs: Model and machine.
      new: T >= 1.
      cached: P >= 0.
    """
    exact = _exact(costs)
    miss_rate = _miss_rate(new, cached)
    return _passed(new >= _hidden_from(exact) or miss_rate >= 2 * exact["kv_heads"] / exact["heads"])


def by_message_and_return(costs: ContextCosts, new: int, cached: int) -> Passed:
    """Algorithm 5: as `by_message`, with the all-to-all in which results of pass-Q come back.

    Args:
      costs: Model and machine.
      new: T >= 1.
      cached: P >= 0.
    """
    exact = _exact(costs)
    returned = 4 * new * exact["bytes_per_s"] / (exact["ranks"] * exact["flops_per_s"] * exact["element_bytes"])
    threshold = 2 * exact["kv_heads"] / exact["heads"] - returned
    return _passed(new >= _hidden_from(exact) or _miss_rate(new, cached) > threshold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedChoice:
    """h = a ln T + b ln m + c (appendix D), guarded from above.

    Attributes:
      log_new: a.
      log_miss_rate: b.
      constant: c.
      pass_kv_from: T from which on it is pass-KV whatever h says; inf = never.
    """

    log_new: float
    log_miss_rate: float
    constant: float
    pass_kv_from: float

    def choose(self, new: int, cached: int) -> Passed:
        """pass-KV if T >= `pass_kv_from` or h > 0.

        Args:
          new: T >= 1.
          cached: P >= 0.
        """
        miss_rate = float(_miss_rate(new, cached))
        h = self.log_new * math.log(new) + self.log_miss_rate * math.log(miss_rate) + self.constant
        return _passed(new >= self.pass_kv_from or h > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of both methods for one (T, P).

    Attributes:
      new: T.
      cached: P.
      pass_kv_s: Seconds of pass-KV.
      pass_q_s: Seconds of pass-Q.
    """

    new: int
    cached: int
    pass_kv_s: float
    pass_q_s: float

    @property
    def miss_rate(self) -> float:
        return self.new / (self.new + self.cached)

    @property
    def faster(self) -> Passed:
        """The method that took less time."""
        return _passed(self.pass_kv_s <= self.pass_q_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibratedChoice:
    """A fitted line and how well it decides what it was fitted to.

    Attributes:
      choice: The line.
      right: Measurements for which it chooses the faster method.
      measured: All of them.
      lost: Seconds that its choices take, over those of the faster methods, less 1.
    """

    choice: FittedChoice
    right: int
    measured: int
    lost: float


def calibrate(measurements: Sequence[Measurement], pass_kv_from: float | None = None) -> CalibratedChoice:
    """Fits a, b and c by least squares, so that h is the logarithm of pass-Q's time over pass-KV's.

    Rows in which the two take the same time then hardly move the line; a fit of the decisions alone would not see that
    they do not matter.

    Args:
      measurements: Of several T for one P, and several P for one T, on both sides of the crossover.
      pass_kv_from: T*, as by `ContextCosts.hidden_from`; None = the least T of the measurements from which on pass-KV
        was never the slower one.

    Raises:
      UserError: the measurements do not determine a line.
    """
    for m in measurements:
        if not (0 < m.pass_kv_s < math.inf and 0 < m.pass_q_s < math.inf):
            raise UserError(f"calibrate: seconds must be numbers above 0; got {m}.")
        _miss_rate(m.new, m.cached)
    known = np.asarray([(math.log(m.new), math.log(m.miss_rate), 1.0) for m in measurements]).reshape(-1, 3)
    ratios = np.asarray([math.log(m.pass_q_s / m.pass_kv_s) for m in measurements])
    if np.linalg.matrix_rank(known) < 3:
        raise UserError(
            f"calibrate: the {len(measurements)} measurements must differ in new tokens and, at equal new tokens, in "
            "cached ones; they do not determine a, b and c. Measure a grid of several of each."
        )
    (log_new, log_miss_rate, constant), *_ = np.linalg.lstsq(known, ratios, rcond=None)
    if pass_kv_from is None:
        slow = max((m.new for m in measurements if m.faster == "pass_q"), default=0)
        pass_kv_from = min((m.new for m in measurements if m.new > slow), default=math.inf)
    choice = FittedChoice(
        log_new=float(log_new),
        log_miss_rate=float(log_miss_rate),
        constant=float(constant),
        pass_kv_from=float(pass_kv_from),
    )
    chosen = [choice.choose(m.new, m.cached) for m in measurements]
    taken = sum(m.pass_kv_s if c == "pass_kv" else m.pass_q_s for m, c in zip(measurements, chosen, strict=True))
    return CalibratedChoice(
        choice=choice,
        right=sum(m.faster == c for m, c in zip(measurements, chosen, strict=True)),
        measured=len(measurements),
        lost=taken / sum(min(m.pass_kv_s, m.pass_q_s) for m in measurements) - 1,
    )


def _passed(keys_and_values: bool) -> Passed:
    return "pass_kv" if keys_and_values else "pass_q"


def _miss_rate(new: int, cached: int) -> fractions.Fraction:
    check_at_least("context_choice: new tokens", new, 1)
    check_at_least("context_choice: cached tokens", cached, 0)
    return fractions.Fraction(int(new), int(new) + int(cached))


def _hidden_from(exact: dict[str, fractions.Fraction]) -> fractions.Fraction:
    flops = exact["ranks"] * exact["flops_per_s"] * exact["kv_heads"] * exact["element_bytes"]
    return flops / (2 * exact["heads"] * exact["bytes_per_s"])


def _exact(costs: ContextCosts) -> dict[str, fractions.Fraction]:
    # Thresholds are compared for equality (see the module), which rounding would decide.
    return {field.name: fractions.Fraction(getattr(costs, field.name)) for field in dataclasses.fields(costs)}
