"""The pictures of a report: SVG text that follows the reader's light or dark theme, equal for equal input.

Axes and texts are drawn in the current colour, which the style inside each picture sets by `prefers-color-scheme`; the
colours of data are mid-tones that stand out on both grounds. No pyplot: figures leave no global state behind.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = ("#3f8fd9", "#e0823d", "#3aa88a", "#c767b5", "#d9a520", "#7f8cff", "#d9605f", "#7aa83a")
_INK = "#010203"
"""Stands for the current colour until the picture is written."""

_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_THEME = "<style>:root{color:#3a4350}@media(prefers-color-scheme:dark){:root{color:#c3ccd6}}</style>"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "scalejax",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # laid out with wide letters, so that any reader's font fits
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.6,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": _INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify": True,
}
_SIZE = (5.3, 3.1)
_MOST_MARKS = 30
_SHAPES = ("o", "s", "D", "^")

Points = Sequence[tuple[float, float]]


def curve(
    title: str,
    windows: Points,
    evaluations: Mapping[str, Points],
    *,
    band: Sequence[float] = (),
    base: tuple[str, float] | None = None,
    phases: Mapping[str, float] | None = None,
) -> str:
    """One metric over the steps.

    Args:
      title: Name of the metric.
      windows: (step, value) of each training window.
      evaluations: Split -> (step, value) of each pass over it.
      band: Half-width around each window's value (the error bound of a histogram), or nothing.
      base: Name and height of a line to compare with; drawn where it falls inside the frame.
      phases: Name -> step at which a phase of the run begins.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(title)
        if windows:
            x, y = np.transpose(np.asarray(windows, float))
            axes.plot(x, y, color=COLOURS[0], label="train, window", linewidth=1.2, **_marked(x, 3.0))
            if len(band):
                half = np.asarray(band, float)
                axes.fill_between(x, y - half, y + half, color=COLOURS[0], alpha=0.2, linewidth=0)
        for i, (split, points) in enumerate(evaluations.items(), start=1):
            x, y = np.transpose(np.asarray(points, float))
            axes.plot(x, y, color=COLOURS[i % len(COLOURS)], label=split, **_marked(x, 4.5, _SHAPES[i % len(_SHAPES)]))
        _frame(axes, [*windows, *(p for points in evaluations.values() for p in points)])
        if base is not None and axes.get_ylim()[0] <= base[1] <= axes.get_ylim()[1]:
            axes.axhline(base[1], color=_INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6, label=base[0])
        for name, step in (phases or {}).items():
            axes.axvline(step, color=_INK, linewidth=0.7, alpha=0.5)
            axes.annotate(
                name,
                (step, 0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 4),
                fontsize=7.5,
                textcoords="offset points",
                alpha=0.75,
            )
        axes.set_xlabel("step")
        axes.legend(loc="best")
        return _svg(figure)


def overlay(title: str, runs: Mapping[str, Points]) -> str:
    """One metric of several runs over the steps."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(title)
        for i, (name, points) in enumerate(runs.items()):
            x, y = np.transpose(np.asarray(points, float))
            axes.plot(x, y, color=COLOURS[i % len(COLOURS)], label=name, **_marked(x, 3.5))
        _frame(axes, [p for points in runs.values() for p in points])
        axes.set_xlabel("step")
        axes.legend(loc="best")
        return _svg(figure)


def learning_rate(points: Points) -> str:
    """The learning rate over the steps."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new("Learning rate")
        x, y = np.transpose(np.asarray(points, float))
        axes.plot(x, y, color=COLOURS[2], **_marked(x, 3.0))
        axes.set_ylim(0, float(y.max()) * 1.08 or 1)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.set_xlabel("step")
        return _svg(figure)


def reliability(bins: Mapping[str, Sequence[float]]) -> str:
    """Observed against predicted rates.

    Args:
      bins: predicted, observed, low, high, as `exact.Reliability` holds them.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new("Reliability")
        x, y = np.asarray(bins["predicted"], float), np.asarray(bins["observed"], float)
        low, high = np.asarray(bins["low"], float), np.asarray(bins["high"], float)
        top = max(1e-6, *(float(v.max(initial=0)) for v in (x, high))) * 1.05
        axes.plot([0, top], [0, top], color=_INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6, label="ideal")
        axes.errorbar(
            x,
            y,
            yerr=[y - low, high - y],
            color=COLOURS[0],
            marker="o",
            markersize=4.5,
            linewidth=1.2,
            elinewidth=1,
            capsize=2,
            label="observed, 95 % interval",
        )
        axes.set_xlim(0, top)
        axes.set_ylim(0, top)
        axes.set_xlabel("mean prediction of a bin")
        axes.set_ylabel("observed rate")
        axes.legend(loc="upper left")
        return _svg(figure)


def scores(histogram: Mapping[str, Sequence[float]]) -> str:
    """How predictions are spread, by label.

    Args:
      histogram: negative, positive: weights in bins of equal width over [0, 1].
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new("Scores by label")
        for name, colour in (("negative", COLOURS[0]), ("positive", COLOURS[1])):
            counts = np.asarray(histogram[name], float)
            edges = np.linspace(0, 1, len(counts) + 1)
            share = counts / counts.sum() * len(counts) if counts.sum() else counts
            axes.stairs(share, edges, color=colour, fill=True, alpha=0.28)
            axes.stairs(share, edges, color=colour, label=f"{name}s")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, None)
        axes.set_xlabel("prediction")
        axes.set_ylabel("density")
        axes.legend(loc="upper right")
        return _svg(figure)


