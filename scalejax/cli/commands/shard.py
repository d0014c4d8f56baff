"""`scalejax shard`: where the tables of a recipe should live."""

import math
import pathlib
from typing import Annotated

import typer

from scalejax.cli import environment, options, output


def shard(
    recipe: options.Recipe,
    topology: Annotated[
        str,
        typer.Option(
            "--topology", metavar="CHIP:SHAPE", help="The machine: a TPU slice, v5p:4x4x4, or hosts x GPUs, h100:2x8."
        ),
    ],
    mesh: options.MeshSizes = None,
    sets: options.Sets = None,
    batches: Annotated[
        int,
        typer.Option("--batches", metavar="N", help="Count ids in the first N batches of the data; 0 reads no data."),
    ] = 0,
    zipf: Annotated[
        float, typer.Option("--zipf", metavar="S", help="How unevenly ids repeat, where nothing is counted.")
    ] = 1.05,
    table_memory: Annotated[
        float,
        typer.Option("--table-memory", metavar="SHARE", help="Share of a device's memory for tables and exchanges."),
    ] = 0.8,
    constants: Annotated[
        pathlib.Path | None,
        typer.Option("--constants", metavar="FILE", help="Measured rates, as planner.Constants.save wrote them."),
    ] = None,
    towers: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--towers",
            metavar="FILE.json",
            help="Keep the tables of a tower on one host; else by the towers of the model, if it has any.",
        ),
    ] = None,
    save: Annotated[
        pathlib.Path | None,
        typer.Option("--save", metavar="FILE.json", help="Write the plan, for --set tables.sharding=FILE.json."),
    ] = None,
    json: options.JsonFile = None,
) -> None:
    """Plan where the tables of a recipe live on a machine.

    Prints every table with its place and why, memory and time of every device, and the recipe's own plan beside it.
    """
    environment.prepare()
    from scalejax.configs import origin
    from scalejax.errors import UserError

    if save is not None and save.suffix != ".json":
        raise UserError(
            f"--save {save}: must end in .json, by which --set tables.sharding=... knows it. Try {save}.json."
        )
    experiment = origin.resolve(recipe, sets or []).experiment
    from scalejax.parallel.planner import Constants
    from scalejax.parallel.towers import Partition
    from scalejax.plan import sharding

    rates = None if constants is None else Constants.load(constants)
    result = sharding.shard(
        experiment,
        topology,
        mesh=mesh,
        sample_batches=batches,
        zipf=zipf,
        table_memory=table_memory,
        constants=rates,
        towers=None if towers is None else Partition.load(towers),
    )
    result.render(output.console())
    if json is not None:
        output.write_json(json, result.to_json())
    if save is None:
        again = ["scalejax", "shard", recipe, "--topology", topology, *(() if mesh is None else ("--mesh", mesh))]
        again += [f"--set={text}" for text in sets or []]
        again += ["--batches", str(batches), "--zipf", f"{zipf:g}", "--table-memory", f"{table_memory:g}"]
        again += [] if constants is None else ["--constants", str(constants)]
        again += [] if towers is None else ["--towers", str(towers)]
        output.print_next({(*again, "--save", "plan.json"): "keep the plan"})
        return
    result.planned.plan.save(save)
    from scalejax.parallel.mesh import AXES, MeshShape

    again = [f"--set={text}" for text in sets or []] + [f"--set=tables.sharding={save}"]
    planned = {axis: result.mesh.get(axis, 1) for axis in AXES}
    if result.reordered:
        again.append(f"--set=model.towers={save}")  # where the plan has them in the order of their hosts
    if result.route != experiment.tables.exchange.route:
        again.append(f"--set=tables.exchange.route={result.route}")
    given = experiment.placement.mesh
    if given is None:
        given, again = MeshShape(), [*again, "--set=placement.mesh=MeshShape"]
    again += [
        f"--set=placement.mesh.{axis}={size}" for axis, size in planned.items() if size > 1 or getattr(given, axis) != 1
    ]
    print(f"Plan: {save}")
    devices = math.prod(planned.values())
    output.print_next({("scalejax", "train", recipe, *again): "train by it"}, where=f", on {devices} devices")
