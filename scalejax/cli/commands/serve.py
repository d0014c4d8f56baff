"""`scalejax serve`: a language model behind HTTP, with OpenAI's protocol, or an exported click model."""

import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, cast

import typer

from scalejax.cli import environment, folders, options
from scalejax.cli.commands.convert import Step, check_dtype
from scalejax.errors import UserError, check_at_least, check_one_of

if TYPE_CHECKING:
    from scalejax.inference.server.app import ServerSettings, Service
    from scalejax.nn.pages import KvFormat

_PEER_TIMEOUT_S = 8  # of silence, after which another process counts as gone


def serve(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="FOLDER",
            help="A run, a model folder, one of Hugging Face, or a click model that `scalejax export` wrote.",
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen at; 0.0.0.0: all of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="0: one that is free, which is printed.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="SCALEJAX_API_KEY",
            show_envvar=False,
            help="What requests must show as a bearer token. In SCALEJAX_API_KEY other users do not see it.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Pages that may ask, such as https://chat.example.org, a name of the server too; may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the model. Default: that of the folder.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", metavar="N", min=1, help="Continuations at once; or rows scored at once.  [8; 256]"),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens", metavar="N", min=1, help="Tokens whose keys and values are kept. Default: by slots."
        ),
    ] = None,
    page: Annotated[int, typer.Option("--page", metavar="N", help="Tokens of a page: 16, 32, 64 or 128.")] = 64,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", metavar="DTYPE", help="Of keys and values: int8, float8, or none: as products.")
    ] = "none",
    max_queue: Annotated[
        int, typer.Option("--max-queue", metavar="N", min=1, help="Requests that may wait; beyond it status 429.")
    ] = 256,
    max_queue_tokens: Annotated[
        int,
        typer.Option("--max-queue-tokens", metavar="N", min=1, help="Tokens of their prompts, or rows, together."),
    ] = 262_144,
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", metavar="S", help="What runs may take so long to finish after SIGTERM."),
    ] = 30.0,
    metrics_prefix: Annotated[
        str, typer.Option("--metrics-prefix", metavar="NAME", help="scalejax, or vllm for dashboards made for it.")
    ] = "scalejax",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16. Default: as stored.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            metavar="HOW",
            help="Quantized ones: packed (in memory, decoded as they are used) or decoded (when they are loaded).",
        ),
    ] = "packed",
    mesh: options.MeshSizes = None,
    step: Step = None,
    recipe: options.RecipeFile = None,
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
) -> None:
    """Serve a language model (OpenAI's protocol) or a click model over HTTP.

    /v1/completions and /v1/chat/completions, or /v1/score; /v1/models, /health and /metrics.
    """
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"serve needs {package}, which is not installed: pip install 'scalejax[serve]'.")
    environment.prepare(cpu_devices=cpu_devices)
    check_dtype(dtype)
    check_one_of("--weights", weights, ("packed", "decoded"))
    check_one_of("--page", page, (16, 32, 64, 128))
    check_one_of("--kv-dtype", kv_dtype, ("none", "int8", "float8"))
    check_one_of("--metrics-prefix", metrics_prefix, ("scalejax", "vllm"))
    check_at_least("--drain-seconds", drain_seconds, 0)
    if api_key == "":
        raise UserError("--api-key is empty, which everybody knows. Give a key, or leave it out.")

    from scalejax.inference.server import serving
    from scalejax.inference.server.app import ServerSettings
    from scalejax.inference.server.gate import LOOPBACK, Origins

    exported = (folder / "signature.json").is_file()
    if exported:
        none = {"--kv-tokens": kv_tokens, "--dtype": dtype, "--mesh": mesh, "--step": step, "--recipe": recipe}
        none |= {"--coordinator": coordinator, "--processes": processes, "--process-id": process_id}
        for option, value in none.items():
            if value is not None:
                raise UserError(f"{option} {value}: {folder} is an exported model, which has none. Leave it out.")
    kept: KvFormat = "compute" if kv_dtype == "none" else cast("KvFormat", kv_dtype)
    settings = ServerSettings(
        name=name or folder.resolve().name,
        slots=slots or 8,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        api_key=api_key,
        metrics_prefix=metrics_prefix,
        longest=kv_tokens,
        origins=Origins(host, tuple(allow_origin or ())),
    )

    def ready(address: str) -> None:
        if api_key is None and host not in LOOPBACK:
            print(f"Warning: whoever reaches {host} can use this server. Give --api-key.", file=sys.stderr)
        print(f"Serving {settings.name} at {address}/v1; Ctrl-C ends it.", flush=True)

    if exported:
        with serving.bind(host, port) as bound:  # before the model is loaded: a port that is taken is said at once
            make = _score_server(folder, settings, slots or 256)
            status = serving.run(make, bound=bound, drain_seconds=drain_seconds, ready=ready)
        raise typer.Exit(status)

    from scalejax.inference import text
    from scalejax.inference.loop import BLOCK_S, make_loop
    from scalejax.inference.processes import call_others, called, check_alike, follow
    from scalejax.inference.server.app import Server
    from scalejax.parallel.mesh import MeshShape, make_mesh, parse_mesh
    from scalejax.train import distributed, peers

    peers.job.loses = "What was being answered is lost."
    distributed.initialize(coordinator, processes, process_id, peer_timeout_s=_PEER_TIMEOUT_S)
    with contextlib.ExitStack() as ending:
        bound = ending.enter_context(serving.bind(host, port)) if distributed.is_primary() else None
        made = make_mesh(MeshShape(fsdp=1, tensor=-1) if mesh is None else parse_mesh(mesh))
        model = folders.open_model(folder, recipe=recipe, step=step)
        writer = folders.load(text.open_writer, model, made, dtype=dtype, weights=weights)
        alike = {"--slots": settings.slots, "--kv-tokens": kv_tokens, "--page": page, "--kv-dtype": kept}
        check_alike(**alike, **{"--mesh": dict(made.shape), "--dtype": dtype, "the model": writer.engine.config})
        loop = make_loop(
            writer.engine,
            slots=settings.slots,
            kv_tokens=kv_tokens,
            page=page,
            kv_dtype=kept,
            block_s=BLOCK_S,
            scored_tokens=writer.engine.config.max_positions,
        )
        settings = dataclasses.replace(settings, slots=getattr(loop, "slots", settings.slots))
        if bound is None:
            # Process 0 lets what runs finish, and then says that this is all.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            follow(loop.steps, called())
            raise typer.Exit(0)
        if peers.job.count > 1:
            followers = loop.steps.others = call_others()
            ending.callback(followers.end)
        print("Compiling what steps of every size need ...", file=sys.stderr, flush=True)
        loop.warm_up()
        make = functools.partial(Server, writer, loop, settings)
        status = serving.run(make, bound=bound, drain_seconds=drain_seconds, ready=ready)
    raise typer.Exit(status)


def _score_server(folder: pathlib.Path, settings: "ServerSettings", rows: int) -> "Callable[..., Service]":
    from scalejax.inference import reload
    from scalejax.inference.server import scores

    try:
        model = reload.load(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"FOLDER {folder}: {error} Export it again.") from error
    if not isinstance(model, reload.Model):
        raise UserError(f"FOLDER {folder} is an exported language model. Serve the folder that it was exported from.")
    scorer = scores.Scorer(model, most=rows)
    print("Compiling batches of every size ...", file=sys.stderr, flush=True)
    scorer.warm_up()
    return functools.partial(scores.ScoreServer, scorer, settings)
