"""`scalejax prune` and `scalejax grow`: click models with fewer hidden units, and with more again."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.cli.commands.convert import Step
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.checkpoints.manifest import Shaped
    from scalejax.train.experiment import Experiment

Out = Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder to write; must not be there yet.")]
Widths = Annotated[
    list[str] | None,
    typer.Option(
        "--widths",
        metavar="FIELD=N,...",
        help="Hidden widths by the field of the model, e.g. top_hidden=256,128; may be repeated.",
    ),
]

_BEFORE = "widths_before"
"""Of a record: overrides that give back the widths before `prune`."""


def prune(
    run: options.RunFolder,
    target: Out,
    widths: Widths = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--share", metavar="S", help="In the place of --widths: the share of all hidden units that stays."
        ),
    ] = None,
    multiple: Annotated[
        int | None,
        typer.Option("--multiple", metavar="N", min=1, help="Round widths of --share up to a multiple; 1 by default."),
    ] = None,
    step: Step = None,
    recipe: options.RecipeFile = None,
    mesh: options.MeshSizes = None,
) -> None:
    """Cut hidden units off the MLPs of a click model.

    Kept are those with the largest product of the norms of their weights in and out. OUT is a run folder with the
    smaller model, which every command opens and another run begins with (--set init=OUT). Prints what the cut costs on
    the split that the run is scored on at intervals; of a run in phases, in the phase that saved the checkpoint.
    """
    environment.prepare()
    if (share is None) == (not widths):
        raise UserError("scalejax prune takes either --widths FIELD=N,... or --share S. Give one of them.")
    if share is None and multiple is not None:
        raise UserError(
            f"scalejax prune --multiple {multiple} rounds the widths of --share, and --widths are taken as they are. "
            "Leave --multiple out, or give --share S."
        )
    from scalejax.configs import overrides
    from scalejax.surgery.alternation import narrowed

    source = _Source.open(run, step, recipe)
    experiment = source.experiment
    sets = _as_sets(widths)
    if share is not None:
        narrow = narrowed(experiment.model, share, multiple or 1)
        sets = _differences(experiment.model, narrow)
    before = _differences(overrides.apply(experiment, sets).model, experiment.model)
    _write(source, target, sets, before, mesh)


def grow(
    run: options.RunFolder,
    target: Out,
    widths: Widths = None,
    step: Step = None,
    recipe: options.RecipeFile = None,
    mesh: options.MeshSizes = None,
) -> None:
    """Give the MLPs of a click model more hidden units.

    New units have weights as at the start of a run and zeros on their way out, so that the model computes what it did.
    Without --widths it gets those that it had before `scalejax prune`.
    """
    environment.prepare()
    record: Any = folders.read_record(run)
    sets = _as_sets(widths) or record.get(_BEFORE)
    if not sets:
        raise UserError(
            f"scalejax grow {run}: it was not written by `scalejax prune`, and so the widths have to be said. Add "
            "--widths FIELD=N,..., such as --widths top_hidden=512,256."
        )
    _write(_Source.open(run, step, recipe), target, sets, None, mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """A checkpoint of a run.

    Attributes:
      run: The run's folder.
      step: Of the checkpoint; None = the newest.
      recipe: Name of the recipe.
      sets: Overrides of the recipe.
      experiment: The result of both: the run as it is in the phase that saved the checkpoint.
    """

    run: pathlib.Path
    step: int | None
    recipe: str
    sets: list[str]
    experiment: "Experiment"

    @classmethod
    def open(cls, run: pathlib.Path, step: int | None, recipe: str | None) -> "_Source":
        from scalejax.configs import overrides
        from scalejax.train import phases

        experiment, record = folders.load_run(run, recipe), folders.read_record(run)
        phase: list[str] = []
        if experiment.phases:
            name = phases.phase_at(experiment, run, step).name
            phase = [f"phase={name}" if name else "phases=[]"]
        return cls(
            run=run,
            step=step,
            recipe=recipe or record["recipe"],
            sets=[*record["sets"], *phase],
            experiment=overrides.apply(experiment, phase),
        )


def _differences(there: object, here: object) -> list[str]:
    """Overrides that make the one model config of the other, which has other widths."""
    from scalejax.configs import overrides

    before = dict(overrides.flatten(there, "model"))
    return [
        f"{path}={overrides.show(value)}"
        for path, value in overrides.flatten(here, "model")
        if not dataclasses.is_dataclass(value) and value != before[path] and not _holds_configs(value)
    ]


def _as_sets(widths: list[str] | None) -> list[str]:
    """`--widths` as overrides."""
    for text in widths or []:
        if not re.fullmatch("[^=]+=.+", text):
            raise UserError(f"--widths must be FIELD=N,..., such as --widths top_hidden=256,128; got {text!r}.")
    return [f"model.{text}" for text in widths or []]


def _check_widths(
    there: "Mapping[str, Shaped]", fresh: "Mapping[str, Shaped]", command: Literal["prune", "grow"]
) -> None:
    """Refuses a cut that grows and a growth that cuts."""
    from scalejax.surgery.units import hidden_layers

    widths = {layer.name: layer.width for layer in hidden_layers(there)}
    for layer in hidden_layers(fresh):
        width = widths.get(layer.name, layer.width)
        if layer.width > width if command == "prune" else layer.width < width:
            other, more = ("grow", "more") if command == "prune" else ("prune", "fewer")
            raise UserError(
                f"scalejax {command}: {layer.name} has {width} units and would have {layer.width}, which are {more}. "
                f"Give other --widths, or take `scalejax {other}`."
            )


def _holds_configs(value: object) -> bool:
    return isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value)


def _write(source: _Source, target: pathlib.Path, sets: list[str], before: list[str] | None, mesh: str | None) -> None:
    """Writes the run with the widths that `sets` say, and prints what that costs; `before` is that of `prune`."""
    from scalejax.configs import overrides, serialization
    from scalejax.models.recsys.task import CtrTask
    from scalejax.parallel.mesh import make_mesh
    from scalejax.surgery.units import ResizeUnits
    from scalejax.train import disk, loop
    from scalejax.train.checkpoints import trained
    from scalejax.train.reports import summary
    from scalejax.train.runs import run_state
    from scalejax.train.runs.run import Run

    disk.check_new(target)
    experiment, command = source.experiment, "grow" if before is None else "prune"
    changed = overrides.apply(experiment, sets)
    if changed.model == experiment.model:
        less = "fewer units by --widths, or a --share below 1" if command == "prune" else "more units by --widths"
        raise UserError(f"scalejax {command}: all hidden layers would stay as wide as they are. Give {less}.")
    tasks = [e.model.task(experiment.data.schema()) for e in (experiment, changed)]
    if not isinstance(tasks[0], CtrTask):
        kind = type(experiment.model).__name__
        raise UserError(f"RUN_FOLDER {source.run}: {kind} is no click model. Give a run of one.")
    scored = [folders.on_mesh(own, mesh) for own in (experiment, changed)]
    bound = Run.bind_to_score(scored[1], changed.data.build(), make_mesh(scored[1].placement.mesh), None)
    fresh = run_state.as_trained(bound.program, None, bound.program.init_dense(redraw=1))
    there = trained.open_run(source.run, source.step)
    _check_widths(there.params, fresh.params, command)
    made = ResizeUnits().operate(there, fresh)
    settled = ("model", "optimizer", "exchange", "phase", "scores_from", "schedule")  # not those of this run any more
    identity = {name: text for name, text in there.identity.items() if name not in settled}
    own = [*source.sets, *sets]
    wanted = {**serialization.record(source.recipe, own, changed), **({_BEFORE: before} if before else {})}
    split = experiment.evaluation.split
    scores = [loop.evaluate(scored[0], workdir=source.run, split=split, step=source.step)]
    with disk.appearing(target) as folder:
        trained.write_run(folder, dataclasses.replace(made, record=wanted, identity=identity))
        scores.append(loop.evaluate(scored[1], workdir=folder, split=split))
    print(f"{'widths':<26}{'  '.join(text.removeprefix('model.') for text in sets)}")
    for words, count in (("dense parameters", "dense_parameters"), ("FLOPs an example", "flops_per_example")):
        print(f"{words:<26}{' -> '.join(f'{getattr(task, count)():,}' for task in tasks)}")
    prefix = f"{summary.prefix(split)}_"
    for key, value in scores[0].items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.partition("/")[0] in ("ne", "logloss", "auc"):
            ratio = f" ({scores[1][key] / value - 1:+.3%})" if value else ""
            print(f"{split + ' ' + name:<26}{value:.6f} -> {scores[1][key]:.6f}{ratio}")
    print(f"Wrote the run folder {target}.")
    sets_again = [f"--set={text}" for text in (*own, f"init={target}")]
    output.print_next({("scalejax", "train", source.recipe, *sets_again): "train it on"})
