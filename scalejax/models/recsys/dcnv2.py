"""DCNv2: explicit feature crosses of bounded degree, then an MLP ("stacked").

Paper: R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021 (arXiv 2008.13535), equations 1 and 2.

    x_0     = concat(MLP_bottom(dense), embeddings)      n d
    x_{i+1} = x_0 * (W_i x_i + b_i) + x_i                W_i = V_i U_i if low-rank
    logits  = MLP(x_l)

The dense features pass a bottom MLP first, as in the Criteo Terabyte comparison of the Wukong paper, whose DCNv2 (2
full-rank cross layers on 27 x 128, deep part 4 x 2,048) has the 43,737,217 dense parameters of the defaults here, and
whose 262.35 MFLOP an example is 6 x MACs (262.33).

Axes: B examples, n vectors, d width, T tasks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.errors import check_whole
from scalejax.models.recsys.task import CtrTask, OneVectorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcnV2Config(OneVectorConfig):
    """Architecture.

    Attributes:
      cross_layers: Number of cross layers, 0 for an MLP alone; the crosses reach order cross_layers + 1.
      cross_rank: Rank of each W, or None = full.
      deep_hidden: Hidden widths of the MLP that makes the logits.
    """

    cross_layers: int = 2
    cross_rank: int | None = None
    deep_hidden: tuple[int, ...] = (2048, 2048, 2048, 2048)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("DcnV2Config: cross_layers", self.cross_layers, 0)
        if self.cross_rank is not None:
            check_whole("DcnV2Config: cross_rank", self.cross_rank, 1)
        nn.check_mlp("DcnV2Config", deep_hidden=self.deep_hidden)

    def task(self, schema: Schema) -> CtrTask:
        """Binds the model to the columns of a data set."""
        return CtrTask(model=self, schema=schema)

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "DcnV2":
        return DcnV2(self, schema, rngs, dtypes)

    def width(self, schema: Schema) -> int:
        """The length of x_0, the input of the cross network."""
        return self.input_vectors(schema) * self.dim

    def mlp_sizes(self, schema: Schema) -> dict[str, tuple[int, ...]]:
        """Sizes of the MLPs: "bottom" (if there are dense features) and "deep"."""
        return {**self.bottom_sizes(schema), "deep": (self.width(schema), *self.deep_hidden, len(schema.labels))}


class Cross(nnx.Module):
    """x_0 * (W x + b) + x."""

    def __init__(self, width: int, rank: int | None, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.down = (
            None
            if rank is None
            else nnx.Param(
                nn.scaled_normal(rngs.params(), (width, rank), fan_in=width, dtype=dtypes.params),
                logical_axes=("input", "rank"),
            )
        )
        self.affine = nn.Linear(width if rank is None else rank, width, rngs=rngs, dtypes=dtypes)

    def __call__(self, x0: jax.Array, x: jax.Array) -> jax.Array:
        """compute_dtype[B, width] twice -> compute_dtype[B, width]."""
        inner = x if self.down is None else x @ self.down[...].astype(x.dtype)  # B width -> B rank
        return x0 * self.affine(inner) + x


class DcnV2(nnx.Module):
    """Embeddings and dense features -> one logit per task."""

    def __init__(self, config: DcnV2Config, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        sizes, width = config.mlp_sizes(schema), config.width(schema)
        self.bottom = (
            nn.Mlp(sizes["bottom"], rngs=rngs, final_activation="relu", dtypes=dtypes) if "bottom" in sizes else None
        )
        self.crosses = nnx.List(
            [Cross(width, config.cross_rank, rngs=rngs, dtypes=dtypes) for _ in range(config.cross_layers)]
        )
        self.deep = nn.Mlp(
            sizes["deep"],
            rngs=rngs,
            dropout_rate=config.dropout,
            dtypes=dtypes,
            out_dtype=nn.wide(dtypes.params, dtypes.compute),
        )
        self.features = schema.keys
        self.compute_dtype = dtypes.compute

    def __call__(self, embedded: dict[str, jax.Array], dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, float32[B, T] (float64 where the model computes in float64)."""
        parts = [] if self.bottom is None else [self.bottom(dense)]
        x0 = jnp.concatenate(parts + [embedded[f].astype(self.compute_dtype) for f in self.features], axis=1)  # B nd
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        return self.deep(x, key=key)  # B T
