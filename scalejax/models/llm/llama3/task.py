"""The task of language models: cross-entropy of the next token."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalejax import nn
from scalejax.data.text.modalities import PADDING, ModalityMap
from scalejax.data.text.tokens import TokenSchema
from scalejax.models.llm.llama3.model import Llama
from scalejax.train.checkpoints.trained import Trained
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import Metric
from scalejax.train.task import Batch, Field, Gather, Keys, Loss, TaskBase, Work

if TYPE_CHECKING:
    from scalejax.models.llm.llama3.config import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaTask(TaskBase):
    """Next-token prediction with a Llama; a `train.task.Task`.

    Attributes:
      config: Architecture, with a vocabulary.
      schema: Tokens of the data.
    """

    config: "LlamaConfig"
    schema: TokenSchema
    fetches: Literal["whole", "blocks"] = "blocks"
    unit: str = "tokens"

    def fields(self) -> dict[str, Field]:
        """Rows of tokens, see `data.text.tokens.TokenBatch`."""
        row = Field(shape=(self.schema.length,), dtype="int32", axes=("sequence",), arrange="zigzag")
        weights = dataclasses.replace(row, dtype="float32")
        fields = {"tokens": row, "targets": row, "weights": weights, "segment_ids": row, "positions": row}
        if len(self.schema.modalities) == 1:
            return fields
        return fields | {"modality": dataclasses.replace(row, dtype="int8", fill=PADDING)}

    def open_folder(self, path: pathlib.Path) -> Trained:
        """The parameters of a model folder of ours, or of one of Hugging Face."""
        from scalejax.models.llm import model_folder  # which knows all families, and so this one

        return model_folder.as_trained(model_folder.open_folder(path))

    def check(self, experiment: Any, mesh: Mesh, data: Any = None) -> None:
        """As any task, and refuses a mesh that the model does not run on."""
        super().check(experiment, mesh, data)
        if self.config.depth is not None:
            self.config.depth.check(mesh)

    def init(self, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Llama:
        """Builds the model."""
        return Llama(self.config, rngs, dtypes)

    def loss(self, model: Llama, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """Sum of the cross-entropies of the targets that count, and their number.

        Args:
          model: What `init` returned.
          batch: "tokens", "targets", "segment_ids", "positions" int32[B, S] and "weights" float32[B, S].
          keys: For routers that draw.
          gather: Fetches parameters, see `nn.layers`.
        Returns:
          sum_bs w_bs CE_bs, to which experts add the losses of their router, and sum_bs w_bs, float32 (float64 where
          the model computes in float64).
        """
        part = self.config.routed
        drawn_with = None
        if keys is not None and part is not None and part.draws:
            drawn_with = keys.of_examples(len(batch["tokens"]))
        rows = (batch["tokens"], batch["positions"], batch["segment_ids"], batch.fields.get("modality"))
        run = functools.partial(model.hidden_with_numbers, *rows, gather=gather)
        x, head, numbers = run(drawn_with)
        loss, sums = self._cross_entropy(x, head, batch)
        weight = batch["weights"].astype(loss.dtype).sum()
        if part is None:
            return Loss(loss, weight, sums)
        sums = {"cross_entropy": loss, **sums, **part.sums(numbers)}
        if part.sees_later_tokens and part.generates:
            # In training it is not computed: its weight is 0 there, and windows have `loss_topk` alone.
            zero = jnp.zeros_like(loss)
            causal, by_modality, counted = zero, {f"cross_entropy/{name}": zero for name in self._names}, zero
            if batch.purpose == "evaluation":
                x, head, _ = run(routing="causal")
                causal, by_modality = self._cross_entropy(x, head, batch)
                counted = weight
            sums |= {f"causal/{name}": by_modality[f"cross_entropy/{name}"] for name in self._names}
            sums |= {"causal": causal, "weight/causal": counted}
        return Loss(loss + part.losses(numbers), weight, sums)

    def _cross_entropy(self, x: jax.Array, head: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum over targets, and in evaluations those of each modality and their weights (0 in training)."""
        wide = nn.wide(x.dtype)
        weights = batch["weights"].astype(wide)

        def of(weights: jax.Array) -> jax.Array:
            return nn.linear_cross_entropy(x, head, batch["targets"], weights, positions=self.config.loss_positions)

        names = self._names
        if not names:
            return of(weights), {}
        if batch.purpose != "evaluation":
            keys = [f"{kind}/{name}" for kind in ("cross_entropy", "weight") for name in names]
            return of(weights), {key: jnp.zeros((), wide) for key in keys}
        modality = jnp.asarray(ModalityMap(ranges=self.schema.ranges).of_ids)[batch["targets"]]
        own = {name: weights * (modality == number) for number, name in enumerate(names)}
        losses = {f"cross_entropy/{name}": of(w) for name, w in own.items()}
        total = jnp.stack(list(losses.values())).sum()
        return total, losses | {f"weight/{name}": w.sum() for name, w in own.items()}

    @property
    def _names(self) -> tuple[str, ...]:
        """The modalities, where losses are told apart by them."""
        several = len(self.schema.modalities) > 1 and self.schema.ranges
        return self.schema.modalities if several else ()

    def metrics(self) -> tuple[Metric, ...]:
        """The mean loss of a target and its perplexity, by modality too, and what the MLP measures of itself.

        Where experts choose among the tokens of a batch, that loss is named loss_topk: it is too good. With auxiliary
        routers the loss without later tokens stands before it.
        """
        part = self.config.routed
        mean = functools.partial(MeanLoss, unit="targets", of="nats")
        losses = [mean(sum=None if part is None else "cross_entropy")]
        if part is not None and part.sees_later_tokens:
            losses = [mean(name="loss_topk", title="loss, seeing later tokens", sum="cross_entropy")]
            if part.generates:
                losses = [mean(sum="causal", weight="weight/causal"), *losses]
        by_modality = [
            dataclasses.replace(
                loss,
                name=f"{loss.name}/{name}",
                title=f"{loss.title}, {name}",
                sum=f"{loss.sum or 'cross_entropy'}/{name}",
                weight=f"weight/{name}",
            )
            for loss in losses
            for name in self._names
        ]
        own = () if part is None else part.metrics(self.config.layers)
        return (*losses, *by_modality, *own)

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """FLOPs of rows, each by its own length, attention by its causal half."""
        rows, tokens = shapes["tokens"]
        return Work(flops=rows * self.flops_per_example(tokens), count=rows * tokens)

    def advice(self) -> Mapping[tuple[str, ...], str]:
        """To generate with it, where it can."""
        if self.config.routed is not None and not self.config.routed.generates:
            return {}
        if len(self.schema.modalities) > 1:
            drawn = ("generate", "{run}", "--prompt", "\nsneaker\n<image>", "--images", "{run}/drawn")
            return {drawn: "continue a text, and draw an image"}
        return {("generate", "{run}", "--prompt", "def main("): "continue a text"}

    def describe(self, data: Any) -> dict[str, object]:
        """FLOPs and tokens of the longest row."""
        del data
        return {"flops_per_example": self.flops_per_example(), "tokens_per_example": self.tokens_per_example()}

    def identity(self) -> Mapping[str, str]:
        """How many experts there are, and among which tokens choices are made."""
        part = self.config.routed
        return {} if part is None else {f"model.{name}": value for name, value in part.identity.items()}

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
