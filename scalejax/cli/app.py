"""Puts the commands together, and turns a user's mistake into one message and exit status 2."""

import os
import sys
from typing import Annotated, Any

import typer
import typer.core

import scalejax
from scalejax.cli.commands import (
    bench,
    convert,
    doctor,
    eval,
    export,
    generate,
    plan,
    precision,
    prune,
    quantize,
    recipes,
    report,
    serve,
    shard,
    towers,
    train,
)
from scalejax.errors import TemporaryFailure, UserError


class _Commands(typer.core.TyperGroup):
    """The group of all commands. Everything else than a UserError or Ctrl-C is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        except TemporaryFailure as error:
            print(error, file=sys.stderr)
            raise typer.Exit(os.EX_TEMPFAIL) from error
        except KeyboardInterrupt as error:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(130) from error

    def list_commands(self, ctx: object) -> list[str]:
        del ctx
        return list(self.commands)  # in the order in which one meets them, not by the alphabet


app = typer.Typer(
    name="scalejax",
    cls=_Commands,
    help="Published systems for training large models, in JAX, on TPU, GPU and CPU meshes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the same text on every terminal, and no wait for it
)
app.command("recipes")(recipes.recipes)
app.command("train")(train.train)
app.command("eval")(eval.evaluate)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("convert")(convert.convert)
app.command("quantize")(quantize.quantize)
app.command("prune")(prune.prune)
app.command("grow")(prune.grow)
app.command("precision")(precision.find)
app.command("export")(export.export)
app.command("report")(report.report)
app.command("plan")(plan.plan)
app.command("shard")(shard.shard)
app.command("towers")(towers.towers)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"scalejax {scalejax.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version
