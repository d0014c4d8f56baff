"""`summary.json`: the closing table of a run as one flat JSON object, and how its numbers are written out.

    recipe, date, device, mesh                        what ran, as texts
    dense_parameters, table_parameters, flops_per_example, tokens_per_example
    steps, examples                                   how much was trained
    weight                                            sum of weights; of a language model the targets it learnt from
    samples_per_s, step_p50_s, step_p95_s, data_wait_share, compile_s, wall_s, ...      see `timing.StepTimer.summary`
    peak_rss_bytes, peak_device_bytes                 see `timing.peak_memory`
    tokens_per_s, tokens_per_s_per_device, tflops_per_s_per_device, mfu     of a language model, see `dense_run`
    <split>_<metric>                                  quality; split is train, val, test or progressive
    <split>_<metric>_low, <split>_<metric>_high       95 % bootstrap interval of logloss, ne and auc

Metrics of a model without tables are loss (mean, in nats), perplexity (e to its power) and weight (over how much).
Those of the nodes of a graph are loss, accuracy and weight (how many nodes); `best_step` is that of the highest
accuracy on the split scored at intervals, `best_<split>_accuracy` that accuracy and `test_accuracy_at_best` what the
final split had there. Where labels are those of binary tasks, it is auc (mean over tasks) in place of accuracy, and
weight is how many labels are known. `nodes`, `edges` and `flops_per_step` describe the graph.
Those of a click model are those of `evaluation.evaluate`: examples, logloss, ne, auc, gauc, calibration, base_rate;
progressive validation has auc_hist and auc_error_bound instead of auc. With several tasks the key ends in "/task":
"test_auc_low/click". With `Exchange(spill="count")` there is also spilled_ids: those that the pass embedded as zeros,
for all tasks together. An undefined value is null. All fields are optional for a reader.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_PREFIXES = {"validation": "val"}
_SPLITS = {"test": "test", "val": "validation", "progressive": "progressive", "train": "train"}


def prefix(split: str) -> str:
    """What the keys of a split begin with: "validation" -> "val", other names unchanged."""
    return _PREFIXES.get(split, split)


def of_evaluation(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one evaluation as fields of the summary."""
    return {f"{prefix(split)}_{name}": value for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Row:
    """One metric as texts: its value, its interval ("" if none) and what the base rate scores ("" if nothing)."""

    name: str
    value: str
    interval: str
    base: str


@dataclasses.dataclass(frozen=True)
class Section:
    """The metrics of one split and task."""

    title: str
    rows: tuple[Row, ...]


def quality(summary: Mapping[str, Any]) -> list[Section]:
    """What the summary says of each scored split (test first) and task."""
    sections = []
    for start, split in _SPLITS.items():
        first = f"{start}_logloss"
        tasks = [key[len(first) :] for key in summary if key == first or key.startswith(first + "/")]
        sections += [_section(summary, start, split, task) for task in tasks]
        if f"{start}_loss" in summary:
            sections.append(_loss_section(summary, start, split))
    return sections


def _loss_section(summary: Mapping[str, Any], start: str, split: str) -> Section:
    loss = summary[f"{start}_loss"]
    for metric, name, base, of in (("accuracy", "accuracy", "", "nodes"), ("auc", "AUC", number(0.5), "labels")):
        if f"{start}_{metric}" in summary:
            found = [Row("loss", number(loss), "", ""), Row(name, number(summary[f"{start}_{metric}"]), "", base)]
            if (best := summary.get(f"{start}_{metric}_at_best")) is not None:
                found.append(Row(f"{name} at step {summary.get('best_step')}, the best", number(best), "", base))
            return Section(f"{split}: {_whole(summary.get(f'{start}_weight'))} {of}", tuple(found))
    rows = (
        Row("loss", number(loss), "", ""),
        Row("perplexity", number(summary.get(f"{start}_perplexity")), "", ""),
        Row("bits a target", number(None if loss is None else loss / math.log(2)), "", ""),
    )
    return Section(f"{split}: {_whole(summary.get(f'{start}_weight'))} targets", rows)


def _section(summary: Mapping[str, Any], start: str, split: str, task: str) -> Section:
    def get(metric: str) -> float | None:
        return summary.get(f"{start}_{metric}{task}")

    rate = get("base_rate")
    rows = [
        Row("LogLoss", number(get("logloss")), _interval(get, "logloss"), number(base_logloss(rate))),
        Row("NE", number(get("ne")), _interval(get, "ne"), number(1.0)),
    ]
    if get("auc_hist") is not None:
        bound = get("auc_error_bound")
        sure = "" if bound is None else f"± {bound:.4f} by binning"
        rows.append(Row("AUC", number(get("auc_hist")), sure, number(0.5)))
    else:
        rows.append(Row("AUC", number(get("auc")), _interval(get, "auc"), number(0.5)))
    if get("gauc") is not None:
        rows.append(Row("GAUC", number(get("gauc")), _interval(get, "gauc"), number(0.5)))
    rows.append(Row("calibration", number(get("calibration")), "", number(1.0)))
    spilled = summary.get(f"{start}_spilled_ids")
    if spilled is not None:
        rows.append(Row("ids without room", f"{spilled:,}", "", ""))
    examples = summary.get(f"{start}_examples")
    title = split + (f", {task[1:]}" if task else "")
    if examples is not None:
        title += f": {examples:,} examples"
    if rate is not None:
        title += f", {rate:.2%} positive"
    return Section(title, tuple(rows))


def base_logloss(rate: float | None) -> float | None:
    """LogLoss of predicting the base rate; None where it is missing, 0 or 1."""
    if rate is None or not 0 < rate < 1:
        return None
    return -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)


def _interval(get: Any, metric: str) -> str:
    low, high = get(f"{metric}_low"), get(f"{metric}_high")
    return "" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def speed(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of what the summary says of work, speed and memory."""
    get = summary.get
    rows: list[tuple[str, str | None]] = [
        ("device", get("device")),
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
        ("waiting for data", None if get("data_wait_share") is None else f"{get('data_wait_share'):.1%}"),
        ("compilation", duration(get("compile_s"))),
        ("wall time", duration(get("wall_s"))),
        ("peak device memory", size(get("peak_device_bytes"))),
        ("peak RSS", size(get("peak_rss_bytes"))),
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


def _share_of_peak(summary: Mapping[str, Any]) -> str | None:
    """Model FLOPs over the peak of the chip, which is named: the number means nothing without it."""
    mfu, peak = summary.get("mfu"), summary.get("peak_tflops_per_s")
    if mfu is None or peak is None:
        return None
    return f"{mfu:.1%} of {peak:,.0f} TFLOP/s bf16, causal attention by half"


def _whole(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{round(value):,}"


def _both(first: str | None, second: str | None) -> str | None:
    return None if first is None or second is None else f"{first} / {second}"
