"""Which edges are kept: literal loops over the table of `sampling` are the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_cases import literal_picks, random_csr
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm import Csr, presample, sampling_rate

RULES = {
    "bucket": {"strategy": "bucket"},
    "fastrand": {"strategy": "fastrand"},
    "fastrand by seed": {"strategy": "fastrand", "prime": None, "seed": 13},
    "residue": {"strategy": "quadratic_residue"},
    "residue of a seed": {"strategy": "quadratic_residue", "seed": 30000},
    "rate": {"strategy": "rate", "rate": 0.3, "seed": 5},
    "rate of a tenth": {"strategy": "rate", "rate": 0.1},
    "stride": {"strategy": "rate_stride", "rate": 0.3},
    "stride of a thirds' fraction": {"strategy": "rate_stride", "rate": 2 / 3},
    "every edge by stride": {"strategy": "rate_stride", "rate": 1.0},
}


def _assert_equals_loop(csr, ell, width, rule):
    picks = literal_picks(csr, width, **rule)
    assert [len(row) for row in picks] == np.asarray(ell.counts).tolist()
    edges, indices, values = np.asarray(ell.edges), np.asarray(ell.indices), np.asarray(ell.values)
    for row, picked in enumerate(picks):
        count = len(picked)
        assert edges[row, :count].tolist() == picked
        assert np.array_equal(indices[row, :count], csr.indices[picked])
        assert np.array_equal(values[row, :count], csr.values[picked])
        assert not edges[row, count:].any()
        assert not indices[row, count:].any()
        assert not values[row, count:].any()
    assert np.array_equal(np.asarray(ell.degrees), np.diff(csr.indptr))


@pytest.mark.parametrize("width", [1, 8, 64, 577, 3000])
@pytest.mark.parametrize("name", RULES)
def test_picks_equal_a_literal_loop(name, width):
    csr = random_csr(0)
    _assert_equals_loop(csr, presample(csr, width, **RULES[name]), width, RULES[name])


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 600])
@pytest.mark.parametrize("name", RULES)
def test_picks_of_the_device_equal_those_of_the_host(name, width):
    csr = random_csr(1)
    on_host = presample(csr, width, **RULES[name])
    on_device = jax.jit(lambda c: presample(c, width, **RULES[name]))(jax.tree.map(jnp.asarray, csr))
    jax.tree.map(np.testing.assert_array_equal, on_host, on_device)
    assert isinstance(on_host.indices, np.ndarray)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=12),
    st.integers(1, 80),
    st.sampled_from(sorted(RULES)),
    st.integers(0, 10**9),
)
def test_picks_of_random_graphs_equal_a_literal_loop(degrees, width, name, seed):
    csr = random_csr(seed % 97, degrees=degrees)
    rule = {**RULES[name], "seed": seed}
    _assert_equals_loop(csr, presample(csr, width, **rule), width, rule)


def test_squares_of_slots_beyond_int32_are_taken_exactly():
    csr = random_csr(0, degrees=[60000])
    rule = {"strategy": "quadratic_residue", "seed": 3}
    _assert_equals_loop(csr, presample(csr, 50000, **rule), 50000, rule)


def test_fastrand_takes_one_edge_where_the_prime_divides_the_degree():
    csr = random_csr(0, degrees=[577, 1154])
    edges = presample(csr, 64, strategy="fastrand").edges
    assert len(set(edges[0])) == 1
    assert len(set(edges[1])) == 2
    assert len(set(presample(csr, 64, strategy="fastrand", prime=None, seed=1).edges[0])) == 64


def test_fastrand_at_the_width_of_the_degree_keeps_the_set():
    csr = random_csr(0, degrees=[64])
    assert sorted(presample(csr, 64, strategy="fastrand").edges[0]) == list(range(64))
    assert len(set(presample(csr, 64, strategy="quadratic_residue").edges[0])) == 12


def test_order_of_columns_in_a_row_decides_what_bucket_keeps():
    csr = Csr.from_edges([4, 2, 9], [0, 0, 0], shape=(1, 10))
    assert presample(csr, 2).indices.tolist() == [[4, 2]]


def test_rate_without_a_width_keeps_all_that_the_rate_asks_for():
    ell = presample(random_csr(0), strategy="rate", rate=0.5)
    assert ell.width == 1500
    assert ell.counts.tolist() == [-(-n // 2) for n in ell.degrees.tolist()]


def test_sampling_rate_is_the_share_of_edges_and_grows_to_one():
    csr = random_csr(0)
    degrees = np.diff(csr.indptr)
    rates = [sampling_rate(csr, width) for width in (1, 8, 100, 3000)]
    assert rates[1] == sum(min(n, 8) for n in degrees.tolist()) / csr.nnz
    assert rates == sorted(rates)
    assert rates[-1] == 1.0
    assert sampling_rate(random_csr(0, degrees=[0, 0]), 4) == 1.0


def test_a_graph_without_edges_has_no_picks():
    ell = presample(random_csr(0, degrees=[0, 0, 0]), 4)
    assert ell.counts.tolist() == [0, 0, 0]
    assert ell.to_csr().nnz == 0


def test_squeezed_picks_keep_the_order_of_slots():
    csr = random_csr(2)
    ell = presample(csr, 8, strategy="fastrand")
    squeezed = ell.to_csr().check()
    picked = np.concatenate([np.asarray(row, int) for row in literal_picks(csr, 8, "fastrand")])
    assert np.array_equal(squeezed.indices, csr.indices[picked])
    assert np.array_equal(squeezed.values, csr.values[picked])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be a whole number of edges, at least 1; got 0"),
        ({"width": -3}, "got -3"),
        ({"width": 2.5}, "got 2.5"),
        ({"width": True}, "got True"),
        ({"width": None}, "got None"),
        ({"width": 4, "strategy": "fastrnd"}, "strategy must be one of .*fastrand.*; got 'fastrnd'"),
        ({"width": 4, "strategy": "fastrand", "prime": 0}, "prime must be at least 1"),
        ({"width": 2**22, "strategy": "fastrand", "prime": 2579}, "below 2\\^31"),
        ({"width": 4, "strategy": "fastrand", "prime": 2.5}, "prime must be at least 1, a whole number.*got 2.5"),
        ({"width": 4, "seed": -1}, "seed must be at least 0"),
        ({"width": 4, "seed": 1.5}, "seed must be at least 0, a whole number; got 1.5"),
        ({"width": 4, "strategy": "rate"}, "wants a rate in \\[0.0001, 1\\]; got None"),
        ({"width": 4, "strategy": "rate", "rate": 1.5}, "got 1.5"),
        ({"width": 4, "strategy": "rate", "rate": float("nan")}, "got nan"),
        ({"width": 4, "rate": 0.5}, "has no rate"),
    ],
)
def test_what_cannot_be_sampled_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        presample(random_csr(0, degrees=[3, 4]), **arguments)
