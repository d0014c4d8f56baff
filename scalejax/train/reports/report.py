"""`report.html`: a run folder as one page, its curves and diagrams as pictures inside the file.

It is built from the files of the folder alone (`summary.json`, `metrics.jsonl`, `timing.jsonl`, `evaluation/`,
`experiment.json`, `environment.json`); what is missing is left out, so that the report of a run that was stopped is the
report of what it did. `comparison.py` puts several runs beside each other.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scalejax import json_reading
from scalejax.errors import UserError
from scalejax.train import disk, run_folder
from scalejax.train.metrics import evaluation
from scalejax.train.metrics.protocol import Described, Value
from scalejax.train.reports import console, exchange, figures, page
from scalejax.train.reports import summary as summaries

_STEPS = (
    Value(name="grad_norm", title="Gradient norm", unit="mean over the window of the global norm before clipping"),
    *exchange.VALUES,
)
"""Curves of every run, and of those whose exchange compresses."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What the files of a run folder say; a missing file is empty.

    Attributes:
      path: The folder.
      summary, experiment, environment: Content of the JSON files.
      windows, evaluations: Records of `metrics.jsonl` by kind, in order.
      timing: Records of `timing.jsonl`.
      diagrams: Content of `evaluation/*.json`.
      pictures: Content of `evaluation/pictures/*.json`.
      described: What the run measures.
    """

    path: pathlib.Path
    summary: Mapping[str, object]
    experiment: Mapping[str, Any]
    environment: Mapping[str, Any]
    windows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    timing: Sequence[Mapping[str, Any]]
    diagrams: Sequence[evaluation.Diagrams]
    pictures: Sequence[evaluation.Picture]
    described: Described

    @property
    def name(self) -> str:
        """The recipe, or the folder's name where none is recorded."""
        return str(self.summary.get("recipe") or self.experiment.get("recipe") or self.path.name)

    @functools.cached_property
    def predictions(self) -> tuple[tuple[str, str, str], ...]:
        """Pictures of what was scored: the text of each SVG, its title and its caption."""
        return tuple(_predictions(self))


def read_run(folder: pathlib.Path) -> RunFiles:
    """Reads a run folder.

    Raises:
      UserError: it is no run folder, or a file in it is damaged.
    """
    folder = pathlib.Path(folder)
    if not any((folder / name).exists() for name in ("experiment.json", "summary.json", "metrics.jsonl")):
        raise UserError(
            f"{folder} is not a run folder: it has no experiment.json, summary.json or metrics.jsonl. Give the folder "
            "that `scalejax train` printed."
        )
    lines = run_folder.read_lines(folder / "metrics.jsonl")
    summary = _read_object(folder / "summary.json")
    return RunFiles(
        path=folder,
        summary=summary,
        experiment=_read_object(folder / "experiment.json"),
        environment=_read_object(folder / "environment.json"),
        windows=[r for r in lines if r.get("kind") == "window"],
        evaluations=[r for r in lines if r.get("kind") == "evaluation"],
        timing=run_folder.read_lines(folder / "timing.jsonl"),
        diagrams=evaluation.read_diagrams(folder),
        pictures=evaluation.read_pictures(folder),
        described=read_described(folder) or summaries.known(lines),
    )


def read_described(folder: pathlib.Path) -> Described | None:
    """What a run measures, as its folder says; None where an earlier version wrote the folder.

    Raises:
      UserError: the file is damaged.
    """
    path = folder / run_folder.MEASURES
    content = _read_object(path)
    try:
        return Described.from_dict(content) if content else None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}). Bring it back from a copy, or remove it.") from error


def read_advice(folder: pathlib.Path) -> list[list[str]]:
    """What can be done with the model of a run: arguments of `scalejax`, "{run}" being the folder, and what for."""
    return _read_object(folder / run_folder.MEASURES).get("advice", [])


