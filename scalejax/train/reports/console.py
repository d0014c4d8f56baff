"""Output of a run in a terminal: one line of progress, and the closing table beside the base rate."""

import math
from collections.abc import Mapping

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from scalejax.train.metrics.protocol import Described
from scalejax.train.reports import summary as summaries


def progress_columns() -> tuple[ProgressColumn, ...]:
    """Columns of `rich.progress.Progress`: step/total, speed, metrics of the window, time left.

    Add the task with `**progress_fields()` and pass `**progress_fields(...)` to each update that has new figures.
    """
    return (
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[rate]}"),
        TextColumn("{task.fields[quality]}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )


def progress_fields(rate: str = "", **metrics: float) -> dict[str, str]:
    """The texts of one progress line: how fast it goes, and metrics by name."""
    return {"rate": rate, "quality": "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())}


def closing_table(summary: Mapping[str, object], described: Described | None = None) -> Table:
    """The table that ends a run: every scored split beside the base rate, then speed and memory.

    Args:
      summary: The content of `summary.json` (see `scalejax.train.reports.summary`).
      described: What the run measures; None = what the keys of the summary show.
    """
    table = Table(
        title=str(summary.get("recipe", "")) or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("")
    table.add_column("value", justify="right", style="bold")
    sections = summaries.quality(summary, described)
    rows = [row for section in sections for row in section.rows]
    more = {"95 % interval": "interval", "base rate": "base"}
    more = {title: field for title, field in more.items() if any(getattr(row, field) for row in rows)}
    for title in more:
        table.add_column(title, justify="right", style="dim")
    for section in sections:
        table.add_section()
        table.add_row(f"[bold]{section.title}")
        for row in section.rows:
            table.add_row(f"  {row.name}", row.value, *(getattr(row, field) for field in more.values()))
    table.add_section()
    for name, value in summaries.speed(summary):
        table.add_row(name, value)
    return table


def count(value: float) -> str:
    """A number of at most three digits and a suffix: 1234567 -> "1.23M"."""
    if not math.isfinite(value):
        return "?"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"
