"""Several runs on one page: `write_comparison` puts their results, curves and differences in configuration together.

The first run is the reference. A run is called better or worse only where the bootstrap interval of the *paired*
difference excludes 0 (`bootstrap.compare`), which needs the predictions of both runs on the same examples
(`evaluation/<split>.npz`); elsewhere the page says why nothing is claimed.
"""

import os
import pathlib
from collections.abc import Iterator, Sequence

from scalejax.errors import UserError
from scalejax.train import disk
from scalejax.train.metrics import bootstrap, evaluation
from scalejax.train.reports import console, figures, page
from scalejax.train.reports import summary as summaries
from scalejax.train.reports.report import RunFiles, flatten, read_run

_TITLES = {"logloss": "LogLoss", "ne": "NE", "auc": "AUC"}
"""Of what `bootstrap.compare` compares."""


def write_comparison(folders: Sequence[pathlib.Path], target: pathlib.Path | None = None) -> pathlib.Path:
    """Writes a page that compares runs.

    Args:
      folders: Run folders; the first is the reference.
      target: File to write; None = `comparison.html` in the folder that holds the first run.
    Returns:
      The file.
    Raises:
      UserError: fewer than two folders, a folder that is no run, a damaged file, or the disk refuses.
    """
    if len(folders) < 2:
        raise UserError(f"A comparison needs two run folders or more; got {len(folders)}. Name the folders to compare.")
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    if target is None:
        target = runs[0].path.absolute().parent / "comparison.html"
    disk.write_atomically(target, _render(runs, names))
    return target


def _render(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    return page.document(
        "Comparison of runs",
        [
            page.header("Comparison", [("runs", str(len(runs))), ("reference", names[0])]),
            page.section("Results", *_results(runs, names)),
            page.section("Paired differences", *_differences(runs, names)),
            page.section("Curves", page.grid(_curves(runs, names))),
            page.section("What differs", _configuration(runs, names)),
        ],
    )


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Folder names, with as many parents as it takes to tell them apart."""
    parts = [run.path.absolute().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"Comparison: a run folder was named twice among {', '.join(str(r.path) for r in runs)}.")


def _results(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    titles = dict.fromkeys(_kind(s) for run in runs for s in summaries.quality(run.summary, run.described))
    for title in titles:
        sections = [
            next((s for s in summaries.quality(run.summary, run.described) if _kind(s) == title), None) for run in runs
        ]
        measured = dict.fromkeys(
            row.column or row.name for section in sections if section is not None for row in section.rows
        )
        columns = [*measured, "samples/s", "wall time"]
        rows: list[list[page.Cell]] = []
        for run, name, section in zip(runs, names, sections, strict=True):
            cells: dict[str, str] = {}
            if section is not None:
                rate = summaries.figure(run.summary, "samples_per_s")
                for row in section.rows:
                    cells[row.column or row.name] = row.value + (f"  ({row.interval})" if row.interval else "")
                cells["samples/s"] = "" if rate is None else console.count(rate)
                cells["wall time"] = summaries.duration(summaries.figure(run.summary, "wall_s")) or ""
            rows.append([name, run.name, *((cells.get(column, ""), "n") for column in columns)])
        head: list[page.Cell] = ["run", "recipe", *((column, "n") for column in columns)]
        yield page.card(f"{title} (95 % intervals in brackets)", page.table(head, rows))


def _kind(section: summaries.Section) -> str:
    return section.title.split(":")[0]


def _differences(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    for content in runs[0].diagrams:
        split = content["split"]
        reference = evaluation.read_predictions(runs[0].path, split)
        for t, task in enumerate(content["tasks"]):
            title = f"{split}, {task['name']}" if len(content["tasks"]) > 1 else split
            rows: list[list[page.Cell]] = []
            for run, name in zip(runs[1:], names[1:], strict=True):
                other = evaluation.read_predictions(run.path, split)
                rows += _judged(name, reference, other, t)
            head: list[page.Cell] = [
                "run",
                "metric",
                ("difference", "n"),
                ("relative", "n"),
                ("95 % interval", "n"),
                "verdict",
            ]
            yield page.card(f"{title}: against {names[0]}, on the same resampled examples", page.table(head, rows))


def _judged(
    name: str, reference: evaluation.Predictions | None, other: evaluation.Predictions | None, task: int
) -> list[list[page.Cell]]:
    if reference is None or other is None:
        return [[name, ("no predictions were kept, so nothing is claimed", "dim")]]
    if not reference.same_examples(other):
        return [[name, ("scored on other examples, so nothing is claimed", "dim")]]
    judged = bootstrap.compare(
        reference.labels[:, task], reference.predictions[:, task], other.predictions[:, task], reference.weights
    )
    rows: list[list[page.Cell]] = []
    for i, (metric, c) in enumerate(judged.items()):
        kind = "" if c.verdict == "no difference shown" else c.verdict
        d = c.difference
        rows.append(
            [
                name if i == 0 else "",
                _TITLES[metric],
                (f"{d.value:+.5f}", "n"),
                (f"{c.percent:+.3f} %", "n"),
                (f"{d.low:+.5f} to {d.high:+.5f}", "n dim"),
                (c.verdict, kind),
            ]
        )
    return rows


def _curves(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    described = {value.name: value for run in runs for value in run.described.values}
    for value in described.values():
        if value.shown != "table and curve":
            continue
        evaluated: dict[str, list[tuple[float, float]]] = {}
        for run, name in zip(runs, names, strict=True):
            splits = [r["split"] for r in run.evaluations if r.get(value.name) is not None]
            repeated = max(dict.fromkeys(splits), key=splits.count, default=None)  # the split scored at intervals
            points = [(r["step"], r.get(value.name)) for r in run.evaluations if r["split"] == repeated]
            if len(usable := figures.finite(points)) > 1:
                evaluated[name] = usable
        if evaluated:
            task = value.name.partition("/")[2]
            label = f"{value.title}, {task}" if task else value.title
            yield page.picture(figures.overlay(label, evaluated), label, f"{label} of the evaluations at intervals.")


def _configuration(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    flat = [dict(flatten(run.experiment.get("experiment", run.experiment))) for run in runs]
    keys = [key for key in dict.fromkeys(k for f in flat for k in f) if len({f.get(key) for f in flat}) > 1]
    if not keys:
        return page.paragraph("All runs have the same experiment.")
    rows: list[list[page.Cell]] = [[(key, "key"), *((f.get(key, "–"), "val") for f in flat)] for key in keys]
    return page.card("Settings that are not the same in all runs", page.table(["", *names], rows))
