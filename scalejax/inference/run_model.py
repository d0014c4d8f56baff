"""The language model of a run folder, as its checkpoints hold it."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from scalejax.data.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.mixture import MixtureData
from scalejax.data.staged import StagedData
from scalejax.data.text import TextData
from scalejax.data.tokenizer import Bytes, Characters, Tokenizer
from scalejax.errors import UserError
from scalejax.inference.averaging import AveragedSource
from scalejax.inference.model_folder import COPIED, LanguageModel
from scalejax.models.llm import mapping
from scalejax.models.llm.llama3 import LlamaConfig, huggingface
from scalejax.models.llm.llama3.huggingface import SpecialTokens
from scalejax.models.llm.mapping import Entry, Index
from scalejax.train import manifest as manifests
from scalejax.train.array_store import ArrayStore
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.experiment import AnyExperiment, Checkpoints, GraphExperiment
from scalejax.train.manifest import Manifest

_PREFIX = "params."
_UNDER_RULES = (
    "trained under rules for number formats, which go with the run; its parameters are the master parameters, and a "
    "folder written from them computes without these formats"
)


@dataclasses.dataclass
class CheckpointSource:
    """Parameters of a checkpoint; one is held whole at a time.

    Attributes:
      folder: The checkpoint's arrays.
      entries: Which parameters there are.
      manifest: What the checkpoint says of itself.
    """

    folder: pathlib.Path
    entries: dict[str, Entry]
    manifest: Manifest
    _held: tuple[str, np.ndarray] | None = None

    def dtype(self, path: str) -> np.dtype:
        """Dtype as stored."""
        return np.dtype(self.manifest.arrays[_PREFIX + path]["dtype"])

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """See `mapping.Source`."""
        if self._held is None or self._held[0] != path:
            self._held = None  # before the next one comes
            self._held = (path, self._read(path))
        array = self._held[1]
        part = array if layer is None else array[layer]
        return np.ascontiguousarray(part if index is None else part[index])

    def _read(self, path: str) -> np.ndarray:
        described = self.manifest.arrays[_PREFIX + path]
        here = SingleDeviceSharding(_host())
        target = jax.ShapeDtypeStruct(tuple(described["shape"]), np.dtype(described["dtype"]), sharding=here)
        store = ArrayStore()
        try:
            array = np.asarray(store.read(self.folder, {_PREFIX + path: target})[_PREFIX + path])
        finally:
            store.close()
        mapping.check_finite(array, f"{self.folder}: {path}")
        return array


def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may name an accelerator alone
        return jax.local_devices()[0]


def open_run(
    run_folder: pathlib.Path, experiment: AnyExperiment, step: int | None = None, average: int = 1
) -> LanguageModel:
    """Opens a checkpoint of a run, or the mean of several.

    Args:
      run_folder: Its folder.
      experiment: What the run is, see `configs.serialization.reload`.
      step: Which checkpoint; None = the newest.
      average: Take the mean of this checkpoint and the average - 1 before it.

    Raises:
      UserError: it is no run of a language model, has no such checkpoint or too few of them, or a damaged one.
    """
    model, data = experiment.model, _text_of(experiment.data)
    if isinstance(experiment, GraphExperiment) or not isinstance(model, LlamaConfig) or data is None:
        raise UserError(
            f"RUN_FOLDER {run_folder} is a run of {type(model).__name__}, not of a language model. Give a run of "
            "LlamaConfig."
        )
    config = model.bound(experiment.data.schema())
    tokenizer = data.tokenizer.build()
    steps = _existing(run_folder / "checkpoints", step, average)
    folders = tuple(run_folder / "checkpoints" / str(step) for step in steps)
    sources = tuple(_source(folder, config) for folder in folders)
    # Documents begin as the data says: that is part of what the model has learnt.
    begins = "bos" if data.marks in ("begin", "both") else "nothing"
    return LanguageModel(
        path=run_folder,
        kind="run",
        config=config,
        tokens=SpecialTokens(bos=tokenizer.bos, eos=tuple(tokenizer.stop_ids), pad=tokenizer.pad),
        source=sources[0] if average == 1 else AveragedSource(sources),
        tokenizer=data.tokenizer,
        begins=begins,
        quantization=experiment.quantization,
        files=_tokenizer_files(data),
        made=_tokenizer_made(tokenizer, begins),
        shards=folders,
        remarks=(
            f"{'step' if average == 1 else 'mean of steps'} {', '.join(map(str, steps))} of the run",
            *([_UNDER_RULES] if experiment.quantization else []),
        ),
    )


def _text_of(data: Any) -> TextData | None:
    """Where the tokenizer of a run stands: all parts of its data have the same."""
    if isinstance(data, StagedData):
        return _text_of(data.stages[-1].data)
    if isinstance(data, MixtureData):
        return data.sources[0][0]
    return data if isinstance(data, TextData) else None


def _source(folder: pathlib.Path, config: LlamaConfig) -> CheckpointSource:
    manifest = manifests.read(folder)
    entries = {entry.path: entry for entry in huggingface.entries(config)}
    sizes = huggingface.sizes(config)
    for path, entry in entries.items():
        wanted = [*([config.layers] if entry.stacked else []), *entry.shape(sizes)]
        found = manifest.arrays.get(_PREFIX + path, {}).get("shape")
        if found != wanted:
            raise UserError(f"checkpoint {folder}: {path} has shape {found}; the run's recipe says {wanted}.")
    manifests.check_files(folder, manifest.files)
    return CheckpointSource(folder / "arrays", entries, manifest)


def _existing(folder: pathlib.Path, step: int | None, average: int) -> list[int]:
    """The last `average` checkpoints up to a step."""
    if average < 1:
        raise UserError(f"--average must be at least 1; got {average}.")
    steps = Checkpointer(folder, Checkpoints(), {}).steps() if folder.is_dir() else []
    if not steps:
        raise UserError(f"{folder} holds no checkpoint. Train first, or give another run folder.")
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: {folder} has {', '.join(map(str, steps))}. Name one of these.")
    found = sorted(s for s in steps if step is None or s <= step)
    if len(found) < average:
        raise UserError(
            f"--average {average}: {folder} has {len(found)} checkpoints up to there ({', '.join(map(str, found))}). "
            "Average fewer, or keep more (--set checkpoints.keep_last=N when training)."
        )
    return found[-average:]


def _tokenizer_files(data: TextData) -> tuple[pathlib.Path, ...]:
    if not isinstance(data.tokenizer, HuggingFaceTokenizer):
        return ()
    path = pathlib.Path(data.tokenizer.path)
    folder = path if path.is_dir() else path.parent
    return tuple(folder / name for name in COPIED if (folder / name).is_file())


def _tokenizer_made(tokenizer: Tokenizer, begins: str) -> dict[str, str]:
    """Files that other libraries read for tokenizers that have none: {} for one that has."""
    if isinstance(tokenizer, Bytes):
        return _byte_tokenizer(begins)
    return _character_tokenizer(tokenizer.alphabet) if isinstance(tokenizer, Characters) else {}


def _character_tokenizer(alphabet: str) -> dict[str, str]:
    """Characters as words of one character; others are errors, as the token for unknown words does not exist."""
    one = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    words = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(alphabet)}, "unk_token": "<|unknown|>"}
    return _tokenizer_files_of(specials=[], before=one, after={"type": "Fuse"}, model=words, config={})


def _byte_tokenizer(begins: str) -> dict[str, str]:
    """The tokenizer of bytes as the files of a byte-level BPE without merges, which other libraries read."""
    specials = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for name, i in Bytes.special_ids.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {c: byte for byte, c in enumerate(_byte_characters())}, "merges": []}
    config = {"eos_token": "<|eos|>", "pad_token": "<|pad|>"} | ({"bos_token": "<|bos|>"} if begins == "bos" else {})
    return _tokenizer_files_of(specials=specials, before=level, after=level, model=model, config=config)


def _tokenizer_files_of(*, specials: list[Any], before: Any, after: Any, model: Any, config: Any) -> dict[str, str]:
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token | {"special": True} for token in specials],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": after,
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (those of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
