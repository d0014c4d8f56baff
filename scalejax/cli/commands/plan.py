"""`scalejax plan`: compile a recipe for a machine that is not here, or plan how a language model is served there.

Click models on hosts of GPUs, for which nothing is compiled, are planned by arithmetic.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.cli.commands.convert import check_dtype
from scalejax.errors import UserError, check_one_of

if TYPE_CHECKING:
    from scalejax.nn.pages import KvFormat
    from scalejax.plan.gpu_steps import ClickWork
    from scalejax.plan.serving import ServingPlan


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A name from `scalejax recipes`, module:function, or a file of yours as path.py:function; with "
            "--serve also a folder of a language model.",
        ),
    ],
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            metavar="CHIP:AxB[xC]",
            help="The machine, e.g. v5e:2x2, v5p:2x2x1, v6e:4x4; of click models and with --serve also h100:2x8 "
            "(hosts x GPUs).",
        ),
    ],
    mesh: options.MeshSizes = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Find the mesh and the rematerialisation of a decoder; compiles at most five."),
    ] = False,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="NAME", help="A phase of the recipe. Default: what precedes them.")
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="A language model behind `scalejax serve`, by arithmetic: what fits, how fast."),
    ] = False,
    slots: Annotated[
        int | None, typer.Option("--slots", metavar="N", min=1, help="With --serve: sequences at once. Default: 8.")
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length",
            metavar="N",
            min=1,
            help="With --serve: tokens of each sequence. Default: as many as the model is meant for.",
        ),
    ] = None,
    page: Annotated[
        int | None,
        typer.Option("--page", metavar="N", help="With --serve: tokens of a page, 16, 32, 64 or 128. Default: 64."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype", metavar="DTYPE", help="With --serve: of keys and values, int8, float8 or none (the default)."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="With --serve: float32, bfloat16 or float16. Default: as stored; bfloat16 of a recipe.",
        ),
    ] = None,
    sets: options.Sets = None,
    json: options.JsonFile = None,
) -> None:
    """Compile a recipe for absent TPUs, or plan how it is served.

    Prints whether it fits, bytes per chip by kind, FLOPs, every collective with its bytes, and the predicted step. With
    --search, meshes and rematerialisation policies are judged by arithmetic, and the best few are compiled and ranked.
    Of a click model on hosts of GPUs nothing is compiled: seconds of a step by strategy of the dense part (replicated,
    sharded, sharded within hosts) and by route of the tables (flat, in two levels, over towers).
    With --serve nothing is compiled: bytes of parameters, keys and values, the greatest context and number of slots,
    and the least time of a prompt and of a token.
    """
    own = {
        "--slots": slots,
        "--context-length": context_length,
        "--page": page,
        "--kv-dtype": kv_dtype,
        "--dtype": dtype,
    }
    named = [one for one in sets or [] if one.strip().startswith("placement.mesh")]
    if serve:
        others = {"--search": search or None, "--phase": phase}
        if given := [name for name, value in others.items() if value is not None]:
            raise UserError(
                f"--serve plans a model that is served, {given[0]} one that is trained. Leave one of them out."
            )
        if named:
            raise UserError(f"--serve takes the mesh by --mesh; got --set {named[0]}. Leave it out.")
        environment.prepare()
        found = _serving(
            recipe,
            topology,
            mesh,
            sets or [],
            slots=8 if slots is None else slots,
            context_length=context_length,
            page=64 if page is None else page,
            kv_dtype="none" if kv_dtype is None else kv_dtype,
            dtype=dtype,
        )
        _show(found, json)
        return
    if given := [name for name, value in own.items() if value is not None]:
        raise UserError(f"{given[0]} is of a model that is served. Add --serve, or leave {given[0]} out.")
    if search and (mesh is not None or named):
        given = f"--mesh {mesh}" if mesh is not None else f"--set {named[0]}"
        raise UserError(f"--search finds the mesh; got {given} too. Leave one of them out.")
    if mesh is not None and named:
        raise UserError(f"the mesh is given twice: --mesh {mesh} and --set {named[0]}. Leave one of them out.")
    environment.prepare()
    from scalejax.configs import origin

    experiment = origin.resolve(recipe, sets or []).experiment
    import scalejax.plan
    from scalejax.plan import planner_machines
    from scalejax.plan.gpu_steps import plan_on_gpus
    from scalejax.train import phases

    if experiment.phases and phase is None:
        names = ", ".join(one.name for one in experiment.phases)
        typer.echo(f"Planned is what precedes the phases {names}; --phase NAME plans one of them.", err=True)
    experiment = phases.named(experiment, phase or "", f"--phase {phase}")

    if (gpus := planner_machines.find_gpus(topology)) is not None:
        others = {"--search": search, "--mesh": mesh, "--set placement.mesh": named}
        if given := [name for name, value in others.items() if value]:
            raise UserError(f"{given[0]} goes with TPUs; a step on {gpus.name} is arithmetic. Leave it out.")
        result = plan_on_gpus(_click_work(experiment, recipe), gpus, experiment.data.batch_size)
    elif search:
        from scalejax.plan.arithmetic.decoders import DecoderConfig

        if not isinstance(experiment.model, DecoderConfig):
            raise UserError(
                f"--search knows decoders, and {recipe} is none. `scalejax shard` plans where embedding tables live."
            )
        # Progress goes to standard error, so that the tables can be piped.
        result = scalejax.plan.search(experiment, topology, progress=lambda line: typer.echo(line, err=True))
    else:
        result = scalejax.plan.plan(experiment, topology, experiment.placement.mesh if named else mesh)
    _show(result, json)


def _click_work(experiment: Any, recipe: str) -> "ClickWork":
    """What the arithmetic of GPUs knows of a model."""
    from scalejax.models.recsys.dhen import DhenConfig
    from scalejax.models.recsys.task import CtrTask
    from scalejax.models.recsys.towers import TowersConfig
    from scalejax.plan.gpu_steps import ClickWork, OverTowers
    from scalejax.train.runs import binding

    model, towers, schema = experiment.model, None, experiment.data.schema()
    task = binding.bound_task(experiment, schema)
    if not isinstance(task, CtrTask):
        raise UserError(
            f"topology: GPUs are planned for click models, and {recipe} has {type(model).__name__}. Name TPUs such as "
            "v5p:2x2x1, or add --serve to a language model."
        )
    flat = task
    if isinstance(model, TowersConfig):
        model = model.base
        flat = binding.bound_task(dataclasses.replace(experiment, model=model), schema)
        assert isinstance(flat, CtrTask)
        towers = OverTowers(
            count=len(experiment.model.towers.towers),
            flops=task.flops_per_example() / 3,
            compression=experiment.model.sent_compression,
        )
    return ClickWork(
        parameters=task.dense_parameters(),
        flops=flat.flops_per_example() / 3,
        width=sum(table.dim * len(table.features) for table in task.tables()),
        layers=len(model.layers) * model.repeats if isinstance(model, DhenConfig) else 1,
        towers=towers,
    )


def _show(result: Any, json: pathlib.Path | None) -> None:
    from scalejax.plan import render

    render.render(result, output.console())
    if json is not None:
        output.write_json(json, result.to_json())


def _serving(
    recipe: str,
    topology: str,
    mesh: str | None,
    sets: list[str],
    *,
    slots: int,
    context_length: int | None,
    page: int,
    kv_dtype: str,
    dtype: str | None,
) -> "ServingPlan":
    check_dtype(dtype)
    check_one_of("--page", page, (16, 32, 64, 128))
    check_one_of("--kv-dtype", kv_dtype, ("none", "int8", "float8"))
    from scalejax.inference import abstract_model
    from scalejax.inference.loop import PIECE
    from scalejax.plan import serving

    machine = serving.parse_machine(topology)
    config, stored = _language_model(recipe, sets)
    found = serving.serving_mesh(machine, mesh, config.kv_heads)
    kept: KvFormat = "compute" if kv_dtype == "none" else cast("KvFormat", kv_dtype)
    arrays = abstract_model.arrays_of(config, found, dtype=dtype or stored, page=page, kv_dtype=kept)
    model = serving.PlannedModel(config, *arrays, page)
    length = config.max_positions if context_length is None else context_length
    return serving.plan_serving(model, machine, found, slots=slots, context=length, piece=PIECE)


def _language_model(recipe: str, sets: list[str]) -> tuple[Any, Any]:
    """The architecture of a recipe or of a folder, and the dtype of its parameters."""
    if pathlib.Path(recipe).is_dir():
        if sets:
            raise UserError(f"--set {sets[0]}: {recipe} is a folder, whose model is what it is. Leave --set out.")
        model = folders.open_model(pathlib.Path(recipe), recipe=None, step=None)
        return model.config, model.dtype
    from scalejax.configs import origin
    from scalejax.models.llm import families
    from scalejax.train import phases

    experiment = phases.resolved(origin.resolve(recipe, sets).experiment)[-1].experiment  # what a run ends with
    config: Any = experiment.model
    if families.find(config) is None:
        raise UserError(
            f"--serve plans language models, and {recipe} has {type(config).__name__}. Leave --serve out, or name a "
            "recipe or a folder of a language model."
        )
    return config.bound(experiment.data.schema()), "bfloat16"
