"""Folders that hold a language model: ours, those of Hugging Face, and the way from one to the other.

    model.json                     the architecture as data: {"format", "scalejax", "model": {"type", "fields"}, ...},
                                   and digests of the files beside it and of itself
    model.safetensors, or shards   parameters by our paths, a tensor a layer ("layers/3/attention/query"), in our layout
    tokenizer.json, ...            files of the tokenizer and generation_config.json, as they came

is a model folder of scalejax. A folder of Hugging Face has config.json instead of model.json, and its names and layouts
in the safetensors files. Parameters are copied tensor by tensor, one in memory at a time, and bit by bit unless another
dtype is asked for. A folder appears under its name when it is complete.

Nothing is ever instantiated because a file names it: `type` says which of the known architectures it is.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import scalejax
from scalejax import json_reading
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.tokenizer import TokenizerConfig
from scalejax.errors import UserError
from scalejax.models.llm import families, mapping, packed, safetensors
from scalejax.models.llm.architecture import Architecture, LanguageConfig
from scalejax.models.llm.mapping import Entry, ParamSource, StoredTensor, TableTensor, TensorSource
from scalejax.models.llm.packed import InputScale
from scalejax.models.llm.safetensors import Tensor, Written
from scalejax.models.llm.special_tokens import SpecialTokens, read_special, write_generation_config
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.train import disk
from scalejax.train.checkpoints.array_store import LazyArray
from scalejax.train.checkpoints.trained import Trained

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 2
"""Of 1 there are no digests. Raised when a scalejax of today could not read the folders of tomorrow."""

MODEL = "model.json"
CONFIG = "config.json"
RUN = "experiment.json"
GENERATION = "generation_config.json"
COPIED = (
    *(GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt"),
)
"""Files that go with a model as they are."""

Kind = Literal["model", "huggingface", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model that is somewhere on disk; no parameter is in memory.

    Attributes:
      path: Its folder.
      kind: Which kind of folder that is.
      config: Its architecture, with a vocabulary.
      tokens: Its special tokens.
      source: Its parameters.
      tokenizer: Its tokenizer; None = the folder has none that is known here.
      begins: What comes before a text: the token "bos" of the tokenizer, if it has one, or "nothing".
      inputs: Static scales of what weights multiply, by the weights' names in the folder.
      quantization: Rules for number formats under which a run was trained, and by which it is served. Parameters are
        the master parameters, in full.
      files: Files beside the parameters that go with it.
      made: Files that go with it and are written anew, as {name: content}.
      shards: Files that hold the parameters.
      remarks: What a user should know of how it was read.
    """

    path: pathlib.Path
    kind: Kind
    config: LanguageConfig
    tokens: SpecialTokens
    source: ParamSource
    tokenizer: TokenizerConfig | None
    begins: Literal["bos", "nothing"] = "bos"
    inputs: Mapping[str, InputScale] = dataclasses.field(default_factory=dict)
    quantization: tuple[QuantizationRule, ...] = ()
    files: tuple[pathlib.Path, ...]
    made: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shards: tuple[pathlib.Path, ...]
    remarks: tuple[str, ...] = ()

    @property
    def architecture(self) -> Architecture[Any]:
        """The family of its config."""
        return families.of(self.config)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of most of its parameters."""
        entries, sizes = families.own_table(self.config)
        counted: dict[np.dtype, int] = {}
        for entry in entries:
            dtype = self.source.dtype(entry.path)
            counted[dtype] = counted.get(dtype, 0) + math.prod(entry.shape(sizes))
        return max(counted, key=lambda dtype: counted[dtype])


def kind_of(folder: pathlib.Path) -> Kind:
    """The kind of a folder, by the file that describes it.

    Raises:
      UserError: it is not there, or none of the known kinds.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Give a model folder, one of Hugging Face, or a run folder.")
    kinds: dict[str, Kind] = {MODEL: "model", RUN: "run", CONFIG: "huggingface"}
    for name, kind in kinds.items():
        if (folder / name).is_file():
            return kind
    raise UserError(
        f"{folder} has no {MODEL} (a model folder of scalejax), no {CONFIG} (of Hugging Face) and no {RUN} (a run of "
        "`scalejax train`). Give one that has."
    )


