"""The families of language models that are known, and how the one of a config or of a folder is found.

`of(config)` and `of_folder(content, where)` find it; `register` adds one.
"""

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx

from scalejax.errors import UserError
from scalejax.models.llm.architecture import Architecture, Config, LanguageConfig
from scalejax.models.llm.llama3.architecture import LLAMA
from scalejax.models.llm.mapping import LAYER, Entry
from scalejax.models.llm.mistral import MISTRAL
from scalejax.models.llm.mixtral import MIXTRAL
from scalejax.models.llm.moma import MOMA
from scalejax.nn import counts

_REGISTERED: list[Architecture[Any]] = []


def register(entry: Architecture[Any]) -> None:
    """Adds a family."""
    _REGISTERED.append(entry)


def known() -> tuple[Architecture[Any], ...]:
    """All families."""
    return LLAMA, MISTRAL, MIXTRAL, MOMA, *_REGISTERED


def find(config: Config) -> Architecture[Config] | None:
    """The family of a config, if it is that of a language model."""
    return next((entry for entry in known() if type(config) is entry.config and entry.has(config)), None)


def of(config: Config) -> Architecture[Config]:
    """The family of a config.

    Raises:
      UserError: there is none.
    """
    found = find(config)
    if found is None:
        names = ", ".join(dict.fromkeys(entry.config.__name__ for entry in known()))
        raise UserError(f"{type(config).__name__} is no config of a language model that is known; {names} is.")
    return found


def of_folder(content: Mapping[str, object], where: str) -> Architecture[Any]:
    """The family that a config.json of Hugging Face names.

    Args:
      content: The file.
      where: Its name, for messages.

    Raises:
      UserError: none is known by that name.
    """
    named, kind = content.get("architectures"), content.get("model_type")
    for entry in known():
        if kind == entry.model_type and named in ([entry.name], None):
            return entry
    shown = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
    others = ", ".join(f"{entry.name} of model_type {entry.model_type!r}" for entry in known())
    raise UserError(
        f"{where}: architecture {shown or 'none named'} of model_type {kind!r} is not known; {others} is. Give the "
        "folder of one that is."
    )


@functools.lru_cache(maxsize=16)
def own_table(config: LanguageConfig) -> tuple[tuple[Entry, ...], dict[str, int]]:
    """(entries, sizes) of the parameters under our own paths, "layers/3/attention/query", and in our layout."""
    entries, sizes = [], {}
    for path, variable in nnx.to_flat_state(nnx.state(counts.abstract(of(config).build, config))):
        name, shape = "/".join(map(str, path)), variable.get_value().shape
        stacked = name.startswith("layers/")
        own = {f"{name}.{i}": size for i, size in enumerate(shape[1:] if stacked else shape)}
        stored = name.replace("layers/", f"layers/{LAYER}/", 1) if stacked else name
        entries.append(Entry(name, stored, " -> ".join([" ".join(own)] * 2)))
        sizes |= own
    return tuple(entries), sizes
