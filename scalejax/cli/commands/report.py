"""`scalejax report`: a run as one page, or several beside each other."""

import pathlib
from typing import Annotated

import typer

from scalejax.cli import environment


def report(
    run_folders: Annotated[
        list[pathlib.Path],
        typer.Argument(
            metavar="RUN_FOLDER", help="Folders that `scalejax train` wrote; of several, the first is the reference."
        ),
    ],
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Default: report.html in the run folder, or comparison.html beside the first.",
        ),
    ] = None,
) -> None:
    """Write one HTML file about a run, or about several beside each other.

    Without --output, the report of a run replaces the one that training wrote.
    """
    environment.prepare()
    from scalejax.train.reports import comparison
    from scalejax.train.reports import report as reports

    if len(run_folders) == 1:
        print(reports.write_report(run_folders[0], output))
    else:
        print(comparison.write_comparison(run_folders, output))
