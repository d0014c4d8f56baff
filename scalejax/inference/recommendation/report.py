"""A report on low precision: bytes, time, normalised entropy and where it was lost; as JSON and as tables."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from scalejax import units
from scalejax.inference.recommendation import diagnosis, precision
from scalejax.inference.recommendation.click_model import Inputs, Labelled
from scalejax.inference.recommendation.lowering import Lowered
from scalejax.inference.recommendation.search import PrecisionChoice


def measure(
    lowered: Lowered, examples: Labelled, *, calibration: Sequence[Inputs] = (), repeats: int = 30
) -> dict[str, Any]:
    """Scores a lowered model beside its float model on the same examples.

    Args:
      lowered: The model.
      examples: That quality and time are measured on; time on the first batch.
      calibration: Batches for the SQNR of operators; none = no "operators" in the result.
      turns: Timed calls of each model, in turn.

    Returns:
      JSON values: "bytes", "quality", "latency" and "operators".
    """
    model = lowered.model
    wanted = examples.scores(lambda inputs: model.score(*model.arrays, inputs))
    found = examples.scores(lambda inputs: lowered.score(lowered.arrays, inputs))
    ne, low_ne, gap = examples.ne(wanted), examples.ne(found), examples.gap(wanted, found)
    auc_gap = examples.auc_gap(wanted, found)
    wide = precision.uniform(model)
    names = precision.names(model)
    sizes = {
        kind: [
            sum(precision.bytes_of(model, n, p.of(n)) for n in names if n[0] == kind)
            for p in (wide, lowered.precisions)
        ]
        for kind in ("table", "operator")
    }
    float_s, lowered_s, ratio = _times(lowered, examples.inputs[0], repeats)
    return {
        "step": model.step,
        "examples": len(examples.labels),
        "bytes": {
            "tables": sizes["table"][1],
            "tables_float32": sizes["table"][0],
            "dense": sizes["operator"][1],
            "dense_float32": sizes["operator"][0],
            "share": (sizes["table"][1] + sizes["operator"][1]) / (sizes["table"][0] + sizes["operator"][0]),
        },
        "quality": {
            "ne_float32": ne,
            "ne": low_ne,
            "gap": gap.value,
            "gap_low": gap.low,
            "gap_high": gap.high,
            "auc_float32": examples.auc(wanted),
            "auc": examples.auc(found),
            "auc_gap": auc_gap.value,
            "auc_gap_low": auc_gap.low,
            "auc_gap_high": auc_gap.high,
            "largest_logit_difference": float(np.abs(found - wanted).max()),
        },
        "latency": {
            "device": jax.devices()[0].device_kind,
            "batch": int(examples.inputs[0].dense.shape[0]),
            "float32_s": float_s,
            "s": lowered_s,
            "ratio": ratio,
        },
        "operators": [
            {
                "kind": line.kind,
                "name": line.name,
                "precision": line.precision,
                "bytes": precision.bytes_of(model, (line.kind, line.name), line.precision) if line.precision else 0,
                "sqnr_alone_db": _json(line.alone),
                "sqnr_within_db": _json(line.within),
            }
            for line in (diagnosis.diagnose(lowered, calibration) if calibration else ())
        ],
    }


def with_search(measured: dict[str, Any], found: PrecisionChoice, budget: float) -> dict[str, Any]:
    """The same with what a search did."""
    return measured | {
        "search": {
            "budget": budget,
            "gap": found.gap._asdict(),
            "held_out_gap": found.held_out_gap._asdict(),
            "within_budget_on_held_out": measured["quality"]["gap"] <= budget,
            "sensitivity": [
                {"kind": kind, "name": name, "precision": chosen, "gap": gap}
                for ((kind, name), chosen), gap in found.sensitivity.items()
            ],
            "path": found.path,
        }
    }


def tables(measured: dict[str, Any]) -> list[Table]:
    """The same for a terminal: the whole, then every table and operator."""
    size, quality, latency = measured["bytes"], measured["quality"], measured["latency"]
    whole = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    whole.add_column("")
    for name in ("float32", "lowered", "ratio"):
        whole.add_column(name, justify="right")
    for what in ("tables", "dense"):
        wide, narrow = size[f"{what}_float32"], size[what]
        whole.add_row(f"{what}, bytes", units.size(wide), units.size(narrow), f"{narrow / max(wide, 1):.1%}")
    for name, metric, gap in (("NE", "ne", "gap"), ("AUC", "auc", "auc_gap")):
        whole.add_row(name, f"{quality[f'{metric}_float32']:.6f}", f"{quality[metric]:.6f}", f"{quality[gap]:+.4%}")
        whole.add_row("  95 % interval", "", "", f"{quality[f'{gap}_low']:+.4%} to {quality[f'{gap}_high']:+.4%}")
    whole.add_row(
        f"batch of {latency['batch']:,} on {latency['device']}",
        units.duration(latency["float32_s"]),
        units.duration(latency["s"]),
        f"{latency['ratio']:.2f}",
    )
    if not measured["operators"]:
        return [whole]
    alone = {}
    for entry in measured.get("search", {}).get("sensitivity", ()):
        alone[entry["kind"], entry["name"], entry["precision"]] = entry["gap"]
    each = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("", "left"), ("precision", "left"), ("bytes", "right"), ("SQNR alone", "right")):
        each.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    each.add_column("within", justify="right")
    each.add_column("NE gap alone", justify="right")
    for line in measured["operators"]:
        gap = alone.get((line["kind"], line["name"], line["precision"]))
        each.add_row(
            f"{line['kind']} {line['name']}" if line["precision"] else line["name"],
            line["precision"],
            units.size(line["bytes"]) if line["precision"] else "",
            _db(line["sqnr_alone_db"]),
            _db(line["sqnr_within_db"]),
            "" if gap is None else f"{gap:+.4%}",
        )
    return [whole, each]


def _times(lowered: Lowered, inputs: Inputs, repeats: int) -> tuple[float, float, float]:
    """Medians of seconds of the float and the lowered model in turn, and of the ratio of neighbouring turns."""
    model = lowered.model

    def timed(function: Callable[..., jax.Array], *args: object) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(function(*args))
        return time.perf_counter() - begun

    pairs = []
    for _ in range(repeats):
        first = timed(model.score, *model.arrays, inputs)
        pairs.append((first, timed(lowered.score, lowered.arrays, inputs)))
    both = np.array(pairs)
    return float(np.median(both[:, 0])), float(np.median(both[:, 1])), float(np.median(both[:, 1] / both[:, 0]))


def _json(db: float) -> float | str | None:
    if math.isnan(db):
        return None
    return ("exact" if db > 0 else "not finite") if math.isinf(db) else db


def _db(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.1f} dB"
