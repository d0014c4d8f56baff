"""Llama checkpoints of Hugging Face: names and layouts of tensors, and config.json, both ways.

Two schemas say how rotary positions are scaled: `rope_theta` beside `rope_scaling` (transformers 4), and
`rope_parameters` with both in it (transformers 5). Older loaders do not know the newer one and fall back to a theta of
10,000 without a word, so both are written. Read are both; where they disagree the file is refused.

Rotary pairs are (i, i + d/2) here and there, so that queries and keys need no permutation.
"""

import dataclasses
from collections.abc import Mapping

from scalejax.errors import UserError
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.models.llm.llama3.rope import RopeScaling
from scalejax.models.llm.mapping import Entry
from scalejax.models.llm.special_tokens import SpecialTokens, read_special

TABLE = (
    Entry("embed/weight", "model.embed_tokens.weight", "V E -> V E"),
    Entry("layers/attention_norm/scale", "model.layers.{layer}.input_layernorm.weight", "E -> E"),
    Entry("layers/attention/query", "model.layers.{layer}.self_attn.q_proj.weight", "(H D) E -> E H D"),
    Entry("layers/attention/key", "model.layers.{layer}.self_attn.k_proj.weight", "(K D) E -> E K D"),
    Entry("layers/attention/value", "model.layers.{layer}.self_attn.v_proj.weight", "(K D) E -> E K D"),
    Entry("layers/attention/out", "model.layers.{layer}.self_attn.o_proj.weight", "E (H D) -> H D E"),
    Entry("layers/mlp_norm/scale", "model.layers.{layer}.post_attention_layernorm.weight", "E -> E"),
    Entry("layers/mlp/gate", "model.layers.{layer}.mlp.gate_proj.weight", "F E -> E F"),
    Entry("layers/mlp/up", "model.layers.{layer}.mlp.up_proj.weight", "F E -> E F"),
    Entry("layers/mlp/down", "model.layers.{layer}.mlp.down_proj.weight", "E F -> F E"),
    Entry("final_norm/scale", "model.norm.weight", "E -> E"),
    Entry("head/weight", "lm_head.weight", "V E -> E V"),
)
"""Every tensor of a checkpoint. A tied one has no head."""

DERIVED = (".rotary_emb.inv_freq",)
"""Ends of names of what old checkpoints hold besides, and config.json says."""


def entries(config: LlamaConfig) -> tuple[Entry, ...]:
    """The lines of the table that a config has.

    Raises:
      UserError: it has parts that Llamas of Hugging Face do not have.
    """
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if field.name in ("mlp", "norm", "self_attention") and part != field.default:
            raise UserError(
                f"model.{field.name} is {type(part).__name__}, which no Llama of Hugging Face has; theirs is "
                f"{type(field.default).__name__}. Use the run folder as it is."
            )
    return tuple(entry for entry in TABLE if not (config.tie_embeddings and entry.path == "head/weight"))


def copies(config: LlamaConfig) -> dict[str, str]:
    """{name of a tensor that a checkpoint may repeat: name of the one that it equals}: the head of a tied model."""
    return {TABLE[-1].name: TABLE[0].name} if config.tie_embeddings else {}


def sizes(config: LlamaConfig) -> dict[str, int]:
    """Sizes of the axes of the table."""
    assert config.vocabulary is not None
    return {
        "V": config.vocabulary,
        "E": config.dim,
        "F": config.ffn_dim,
        "H": config.heads,
        "K": config.kv_heads,
        "D": config.width,
    }


_FIXED = {
    "attention_bias": (False, "biases in the attention"),
    "mlp_bias": (False, "biases in the MLP"),
    "hidden_act": ("silu", "another activation"),
}
"""What must have this value where it is named, and what the model would have with another."""

