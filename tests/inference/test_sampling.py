"""Sampling against NumPy in float64, and against the distribution that it claims."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from scalejax.errors import UserError
from scalejax.inference import sampling
from scalejax.inference.sampling import TokenSampling


def distribution(logits, temperature, top_p):
    """float64[V], one token after another."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    kept, total = [], 0.0
    for token in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if total >= top_p:
            break
        kept.append(token)
        total += p[token]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


def draw(logits, chosen, count):
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    keys = sampling.keys(chosen, jnp.zeros(count, jnp.uint32), jnp.arange(count))
    return np.asarray(jax.jit(lambda l, k: sampling.choose(l, k, jnp.int32(5), chosen))(rows, keys))


@pytest.mark.parametrize("top_p", [1e-9, 0.31, 0.71, 0.955, 1.0])
def test_the_nucleus_is_the_smallest_set_that_is_large_enough(top_p):
    logits = np.random.default_rng(0).normal(scale=2, size=(20, 50))
    logits[0, :] = 1.0  # all alike: tokens of small number come first
    logits[1, 3] = 40.0  # one alone has all
    kept = np.isfinite(np.asarray(sampling.nucleus(jnp.asarray(logits, jnp.float32), top_p)))
    want = np.stack([distribution(row.astype(np.float32).astype(np.float64), 1.0, top_p) > 0 for row in logits])
    np.testing.assert_array_equal(kept, want)
    assert kept.any(-1).all()


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
    keys = sampling.keys(sampling.GREEDY, jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32))
    assert sampling.choose(logits, keys, jnp.int32(0), sampling.GREEDY).tolist() == [1, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_next_to_no_temperature_is_next_to_greedy(top_p):
    logits = np.array([30.0, 89.9, 90.0, -np.inf])
    assert set(draw(logits, TokenSampling(temperature=1e-37, top_p=top_p), 20).tolist()) == {2}


def test_a_draw_depends_on_seed_prompt_sample_and_position_alone():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1000)), jnp.float32)

    def one(seed=3, prompt=(1, 2), number=0, position=7, rows=1, row=0):
        chosen = TokenSampling(temperature=1.0, seed=seed)
        digests = jnp.full(rows, 77, jnp.uint32).at[row].set(np.uint32(sampling.digest(prompt)))
        numbers = jnp.full(rows, 99, jnp.int32).at[row].set(number)
        many = jnp.broadcast_to(logits, (rows, 1000)).at[:row].add(1.0)
        keys = sampling.keys(chosen, digests, numbers)
        return int(sampling.choose(many, keys, jnp.int32(position), chosen)[row])

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
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        TokenSampling(**fields)