def open_folder(folder: pathlib.Path) -> LanguageModel:
    """Opens a model folder or a folder of Hugging Face.

    Raises:
      UserError: it is damaged, or holds what is not known here; names the file, and the tensor or the field.
    """
    kind = kind_of(folder)
    if kind == "run":
        raise ValueError(f"open_folder: {folder} is a run folder; see run_model.open_run.")
    content = _read_json(folder / (MODEL if kind == "model" else CONFIG))
    family, config, tokens, unknown = _read_architecture(folder, kind, content)
    if kind == "model":
        _check_files(folder, content)
        entries, sizes = families.own_table(config)
    else:
        entries, sizes = family.entries(config), family.sizes(config)
    remarks: tuple[str, ...] = ()
    if unknown:
        remarks = (f"{CONFIG} also says {', '.join(unknown)}; nothing is known of that, and it was left out",)
    tensors = safetensors.open_folder(folder)
    shards = tuple(sorted({tensor.file for tensor in tensors.values()}))
    tensors, more = _without_copies(tensors, family, config)
    if kind == "huggingface":
        entries = family.stored_entries(config, tensors)
    stored: Mapping[str, StoredTensor] = tensors
    inputs: Mapping[str, InputScale] = {}
    if kind == "huggingface" and content.get("quantization_config") is not None:
        layers = min(config.layers, len(tensors) + 1)
        names = mapping.shapes(entries, sizes, layers)
        where = f"{folder / CONFIG}: quantization_config"
        found = packed.resolve(content["quantization_config"], tensors, names, _kind(content, folder), where)
        stored, more = found.tensors, more + found.remarks
        inputs = {name: scale for name, scale in found.inputs.items() if len(names.get(name, (0, 0))) == 2}
        if len(inputs) < len(found.inputs):
            count = len(found.inputs) - len(inputs)
            more += (f"of these scales {count} are left out: they are of all experts together",)
    mapping.check(entries, sizes, config.layers, stored, str(folder))
    _check_token_ids(folder, config, tokens)
    return LanguageModel(
        path=folder,
        kind=kind,
        config=config,
        tokens=tokens,
        source=TensorSource({entry.path: entry for entry in entries}, sizes, stored),
        tokenizer=HuggingFaceTokenizer(path=str(folder)) if (folder / "tokenizer.json").is_file() else None,
        inputs=inputs,
        files=tuple(folder / name for name in COPIED if (folder / name).is_file()),
        shards=shards,
        remarks=remarks + more,
    )


def read_config(folder: pathlib.Path) -> LanguageConfig:
    """The architecture of a model folder or a folder of Hugging Face; reads none of its parameters.

    Raises:
      UserError: as `open_folder`.
    """
    kind = kind_of(folder)
    return _read_architecture(folder, kind, _read_json(folder / (MODEL if kind == "model" else CONFIG)))[1]


def _read_architecture(
    folder: pathlib.Path, kind: Kind, content: dict[str, Any]
) -> tuple[Architecture[Any], LanguageConfig, SpecialTokens, tuple[str, ...]]:
    """(family, config, special tokens, keys of which nothing is known) by the file that describes a folder."""
    if kind == "model":
        config, tokens = _read_model_json(content, str(folder / MODEL))
        return families.of(config), config, tokens, ()
    family = families.of_folder(content, str(folder / CONFIG))
    return family, *family.read_config(content, str(folder / CONFIG))


def as_trained(model: LanguageModel) -> Trained:
    """The parameters of a model under our paths, as a run can begin with them; read when they are indexed."""
    entries, sizes = families.own_table(model.config)
    params = {}
    for entry in entries:
        own, layers = entry.shape(sizes), (model.config.layers,) if entry.stacked else ()
        read = functools.partial(_read_part, model.source, entry, layers)
        params[entry.path] = LazyArray((*layers, *own), model.source.dtype(entry.path), read)
    return Trained(params=params, step=0, architecture=model.config, origin=f"model folder {model.path}")


def _read_part(source: ParamSource, entry: Entry, layers: tuple[int, ...], index: Any) -> np.ndarray:
    if not layers:
        return source.read(entry.path, None)[index]
    first, *rest = index if isinstance(index, tuple) else (index,)
    chosen = range(*layers) if first is ... else range(*layers)[first]
    if not isinstance(chosen, range):
        return source.read(entry.path, chosen)[tuple(rest)]
    # Of each layer the part alone, and one layer at a time.
    return np.stack([source.read(entry.path, layer)[tuple(rest)] for layer in chosen])


