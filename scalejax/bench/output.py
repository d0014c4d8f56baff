"""Results of benchmarks: a table while they are made, JSON for programs, Markdown for the repository."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from rich.table import Table

from scalejax.bench.harness import Result
from scalejax.errors import UserError

_COLUMNS = ("benchmark", "case", "ours", "peer", "peer's", "ratio", "spread", "examples/s")


def table(results: Sequence[Result]) -> Table:
    """A table for the terminal; ratio = peer's time / ours, so above 1 is faster than the peer."""
    drawn = Table(title=_title(results), title_justify="left", caption="ratio = peer's time / ours: above 1 is faster")
    for column in _COLUMNS:
        drawn.add_column(column, justify="left" if column in ("benchmark", "case", "peer") else "right", no_wrap=True)
    for result in results:
        drawn.add_row(*_cells(result))
    return drawn


def line(result: Result) -> str:
    """One result in one line."""
    text = f"{result.name} {result.case}: {duration(result.ours_s)}, spread {result.spread:.1%}"
    if result.peer is None:
        return text
    return f"{text}; {result.peer} {duration(result.peer_s)}, ratio {result.ratio:.2f}"


def figures_table(results: Sequence[Result]) -> Table:
    """What benchmarks found besides times: one line a figure, one column a case."""
    drawn = Table(title="Figures", title_justify="left")
    drawn.add_column("figure")
    for result in results:
        drawn.add_column(f"{result.name} {result.case}", justify="right")
    for name in _figure_names(results):
        drawn.add_row(name, *(_figure(result, name) for result in results))
    return drawn


def markdown(results: Sequence[Result], command: str) -> str:
    """A section for a file in benchmarks/results: command, device, date, commit, table."""
    lines = [
        f"`{command}`",
        "",
        _title(results),
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(_cells(result)) + " |" for result in results),
    ]
    if names := _figure_names(results):
        lines += [
            "",
            "| figure | " + " | ".join(result.case for result in results) + " |",
            "|---" * len(results) + "|---|",
        ]
        lines += [f"| {name} | " + " | ".join(_figure(result, name) for result in results) + " |" for name in names]
    return "\n".join(lines) + "\n"


def to_json(results: Sequence[Result]) -> str:
    """A JSON array, one object a line."""
    rows = ",\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
    return f"[\n{rows}\n]\n"


def from_json(text: str) -> list[Result]:
    """Reads what `to_json` wrote."""
    return [Result(**row) for row in json.loads(text)]


def check_writable(path: pathlib.Path) -> None:
    """Finds out before minutes of measuring that the file at its end cannot be written.

    Raises:
      UserError: the folder does not exist, or the file cannot be opened for writing.
    """
    if not path.parent.is_dir():
        raise UserError(f"--json: folder {path.parent} does not exist. Create it, or name another file.")
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise UserError(f"--json: cannot write {path}: {error.strerror}. Name another file.") from error


def duration(seconds: float | None) -> str:
    """Seconds with a unit that suits them."""
    if seconds is None:
        return "-"
    # 999.5 would be shown with three digits as 1e+03.
    for limit, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _figure_names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.figures))


def _figure(result: Result, name: str) -> str:
    return f"{result.figures[name]:.4g}" if name in result.figures else "-"


def _title(results: Sequence[Result]) -> str:
    return "; ".join(sorted({f"{result.device}, {result.date}, commit {result.commit}" for result in results}))


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        result.case,
        duration(result.ours_s),
        result.peer or "-",
        duration(result.peer_s),
        "-" if result.ratio is None else f"{result.ratio:.2f}",
        f"{result.spread:.1%}",
        f"{result.examples / result.ours_s:,.0f}",
    )
