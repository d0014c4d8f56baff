"""Mixtral (arXiv 2401.04088): a Llama with experts, and its folders of Hugging Face.

Experts have two forms: "separate", a tensor for each expert and matrix, which transformers writes unless it is told
otherwise (w1 is the gate, w3 what it is multiplied with, w2 the way out), and "fused", which it has in memory, with the
gate in the first half of the rows of `gate_up_proj`.
"""

import dataclasses
from collections.abc import Callable, Mapping

from scalejax.errors import UserError
from scalejax.models.llm.architecture import Architecture
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3 import architecture as llama
from scalejax.models.llm.llama3 import huggingface
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.models.llm.llama3.model import Llama
from scalejax.models.llm.llama3.parts import GatedMlp
from scalejax.models.llm.mapping import Entry
from scalejax.models.llm.special_tokens import SpecialTokens

_OF = "model.layers.{layer}.block_sparse_moe"
EXPERTS = (
    Entry("layers/mlp/router", f"{_OF}.gate.weight", "N E -> E N"),
    Entry("layers/mlp/gate", f"{_OF}.experts.{{expert}}.w1.weight", "F E -> N E F"),
    Entry("layers/mlp/up", f"{_OF}.experts.{{expert}}.w3.weight", "F E -> N E F"),
    Entry("layers/mlp/down", f"{_OF}.experts.{{expert}}.w2.weight", "E F -> N F E"),
)
"""A tensor for each expert."""

_FUSED = "model.layers.{layer}.mlp"
FUSED = (
    Entry("layers/mlp/router", f"{_FUSED}.gate.weight", "N E -> E N"),
    Entry("layers/mlp/gate", f"{_FUSED}.experts.gate_up_proj", "N (P F) E -> N E F", half=("P", 0)),
    Entry("layers/mlp/up", f"{_FUSED}.experts.gate_up_proj", "N (P F) E -> N E F", half=("P", 1)),
    Entry("layers/mlp/down", f"{_FUSED}.experts.down_proj", "N E F -> N F E"),
)
"""A tensor for all experts of a layer."""

_FIXED = {"router_jitter_noise": 0.0}


def _parts(config: LlamaConfig) -> tuple[Experts, TopK]:
    """The experts and the router of a config.

    Raises:
      UserError: its router is not that of a Mixtral.
    """
    experts = config.mlp
    assert isinstance(experts, Experts)
    router = experts.router
    if not isinstance(router, TopK) or router.scores != "softmax" or router.bias_rate:
        raise UserError(
            f"model.mlp.router is {router}, which no Mixtral of Hugging Face has; theirs is TopK with "
            "scores='softmax' and no bias. Use the run folder as it is."
        )
    return experts, router


def _with(experts: tuple[Entry, ...]) -> Callable[[LlamaConfig], tuple[Entry, ...]]:
    def entries(config: LlamaConfig) -> tuple[Entry, ...]:
        """The tensors of a checkpoint.

        Raises:
          UserError: it has parts that Mixtrals of Hugging Face do not have.
        """
        _parts(config)
        table = huggingface.entries(dataclasses.replace(config, mlp=GatedMlp()))
        return (*(entry for entry in table if not entry.path.startswith("layers/mlp/")), *experts)

    return entries


FORMS = {"separate": _with(EXPERTS), "fused": _with(FUSED)}
"""The tensors of a checkpoint by the form of its experts."""


def sizes(config: LlamaConfig) -> dict[str, int]:
    """Sizes of the axes of the table."""
    return {**huggingface.sizes(config), "N": _parts(config)[0].count, "P": 2}


def read_config(content: Mapping[str, object], where: str) -> tuple[LlamaConfig, SpecialTokens, tuple[str, ...]]:
    """The architecture that a config.json describes, see `huggingface.read_config`."""
    for key, wanted in _FIXED.items():
        given = content.get(key, wanted)
        if given not in (wanted, None):
            raise UserError(f"{where}: {key} is {given!r}, which is not known here; {wanted!r} is.")
    for key in ("num_local_experts", "num_experts_per_tok"):
        if not isinstance(content.get(key), int) or isinstance(content.get(key), bool):
            raise UserError(f"{where}: {key} must be a whole number; got {content.get(key)!r}.")
    balance = content.get("router_aux_loss_coef", 0.001)
    if not isinstance(balance, int | float) or isinstance(balance, bool):
        raise UserError(f"{where}: router_aux_loss_coef must be a number; got {balance!r}.")
    own = (*_FIXED, "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")
    plain, tokens, unknown = huggingface.read_windowed_config(
        {key: value for key, value in content.items() if key not in own}, where
    )
    count, k = content["num_local_experts"], content["num_experts_per_tok"]
    assert isinstance(count, int)
    assert isinstance(k, int)
    try:
        part = Experts(count=count, router=TopK(k=k, balance=float(balance)))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    return dataclasses.replace(plain, mlp=part), tokens, unknown


def write_config(config: LlamaConfig, tokens: SpecialTokens, dtype: str) -> dict[str, object]:
    """The config.json of an architecture, see `huggingface.write_config`."""
    experts, router = _parts(config)
    content = huggingface.write_windowed_config(config, tokens, dtype) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts.count,
        "num_experts_per_tok": router.k,
        "output_router_logits": False,
        "router_aux_loss_coef": router.balance,
        **_FIXED,
    }
    return dict(sorted(content.items()))


def describe(config: LlamaConfig) -> dict[str, str]:
    """Lines of a table for a user."""
    experts, router = _parts(config)
    return {**llama.describe(config), "experts": f"{experts.count} a layer, of which a token takes {router.k}"}


MIXTRAL = Architecture(
    config=LlamaConfig,
    parts=(*llama.LLAMA.parts, Experts, TopK),
    build=Llama,
    name="MixtralForCausalLM",
    model_type="mixtral",
    entries=FORMS["separate"],
    sizes=sizes,
    derived=huggingface.DERIVED,
    copies=huggingface.copies,
    read_config=read_config,
    write_config=write_config,
    describe=describe,
    has=lambda config: isinstance(config.mlp, Experts) and config.depth is None,
    forms=FORMS,
)
