"""`summary.json`: the closing table of a run as one JSON object, and how its numbers are written out.

    recipe, date, device, mesh                        what ran, as texts
    dense_parameters, table_parameters, flops_per_example, tokens_per_example
    steps, examples                                   how much was trained
    weight                                            sum of weights; of a language model the targets it learnt from
    samples_per_s, step_p50_s, step_p95_s, data_wait_share, compile_s, wall_s, ...      see `timing.StepTimer.summary`
    phases                                            of a run in phases what each took and scored, see `of_phases`
    peak_rss_bytes, peak_device_bytes                 see `timing.peak_memory`
    exchange_error, exchange_residual               of the last window, where gradients or weights travel compressed
    tokens_per_s, tokens_per_s_per_device, tflops_per_s_per_device, mfu     of a language model, see `run`
    <split>_<metric>                                  quality; split is train, val, test or progressive
    <split>_<metric>_low, <split>_<metric>_high       95 % bootstrap interval
    <split>_<metric>_base                             what a trivial model has, where that depends on the data
    <split>_<table>                                   lists of lists, such as gate_mean by layer and expert
    best_step, best_<split>_<metric>, <split>_<metric>_at_best      with `evaluation.final="best"`

Which metrics there are the metrics of the run say (`measures.json` keeps it): those of a click model are logloss, ne,
auc, gauc, calibration and base_rate, with auc_hist and auc_error_bound in place of auc in progressive validation; with
several tasks the key ends in "/task": "test_auc_low/click". With `Exchange(overflow="count")` there is also
overflow_ids: those that the pass embedded as zeros, for all tasks together. An undefined value is null. All fields are
optional for a reader.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from scalejax.train.metrics.classification import Accuracy, MeanAuc
from scalejax.train.metrics.click import ClickQuality
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import Described, Metric, Value
from scalejax.train.reports import exchange

Measured = TypeVar("Measured")

_PREFIXES = {"validation": "val"}
SPLITS = {"test": "test", "val": "validation", "progressive": "progressive", "train": "train"}
"""What the keys of a split begin with -> the split, in the order of a summary."""


def prefix(split: str) -> str:
    """What the keys of a split begin with: "validation" -> "val", other names unchanged."""
    return _PREFIXES.get(split, split)


def of_evaluation(split: str, values: Mapping[str, Measured]) -> dict[str, Measured]:
    """The metrics of one evaluation, or its tables, as fields of the summary."""
    return {f"{prefix(split)}_{name}": value for name, value in values.items()}


def of_phases(
    splits: Mapping[str, str],
    windows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    timing: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """What each phase of a run took, and its scores at its end, by the lines of its records.

    So that it holds for a run of several processes in turn, too: steps, samples and flops are those of the run, and
    seconds (train_s without what counts apart, compile_s, handover_s) are those of all windows that there are.

    Args:
      splits: Name of a phase -> the split that it is scored on.
      windows: Of `metrics.jsonl`.
      evaluations: Of `metrics.jsonl`.
      timing: Of `timing.jsonl`.
    """
    found, before = [], {}
    for phase, split in splits.items():
        own = [record for record in windows if record.get("phase") == phase]
        if not own:  # the run ended before it, or its records are older than such lines
            continue
        last, times = own[-1], [record for record in timing if record.get("phase") == phase]
        counted = {"steps": "step", "samples": "examples_seen", "flops": "flops_seen"}
        taken = {name: last[key] - before.get(key, 0) for name, key in counted.items() if key in last}
        seconds = {"train_s": "wall_s", "compile_s": "compile_s", "handover_s": "handover_s"}
        taken |= {name: sum(record.get(key) or 0.0 for record in times) for name, key in seconds.items()}
        at_end = [r for r in evaluations if (r["step"], r["split"]) == (last["step"], split)]
        values = {name: x for r in at_end for name, x in r.items() if name not in ("kind", "step", "split")}
        found.append({"phase": phase, **taken, **of_evaluation(split, values)})
        before = last
    return found


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """One metric as texts: its value, its interval ("" if none) and what the base rate scores ("" if nothing).

    `column` is what it is called where runs stand below each other, with its unit; "" = its name.
    """

    name: str
    value: str
    interval: str
    base: str
    column: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """The metrics of one split and task."""

    title: str
    rows: tuple[MetricRow, ...]


def figure(summary: Mapping[str, object], key: str) -> float | None:
    """A number of the summary; None where it has none."""
    value = summary.get(key)
    assert value is None or isinstance(value, int | float), f"{key} is {value!r}"
    return value


def quality(summary: Mapping[str, object], described: Described | None = None) -> list[Section]:
    """What the summary says of each scored split (test first) and task.

    Args:
      summary: The content of `summary.json`.
      described: What the run measures; None = what its keys show, as for run folders without `measures.json`.
    """
    described = described or known([summary], prefixes=tuple(f"{start}_" for start in SPLITS))
    sections = []
    for start, split in SPLITS.items():
        for ending in endings(described):
            values = [value for value in described.values if _ending(value) == ending]
            rows = [row for value in values if (row := _row(summary, start, value)) is not None]
            if not rows:
                continue
            if (at_best := _row_at_best(summary, start, values)) is not None:
                rows.append(at_best)
            spilled = figure(summary, f"{start}_spilled_ids")  # as it was called
            overflowed = figure(summary, f"{start}_overflow_ids") if spilled is None else spilled
            if overflowed is not None:
                rows.append(MetricRow("ids without room", f"{overflowed:,}", "", ""))
            sections.append(Section(_title(summary, start, split, ending, described), tuple(rows)))
        for grid in described.grids:
            table = summary.get(f"{start}_{grid.name}")
            if isinstance(table, list):
                rows = [MetricRow(f"{grid.rows} {i}", _cells(row), "", "") for i, row in enumerate(table)]
                sections.append(Section(f"{split}, {grid.title}", tuple(rows)))
    return sections


def _cells(row: Sequence[float | None]) -> str:
    """The numbers of a row of a table, or where they go from and to if they are many."""
    known = [value for value in row if value is not None and not math.isnan(value)]
    if len(row) > _CELLS and known:
        return f"{min(known):.2f} to {max(known):.2f}"
    return " ".join("-" if value is None or math.isnan(value) else f"{value:.2f}" for value in row)


_CELLS = 16
"""More columns would not fit."""

_UNIT = 3
"""Words: "nats a target"."""


def known(records: Sequence[Mapping[str, object]], prefixes: tuple[str, ...] = ("",)) -> Described:
    """What the keys of records say was measured, by the metrics that this package has."""
    keys = {key[len(p) :] for record in records for key in record for p in prefixes if key.startswith(p)}
    tasks = tuple(dict.fromkeys(key.partition("/")[2] for key in sorted(keys) if key.startswith("logloss/")))
    metrics: tuple[Metric, ...] = (ClickQuality(tasks=tasks or ("label",)),)
    if not any(key.partition("/")[0] == "logloss" for key in keys):
        metrics = (Accuracy(), MeanAuc(), MeanLoss(of="nats" if "perplexity" in keys else "a loss"))
    return Described.of(metrics)


def endings(described: Described) -> list[str]:
    """Of the names of values: [""] for one task, ["/click", "/buy"] for two."""
    return list(dict.fromkeys(map(_ending, described.values)))


def _ending(value: Value) -> str:
    _, slash, task = value.name.partition("/")
    return slash + task


def _row(summary: Mapping[str, object], start: str, value: Value) -> MetricRow | None:
    if value.shown == "records":
        return None
    key, interval = f"{start}_{value.name}", ""
    if key not in summary and value.window is not None and f"{start}_{value.window}" in summary:
        key = f"{start}_{value.window}"
        bound = figure(summary, f"{start}_{value.bound}")
        interval = "" if bound is None else f"± {bound:.4f} by binning"
    if key not in summary:
        return None
    name, _, task = value.name.partition("/")
    end = f"/{task}" if task else ""
    low, high = figure(summary, f"{start}_{name}_low{end}"), figure(summary, f"{start}_{name}_high{end}")
    if low is not None and high is not None:
        interval = f"{low:.4f} to {high:.4f}"
    base = value.base if value.base is not None else figure(summary, f"{start}_{name}_base{end}")
    unit = value.unit.partition(",")[0]  # what follows, and what is longer, explains the curve
    column = f"{value.title} ({unit})" if 0 < len(unit.split()) <= _UNIT and "better" not in unit else value.title
    return MetricRow(value.title, number(figure(summary, key)), interval, "" if base is None else number(base), column)


def _row_at_best(summary: Mapping[str, object], start: str, values: Sequence[Value]) -> MetricRow | None:
    for value in values:
        if (best := figure(summary, f"{start}_{value.name}_at_best")) is not None:
            title = f"{value.title} at step {summary.get('best_step')}, the best"
            return MetricRow(title, number(best), "", "", f"{value.title}, the best")
    return None


def _title(summary: Mapping[str, object], start: str, split: str, ending: str, described: Described) -> str:
    title = split + (f", {ending[1:]}" if ending else "")
    count = figure(summary, f"{start}_{described.counts[0]}")
    return title if count is None else f"{title}: {_whole(count)} {described.counts[1]}"


def speed(summary: Mapping[str, object]) -> list[tuple[str, str]]:
    """Names and texts of what the summary says of work, speed and memory."""
    get, device = functools.partial(figure, summary), summary.get("device")
    waiting = get("data_wait_share")
    rows: list[tuple[str, str | None]] = [
        ("device", None if device is None else str(device)),
        ("parameters, dense / tables", _both(_whole(get("dense_parameters")), _whole(get("table_parameters")))),
        ("parameters", None if "table_parameters" in summary else _whole(get("dense_parameters"))),
        ("steps", _whole(get("steps"))),
        ("examples trained", _whole(get("examples"))),
        ("targets trained", _whole(get("weight"))),
        ("samples/s", _whole(get("samples_per_s"))),
        ("tokens/s", _whole(get("tokens_per_s"))),
        ("tokens/s a device", _whole(get("tokens_per_s_per_device"))),
        ("TFLOP/s a device", _decimals(get("tflops_per_s_per_device"))),
        ("MFU", _share_of_peak(summary)),
        ("step p50 / p95", _both(duration(get("step_p50_s")), duration(get("step_p95_s")))),
        ("waiting for data", None if waiting is None else f"{waiting:.1%}"),
        ("compilation", duration(get("compile_s"))),
        ("wall time", duration(get("wall_s"))),
        ("peak device memory", size(get("peak_device_bytes"))),
        ("peak RSS", size(get("peak_rss_bytes"))),
        ("error of the exchange", _decimals(get(exchange.ERROR))),
        ("residual of the exchange", _decimals(get(exchange.RESIDUAL))),
    ]
    return [(name, text) for name, text in rows if text is not None]


def number(value: float | None) -> str:
    """Four decimals; "undefined" for null and NaN."""
    return "undefined" if value is None or math.isnan(value) else f"{value:.4f}"


def duration(seconds: float | None) -> str | None:
    """Seconds in the unit that suits: "12.3 ms", "4.56 s", "3 min 20 s"."""
    if seconds is None or math.isnan(seconds):
        return None
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(count: float | None) -> str | None:
    """Bytes in MB or GB (powers of ten)."""
    if count is None:
        return None
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _decimals(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{value:.3g}"


def _share_of_peak(summary: Mapping[str, object]) -> str | None:
    """Model FLOPs over the peak of the chip, which is named: the number means nothing without it."""
    mfu, peak = figure(summary, "mfu"), figure(summary, "peak_tflops_per_s")
    if mfu is None or peak is None:
        return None
    return f"{mfu:.1%} of {peak:,.0f} TFLOP/s bf16, causal attention by half"


def _whole(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{round(value):,}"


def _both(first: str | None, second: str | None) -> str | None:
    return None if first is None or second is None else f"{first} / {second}"
