"""What the matrices of a Llama multiply in calibration text, and error diffusion with it, layer by layer.

One layer is in memory at a time, with the activations of all tokens before it. Inside a layer matrices that share an
input are rounded together, in the order in which tokens pass them, and whatever comes later sees what the rounded ones
make of its input: so errors of earlier matrices are part of what later ones make up for.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.inference.model_folder import LanguageModel
from scalejax.models.llm.llama3 import huggingface, rope
from scalejax.models.llm.llama3.model import Block
from scalejax.models.llm.packed_layouts import Layout
from scalejax.numerics.quantize import dequantize
from scalejax.surgery.quantize import diffusion
from scalejax.surgery.quantize.calibration import Calibration
from scalejax.surgery.quantize.checkpoint import Result, cast, read_weight
from scalejax.surgery.quantize.plan import Weight
from scalejax.train.state import ModelShape

STAGES = (
    ("attention/query", "attention/key", "attention/value"),
    ("attention/out",),
    ("mlp/gate", "mlp/up"),
    ("mlp/down",),
)
"""Matrices of a layer in the order in which tokens pass them; those of a stage share their input."""

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
    _results: dict[str, Result] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or not self.tokens.size:
            raise UserError(f"error diffusion: tokens must be [rows, positions]; got {self.tokens.shape}. Give text.")
        if self.damping <= 0:
            raise UserError(f"--damping must be above 0; got {self.damping}. 0.01 is usual.")

    def quantize(self, weight: Weight, layout: Layout) -> Result:
        """See `checkpoint.Quantizer`."""
        if weight.layer is None:
            exact = jnp.asarray(read_weight(self.model, weight))
            if weight.module != "head":
                return Result(cast(exact, weight, layout, self.calibration))
            self._advance(self.model.config.layers, layout)
            scale, eps = self._vector("final_norm/scale", layout), self.model.config.norm_eps
            hessian = _covariance(
                lambda x: nn.rms_norm(jnp.asarray(x), jnp.asarray(scale), eps, jnp.float32), self._walk.streams
            )
            return self._round(weight, exact, hessian, diffusion.factor(hessian, self.damping), layout)
        if weight.layer >= self._walk.done:
            self._advance(weight.layer + 1, layout)
        return self._results.pop(weight.name)

    def _advance(self, layers: int, layout: Layout) -> None:
        """Takes the tokens through the layers before `layers`."""
        self._walk.advance(
            layers, lambda: self._vector("embed/weight", layout), lambda number: self._layer(number, layout)
        )

    def _vector(self, path: str, layout: Layout) -> np.ndarray:
        """A parameter outside the layers as the quantized model has it."""
        (weight,) = (weight for weight in self.plan if weight.entry.path == path)
        exact = read_weight(self.model, weight)
        if weight.format is not None:
            exact = np.asarray(dequantize(cast(jnp.asarray(exact), weight, layout, self.calibration)))
        return exact.reshape(weight.shape)

    def _layer(self, number: int, layout: Layout) -> dict[str, np.ndarray]:
        """Quantizes a layer; its parameters then."""
        sizes = huggingface.sizes(self.model.config)
        own = {w.entry.path.removeprefix("layers/"): w for w in self.plan if w.layer == number}
        exact = {path: read_weight(self.model, weight) for path, weight in own.items()}
        params = dict(exact)

        def replace(path: str, result: Result) -> None:
            self._results[own[path].name] = result
            params[path] = np.asarray(dequantize(result.quantized))

        def ours() -> dict[str, np.ndarray]:
            return {path: w.entry.from_tensor(params[path].reshape(w.shape), sizes) for path, w in own.items()}

        staged = {path for stage in STAGES for path in stage}
        for path, weight in own.items():
            if weight.format is not None and path not in staged:
                replace(path, Result(cast(jnp.asarray(exact[path]), weight, layout, self.calibration)))
        for stage, paths in enumerate(STAGES):
            wanted = [path for path in paths if own[path].format is not None]
            if wanted:
                hessian = _covariance(functools.partial(self._walk.run, ours(), stage), self._walk.streams)
                upper = diffusion.factor(hessian, self.damping)
                for path in wanted:
                    replace(path, self._round(own[path], jnp.asarray(exact[path]), hessian, upper, layout))
        return ours()

    def _round(
        self, weight: Weight, exact: jax.Array, hessian: np.ndarray, upper: np.ndarray, layout: Layout
    ) -> Result:
        assert weight.format is not None
        direct = cast(exact, weight, layout, self.calibration)
        found = diffusion.diffuse(exact, upper, weight.format, self.calibration, direct.tensor_scale)
        errors = [
            diffusion.output_error(np.asarray(exact), np.asarray(dequantize(q)), hessian) for q in (found, direct)
        ]
        return Result(found, errors[0] / errors[1] if errors[1] > 0 else 1.0)

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

    config: Any
    tokens: np.ndarray
    streams: list[np.ndarray] = dataclasses.field(default_factory=list)
    done: int = 0

    def advance(
        self, layers: int, embedding: Callable[[], np.ndarray], layer: Callable[[int], dict[str, np.ndarray]]
    ) -> None:
        """Passes the layers before `layers`.

        Args:
          layers: A count.
          embedding: Makes the table, float32[V, E].
          layer: Makes the parameters with which a layer is passed; asked while `streams` stand before it.
        """
        if not self.streams:
            self.streams = embedded(embedding(), self.tokens)
        while self.done < layers:
            params = layer(self.done)
            self.streams = [np.asarray(self.run(params, len(STAGES), x)) for x in self.streams]
            self.done += 1

    def run(self, params: dict[str, np.ndarray], stage: int, x: np.ndarray) -> jax.Array:
        """See `run_stage`."""
        return run_stage(self._shape, params, x, stage)

    @functools.cached_property
    def _shape(self) -> "LayerShape":
        return LayerShape(self.config)


def embedded(table: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    """float32[B, S, E] of tokens int32[rows, S], some rows at a time."""
    step = max(1, _BATCH_TOKENS // tokens.shape[1])
    return [np.asarray(table[tokens[i : i + step]]) for i in range(0, len(tokens), step)]


class LayerShape:
    """A layer without its arrays; equal to itself alone, so that programs are made once for a model."""

    def __init__(self, config: Any) -> None:
        dtypes: Any = {"param_dtype": jnp.float32, "compute_dtype": jnp.float32}
        self.config = config
        self.block = ModelShape.of(
            nnx.eval_shape(lambda: Block(dataclasses.replace(config, layers=1), nnx.Rngs(0), **dtypes))
        )


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_stage(shape: LayerShape, params: dict[str, jax.Array], x: jax.Array, stage: int) -> jax.Array:
    """float32[B, S, E] before a layer -> the input of a stage, float32[B, S, ...], or what comes behind the layer.

    Args:
      shape: Of the layer.
      params: Its parameters, by path without "layers/".
      x: What comes before it.
      stage: A number of `STAGES`, or their count.
    """
    c, block = shape.config, shape.block.put_together(params)
    assert isinstance(block, Block)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
    turns = rope.angles(positions, rope.frequencies(c.width, c.rope_theta, c.rope_scaling))
    normed = block.attention_norm(x)
    if stage == 0:
        return normed
    q, k, v = block.attention.project(normed, turns)
    ones = jnp.ones_like(positions)
    mixed = nn.attend(q, k, v, positions=positions, segment_ids=ones, implementation=c.attention)
    if stage == 1:
        return mixed.reshape(*mixed.shape[:2], -1)
    x = x + block.attention.combine(mixed)
    normed = block.mlp_norm(x)
    if stage == 2:
        return normed
    hidden = jax.nn.silu(nn.project(normed, block.mlp.gate[...])) * nn.project(normed, block.mlp.up[...])
    if stage == 3:
        return hidden
    return x + nn.project(hidden, block.mlp.down[...])


def _covariance(inputs: Any, streams: Sequence[np.ndarray]) -> np.ndarray:
    """float32[n, n], the sum of x x^T over all tokens, x the input of a matrix."""
    total: Any = None
    for x in streams:
        total = _added(inputs(x), total)
    return np.asarray(total)


@jax.jit
def _added(x: jax.Array, total: jax.Array | None) -> jax.Array:
    flat = x.reshape(-1, x.shape[-1])
    own = jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
    return own if total is None else total + own
