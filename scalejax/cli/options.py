"""Arguments and options that several commands share."""

import pathlib
from typing import Annotated

import typer

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A name from `scalejax recipes`, module:function, or a file of yours as path.py:function.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change one field, e.g. optimizer.learning_rate=1e-3; may be repeated. `scalejax recipes RECIPE` lists "
        "every path.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFile = Annotated[
    pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.")
]
RunFolder = Annotated[pathlib.Path, typer.Argument(metavar="RUN_FOLDER", help="A folder that `scalejax train` wrote.")]
RecipeFile = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="PATH.PY:FUNCTION",
        help="The recipe again, if the run came from one of yours: code is never run because a folder names it.",
    ),
]
MeshSizes = Annotated[
    str | None,
    typer.Option("--mesh", metavar="AXIS=N,...", help="Devices per mesh axis, e.g. fsdp=4,tensor=2."),
]
CpuDevices = Annotated[
    int | None,
    typer.Option("--cpu-devices", metavar="N", min=1, help="Run on N virtual CPU devices instead of an accelerator."),
]
Coordinator = Annotated[
    str | None,
    typer.Option("--coordinator", metavar="HOST:PORT", help="Several processes: where process 0 listens."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", metavar="N", min=1, help="Several processes: how many there are.")
]
ProcessId = Annotated[
    int | None, typer.Option("--process-id", metavar="I", min=0, help="Several processes: which one this is, from 0.")
]
