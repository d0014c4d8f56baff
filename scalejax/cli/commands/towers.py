"""`scalejax towers`: which features of a trained click model should share a tower."""

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, options, output
from scalejax.cli.commands import precision as precisions
from scalejax.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from scalejax.inference.recommendation.click_model import ServedModel
    from scalejax.train.experiment import Experiment


def towers(
    run_folder: options.RunFolder,
    towers: Annotated[int, typer.Option("--towers", metavar="T", help="How many towers.")],
    distance: Annotated[
        str,
        typer.Option(
            "--distance", metavar="WHICH", help="coherent: similar features together; diverse: similar ones apart."
        ),
    ] = "coherent",
    balance: Annotated[
        str,
        typer.Option("--balance", metavar="WHAT", help="What is even over towers: count of features, or cost."),
    ] = "count",
    ratio: Annotated[
        float,
        typer.Option(
            "--ratio", metavar="R", help="Of the largest tower to the smallest; of costs, to the mean at least."
        ),
    ] = 1.0,
    first: Annotated[
        list[str] | None,
        typer.Option(
            "--first",
            metavar="NAME,...",
            help="Features that share towers with none but each other, such as those of the user; may be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the starts of the search.")] = 0,
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", min=1, help="Of the validation split, whose rows are compared.")
    ] = 8192,
    save: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--save",
            metavar="FILE.json",
            help="Write the towers, for --set model.towers=FILE.json, and a picture beside them, FILE.svg.",
        ),
    ] = None,
    json: options.JsonFile = None,
    step: precisions.Step = None,
    recipe: options.RecipeFile = None,
) -> None:
    """Put the features of a trained click model into towers of equal size.

    Features whose rows interact in the examples of the validation split come together, or apart.
    """
    environment.prepare()
    if save is not None and save.suffix != ".json":
        raise UserError(f"--save {save}: must end in .json, by which --set model.towers=... knows it. Try {save}.json.")
    from scalejax.plan import towers as partitioning

    groups = tuple(tuple(name.strip() for name in group.split(",")) for group in first or [])
    partitioner = partitioning.Partitioner(
        towers=towers,
        distance=distance,  # pyright: ignore[reportArgumentType]  # which it checks
        balance=balance,  # pyright: ignore[reportArgumentType]
        ratio=ratio,
        first=groups,
        seed=seed,
    )
    experiment, model = precisions.open_run(run_folder, recipe, step)
    widths = {table.name: table.dim for table in model.configs}
    if len(set(widths.values())) > 1:
        raise UserError(
            f"RUN_FOLDER {run_folder}: only rows of one width can be compared; its tables have "
            f"{', '.join(f'{name} {width}' for name, width in widths.items())}. Give a run of a model such as dlrm."
        )
    names = model.schema.keys
    costs = partitioning.costs(model.configs, model.schema)
    found = partitioner.partition(
        names,
        partitioning.interactions(_rows(experiment, model, examples)),
        [costs[name] for name in names],
    )
    found.render(output.console())
    if json is not None:
        output.write_json(json, found.to_json())
    if save is not None:
        from scalejax.train.reports import figures

        title = f"Features of {run_folder.name}, {distance} in {towers} towers"
        picture = figures.groups(title, found.points, found.names, found.labels)
        try:
            found.partition.save(save)
            save.with_suffix(".svg").write_text(picture)
        except OSError as error:
            raise UserError(f"--save {save}: cannot be written ({error.strerror}). Give a file in a folder.") from error
        print(f"Towers: {save}, and as a picture {save.with_suffix('.svg')}")


def _rows(experiment: "Experiment", model: "ServedModel", examples: int) -> "Iterator[np.ndarray]":
    """Vectors of all features in examples of the validation split, float32[B, F, N] a batch."""
    import numpy as np

    from scalejax.inference.recommendation import click_model

    data = experiment.data.build()
    drawn = click_model.sample(data, experiment.evaluation.split, model.schema, examples)
    tables, _ = model.arrays
    for inputs, kept in zip(drawn.inputs, drawn.kept, strict=True):
        embedded = click_model.embed(model.configs, tables, inputs)
        yield np.stack([np.asarray(embedded[name]) for name in model.schema.keys], axis=1)[kept]
