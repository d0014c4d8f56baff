"""`scalejax quantize`: language models with weights in number formats of blocks."""

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.cli.commands.convert import Step
from scalejax.errors import UserError, check_one_of

if TYPE_CHECKING:
    from rich import table

    from scalejax.models.llm.model_folder import LanguageModel
    from scalejax.models.llm.packed_layouts.protocol import PackedLayout
    from scalejax.surgery.quantize.checkpoint import Quantizer, TensorReport
    from scalejax.surgery.quantize.quantization_plan import Weight


def quantize(
    checkpoint: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A folder of Hugging Face, a model folder, or one that `scalejax train` wrote."
        ),
    ],
    target: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder to write; must not be there yet.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Of all matrices but embeddings, head and routers, e.g. mxfp6_e3m2, nvfp4, int4:128, int8:row.",
        ),
    ],
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            metavar="PATTERN=FORMAT",
            help='Of modules whose whole path matches, e.g. "layers/0/.*=none"; may be repeated, the first counts.',
        ),
    ] = None,
    scale_rule: Annotated[
        str | None,
        typer.Option(
            "--scale-rule",
            metavar="RULE",
            help="For exponents as scales: floor, rceil, ceil, even, even_fbgemm, qwix. Default: floor.",
        ),
    ] = None,
    calibrate: Annotated[
        str, typer.Option("--calibrate", metavar="METHOD", help="What scales are chosen by: max, percentile or mse.")
    ] = "max",
    percentile: Annotated[
        float | None, typer.Option("--percentile", metavar="P", help="For --calibrate percentile. Default: 99.9.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            help="direct: each number to the nearest; error-diffusion: errors passed on, for outputs on --text.",
        ),
    ] = "direct",
    activations: Annotated[
        str | None,
        typer.Option(
            "--activations",
            metavar="FORMAT",
            help="Quantize also what they multiply, under scales found on --text: fp8_e4m3, int8 or nvfp4.",
        ),
    ] = None,
    text: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--text",
            metavar="PATH",
            help="To calibrate with: a file or folder of text. Default: sources of Python's standard library.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", help="Of the text, at most. Default: 16384."),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            "--damping",
            metavar="D",
            help="For error-diffusion: added to the covariance, times its mean. Default: 0.01.",
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="NAME", help="scalejax, compressed-tensors or gpt-oss, for other readers."),
    ] = "scalejax",
    shard_size: Annotated[
        float, typer.Option("--shard-size", metavar="GB", help="Largest file, unless one tensor is larger.")
    ] = 5.0,
    json: options.JsonFile = None,
    step: Step = None,
    recipe: options.RecipeFile = None,
) -> None:
    """Quantize the weights of a language model.

    OUT is a folder of Hugging Face with packed weights, which `scalejax generate`, `eval --text` and `convert` read.
    With --activations it also has a scale for what each weight multiplies, by which `generate` and `eval` quantize
    that.
    """
    environment.prepare()
    if not 0 < shard_size < float("inf"):
        raise UserError(f"--shard-size must be above 0 GB and finite; got {shard_size}.")
    from scalejax.models.llm.packed_layouts.known import find_layout
    from scalejax.numerics.quantized import static
    from scalejax.surgery.quantize import checkpoint as writing
    from scalejax.surgery.quantize import quantization_plan as planning
    from scalejax.surgery.quantize.calibration import Calibration

    check_one_of("--method", method, ("direct", "error-diffusion"))
    inputs = None if activations is None else static.find(activations, "--activations")
    if method == "direct":
        for option, given in (("--text", text), ("--tokens", tokens)):
            if given is not None and inputs is None:
                raise UserError(
                    f"{option} {given}: a direct cast reads no text. Leave it out, or add --method error-diffusion or "
                    "--activations FORMAT."
                )
        if damping is not None:
            raise UserError(f"--damping {damping}: goes with --method error-diffusion. Add it, or leave this out.")
    if calibrate != "percentile" and percentile is not None:
        raise UserError(f"--percentile {percentile}: goes with --calibrate percentile. Add it, or leave this out.")
    stored, rules = find_layout(layout, inputs), [planning.parse_rule(text) for text in rule or []]
    chosen: Any = scale_rule
    more = {} if percentile is None else {"percentile": percentile}
    calibration = Calibration(method=calibrate, scale_rule=chosen, **more)  # pyright: ignore[reportArgumentType]
    planning.check_format(format)
    model = folders.open_model(checkpoint, recipe=recipe, step=step)
    plan = planning.make(model, format, rules, stored, inputs)
    calibration.check({weight.format for weight in plan if weight.format is not None}, inputs)
    console = output.console()
    quantizer: Quantizer = writing.DirectCast(model, calibration)
    if method == "error-diffusion" or inputs is not None:
        from scalejax.inference import text_rows
        from scalejax.surgery.quantize.activations import ErrorDiffusion
        from scalejax.surgery.quantize.diffusion import DAMPING
        from scalejax.surgery.quantize.inputs import WithInputs

        found = text_rows.read_rows(model, text, 16_384 if tokens is None else tokens)
        console.print(f"Calibration text: {found.size:,} tokens in {len(found):,} rows.")
        if method == "error-diffusion":
            quantizer = ErrorDiffusion(model, plan, found, calibration, DAMPING if damping is None else damping)
        if inputs is not None:
            quantizer = WithInputs(model, plan, found, quantizer, calibration)
    total = sum(_stored_bytes(weight, stored, model) for weight in plan)
    with output.transfer(console) as progress:
        task = progress.add_task(f"to {target}", total=total)
        rows = writing.write(
            model,
            target,
            plan,
            quantizer,
            stored,
            shard_bytes=int(shard_size * 10**9),
            wrote=lambda count: progress.advance(task, count),
        )
    console.print(_table(rows))
    print(f"Wrote the quantized model {target}.")
    folders.print_next_of_model(target)
    if json is not None:
        output.write_json(json, writing.as_json(rows))


