"""DLRM: inner products of all pairs of embeddings, then an MLP.

Paper: M. Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019
(arXiv 1906.00091). One example, n vectors of width d:

    v       = MLP_bottom(dense)                      ReLU also after the last layer
    X       = [v, embeddings of the features]        n x d
    z       = (<x_i, x_j> for j < i)                 n (n - 1) / 2
    logits  = MLP_top(concat(v, z))

Without dense features there is no v. On the Criteo Terabyte shape (13 dense and 26 categorical features, d = 128) the
defaults have 680,321 dense parameters, and 6 x MACs is 4.63 MFLOP an example; Table 3 of the Wukong paper prints the
same parameters and 4.62, which is what remains without the input gradient of the first bottom layer (2 x 13 x 512 FLOPs
less).

Axes: B examples, n vectors, d width, T tasks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError
from scalejax.models.recsys.task import CtrTask, OneVectorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig(OneVectorConfig):
    """Architecture.

    Attributes:
      top_hidden: Hidden widths of the MLP that makes the logits.
    """

    top_hidden: tuple[int, ...] = (512, 512)

    def __post_init__(self) -> None:
        super().__post_init__()
        nn.check_mlp("DlrmConfig", top_hidden=self.top_hidden)

    def task(self, schema: Schema) -> CtrTask:
        """Binds the model to the columns of a data set."""
        return CtrTask(model=self, schema=schema)

    def build(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "Dlrm":
        return Dlrm(self, schema, rngs, dtypes)

    def mlp_sizes(self, schema: Schema) -> dict[str, tuple[int, ...]]:
        """Sizes of the MLPs: "bottom" (if there are dense features) and "top".

        Raises:
          UserError: there is one vector, and so neither a pair nor dense features.
        """
        n = self.input_vectors(schema)
        if n < 2 and not schema.dense:
            raise UserError(
                f"DlrmConfig: an example needs two vectors or dense features; got {n} and no dense ones. Give the data "
                "another feature, the modules of a tower more outputs, or take a model such as DcnV2Config."
            )
        top_in = n * (n - 1) // 2 + (self.dim if schema.dense else 0)
        return {**self.bottom_sizes(schema), "top": (top_in, *self.top_hidden, len(schema.labels))}


class Dlrm(nnx.Module):
    """Embeddings and dense features -> one logit per task."""

    def __init__(self, config: DlrmConfig, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        sizes = config.mlp_sizes(schema)
        self.bottom = (
            nn.Mlp(sizes["bottom"], rngs=rngs, final_activation="relu", dtypes=dtypes) if "bottom" in sizes else None
        )
        self.top = nn.Mlp(
            sizes["top"],
            rngs=rngs,
            dropout_rate=config.dropout,
            dtypes=dtypes,
            out_dtype=nn.wide(dtypes.params, dtypes.compute),
        )
        self.features = schema.keys
        self.compute_dtype = dtypes.compute

    def __call__(self, embedded: dict[str, jax.Array], dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, float32[B, T] (float64 where the model computes in float64)."""
        vectors = [embedded[f].astype(self.compute_dtype) for f in self.features]  # B d each
        skip = [] if self.bottom is None else [self.bottom(dense)]
        z = pairs(jnp.stack(skip + vectors)).astype(self.compute_dtype)  # n B d -> B n(n-1)/2
        return self.top(jnp.concatenate([*skip, z], axis=1), key=key)  # B T


def pairs(x: jax.Array) -> jax.Array:
    """Inner products of all pairs of vectors: float[n, B, d] -> wide[B, n (n - 1) / 2], rows of the lower triangle."""
    n, b, _ = x.shape
    lower = np.flatnonzero(np.tri(n, k=-1))
    return nn.products(x, x).reshape(b, n * n)[:, lower]
