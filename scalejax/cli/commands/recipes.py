"""`scalejax recipes`: what can be trained, and what of it can be set."""

from typing import Annotated

import typer

from scalejax.cli import options, output
from scalejax.configs import discovery


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", help="Show this recipe whole: every path with its value, as --set takes them."
        ),
    ] = None,
    sets: options.Sets = None,
    json: options.Json = False,
) -> None:
    """List recipes, or show one with every path that can be set."""
    if name is None:
        if sets:
            raise typer.BadParameter("needs a RECIPE.", param_hint="--set")
        _list(json)
    else:
        _show(name, sets or [], json)


def _list(json: bool) -> None:
    found = discovery.listing()
    if json:
        output.print_json(
            [{"name": r.name, "also": r.path.stem if r.first else None, "module": r.module, "function": r.function,
              "summary": r.summary, **r.written} for r in found]
        )  # fmt: skip
        return
    from rich import box, markup, table

    shown = table.Table("recipe", "what", "model", "data", "mesh", box=box.SIMPLE_HEAD, pad_edge=False)
    for recipe in found:
        also = f" = {recipe.path.stem}" if recipe.first else ""
        written = [recipe.written.get(column, "default") for column in ("model", "data", "mesh")]
        cells = (recipe.name + also, recipe.summary, *map(_short, written))
        shown.add_row(*map(markup.escape, cells))
    console = output.console()
    console.print(shown)
    print("Next: scalejax train RECIPE, or scalejax recipes RECIPE to see everything that --set can change.")


def _show(name: str, sets: list[str], json: bool) -> None:
    from scalejax.cli import environment

    environment.prepare()
    from scalejax.configs import overrides, serialization

    recipe = discovery.find(name)
    experiment = overrides.apply(recipe.build(), sets)
    if json:
        output.print_json(serialization.record(name, sets, experiment))
        return
    print(f"{recipe.name}: {recipe.summary}\n{recipe.path}\n")
    paths = list(overrides.flatten(experiment))
    width = max(len(path) for path, _ in paths)
    for path, value in paths:
        print(f"{path:<{width}} = {overrides.show(value)}")


def _short(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
