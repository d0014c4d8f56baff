"""Inputs of a language model's matrices in calibration text, and error diffusion with them, layer by layer.

One layer is in memory at a time, with the activations of all tokens before it. Inside a layer matrices that share an
input are rounded together, in the order in which tokens pass them, and whatever comes later sees what the rounded ones
make of its input: so errors of earlier matrices are part of what later ones make up for. Which matrices these are, the
model says (`LanguageModule.stages`); others are cast directly. Matrices of an expert are rounded with the tokens that
the router sends to it; an expert that none reaches is cast directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

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
from scalejax.numerics.quantize import Quantized, dequantize
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
            return _joined([self._round(weight, exact, hessian, diffusion.factor(hessian, self.damping), layout)])
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
        own = [weight for weight in self.plan if weight.layer == number]
        exact = {weight.name: read_weight(self.model, weight) for weight in own}
        arrays = dict(exact)

        def replace(weight: Weight, result: QuantizedWeight) -> None:
            self._results[weight.name] = result
            arrays[weight.name] = np.asarray(dequantize(result.quantized))

        staged = {path for stage in self._walk.stages for path in stage}
        for weight in own:
            if weight.format is not None and staged.isdisjoint(paths_in_layer(weight)):
                replace(
                    weight, QuantizedWeight(cast(jnp.asarray(exact[weight.name]), weight, layout, self.calibration))
                )
        for stage, paths in enumerate(self._walk.stages):
            wanted = [w for w in own if w.format is not None and not set(paths).isdisjoint(paths_in_layer(w))]
            if not wanted:
                continue
            params, rounded = parameters(own, arrays, sizes), {weight.name: [] for weight in wanted}
            for expert, rows in _experts_of(wanted, sizes):
                inputs = functools.partial(self._walk.run, params, stage, expert=expert)
                hessian = _covariance(inputs, self._walk.streams)
                upper = diffusion.factor(hessian, self.damping)
                for weight in wanted:
                    if weight.tensor.expert in (None, expert):
                        part = jnp.asarray(exact[weight.name][rows])
                        rounded[weight.name].append(self._round(weight, part, hessian, upper, layout))
            for weight in wanted:
                replace(weight, _joined(rounded[weight.name]))
        return parameters(own, arrays, sizes)

    def _round(
        self, weight: Weight, exact: jax.Array, hessian: np.ndarray, upper: np.ndarray, layout: PackedLayout
    ) -> "_Rounded":
        assert weight.format is not None
        direct = cast(exact, weight, layout, self.calibration)
        found = diffusion.diffuse(exact, upper, weight.format, self.calibration, direct.tensor_scale)
        errors = [
            diffusion.output_error(np.asarray(exact), np.asarray(dequantize(q)), hessian) for q in (found, direct)
        ]
        return _Rounded(found, errors[0], errors[1])

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

    def run(
        self, params: dict[str, np.ndarray], stage: int | None, x: np.ndarray, *, expert: int | None = None
    ) -> jax.Array:
        """See `run_layer`."""
        return run_layer(self._shape, params, x, stage, expert)

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
    return {
        entry.path.removeprefix(prefix): weight
        for weight in plan
        for entry in weight.tensor.entries
        if entry.path.startswith(prefix)
    }


def paths_in_layer(weight: Weight) -> tuple[str, ...]:
    """Paths of the parameters that a weight of a layer holds, without "layers/"."""
    return tuple(entry.path.removeprefix("layers/") for entry in weight.tensor.entries)


def parameters(
    own: Sequence[Weight], arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """The parameters of a layer by path in it, from its weights [rows, columns] by name."""
    made: dict[str, list[np.ndarray]] = {}
    for weight in own:
        for path, entry in zip(paths_in_layer(weight), weight.tensor.entries, strict=True):
            made.setdefault(path, []).append(entry.from_tensor(arrays[weight.name].reshape(weight.shape), sizes))
    spread = {path for weight in own if weight.tensor.expert is not None for path in paths_in_layer(weight)}
    return {path: np.stack(found) if path in spread else found[0] for path, found in made.items()}


@dataclasses.dataclass(frozen=True)
class _Rounded:
    """A matrix, rounded.

    Attributes:
      quantized: Its codes and scales.
      error: Squared error of its outputs.
      direct_error: The same of a direct cast.
    """

    quantized: Quantized
    error: float
    direct_error: float


def _joined(parts: Sequence[_Rounded]) -> QuantizedWeight:
    """One weight of the matrices of its experts, one below another."""
    whole = parts[0].quantized
    if len(parts) > 1:
        whole = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(part.quantized for part in parts))
    error, direct = sum(part.error for part in parts), sum(part.direct_error for part in parts)
    return QuantizedWeight(whole, error / direct if direct > 0 else 1.0)


def _experts_of(wanted: Sequence[Weight], sizes: Mapping[str, int]) -> list[tuple[int | None, slice]]:
    """Experts, whose inputs differ, each with its rows in a weight that has them; None = there are no experts."""
    weight = wanted[0]
    if weight.tensor.expert is not None:
        return [(expert, slice(None)) for expert in range(sizes[weight.tensor.entries[0].ours()[0]])]
    if len(weight.shape) == 2:
        return [(None, slice(None))]
    rows = weight.shape[1]
    return [(expert, slice(expert * rows, (expert + 1) * rows)) for expert in range(weight.shape[0])]


class LayerShape:
    """A model of one layer without its arrays; equal to itself alone, so that programs are made once for a model."""

    def __init__(self, config: LanguageConfig) -> None:
        one = dataclasses.replace(config, layers=1)
        self.model = counts.abstract(families.of(one).build, one)
        norm = self.model.final_norm
        assert isinstance(norm, nnx.Module)
        self.layer, self.norm = ModelShape.of(self.model.layers), ModelShape.of(norm)


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_layer(
    shape: LayerShape, params: dict[str, jax.Array], x: jax.Array, stage: int | None, expert: jax.Array | None = None
) -> jax.Array:
    """float32[B, S, E] before a layer -> what comes behind it, or the input of a stage, see `LanguageModule`.

    Args:
      shape: Of the layer.
      params: Its parameters, by path without "layers/".
      x: What comes before it.
      stage: Which; None = behind the layer.
      expert: int32[], whose matrices, where experts have their own.
    """
    layer = shape.layer.merge(params)
    if expert is None:
        return shape.model.run_layer(layer, x, stage)
    return shape.model.run_layer(layer, x, stage, expert)


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
