"""DHEN: layers of different interaction modules side by side, so that a stack mixes what each of them finds.

    scalejax train dhen

Paper: B. Zhang et al., "DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through Rate Prediction",
arXiv 2203.11014, equations 1 and 2. For layer n with modules I_1 .. I_k (`interactions`):

    Y       = Norm(Ensemble_i I_i(X_n) + ShortCut(X_n))         Ensemble = concat | sum | sum_i alpha_i I_i
    X_{n+1} = Y                                                 ShortCut(X) = X, or W_n X where the numbers differ

With k kinds of modules and N layers an output mixes k^N compositions of them.

The paper does not publish initialisation, widths, the number of vectors of a module, or its AdvancedDLRM. Here weights
are as in `nn.scaled_normal`, biases 0, alpha 1, W_n has no bias, and `interactions.DotProduct` stands in for
AdvancedDLRM.

Axes: B examples, n vectors of an example, d width of a vector.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError, check_one_of, check_several, check_whole
from scalejax.models.recsys.interactions import Interaction, LayerInputs, Mix, Normalization, check_returned
from scalejax.models.recsys.stack import StackConfig

Ensemble = Literal["concat", "sum", "weighted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnsembleLayer:
    """One layer.

    Attributes:
      modules: Side by side; a sum needs equal numbers of outputs.
      ensemble: How their results become one; "weighted" learns a number for each module.
      normalization: LayerNorm of each vector at the end, or none.
    """

    modules: tuple[Interaction, ...]
    ensemble: Ensemble = "concat"
    normalization: Normalization = "layer"

    def __post_init__(self) -> None:
        check_one_of("EnsembleLayer: ensemble", self.ensemble, get_args(Ensemble))
        check_one_of("EnsembleLayer: normalization", self.normalization, get_args(Normalization))
        check_several("EnsembleLayer: modules", self.modules, "LinearCompression(...)")
        if not self.modules:
            raise UserError(
                "EnsembleLayer: modules must hold at least one module, such as LinearCompression(outputs=8); got none."
            )
        for module in self.modules:
            if not hasattr(module, "build") or not hasattr(module, "outputs"):
                raise UserError(
                    "EnsembleLayer: modules must be interactions such as LinearCompression(outputs=8), with `outputs` "
                    f"and `build`; got {module!r}."
                )
        counts = [module.outputs for module in self.modules]
        if self.ensemble != "concat" and len(set(counts)) > 1:
            raise UserError(
                f"EnsembleLayer: the modules of ensemble={self.ensemble!r} must return equally many vectors; got "
                f"{', '.join(f'{type(m).__name__} {m.outputs}' for m in self.modules)}. Give them equal outputs, or "
                "take ensemble='concat'."
            )

    @property
    def outputs(self) -> int:
        """Vectors that it returns."""
        counts = [module.outputs for module in self.modules]
        return sum(counts) if self.ensemble == "concat" else counts[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DhenConfig(StackConfig):
    """Architecture.

    Attributes:
      layers: In their order; they may differ.
      repeats: How many times the whole of `layers` follows upon itself, each time with its own parameters.
    """

    layers: tuple[EnsembleLayer, ...]
    repeats: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("DhenConfig: repeats", self.repeats, 1)
        check_several("DhenConfig: layers", self.layers, "EnsembleLayer(...)")
        if not self.layers:
            raise UserError("DhenConfig: layers must hold at least one EnsembleLayer; got none.")
        for layer in self.layers:
            if not isinstance(layer, EnsembleLayer):
                raise UserError(
                    f"DhenConfig: layers must be layers of modules; got {layer!r}. Write EnsembleLayer(modules=(...,))."
                )

    def build_layers(self, schema: Schema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> list[nnx.Module]:
        n, dense, built = self.input_vectors(schema), self.vectors_of_dense(schema), []
        for layer in self.layers * self.repeats:
            built.append(DhenLayer(layer, LayerInputs(n=n, d=self.dim, dense=dense), rngs=rngs, dtypes=dtypes))
            n = layer.outputs
        return built

    def output_vectors(self, schema: Schema) -> int:
        """Vectors that the last layer returns."""
        del schema
        return self.layers[-1].outputs


class DhenLayer(nnx.Module):
    """Norm(Ensemble(modules(X)) + ShortCut(X))."""

    def __init__(self, config: EnsembleLayer, inputs: LayerInputs, *, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        self.interactions = nnx.List([module.build(inputs, rngs=rngs, dtypes=dtypes) for module in config.modules])
        self.alpha = (
            nnx.Param(jnp.ones(len(config.modules), dtypes.params), logical_axes=("norm",))
            if config.ensemble == "weighted"
            else None
        )
        self.shortcut = shortcut(inputs.n, config.outputs, rngs=rngs, dtypes=dtypes)
        self.norm = nn.LayerNorm(inputs.d, dtypes=dtypes) if config.normalization == "layer" else None
        self.config = config

    def __call__(self, x: jax.Array, dense: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """compute_dtype[n, B, d] and the vectors of dense features [m, B, d] -> compute_dtype[outputs, B, d]."""
        parts = []
        for i, (module, config) in enumerate(zip(self.interactions, self.config.modules, strict=True)):
            parts.append(module(x, dense, key=None if key is None else jax.random.fold_in(key, i)))
            check_returned(config, parts[i].shape, (config.outputs, *x.shape[1:]), "`outputs`")
        if self.alpha is not None:
            parts = [alpha * part for alpha, part in zip(self.alpha[...].astype(x.dtype), parts, strict=True)]
        return join(parts, x, self.config.ensemble, self.shortcut, self.norm)


def shortcut(n: int, outputs: int, *, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Mix | None:
    """W_n; None = the identity, where a layer returns as many vectors as it gets."""
    return None if n == outputs else Mix(outputs, n, rngs=rngs, dtypes=dtypes)


def join(
    parts: Sequence[jax.Array], x: jax.Array, ensemble: Ensemble, shortcut: Mix | None, norm: nn.LayerNorm | None
) -> jax.Array:
    """The end of a layer: results of its modules [l_i, B, d] and its input [n, B, d] -> [outputs, B, d]."""
    together = jnp.concatenate(parts) if ensemble == "concat" else sum(parts[1:], parts[0])
    together = together + (x if shortcut is None else shortcut(x))
    return together if norm is None else norm(together)
