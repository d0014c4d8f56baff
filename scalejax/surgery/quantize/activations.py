"""Inputs of a language model's matrices in calibration text, and error diffusion with them, layer by layer.

One layer is in memory at a time, with the activations of all tokens before it. Inside a layer matrices that share an
input are rounded together, in the order in which tokens pass them, and whatever comes later sees what the rounded ones
make of its input: so errors of earlier matrices are part of what later ones make up for. Which matrices these are, the
model says (`LanguageModule.stages`); others are cast directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax.errors import UserError
from scalejax.models.llm import families
from scalejax.models.llm.architecture import LanguageConfig
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.models.llm.packed_layouts.protocol import PackedLayout
from scalejax.nn import counts
from scalejax.numerics.quantize import dequantize
from scalejax.surgery.quantize import diffusion
from scalejax.surgery.quantize.calibration import Calibration
from scalejax.surgery.quantize.checkpoint import QuantizedWeight, cast, read_weight
from scalejax.surgery.quantize.quantization_plan import Weight
from scalejax.train.state import ModelShape

EMBEDDING, FINAL_NORM = "embed", "final_norm"

_BATCH_TOKENS = 4096


@dataclasses.dataclass
class ErrorDiffusion:
    """Rounds matrices so that the outputs on calibration text stay near (see diffusion).

    The embedding, which multiplies nothing, and vectors are cast directly.

    Attributes:
      model: The model.
      plan: All its weights.
      tokens: int32[rows, positions], calibration text; each row is a document.
      calibration: How scales are chosen.
      damping: See diffusion.
    """

    model: LanguageModel
    plan: Sequence[Weight]
    tokens: np.ndarray
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    damping: float = diffusion.DAMPING
    _results: dict[str, QuantizedWeight] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or not self.tokens.size:
            raise UserError(f"error diffusion: tokens must be [rows, positions]; got {self.tokens.shape}. Give text.")
        if self.damping <= 0:
            raise UserError(f"--damping must be above 0; got {self.damping}. 0.01 is usual.")

    def quantize(self, weight: Weight, layout: PackedLayout) -> QuantizedWeight:
        """See `checkpoint.Quantizer`."""
        if weight.layer is None:
            exact = jnp.asarray(read_weight(self.model, weight))
            if weight.module != "head":
                return QuantizedWeight(cast(exact, weight, layout, self.calibration))
            self._advance(self.model.config.layers, layout)
            hessian = _covariance(self._walk.normed(self._outside(FINAL_NORM, layout)), self._walk.streams)
            return self._round(weight, exact, hessian, diffusion.factor(hessian, self.damping), layout)
        if weight.layer >= self._walk.done:
            self._advance(weight.layer + 1, layout)
        return self._results.pop(weight.name)

    def _advance(self, layers: int, layout: PackedLayout) -> None:
        """Takes the tokens through the layers before `layers`."""
        self._walk.advance(layers, lambda: self._outside(EMBEDDING, layout), lambda number: self._layer(number, layout))

    def _outside(self, module: str, layout: PackedLayout) -> dict[str, np.ndarray]:
        """Parameters of a module outside the layers as the quantized model has them, by path in it."""
        made = {}
        for path, weight in outside(self.plan, module).items():
            exact = read_weight(self.model, weight)
            if weight.format is not None:
                exact = np.asarray(dequantize(cast(jnp.asarray(exact), weight, layout, self.calibration)))
            made[path] = exact.reshape(weight.shape)
        return made

    def _layer(self, number: int, layout: PackedLayout) -> dict[str, np.ndarray]:
        """Quantizes a layer; its parameters then."""
        sizes = self.model.architecture.sizes(self.model.config)
        own = {w.entry.path.removeprefix("layers/"): w for w in self.plan if w.layer == number}
        exact = {path: read_weight(self.model, weight) for path, weight in own.items()}
        params = dict(exact)

        def replace(path: str, result: QuantizedWeight) -> None:
            self._results[own[path].name] = result
            params[path] = np.asarray(dequantize(result.quantized))

        def ours() -> dict[str, np.ndarray]:
            return {path: w.entry.from_tensor(params[path].reshape(w.shape), sizes) for path, w in own.items()}

        staged = {path for stage in self._walk.stages for path in stage}
        for path, weight in own.items():
            if weight.format is not None and path not in staged:
                replace(path, QuantizedWeight(cast(jnp.asarray(exact[path]), weight, layout, self.calibration)))
        for stage, paths in enumerate(self._walk.stages):
            wanted = [path for path in paths if own[path].format is not None]
            if wanted:
                hessian = _covariance(functools.partial(self._walk.run, ours(), stage), self._walk.streams)
                upper = diffusion.factor(hessian, self.damping)
                for path in wanted:
                    replace(path, self._round(own[path], jnp.asarray(exact[path]), hessian, upper, layout))
        return ours()

    def _round(
        self, weight: Weight, exact: jax.Array, hessian: np.ndarray, upper: np.ndarray, layout: PackedLayout
    ) -> QuantizedWeight:
        assert weight.format is not None
        direct = cast(exact, weight, layout, self.calibration)
        found = diffusion.diffuse(exact, upper, weight.format, self.calibration, direct.tensor_scale)
        errors = [
            diffusion.output_error(np.asarray(exact), np.asarray(dequantize(q)), hessian) for q in (found, direct)
        ]
        return QuantizedWeight(found, errors[0] / errors[1] if errors[1] > 0 else 1.0)

    @functools.cached_property
    def _walk(self) -> "Walk":
        return Walk(self.model.config, self.tokens)


@dataclasses.dataclass
class Walk:
    """Calibration text on its way through the layers of a model that is being quantized.

    Attributes:
      config: Of the model.
      tokens: int32[rows, positions]; each row is a document.
      streams: float32[B, S, E] before the next layer, some rows at a time.
      done: Layers passed.
    """

    config: LanguageConfig
    tokens: np.ndarray
    streams: list[np.ndarray] = dataclasses.field(default_factory=list)
    done: int = 0

    def advance(
        self, layers: int, embedding: Callable[[], dict[str, np.ndarray]], layer: Callable[[int], dict[str, np.ndarray]]
    ) -> None:
        """Passes the layers before `layers`.

        Args:
          layers: A count.
          embedding: Makes the table, {"weight": float32[V, E]}.
          layer: Makes the parameters with which a layer is passed; asked while `streams` stand before it.
        """
        if not self.streams:
            self.streams = embedded(embedding()["weight"], self.tokens)
        while self.done < layers:
            params = layer(self.done)
            self.streams = [np.asarray(self.run(params, None, x)) for x in self.streams]
            self.done += 1

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """See `LanguageModule`."""
        return self._shape.model.stages

    def run(self, params: dict[str, np.ndarray], stage: int | None, x: np.ndarray) -> jax.Array:
        """See `run_layer`."""
        return run_layer(self._shape, params, x, stage)

    def normed(self, params: dict[str, np.ndarray]) -> Callable[[np.ndarray], jax.Array]:
        """What the head multiplies, as a function of what comes behind the layers; of the last norm's parameters."""
        norm = self._shape.norm.merge({path: jnp.asarray(value) for path, value in params.items()})
        return lambda x: norm(jnp.asarray(x))

    @functools.cached_property
    def _shape(self) -> "LayerShape":
        return LayerShape(self.config)


