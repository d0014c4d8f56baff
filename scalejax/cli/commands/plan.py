"""`scalejax plan`: compile a recipe for a machine that is not here."""

from typing import Annotated

import typer

from scalejax.cli import environment, options, output
from scalejax.errors import UserError


def plan(
    recipe: options.Recipe,
    topology: Annotated[
        str,
        typer.Option("--topology", metavar="CHIP:AxB[xC]", help="The machine, e.g. v5e:2x2, v5p:2x2x1, v6e:4x4."),
    ],
    mesh: options.MeshSizes = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Find the mesh and the rematerialisation of a decoder; compiles at most five."),
    ] = False,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="NAME", help="A phase of the recipe. Default: what precedes them.")
    ] = None,
    sets: options.Sets = None,
    json: options.JsonFile = None,
) -> None:
    """Compile a recipe for a TPU topology that is not here.

    Prints whether it fits, bytes per chip by kind, FLOPs, every collective with its bytes, and the predicted step. With
    --search, meshes and rematerialisation policies are judged by arithmetic, and the best few are compiled and ranked.
    """
    named = [one for one in sets or [] if one.strip().startswith("placement.mesh")]
    if search and (mesh is not None or named):
        given = f"--mesh {mesh}" if mesh is not None else f"--set {named[0]}"
        raise UserError(f"--search finds the mesh; got {given} too. Leave one of them out.")
    if mesh is not None and named:
        raise UserError(f"the mesh is given twice: --mesh {mesh} and --set {named[0]}. Leave one of them out.")
    environment.prepare()
    from scalejax import configs

    experiment = configs.load(recipe, sets or [])
    import scalejax.plan
    from scalejax.plan import render
    from scalejax.train import phases

    resolved = {one.name: one.experiment for one in phases.resolved(experiment)}
    names = ", ".join(name for name in resolved if name)
    if phase is not None and phase not in resolved:
        raise UserError(f"--phase {phase}: {recipe} has {f'the phases {names}' if names else 'no phases'}.")
    if names and phase is None:
        typer.echo(f"Planned is what precedes the phases {names}; --phase NAME plans one of them.", err=True)
    experiment = resolved[phase or ""]

    if search:
        from scalejax.plan.arithmetic.decoders import DecoderConfig

        if not isinstance(experiment.model, DecoderConfig):
            raise UserError(
                f"--search knows decoders, and {recipe} is none. `scalejax shard` plans where embedding tables live."
            )
        # Progress goes to standard error, so that the tables can be piped.
        result = scalejax.plan.search(experiment, topology, progress=lambda line: typer.echo(line, err=True))
    else:
        result = scalejax.plan.plan(experiment, topology, experiment.placement.mesh if named else mesh)
    render.render(result, output.console())
    if json is not None:
        output.write_json(json, result.to_json())
