"""`scalejax bench`: time an operation against a peer, after asserting that both compute the same."""

import pathlib
from typing import Annotated

import typer

from scalejax.cli import environment, options, output


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A benchmark; --list names them.")] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="PEER", help="The peer to compare with, of those of the benchmark."),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="CASE", help="Only this case; may be repeated.")
    ] = None,
    data: Annotated[
        pathlib.Path | None, typer.Option("--data", metavar="PATH", help="Data of yours in place of the bundled one.")
    ] = None,
    json: options.JsonFile = None,
    show_names: Annotated[bool, typer.Option("--list", help="List the benchmarks and exit.")] = False,
) -> None:
    """Time a benchmark against a peer.

    Both must give equal outputs first; runs are interleaved, times are medians.
    """
    import scalejax.bench

    environment.prepare(cpu_devices=scalejax.bench.cpu_devices(name))
    if show_names:
        for known in scalejax.bench.names():
            print(known)
        return
    if name is None:
        raise typer.BadParameter("is missing. `scalejax bench --list` names the benchmarks.", param_hint="NAME")
    scalejax.bench.run(name, against=against, cases=case, data=data, json_path=json, console=output.console())
