"""`scalejax generate`: continue text with a language model."""

import dataclasses
import functools
import json as jsons
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import chat as chats
from scalejax.cli import environment, folders, options, output
from scalejax.cli.commands.convert import Step, check_dtype
from scalejax.errors import UserError, check_one_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from scalejax.data.images.codebook import PatchCodebook
    from scalejax.inference.generate import Engine
    from scalejax.inference.sampling import TokenSampling
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
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk with a model that has a chat template: a line is a message.")
    ] = False,
    messages: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--messages", metavar="FILE", help='Answer a conversation: JSON, [{"role": "user", "content": "..."}, ...].'
        ),
    ] = None,
    token_ids: Annotated[
        list[str] | None,
        typer.Option(
            "--token-ids",
            metavar="IDS",
            help='Token ids to continue, "1 2 3" or "1,2,3"; may be repeated. Prints new ids, and needs no tokenizer.',
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
    """Continue text with a language model, or talk with it.

    The text of a single prompt is printed as it comes, and so are answers.
    """
    environment.prepare(cpu_devices=cpu_devices)
    alone = {"--chat": chat, "--messages": messages, "--token-ids": token_ids}
    others = {"--prompt": prompt, "--prompt-file": prompt_file, "--images": images}
    _check_alone(alone, others | ({"--stop": stop} if token_ids else {"--samples": samples > 1}))
    ids = [_ids(text) for text in token_ids or []]
    conversation = None if messages is None else chats.read(messages)
    prompts = [] if any(alone.values()) else _prompts(prompt or [], prompt_file or [])
    check_dtype(dtype)
    check_one_of("--weights", weights, ("packed", "decoded"))
    from scalejax.inference import generate as generation
    from scalejax.inference.sampling import TokenSampling
    from scalejax.inference.text import open_writer
    from scalejax.parallel.mesh import MeshShape, make_mesh, parse_mesh

    sampling = TokenSampling(temperature=temperature, top_p=top_p, seed=seed)
    asked = _Asked(max_tokens, sampling, tuple(stop or ()), samples, batch_size)
    # Without a word, every device holds a part of each matrix.
    made = make_mesh(MeshShape(fsdp=1, tensor=-1) if mesh is None else parse_mesh(mesh))
    model = folders.open_model(folder, recipe=recipe, step=step)
    load = functools.partial(_load, model, made, dtype, weights)
    results: list[dict[str, object]]
    if ids:
        _check_ids(ids, model)
        engine, loaded_s = load(generation.load)
        results = _continue_ids(engine, ids, model.tokens.eos, asked, loaded_s)
    elif prompts:
        writer, loaded_s = load(open_writer)
        codebook = _codebook(model, writer, images)
        found = _continue_texts(writer, prompts, asked, loaded_s)
        if codebook is not None:
            _draw(codebook, writer, found, images)
        results = [_as_json(c) for c in found]
    else:
        render = chats.renderer(model)
        # What is wrong with messages is said before parameters are loaded.
        text = None if conversation is None else render(conversation)
        writer, _ = load(open_writer)
        writer = writer.in_session()
        reply = functools.partial(_reply, writer, asked)
        results = [_as_json(c) for c in (chats.converse(render, reply) if text is None else [reply(text)])]
    if json is not None:
        output.write_json(json, results)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is asked for besides prompts, as the options say it."""

    max_tokens: int | None
    sampling: "TokenSampling"
    stop: tuple[str, ...]
    samples: int
    batch_size: int

    def new_tokens(self, engine: "Engine", longest: int) -> int:
        """For prompts of up to `longest` tokens."""
        if self.max_tokens is not None:
            return self.max_tokens
        return max(1, min(_TOKENS, engine.config.max_positions - longest))


def _check_alone(alone: Mapping[str, object], others: Mapping[str, object]) -> None:
    """Refuses what does not go with one of the options that say what to do."""
    given = [name for name, value in alone.items() if value]
    wrong = [*given[1:], *(name for name, value in others.items() if value)]
    if given and wrong:
        raise UserError(f"{given[0]} does not go with {wrong[0]}. Leave one of them out.")


def _continue_texts(writer: "Writer", prompts: Sequence[str], asked: _Asked, loaded_s: float) -> Sequence["Completion"]:
    longest = max(len(writer.encode(prompt)) for prompt in prompts)
    more = {
        "max_tokens": asked.new_tokens(writer.engine, longest),
        "sampling": asked.sampling,
        "stop": asked.stop,
    }
    begin = time.perf_counter()
    if len(prompts) == 1 and asked.samples == 1:
        writer.engine.check([writer.encode(prompts[0])], more["max_tokens"])  # before anything is shown
        print(prompts[0], end="", flush=True)
        found = [writer.stream(prompts[0], show=lambda piece: print(piece, end="", flush=True), **more)]
        print()
    else:
        found = writer.complete(prompts, samples=asked.samples, batch_size=asked.batch_size, **more)
        _print_all(found, asked.samples)
    _say_speed(sum(len(c.tokens) for c in found), time.perf_counter() - begin, loaded_s)
    return found


def _continue_ids(
    engine: "Engine", prompts: Sequence[Sequence[int]], stop: Sequence[int], asked: _Asked, loaded_s: float
) -> list[dict[str, object]]:
    """Prints the new ids of each prompt, a line each."""
    from scalejax.inference.sampling import check_samples

    check_samples(asked.samples, asked.sampling)
    most = asked.new_tokens(engine, max(map(len, prompts)))
    engine.check(prompts, most)
    rows = [(prompt, sample) for prompt in prompts for sample in range(asked.samples)]
    results: list[dict[str, object]] = []
    begin, count = time.perf_counter(), 0
    for start in range(0, len(rows), asked.batch_size):
        part = rows[start : start + asked.batch_size]
        found = engine.generate(
            [prompt for prompt, _ in part],
            max_tokens=most,
            sampling=asked.sampling,
            stop=stop,
            samples=[sample for _, sample in part],
        )
        for (prompt, _), c in zip(part, found, strict=True):
            print(*c.tokens, flush=True)
            results.append({"prompt": list(prompt), "tokens": list(c.tokens), "ended": c.ended})
            count += len(c.tokens)
    _say_speed(count, time.perf_counter() - begin, loaded_s)
    return results


def _reply(writer: "Writer", asked: _Asked, prompt: str) -> "Completion":
    most = asked.new_tokens(writer.engine, len(writer.encode(prompt)))
    return chats.answer(writer, prompt, max_tokens=most, sampling=asked.sampling, stop=asked.stop)


def _say_speed(tokens: int, seconds: float, loaded_s: float) -> None:
    print(
        f"{tokens:,} tokens in {seconds:.2f} s, compilation included ({tokens / seconds:.1f} tokens/s; loading took "
        f"{loaded_s:.1f} s).",
        file=sys.stderr,
    )


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = [word for word in words if not (word.isascii() and word.isdigit() and len(word) < 20)]
    if wrong or not words:
        raise UserError(
            "--token-ids must be ids, separated by spaces or commas, such as '1 2 3'; got "
            f"{(wrong or [text])[0][:60]!r}."
        )
    return [int(word) for word in words]


def _check_ids(prompts: Sequence[Sequence[int]], model: "LanguageModel") -> None:
    vocabulary = model.config.vocabulary
    assert vocabulary is not None
    for i in (i for prompt in prompts for i in prompt):
        if i >= vocabulary:
            raise UserError(f"--token-ids: {i} is no id of {model.path}, whose ids are 0 to {vocabulary - 1}.")


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


def _load(
    model: "LanguageModel", mesh: "Mesh", dtype: str | None, weights: str, opened: "Callable[..., folders.Loaded]"
) -> "tuple[folders.Loaded, float]":
    """What opens the model, and the seconds that it took."""
    begin = time.perf_counter()
    return folders.load(opened, model, mesh, dtype=dtype, weights=weights), time.perf_counter() - begin


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
        raise UserError("--prompt or --prompt-file must say what to continue. Add --prompt TEXT, or talk with --chat.")
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
