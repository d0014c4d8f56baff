"""Experts that choose, without later tokens: auxiliary routers learn who is taken, and nothing else is changed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import F64, GQA
from paged_cases import Rows

from scalejax import optim
from scalejax.configs.llm import moma
from scalejax.data.images.two_modality import TwoModalityData
from scalejax.data.text.tokens import TokenSchema
from scalejax.models.llm.auxiliary import AuxiliaryRouter, guess
from scalejax.models.llm.experts import ExpertChoice, Experts, Prepared
from scalejax.models.llm.llama3.parts import OutputRmsNorm
from scalejax.models.llm.moma import ModalityExperts
from scalejax.train import loop
from scalejax.train.checkpoints.trained import open_run
from scalejax.train.experiment import Checkpoints

RANGES = (("text", 0, 50), ("image", 50, 90))
SCHEMA = TokenSchema(vocabulary=90, length=16, modalities=("text", "image"), capacities=(12, 12), ranges=RANGES)
"""Of a random row of 16 more may be of one modality than the data have: a full pass holds them all."""
CHOICE = ExpertChoice(auxiliary=AuxiliaryRouter())
PARTS = {
    "mixed": Experts(count=4, router=CHOICE, execution="batched"),
    "by modality": ModalityExperts(groups=(("text", 2), ("image", 3)), router=CHOICE),
}


def model(part):
    """A decoder whose weights are larger than they begin, so that experts and routers differ."""
    config = dataclasses.replace(GQA, mlp=part, norm=OutputRmsNorm()).bound(SCHEMA)
    made = config.task(SCHEMA).init(nnx.Rngs(0), F64)
    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda x: 8 * x, state))


@pytest.fixture
def rows(x64):
    tokens = jax.random.randint(jax.random.key(3), (2, 16), 0, 90).at[1].set(jnp.arange(16) + 7)  # a row of text
    return tokens, jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_with_auxiliary_routers_no_later_token_matters_and_without_them_some_do(rows, name):
    made, (tokens, positions, segments) = model(PARTS[name]), rows
    other = tokens.at[:, 9].set((tokens[:, 9] + 45) % 90)

    @functools.partial(jax.jit, static_argnums=1)
    def hidden(tokens, routing):
        return made.hidden_with_numbers(tokens, positions, segments, routing=routing)[0]

    causal = [np.asarray(hidden(ids, "causal")) for ids in (tokens, other)]
    np.testing.assert_array_equal(causal[0][:, :9], causal[1][:, :9])
    assert (causal[0][:, 9:] != causal[1][:, 9:]).any()
    seeing = [np.asarray(hidden(ids, "batch")) for ids in (tokens, other)]
    assert (seeing[0][:, :9] != seeing[1][:, :9]).any()


def test_a_guess_has_no_gradient_for_the_stream_and_one_for_its_own_matrices():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((1, 3, 4), (4, 2), (2, 5))]

    def total(x, first, second):
        return guess(x, first, second, jnp.float32).sum()

    of_x, of_first, of_second = jax.jit(jax.grad(total, (0, 1, 2)))(*arrays)
    assert not np.asarray(of_x).any()
    assert np.asarray(of_first).any()
    assert np.asarray(of_second).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_cache_gives_the_logits_of_the_whole_row(rows, name):
    made, (tokens, positions, segments) = model(PARTS[name]), rows
    whole = np.asarray(jax.jit(made.__call__)(tokens, positions, segments))
    step, read = jax.jit(made.extend), Rows(2, 16)
    cache = made.cache(read.pages)
    _, cache = step(tokens[:, :8], read.reading([8, 8], 8), cache)
    for at in range(8, 16):
        logits, cache = step(tokens[:, at : at + 1], read.reading([1, 1], 1), cache)
        np.testing.assert_allclose(logits, whole[:, at], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_main_score_weighs_and_the_auxiliary_one_selects(rows):
    """The layer without later tokens, by a loop."""
    part = Experts(count=4, router=CHOICE, execution="batched")
    module = part.build(GQA, nnx.Rngs(0), F64)
    graph, state = nnx.split(module)
    module = nnx.merge(graph, jax.tree.map(lambda x: 20 * x[0], state))
    x = np.asarray(jax.random.normal(jax.random.key(4), (2, 16, GQA.dim)))

    def silu(x):
        return x / (1 + np.exp(-x))

    guess = silu(x @ np.asarray(module.auxiliary_in[...])) @ np.asarray(module.auxiliary_out[...])
    scores = 1 / (1 + np.exp(-x @ np.asarray(module.router[...])))
    expected = np.zeros(x.shape)
    for e in range(4):
        gate, up, down = (np.asarray(p[...])[e] for p in (module.gate, module.up, module.down))
        expected += np.where(guess[..., e] > 0, scores[..., e], 0)[..., None] * ((silu(x @ gate) * (x @ up)) @ down)
    np.testing.assert_allclose(module(jnp.asarray(x)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_labels_are_who_was_taken_and_nothing_of_their_loss_reaches_the_model(rows):
    part = Experts(count=4, router=CHOICE, execution="batched")
    module = part.build(GQA, nnx.Rngs(0), F64)
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda x: 20 * x[0], state)
    x = jax.random.normal(jax.random.key(4), (2, 16, GQA.dim))
    real = jnp.ones((2, 16), bool).at[0, 12:].set(False)

    def loss(state, x):
        module = nnx.merge(graph, state)
        numbers = module.with_numbers(x, Prepared(real), module.numbers(2))[1]
        return numbers["auxiliary"].sum(), numbers

    (value, numbers), (of_state, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
    module = nnx.merge(graph, state)
    scores = np.asarray(jax.nn.sigmoid(module._logits(x)))[np.asarray(real)]
    k = len(scores) // 4
    labels = np.zeros(scores.shape)
    for e in range(4):
        labels[np.argsort(-scores[:, e], kind="stable")[:k], e] = 1
    p = np.asarray(jax.nn.sigmoid(module._guess(x)))[np.asarray(real)]
    expected = -(labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean(1).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    assert float(numbers["hits"].sum()) == (labels * (p > 0.5)).sum()
    assert float(numbers["guessed"].sum()) == (p > 0.5).sum()
    assert not np.asarray(of_x).any()
    for path, gradient in nnx.to_flat_state(of_state):
        assert np.asarray(gradient[...]).any() == ("auxiliary" in path[0]), path


@pytest.mark.slow
def test_a_second_phase_learns_who_is_taken_and_leaves_the_model_its_bits(tmp_path):
    """From the shell of the recipe; the loss falls below that of the base rate."""
    whole = moma.smoke()
    (phase,) = whole.phases
    data = TwoModalityData(length=64, batch_size=8, codes=16, image_share=(0.4, 0.9), folder=str(tmp_path / "cache"))
    faster = phase.changes | {"optimizer": optim.AdamW(learning_rate=optim.Constant(value=1e-2))}
    phase = dataclasses.replace(phase, steps=300, changes=faster)
    saved = Checkpoints(every=0, every_seconds=0)  # at the end of each phase
    longer = dataclasses.replace(whole, data=data, steps=20, phases=(phase,), log_every=100, checkpoints=saved)
    summary = loop.train(longer, workdir=tmp_path / "run")
    last, before = (open_run(tmp_path / "run", step).params for step in (None, 20))
    for path, value in before.items():
        np.testing.assert_array_equal(last[path][...], value[...], err_msg=path)
    assert {path for path in last if path not in before} == {
        f"layers/mlp/{name}/auxiliary_{side}" for name in ("text", "image") for side in ("in", "out")
    }
    for name in ("text", "image"):
        assert summary[f"val_auxiliary_loss/{name}"] < 0.95 * summary[f"val_auxiliary_loss_base/{name}"]
    assert summary["val_loss"] != summary["val_loss_topk"]