def write_report(folder: pathlib.Path, target: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the report of a run.

    Args:
      folder: Run folder.
      target: File to write; None = `report.html` in the folder.
    Returns:
      Its path.
    Raises:
      UserError: no run folder, a damaged file, or the disk refuses.
    """
    return write(read_run(folder), target)


def write(run: RunFiles, target: pathlib.Path | None = None) -> pathlib.Path:
    """As `write_report`, of files that were read."""
    if target is None:
        target = run.path / "report.html"
    disk.write_atomically(target, render(run))
    return target


def render(run: RunFiles) -> str:
    """The report of a run as HTML."""
    return page.document(
        f"{run.name}: report",
        [
            page.header(run.name, _facts(run)),
            _tiles(run),
            page.section("Results", page.grid(_results(run))),
            page.section("Curves", *_warnings(run), page.grid(_curves(run))),
            page.section("Progressive validation", page.grid(_progressive(run))),
            page.section("Predictions", page.grid([page.picture(*found) for found in run.predictions])),
            page.section("Time", page.grid(_time(run))),
            page.section("Configuration", *_configuration(run)),
            f"<footer>scalejax {page.text(str(run.environment.get('scalejax', '')))} · "
            f"{page.text(run.path.absolute().name)}</footer>",
        ],
    )


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    devices = run.environment.get("devices")
    device = run.summary.get("device") or (f"{devices['count']} x {devices['kind']}" if devices else None)
    mesh = run.summary.get("mesh") or " ".join(f"{a}={n}" for a, n in run.environment.get("mesh", {}).items())
    commit = run.environment.get("commit")
    facts = [
        ("date", run.summary.get("date") or str(run.environment.get("started", ""))[:10]),
        ("device", device),
        ("mesh", mesh),
        ("commit", commit and str(commit)[:10] + ("+" if str(commit).endswith("+") else "")),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _tiles(run: RunFiles) -> str:
    sections = summaries.quality(run.summary, run.described)
    items = []
    if sections:
        split = sections[0].title.split(":")[0]
        titles = [v.title for v in run.described.values if v.better != "neither"]
        for row in sections[0].rows:
            if row.name in titles[:3]:
                items.append((f"{split} {row.name}", row.value, f"base rate {row.base}" if row.base else ""))
    figure = functools.partial(summaries.figure, run.summary)
    rate, tokens = figure("samples_per_s"), figure("tokens_per_s")
    if tokens is not None:
        items.append(("tokens/s", console.count(tokens), "training, without warm-up"))
    elif rate is not None:
        items.append(("samples/s", console.count(rate), "training, without warm-up"))
    wall = summaries.duration(figure("wall_s"))
    if wall is not None:
        compiled = summaries.duration(figure("compile_s"))
        items.append(("wall time", wall, f"compilation {compiled}" if compiled else ""))
    if not items and not run.summary:
        last = f"its records end at step {run.windows[-1]['step']:,}" if run.windows else "it has no records yet"
        return page.paragraph(f"This run has not finished: {last}.")
    return page.tiles(items)


def _results(run: RunFiles) -> Iterator[str]:
    for section in summaries.quality(run.summary, run.described):
        rows = [[row.name, (row.value, "n"), (row.interval, "n dim"), (row.base, "n dim")] for row in section.rows]
        head = ["", ("value", "n"), ("95 % interval", "n"), ("base rate", "n")]
        yield page.card(section.title, page.table(head, rows))
    speed = summaries.speed(run.summary)
    if speed:
        yield page.card("work, speed and memory", page.table([], [[name, (value, "n")] for name, value in speed]))
    parts: Any = run.summary.get("phases")
    if parts:
        scored = [
            (f"{split}, {_titled(value)}", f"{start}_{value.name}")
            for start, split in summaries.SPLITS.items()
            for value in run.described.values
            if value.shown == "table and curve" and any(f"{start}_{value.name}" in part for part in parts)
        ]
        seconds = {"train_s": "training", "compile_s": "compilation", "handover_s": "hand-over"}
        titles = ("steps", "TFLOP", *seconds.values(), *(title for title, _ in scored))
        head = ["phase", *((title, "n") for title in titles)]
        rows = [
            [
                part["phase"] or "first",
                (f"{part['steps']:,}", "n"),
                (f"{part['flops'] / 1e12:.4g}" if "flops" in part else "", "n"),
                *((summaries.duration(part.get(name)) or "", "n") for name in seconds),
                *((summaries.number(part[key]) if key in part else "", "n") for _, key in scored),
            ]
            for part in parts
        ]
        yield page.card("phases", page.table(head, rows))


def _warnings(run: RunFiles) -> list[str]:
    residuals = [(r["step"], r.get(exchange.RESIDUAL)) for r in run.windows]
    return [page.paragraph(f"Warning: {text}") for text in exchange.warnings(residuals)]


def _curves(run: RunFiles) -> Iterator[str]:
    named = [r for r in run.evaluations if not _is_progressive(r)]
    splits = list(dict.fromkeys(r["split"] for r in named))
    for value in (*run.described.values, *_STEPS):
        if value.shown != "table and curve":
            continue
        title = _titled(value)
        windowed = [(r["step"], r.get(value.window or value.name)) for r in run.windows]
        windows = figures.finite(windowed)
        evaluated = {
            split: figures.finite([(r["step"], r.get(value.name)) for r in named if r["split"] == split])
            for split in splits
        }
        evaluated = {split: points for split, points in evaluated.items() if points}
        if not windows and not evaluated:
            continue
        bound, window = value.bound or "", value.window or ""
        band = [r.get(bound) or 0 for r in run.windows if r.get(window) is not None]
        base = ("base rate", value.base) if value.base is not None else _base(named, value)
        band = band if len(band) == len(windows) else []
        svg = figures.curve(title, windows, evaluated, band=band, base=base, phases=_phases(run))
        caption = f"{title}: {value.unit}." if value.unit else f"{title}."
        yield page.picture(svg, f"{title} over the steps", caption)
    rates = figures.finite([(r["step"], r.get("learning_rate")) for r in run.windows])
    if rates:
        yield page.picture(figures.learning_rate(rates), "learning rate", "Learning rate of the optimizer.")


def _phases(run: RunFiles) -> dict[str, int]:
    """Where each phase begins, as the record of the experiment has it."""
    recorded = run.experiment.get("experiment")
    fields = recorded.get("fields", {}) if isinstance(recorded, Mapping) else {}
    found, start = {}, fields.get("steps", 0)
    for phase in fields.get("phases", ()):
        found[phase["fields"]["name"]] = start
        start += phase["fields"]["steps"]
    return found


def _titled(value: Value) -> str:
    title, task = value.title[:1].upper() + value.title[1:], value.name.partition("/")[2]
    return f"{title}, {task}" if task else title


def _base(evaluations: Sequence[Mapping[str, Any]], value: Value) -> tuple[str, float] | None:
    name, slash, task = value.name.partition("/")
    for record in reversed(evaluations):
        found = record.get(f"{name}_base{slash}{task}")
        if found is not None:
            return f"base rate, {record['split']}", found
    return None


def _is_progressive(record: Mapping[str, object]) -> bool:
    """Progressive validation scores by histogram; the named splits exactly."""
    return any(key == "auc_hist" or key.startswith("auc_hist/") for key in record)


def _progressive(run: RunFiles) -> Iterator[str]:
    slices = [r for r in run.evaluations if _is_progressive(r)]
    for value in run.described.values if slices else ():
        key = value.window or value.name
        present = [r for r in slices if r.get(key) is not None]
        if not present or value.shown != "table and curve":
            continue
        title = _titled(value)
        svg = figures.by_day(title, [r["split"] for r in present], [r[key] for r in present], value.base)
        yield page.picture(svg, f"{title} by day", f"{title} of each slice, scored before it was trained on.")


def _predictions(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    for content in run.diagrams:
        for task in content["tasks"]:
            of = f"{content['split']}, {task['name']}" if len(content["tasks"]) > 1 else content["split"]
            examples = f"{content['examples']:,} examples"
            yield (
                figures.reliability(task["reliability"]),
                f"reliability diagram, {of}",
                f"Reliability on {of} ({examples}): bins of equal weight, 95 % Wilson intervals.",
            )
            yield (
                figures.scores(task["histogram"]),
                f"score histogram, {of}",
                f"Scores on {of}: density of predictions among negatives and among positives.",
            )
    for picture in run.pictures:
        yield picture.svg, picture.name, f"{picture.caption} ({picture.split})"


_PHASES = {
    "blocked_s": "device steps",
    "dispatch_s": "dispatch",
    "data_wait_s": "waiting for data",
    "checkpoint_s": "checkpoints",
    "compile_s": "compilation",
    "handover_s": "hand-over",
    "evaluation_s": "evaluation",
}


def _time(run: RunFiles) -> Iterator[str]:
    usable = [r for r in run.timing if r.get("step_p50_s") is not None and r.get("step_p95_s") is not None]
    if not usable:
        return
    svg = figures.step_times(
        [r["step"] for r in usable], [r["step_p50_s"] for r in usable], [r["step_p95_s"] for r in usable]
    )
    yield page.picture(
        svg, "step time by window", "Time between the completions of two steps: median and 95th percentile by window."
    )
    parts = {name: sum(r.get(key) or 0.0 for r in run.timing) for key, name in _PHASES.items()}
    # `wall_s` of a window leaves these three out; what no phase claims is the loop itself.
    booked = sum(parts[_PHASES[key]] for key in _PHASES if key not in ("compile_s", "handover_s", "evaluation_s"))
    parts["everything else"] = max(0.0, sum(r.get("wall_s") or 0.0 for r in run.timing) - booked)
    svg = figures.shares({name: seconds for name, seconds in parts.items() if seconds > 0})
    yield page.picture(svg, "time by what it was spent on", "Wall time of the loop, from its first to its last window.")


def _configuration(run: RunFiles) -> Iterator[str]:
    if run.experiment:
        rows = flatten(run.experiment.get("experiment", run.experiment))
        sets = run.experiment.get("sets") or []
        if sets:
            yield page.paragraph("Overrides: " + ", ".join(map(str, sets)))
        yield page.details("Experiment", page.table([], [[(key, "key"), (value, "val")] for key, value in rows]))
    if run.environment:
        rows = flatten(run.environment)
        yield page.details("Environment", page.table([], [[(key, "key"), (value, "val")] for key, value in rows]))


def flatten(value: object, path: str = "") -> list[tuple[str, str]]:
    """Nested data as (path, text): dataclasses written as {"type", "fields"} give their type and then their fields."""
    if isinstance(value, Mapping) and set(value) == {"type", "fields"}:
        short = str(value["type"]).rpartition(".")[2]
        own = [(path, short)] if path else []
        return own + [row for k, v in value["fields"].items() for row in flatten(v, f"{path}.{k}" if path else k)]
    if isinstance(value, Mapping) and value:
        return [row for k, v in value.items() for row in flatten(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [row for i, item in enumerate(value) for row in flatten(item, f"{path}[{i}]")]
    return [(path, value if isinstance(value, str) else json.dumps(value))]


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json_reading.read(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Remove it, or bring it back from a copy.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object. Remove it, or bring it back from a copy.")
    return content
