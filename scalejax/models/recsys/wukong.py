"""Wukong: a stack of factorization-machine layers that keeps improving as it is made larger.

    scalejax train wukong

Paper: B. Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation", ICML 2024 (arXiv 2403.02545).
Equations, in the order of the code (one example; X_i holds n_i vectors of width d):

    X_0     = d-vectors of the dense features, of the categorical ones, and of groups of unimportant ones  (section 3.2)
    F_i     = X_i X_i^T  |  X_i (X_i^T Y)  |  X_i (X_i^T Y(X_i))                      plain | lowrank | attentive FM
    A_i     = reshape(MLP(LN(flatten(F_i))), (n_F, d))                                FM block
    C_i     = W_L X_i                                                                 linear compression block, n_L rows
    R_i     = X_i if n_i = n_F + n_L else W_R X_i                                     residual
    X_{i+1} = LN(concat(A_i, C_i) + R_i)                                              LN over d
    logits  = MLP(flatten(X_l))

Layer i holds interactions of orders 1 .. 2^(i+1). A layer is one of DHEN (`dhen`) with two modules, a factorization
machine and a linear one (`interactions`, which also says what the paper leaves open), and the ensemble "concat".
"""

import dataclasses
from typing import get_args

import jax
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.errors import check_one_of, check_whole
from scalejax.models.recsys import dhen
from scalejax.models.recsys.interactions import (
    FactorizationMachine,
    FmBlock,
    FmKind,
    LayerInputs,
    LinearCompression,
    Normalization,
)
from scalejax.models.recsys.stack import Important as Important
from scalejax.models.recsys.stack import NarrowGroup as NarrowGroup
from scalejax.models.recsys.stack import StackConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class WukongConfig(StackConfig):
    """Architecture. The defaults are the member of the paper's Criteo Terabyte grid that comes nearest to its Table 3.

    There (13 dense and 26 categorical features) the defaults have 28,260,137 dense parameters and 172.99 MFLOP an
    example, against 28,009,121 and 173.73 published. No member of the grid matches exactly: some shape is not
    documented.

    Attributes:
      layers: l.
      fm_outputs: n_F, vectors that each FM block adds.
      lcb_outputs: n_L, vectors that each linear compression block adds.
      fm: Kind of factorization machine; "plain" has cost n^2 d and ignores `rank`.
      rank: k, columns of Y.
      attention_rows: Rows of W_C, for fm="attentive".
      attention_hidden: Hidden widths of the MLP that makes Y, for fm="attentive".
      fmb_hidden: Hidden widths of the MLP in each FM block.
      dropout: After hidden activations of the FM blocks and of the head.
      activation: Of every hidden layer; "linear" and normalization="none" make the stack a polynomial (tests use it).
      normalization: LayerNorm in the FM blocks and after the residual, or none.
    """

    layers: int = 2
    fm_outputs: int = 16
    lcb_outputs: int = 16
    fm: FmKind = "lowrank"
    rank: int = 24
    attention_rows: int = 8
    attention_hidden: tuple[int, ...] = (256,)
    fmb_hidden: tuple[int, ...] = (2048, 2048)
    normalization: Normalization = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "fm_outputs", "lcb_outputs", "rank", "attention_rows"):
            check_whole(f"WukongConfig: {name}", getattr(self, name), 1)
        for name, choices in (("fm", FmKind), ("normalization", Normalization)):
            check_one_of(f"WukongConfig: {name}", getattr(self, name), get_args(choices))
        nn.check_mlp("WukongConfig", fmb_hidden=self.fmb_hidden, attention_hidden=self.attention_hidden)

    def build_layers(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> list[nnx.Module]:
        return [WukongLayer(n, self, rngs=rngs, dtypes=dtypes) for n in self.layer_inputs(schema)]

    def output_vectors(self, schema: Schema) -> int:
        """n_F + n_L."""
        del schema
        return self.fm_outputs + self.lcb_outputs

    def layer_inputs(self, schema: Schema) -> tuple[int, ...]:
        """n_i of each layer: n_0 first, n_F + n_L after it (the pyramid)."""
        return (self.input_vectors(schema), *(self.layers - 1) * (self.output_vectors(schema),))

    def layer(self) -> dhen.EnsembleLayer:
        """What a layer is in the terms of DHEN."""
        machine = FactorizationMachine(
            outputs=self.fm_outputs,
            kind=self.fm,
            rank=self.rank,
            hidden=self.fmb_hidden,
            attention_rows=self.attention_rows,
            attention_hidden=self.attention_hidden,
            normalization=self.normalization,
            activation=self.activation,
            dropout=self.dropout,
        )
        return dhen.EnsembleLayer(
            modules=(machine, LinearCompression(outputs=self.lcb_outputs)),
            ensemble="concat",
            normalization=self.normalization,
        )

    def fmb_sizes(self, n: int) -> tuple[int, ...]:
        """Sizes of the MLP in an FM block whose layer has n input vectors."""
        machine = self.layer().modules[0]
        assert isinstance(machine, FactorizationMachine)
        return machine.sizes(LayerInputs(n=n, d=self.dim))


_FLIGHTS = WukongConfig(
    dim=4,
    layers=2,
    fm_outputs=64,
    lcb_outputs=72,  # with fm_outputs 136, as many as go in (9 features, 7 bins, dense): the residual is the identity
    rank=12,
    fmb_hidden=(256,),
    head_hidden=(256, 128),
    bottom_hidden=(64,),
    dense_vectors=8,
    feature_vectors=8,
    normalization="none",
)

SIZES = {
    "S": dataclasses.replace(
        _FLIGHTS,
        fm_outputs=16,
        lcb_outputs=52,
        fmb_hidden=(128,),
        head_hidden=(128, 64),
        dense_vectors=4,
        feature_vectors=4,
    ),
    "M": _FLIGHTS,
    "L": dataclasses.replace(_FLIGHTS, dim=8, fm_outputs=32, lcb_outputs=36, rank=24, fmb_hidden=(512,)),
}
"""Sizes for small data (some ten features, some 10^5 examples). The published ones: `wukong_scaling.TABLE_5`.

On the flights many short vectors did better than one long vector in a table as wide, and the stack did better without
LayerNorm, which takes the length of such vectors away (benchmarks/results/quality.md).
"""


class WukongLayer(FmBlock):
    """X_{i+1} = LN(concat(FMB(X_i), LCB(X_i)) + R_i).

    It is `dhen.DhenLayer` of `WukongConfig.layer` but for the names of its parameters, which checkpoints hold: those of
    the FM block are the layer's own.
    """

    def __init__(self, n: int, config: WukongConfig, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        layer, inputs = config.layer(), LayerInputs(n=n, d=config.dim)
        machine, linear = layer.modules
        assert isinstance(machine, FactorizationMachine)
        super().__init__(machine, inputs, rngs=rngs, dtypes=dtypes)
        self.lcb = linear.build(inputs, rngs=rngs, dtypes=dtypes)
        self.residual = dhen.shortcut(n, layer.outputs, rngs=rngs, dtypes=dtypes)
        self.norm = nn.LayerNorm(config.dim, dtypes=dtypes) if layer.normalization == "layer" else None

    def __call__(
        self,
        x: jax.Array,
        dense: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        present: jax.Array | None = None,
    ) -> jax.Array:
        """x: compute_dtype[n, B, d] -> compute_dtype[n_F + n_L, B, d]."""
        parts = [super().__call__(x, dense, key=key, present=present), self.lcb(x)]
        return dhen.join(parts, x, "concat", self.residual, self.norm)