def convert(
    model: LanguageModel,
    target: pathlib.Path,
    *,
    to: Literal["model", "huggingface"],
    experts: str | None = None,
    dtype: np.dtype | None = None,
    shard_bytes: int = safetensors.SHARD_BYTES,
    wrote: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes a model into a new folder.

    Args:
      model: The model.
      target: Folder that is not there yet, or is empty.
      to: What it shall be.
      experts: The form of experts in a folder of Hugging Face, one of `Architecture.forms`; None = the first.
      dtype: Of the parameters; None = as they are.
      shard_bytes: Largest file.
      wrote: Told the bytes of every tensor that is written.

    Raises:
      UserError: the target is there, the disk is full, the family has no such form, or a parameter cannot be read, is
        not finite, or is not any more in the dtype asked for.
    """
    config, family = model.config, model.architecture
    if to == "model":
        content = model_json(config, model.tokens)
        entries, sizes = families.own_table(config)
    else:
        entries = family.entries(config) if experts is None else family.entries_in(experts, config)
        sizes = family.sizes(config)
        content = family.write_config(config, model.tokens, str(model.dtype if dtype is None else dtype))
    named = mapping.tensors(entries, sizes, config.layers)

    def dtype_of(tensor: TableTensor) -> np.dtype:
        return tensor.dtype(model.source) if dtype is None else dtype

    def produce(name: str) -> np.ndarray:
        tensor = named[name]
        paths = " and ".join(entry.path for entry in tensor.entries)
        return mapping.cast(tensor.read(model.source, sizes), dtype_of(tensor), f"{model.path}: {paths}")

    plan = tuple(Written(name, dtype_of(tensor), tensor.shape(sizes)) for name, tensor in named.items())
    with disk.appearing(target) as folder:
        safetensors.write_folder(folder, plan, produce, shard_bytes=shard_bytes, wrote=wrote)
        for file in model.files:
            shutil.copyfile(file, folder / file.name)
        for name, text in model.made.items():
            (folder / name).write_text(text, encoding="utf-8")
        if to == "huggingface" and not (folder / GENERATION).exists():
            write_json(folder / GENERATION, write_generation_config(model.tokens))
        if to == "model":
            content["sha256"] = {file.name: _digest(file) for file in sorted(folder.iterdir())}
            content["digest"] = json_reading.digest(json.loads(json.dumps(content)))
        write_json(folder / (MODEL if to == "model" else CONFIG), content)


def model_json(config: LanguageConfig, tokens: SpecialTokens) -> dict[str, object]:
    """The content of model.json.

    Raises:
      UserError: the config has parts that it cannot name.
    """
    return {
        "format": FORMAT,
        "scalejax": scalejax.__version__,
        "model": {"type": _dotted(type(config)), "fields": _fields_as_data(config, families.of(config).parts)},
        "tokens": {"bos": tokens.bos, "eos": list(tokens.eos), "pad": tokens.pad},
    }


def _fields_as_data(config: "DataclassInstance", parts: tuple[type, ...]) -> dict[str, object]:
    """Fields as JSON; parts that are the default are left out, as they were before there were others."""
    made = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if value == field.default:
                continue
            if type(value) not in parts:
                raise UserError(
                    f"model.{field.name} is {type(value).__name__}, which a model folder cannot name: it knows "
                    f"{', '.join(part.__name__ for part in parts)}. Use the run folder as it is."
                )
            value = {"type": _dotted(type(value)), "fields": _fields_as_data(value, parts)}
        made[field.name] = value
    return made


def _from_data(data: Any, known: Mapping[type, tuple[type, ...]], where: str, what: str) -> Any:
    """One of the dataclasses that are known, each with those that it may hold; or a plain value."""
    if isinstance(data, list):
        return tuple(_from_data(item, known, where, what) for item in data)
    if not isinstance(data, dict):
        return data
    for one, parts in known.items():
        if data["type"] == _dotted(one):
            held = dict.fromkeys(parts, parts)
            return one(**{name: _from_data(value, held, where, name) for name, value in data["fields"].items()})
    names = ", ".join(map(_dotted, known))
    raise UserError(f"{where}: {what} {data['type']!r} is not known; {names} is.")


def _dotted(part: type) -> str:
    return f"{part.__module__}.{part.__qualname__}"


def parameter_bytes(model: LanguageModel, dtype: np.dtype | None = None) -> int:
    """Bytes of all parameters, as stored or in another dtype."""
    total = 0
    entries, sizes = families.own_table(model.config)
    for entry in entries:
        width = (model.source.dtype(entry.path) if dtype is None else dtype).itemsize
        total += math.prod(entry.shape(sizes)) * width * (model.config.layers if entry.stacked else 1)
    return total


def _check_files(folder: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Compares the files of a model folder with their digests; those of format 1 have none."""
    if content["format"] == 1:
        return
    for name, digest in content["sha256"].items():
        file = folder / name
        with disk.explained(f"cannot read {file}"):
            if not file.is_file() or _digest(file) != digest:
                raise UserError(f"{file}: is damaged, or not the file that was written. Restore it from a copy.")


def _digest(file: pathlib.Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_model_json(content: dict[str, Any], where: str) -> tuple[LanguageConfig, SpecialTokens]:
    version = content.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise UserError(
            f"{where}: has format {version!r}, and this scalejax reads up to {FORMAT}. Upgrade with "
            "`pip install -U scalejax`."
        )
    if version != 1 and content.get("digest") != json_reading.digest(content):
        raise UserError(f"{where}: is damaged. Restore it from a copy, or convert the model again.")
    try:
        known: dict[type, tuple[type, ...]] = {}
        for entry in families.known():  # of which several may share a class of configs
            known[entry.config] = tuple(dict.fromkeys((*known.get(entry.config, ()), *entry.parts)))
        config = _from_data(dict(content["model"]), known, where, "architecture")
        given = content["tokens"]
        tokens = read_special({f"{role}_token_id": given[role] for role in ("bos", "eos", "pad")}, where)
        if config.vocabulary is None:
            raise ValueError("it has no vocabulary")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: is not as this scalejax writes it: {error}. Convert the model again.") from error
    return config, tokens


def _kind(content: Mapping[str, object], folder: pathlib.Path) -> str:
    """What weights were before they were quantized, as config.json says it, by its name in a file."""
    given = content.get("dtype", content.get("torch_dtype"))
    for kind, dtype in safetensors.DTYPES.items():
        if given == str(dtype):
            return kind
    raise UserError(
        f"{folder / CONFIG}: dtype must say what quantized weights are decoded to, such as bfloat16; got {given!r}."
    )


def _without_copies(
    tensors: dict[str, Tensor], family: Architecture[Any], config: LanguageConfig
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors without those that say again what others and the config say."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(family.derived)}
    remarks = []
    for name, other in family.copies(config).items():
        if not {name, other} <= kept.keys():
            continue
        copy, original = kept.pop(name), kept[other]
        if original.kind not in safetensors.DTYPES or len(original.shape) != 2:
            continue  # which `mapping.check` refuses
        if not _equal(copy, original):
            raise UserError(
                f"{copy.file}: {name} differs from {other}, but config.json says that they are one (tied). Set "
                "tie_word_embeddings to false there if both count."
            )
        remarks.append(f"{name} repeats {other}, to which it is tied, and was left out")
    return kept, tuple(remarks)


def _equal(copy: Tensor, original: Tensor) -> bool:
    """Whether two matrices have the same bits, some rows at a time."""
    if copy.shape != original.shape or copy.kind != original.kind:
        return False
    rows = max(1, 2**25 // max(1, copy.shape[-1]))
    parts = [(slice(start, start + rows), slice(None)) for start in range(0, copy.shape[0], rows)]
    return all(copy.read(part).tobytes() == original.read(part).tobytes() for part in parts)


def _check_token_ids(folder: pathlib.Path, config: LanguageConfig, tokens: SpecialTokens) -> None:
    """Compares every id that files of the folder name with the vocabulary."""
    assert config.vocabulary is not None
    named = {folder: tokens}
    if (path := folder / GENERATION).is_file():
        named[path] = read_special(_read_json(path), str(path))
    for where, found in named.items():
        for role, ids in {"bos": (found.bos,), "eos": found.eos, "pad": (found.pad,)}.items():
            for i in ids:
                if i is not None and not -1 <= i < config.vocabulary:  # older files say -1 where there is none
                    raise UserError(
                        f"{where}: the {role} token is {i}, but the vocabulary ends at {config.vocabulary - 1}. The "
                        "config belongs to another model."
                    )
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    content = _read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        own = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
        added = [(token.get("content"), token["id"]) for token in content.get("added_tokens") or []]
        for token, i in (*own, *added):
            if type(i) is not int or not 0 <= i < config.vocabulary:
                raise UserError(
                    f"{path}: the token {token!r} has id {i!r}, but the model's ids are 0 to {config.vocabulary - 1}. "
                    "Take the tokenizer that belongs to the model."
                )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: has no vocabulary that can be read ({error!r}). Copy the file anew.") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json_reading.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}. Copy the file anew.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object; got {type(content).__name__}. Copy the file anew.")
    return content


def write_json(path: pathlib.Path, content: dict[str, object]) -> None:
    """Writes a file of a model folder."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
