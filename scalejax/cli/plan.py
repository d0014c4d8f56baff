"""`scalejax plan`: compile a recipe for a machine that is not here."""

from typing import Annotated

import typer

from scalejax.cli import environment, options, output


def plan(
    recipe: options.Recipe,
    topology: Annotated[
        str,
        typer.Option("--topology", metavar="CHIP:AxB[xC]", help="The machine, e.g. v5e:2x2, v5p:2x2x1, v6e:4x4."),
    ],
    mesh: options.MeshSizes = None,
    sets: options.Sets = None,
    json: options.JsonFile = None,
) -> None:
    """Compile a recipe for a TPU topology that is not here.

    Prints whether it fits, bytes per chip by kind, FLOPs, every collective with its bytes, and the predicted step.
    """
    environment.prepare()
    from scalejax import configs

    experiment = configs.load(recipe, sets or [])
    import scalejax.plan

    result = scalejax.plan.plan(experiment, topology, mesh)
    result.render(output.console())
    if json is not None:
        output.write_json(json, result.to_json())
