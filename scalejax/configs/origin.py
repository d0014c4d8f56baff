"""What `init=FOLDER` brings to an experiment besides parameters: the model's config and its tokenizer, as settings.

They are recorded with the run (`FROM_INIT` of `experiment.json`), which goes on and is read when the folder has gone.
"""

import dataclasses
import functools
import pathlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scalejax import configs, json_reading
from scalejax.configs import overrides
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.architecture import Difference
    from scalejax.train.experiment import Experiment, Init

FROM_INIT = "from_init"
_NESTED = 4
"""Parts within parts: each has to be there before its fields can be set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BegunExperiment:
    """An experiment that begins as its `init` says.

    Attributes:
      experiment: The recipe with all settings.
      sets: Those of the user and those of `init`, in order.
      from_init: Those of `init`; None = the run begins with nothing.
      remarks: What `init` has changed of the recipe, for the console.
    """

    experiment: "Experiment"
    sets: tuple[str, ...]
    from_init: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, list[str]]:
        """What `experiment.json` of the run holds of it."""
        return {} if self.from_init is None else {FROM_INIT: list(self.from_init)}


def resolve(recipe: str, sets: Sequence[str] = (), run: pathlib.Path | None = None) -> BegunExperiment:
    """Builds the experiment of a recipe, with the model and the tokenizer of what its parameters begin with.

    Args:
      recipe: As `configs.load`.
      sets: `path=value` each, as the user gives them.
      run: Folder of the run. If it has begun with the same `init`, it keeps what that brought then.

    Raises:
      UserError: as `configs.load`; or a field that the user set, or a part that no text names, is not that of `init`.
    """
    experiment = configs.load(recipe, sets)
    if experiment.init is None:
        return BegunExperiment(experiment=experiment, sets=tuple(sets))
    from scalejax.train.experiment import Init

    init = Init(path=experiment.init) if isinstance(experiment.init, str) else experiment.init
    taken, remarks = _recorded(run, experiment), ()
    if taken is None and pathlib.Path(init.path).is_dir():
        taken, remarks = _brought(experiment, init, [text.partition("=")[0].strip() for text in sets])
    taken = taken or ()
    experiment = overrides.apply(experiment, taken)
    return BegunExperiment(experiment=experiment, sets=(*sets, *taken), from_init=taken, remarks=remarks)


def _recorded(run: pathlib.Path | None, experiment: "Experiment") -> tuple[str, ...] | None:
    """What `init` brought to a run that has begun; None = none has begun with it."""
    if run is None or not (path := run / "experiment.json").is_file():
        return None
    from scalejax.train import architecture

    try:
        record = json_reading.read(path)
    except (OSError, ValueError):
        return None  # which whoever opens the run says
    recorded = record.get(FROM_INIT) if isinstance(record, dict) else None
    if not isinstance(recorded, list) or not all(isinstance(text, str) for text in recorded):
        return None
    before = architecture.fields_of(record.get("experiment")).get("init")
    return tuple(recorded) if architecture.plain(before) == architecture.plain(experiment.init) else None


def _brought(experiment: "Experiment", init: "Init", own: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(settings, remarks): where the experiment is not that of the folder or run."""
    from scalejax.train import architecture
    from scalejax.train.runs.run_state import remakes

    model, tokenizer = _source(experiment, init)
    taken: list[str] = []
    changed: dict[str, str] = {}
    remade = remakes(init.surgery)
    for _ in range(_NESTED if model is not None and remade is not None else 0):
        found = architecture.differences(experiment.model, model, remade=remade or ())
        found = [one for one in found if not (one.shaped and _touched(one.path, own))]
        if not found:
            break
        _check_own(found, own, init)
        before = experiment
        experiment, texts = _applied(before, found, init)
        taken += texts
        changed |= {one.path: architecture.shown(one.here) for one in found if one.path not in changed}
    for path, here in _named(experiment.data, "tokenizer"):
        if tokenizer is None or _same_tokenizer(here, tokenizer):
            continue
        there = _one_line(tokenizer)
        if _touched(path, own):
            raise UserError(
                f"--set {path}...: {_one_line(here)} is not the tokenizer of init={init.path}, which is {there}. Leave "
                "it out: the ids of the trained model are those of its tokenizer."
            )
        texts = _tokenizer_sets(path, here, tokenizer)
        experiment, taken = overrides.apply(experiment, texts), [*taken, *texts]
        changed[path] = _one_line(here)
    size = getattr(experiment.model, "vocabulary", None)
    for path, here in _named(experiment.data, "vocabulary"):
        if model is not None and here not in (None, size) and not _touched(path, own):
            taken.append(f"{path}={overrides.show(size)}")
            changed[path] = overrides.show(here)
    if not taken:
        return (), ()
    known = {text.partition("=")[0]: text for text in taken}
    words = [f"{text} ({changed[path]})" if path in changed else text for path, text in known.items()]
    return tuple(taken), (f"init={init.path} says, in place of what the recipe has (in brackets): {', '.join(words)}.",)


