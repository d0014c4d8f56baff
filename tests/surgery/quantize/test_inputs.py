"""Static scales of activations: from what matrices multiply in the text, chosen as scales of weights are."""

import jax.numpy as jnp
import numpy as np
import pytest
from llama_cases import tokens
from quantized_cases import EXPERTS, MATRICES, SMALL, gaussian, read_weights, write_model

from scalejax.errors import UserError
from scalejax.models.llm import model_folder
from scalejax.models.llm.packed_layouts.known import find_layout
from scalejax.numerics.quantize import dequantize
from scalejax.numerics.quantized import static
from scalejax.surgery.quantize import inputs, quantization_plan
from scalejax.surgery.quantize.activations import ErrorDiffusion, Walk, embedded, parameters
from scalejax.surgery.quantize.calibration import FACTORS, Calibration
from scalejax.surgery.quantize.checkpoint import DirectCast, read_weight

OWN = find_layout("scalejax")
TEXT = tokens(SMALL, 6, 32)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    weights = write_model(folder)
    return model_folder.open_folder(folder), weights


def results(model, format, quantizer, given=()):
    """{module: its result}, of `quantizer` and of it with the scales of inputs."""
    made = quantization_plan.make(model, format, given, OWN, "int8")
    both = inputs.WithInputs(model, made, TEXT, quantizer(made)), quantizer(made)
    return [{w.module: one.quantize(w, OWN) for w in made if w.format is not None} for one in both]


@pytest.mark.slow
def test_scales_of_the_first_matrices_are_those_of_the_text(theirs):
    model, weights = theirs
    found, _ = results(model, "bdr_mx9", lambda _: DirectCast(model))
    assert len(found) == MATRICES
    x = weights["model.embed_tokens.weight"][TEXT].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + SMALL.norm_eps)
    normed *= weights["model.layers.0.input_layernorm.weight"]
    for name in ("query", "key", "value"):
        scale = found[f"layers/0/attention/{name}"].input_scale
        np.testing.assert_allclose(scale, np.abs(normed).max() / 127, rtol=1e-5)
    groups = [("attention/query", "attention/key", "attention/value"), ("mlp/gate", "mlp/up")]
    for layer in (0, 1):
        for group in groups:
            assert len({found[f"layers/{layer}/{name}"].input_scale for name in group}) == 1
    assert len({result.input_scale for result in found.values()}) == 2 * 4


@pytest.mark.slow
def test_scales_of_an_expert_are_those_of_the_tokens_that_are_sent_to_it(tmp_path):
    """`Walk.run` is compared with the formula by hand in test_activations."""
    write_model(tmp_path / "theirs", EXPERTS)
    model = model_folder.open_folder(tmp_path / "theirs")
    plan = quantization_plan.make(model, "bdr_mx9", [("layers/./attention/.*|layers/1/.*", "none")], OWN, "int8")
    made = inputs.WithInputs(model, plan, TEXT, DirectCast(model))
    walk, own = Walk(model.config, TEXT), [weight for weight in plan if weight.layer == 0]
    found = {w.name: made.quantize(w, OWN) for w in own if w.format is not None}
    arrays = {w.name: read_weight(model, w) if w.format is None else dequantize(found[w.name].quantized) for w in own}
    params = parameters(own, arrays, model.architecture.sizes(model.config))
    streams = embedded(read_weights(tmp_path / "theirs")["model.embed_tokens.weight"], TEXT)
    for expert in range(4):
        for stage, names in ((2, (1, 3)), (3, (2,))):
            largest = max(np.abs(walk.run(params, stage, x, expert=expert)).max() for x in streams)
            for name in names:
                scale = found[f"model.layers.0.block_sparse_moe.experts.{expert}.w{name}.weight"].input_scale
                np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)


@pytest.mark.slow
def test_only_matrices_of_products_have_them(theirs):
    model, _ = theirs
    given = [("embed|final_norm|head", "bdr_mx9"), (".*", "none")]
    found, _ = results(model, "none", lambda _: DirectCast(model), given)
    assert {module for module, result in found.items() if result.input_scale is not None} == {"head"}
    assert len(found) == 3


@pytest.mark.slow
def test_errors_are_passed_on_as_without(theirs):
    model, _ = theirs
    with_inputs, without = results(model, "mxfp4_e2m1", lambda made: ErrorDiffusion(model, made, TEXT))
    for module, result in with_inputs.items():
        np.testing.assert_array_equal(result.quantized.codes, without[module].quantized.codes)
        assert result.output_error == without[module].output_error
        assert result.input_scale > 0


STREAMS = [gaussian(0, 3, 20, 32), gaussian(1, 1, 20, 32) * 3]
ALL = np.abs(np.concatenate([x.reshape(-1) for x in STREAMS]))


def scale(format, streams=STREAMS, **calibration):
    return inputs.find_scale(jnp.asarray, streams, format, Calibration(**calibration))


@pytest.mark.parametrize("format", static.FORMATS)
def test_max_is_the_largest_of_all_rows(format):
    assert scale(format) == static.scale_of(ALL.max(), format)
    assert scale(format, [np.zeros((2, 4, 16), np.float32)]) == 1


@pytest.mark.parametrize("percentile", [50, 99, 99.9, 100])
def test_a_percentile_is_that_of_all_numbers(percentile):
    found = scale("int8", method="percentile", percentile=percentile) * 127
    want = np.sort(ALL)[int(np.ceil(percentile * len(ALL) / 100)) - 1]
    assert want * (1 - 1e-6) <= found <= want * (1 + 2**-10)


def test_tokens_that_reach_no_expert_do_not_count():
    reached = [np.concatenate([x, np.zeros_like(x)], axis=1) for x in STREAMS]
    assert scale("int8", reached, method="percentile", percentile=90) == scale(
        "int8", STREAMS, method="percentile", percentile=90
    )


@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_the_scale_of_an_expert_that_no_token_reaches_is_1(method):
    assert scale("int8", [np.zeros((2, 4, 16), np.float32)], method=method) == 1


def test_a_percentile_of_zeros_is_the_largest():
    x = np.zeros((1, 10, 10), np.float32)
    x[0, 0, 0] = 5
    assert scale("int8", [x], method="percentile", percentile=90) == np.float32(5) / np.float32(127)


@pytest.mark.parametrize("format", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.slow)])
def test_mse_is_the_least_error_of_all_candidates(format):
    x = np.concatenate([x.reshape(-1) for x in STREAMS])
    x[0] = 40.0  # alone far out, which int8 pays for with all others
    streams = [x[: len(STREAMS[0].reshape(-1))].reshape(STREAMS[0].shape), STREAMS[1]]
    scales = [static.scale_of(40.0 * factor, format) for factor in FACTORS]
    errors = [np.sum((np.asarray(static.encode(jnp.asarray(x), s, format)) * s - x) ** 2) for s in scales]
    found = scale(format, streams, method="mse")
    assert errors[scales.index(found)] <= min(errors) * (1 + 1e-5)
    if format == "int8":
        assert found < scales[0]


def test_bad_arguments_are_refused(theirs):
    model, _ = theirs
    with pytest.raises(UserError, match="calibration: tokens must be"):
        inputs.WithInputs(model, (), np.zeros((0, 5), np.int32), DirectCast(model))
    broken = gaussian(0, 2, 3, 16)
    broken[1, 2, 3] = np.nan
    with pytest.raises(UserError, match="activations that are not finite"):
        scale("int8", [STREAMS[0], broken])
