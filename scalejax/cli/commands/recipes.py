"""`scalejax recipes`: what can be trained, and what of it can be set."""

import dataclasses
from typing import Annotated, Any

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
    from scalejax.cli import environment

    environment.prepare()
    from scalejax.parallel.mesh import mesh_text

    rows = []
    for recipe in discovery.listing():
        built = recipe.build()
        mesh = built.placement.mesh
        rows.append(
            {
                "name": recipe.name,
                "also": recipe.path.stem if recipe.first else None,
                "module": recipe.module,
                "function": recipe.function,
                "summary": recipe.summary,
                "model": _brief(built.model),
                "data": _brief(built.data),
                "steps": built.total_steps,
                "mesh": "one device" if mesh is None else mesh_text(mesh),
            }
        )
    if json:
        output.print_json(rows)
        return
    from rich import box, markup, table

    shown = table.Table("recipe", "what", "model", "data", "mesh", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        name = row["name"] if row["also"] is None else f"{row['name']} = {row['also']}"
        shown.add_row(
            *map(markup.escape, (name, row["summary"], _short(row["model"]), _short(row["data"]), row["mesh"]))
        )
    output.console().print(shown)
    output.print_next(
        {
            ("scalejax", "train", "wukong"): "train one",
            ("scalejax", "recipes", "wukong"): "see everything that --set can change",
        }
    )


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


def _brief(value: Any) -> str:
    """A dataclass by its type and the fields that are not their defaults, with their values."""
    from scalejax.configs import overrides

    parts = []
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if field.init and own != (field.default_factory() if callable(field.default_factory) else field.default):
            parts.append(f"{field.name}={overrides.show(own)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _short(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
