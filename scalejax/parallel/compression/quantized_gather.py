"""A gather of parameters that also quantizes them by rules, for the products that take them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from scalejax.numerics.quantized import products, weights
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.compression import packed_blocks
from scalejax.parallel.gradients.blocks import Arrays, Gather, ParamGather, RematPolicy, ShardWithState


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedGather:
    """A `gather` (see `parallel.gradients.blocks`) that also gives parameters the number formats of rules.

    Attributes:
      gather: What makes parameters whole.
      rules: {path of a module: its rule}, see `numerics.quantized.rules.assign`.
    """

    gather: Gather | Callable[..., Arrays]
    rules: Mapping[str, QuantizationRule]

    def __call__(self, params: Mapping[str, jax.Array | ShardWithState]) -> dict[str, Any]:
        return weights.formatted(self.gather(params), self.rules, packed_blocks.quantize)

    def remat(self, policy: RematPolicy | None) -> RematPolicy | None:
        """A rematerialisation policy like `policy` that also keeps what forward products took: quantized once.

        Quantized weights are not kept where gathered weights are dropped: kept for all layers, they would be as much as
        whole weights. They are made again from what is gathered again.

        Args:
          policy: jax's form; None = everything is kept.
        """
        adapt = getattr(self.gather, "remat", None)
        policy = policy if adapt is None else adapt(policy)
        if policy is None:
            return None
        drops = (
            isinstance(self.gather, ParamGather)
            and self.gather.after_forward == "drop"
            and bool(self.gather.primitives)
        )
        names = (products.ACTIVATIONS,) if drops else (products.ACTIVATIONS, products.WEIGHTS)
        named = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.checkpoint_policies.save_from_both_policies(policy, named)
