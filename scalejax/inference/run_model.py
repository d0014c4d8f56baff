"""The language model of a run folder, as its checkpoints hold it."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from scalejax.data.images.tokenizer import InterleavedTokenizer
from scalejax.data.images.two_modality import TwoModalityData
from scalejax.data.text import tokenizer_files
from scalejax.data.text.files import TextData
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.mixture import MixtureData
from scalejax.data.text.shards import TokenShards
from scalejax.data.text.staged import StagedData
from scalejax.errors import UserError
from scalejax.models.llm import families, mapping
from scalejax.models.llm.architecture import LanguageConfig
from scalejax.models.llm.mapping import Index
from scalejax.models.llm.model_folder import COPIED, LanguageModel
from scalejax.models.llm.special_tokens import SpecialTokens
from scalejax.nn import counts
from scalejax.train import phases
from scalejax.train.checkpoints import trained
from scalejax.train.checkpoints.array_store import AnyArray
from scalejax.train.experiment import Experiment

_UNDER_RULES = (
    "trained under rules for number formats, which go with the run; its parameters are the master parameters, and a "
    "folder written from them computes without these formats"
)


_Source = TextData | TwoModalityData | TokenShards


@dataclasses.dataclass
class ParamsSource:
    """Implements `mapping.ParamSource`: parameters of a run, of which one is held whole at a time.

    Attributes:
      params: By path.
      origin: What they come from, for messages.
    """

    params: Mapping[str, AnyArray]
    origin: str
    _held: tuple[str, np.ndarray] | None = None

    def dtype(self, path: str) -> np.dtype:
        """Dtype as stored."""
        return self.params[path].dtype

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """See `mapping.ParamSource`."""
        if self._held is None or self._held[0] != path:
            self._held = None  # before the next one comes
            array = self.params[path][...]
            mapping.check_finite(array, f"{self.origin}: {path}")
            self._held = (path, array)
        array = self._held[1]
        part = array if layer is None else array[layer]
        return np.ascontiguousarray(part if index is None else part[index])


def open_run(
    run_folder: pathlib.Path, experiment: Experiment, step: int | None = None, average: int = 1
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
    experiment = phases.experiment_at(experiment, run_folder, step)
    model: Any = experiment.model
    data = _text_of(experiment.data)
    if families.find(model) is None or data is None:
        raise UserError(
            f"RUN_FOLDER {run_folder} is a run of {type(model).__name__}, not of a language model. Give a run of "
            f"{', '.join(entry.config.__name__ for entry in families.known())}."
        )
    config: LanguageConfig = model.bound(experiment.data.schema())
    if isinstance(data, TokenShards):  # whose tokens others made
        given, tokenizer, special = None, None, SpecialTokens(eos=() if data.separator is None else (data.separator,))
    else:
        given, tokenizer = data.tokenizer, data.tokenizer.build()
        special = SpecialTokens(bos=tokenizer.bos, eos=tuple(tokenizer.stop_ids), pad=tokenizer.pad)
        if isinstance(data, TwoModalityData):
            given = InterleavedTokenizer(text=data.tokenizer, codes=data.codes)
    found = trained.open_run(run_folder, step, average)
    params = trained.matched(found, _shapes(config), f"RUN_FOLDER {run_folder}")
    # Documents begin as the data says: that is part of what the model has learnt.
    begins = "bos" if data.marks in ("begin", "both") else "nothing"
    return LanguageModel(
        path=run_folder,
        kind="run",
        config=config,
        tokens=special,
        source=ParamsSource(params, found.origin),
        tokenizer=given,
        begins=begins,
        quantization=experiment.quantization,
        files=_tokenizer_files(data),
        made={} if tokenizer is None else tokenizer_files.of(tokenizer, begins),
        shards=found.checkpoints,
        remarks=(
            f"{'step' if average == 1 else 'mean of steps'} {', '.join(f.name for f in found.checkpoints)} of the run",
            *([_UNDER_RULES] if experiment.quantization else []),
        ),
    )


def _text_of(data: object) -> _Source | None:
    """Where the tokenizer of a run stands: all parts of its data that have one have the same."""
    if isinstance(data, StagedData):
        parts = [stage.data for stage in reversed(data.stages)]
    elif isinstance(data, MixtureData):
        parts = [part for part, _ in data.sources]
    else:
        return data if isinstance(data, _Source) else None
    found = [text for part in parts if (text := _text_of(part)) is not None]
    return min(found, key=lambda text: isinstance(text, TokenShards), default=None)  # the first of those with one


def _shapes(config: LanguageConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters of a model, by path."""
    state = nnx.to_flat_state(nnx.state(counts.abstract(families.of(config).build, config)))
    return {"/".join(map(str, p)): jax.ShapeDtypeStruct(v.get_value().shape, np.float32) for p, v in state}


def _tokenizer_files(data: _Source) -> tuple[pathlib.Path, ...]:
    if isinstance(data, TokenShards) or not isinstance(data.tokenizer, HuggingFaceTokenizer):
        return ()
    path = pathlib.Path(data.tokenizer.path)
    folder = path if path.is_dir() else path.parent
    return tuple(folder / name for name in COPIED if (folder / name).is_file())
