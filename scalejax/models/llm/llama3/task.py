"""What training minimises: the cross-entropy of the next token."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from scalejax import nn
from scalejax.data.tokens import TokenSchema
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.models.llm.llama3.model import Llama
from scalejax.nn.layers import Gather, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaTask:
    """Next-token prediction with a Llama; implements `train.protocols.DenseTask`.

    Attributes:
      config: Architecture, with a vocabulary.
      schema: Tokens of the data.
    """

    config: LlamaConfig
    schema: TokenSchema

    def init(self, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> Llama:
        """Builds the model."""
        return Llama(self.config, rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)

    def loss(
        self, model: Llama, batch: dict[str, jax.Array], *, key: jax.Array | None = None, gather: Gather = whole
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Sum of the cross-entropies of the targets that count, and their number.

        Args:
          model: What `init` returned.
          batch: "tokens", "targets", "segment_ids", "positions" int32[B, S] and "weights" float32[B, S].
          key: Not used: nothing is random.
          gather: Fetches parameters, see `nn.layers`.
        Returns:
          sum_bs w_bs CE_bs and sum_bs w_bs, float32 (float64 where the model computes in float64), and nothing else.
        """
        del key
        x, head = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"], gather=gather)
        weights = batch["weights"].astype(nn.wide(x.dtype))
        loss = nn.linear_cross_entropy(x, head, batch["targets"], weights, positions=self.config.loss_positions)
        return loss, weights.sum(), {}

    def tokens_per_example(self) -> int:
        """Positions of the longest row."""
        return self.schema.length

    def flops_per_example(self, tokens: int | None = None) -> int:
        """FLOPs of forward and backward of a row, 6 a multiply-accumulate, attention by its causal half.

        Args:
          tokens: Positions of the row; None = those of the longest.
        """
        tokens = tokens or self.schema.length
        return tokens * self.config.flops_per_token(tokens)
