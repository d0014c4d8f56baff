"""Decoder language models as plain dimensions: exact parameter counts and the FLOPs that a token costs.

    llama = Decoder(layers=32, dim=4096, hidden=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128256)
    llama.parameters                                      # 8,030,261,248
    llama.model_flops_per_token(8192, attention="causal")

A layer is attention and a gated MLP (or experts of which a router chooses some), each after an RMSNorm; no biases. Of
FLOPs only products count, two a multiply-accumulate; a backward pass costs twice its forward pass. Attention over S
positions is S^2 pairs a row under "full" and half of that under "causal", which is what a causal mask leaves; numbers
of the two conventions differ by 10 % at 8K positions of an 8B model and are not comparable.
"""

import dataclasses
from typing import Literal

Pairs = Literal["causal", "full"]

Product = Literal["query", "key_value", "out", "router", "gate_up", "down"]
"""The products of a layer with its parameters, in the order in which they run."""

IN_EXPERTS: tuple[Product, ...] = ("gate_up", "down")
"""Those of each expert."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """Dimensions of a decoder.

    Attributes:
      layers: L.
      dim: E, width of the residual stream.
      hidden: F, width of the gated MLP (of one expert).
      heads: H.
      kv_heads: K, heads of keys and values.
      head_dim: D.
      vocabulary: V.
      experts: MLPs of a layer; 1 = an ordinary one, without a router.
      active_experts: How many of them a token passes through.
      routers: Groups of experts, each with a router of its own, of which a token passes one.
      tied: Whether the head is the embedding.
      window: Tokens that a token sees, itself and those before it; None = all.
    """

    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    active_experts: int = 1
    routers: int = 1
    tied: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "tied" and value is not None and value < 1:
                raise ValueError(f"Decoder: {field.name} must be at least 1; got {value}.")
        if self.heads % self.kv_heads:
            raise ValueError(f"Decoder: kv_heads must divide heads; got {self.kv_heads} and {self.heads}.")
        if self.active_experts > self.experts:
            raise ValueError(
                f"Decoder: active_experts must be at most experts; got {self.active_experts} of {self.experts}."
            )

    @property
    def layer_parameters(self) -> dict[Product, int]:
        """Parameters of each product of a layer, all experts; norms are left out."""
        e, d = self.dim, self.head_dim
        return {
            "query": e * self.heads * d,
            "key_value": 2 * e * self.kv_heads * d,
            "out": self.heads * d * e,
            "router": e * self.experts if self.experts > 1 else 0,
            "gate_up": 2 * e * self.hidden * self.experts,
            "down": self.hidden * e * self.experts,
        }

    @property
    def parameters_per_layer(self) -> int:
        """All of a layer, its two norms included."""
        return sum(self.layer_parameters.values()) + 2 * self.dim

    @property
    def end_parameters(self) -> int:
        """Embedding, last norm and head."""
        return self.vocabulary * self.dim * (1 if self.tied else 2) + self.dim

    @property
    def parameters(self) -> int:
        """Parameters of all layers and of what comes before and after them."""
        return self.layers * self.parameters_per_layer + self.end_parameters

    def product_flops(self) -> dict[Product, int]:
        """Forward FLOPs of a token in each product of one layer, in the experts that it passes through."""
        flops: dict[Product, int] = {name: 2 * count for name, count in self.layer_parameters.items()}
        for name in IN_EXPERTS:
            flops[name] = flops[name] * self.active_experts // self.experts
        flops["router"] //= self.routers
        return flops

    def attention_flops(self, sequence: int, attention: Pairs) -> int:
        """Forward FLOPs of a token in the scores and the mixing of values of one layer, the mean over a row."""
        full = 4 * sequence * self.heads * self.head_dim
        seen = min(self.window or sequence, sequence)
        return full if attention == "full" else full * seen * (2 * sequence - seen) // (2 * sequence**2)

    def head_flops(self) -> int:
        """Forward FLOPs of a token in the logits."""
        return 2 * self.dim * self.vocabulary

    def model_flops_per_token(self, sequence: int, *, attention: Pairs = "causal") -> int:
        """FLOPs of forward and backward that the model defines, nothing recomputed.

        Args:
          sequence: Positions of a row, all of one document.
          attention: Which pairs count.
        """
        layer = sum(self.product_flops().values()) + self.attention_flops(sequence, attention)
        return 3 * (self.layers * layer + self.head_flops())
