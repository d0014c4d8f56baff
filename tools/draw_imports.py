"""Draws which parts of the package import which, one picture a wing, into docs/architecture.md.

    python tools/draw_imports.py            # rewrites the pictures
    python tools/draw_imports.py --check    # says what is out of date, and names circles

An arrow goes from a file or folder to what it imports, inside of functions and for type checkers too. Arrows that
follow from others are left out. A circle inside of a picture is an error; `EXCUSED` names what would make one and is
drawn dotted.
"""

import collections
import pathlib
import re
import sys
from collections.abc import Mapping

import grimp

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: begin -->", "<!-- imports: end -->"

EXCUSED = {
    "scalejax.models.llm": {("llama3", "model_folder")},
    "scalejax.models.llm.llama3": {("model", "config"), ("parts", "config"), ("task", "config")},
}
"""A task opens a folder of any family inside of a function; the list of families names the tasks of each. A config has
parts of its model as default values and makes its task; for these it is a type alone."""

Edges = Mapping[str, set[str]]


def edges_of(graph: grimp.ImportGraph, wing: str) -> dict[str, set[str]]:
    """Files and folders of a wing -> what of the wing they import."""
    depth, found = wing.count(".") + 2, collections.defaultdict(set)
    inside = {module for module in graph.modules if module.startswith(f"{wing}.")}
    for module in sorted(inside):
        own = ".".join(module.split(".")[:depth]).removeprefix(f"{wing}.")
        found[own] |= set()
        for imported in graph.find_modules_directly_imported_by(module) & inside:
            other = ".".join(imported.split(".")[:depth]).removeprefix(f"{wing}.")
            if (own, other) not in EXCUSED.get(wing, ()):
                found[own] |= {other} - {own}
    return dict(found)


def circle(edges: Edges) -> list[str]:
    """Some circle, from a name back to itself; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        for following in sorted(edges.get(name, ()) if name not in done else ()):
            if found := walk(following, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := walk(name, []))), [])


def reduced(edges: Edges) -> dict[str, set[str]]:
    """Without what follows from other arrows; the edges have no circle."""

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(following) for following in edges[name]))

    beyond = {name: reached(name) - {name} for name in edges}
    return {
        name: {to for to in all_ if not any(to in beyond[via] for via in all_ - {to})} for name, all_ in edges.items()
    }


def picture(wing: str, edges: Edges) -> str:
    """A drawing in Mermaid's words."""
    lines = [f"  {name} --> {to}" for name, targets in sorted(reduced(edges).items()) for to in sorted(targets)]
    alone = sorted(set(edges) - {name for name, to in edges.items() if to} - set().union(*edges.values()))
    lines += [f"  {name}" for name in alone]
    lines += [f"  {name} -.-> {to}" for name, to in sorted(EXCUSED.get(wing, ()))]
    # A word of Mermaid's language may not be a name.
    drawn = "\n".join(re.sub(r"\b(graph|end|class|style|click|default)\b", r"\1_", line) for line in lines)
    return f"### `{wing}`\n\n```mermaid\ngraph LR\n{drawn}\n```\n"


def draw() -> tuple[str, list[str]]:
    """All pictures, and the circles that there are."""
    sys.path.insert(0, str(ROOT))  # the package of this checkout, whichever is installed
    graph = grimp.build_graph("scalejax", cache_dir=None)
    wings = sorted({module.rpartition(".")[0] for module in graph.modules if "." in module})
    pictures, circles = [], []
    for wing in wings:
        edges = edges_of(graph, wing)
        if found := circle(edges):
            circles.append(f"{wing}: {' -> '.join(found)}")
        elif len(edges) > 3 and any(edges.values()):
            pictures.append(picture(wing, edges))
    return "\n".join(pictures), circles


def main(arguments: list[str]) -> int:
    """0, or 1 where something is out of date or goes in a circle."""
    pictures, circles = draw()
    for found in circles:
        print(f"circle in {found}")
    before = DOCUMENT.read_text()
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n\n{pictures}\n{END}{rest.partition(END)[2]}"
    stale = after != before
    if "--check" in arguments:
        print(
            f"{DOCUMENT.name} is out of date: python tools/draw_imports.py"
            if stale
            else f"{DOCUMENT.name} is up to date"
        )
    else:
        DOCUMENT.write_text(after)
    return int(bool(circles) or ("--check" in arguments and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