_FIELDS = frozenset(
    (
        *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("tie_word_embeddings", "initializer_range", "rope_theta", "rope_scaling", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        "quantization_config",  # which whoever opens the folder reads
    )
)
_WITHOUT_EFFECT = frozenset(
    (
        *("attention_dropout", "dtype", "torch_dtype", "pretraining_tp", "transformers_version", "use_cache"),
        *("_name_or_path", "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict"),
        *("is_decoder", "is_encoder_decoder", "chunk_size_feed_forward", "add_cross_attention", "id2label"),
        *("label2id", "problem_type"),
    )
)
"""What changes no logit (of dropout, none in inference; training here has none), or repeats what the weights say."""


def read_config(content: Mapping[str, object], where: str) -> tuple[LlamaConfig, SpecialTokens, tuple[str, ...]]:
    """The architecture that a config.json describes.

    Args:
      content: The file.
      where: Its name, for messages.

    Returns:
      The architecture, its special tokens, and the keys that were not looked at because nothing is known of them.

    Raises:
      UserError: it has parts or a kind of rotary positions that are not known here, or lacks a size.
    """
    for key, (wanted, what) in _FIXED.items():
        if content.get(key, wanted) not in (wanted, None):
            raise UserError(f"{where}: {key} is {content[key]!r}: {what} is not known here; {wanted!r} is.")
    heads = _integer(content, "num_attention_heads", where)
    grouped = content.get("num_key_value_heads") is not None
    theta, scaling = _rope(content, where)
    head_dim = content.get("head_dim")
    try:
        config = LlamaConfig(
            layers=_integer(content, "num_hidden_layers", where),
            dim=_integer(content, "hidden_size", where),
            ffn_dim=_integer(content, "intermediate_size", where),
            heads=heads,
            kv_heads=_integer(content, "num_key_value_heads", where) if grouped else heads,
            head_dim=None if head_dim is None else _integer(content, "head_dim", where),
            vocabulary=_integer(content, "vocab_size", where),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=_integer(content, "max_position_embeddings", where),
            norm_eps=_number(content, "rms_norm_eps", where),
            tie_embeddings=_flag(content, "tie_word_embeddings", where),
            init_scale=_number(content, "initializer_range", where) if "initializer_range" in content else 0.02,
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if config.head_dim == config.dim // config.heads and config.dim % config.heads == 0:
        config = dataclasses.replace(config, head_dim=None)
    unknown = sorted(set(content) - _FIELDS - _FIXED.keys() - _WITHOUT_EFFECT)
    return config, read_special(content, where), tuple(unknown)


def write_config(config: LlamaConfig, tokens: SpecialTokens, dtype: str) -> dict[str, object]:
    """The config.json of an architecture.

    Args:
      config: With a vocabulary.
      tokens: Special tokens.
      dtype: Of the weights, as NumPy names it.
    """
    rope: dict[str, object] = {"rope_type": "default"}
    if (s := config.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_frequency_factor,
            "high_freq_factor": s.high_frequency_factor,
            "original_max_position_embeddings": s.original_positions,
        }
    made = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": config.width,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "initializer_range": config.init_scale,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocabulary,
        **tokens.named(),
    }
    return dict(sorted(made.items()))


def read_windowed_config(
    content: Mapping[str, object], where: str
) -> tuple[LlamaConfig, SpecialTokens, tuple[str, ...]]:
    """`read_config` of families whose config.json may name a `sliding_window`.

    A window as long as the model's positions hides nothing and is taken for none.
    """
    config, tokens, unknown = read_config(
        {key: value for key, value in content.items() if key != "sliding_window"}, where
    )
    window = None if content.get("sliding_window") is None else _integer(content, "sliding_window", where)
    if window is not None and window < 1:
        raise UserError(f"{where}: sliding_window must be at least 1, or null; got {window}.")
    shorter = window is not None and window < config.max_positions
    return dataclasses.replace(config, window=window if shorter else None), tokens, unknown


def write_windowed_config(config: LlamaConfig, tokens: SpecialTokens, dtype: str) -> dict[str, object]:
    """`write_config` of these families, whose configs have no fields for biases."""
    content = write_config(config, tokens, dtype)
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        del content[key]
    return content | {"sliding_window": config.window}


_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}


def _rope(content: Mapping[str, object], where: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from whichever schemas are there."""
    found: dict[str, tuple[float, RopeScaling | None]] = {}
    newer = content.get("rope_parameters")
    if newer is not None:
        theta = newer.get("rope_theta", content.get("rope_theta")) if isinstance(newer, dict) else None
        found["rope_parameters"] = _one_rope({"rope_theta": theta}, newer, f"{where}: rope_parameters")
    if newer is None or "rope_theta" in content or content.get("rope_scaling") is not None:
        scaling = content.get("rope_scaling") or {"rope_type": "default"}
        inside = scaling.get("rope_theta") if isinstance(scaling, dict) else None
        # What transformers 4 takes where nothing is said.
        theta = content.get("rope_theta", 10_000.0 if inside is None else inside)
        found["rope_theta and rope_scaling"] = _one_rope({"rope_theta": theta}, scaling, f"{where}: rope_scaling")
        if inside not in (None, theta):
            raise UserError(
                f"{where}: rope_theta is {theta} but {inside} in rope_scaling. Remove the one that is wrong."
            )
    if len(set(found.values())) > 1:
        stated = " but ".join(f"{name} say {value}" for name, value in found.items())
        raise UserError(f"{where}: {stated}. Remove the one that is wrong.")
    return next(iter(found.values()))


def _one_rope(outer: Mapping[str, object], content: object, where: str) -> tuple[float, RopeScaling | None]:
    if not isinstance(content, dict):
        raise UserError(f"{where} must be an object; got {content!r}.")
    theta = _number(outer, "rope_theta", where)
    kind = content.get("rope_type", content.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{where}: rope_type {kind!r} is not known; 'default' and 'llama3' are.")
    named = set(content) - {"rope_type", "type", "rope_theta"} - ({"partial_rotary_factor"} & set(content))
    if content.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor {content['partial_rotary_factor']} is not known; 1.0 is.")
    unknown = sorted(named - (_LLAMA3.keys() if kind == "llama3" else set()))
    if unknown:
        raise UserError(f"{where}: rope_type {kind!r} with {', '.join(unknown)} is not known.")
    if kind == "default":
        return theta, None
    try:
        fields = {ours: _number(content, theirs, where) for theirs, ours in _LLAMA3.items()}
        fields["original_positions"] = _integer(content, "original_max_position_embeddings", where)
        return theta, RopeScaling(**fields)  # pyright: ignore[reportArgumentType]
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _flag(content: Mapping[str, object], key: str, where: str) -> bool:
    value = content.get(key)
    if not isinstance(value, bool | None):
        raise UserError(f"{where}: {key} must be true or false; got {value!r}.")
    return bool(value)


def _integer(content: Mapping[str, object], key: str, where: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{where}: {key} must be a whole number; got {value!r}.")
    return value


def _number(content: Mapping[str, object], key: str, where: str) -> float:
    value = content.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{where}: {key} must be a number; got {value!r}.")
    return float(value)
