"""Shapes of Llama 3 (Table 3 of arXiv 2407.21783, and the released configurations of 3.1 and 3.2)."""

import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Literal, get_args

from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.kernels.flash_attention.api import Implementation
from scalejax.models.llm.llama3 import model
from scalejax.models.llm.llama3.parts import (
    AttentionPart,
    DepthPart,
    GatedMlp,
    GroupedQueryAttention,
    MlpPart,
    NormPart,
    RmsNorm,
    RoutedPart,
)
from scalejax.models.llm.llama3.rope import RopeScaling
from scalejax.models.llm.llama3.task import LlamaTask
from scalejax.nn.layers import Remat
from scalejax.parallel.context import METHODS, Method

if TYPE_CHECKING:
    from scalejax.models.llm.architecture import LanguageConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Architecture.

    Attributes:
      layers: L.
      dim: E, width of the residual stream.
      ffn_dim: F, width of the gated MLP.
      heads: H, query heads.
      kv_heads: K, key and value heads; K divides H.
      head_dim: D; None = dim / heads.
      vocabulary: V. None = that of the data's tokenizer.
      rope_theta: Base of the rotary frequencies.
      rope_scaling: Stretch of long wavelengths (3.1 on); None = none.
      max_positions: Longest sequence that the model is meant for.
      window: Tokens of its document that a token sees, itself and those before it; None = all.
      norm_eps: Added to the mean square in RMSNorm.
      tie_embeddings: Whether the output head is the embedding, transposed.
      init_scale: Standard deviation of the initial weights; matrices that write to the residual stream start smaller by
        1 / sqrt(2 L).
      remat: What of a layer's forward pass is kept for its backward pass, see `nn.scan_layers`.
      unroll: Layers in one turn of the scan over layers, see `nn.scan_layers`.
      attention: Implementation of attention; None = the fastest for the platform, see `kernels.flash_attention`.
      stage_parts: Parts into which a pipeline over the stages of a mesh cuts the rows of a device, see
        `nn.layers.apply_layers`.
      context_method: How keys and values reach the queries of other devices where the mesh cuts sequences (`context`):
        "all_gather" or "ring", see `parallel.context`.
      loss_positions: Positions of a row (of those that a device has) whose logits exist at one time.
      mlp: What a block is made of, see `parts`: its MLP,
      norm: its norms, and that after the last block,
      self_attention: and its attention.
      depth: Which layers see which tokens, such as `depth.MixtureOfDepths`; None = all see all.
    """

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int | None = None
    vocabulary: int | None = 128_256
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 8192
    window: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_scale: float = 0.02
    remat: Remat = "full"
    unroll: int = 1
    attention: Implementation | None = None
    stage_parts: int | None = None
    context_method: Method = "all_gather"
    loss_positions: int = 512
    mlp: MlpPart = GatedMlp()
    norm: NormPart = RmsNorm()
    self_attention: AttentionPart = GroupedQueryAttention()
    depth: DepthPart | None = None

    FREE = ("init_scale", "remat", "unroll", "attention", "stage_parts", "context_method", "loss_positions")
    SHAPED = ("head_dim", "vocabulary")

    def __post_init__(self) -> None:
        for field in ("layers", "dim", "ffn_dim", "heads", "kv_heads", "max_positions", "loss_positions", "unroll"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"LlamaConfig: {field} must be at least 1; got {value}.")
        for field in ("vocabulary", "head_dim", "stage_parts", "window"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"LlamaConfig: {field} must be a whole number of at least 1, or None; got {value}.")
        if not isinstance(self.tie_embeddings, bool):
            raise ValueError(f"LlamaConfig: tie_embeddings must be True or False; got {self.tie_embeddings!r}.")
        for field in ("rope_theta", "norm_eps", "init_scale"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"LlamaConfig: {field} must be above 0 and finite; got {getattr(self, field)}.")
        choices = {"context_method": METHODS, "remat": get_args(Remat), "attention": (None, *get_args(Implementation))}
        for field, known in choices.items():
            if getattr(self, field) not in known:
                names = ", ".join(map(str, known))
                raise ValueError(f"LlamaConfig: {field} must be one of {names}; got {getattr(self, field)!r}.")
        for field in ("mlp", "norm", "self_attention", *(() if self.depth is None else ("depth",))):
            part = getattr(self, field)
            if isinstance(part, type) or not (dataclasses.is_dataclass(part) and hasattr(part, "build")):
                raise ValueError(f"LlamaConfig: {field} must be a part (see llama3.parts); got {part!r}.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: kv_heads must divide heads; got {self.kv_heads} and {self.heads}. Each key and value "
                "head serves the same number of query heads."
            )
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(
                f"LlamaConfig: heads must divide dim; got {self.heads} and {self.dim}. Set head_dim to choose the "
                "width of a head freely."
            )
        if self.width < 2 or self.width % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even, as rotary positions turn pairs; got {self.width}.")
        if self.depth is not None:
            if self.window is not None:
                raise ValueError(
                    f"LlamaConfig: window and depth exclude each other; got {self.window} and {self.depth}. Layers of "
                    "mixture-of-depths see tokens that are no neighbours. Leave one out."
                )
            self.depth.repeats(self.layers)

    @staticmethod
    def of_folder(path: pathlib.Path) -> "LanguageConfig":
        """The architecture of a model folder of ours, or of one of Hugging Face.

        Raises:
          UserError: it is neither, or damaged.
        """
        from scalejax.models.llm import model_folder  # which knows all families, and so this one

        return model_folder.read_config(path)

    @property
    def repeats(self) -> int:
        """How often the repeated block stands, which is the leading axis of its parameters: L, or less with `depth`."""
        return self.layers if self.depth is None else self.depth.repeats(self.layers)

    @property
    def routed(self) -> RoutedPart | None:
        """What sends tokens to some of the parameters; None = every token meets all."""
        if self.depth is not None:
            return self.depth.routed(self.mlp)
        return self.mlp if isinstance(self.mlp, RoutedPart) else None

    @property
    def width(self) -> int:
        """D, width of a head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    def task(self, schema: TokenSchema) -> LlamaTask:
        """Binds the model to the tokens of a data set.

        Raises:
          UserError: the data has tokens that the vocabulary lacks, or rows that are longer than `max_positions`.
        """
        return LlamaTask(config=self.bound(schema), schema=schema)

    def bound(self, schema: TokenSchema) -> "LlamaConfig":
        """This architecture with the vocabulary of the data, if it has none of its own.

        Raises:
          UserError: as `task`.
        """
        if self.vocabulary is not None and schema.vocabulary > self.vocabulary:
            raise UserError(
                f"model.vocabulary is {self.vocabulary:,}, but the tokenizer of the data has {schema.vocabulary:,} "
                "tokens. Take the tokenizer that belongs to the model, or set model.vocabulary=None for a new model."
            )
        if schema.length > self.max_positions:
            raise UserError(
                f"data.length is {schema.length:,} positions, but the model is meant for at most "
                f"{self.max_positions:,} (model.max_positions). Shorten the rows, or raise it for a new model."
            )
        bound = getattr(self.mlp, "bound", None)  # of parts that want to know more of the data
        mlp = self.mlp if bound is None else bound(schema)
        return dataclasses.replace(self, vocabulary=self.vocabulary or schema.vocabulary, mlp=mlp)

    def parameters(self) -> int:
        """Exact number of parameters.

        Raises:
          ValueError: the vocabulary is not known.
        """
        return model.count_parameters(self)

    def flops_per_token(self, length: int, attention: Literal["causal", "full"] = "causal") -> int:
        """FLOPs of forward and backward a token: 6 a multiply-accumulate of the matrices that tokens pass through.

        The embedding is a lookup and costs nothing; norms, softmax and rotations are left out.

        Args:
          length: S, positions of a row, all of one document.
          attention: "causal" counts the pairs that the mask keeps, as if they were half of S * S, or w * S - w * w / 2
            in a window of w; "full" all of them.
        """
        matrices, pairs = model.count_macs(self)
        if attention == "full":
            return 6 * (matrices + pairs * length)
        seen = min(self.window or length, length)
        return 6 * (matrices + pairs * seen * (2 * length - seen) // (2 * length))


_SCALINGS = {"3": None, "3.1": RopeScaling(), "3.2": RopeScaling(factor=32.0)}
_SHAPES = {  # layers, dim, ffn_dim, heads
    "3.2-1b": (16, 2048, 8192, 32),
    "3.2-3b": (28, 3072, 8192, 24),
    "3-8b": (32, 4096, 14_336, 32),
    "3-70b": (80, 8192, 28_672, 64),
    "3.1-8b": (32, 4096, 14_336, 32),
    "3.1-70b": (80, 8192, 28_672, 64),
    "3.1-405b": (126, 16_384, 53_248, 128),
}


def _published(version: str, layers: int, dim: int, ffn_dim: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        layers=layers,
        dim=dim,
        ffn_dim=ffn_dim,
        heads=heads,
        kv_heads=8,
        rope_scaling=_SCALINGS[version],
        max_positions=8192 if version == "3" else 131_072,
        tie_embeddings=version == "3.2",
    )


SIZES = {name: _published(name.partition("-")[0], *shape) for name, shape in _SHAPES.items()}
"""Published shapes by version and size."""
