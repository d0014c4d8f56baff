"""Llama 3 as inference and surgery know it."""

from scalejax.models.llm.architecture import Architecture
from scalejax.models.llm.llama3 import huggingface
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.models.llm.llama3.model import Llama
from scalejax.models.llm.llama3.parts import GatedMlp, GroupedQueryAttention, RmsNorm
from scalejax.models.llm.llama3.rope import RopeScaling


def describe(config: LlamaConfig) -> dict[str, str]:
    """Lines of a table for a user."""
    c, scaling = config, config.rope_scaling
    stretched = "none" if scaling is None else f"by {scaling.factor:g} beyond {scaling.original_positions:,}"
    window = {} if c.window is None else {"window": f"a token sees {c.window:,}, itself and those before it"}
    return {
        "layers, width, MLP": f"{c.layers}, {c.dim:,}, {c.ffn_dim:,}",
        "heads": f"{c.heads} of {c.width}, {c.kv_heads} of keys and values",
        "vocabulary": f"{c.vocabulary:,}, head {'tied' if c.tie_embeddings else 'of its own'}",
        "positions": f"up to {c.max_positions:,}, theta {c.rope_theta:g}, stretched: {stretched}",
        **window,
    }


LLAMA = Architecture(
    config=LlamaConfig,
    parts=(RopeScaling, GatedMlp, GroupedQueryAttention, RmsNorm),
    build=Llama,
    name="LlamaForCausalLM",
    model_type="llama",
    entries=huggingface.entries,
    sizes=huggingface.sizes,
    derived=huggingface.DERIVED,
    copies=huggingface.copies,
    read_config=huggingface.read_config,
    write_config=huggingface.write_config,
    describe=describe,
    has=lambda config: config.routed is None and config.window is None,
)