def _stored_bytes(weight: "Weight", layout: "PackedLayout", model: "LanguageModel") -> int:
    """Bytes that a weight of the plan will take."""
    if weight.format is None:
        return math.prod(weight.shape) * weight.tensor.dtype(model.source).itemsize
    inputs = 0 if weight.inputs is None else 4
    parts = layout.parts(weight.name, weight.format, weight.shape).values()
    return inputs + sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)


def _table(rows: Sequence["TensorReport"]) -> "table.Table":
    """A line for each quantized tensor, one for the others, and one for all."""
    from rich import box, table

    from scalejax import units

    diffused = any(row.output_error is not None for row in rows)
    scaled = any(row.inputs is not None for row in rows)
    shown = table.Table(box=box.SIMPLE, pad_edge=False)
    for name in ("tensor", "format", "before", "after", "bytes/number", "QSNR, dB"):
        shown.add_column(name, justify="left" if name in ("tensor", "format") else "right")
    if diffused:
        shown.add_column("output error / direct cast", justify="right")
    if scaled:
        shown.add_column("scale of activations", justify="right")

    def add(name: str, format: str, part: Sequence["TensorReport"], *more: str) -> None:
        before, after = sum(row.bytes_before for row in part), sum(row.bytes_after for row in part)
        each = after / max(1, sum(row.numbers for row in part))
        cells = [name, format, units.size(before), units.size(after), f"{each:.4g}", *more]
        shown.add_row(*cells, *[""] * (len(shown.columns) - len(cells)))

    for row in rows:
        if row.format is not None:
            padded = f" (+{row.padding:,} of padding)" if row.padding else ""
            more = [f"{row.qsnr:.2f}"]
            if diffused:
                more.append("" if row.output_error is None else f"{row.output_error:.3f}")
            if scaled:
                more.append("" if row.inputs is None else f"{row.inputs} {row.input_scale:.4g}")
            add(row.name, row.format + padded, [row], *more)
    kept = [row for row in rows if row.format is None]
    if kept:
        add(f"{len(kept)} others", "as they were", kept)
    add(f"all {len(rows)}", "", rows)
    return shown
