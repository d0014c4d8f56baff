"""Mistral (arXiv 2310.06825): a Llama whose tokens see a window of those before them, and its folders of Hugging Face.

    config.json: "sliding_window": w    a token sees itself and the w - 1 before it; null = all before it

A config without a window, as that of Mistral 7B v0.3, is a Llama in all but the name: it is read as one, and written as
one.
"""

from collections.abc import Mapping

from scalejax.models.llm.architecture import Architecture
from scalejax.models.llm.llama3 import architecture as llama
from scalejax.models.llm.llama3 import huggingface
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.models.llm.llama3.model import Llama
from scalejax.models.llm.special_tokens import SpecialTokens

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
"""What transformers takes where a config.json says nothing."""


def read_config(content: Mapping[str, object], where: str) -> tuple[LlamaConfig, SpecialTokens, tuple[str, ...]]:
    """The architecture that a config.json describes, see `huggingface.read_config`."""
    return huggingface.read_windowed_config(_DEFAULTS | dict(content), where)


def write_config(config: LlamaConfig, tokens: SpecialTokens, dtype: str) -> dict[str, object]:
    """The config.json of an architecture, see `huggingface.write_config`."""
    content = huggingface.write_windowed_config(config, tokens, dtype)
    return dict(sorted({**content, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}.items()))


MISTRAL = Architecture(
    config=LlamaConfig,
    parts=llama.LLAMA.parts,
    build=Llama,
    name="MistralForCausalLM",
    model_type="mistral",
    entries=huggingface.entries,
    sizes=huggingface.sizes,
    derived=huggingface.DERIVED,
    copies=huggingface.copies,
    read_config=read_config,
    write_config=write_config,
    describe=llama.describe,
    has=lambda config: config.routed is None and config.window is not None,
)