def step_times(steps: Sequence[float], p50_s: Sequence[float], p95_s: Sequence[float]) -> str:
    """Median and 95th percentile of the step time of each window."""
    with matplotlib.rc_context(_STYLE):
        largest = max((t for t in p95_s if math.isfinite(t)), default=1.0)
        unit, factor = ("ms", 1e3) if largest < 1 else ("s", 1.0)
        figure, axes = _new(f"Step time, {unit}")
        axes.plot(steps, np.asarray(p50_s) * factor, color=COLOURS[0], label="p50", **_marked(steps, 3.0))
        axes.plot(
            steps, np.asarray(p95_s) * factor, color=COLOURS[1], label="p95", linewidth=1.1, **_marked(steps, 3.0)
        )
        axes.set_ylim(0, largest * factor * 1.15)
        axes.set_xlabel("step")
        axes.legend(loc="best", ncols=2)
        return _svg(figure)


def shares(parts: Mapping[str, float]) -> str:
    """Seconds by what they were spent on, largest on top."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new("Where the time went, s")
        items = sorted(parts.items(), key=lambda item: item[1])
        total = sum(parts.values())
        places = np.arange(len(items))
        axes.barh(places, [seconds for _, seconds in items], color=COLOURS[2], height=0.62)
        for place, (_, seconds) in zip(places, items, strict=True):
            axes.annotate(
                f"{seconds:.3g} s, {seconds / total:.0%}" if total else "0 s",
                (seconds, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(places, [name for name, _ in items])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.28)
        axes.set_xlim(0, None)
        return _svg(figure)


def grid(title: str, values: np.ndarray, rows: str, columns: str) -> str:
    """Values [R, C] as a picture of cells, darker where they are larger; the scale begins at 0."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(title)
        image = axes.imshow(values, cmap="Greens", vmin=0, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axes)
        axes.set_xlabel(columns)
        axes.set_ylabel(rows)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
        return _svg(figure)


def groups(title: str, points: np.ndarray, names: Sequence[str], labels: Sequence[int] | np.ndarray) -> str:
    """Named points [F, 2] on a plane, each in the colour and the shape of its group."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(title)
        for group in sorted(set(map(int, labels))):
            x, y = points[np.asarray(labels) == group].T
            shape = _SHAPES[group // len(COLOURS) % len(_SHAPES)]
            axes.scatter(x, y, color=COLOURS[group % len(COLOURS)], marker=shape, s=22, label=str(group))
        for name, point in zip(names, points, strict=True):
            axes.annotate(name, tuple(point), xytext=(4, 3), textcoords="offset points", fontsize=7.0)
        axes.set_aspect("equal", adjustable="datalim")
        axes.margins(x=0.15)
        axes.legend(loc="best")
        return _svg(figure)


def by_day(title: str, days: Sequence[str], values: Sequence[float], base: float | None = None) -> str:
    """A metric of each slice of progressive validation, in order."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(title)
        places = np.arange(len(days))
        axes.plot(places, values, color=COLOURS[3], **_marked(places, 3.5))
        every = math.ceil(len(days) / 8)
        axes.set_xticks(places[::every], list(days)[::every])
        if base is not None and axes.get_ylim()[0] <= base <= axes.get_ylim()[1]:
            axes.axhline(base, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6)
        return _svg(figure)


def _marked(points: Sequence[object] | np.ndarray, size: float, shape: str = "o") -> dict[str, Any]:
    """Marks where points are few: one or two would be no curve, and marks of many run into each other.

    They are hollow, and every split has its own shape, so that one on top of another does not hide it.
    """
    return {"marker": shape, "markersize": size, "fillstyle": "none"} if len(points) <= _MOST_MARKS else {}


def _new(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, pad=8)
    return figure, axes


def _frame(axes: Axes, points: Points) -> None:
    """Fits the frame to what follows the first tenth of the steps, where losses start high; says what it cuts."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < 2:
        return
    last = max(x for x, _ in finite)
    settled = [y for x, y in finite if x > 0.1 * last]
    low, high = min(settled), max(settled)
    pad = 0.07 * (high - low) or 0.01 * abs(high) or 0.01
    low, high = low - pad, high + pad
    axes.set_ylim(low, high)
    cut = sum(1 for _, y in finite if not low <= y <= high)
    if cut:
        text = f"{cut} early value{'s' if cut > 1 else ''} outside the frame"
        axes.annotate(text, (1, 1.02), xycoords="axes fraction", ha="right", va="bottom", fontsize=7.5, alpha=0.75)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor").replace("'DejaVu Sans'", _FONTS)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head = svg.index(">") + 1
    return svg[:head] + _THEME + svg[head:]


def finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points whose value is there (JSON's null and NaN are not)."""
    return [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]
