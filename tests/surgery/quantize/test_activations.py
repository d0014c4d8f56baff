"""Error diffusion through a whole model: its own activations, and outputs nearer than a direct cast's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_cases import model as llama
from llama_cases import tokens
from quantized_cases import EXPERTS, MATRICES, SMALL, quantize, read_weights, write_model

from scalejax.errors import UserError
from scalejax.models.llm import families, model_folder
from scalejax.models.llm.packed_layouts.known import find_layout
from scalejax.surgery.quantize import activations, quantization_plan
from scalejax.surgery.quantize.activations import ErrorDiffusion
from scalejax.surgery.quantize.checkpoint import DirectCast

OWN = find_layout("scalejax")
TEXT = tokens(SMALL, 12, 48)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    return folder, write_model(folder)


def diffusion(model, given=(), format="mxfp4_e2m1", text=TEXT):
    return ErrorDiffusion(model, quantization_plan.make(model, format, given, OWN), text)


def logits(weights, ids, config=SMALL):
    along = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return np.asarray(jax.jit(lambda m, *more: m(*more))(llama(config, weights), ids, along, np.ones_like(ids)))


@pytest.mark.slow
def test_the_stream_of_activations_is_that_of_the_model(theirs, monkeypatch):
    monkeypatch.setattr(activations, "_BATCH_TOKENS", 5 * 48)
    opened = model_folder.open_folder(theirs[0])
    made = diffusion(opened, [("layers/.*", "none"), ("head", "mxfp8_e4m3")])
    head = next(weight for weight in made.plan if weight.module == "head")
    made.quantize(head, OWN)
    assert [len(x) for x in made._walk.streams] == [5, 5, 2]
    along = np.broadcast_to(np.arange(48, dtype=np.int32), TEXT.shape)
    hidden, _ = jax.jit(lambda m, *more: m.hidden(*more))(llama(SMALL, theirs[1]), TEXT, along, np.ones_like(TEXT))
    stream = np.concatenate(made._walk.streams)
    normed = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + SMALL.norm_eps)
    np.testing.assert_allclose(normed * theirs[1]["model.norm.weight"], hidden, rtol=2e-4, atol=2e-5)


def test_covariances_are_sums_over_all_tokens():
    x = np.random.default_rng(0).standard_normal((3, 2, 5, 8)).astype(np.float32)
    found = activations._covariance(jnp.asarray, list(x))
    flat = x.reshape(-1, 8).astype(np.float64)
    np.testing.assert_allclose(found, flat.T @ flat, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_outputs_of_the_model_are_nearer(theirs, tmp_path):
    """On the calibration text and on other text."""
    rows = quantize(theirs[0], tmp_path / "out", "mxfp4_e2m1", quantizer=diffusion)
    changed = [row for row in rows if row.format]
    assert len(changed) == MATRICES
    assert all(row.output_error < 1 for row in changed)
    assert all(row.output_error is None for row in rows if not row.format)
    quantize(theirs[0], tmp_path / "direct", "mxfp4_e2m1")
    for ids in (TEXT, tokens(SMALL, 30, 48)[12:]):
        exact = logits(theirs[1], ids)
        errors = [((logits(read_weights(tmp_path / name), ids) - exact) ** 2).sum() for name in ("out", "direct")]
        assert errors[0] < errors[1]


@pytest.mark.slow
def test_weights_outside_the_layers(theirs):
    opened = model_folder.open_folder(theirs[0])
    given = [("embed|.*norm", "mxfp8_e4m3"), ("head", "mxfp4_e2m1"), (".*", "none")]
    made = diffusion(opened, given, "none")
    direct = DirectCast(opened)
    for weight in made.plan:
        if weight.format is not None:
            found, cast = made.quantize(weight, OWN), direct.quantize(weight, OWN)
            same = bool(jnp.all(found.quantized.codes == cast.quantized.codes))
            assert same == (weight.module != "head")
            assert (found.output_error is None) == same
    assert not made._results


@pytest.mark.slow
def test_later_matrices_see_what_earlier_ones_have_become(theirs):
    """With query, key and value in few bits the input of `out` is another one, so it is rounded otherwise."""
    opened = model_folder.open_folder(theirs[0])
    found = []
    for first in ("none", "bdr_mx4"):
        given = [
            ("layers/0/attention/(query|key|value)", first),
            ("layers/0/attention/out", "mxfp4_e2m1"),
            (".*", "none"),
        ]
        given = given if first != "none" else given[1:]
        made = diffusion(opened, given, "none")
        out = next(weight for weight in made.plan if weight.module == "layers/0/attention/out")
        found.append(np.asarray(made.quantize(out, OWN).quantized.codes))
    assert 0 < (found[0] != found[1]).mean() < 0.5


def test_matrices_of_a_layer_see_inputs_by_those_that_were_rounded_before_them(theirs, monkeypatch):
    """Rounding is doubling here, and no product is taken."""
    made = diffusion(model_folder.open_folder(theirs[0]))
    layer, stages = [weight for weight in made.plan if weight.layer == 1], made._walk.stages
    assert [len(stage) for stage in stages] == [3, 1, 2, 1]
    seen = []

    def covariance(inputs, _):
        seen.append(inputs.args[:2])
        return np.eye(1)

    monkeypatch.setattr(activations, "_covariance", covariance)
    monkeypatch.setattr(activations, "dequantize", lambda rounded: rounded)
    monkeypatch.setattr(made, "_round", lambda weight, exact, *_: activations._Rounded(2 * np.asarray(exact), 0.0, 1.0))
    behind = made._layer(1, OWN)

    sizes = families.of(SMALL).sizes(SMALL)
    exact = {weight.name: activations.read_weight(made.model, weight) for weight in layer}
    exact = activations.parameters(layer, exact, sizes)
    for params, number in [*seen, (behind, len(stages))]:
        done = {path for stage in stages[:number] for path in stage}
        for path, value in exact.items():
            np.testing.assert_array_equal(params[path], value * (1 + (path in done)), err_msg=f"{path}, {number}")
    assert [number for _, number in seen] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    return folder, write_model(folder, EXPERTS)


def test_inputs_of_an_expert_are_the_tokens_that_are_sent_to_it(mixtral):
    """By hand: the two largest of the router's logits, and the gated product of the expert's own matrices."""
    folder, weights = mixtral
    walk = activations.Walk(EXPERTS, TEXT)
    plan = quantization_plan.make(model_folder.open_folder(folder), "mxfp4_e2m1", (), OWN)
    own = [weight for weight in plan if weight.layer == 1]
    arrays = {weight.name: weights[weight.name].reshape(-1, weight.shape[-1]) for weight in own}
    params = activations.parameters(own, arrays, families.of(EXPERTS).sizes(EXPERTS))
    x = np.random.default_rng(0).standard_normal((3, 7, EXPERTS.dim)).astype(np.float32)
    assert walk.stages[-2:] == (("mlp/gate", "mlp/up"), ("mlp/down",))
    moe, after = "model.layers.1.block_sparse_moe", {}
    for expert in range(4):
        first, second = (np.asarray(walk.run(params, stage, x, expert=expert)) for stage in (2, 3))
        reached = np.abs(first).max(-1) > 0
        after[expert] = reached
        one, three = (weights[f"{moe}.experts.{expert}.w{n}.weight"] for n in (1, 3))
        gated = first @ one.T
        np.testing.assert_allclose(second, gated / (1 + np.exp(-gated)) * (first @ three.T), rtol=1e-4, atol=1e-5)
        assert not second[~reached].any()
    # What a token has before its experts is what the two that it reached got.
    normed = sum(np.asarray(walk.run(params, 2, x, expert=expert)) for expert in range(4)) / 2
    chosen = np.argsort(-(normed @ weights[f"{moe}.gate.weight"].T), -1)[..., :2]
    for expert, reached in after.items():
        np.testing.assert_array_equal(reached, (chosen == expert).any(-1))


@pytest.mark.slow
def test_experts_are_rounded_with_their_own_tokens(mixtral, tmp_path):
    """Outputs are nearer than a direct cast's, and in one tensor they are what they are in many."""
    folder, weights = mixtral
    for layout in ("scalejax", "gpt-oss"):

        def made(model, layout=layout):
            plan = quantization_plan.make(model, "mxfp4_e2m1", (), find_layout(layout))
            return ErrorDiffusion(model, plan, TEXT)

        rows = quantize(folder, tmp_path / layout, "mxfp4_e2m1", quantizer=made, layout=layout)
        assert all(row.output_error < 1 for row in rows if row.format)
    many, one = (model_folder.open_folder(tmp_path / layout).source for layout in ("scalejax", "gpt-oss"))
    for path in ("gate", "up", "down"):
        for layer in range(EXPERTS.layers):
            found, want = (source.read(f"layers/mlp/{path}", layer) for source in (one, many))
            assert (found != want).mean() < 0.01, path  # a sum in another order may turn a tie
    quantize(folder, tmp_path / "direct", "mxfp4_e2m1")
    ids = tokens(EXPERTS, 30, 48)[12:]
    exact = logits(weights, ids, EXPERTS)
    errors = [
        ((logits(read_weights(tmp_path / name), ids, EXPERTS) - exact) ** 2).sum() for name in ("scalejax", "direct")
    ]
    assert errors[0] < errors[1]


@pytest.mark.slow
def test_an_expert_that_no_token_reaches_is_cast_directly(mixtral):
    opened = model_folder.open_folder(mixtral[0])
    made = diffusion(opened, [(".*attention.*", "none")], text=TEXT[:1, :1])  # one token: two experts of four
    direct = DirectCast(opened)
    same = []
    for weight in made.plan:
        if weight.layer == 0 and weight.module == "layers/0/mlp/gate":
            found, cast = made.quantize(weight, OWN), direct.quantize(weight, OWN)
            same.append(bool(jnp.all(found.quantized.codes == cast.quantized.codes)))
    assert sorted(same) == [False, False, True, True]


def test_bad_arguments_are_refused(theirs):
    opened = model_folder.open_folder(theirs[0])
    with pytest.raises(UserError, match="tokens must be"):
        diffusion(opened, text=np.zeros((0, 5), np.int32))
    with pytest.raises(UserError, match="--damping must be above 0"):
        ErrorDiffusion(opened, (), TEXT, damping=0.0)
