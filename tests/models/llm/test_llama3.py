"""Llama 3: published facts, logits that transformers computed, and the equalities that packing and caches must keep."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import CASES, F32, F64, GQA, model, rows, scenarios, tokens
from paged_cases import Rows

from scalejax import nn
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm import llama3
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.llama3 import rope
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.task import Batch, whole

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "logits.npz")


@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("3-8b", 8_030_261_248),
        ("3.1-8b", 8_030_261_248),
        ("3-70b", 70_553_706_496),
        ("3.1-70b", 70_553_706_496),
        ("3.1-405b", 405_853_388_800),
        ("3.2-1b", 1_235_814_400),
        ("3.2-3b", 3_212_749_824),
    ],
)
def test_parameter_counts_are_the_published_ones(size, published):
    config = llama3.SIZES[size]
    assert config.parameters() == published
    arrays = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: llama3.Llama(config, nnx.Rngs(0), F32))))
    assert sum(math.prod(a.shape) for a in arrays) == published


def test_every_stacked_parameter_has_its_layers_first():
    model = nnx.eval_shape(lambda: llama3.Llama(GQA, nnx.Rngs(0), F32))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes = variable.get_metadata()["logical_axes"]
        assert len(axes) == len(variable.get_value().shape)
        assert (axes[0] == "layers") == (path[0] == "layers"), path


@pytest.mark.slow
def test_initial_weights_that_write_to_the_stream_are_smaller():
    state = nnx.state(llama3.Llama(dataclasses.replace(GQA, dim=256, ffn_dim=512), nnx.Rngs(0), F32))
    std = {"/".join(map(str, path)): float(v[...].std()) for path, v in nnx.to_flat_state(state)}
    for name in ("attention/query", "attention/key", "attention/value", "mlp/gate", "mlp/up"):
        assert std[f"layers/{name}"] == pytest.approx(0.02, rel=0.05)
    for name in ("attention/out", "mlp/down"):
        assert std[f"layers/{name}"] == pytest.approx(0.02 / 2, rel=0.05)  # sqrt(2 L) = 2


# Rotary positions.


def test_scaled_frequencies_are_those_of_llama_3_1():
    plain = rope.frequencies(128, 5e5)
    scaled = rope.frequencies(128, 5e5, llama3.RopeScaling())
    np.testing.assert_allclose(plain, 5e5 ** (-np.arange(0, 128, 2) / 128), rtol=1e-6)
    assert (scaled == plain).sum() == 29
    np.testing.assert_allclose(scaled[35:], plain[35:] / 8, rtol=1e-6)
    blended = [2.16657e-3, 1.37189e-3, 8.5675e-4, 5.2485e-4, 3.1269e-4, 1.7851e-4]
    np.testing.assert_allclose(scaled[29:35], blended, rtol=2e-5)  # as many digits as are known
    np.testing.assert_allclose([scaled[35], scaled[63], plain[63]], [9.556212e-5, 3.068926e-7, 2.455141e-6], rtol=1e-6)


def test_blended_frequencies_follow_the_formula_in_float64():
    f = 5e5 ** (-np.arange(0, 128, 2) / 128)
    m = (8192 / (2 * np.pi / f) - 1) / (4 - 1)
    want = np.where(m >= 1, f, np.where(m <= 0, f / 8, (1 - m) * f / 8 + m * f))
    np.testing.assert_allclose(rope.frequencies(128, 5e5, llama3.RopeScaling()), want, rtol=1e-6)


def test_rotation_turns_pairs_half_a_head_apart(x64):
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 3, 2, 8)), np.array([[0, 1, 5], [7, 2, 9_000]], np.int32)
    freqs = rope.frequencies(8, 1e4)
    y = np.asarray(rope.rotate(jnp.asarray(x), *rope.angles(jnp.asarray(positions), freqs)))
    for (b, s, h), i in ((at, i) for at in np.ndindex(2, 3, 2) for i in range(4)):
        turned = (x[b, s, h, i] + 1j * x[b, s, h, i + 4]) * np.exp(1j * positions[b, s] * np.float64(freqs[i]))
        # Angles are computed in float32, at 9,000 to 5e-4.
        np.testing.assert_allclose([y[b, s, h, i], y[b, s, h, i + 4]], [turned.real, turned.imag], atol=2e-3)


# Logits.


@pytest.mark.default_cases
@pytest.mark.parametrize("name", scenarios(GQA))
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, name, strict_promotion):
    config = CASES[case]
    ids, segments, positions = scenarios(config)[name]
    got = jax.jit(lambda m, *inputs: m(*inputs))(model(config), ids, positions, segments)
    np.testing.assert_allclose(got, GOLDEN[f"{case}: {name}"], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_logits_say_what_those_of_transformers_in_float32_say(case):
    """The mean divergence that MaxText asks of a conversion, and the same first choice unless two are as good."""
    ids, segments, positions = scenarios(CASES[case])["plain"]
    llama = model(CASES[case], dtypes=Dtypes(compute=jnp.bfloat16))
    half = jax.jit(lambda m, *inputs: m(*inputs))(llama, ids, positions, segments)
    assert half.dtype == jnp.float32
    exact = jax.nn.log_softmax(GOLDEN[f"{case}: plain"])
    divergence = (jnp.exp(exact) * (exact - jax.nn.log_softmax(half))).sum(-1)
    assert 0 < divergence.mean() <= 0.015
    second, first = jnp.moveaxis(jnp.sort(exact)[..., -2:], -1, 0)
    same = exact.argmax(-1) == half.argmax(-1)
    assert same[first - second > 0.05].all()
    assert same.mean() >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_rematerialisation_changes_no_gradient(remat, x64):
    ids, segments, positions = scenarios(GQA)["packed, positions restart"]

    def gradient(config):
        graph, state = nnx.split(model(config, dtypes=F64))
        return jax.jit(jax.grad(lambda s: (nnx.merge(graph, s)(ids, positions, segments) ** 2).sum()))(state)

    want = gradient(dataclasses.replace(GQA, remat="none"))
    for got, expected in zip(
        jax.tree.leaves(gradient(dataclasses.replace(GQA, remat=remat))), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["restart", "run through"])
def test_a_packed_row_equals_its_documents_one_by_one(kind, x64):
    config, lengths = CASES["wide heads, scaled"], (7, 4, 7)
    segments, positions = rows(*lengths, positions=kind)
    ids = tokens(config, 1, sum(lengths))
    weight = np.random.default_rng(0).normal(size=(1, sum(lengths), config.vocabulary))
    graph, state = nnx.split(model(config, dtypes=F64))

    @jax.jit
    def run(state, ids, positions, segments, weight):
        def weighted(state):
            out = nnx.merge(graph, state)(ids, positions, segments)
            return (out * weight).sum(), out

        (_, out), grads = jax.value_and_grad(weighted, has_aux=True)(state)
        return out, jax.tree.leaves(grads)

    got, got_grads = run(state, ids, positions, segments, weight)
    starts = np.cumsum(lengths) - lengths
    apart = [
        run(state, ids[:, own], positions[:, own], np.ones_like(ids[:, own]), weight[:, own])
        for own in (slice(at, at + n) for at, n in zip(starts, lengths, strict=True))
    ]
    want = np.concatenate([out for out, _ in apart], axis=1)
    np.testing.assert_allclose(got, want, atol=1e-6)  # rotary angles are float32
    for grad, *own in zip(got_grads, *(grads for _, grads in apart), strict=True):
        np.testing.assert_allclose(grad, sum(own), atol=1e-5 * float(jnp.abs(grad).max()))
    # Without the mask it would be another result.
    assert np.abs(run(state, ids, positions, np.ones_like(segments), weight)[0] - want).max() > 0.1


def test_no_token_sees_a_later_one():
    ids = tokens(GQA, 1, 12)
    other = ids.copy()
    other[0, 7] = (other[0, 7] + 1) % GQA.vocabulary
    segments, positions = rows(12)
    run = jax.jit(lambda m, *inputs: m(*inputs))
    llama = model(GQA)
    before, after = run(llama, ids, positions, segments), run(llama, other, positions, segments)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


# The cache.


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in ("mha", "gqa") else c for c in CASES])
def test_prefill_and_decode_equal_the_full_forward_pass(case):
    config, length = CASES[case], 14
    counts = np.array([5, 9, 1], np.int32)
    ids = tokens(config, 3, length)
    llama = model(config)
    whole = jax.jit(lambda m: m(ids, np.broadcast_to(np.arange(length), (3, length)), np.ones_like(ids)))(llama)
    extend, read = jax.jit(lambda m, *rest: m.extend(*rest)), Rows(3, 24)
    # What lies beyond a row's count is no part of it.
    prompt = np.where(np.arange(9) < counts[:, None], ids[:, :9], 3).astype(np.int32)
    logits, cache = extend(llama, prompt, read.reading(counts, 9), llama.cache(read.pages))
    at = counts.copy()
    for _ in range(5):
        np.testing.assert_allclose(logits, whole[np.arange(3), at - 1], atol=1e-4)
        logits, cache = extend(llama, ids[np.arange(3), at][:, None], read.reading([1, 1, 1], 1), cache)
        at += 1
    np.testing.assert_allclose(logits, whole[np.arange(3), at - 1], atol=1e-4)


@pytest.mark.slow
def test_a_prompt_may_be_read_in_pieces():
    ids = tokens(GQA, 2, 12)
    llama = model(GQA)
    extend = jax.jit(lambda m, *rest: m.extend(*rest))
    once, _ = extend(llama, ids, Rows(2, 16).reading([12, 12], 12), llama.cache(Rows(2, 16).pages))
    read = Rows(2, 16)
    cache = llama.cache(read.pages)
    for piece in np.split(ids, 3, axis=1):
        logits, cache = extend(llama, piece, read.reading([4, 4], 4), cache)
    np.testing.assert_allclose(logits, once, atol=1e-5)


# The loss, and mistakes.


def test_the_loss_is_the_cross_entropy_of_the_next_token(x64):
    config = dataclasses.replace(GQA, loss_positions=5)
    task = config.task(TokenSchema(vocabulary=90, length=16))
    ids, segments, at = scenarios(GQA)["packed, positions restart"]
    weights = np.r_[segments[0, 1:] == segments[0, :-1], False].astype(np.float32)[None]
    targets = np.where(weights > 0, np.roll(ids, -1, axis=1), 0).astype(np.int32)
    batch = {"tokens": ids, "targets": targets, "weights": weights, "segment_ids": segments, "positions": at}
    llama = model(config, dtypes=F64)
    batch = Batch({name: jnp.asarray(x) for name, x in batch.items()})
    loss = jax.jit(lambda m, batch: task.loss(m, batch, keys=None, gather=whole))(llama, batch)
    log = np.asarray(jax.jit(lambda m: jax.nn.log_softmax(m(ids, at, segments)))(llama))
    want = -sum(log[0, s, targets[0, s]] for s in range(16) if weights[0, s])
    # Three documents of 16 tokens have no next token at their ends.
    assert (loss.weight, task.weight(batch), loss.outputs) == (13, 13, {})
    np.testing.assert_allclose(loss.sum, want, rtol=1e-12)


def test_flops_count_six_a_multiply_accumulate():
    c = llama3.SIZES["3-8b"]
    head = c.vocabulary * c.dim
    matrices = c.parameters() - head - (2 * c.layers + 1) * c.dim  # all but the embedding, a lookup, and the norms
    assert c.flops_per_token(8192, "full") == 6 * (matrices + 2 * c.layers * c.heads * 128 * 8192)
    assert c.flops_per_token(8192) == 6 * (matrices + c.layers * c.heads * 128 * 8192)
    # Of S (S + 1) / 2 pairs S / 2 are left out, and of those in a window w / 2.
    w = dataclasses.replace(c, window=1024)
    pairs = np.minimum(np.arange(8192) + 1, 1024).sum() - 1024 / 2
    assert w.flops_per_token(8192) == 6 * (matrices + 2 * c.layers * c.heads * 128 * pairs / 8192)
    assert w.flops_per_token(8192, "full") == c.flops_per_token(8192, "full")
    assert w.flops_per_token(1024) == c.flops_per_token(1024)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_heads": 3}, "kv_heads must divide heads; got 3 and 8"),
        ({"dim": 36}, "heads must divide dim; got 8 and 36"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"head_dim": -2}, "head_dim must be a whole number of at least 1, or None; got -2"),
        ({"head_dim": 16.0}, "head_dim must be a whole number of at least 1, or None; got 16.0"),
        ({"vocabulary": 0}, "vocabulary must be a whole number of at least 1, or None; got 0"),
        ({"window": 0}, "window must be a whole number of at least 1, or None; got 0"),
        ({"window": 4, "depth": MixtureOfDepths()}, "window and depth exclude each other; got 4 and MixtureOfDepths"),
        ({"stage_parts": 0}, "stage_parts must be a whole number of at least 1, or None; got 0"),
        ({"tie_embeddings": "false"}, "tie_embeddings must be True or False; got 'false'"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"rope_theta": 0.0}, "rope_theta must be above 0 and finite; got 0.0"),
        ({"attention": "fast"}, "attention must be one of None, reference, xla, .*; got 'fast'"),
        ({"context_method": "tree"}, "context_method must be one of all_gather, ring; got 'tree'"),
    ],
)
def test_shapes_that_cannot_be_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GQA, **fields)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (TokenSchema(vocabulary=97, length=8), "model.vocabulary is 96, but the tokenizer of the data has 97 tokens"),
        (
            TokenSchema(vocabulary=96, length=16_385),
            "data.length is 16,385 positions, but the model is meant for",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused(schema, words):
    with pytest.raises(UserError, match=words):
        GQA.task(schema)


def test_a_config_without_vocabulary_takes_that_of_the_data():
    config = dataclasses.replace(GQA, vocabulary=None)
    assert config.bound(TokenSchema(vocabulary=77, length=8)).vocabulary == 77
    with pytest.raises(ValueError, match=r"config.vocabulary is None"):
        llama3.Llama(config, nnx.Rngs(0), F32)


def test_heads_share_keys_and_values_in_consecutive_groups(x64):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 5, heads, 4))) for heads in (6, 2, 2))
    got = nn.attend(q, k, v)
    for head in range(6):
        scores = np.where(np.tri(5, dtype=bool), q[0, :, head] @ k[0, :, head // 3].T / 2, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = weights / weights.sum(-1, keepdims=True) @ v[0, :, head // 3]
        np.testing.assert_allclose(got[0, :, head], want, rtol=1e-12)
