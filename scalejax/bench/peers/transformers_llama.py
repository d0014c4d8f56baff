"""One training step of transformers' Llama: forward, backward, clipping, fused AdamW on matrices and norms apart."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
import transformers

from scalejax.data.text.tokens import TokenBatch
from scalejax.models.llm.llama3 import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What both sides of a contest share.

    Attributes:
      threads: CPU threads.
      learning_rate: Of AdamW, with b1 = 0.9, b2 = 0.999, eps = 1e-8.
      weight_decay: On matrices.
      clip: Global norm.
      compiled: torch.compile instead of eager execution.
    """

    threads: int
    learning_rate: float
    weight_decay: float
    clip: float
    compiled: bool


class TrainingStep:
    """A model and its optimizer.

    Args:
      config: Architecture.
      parameters: Ours, by path.
      settings: Learning rate, threads, eager or compiled.
    """

    def __init__(self, config: LlamaConfig, parameters: Mapping[str, np.ndarray], settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._model = build(config, parameters)
        matrices = [p for p in self._model.parameters() if p.ndim >= 2]
        norms = [p for p in self._model.parameters() if p.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            fused=True,
        )
        objective: Callable[..., torch.Tensor] = self._objective
        self._loss = torch.compile(objective) if settings.compiled else objective

    def place(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, int64[B, S]."""
        return torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.targets).long()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One optimizer step; returns the mean loss of the batch before it."""
        loss = self._loss(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return loss.detach()

    def _objective(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Generation:
    """Greedy continuation of prompts of one length.

    Args:
      config: Architecture.
      parameters: Ours, by path.
      threads: CPU threads.
    """

    def __init__(self, config: LlamaConfig, parameters: Mapping[str, np.ndarray], *, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = build(config, parameters).eval()

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """The next `tokens` tokens of each."""
        given = torch.tensor(prompts)
        out = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[:, given.shape[1] :].tolist()


def build(config: LlamaConfig, parameters: Mapping[str, np.ndarray]) -> "transformers.LlamaForCausalLM":
    """`LlamaForCausalLM` with our parameters."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.width,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attn_implementation="sdpa",
        )
    )
    state = {name: torch.from_numpy(np.array(value)) for name, value in from_ours(config, parameters).items()}
    model.load_state_dict(state)
    return model


def from_ours(config: LlamaConfig, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters under the names and in the layouts of `LlamaForCausalLM`: weights of linear maps [out, in]."""
    state = {
        "model.embed_tokens.weight": parameters["embed/weight"],
        "model.norm.weight": parameters["final_norm/scale"],
    }
    if not config.tie_embeddings:
        state["lm_head.weight"] = parameters["head/weight"].T
    names = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"}
    for layer in range(config.layers):
        of = f"model.layers.{layer}"
        for ours, theirs in names.items():
            weight = parameters[f"layers/attention/{ours}"][layer]  # E H D
            state[f"{of}.{theirs}.weight"] = weight.reshape(config.dim, -1).T
        out = parameters["layers/attention/out"][layer]  # H D E
        state[f"{of}.self_attn.o_proj.weight"] = out.reshape(-1, config.dim).T
        for ours in ("gate", "up", "down"):
            state[f"{of}.mlp.{ours}_proj.weight"] = parameters[f"layers/mlp/{ours}"][layer].T
        state[f"{of}.input_layernorm.weight"] = parameters["layers/attention_norm/scale"][layer]
        state[f"{of}.post_attention_layernorm.weight"] = parameters["layers/mlp_norm/scale"][layer]
    return state
