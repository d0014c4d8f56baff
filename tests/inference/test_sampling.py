"""Sampling against NumPy in float64, and against the distribution that it claims."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from scalejax.errors import UserError
from scalejax.inference import sampling
from scalejax.inference.sampling import TokenSampling


def distribution(logits, temperature, top_p, top_k=0):
    """float64[V], one token after another."""
    p = np.exp((logits - logits.max()) / temperature)
    most = sorted(range(len(p)), key=lambda i: (-p[i], i))[: top_k or None]
    p /= p[most].sum()
    kept, total = [], 0.0
    for token in most:
        if total >= top_p:
            break
        kept.append(token)
        total += p[token]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


def draw(logits, chosen, count):
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    how = row_sampling([chosen] * count, samples=range(count))
    return np.asarray(choose(rows, how, how.keys(), jnp.full(count, 5)))


nucleus = jax.jit(sampling.nucleus)
choose = jax.jit(sampling.choose)


def row_sampling(chosen, digests=None, samples=None):
    how = sampling.RowSampling.greedy(len(chosen))
    for row, one in enumerate(chosen):
        how.put(row, one, 0 if digests is None else digests[row], 0 if samples is None else samples[row])
    return how


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1e-9, 0), (0.31, 0), (0.71, 0), (0.955, 0), (1.0, 0), (1.0, 7), (0.71, 7), (1.0, 99)]
)
def test_the_nucleus_is_the_smallest_set_that_is_large_enough(top_p, top_k):
    logits = np.random.default_rng(0).normal(scale=2, size=(20, 50))
    logits[0, :] = 1.0  # all alike: tokens of small number come first
    logits[1, 3] = 40.0  # one alone has all
    given = jnp.full(20, top_p, jnp.float32), jnp.full(20, top_k, jnp.int32)
    kept = np.isfinite(np.asarray(nucleus(jnp.asarray(logits, jnp.float32), *given)))
    want = np.stack([distribution(row.astype(np.float32).astype(np.float64), 1.0, top_p, top_k) > 0 for row in logits])
    np.testing.assert_array_equal(kept, want)
    assert kept.any(-1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (0.7, 0.5)])
def test_draws_follow_the_distribution(temperature, top_p):
    logits = np.random.default_rng(1).normal(size=12)
    count = 20_000
    want = distribution(logits, temperature, top_p)
    seen = np.bincount(draw(logits, TokenSampling(temperature=temperature, top_p=top_p), count), minlength=12)
    assert (seen[want == 0] == 0).all()
    expected = want[want > 0] * count
    # One seed, so this is one experiment: it fails by chance for one seed in a thousand, and for this one it does not.
    assert stats.chisquare(seen[want > 0], expected).pvalue > 1e-3
    wrong = distribution(logits, temperature / 1.5, 1.0)[want > 0]
    assert stats.chisquare(seen[want > 0], wrong / wrong.sum() * count).pvalue < 1e-3  # as sharp as that


def test_greedy_takes_the_first_of_the_most_probable():
    logits = jnp.asarray([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    how = sampling.RowSampling.greedy(2)
    assert sampling.choose(logits, how, how.keys(), jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


def test_rows_of_a_batch_are_chosen_each_in_its_own_way():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, 40)), jnp.float32)
    ways = [
        TokenSampling(),
        TokenSampling(temperature=0.9, seed=4),
        TokenSampling(temperature=1.5, top_p=0.8, seed=4),
        TokenSampling(temperature=1.5, top_k=3, seed=5),
    ]
    alone = []
    for row, way in enumerate(ways):
        how = row_sampling([way] * 4, digests=[8] * 4, samples=[2] * 4)
        alone.append(int(choose(logits, how, how.keys(), jnp.full(4, 6))[row]))
    how = row_sampling(ways, digests=[8] * 4, samples=[2] * 4)
    assert choose(logits, how, how.keys(), jnp.full(4, 6)).tolist() == alone


def test_likelihoods_are_those_of_a_softmax():
    logits = np.random.default_rng(4).normal(size=(3, 30)).astype(np.float32)
    found = sampling.Likelihoods.of(jnp.asarray(logits), jnp.array([4, 0, 29]))
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.chosen, want[range(3), [4, 0, 29]], rtol=1e-5)
    np.testing.assert_array_equal(found.ids, np.argsort(-want, axis=-1)[:, : sampling.TOP])
    np.testing.assert_allclose(found.values, np.sort(want, axis=-1)[:, ::-1][:, : sampling.TOP], rtol=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_next_to_no_temperature_is_next_to_greedy(top_p):
    logits = np.array([30.0, 89.9, 90.0, -np.inf])
    assert set(draw(logits, TokenSampling(temperature=1e-37, top_p=top_p), 20).tolist()) == {2}


@pytest.mark.slow
def test_a_draw_depends_on_seed_prompt_sample_and_position_alone():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1000)), jnp.float32)

    def one(seed=3, prompt=(1, 2), number=0, position=7, rows=1, row=0):
        chosen = TokenSampling(temperature=1.0, seed=seed)
        how = row_sampling([chosen] * rows, digests=[77] * rows, samples=[99] * rows)
        how.put(row, chosen, sampling.digest(prompt), number)
        many = jnp.broadcast_to(logits, (rows, 1000)).at[:row].add(1.0)
        positions = jnp.full(rows, 3).at[row].set(position)
        return int(sampling.choose(many, how, how.keys(), positions)[row])

    assert one(rows=4, row=2) == one()
    assert len({one(), one(seed=4), one(prompt=(2, 1)), one(number=1), one(position=8)}) == 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"top_p": 0.9}, "top_p 0.9 changes nothing where the temperature is 0"),
        ({"top_k": -1}, "top_k must be at least 0; got -1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        TokenSampling(**fields)