def _source(experiment: "Experiment", init: "Init") -> tuple[object | None, object | None]:
    """(model, tokenizer) of a folder or run, as configs or their data; None where it says nothing of it."""
    from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
    from scalejax.train import architecture
    from scalejax.train.checkpoints import checkpoint, trained

    path = pathlib.Path(init.path)
    if not trained.is_run(path):
        read = getattr(experiment.model, "of_folder", None)
        file = path / "tokenizer.json"
        return None if read is None else read(path), HuggingFaceTokenizer(path=str(file)) if file.is_file() else None
    if not (path / "experiment.json").is_file():
        return None, None
    record: Any = json_reading.read(path / "experiment.json")
    step = init.step if init.step is not None else max(checkpoint.listed(path / "checkpoints"), default=0)
    data = architecture.fields_of(record.get("experiment")).get("data")
    tokenizers = [value for _, value in _named(data, "tokenizer") if architecture.type_of(value) in _tokenizers()]
    return architecture.of_run(record, step), next(iter(tokenizers), None)


def _touched(path: str, own: Sequence[str]) -> bool:
    """Whether the user has set a field, a part of it, or what it is a part of."""
    return any(f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in own)


def _check_own(found: "Sequence[Difference]", own: Sequence[str], init: "Init") -> None:
    """Refuses settings of the user that contradict the folder, and models that no setting makes of the recipe's."""
    from scalejax.train import architecture

    clashes = [one for one in found if _touched(one.path, own)]
    if clashes:
        said = "; ".join(
            f"{one.path} is {architecture.shown(one.there)} in init={init.path}, and --set says "
            f"{architecture.shown(one.here)}"
            for one in clashes
        )
        raise UserError(f"{said}. Leave it out: parameters go with what they were trained with.")


def _applied(experiment: "Experiment", found: "Sequence[Difference]", init: "Init") -> tuple["Experiment", list[str]]:
    """(the experiment with the values of the folder, the settings), in an order in which each can be."""

    pending, texts = list(found), []
    while pending:
        refused: dict[Difference, UserError] = {}
        for one in pending:
            text = f"{one.path}={_text(one.there)}"
            try:
                experiment = overrides.apply(experiment, [text])
                texts.append(text)
            except UserError as error:
                refused[one] = error
        if len(refused) == len(pending):
            one, error = refused.popitem()
            raise UserError(
                f"init={init.path}: {one}, and no setting makes one of the other ({error}). Take a recipe of "
                "that model."
            ) from error
        pending = list(refused)
    return experiment, texts


def _text(value: object) -> str:
    """A value as it is written after `path=`."""
    from scalejax.train import architecture

    return architecture.type_of(value) or overrides.show(architecture.plain(value))


def _named(value: object, name: str, path: str = "data") -> Iterator[tuple[str, object]]:
    """(path, value) of the fields of that name within a config or its data."""
    from scalejax.train import architecture

    if isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _named(item, name, f"{path}.{number}")
    for field, one in architecture.fields_of(value).items():
        if field == name:
            yield f"{path}.{field}", one
        else:
            yield from _named(one, name, f"{path}.{field}")


@functools.cache
def _tokenizers() -> Mapping[str, type]:
    from scalejax.data.text.files import AnyTokenizer

    return {one.__name__: one for one in typing.get_args(AnyTokenizer)}


def _built(tokenizer: object) -> Any:
    """The tokenizer of a config or of its data; None where its files cannot be read."""
    from scalejax.train import architecture

    try:
        config = _tokenizers()[str(architecture.type_of(tokenizer))](**architecture.fields_of(tokenizer))
        return config.build()
    except (UserError, KeyError, TypeError):
        return None


def _file(tokenizer: object) -> pathlib.Path | None:
    """tokenizer.json of a tokenizer of Hugging Face."""
    from scalejax.train import architecture

    if architecture.type_of(tokenizer) != "HuggingFaceTokenizer":
        return None
    path = pathlib.Path(str(architecture.fields_of(tokenizer)["path"]))
    return path / "tokenizer.json" if path.is_dir() else path


def _same_tokenizer(here: object, there: object) -> bool:
    """Whether texts become the same ids; the tokens that begin and end documents may be named otherwise."""
    from scalejax.data.text import tokenizer_files
    from scalejax.train import architecture

    if architecture.plain(here) == architecture.plain(there):
        return True
    files = [_file(here), _file(there)]
    if all(files):
        texts = [file.read_bytes() for file in files if file is not None and file.is_file()]
        return len(texts) == 2 and texts[0] == texts[1]
    built = _built(here)
    if built is None:
        return False
    if files[1] is not None:  # as `scalejax convert` writes the tokenizer of bytes, or of characters
        made = tokenizer_files.of(built, "bos").get("tokenizer.json")
        return made is not None and files[1].is_file() and files[1].read_text(encoding="utf-8") == made
    other = _built(there)
    return other is not None and built.fingerprint == other.fingerprint


def _tokenizer_sets(path: str, here: object, there: object) -> list[str]:
    """Settings that make the tokenizer that of the folder or run."""
    from scalejax.train import architecture

    kind, fields = architecture.type_of(there), dict(architecture.fields_of(there))
    if (file := _file(there)) is not None:
        sets = [f"{path}={file}"]
        del fields["path"]
    else:
        sets = [] if architecture.type_of(here) == kind else [f"{path}={kind}"]
    return sets + [f"{path}.{name}={value!r}" for name, value in fields.items() if value not in (None, "")]


def _one_line(tokenizer: object) -> str:
    """A tokenizer for a message."""
    from scalejax.train import architecture

    fields = architecture.fields_of(tokenizer)
    return " ".join([str(architecture.type_of(tokenizer)), *([str(fields["path"])] if fields.get("path") else [])])
