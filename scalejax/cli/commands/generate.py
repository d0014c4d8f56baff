"""`scalejax generate`: continue text with a language model."""

import functools
import json as jsons
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.cli.commands.convert import Step, check_dtype
from scalejax.errors import UserError, check_one_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from scalejax.data.images.codebook import PatchCodebook
    from scalejax.inference.text import Completion, Writer
    from scalejax.models.llm.model_folder import LanguageModel

_TOKENS = 128


def generate(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="FOLDER", help="A folder that `scalejax train` wrote, a model folder, or one of Hugging Face."
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help='A file that is one prompt, or FILE.jsonl: a string or {"prompt": ...} a line; may be repeated.',
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            help="New tokens of each prompt. Default: 128, or fewer where the model has no positions for them.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="T", help="0: always the most probable token; 1: as the model says."),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Draw from the smallest set of tokens of this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed draws the same text.")] = 0,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Continuations of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End where this text or special token comes; may be repeated."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Texts generated at once.")] = 8,
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
    images: Annotated[
        pathlib.Path | None,
        typer.Option("--images", metavar="FOLDER", help="Write what a model of text and images draws, as PNG files."),
    ] = None,
    mesh: options.MeshSizes = None,
    json: options.JsonFile = None,
    step: Step = None,
    recipe: options.RecipeFile = None,
    cpu_devices: options.CpuDevices = None,
) -> None:
    """Continue text with a language model.

    The text of a single prompt is printed as it comes.
    """
    environment.prepare(cpu_devices=cpu_devices)
    prompts = _prompts(prompt or [], prompt_file or [])
    check_dtype(dtype)
    check_one_of("--weights", weights, ("packed", "decoded"))
    from scalejax.inference.sampling import TokenSampling
    from scalejax.parallel.mesh import MeshShape, make_mesh, parse_mesh

    sampling = TokenSampling(temperature=temperature, top_p=top_p, seed=seed)
    # Without a word, every device holds a part of each matrix.
    made = make_mesh(MeshShape(fsdp=1, tensor=-1) if mesh is None else parse_mesh(mesh))
    model = folders.open_model(folder, recipe=recipe, step=step)
    begin = time.perf_counter()
    writer = _load(model, made, dtype, weights)
    loaded_s = time.perf_counter() - begin
    codebook = _codebook(model, writer, images)
    if max_tokens is None:
        longest = max(len(writer.encode(prompt)) for prompt in prompts)
        max_tokens = max(1, min(_TOKENS, writer.engine.config.max_positions - longest))
    asked = {"max_tokens": max_tokens, "sampling": sampling, "stop": tuple(stop or ())}
    begin = time.perf_counter()
    if len(prompts) == 1 and samples == 1:
        writer.engine.check([writer.encode(prompts[0])], max_tokens)  # before anything is shown
        print(prompts[0], end="", flush=True)
        found = [writer.stream(prompts[0], show=lambda piece: print(piece, end="", flush=True), **asked)]
        print()
    else:
        found = writer.complete(prompts, samples=samples, batch_size=batch_size, **asked)
        _print_all(found, samples)
    seconds = time.perf_counter() - begin
    if codebook is not None:
        _draw(codebook, writer, found, images)
    tokens = sum(len(c.tokens) for c in found)
    print(
        f"{tokens:,} tokens in {seconds:.2f} s, compilation included ({tokens / seconds:.1f} tokens/s; loading took "
        f"{loaded_s:.1f} s).",
        file=sys.stderr,
    )
    if json is not None:
        output.write_json(json, [_as_json(c) for c in found])


def _codebook(model: "LanguageModel", writer: "Writer", folder: pathlib.Path | None) -> "PatchCodebook | None":
    """What draws the images of a model; None of one of text alone."""
    from scalejax.data.images.codebook import PatchCodebook
    from scalejax.data.images.tokenizer import TextAndImages
    from scalejax.data.images.two_modality import CODEBOOK

    if isinstance(writer.tokenizer, TextAndImages):
        return PatchCodebook.read(model.path / CODEBOOK)
    if folder is not None:
        raise UserError(f"--images {folder}: {model.path} is a model of text alone. Leave it out.")
    return None


def _draw(
    codebook: "PatchCodebook", writer: "Writer", found: Sequence["Completion"], folder: pathlib.Path | None
) -> None:
    """Writes the images in texts, and says how many there are."""
    from scalejax.data.images import pictures
    from scalejax.data.images.tokenizer import TextAndImages, whole_images

    assert isinstance(writer.tokenizer, TextAndImages)
    ids = writer.tokenizer.ids
    codes = [whole_images([*writer.encode(c.prompt), *c.tokens], ids) for c in found]
    count = sum(map(len, codes))
    if folder is None:
        print(f"{count} whole images; --images FOLDER writes them.", file=sys.stderr)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, pixels in enumerate(pixels for own in codes for pixels in codebook.decode(own)):
            (folder / f"image-{number + 1}.png").write_bytes(pictures.png(pixels))
    except OSError as error:
        raise UserError(f"--images {folder}: cannot be written: {error}. Name another folder.") from error
    print(f"{count} whole images in {folder}.", file=sys.stderr)


def _load(model: "LanguageModel", mesh: "Mesh", dtype: str | None, weights: str) -> "Writer":
    import jax.numpy as jnp
    import rich.console

    from scalejax.inference import text
    from scalejax.models.llm import model_folder

    total = model_folder.parameter_bytes(model, jnp.dtype(model.dtype if dtype is None else dtype))
    with output.transfer(rich.console.Console(stderr=True)) as progress:  # standard output is for the text
        task = progress.add_task(f"from {model.path}", total=total)
        loaded = functools.partial(progress.advance, task)
        return text.open_writer(model, mesh, dtype=dtype, weights=weights, loaded=loaded)


def _prompts(given: Sequence[str], files: Sequence[pathlib.Path]) -> list[str]:
    found = list(given)
    for path in files:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {path}: cannot be read as UTF-8 text: {error}.") from error
        if path.suffix != ".jsonl":
            found.append(content)
            continue
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                found.append(_prompt_of(line, f"--prompt-file {path}, line {number}"))
    if not found:
        raise UserError("--prompt or --prompt-file must say what to continue. Add --prompt TEXT.")
    return found


def _prompt_of(line: str, where: str) -> str:
    try:
        value = jsons.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: is no JSON: {error}.") from error
    value = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(value, str):
        raise UserError(f'{where}: must be a string or {{"prompt": string}}; got {line.strip()[:60]!r}.')
    return value


def _print_all(found: Sequence["Completion"], samples: int) -> None:
    for number, completion in enumerate(found):
        sample = f", sample {number % samples + 1}" if samples > 1 else ""
        print(f"=== prompt {number // samples + 1}{sample} ({completion.ended})")
        print(completion.prompt + completion.text)


def _as_json(completion: "Completion") -> dict[str, object]:
    return {
        "prompt": completion.prompt,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "ended": completion.ended,
    }