def embedded(table: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    """float32[B, S, E] of tokens int32[rows, S], some rows at a time."""
    step = max(1, _BATCH_TOKENS // tokens.shape[1])
    return [np.asarray(table[tokens[i : i + step]]) for i in range(0, len(tokens), step)]


def outside(plan: Sequence[Weight], module: str) -> dict[str, Weight]:
    """Weights of a module outside the layers, by path in it."""
    prefix = f"{module}/"
    return {w.entry.path.removeprefix(prefix): w for w in plan if w.entry.path.startswith(prefix)}


class LayerShape:
    """A model of one layer without its arrays; equal to itself alone, so that programs are made once for a model."""

    def __init__(self, config: LanguageConfig) -> None:
        one = dataclasses.replace(config, layers=1)
        self.model = counts.abstract(families.of(one).build, one)
        norm = self.model.final_norm
        assert isinstance(norm, nnx.Module)
        self.layer, self.norm = ModelShape.of(self.model.layers), ModelShape.of(norm)


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_layer(shape: LayerShape, params: dict[str, jax.Array], x: jax.Array, stage: int | None) -> jax.Array:
    """float32[B, S, E] before a layer -> what comes behind it, or the input of a stage, see `LanguageModule`.

    Args:
      shape: Of the layer.
      params: Its parameters, by path without "layers/".
      x: What comes before it.
      stage: Which; None = behind the layer.
    """
    return shape.model.run_layer(shape.layer.merge(params), x, stage)


def _covariance(inputs: Callable[[np.ndarray], jax.Array], streams: Sequence[np.ndarray]) -> np.ndarray:
    """float32[n, n], the sum of x x^T over all tokens, x the input of a matrix."""
    total: jax.Array | None = None
    for x in streams:
        total = _added(inputs(x), total)
    return np.asarray(total)


@jax.jit
def _added(x: jax.Array, total: jax.Array | None) -> jax.Array:
    flat = x.reshape(-1, x.shape[-1])
    own = jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
    return own if total is None else total + own
