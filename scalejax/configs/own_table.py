"""A recipe on a table of the user's own: what `scalejax train RECIPE --data FILE --label COLUMN` runs and writes."""

import contextlib
import dataclasses
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from scalejax import configs
from scalejax.configs import discovery
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.data.tables.table import OpenTable
    from scalejax.train.experiment import Experiment

FILE = "recipe.py"
"""Name of the recipe in the run folder. Commands on a run never run it: only `scalejax train` does, if named."""
_FUNCTION = "table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecipe:
    """A bundled recipe, and the settings that put it on a table.

    Attributes:
      recipe: Its name: `dcnv2-table`.
      sets: `path=value` each; those of the user come last.
      table: The table, and what was found of its columns.
      text: The same as a file of the user's, with every column named.
    """

    recipe: str
    sets: tuple[str, ...]
    table: "OpenTable"
    text: str

    def shown(self) -> Table:
        """What was made of each column, and why, for a console."""
        table, data = self.table, self.table.data
        sizes = ", ".join(f"{rows.size:,} {split}" for split, rows in table.splits.items())
        rate = f"predicts {data.label} = {table.positive} (not {table.negative})"
        shown = Table(
            title=Text(f"{data.path}: {rate}; {sizes}"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        shown.add_column("column", overflow="fold")
        shown.add_column("seen as")
        shown.add_column("why", overflow="fold")
        for one in table.findings:
            kind = Text("-", "dim") if one.column is None else Text(one.column.kind)
            shown.add_row(Text(one.name), kind, Text(one.reason))
        return shown

    def write(self, path: pathlib.Path) -> None:
        """Writes the recipe, unless there is one, which the user may have edited."""
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(self.text)


def resolve(recipe: str, fields: Mapping[str, object], sets: Sequence[str]) -> TableRecipe:
    """Reads the table, and says what is to be run.

    Args:
      recipe: Name of a recipe whose file has a function `table`.
      fields: Of `TableData`: those that the command line gave.
      sets: Further settings of the user.

    Raises:
      UserError: the recipe is for other data, or as `TableData.open`.
    """
    from scalejax.configs.recsys import _table
    from scalejax.data.tables import frames

    known = [r for r in discovery.listing() if r.function == _FUNCTION]
    family = [r for r in known if discovery.is_bundled(recipe) and r.path == discovery.find(recipe).path]
    if not family:
        names = ", ".join(r.path.stem for r in known)
        raise UserError(f"--data: recipe {recipe!r} has a kind of data of its own; wanted one of {names}.")
    (found,) = family
    fields = {**fields, "sha256": frames.digest_of(str(fields["path"]))}
    given = [f"data.{name}={value!r}" for name, value in fields.items() if value not in (None, ())]
    data = configs.load(found.name, [*given, *sets]).data
    table = data.open()  # pyright: ignore[reportAttributeAccessIssue]
    steps = _table.lengths(table.splits["train"].size, data.batch_size)
    own = (*given, *(f"{path}={value}" for path, value in steps.items()), *sets)
    text = _text(found, configs.load(found.name, own), table, sets)
    return TableRecipe(recipe=found.name, sets=own, table=table, text=text)


def _text(found: discovery.Recipe, experiment: "Experiment", table: "OpenTable", sets: Sequence[str]) -> str:
    """A recipe file that gives the same run, but that other settings of the user are repeated on the command line."""
    data, stem = table.data, found.path.stem
    again = shlex.join(["scalejax", "train", "FILE.py", *(word for one in sets for word in ("--set", one))])
    lines = []
    for one in table.findings:
        comment = " ".join(one.reason.split())
        column = one.column
        shown = f"TableColumn(name={one.name!r}, kind={column.kind!r})," if column else f"# {one.name!r}"
        lines.append(f"                {shown}  # {comment}" if column else f"                {shown}: {comment}")
    columns = "\n".join(lines)
    plain = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    skipped = ("columns", "leave_out")
    settings = "\n".join(
        f"            {name}={value!r},"
        for name, value in plain.items()
        if name not in skipped and value != type(data).__dataclass_fields__[name].default
    )
    # What a table or a command line calls something stands in comments of one line or as literals, never as code.
    return f'''"""{found.summary.partition(":")[0]}, written by scalejax to be edited.

Kinds: "number" (dense and binned), "text" (counted vocabulary), "date", "list"; a column that is not named is left out.
"""
# {" ".join(again.split())}

import dataclasses

from scalejax.configs.recsys import {stem}
from scalejax.data import Counted, Fractions, TableColumn, TableData  # noqa: F401
from scalejax.train.experiment import Experiment


def mine() -> Experiment:
    # The label is 1 where {data.label!r} is {table.positive!r}, and 0 where it is {table.negative!r}.
    base = {stem}.{_FUNCTION}()
    return dataclasses.replace(
        base,
        steps={experiment.steps},
        evaluation=dataclasses.replace(base.evaluation, every={experiment.evaluation.every}),
        checkpoints=dataclasses.replace(base.checkpoints, every={experiment.checkpoints.every}),
        log_every={experiment.log_every},
        data=TableData(
{settings}
            columns=(
{columns}
            ),
        ),
    )
'''
