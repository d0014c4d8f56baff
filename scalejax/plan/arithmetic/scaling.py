"""Scaling laws: from many small runs to the size, the tokens and the accuracy of a large one.

    curves = [IsoFlops(compute=6e18, amounts=tokens, losses=losses), ...]   # runs of one budget, sizes varied
    fit = fit_isoflops(curves)                                              # a parabola each, then N*(C) = A C^alpha
    fit.law(3.8e25), fit.law.parameters(3.8e25)                             # compute-optimal tokens, and size
    bootstrap(fit).interval(lambda law: law(3.8e25))                        # how sure that is

The method of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.2.1), which is approach 2 of Hoffmann et al.
2022 (arXiv 2203.15556): at each budget, loss is a parabola in the logarithm of the amount (training tokens, or
parameters); the amounts at their minima follow a power law of the budget.

What a benchmark will show is predicted in two steps (same section): the negative log-likelihood of the right answer is
linear in log C over compute-optimal models, and accuracy is a sigmoid of it.

The constants of the paper: it prints (alpha, A) = (0.53, 0.29), which put the optimum at 3.8e25 FLOPs near 10.5T
tokens, and no pair that rounds to them gives the 16.55T that it reports; the 0.537 and 0.299 of its figure give 16.3T,
and pairs that round to these include 16.55T. `LLAMA3` holds the latter.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from scalejax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Amount = Literal["tokens", "parameters"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsoFlops:
    """Runs that spent the same compute.

    Attributes:
      compute: FLOPs of each run.
      amounts: Training tokens, or parameters, of each run.
      losses: Final loss of each run.
    """

    compute: float
    amounts: tuple[float, ...]
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", tuple(map(float, self.amounts)))
        object.__setattr__(self, "losses", tuple(map(float, self.losses)))
        if not (math.isfinite(self.compute) and self.compute > 0):
            raise UserError(f"IsoFlops: compute must be FLOPs above 0; got {self.compute}. Give that of each run.")
        where = f"IsoFlops: at {self.compute:.3g} FLOPs"
        if len(self.amounts) != len(self.losses):
            raise UserError(
                f"{where}, amounts and losses must have one entry a run; got {len(self.amounts)} and "
                f"{len(self.losses)}. Drop runs without a loss."
            )
        if not all(math.isfinite(x) and x > 0 for x in self.amounts):
            raise UserError(f"{where}, amounts must be above 0; got {self.amounts}. Give tokens or parameters.")
        if not all(map(math.isfinite, self.losses)):
            raise UserError(f"{where}, losses must be finite; got {self.losses}. Drop runs that diverged.")
        if len(set(self.amounts)) < 3:
            raise UserError(
                f"{where}, a parabola needs runs of at least 3 different amounts; got {len(set(self.amounts))}. Add "
                "runs of other sizes."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parabola:
    """loss = curvature (ln amount - ln minimum)^2 + loss at the minimum.

    Attributes:
      compute: FLOPs of its runs.
      minimum: Amount of least loss.
      loss: Loss there.
      curvature: Above 0.
    """

    compute: float
    minimum: float
    loss: float
    curvature: float

    def __call__(self, amounts: np.ndarray) -> np.ndarray:
        """float64[...] losses at these amounts."""
        return self.loss + self.curvature * np.log(np.asarray(amounts) / self.minimum) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """The compute-optimal amount, N*(C) = coefficient * C^exponent.

    Attributes:
      coefficient: A.
      exponent: alpha.
      amount: What N counts.
      flops_per_parameter_token: FLOPs of training per parameter and token, which ties tokens to parameters: C =
        this * parameters * tokens. 6 leaves attention out, as Hoffmann et al. do.
    """

    coefficient: float
    exponent: float
    amount: Amount = "tokens"
    flops_per_parameter_token: float = 6.0

    def __call__(self, compute: float) -> float:
        """The optimal amount at a budget in FLOPs."""
        return self.coefficient * compute**self.exponent

    def tokens(self, compute: float) -> float:
        """Compute-optimal training tokens."""
        return self(compute) if self.amount == "tokens" else self._other(compute)

    def parameters(self, compute: float) -> float:
        """Compute-optimal parameters."""
        return self(compute) if self.amount == "parameters" else self._other(compute)

    def _other(self, compute: float) -> float:
        return compute / (self.flops_per_parameter_token * self(compute))


LLAMA3 = PowerLaw(coefficient=0.299, exponent=0.537)
"""Tokens, from figure 3 of the paper."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Parabolas of the budgets and the power law through their minima.

    Attributes:
      curves: What was fitted, by budget.
      parabolas: One a curve.
      law: Through their minima, by least squares on logarithms.
    """

    curves: tuple[IsoFlops, ...]
    parabolas: tuple[Parabola, ...]
    law: PowerLaw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Power laws of resampled runs.

    Attributes:
      laws: One a sample that could be fitted.
      refused: Samples that could not: a parabola opened downwards, or its minimum left the range of its runs. Many of
        them say that the runs do not enclose their minima well.
    """

    laws: tuple[PowerLaw, ...]
    refused: int

    def interval(self, quantity: Callable[[PowerLaw], float], level: float = 0.95) -> tuple[float, float]:
        """Percentile interval of anything that a law gives.

        Raises:
          UserError: level lies outside (0, 1).
        """
        if not 0 < level < 1:
            raise UserError(f"interval: level must lie between 0 and 1; got {level}. Try 0.95.")
        low, high = np.quantile([quantity(law) for law in self.laws], [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def fit_parabola(curve: IsoFlops) -> Parabola:
    """Least squares of loss against ln(amount).

    Raises:
      UserError: the parabola has no minimum within the amounts of the runs.
    """
    center, design = _design(curve)
    coefficients = np.linalg.lstsq(design, np.asarray(curve.losses), rcond=None)[0]
    square, slope, constant = (float(c) for c in coefficients)
    low, high = min(curve.amounts), max(curve.amounts)
    if square <= 0:
        raise UserError(
            f"fit_parabola: at {curve.compute:.3g} FLOPs the losses do not rise on both sides of a minimum (curvature "
            f"{square:.3g}). Add smaller and larger runs, or drop this budget."
        )
    minimum = math.exp(center - slope / (2 * square))
    if not low <= minimum <= high:
        raise UserError(
            f"fit_parabola: at {curve.compute:.3g} FLOPs the minimum, {minimum:.4g}, lies outside of the runs, "
            f"{low:.4g} to {high:.4g}. Add {'smaller' if minimum < low else 'larger'} ones, or drop this budget."
        )
    return Parabola(compute=curve.compute, minimum=minimum, loss=constant - slope**2 / (4 * square), curvature=square)


def fit_isoflops(
    curves: Sequence[IsoFlops], *, amount: Amount = "tokens", flops_per_parameter_token: float = 6.0
) -> ScalingFit:
    """Fits a parabola to each budget and a power law to their minima.

    Args:
      curves: Runs by budget.
      amount: What their amounts count.
      flops_per_parameter_token: See `PowerLaw`.

    Raises:
      UserError: a parabola has no minimum within its runs, or the curves have fewer than two budgets.
    """
    curves = tuple(sorted(curves, key=lambda curve: curve.compute))
    budgets = [curve.compute for curve in curves]
    if len(set(budgets)) < 2:
        raise UserError(
            f"fit_isoflops: curves must have at least two budgets; got {sorted(set(budgets))}. Run another one."
        )
    parabolas = tuple(fit_parabola(curve) for curve in curves)
    exponent, intercept = np.polyfit(np.log(budgets), np.log([p.minimum for p in parabolas]), 1)
    law = PowerLaw(
        coefficient=math.exp(intercept),
        exponent=float(exponent),
        amount=amount,
        flops_per_parameter_token=flops_per_parameter_token,
    )
    return ScalingFit(curves=curves, parabolas=parabolas, law=law)


def bootstrap(fit: ScalingFit, *, samples: int = 2000, seed: int = 0) -> Bootstrap:
    """Refits the law to runs whose losses are those of the parabolas plus resampled residuals.

    Residuals are divided by the square root of what the fit left of their variance (1 - leverage) and drawn from all
    budgets together, so the noise is taken to be alike everywhere. That covers the noise of single runs; it cannot see
    that loss is no parabola, nor that the law bends beyond the budgets that were run.

    Args:
      fit: What `fit_isoflops` gave.
      samples: How often.
      seed: Equal seeds give equal results.

    Raises:
      UserError: no budget has more runs than a parabola has coefficients, or hardly any sample could be fitted.
    """
    designs = [_design(curve) for curve in fit.curves]
    solvers = [np.linalg.pinv(design) for _, design in designs]  # 3, runs
    pool = []
    for curve, parabola, (_, design), solver in zip(fit.curves, fit.parabolas, designs, solvers, strict=True):
        left = 1 - np.einsum("rc,cr->r", design, solver)
        residuals = np.asarray(curve.losses) - parabola(np.asarray(curve.amounts))
        free = left > 1e-9  # the parabola passes through a run that alone fixes a coefficient
        pool.append(residuals[free] / np.sqrt(left[free]))
    noise = np.concatenate(pool)
    if not len(noise):
        raise UserError(
            "bootstrap: every budget has only 3 runs, through which a parabola always passes; their noise cannot be "
            "told. Add a fourth run to some budget."
        )
    noise = noise - noise.mean()
    random = np.random.default_rng(seed)
    minima = np.empty((len(fit.curves), samples))
    good = np.ones(samples, bool)
    for index, (curve, parabola, (center, _), solver) in enumerate(
        zip(fit.curves, fit.parabolas, designs, solvers, strict=True)
    ):
        amounts = np.asarray(curve.amounts)
        losses = parabola(amounts)[:, None] + random.choice(noise, (len(amounts), samples))  # runs, samples
        square, slope, _ = solver @ losses
        good &= square > 0
        minima[index] = center - slope / (2 * np.where(square > 0, square, 1.0))
        good &= (minima[index] >= np.log(amounts.min())) & (minima[index] <= np.log(amounts.max()))
    if good.sum() < max(2, samples // 20):
        raise UserError(
            f"bootstrap: only {good.sum()} of {samples} samples have their minima within the runs; got losses too "
            "noisy for their range. Add smaller and larger runs at each budget."
        )
    budgets = np.log([curve.compute for curve in fit.curves])
    exponents, intercepts = np.polyfit(budgets, minima[:, good], 1)
    laws = tuple(
        dataclasses.replace(fit.law, exponent=float(exponent), coefficient=math.exp(intercept))
        for exponent, intercept in zip(exponents, intercepts, strict=True)
    )
    return Bootstrap(laws=laws, refused=int(samples - good.sum()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Downstream:
    """Accuracy on a benchmark from training compute, in two steps.

    nll(C) = slope log10 C + intercept, the normalised negative log-likelihood of the right answer;
    accuracy(nll) = chance + (ceiling - chance) / (1 + exp((nll - middle) / width)).

    Attributes:
      slope: Below 0: more compute, lower loss.
      intercept: Of the line.
      middle: NLL halfway between chance and ceiling.
      width: Above 0.
      chance: Accuracy of guessing.
      ceiling: Accuracy at best.
    """

    slope: float
    intercept: float
    middle: float
    width: float
    chance: float
    ceiling: float

    def nll(self, compute: float) -> float:
        """NLL of the right answer after this many training FLOPs of a compute-optimal model."""
        return self.slope * math.log10(compute) + self.intercept

    def accuracy_at_nll(self, nll: float) -> float:
        """Accuracy in [chance, ceiling]."""
        # exp of at most 700 is finite, and accuracy has long reached chance there.
        return self.chance + (self.ceiling - self.chance) / (1 + math.exp(min((nll - self.middle) / self.width, 700)))

    def accuracy(self, compute: float) -> float:
        """Accuracy at an amount of compute: its loss, and the accuracy at that loss."""
        return self.accuracy_at_nll(self.nll(compute))


def fit_downstream(
    *,
    compute: Sequence[float],
    nll_of_compute: Sequence[float],
    nll: Sequence[float],
    accuracy: Sequence[float],
    chance: float = 0.0,
    ceiling: float = 1.0,
) -> Downstream:
    """Fits both steps by least squares.

    The steps may come from different models: the line from compute-optimal ones, the sigmoid also from larger models
    that were trained otherwise, which is what lets it see high accuracies.

    Args:
      compute: Training FLOPs of each compute-optimal model.
      nll_of_compute: Its NLL of the right answer.
      nll: NLL of each model of the second step.
      accuracy: Its accuracy, a share.
      chance: Accuracy of guessing, e.g. 0.25 with four choices.
      ceiling: Accuracy at best.

    Raises:
      UserError: lengths differ, there are fewer than two points, an accuracy is no share, or NLL does not fall with
        compute or accuracy with NLL.
    """
    from scipy import optimize

    for first, second, names in (
        (compute, nll_of_compute, "compute and nll_of_compute"),
        (nll, accuracy, "nll and accuracy"),
    ):
        if len(first) != len(second) or len(set(first)) < 2:
            raise UserError(
                f"fit_downstream: {names} must have equal length and at least two different points; got "
                f"{len(first)} and {len(second)}. Evaluate more models."
            )
    if not 0 <= chance < ceiling <= 1:
        raise UserError(
            f"fit_downstream: must have 0 <= chance < ceiling <= 1; got {chance} and {ceiling}. With k choices, chance "
            "is 1 / k."
        )
    x, y = np.asarray(nll, float), np.asarray(accuracy, float)
    if ((y < 0) | (y > 1)).any():
        raise UserError(f"fit_downstream: accuracy must be shares in [0, 1]; got {y.min():g} to {y.max():g}.")
    slope, intercept = np.polyfit(np.log10(compute), nll_of_compute, 1)
    if slope >= 0:
        raise UserError(
            f"fit_downstream: NLL must fall with compute; got {slope:.3g} a decade. Take compute-optimal models only."
        )
    # A start from the straight line that the logits of a sigmoid lie on; points at or beyond its ends are pulled in.
    share = np.clip((y - chance) / (ceiling - chance), 0.01, 0.99)
    start_slope, start_constant = np.polyfit(x, np.log(share / (1 - share)), 1)
    if start_slope >= 0:
        raise UserError("fit_downstream: accuracy must rise as NLL falls; got the reverse. Are the two in one order?")

    def off(parameters: np.ndarray) -> np.ndarray:
        middle, log_width = parameters
        return chance + (ceiling - chance) / (1 + np.exp(np.clip((x - middle) / np.exp(log_width), -700, 700))) - y

    start = [-start_constant / start_slope, math.log(-1 / start_slope)]
    middle, log_width = optimize.least_squares(off, start, x_scale="jac", xtol=1e-14, ftol=1e-14, gtol=1e-14).x
    return Downstream(
        slope=float(slope),
        intercept=float(intercept),
        middle=float(middle),
        width=math.exp(log_width),
        chance=chance,
        ceiling=ceiling,
    )


def figure(fit: ScalingFit, *, samples: Bootstrap | None = None, targets: Sequence[float] = ()) -> "Figure":
    """Two panels: the parabolas with their minima, and the law with its band and what it says of larger budgets.

    Args:
      fit: What `fit_isoflops` gave.
      samples: Its bootstrap; draws the 95 % band.
      targets: Budgets in FLOPs to extrapolate to.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(fit.curves)))
    for curve, parabola, colour in zip(fit.curves, fit.parabolas, colours, strict=True):
        grid = np.geomspace(min(curve.amounts), max(curve.amounts), 100)
        left.plot(curve.amounts, curve.losses, "o", color=colour, markersize=3)
        left.plot(grid, parabola(grid), color=colour, label=f"{curve.compute:.2g}")
        left.plot(parabola.minimum, parabola.loss, "*", color=colour, markeredgecolor="black", markersize=11)
    name = fit.law.amount
    left.set(xscale="log", xlabel=f"training {name}" if name == "tokens" else name, ylabel="loss")
    left.legend(title="FLOPs", fontsize=7, ncols=2)
    budgets = [curve.compute for curve in fit.curves]
    line = np.geomspace(min(budgets), max([*budgets, *targets]), 100)
    if samples is not None:
        low, high = np.transpose([samples.interval(lambda law, c=c: law(c)) for c in line])
        right.fill_between(line, low, high, alpha=0.2, linewidth=0, label="95 %")
    law = fit.law
    right.plot(line, [law(c) for c in line], label=f"{law.coefficient:.3g} C^{law.exponent:.3f}")
    right.plot(budgets, [p.minimum for p in fit.parabolas], "*", color="black", label="minima")
    for target in targets:
        right.plot(target, law(target), "o", color="tab:red")
        text = f"{law(target):.3g} {name}"
        right.annotate(text, (target, law(target)), (-6, -12), textcoords="offset points", ha="right")
    right.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=f"compute-optimal {name}")
    right.legend(fontsize=8)
    return drawn


def _design(curve: IsoFlops) -> tuple[float, np.ndarray]:
    """Center of ln(amount), and float64[runs, 3]: square, first power and 1 of the distance from it.

    ln(amount) of 1e12 tokens varies by 10 % where its square varies by 20 %: columns that are not centered are nearly
    parallel.
    """
    logs = np.log(curve.amounts)
    center = float(logs.mean())
    return center, np.vander(logs - center, 3)
