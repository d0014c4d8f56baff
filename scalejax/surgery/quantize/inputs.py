"""Static scales of activations: what the matrices of a language model multiply in calibration text.

Each matrix has one scale, that of an expert from the tokens that the router sends to it (1 if there are none). Text
passes the layers with the weights as they have been quantized, and activations as they are. Scales are chosen as those
of weights are (`calibration`), from the magnitudes of all tokens together:

max         of the largest
percentile  of the smallest that at least p % do not exceed, to 2^-10 of it; or the largest where that is zero
mse         of the largest times 1, 0.98, ... 0.5, the one of the least squared error
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.models.llm.packed_layouts.protocol import PackedLayout
from scalejax.numerics.quantize import dequantize
from scalejax.numerics.quantized import static
from scalejax.surgery.quantize import calibration as calibrations
from scalejax.surgery.quantize.activations import EMBEDDING, FINAL_NORM, Walk, outside, parameters, paths_in_layer
from scalejax.surgery.quantize.calibration import Calibration
from scalejax.surgery.quantize.checkpoint import QuantizedWeight, Quantizer, read_weight
from scalejax.surgery.quantize.quantization_plan import Weight

_BIN_BITS = 13  # of the 23 of a mantissa, which values of a bin may differ in

Inputs = Callable[[np.ndarray], jax.Array]
"""What comes before a layer, float32[B, S, E], to what its matrix multiplies, float32[B, S, ...]."""


@dataclasses.dataclass
class WithInputs:
    """Quantizes weights in one way or another, and finds the scales of what they multiply.

    Attributes:
      model: The model.
      plan: All its weights.
      tokens: int32[rows, positions], calibration text; each row is a document.
      weights: How weights are quantized.
      calibration: How scales are chosen.
    """

    model: LanguageModel
    plan: Sequence[Weight]
    tokens: np.ndarray
    weights: Quantizer
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    _results: dict[str, QuantizedWeight] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or not self.tokens.size:
            raise UserError(f"calibration: tokens must be [rows, positions]; got {self.tokens.shape}. Give text.")

    def quantize(self, weight: Weight, layout: PackedLayout) -> QuantizedWeight:
        """See `checkpoint.Quantizer`."""
        if weight.layer is None:
            result = self.weights.quantize(weight, layout)
            if weight.inputs is None:
                return result
            self._advance(self.model.config.layers, layout)
            normed = self._walk.normed(self._outside(FINAL_NORM, layout))
            found = find_scale(normed, self._walk.streams, weight.inputs, self.calibration)
            return dataclasses.replace(result, input_scale=found)
        self._advance(weight.layer + 1, layout)
        return self._results.pop(weight.name)

    def _advance(self, layers: int, layout: PackedLayout) -> None:
        """Takes the tokens through the layers before `layers`."""
        self._walk.advance(layers, lambda: self._outside(EMBEDDING, layout), lambda number: self._layer(number, layout))

    def _outside(self, module: str, layout: PackedLayout) -> dict[str, np.ndarray]:
        """Parameters of a module outside the layers as the quantized model has them, by path in it."""
        made = {}
        for path, weight in outside(self.plan, module).items():
            if weight.format is None:
                value = read_weight(self.model, weight)
            else:
                value = np.asarray(dequantize(self.weights.quantize(weight, layout).quantized))
            made[path] = value.reshape(weight.shape)
        return made

    def _layer(self, number: int, layout: PackedLayout) -> dict[str, np.ndarray]:
        """Quantizes a layer and finds the scales of its inputs; its parameters then."""
        sizes = self.model.architecture.sizes(self.model.config)
        arrays: dict[str, np.ndarray] = {}
        staged = {path for stage in self._walk.stages for path in stage}
        own = [weight for weight in self.plan if weight.layer == number]
        for weight in own:
            if weight.inputs is not None and not staged.issuperset(paths_in_layer(weight)):
                raise UserError(
                    f"--activations: the model does not say what {weight.name} multiplies (`stages` of its part). "
                    f"Leave it as it is: --rule {weight.module}=none."
                )
            if weight.format is None:
                value = read_weight(self.model, weight)
            else:
                self._results[weight.name] = result = self.weights.quantize(weight, layout)
                value = np.asarray(dequantize(result.quantized))
            arrays[weight.name] = value
        params = parameters(own, arrays, sizes)
        for stage, paths in enumerate(self._walk.stages):
            wanted = [w for w in own if w.inputs is not None and not set(paths).isdisjoint(paths_in_layer(w))]
            scales: dict[tuple[static.Format, int | None], np.float32] = {}
            for weight in wanted:
                assert weight.inputs is not None
                key = weight.inputs, weight.tensor.expert
                if key not in scales:
                    inputs = functools.partial(self._walk.run, params, stage, expert=weight.tensor.expert)
                    scales[key] = find_scale(inputs, self._walk.streams, weight.inputs, self.calibration)
                found = self._results[weight.name]
                self._results[weight.name] = dataclasses.replace(found, input_scale=scales[key])
        return params

    @functools.cached_property
    def _walk(self) -> Walk:
        return Walk(self.model.config, self.tokens)


def find_scale(
    inputs: Inputs, streams: Sequence[np.ndarray], format: static.Format, calibration: Calibration
) -> np.float32:
    """The static scale of what a matrix multiplies.

    Args:
      inputs: Makes it.
      streams: What comes before the layer, some rows at a time.
      format: The format.
      calibration: How the scale is chosen; see above.

    Raises:
      UserError: activations are not finite.
    """
    largest = np.float32(0)
    counts = np.zeros(1 << (31 - _BIN_BITS), np.int64)
    for x in streams:
        found = np.abs(np.asarray(inputs(x), np.float32))
        largest = np.maximum(largest, found.max())
        if calibration.method == "percentile":
            rows = found.reshape(-1, found.shape[-1])
            found = rows[rows.any(1)].reshape(-1)  # a token that does not reach an expert is all zeros
            counts += np.bincount(found.view(np.int32) >> _BIN_BITS, minlength=len(counts))
    if not np.isfinite(largest):
        raise UserError("calibration: the text gives activations that are not finite. Check the model.")
    if calibration.method == "percentile" and largest:
        rank = calibrations.rank(int(counts.sum()), calibration.percentile)
        bin = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        top = np.int32((bin + 1) << _BIN_BITS).view(np.float32)
        return static.scale_of(float(min(top, largest) if bin else largest), format)
    if calibration.method == "max" or not largest:
        return static.scale_of(float(largest), format)
    scales = np.asarray([static.scale_of(float(largest) * factor, format) for factor in calibrations.FACTORS])
    errors = sum(np.asarray(_errors(inputs(x), jnp.asarray(scales), format), np.float64) for x in streams)
    return scales[int(np.argmin(errors))]


@functools.partial(jax.jit, static_argnums=2)
def _errors(x: jax.Array, scales: jax.Array, format: static.Format) -> jax.Array:
    """float32[n], the squared error of x under each of n scales."""
    flat = x.reshape(-1, x.shape[-1])
    return jax.lax.map(lambda scale: jnp.sum((static.encode(flat, scale, format) * scale - flat) ** 2), scales)
