"""Routes equal literal loops, forward and backward, and move rows by gathers alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.nn import routing

TOKENS, WIDTH, EXPERTS = 23, 5, 4


def mixed(x, weights, expert):
    """An expert that is not linear, so that its place in the sum matters."""
    return jnp.tanh(x @ weights[expert])


def literal_token_choice(x, logits, weights, real, k, capacity, scores):
    """Token by token, float64."""
    y, left, dropped = np.zeros_like(x), [capacity] * logits.shape[1], 0
    for t in np.flatnonzero(real):
        exp = np.exp(logits[t] - logits[t].max())
        score = exp / exp.sum() if scores == "softmax" else 1 / (1 + np.exp(-logits[t]))
        chosen = sorted(range(len(score)), key=lambda e: (-score[e], e))[:k]
        for expert in chosen:
            if left[expert] == 0:
                dropped += 1
                continue
            left[expert] -= 1
            y[t] += score[expert] / score[chosen].sum() * np.tanh(x[t] @ weights[expert])
    return y, dropped


def literal_expert_choice(x, scores, weights, real):
    """The pseudocode of MoMa (arXiv 2407.21770), float64."""
    y, taken = np.zeros_like(x), []
    tokens = np.flatnonzero(real)
    experts = scores.shape[1]
    k = max(len(tokens) // experts, 1) if len(tokens) else 0
    for expert in range(experts):
        for t in sorted(tokens, key=lambda t: (-scores[t, expert], t))[:k]:
            y[t] += scores[t, expert] * np.tanh(x[t] @ weights[expert])
            taken.append((t, expert))
    return y, taken


@jax.jit
def through(x, routes, weights):
    """dispatch, one expert after another over equally many places, combine."""
    rows = routing.dispatch(x, routes).reshape(len(weights), -1, x.shape[1])
    return routing.combine(jnp.tanh(jnp.einsum("npe,nef->npf", rows, weights)).reshape(-1, x.shape[1]), routes)


@jax.jit
def through_groups(x, routes, sizes, weights):
    expert = jnp.repeat(jnp.arange(len(weights)), sizes, total_repeat_length=routes.tokens.shape[0])
    return routing.combine(jnp.tanh(jnp.einsum("pe,pef->pf", routing.dispatch(x, routes), weights[expert])), routes)


@functools.partial(jax.jit, static_argnums=1)
def with_capacity(choice, capacity):
    return routing.routes_with_capacity(choice.experts, choice.gates, count=EXPERTS, capacity=capacity)


@functools.partial(jax.jit, static_argnums=1)
def in_groups(choice, block):
    return routing.routes_in_groups(choice.experts, choice.gates, count=EXPERTS, block=block)


choose_experts = jax.jit(routing.choose_experts, static_argnames=("k", "scores"))
choose_tokens = jax.jit(routing.choose_tokens, static_argnames="capacity")


@pytest.fixture
def arrays(x64):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((TOKENS, WIDTH)), rng.standard_normal((EXPERTS, WIDTH, WIDTH))
    return x, rng.standard_normal((TOKENS, EXPERTS)), weights, rng.random(TOKENS) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [TOKENS, 4])
@pytest.mark.parametrize(("k", "scores"), [(1, "sigmoid"), (2, "softmax"), (EXPERTS, "softmax")])
def test_token_choice_equals_a_loop_over_tokens(arrays, k, scores, capacity):
    x, logits, weights, real = arrays
    choice = choose_experts(jnp.asarray(logits), jnp.asarray(real), k=k, scores=scores)
    routes = with_capacity(choice, capacity)
    expected, dropped = literal_token_choice(x, logits, weights, real, k, capacity, scores)
    np.testing.assert_allclose(through(jnp.asarray(x), routes, weights), expected, rtol=1e-12, atol=1e-14)
    assert int(real.sum() * k - routes.used.sum()) == dropped
    assert (dropped > 0) == (capacity == 4)


@pytest.mark.parametrize("block", [1, 8])
def test_groups_drop_nothing(arrays, block):
    x, logits, weights, real = arrays
    choice = choose_experts(jnp.asarray(logits), jnp.asarray(real), k=2)
    routes, sizes = in_groups(choice, block)
    expected, _ = literal_token_choice(x, logits, weights, real, 2, TOKENS, "softmax")
    np.testing.assert_allclose(
        through_groups(jnp.asarray(x), routes, sizes, jnp.asarray(weights)), expected, rtol=1e-12, atol=1e-14
    )
    assert (np.asarray(sizes) % block == 0).all()
    assert int(sizes.sum()) <= routes.tokens.shape[0]


def test_all_choices_of_one_expert_fit_into_the_groups():
    logits = jnp.zeros((TOKENS, EXPERTS)).at[:, 2].set(9.0).at[:, 1].set(5.0)
    routes, sizes = in_groups(choose_experts(logits, jnp.ones(TOKENS, bool), k=2), 8)
    assert sizes.tolist() == [0, 24, 24, 0]
    assert bool(routes.used.all())


@pytest.mark.parametrize("real", [1.0, 0.8, 0.1, "one", 0.0])
def test_expert_choice_equals_the_loop_of_the_paper(arrays, real):
    x, logits, weights, _ = arrays
    mask = np.arange(TOKENS) == 7 if real == "one" else np.random.default_rng(1).random(TOKENS) < real
    scores = 1 / (1 + np.exp(-np.round(logits)))  # many ties
    routes = choose_tokens(jnp.asarray(scores), jnp.asarray(mask), capacity=TOKENS // EXPERTS)
    expected, taken = literal_expert_choice(x, scores, weights, mask)
    np.testing.assert_allclose(through(jnp.asarray(x), routes, weights), expected, rtol=1e-12, atol=1e-14)
    used = np.asarray(routes.used)
    assert sorted(zip(*map(list, np.nonzero(used)), strict=True)) == sorted((int(t), e) for t, e in taken)
    assert not np.asarray(routes.gates)[~used].any()
    counts = used.sum(0)
    assert (counts == counts[0]).all()
    assert not used[~mask].any()


def test_experts_that_choose_take_the_whole_part_of_their_share_and_one_at_least():
    """Of 18 real tokens four experts take 4 each, and not 5; there is room for all."""
    scores = jax.random.uniform(jax.random.key(0), (TOKENS, EXPERTS))
    chosen = jax.jit(functools.partial(routing.best_tokens, capacity=TOKENS))
    for count, share in ((TOKENS, 5), (20, 5), (19, 4), (18, 4), (3, 1), (1, 1), (0, 0)):
        tokens, _ = chosen(scores, np.arange(TOKENS) < count)
        taken = np.asarray(tokens) < TOKENS
        assert taken.sum(1).tolist() == [share] * EXPERTS, count
        best = np.argsort(-np.asarray(scores)[:count], axis=0, kind="stable")[:share]
        np.testing.assert_array_equal(np.asarray(tokens)[:, :share], best.T)


@pytest.mark.slow
def test_gradients_are_those_of_dense_sums(arrays):
    """Against autodiff of a sum over all pairs of tokens and experts, masked by what was chosen."""
    x, logits, weights, real = map(jnp.asarray, arrays)

    def routed(x, logits, weights, dense):
        choice = choose_experts(logits, real, k=2)
        routes = with_capacity(choice, 4)
        if not dense:
            return jnp.sin(through(x, routes, weights)).sum()
        gates = (
            jnp.zeros_like(logits)
            .at[jnp.arange(TOKENS)[:, None], choice.experts]
            .set(jnp.where(routes.used, choice.gates, 0), mode="drop")
        )
        return jnp.sin(jnp.einsum("tn,nte->te", gates, jnp.tanh(jnp.einsum("td,nde->nte", x, weights)))).sum()

    def chosen(x, logits, weights, dense):
        scores = jax.nn.sigmoid(logits)
        routes = choose_tokens(scores, real, capacity=TOKENS // EXPERTS)
        if not dense:
            return jnp.sin(through(x, routes, weights)).sum()
        gates = jnp.where(routes.used, scores, 0)
        return jnp.sin(jnp.einsum("tn,nte->te", gates, jnp.tanh(jnp.einsum("td,nde->nte", x, weights)))).sum()

    for loss in (routed, chosen):
        found, expected = (
            jax.jit(jax.grad(functools.partial(loss, dense=dense), (0, 1, 2)))(x, logits, weights)
            for dense in (False, True)
        )
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)
    padding = ~np.asarray(real)
    assert not np.asarray(found[0])[padding].any()
    assert not np.asarray(found[1])[padding].any()


def test_the_way_back_is_the_adjoint_of_the_way_there(arrays):
    x, logits, _, real = map(jnp.asarray, arrays)
    routes = choose_tokens(jax.nn.sigmoid(logits), real, capacity=TOKENS // EXPERTS)
    places, back = jax.vjp(lambda x: routing.dispatch(x, routes), x)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(places.shape))
    np.testing.assert_allclose((places * g).sum(), (x * back(g)[0]).sum(), rtol=1e-12)


def test_a_permutation_of_tokens_permutes_results(arrays):
    x, logits, weights, real = arrays
    order = np.random.default_rng(3).permutation(TOKENS)

    def run(x, logits, real):
        scores = jax.nn.sigmoid(jnp.asarray(logits))
        routes = choose_tokens(scores, jnp.asarray(real), capacity=TOKENS // EXPERTS)
        return np.asarray(through(jnp.asarray(x), routes, weights))

    np.testing.assert_allclose(run(x[order], logits[order], real[order]), run(x, logits, real)[order], rtol=1e-12)


def test_a_bias_moves_the_choice_and_no_gate(arrays):
    _, logits, _, real = map(jnp.asarray, arrays)
    bias = jnp.asarray([0.0, 0.0, 5.0, 0.0])
    choice = choose_experts(logits, real, k=2, scores="sigmoid", bias=bias)
    kept = np.asarray(real)
    assert (np.asarray(choice.experts)[kept, 0] == 2).all()
    picked = np.take_along_axis(np.asarray(jax.nn.sigmoid(logits)), np.asarray(choice.experts) % EXPERTS, 1)
    np.testing.assert_allclose(np.asarray(choice.gates)[kept], (picked / picked.sum(1, keepdims=True))[kept])
    gradient = jax.grad(lambda bias: choose_experts(logits, real, k=2, bias=bias).gates[0, 0])(bias)
    assert not gradient.any()


@pytest.mark.slow
def test_scores_are_computed_in_float32_and_results_keep_their_dtype():
    rng = np.random.default_rng(4)
    x, logits = (jnp.asarray(rng.standard_normal((TOKENS, n)), jnp.bfloat16) for n in (WIDTH, EXPERTS))
    choice = choose_experts(logits, jnp.ones(TOKENS, bool), k=2)
    assert (choice.gates.dtype, choice.scores.dtype) == (jnp.float32, jnp.float32)
    routes = with_capacity(choice, TOKENS)
    assert routing.combine(routing.dispatch(x, routes), routes).dtype == jnp.bfloat16
    # The gates of a token sum to 1, so that places that hold the token itself give it back.
    np.testing.assert_allclose(
        routing.combine(routing.dispatch(x, routes), routes).astype(jnp.float32), x.astype(jnp.float32), rtol=2**-7
    )


def test_rows_are_gathered_and_never_scattered(arrays):
    _, logits, weights, real = (jnp.asarray(a, jnp.float32) for a in arrays)
    x = jnp.ones((TOKENS, 64), jnp.float32)
    weights = jnp.ones((EXPERTS, 64, 64), jnp.float32)

    def loss(x, logits):
        one = with_capacity(choose_experts(logits, real > 0, k=2), 8)
        two = choose_tokens(jax.nn.sigmoid(logits), real > 0, capacity=TOKENS // EXPERTS)
        return (through(x, one, weights) + through(x, two, weights)).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, logits.astype(jnp.float32)).as_text()
    scattered = re.findall(r"stablehlo\.scatter.*?\}\) : \([^)]*\) -> tensor<([^>]*)>", text, re.DOTALL)
    assert scattered  # indices are
    assert all("x64x" not in shape for shape in scattered), scattered
    largest = max(
        int(np.prod([int(n) for n in s.split("x")[:-1]])) for s in re.findall(r"tensor<([\dx]+x[a-z]\w+)>", text)
    )
    assert largest <= EXPERTS * max(64 * 64, 8 * 64, TOKENS * 2)


def test_no_tokens_at_all(arrays):
    _, logits, weights, _ = arrays
    nobody = jnp.zeros(TOKENS, bool)
    x = jnp.ones((TOKENS, WIDTH))

    def loss(x, logits):
        routes = choose_tokens(jax.nn.sigmoid(logits), nobody, capacity=TOKENS // EXPERTS)
        return through(x, routes, weights).sum()

    value, gradients = jax.value_and_grad(loss, (0, 1))(x, jnp.asarray(logits))
    assert value == 0
    assert all(np.isfinite(g).all() and not g.any() for g in gradients)


@pytest.mark.parametrize("k", [0, EXPERTS + 1])
def test_more_choices_than_experts_are_refused(k):
    with pytest.raises(ValueError, match=f"k must be from 1 to {EXPERTS}, the number of experts; got {k}"):
        routing.choose_experts(jnp.zeros((2, EXPERTS)), jnp.ones(2, bool), k=k)


@pytest.mark.slow
def test_noise_smooths_a_sigmoid_by_the_logistic_distribution(x64):
    """E sigmoid(x + G' - G'') = e^x (e^x - x - 1) / (e^x - 1)^2, and 1/2 at 0."""
    like = jnp.zeros((4, 200_000, 1))
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    noise = routing.logistic_noise(keys, jnp.arange(4), like)
    again = routing.logistic_noise(keys, jnp.arange(4), like)
    np.testing.assert_array_equal(noise, again)
    assert (routing.logistic_noise(keys, jnp.arange(4) + 1, like)[0] != noise[0]).any()
    for x in (-2.0, 0.0, 0.7, 3.0):
        e = np.exp(x)
        expected = e * (e - x - 1) / (e - 1) ** 2 if x else 0.5
        np.testing.assert_allclose(jax.nn.sigmoid(x + noise).mean(), expected, atol=2e-3)
