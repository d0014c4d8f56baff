"""Products with sparse matrices: scipy's, on the matrix or on the picked edges, are the oracle."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from graph_cases import literal_picks, random_csr
from jax.test_util import check_grads

from scalejax import compat
from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels.sampled_spmm import (
    Csr,
    Int8Rows,
    plan_sample,
    presample,
    quantize_rows,
    sampled_spmm,
    sddmm,
    segment_softmax,
    sparse_plan,
    spmm,
)

product = jax.jit(spmm, static_argnames=("reduce", "implementation"))
sampled_product = jax.jit(
    sampled_spmm,
    static_argnames=("width", "strategy", "prime", "seed", "reduce", "rescale", "self_loop_bias", "implementation"),
)

IMPLEMENTATIONS = ("xla", "native", "reference")
FEATURES = 6


def _features(csr, seed=7, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((csr.shape[1], FEATURES)).astype(dtype)


def _matrix(csr, values=None):
    values = np.ones(csr.nnz, np.float32) if values is None else values
    return scipy.sparse.csr_matrix((values.astype(np.float64), csr.indices, csr.indptr), shape=csr.shape)


def _close(ours, theirs, rtol=1e-5):
    scale = max(1.0, np.abs(theirs).max())
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=rtol, atol=rtol * scale)


def _rounded_once(ours, exact, dtype):
    """Sums that were rounded to a narrow dtype at their end alone."""
    assert ours.dtype == dtype
    half_ulp = 2.0 ** -(1 + ml_dtypes.finfo(dtype).nmant)
    sums_error = 1e-5 * np.abs(exact).max()  # of float32
    assert np.all(np.abs(np.asarray(ours, np.float64) - exact) <= 1.01 * half_ulp * np.abs(exact) + sums_error)


@pytest.mark.default_cases("native-True", "xla-False")
@pytest.mark.parametrize(
    ("implementation", "weighted"), [*((name, True) for name in IMPLEMENTATIONS), ("xla", False), (None, False)]
)
def test_product_equals_scipy(implementation, weighted):
    csr = random_csr(0, weighted=weighted)
    h = _features(csr)
    matrix = _matrix(csr, csr.values)
    out = product(sparse_plan(csr), h, implementation=implementation)
    assert out.dtype == jnp.float32
    _close(out, matrix @ h)


def test_rows_of_more_edges_than_two_passes_hold_are_summed():
    csr = random_csr(0, degrees=[3, 70000, 0, 300])
    h = _features(csr)
    _close(product(sparse_plan(csr), h, implementation="xla"), _matrix(csr, csr.values) @ h)


def test_sums_in_bins_do_not_depend_on_other_rows():
    rows = random_csr(3, degrees=[1000, 20])
    alone, among = sparse_plan(rows), sparse_plan(random_csr(3, degrees=[1000, 20, 5000, 0, 100]))
    values = np.random.default_rng(0).standard_normal(among.nnz).astype(np.float32)
    among_csr = Csr(among.csr.indptr, among.csr.indices, values, shape=among.shape)
    alone_csr = Csr(rows.indptr, np.asarray(among.csr.indices)[:1020], values[:1020], shape=alone.shape)
    h = _features(rows)
    several = product(sparse_plan(among_csr), h, implementation="xla")
    assert np.array_equal(product(sparse_plan(alone_csr), h, implementation="xla"), several[:2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mean_divides_by_edges_and_leaves_empty_rows_at_zero(implementation):
    csr = random_csr(1, weighted=False)
    h = _features(csr)
    degrees = np.diff(csr.indptr)
    out = product(sparse_plan(csr), h, reduce="mean", implementation=implementation)
    _close(out, (_matrix(csr) @ h) / np.maximum(degrees, 1)[:, None])
    assert not np.asarray(out)[degrees == 0].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_reaches_the_rows_that_read_it_and_no_others(implementation):
    csr = random_csr(1, degrees=[2, 0, 300, 3, 1], columns=400)
    h = _features(csr)
    column = int(csr.indices[-1])
    h[column] = np.nan
    h[0] = np.inf if column else h[0]
    out = np.asarray(product(sparse_plan(csr), h, implementation=implementation))
    reads = np.array([np.isin([0, column], csr.indices[a:b]).any() for a, b in itertools.pairwise(csr.indptr)])
    assert np.array_equal(~np.isfinite(out).all(axis=1), reads)
    assert reads.any()
    assert not reads.all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_equal_products_with_the_transpose(implementation):
    csr = random_csr(2)
    h = _features(csr)
    weights = np.random.default_rng(1).standard_normal(csr.nnz).astype(np.float32)
    cotangent = np.random.default_rng(2).standard_normal((csr.shape[0], FEATURES)).astype(np.float32)

    @jax.jit
    def gradients(p, h, v):
        return jax.vjp(lambda h, v: spmm(p, h, values=v, implementation=implementation), h, v)[1](cotangent)

    d_h, d_values = gradients(sparse_plan(csr), h, weights)
    _close(d_h, _matrix(csr, weights).T @ cotangent)
    row = np.repeat(np.arange(csr.shape[0]), np.diff(csr.indptr))
    _close(d_values, (cotangent[row].astype(np.float64) * h[csr.indices]).sum(axis=1))


def test_gradient_for_features_alone_takes_the_values_of_the_plan():
    csr = random_csr(2)
    d_h = jax.grad(lambda h: spmm(sparse_plan(csr), h, reduce="mean").sum())(_features(csr))
    share = 1 / np.maximum(np.diff(csr.indptr), 1)
    _close(d_h, _matrix(csr, csr.values).T @ np.repeat(share[:, None], FEATURES, axis=1))


@pytest.mark.default_cases("native")
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_derivatives_agree_with_finite_differences_twice(implementation, x64):
    csr = random_csr(4, degrees=[2, 0, 5, 1], columns=4)
    p = sparse_plan(csr)
    h = jnp.asarray(_features(csr, dtype=np.float64))
    values = jnp.asarray(csr.values, jnp.float64)

    @jax.jit
    def run(h, v):
        return jnp.tanh(spmm(p, h, values=v, implementation=implementation) / 20)

    check_grads(run, (h, values), order=2, modes=["rev"], rtol=1e-5)
    check_grads(jax.jit(lambda a, b: jnp.tanh(sddmm(p, a, b))), (run(h, values), h), order=2, modes=["rev"], rtol=1e-5)


def test_numbers_of_float64_are_summed_in_float64(x64):
    csr = random_csr(0)
    h = _features(csr, dtype=np.float64)
    for implementation in ("native", "xla"):
        out = product(sparse_plan(csr), h, implementation=implementation)
        assert out.dtype == jnp.float64
        _close(out, _matrix(csr, csr.values) @ h, rtol=1e-13)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [*((name, ml_dtypes.bfloat16) for name in IMPLEMENTATIONS), ("native", np.float16)],
)
def test_narrow_features_are_summed_in_float32(implementation, dtype):
    csr = random_csr(0)
    h = _features(csr, dtype=dtype)
    out = product(sparse_plan(csr), jnp.asarray(h), implementation=implementation)
    _rounded_once(out, _matrix(csr, csr.values) @ h.astype(np.float64), dtype)


def test_narrow_features_get_gradients_in_their_own_dtype():
    csr = random_csr(0)
    h = jnp.asarray(_features(csr), jnp.bfloat16)
    d_h, d_values = jax.grad(lambda h, v: spmm(sparse_plan(csr), h, values=v).astype(jnp.float32).sum(), (0, 1))(
        h, jnp.asarray(csr.values)
    )
    assert d_h.dtype == jnp.bfloat16
    assert d_values.dtype == jnp.float32
    _close(d_h, _matrix(csr, csr.values).T @ np.ones((csr.shape[0], FEATURES)), rtol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "weighted"), [*((name, True) for name in IMPLEMENTATIONS), ("native", False)]
)
def test_int8_features_equal_scipy_on_the_numbers_that_they_stand_for(implementation, weighted):
    csr = random_csr(0, weighted=weighted)
    rows = quantize_rows(jnp.asarray(_features(csr)))
    stands_for = np.asarray(rows.codes, np.float64) * np.asarray(rows.scales, np.float64)[:, None]
    out = product(sparse_plan(csr), rows, implementation=implementation)
    assert out.dtype == jnp.float32
    _close(out, _matrix(csr, csr.values) @ stands_for)
    picked = presample(csr, 8, strategy="fastrand")
    expected = _picked_matrix(csr, 8, {"strategy": "fastrand"}) @ stands_for
    for graph in (picked, plan_sample(picked)):
        _close(sampled_spmm(graph, rows, reduce="sum", implementation=implementation), expected)


@pytest.mark.slow
def test_int8_features_pass_gradients_to_values():
    csr = random_csr(0)
    rows = quantize_rows(jnp.asarray(_features(csr)))
    got = jax.grad(lambda v: spmm(sparse_plan(csr), rows, values=v).sum())(jnp.asarray(csr.values))
    _close(got, np.asarray(rows.dequantize(), np.float64).sum(axis=1)[csr.indices])


def test_int8_codes_are_within_half_a_step_and_rows_of_zeros_stay_zero():
    h = np.random.default_rng(0).standard_normal((20, 7)).astype(np.float32)
    h[3] = 0
    rows = quantize_rows(jnp.asarray(h))
    assert np.abs(np.asarray(rows.codes)).max() == 127
    assert np.abs(np.asarray(rows.dequantize()) - h).max() <= (np.abs(h).max(axis=1) / 254 * 1.001).max()
    assert not np.asarray(rows.dequantize())[3].any()
    h[5, 1] = np.nan
    assert np.isnan(np.asarray(quantize_rows(jnp.asarray(h)).dequantize())[5]).all()


def _picked_matrix(csr, width, rule, values=None):
    """scipy's matrix of what a literal loop picks."""
    picks = literal_picks(csr, width, **rule)
    flat = np.concatenate([np.asarray(row, int) for row in picks])
    values = _either(values, csr.values)
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in picks])])
    picked = np.ones(flat.size) if values is None else values[flat].astype(np.float64)
    return scipy.sparse.csr_matrix((picked, csr.indices[flat], indptr), shape=csr.shape)


def _either(values, otherwise):
    return otherwise if values is None else values


FORMS = {
    "csr": None,
    "ell": presample,
    "plan": lambda csr, width, **rule: plan_sample(presample(csr, width, **rule)),
}


def _sampled(form, csr, h, width, rule, **options):
    """`sampled_spmm` of a graph in one of the forms that it takes."""
    if form == "csr":
        return sampled_product(jax.tree.map(jnp.asarray, csr), h, width=width, **rule, **options)
    return sampled_product(FORMS[form](csr, width, **rule), h, **options)


@pytest.mark.default_cases
@pytest.mark.parametrize(
    ("form", "strategy", "implementation"),
    [
        *((form, strategy, None) for form in FORMS for strategy in ("bucket", "fastrand", "quadratic_residue")),
        *(("ell", "fastrand", implementation) for implementation in ("xla", "reference")),
        ("plan", "fastrand", "xla"),
    ],
)
def test_sampled_product_equals_scipy_on_the_picked_edges(form, strategy, implementation):
    csr = random_csr(5)
    h = _features(csr)
    out = _sampled(form, csr, h, 64, {"strategy": strategy}, reduce="sum", implementation=implementation)
    _close(out, _picked_matrix(csr, 64, {"strategy": strategy}) @ h)


@pytest.mark.parametrize("form", FORMS)
def test_sampled_mean_divides_by_picks_and_the_self_loop(form):
    csr = random_csr(5, weighted=False)
    h = _features(csr)
    picked = np.minimum(np.diff(csr.indptr), 8)
    sums = _picked_matrix(csr, 8, {"strategy": "fastrand"}) @ h
    rule = {"strategy": "fastrand"}
    _close(_sampled(form, csr, h, 8, rule), sums / np.maximum(picked, 1)[:, None])
    biased = _sampled(form, csr, h, 8, rule, self_loop_bias=1.0)
    _close(biased, sums / (picked + 1)[:, None])
    assert not np.asarray(biased)[picked == 0].any()


@pytest.mark.parametrize("form", FORMS)
def test_sampled_sum_is_scaled_by_the_edges_left_out_where_that_is_asked_for(form):
    csr = random_csr(5)
    h = _features(csr)
    degrees = np.diff(csr.indptr)
    scale = degrees / np.maximum(np.minimum(degrees, 8), 1)
    out = _sampled(form, csr, h, 8, {"strategy": "bucket"}, reduce="sum", rescale="degree")
    _close(out, (_picked_matrix(csr, 8, {"strategy": "bucket"}) @ h) * scale[:, None])


@pytest.mark.parametrize("form", FORMS)
def test_sampled_product_takes_values_of_all_edges(form):
    csr = random_csr(5)
    values = jnp.asarray(np.random.default_rng(3).standard_normal(csr.nnz).astype(np.float32))
    h = _features(csr)
    rule = {"strategy": "fastrand", "seed": 4, "prime": None}
    out = _sampled(form, csr, h, 16, rule, reduce="sum", values=values)
    _close(out, _picked_matrix(csr, 16, rule, np.asarray(values)) @ h)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [[9, 8, 30, 8, 12], [9, 8, 30, 7, 8, 12, 0, 400, 8]])
def test_rows_of_few_slots_are_summed_slot_after_slot_on_a_cpu(degrees):
    csr = random_csr(5, degrees=degrees, columns=300)
    picked = presample(csr, 8, strategy="fastrand")
    planned, h = plan_sample(picked), _features(csr)
    assert planned.plan.balance.slots == 8
    assert plan_sample(presample(csr, 17)).plan.balance.slots is None
    assert plan_sample(presample(random_csr(5), 8)).plan.balance.slots is None  # a third of the slots would be empty
    h[picked.indices[0, 0]] = np.nan  # what an empty slot reads
    h[picked.indices[0, 1]] = np.inf
    wide = np.asarray(h, np.float64)
    matrix = _picked_matrix(csr, 8, {"strategy": "fastrand"})
    reads = np.asarray(
        [np.isin(picked.indices[0, :2], row[:n]).any() for row, n in zip(picked.indices, picked.counts, strict=True)]
    )
    assert not reads.all()
    for graph in (planned, picked):
        out = np.asarray(sampled_product(graph, h, reduce="sum", implementation="native"))
        assert np.array_equal(np.isfinite(out).all(axis=1), ~reads)
        _close(out[~reads], (matrix @ np.nan_to_num(wide, posinf=0.0))[~reads])
    d_h = jax.grad(lambda h: sampled_product(planned, h, reduce="sum").sum())(jnp.asarray(_features(csr)))
    _close(d_h, matrix.T @ np.ones((len(degrees), FEATURES)))


@pytest.mark.parametrize("features", [128, 129])  # slots are summed one after another, or squeezed
def test_picks_in_many_slots_count_no_empty_slot_on_a_cpu(features):
    csr = random_csr(5, degrees=[9, 0, 30, 3, 12], columns=40)
    picked = presample(csr, 21, strategy="fastrand")
    h = np.random.default_rng(7).standard_normal((40, features)).astype(np.float32)
    h[0] = np.nan  # what an empty slot reads
    reads = np.asarray([0 in row[:n] for row, n in zip(picked.indices, picked.counts, strict=True)])
    out = np.asarray(sampled_product(picked, h, reduce="sum", implementation="native"))
    assert np.array_equal(np.isfinite(out).all(axis=1), ~reads)
    _close(out[~reads], (_picked_matrix(csr, 21, {"strategy": "fastrand"}) @ np.nan_to_num(h))[~reads])


# Two forms take several slots a row; of rows with all of 8 slots a plan sums slot after slot.
@pytest.mark.parametrize(("form", "degrees"), [("csr", None), ("ell", None), ("plan", [9, 8, 30, 8, 12])])
def test_sampled_narrow_features_are_summed_in_float32(form, degrees):
    csr = random_csr(5) if degrees is None else random_csr(5, degrees=degrees)
    h = _features(csr, dtype=ml_dtypes.bfloat16)
    rule = {"strategy": "fastrand"}
    out = _sampled(form, csr, jnp.asarray(h), 8 if degrees else 64, rule, reduce="sum")
    _rounded_once(out, _picked_matrix(csr, 8 if degrees else 64, rule) @ h.astype(np.float64), ml_dtypes.bfloat16)


def test_sampled_derivatives_agree_with_finite_differences(x64):
    csr = random_csr(1, degrees=[3, 0, 9, 30, 1], columns=6)
    planned = plan_sample(presample(csr, 8, strategy="fastrand"))
    h, values = jnp.asarray(_features(csr, dtype=np.float64)), jnp.asarray(csr.values, jnp.float64)
    mean = jax.jit(lambda h, v: sampled_spmm(planned, h, values=v))
    check_grads(mean, (h, values), order=1, modes=["rev"], rtol=1e-5)


@pytest.mark.default_cases("bucket-3000", "fastrand-3001")
@pytest.mark.parametrize(("strategy", "width"), [("bucket", 3000), ("bucket", 3001), ("fastrand", 3001)])
def test_a_width_of_every_degree_is_exact(strategy, width):
    csr = random_csr(6)
    h = _features(csr)
    out = sampled_spmm(csr, h, width, strategy=strategy, reduce="sum")
    _close(out, _matrix(csr, csr.values) @ h, rtol=2.2e-6)


@pytest.mark.default_cases("csr-native", "ell-xla")
@pytest.mark.parametrize(("form", "implementation"), [("csr", "native"), ("ell", "xla"), ("plan", "native")])
def test_sampled_gradients_equal_those_of_the_picked_matrix(form, implementation):
    csr = random_csr(5)
    h = jnp.asarray(_features(csr))
    rule = {"strategy": "quadratic_residue"}  # picks edges more than once
    weights = jnp.asarray(csr.values)
    cotangent = np.random.default_rng(2).standard_normal((csr.shape[0], FEATURES)).astype(np.float32)

    def run(h, v):
        return _sampled(form, csr, h, 64, rule, reduce="sum", values=v, implementation=implementation)

    d_h, d_values = jax.vjp(run, h, weights)[1](cotangent)
    _close(d_h, _picked_matrix(csr, 64, rule).T @ cotangent)
    expected = np.zeros(csr.nnz)
    for row, picks in enumerate(literal_picks(csr, 64, **rule)):
        for edge in picks:
            expected[edge] += cotangent[row].astype(np.float64) @ np.asarray(h)[csr.indices[edge]]
    _close(d_values, expected)


def test_picks_under_jit_follow_the_graph_they_are_given():
    first, second = random_csr(1, degrees=[5, 30, 0]), random_csr(2, degrees=[30, 0, 5])
    run = jax.jit(lambda csr, h: sampled_spmm(csr, h, 8, strategy="fastrand", reduce="sum"))
    for csr in (first, second):
        out = run(jax.tree.map(jnp.asarray, csr), _features(csr))
        _close(out, _picked_matrix(csr, 8, {"strategy": "fastrand"}) @ _features(csr))


@pytest.mark.slow
def test_edge_products_equal_numpy_and_have_gradients():
    csr = random_csr(0)
    p = sparse_plan(csr)
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((csr.shape[0], FEATURES)).astype(np.float32))
    b, ct = jnp.asarray(_features(csr)), rng.standard_normal(csr.nnz).astype(np.float32)
    row = np.repeat(np.arange(csr.shape[0]), np.diff(csr.indptr))
    expected = (np.asarray(a, np.float64)[row] * np.asarray(b, np.float64)[csr.indices]).sum(axis=1)
    for implementation in ("xla", "reference"):
        out, pull = jax.vjp(lambda a, b: sddmm(p, a, b, implementation=implementation), a, b)  # noqa: B023
        _close(out, expected)
        d_a, d_b = pull(ct)
        _close(d_a, _matrix(csr, ct) @ np.asarray(b))
        _close(d_b, _matrix(csr, ct).T @ np.asarray(a))


@pytest.mark.slow
def test_edge_products_of_two_dtypes_have_gradients_in_the_wider_one(x64):
    csr = random_csr(0)
    a = jnp.asarray(np.random.default_rng(0).standard_normal((csr.shape[0], FEATURES)), jnp.float32)
    b = jnp.asarray(_features(csr, dtype=np.float64))
    ct = np.random.default_rng(1).standard_normal(csr.nnz)
    d_a, d_b = jax.vjp(lambda a, b: sddmm(sparse_plan(csr), a, b), a, b)[1](ct)
    assert (d_a.dtype, d_b.dtype) == (jnp.float32, jnp.float64)
    _close(d_b, _matrix(csr, ct).T @ np.asarray(a, np.float64), rtol=1e-13)


def _softmax_by_rows(csr, scores):
    out = np.zeros(scores.shape)
    for begin, end in itertools.pairwise(csr.indptr):
        row = scores[begin:end].astype(np.float64)
        if end > begin and np.isfinite(row.max()):
            raised = np.exp(row - row.max())
            out[begin:end] = raised / raised.sum()
    return out


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("heads", [None, 3])
def test_softmax_of_rows_equals_numpy(heads):
    csr = random_csr(0)
    shape = (csr.nnz,) if heads is None else (csr.nnz, heads)
    scores = (30 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    out = np.asarray(segment_softmax(sparse_plan(csr), jnp.asarray(scores)))
    columns = [...] if heads is None else [(slice(None), head) for head in range(heads)]
    for column in columns:
        np.testing.assert_allclose(out[column], _softmax_by_rows(csr, scores[column]), rtol=1e-4, atol=1e-7)


def test_edges_are_reduced_in_bins_where_there_is_no_fast_scatter(monkeypatch):
    csr = random_csr(0)
    p = sparse_plan(csr)
    scores = (5 * np.random.default_rng(0).standard_normal((csr.nnz, 2))).astype(np.float32)
    a, b = np.ones((csr.shape[0], 3), np.float32), _features(csr)[:, :3]
    on_cpu = segment_softmax(p, scores), sddmm(p, a, b)
    monkeypatch.setattr(compat, "platform", lambda: "tpu")
    elsewhere = jax.jit(segment_softmax)(p, scores), sddmm(p, a, b)
    for ours, theirs in zip(elsewhere, on_cpu, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_softmax_survives_large_scores_and_rows_that_are_masked():
    csr = random_csr(0, degrees=[3, 2, 0, 2], columns=5)
    scores = np.array([1e30, -1e30, 1e30, -np.inf, -np.inf, 0.0, -np.inf], np.float32)
    out = segment_softmax(sparse_plan(csr), jnp.asarray(scores))
    assert np.asarray(out).tolist() == [0.5, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0]


def test_softmax_has_the_gradient_of_its_definition(x64):
    csr = random_csr(0, degrees=[3, 0, 5, 1], columns=5)
    p = sparse_plan(csr)
    scores = jnp.asarray(np.random.default_rng(0).standard_normal(csr.nnz))
    check_grads(lambda s: segment_softmax(p, s), (scores,), order=1, modes=["rev"], rtol=1e-6)


def test_vmap_over_heads_equals_one_head_at_a_time():
    csr = random_csr(0)
    p = sparse_plan(csr)
    h = jnp.stack([_features(csr, seed) for seed in (0, 1)])
    values = jnp.stack([_features(csr, 2)[0, 0] * csr.values, csr.values])
    out = jax.vmap(lambda h, v: spmm(p, h, values=v))(h, values)
    for head in (0, 1):
        np.testing.assert_array_equal(out[head], spmm(p, h[head], values=values[head]))
    d_values = jax.grad(lambda v: jax.vmap(lambda h, v: spmm(p, h, values=v))(h, v).sum())(values)
    _close(d_values[1], np.asarray(h[1], np.float64).sum(axis=1)[csr.indices])


@pytest.mark.default_cases("shape2")
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 4)])
def test_graphs_without_rows_columns_or_edges_give_zeros(shape):
    csr = Csr(np.zeros(shape[0] + 1, np.int32), np.zeros(0, np.int32), shape=shape)
    h = jnp.ones((shape[1], 3))
    p = sparse_plan(csr)
    assert not np.asarray(spmm(p, h)).any()
    assert spmm(p, h, reduce="mean").shape == (shape[0], 3)
    assert jax.grad(lambda h: spmm(p, h).sum())(h).shape == h.shape
    assert sampled_spmm(presample(csr, 3), h).shape == (shape[0], 3)
    assert segment_softmax(p, jnp.zeros(0)).shape == (0,)
    assert sddmm(p, jnp.ones((shape[0], 3)), h).shape == (0,)


def test_edges_become_rows_of_receivers_in_the_order_given():
    csr = Csr.from_edges([4, 1, 3, 1], [2, 0, 2, 2], shape=(3, 5), values=[1.0, 2.0, 3.0, 4.0])
    assert csr.indptr.tolist() == [0, 1, 1, 4]
    assert csr.indices.tolist() == [1, 4, 3, 1]
    assert csr.values.tolist() == [2.0, 1.0, 3.0, 4.0]


def test_matrices_of_scipy_keep_the_order_of_columns():
    matrix = scipy.sparse.csr_matrix(
        (np.arange(1.0, 4.0, dtype=np.float32), np.array([2, 0, 1]), np.array([0, 3, 3])), shape=(2, 3)
    )
    csr = Csr.from_scipy(matrix)
    assert csr.indices.tolist() == [2, 0, 1]
    _close(spmm(sparse_plan(csr), jnp.eye(3)), matrix.toarray())


def _csr(**changes):
    return dataclasses.replace(Csr(np.array([0, 2, 3]), np.array([0, 3, 1]), shape=(2, 4)), **changes)


@pytest.mark.parametrize(
    ("csr", "message"),
    [
        (_csr(indptr=np.array([0, 3, 2])), "end with 3"),
        (_csr(indptr=np.array([0, 4, 3])), r"must not decrease; got indptr\[1\] = 4 and indptr\[2\] = 3"),
        (_csr(indptr=np.array([2, 3])), "length 3"),
        (_csr(indptr=np.array([1, 2, 3])), "begin with 0"),
        (_csr(indptr=np.array([0.0, 2.0, 3.0])), "integer vector"),
        (_csr(indices=np.array([0, 4, 1])), r"indices must be in \[0, 4\).*indices\[1\] = 4"),
        (_csr(indices=np.array([0, -1, 1])), r"indices\[1\] = -1"),
        (_csr(indptr=[0, 2, 3]), "integer vector of NumPy or JAX; got list"),
        (_csr(values=np.ones(2)), "values must be a vector of 3"),
        (_csr(values=np.ones(3, complex)), "values must be real numbers; got complex128"),
        (_csr(values=np.array([1.0, None, 2.0])), "values must be real numbers; got object"),
        (_csr(shape=(2.0, 4)), r"shape must be \(rows, columns\).*got \(2.0, 4\)"),
    ],
)
def test_what_is_no_graph_is_refused(csr, message):
    with pytest.raises(UserError, match=message):
        sparse_plan(csr)
    with pytest.raises(UserError, match=message):
        sampled_spmm(csr, jnp.ones((4, 2)), 3)


@pytest.mark.parametrize(
    ("csr", "message"),
    [
        (_csr(shape=(5, 4)), "indptr must have length 6.*got 3"),
        (_csr(values=np.ones(2)), "values must be a vector of 3"),
        (_csr(indices=np.ones(3)), "indices must be an integer vector"),
    ],
)
def test_what_is_no_graph_by_its_shapes_is_refused_where_it_is_traced(csr, message):
    on_device = jax.tree.map(jnp.asarray, csr)
    for run in (lambda c: sampled_spmm(c, jnp.ones((4, 2)), 3), lambda c: presample(c, 3).counts):
        with pytest.raises(UserError, match=message):
            jax.jit(run)(on_device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (9, 50)}, r"indices must have the shape \(N, S\) with N = 9; got \[4, 8\]"),
        ({"counts": np.ones(3, np.int32)}, r"counts must have the shape \(N\) with N = 4; got \[3\]"),
        ({"values": np.ones((4, 3), np.float32)}, r"values must have the shape \(N, S\).*got \[4, 3\]"),
    ],
)
def test_picks_of_other_shapes_are_refused(change, message):
    picks = dataclasses.replace(presample(random_csr(0, degrees=[3, 0, 300, 5]), 8), **change)
    for run in (lambda e: sampled_spmm(e, jnp.ones((50, 2))), plan_sample):
        with pytest.raises(UserError, match=message):
            run(picks)


def test_picks_that_are_traced_are_not_planned():
    ell = jax.tree.map(jnp.asarray, presample(random_csr(0), 8))
    with pytest.raises(UserError, match=r"outside of jax\.jit"):
        jax.jit(lambda e: plan_sample(e).edges)(ell)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int8, np.uint64])
def test_indices_of_any_integer_dtype_pick_the_same_edges(dtype):
    csr = random_csr(5, degrees=[0, 30, 300, 4])
    other = Csr(csr.indptr.astype(np.int64), csr.indices.astype(dtype), csr.values, shape=csr.shape)
    h = _features(csr)
    picks = presample(other, 40, strategy="fastrand")
    expected = sampled_spmm(presample(csr, 40, strategy="fastrand"), h)
    for graph in (picks, plan_sample(picks)):
        np.testing.assert_array_equal(sampled_spmm(graph, h), expected)
    np.testing.assert_array_equal(sampled_spmm(other, h, 40, strategy="fastrand"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("picked", [lambda csr: presample(csr, 2), lambda csr: plan_sample(presample(csr, 2))])
def test_a_presampled_graph_without_edges_gives_zeros_with_values_too(picked):
    csr = Csr(np.zeros(4, np.int32), np.zeros(0, np.int32), shape=(3, 5))
    h, values = jnp.ones((5, FEATURES)), jnp.zeros(0)
    out, pull = jax.vjp(lambda h, values: sampled_spmm(picked(csr), h, values=values), h, values)
    np.testing.assert_array_equal(out, np.zeros((3, FEATURES)))
    d_h, d_values = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(d_h, np.zeros((5, FEATURES)))
    assert d_values.shape == (0,)


def test_a_list_of_no_edges_makes_an_empty_graph():
    assert Csr.from_edges([], [], shape=(2, 3)).indptr.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("senders", "receivers", "message"),
    [
        ([0, 1], [0], "one length; got 2 and 1"),
        ([0, 5], [0, 1], r"senders must be in \[0, 4\).*senders\[1\] = 5"),
        ([0, 1], [0, 2], r"receivers must be in \[0, 2\)"),
        ([0.5], [0], "integer vector"),
    ],
)
def test_edges_that_make_no_graph_are_refused(senders, receivers, message):
    with pytest.raises(UserError, match=message):
        Csr.from_edges(senders, receivers, shape=(2, 4))


def test_more_edges_than_int32_counts_want_64_bit_indices():
    edges = 2**31
    csr = Csr(np.array([0, edges]), np.broadcast_to(np.int64(0), (edges,)), shape=(1, 1))  # takes eight bytes
    with pytest.raises(UserError, match=r"2147483648 edges.*jax_enable_x64"):
        csr.check()


@pytest.mark.slow
def test_64_bit_indices_give_the_same_product(x64):
    csr = random_csr(0)
    wide = Csr(csr.indptr.astype(np.int64), csr.indices.astype(np.int64), csr.values, shape=csr.shape)
    p = sparse_plan(csr)
    to_64 = jax.tree.map(lambda x: x.astype(jnp.int64) if x.dtype == jnp.int32 else x, p)
    for implementation in ("native", "xla"):
        out = product(to_64, _features(csr), implementation=implementation)
        np.testing.assert_array_equal(out, product(p, _features(csr), implementation=implementation))
    np.testing.assert_array_equal(
        sampled_product(jax.tree.map(jnp.asarray, wide), _features(csr), width=8),
        sampled_product(jax.tree.map(jnp.asarray, csr), _features(csr), width=8),
    )


def test_a_graph_is_planned_outside_of_jit():
    with pytest.raises(UserError, match=r"outside of jax\.jit"):
        jax.jit(lambda csr: sparse_plan(csr).row_ids)(jax.tree.map(jnp.asarray, random_csr(0)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, c, h: spmm(p, h[:-1]), "h must have 50 rows.*got 49"),
        (lambda p, c, h: spmm(p, h[:, 0]), "floating-point matrix"),
        (lambda p, c, h: spmm(p, h.astype(jnp.int8)), "Int8Rows"),
        (lambda p, c, h: spmm(p, Int8Rows(h, jnp.ones(50))), "int8 codes"),
        (lambda p, c, h: spmm(c, h), r"plan must be a SparsePlan; got Csr. Pass sparse_plan\(csr\)"),
        (lambda p, c, h: sddmm(c, h, h), "plan must be a SparsePlan; got Csr"),
        (lambda p, c, h: segment_softmax(c, h), "plan must be a SparsePlan; got Csr"),
        (lambda p, c, h: sparse_plan(_matrix(c)), r"must be a Csr; got csr_matrix.*Csr\.from_scipy"),
        (lambda p, c, h: presample(p, 8), "must be a Csr; got SparsePlan"),
        (lambda p, c, h: plan_sample(c), r"must be an Ell; got Csr. Pass presample"),
        (lambda p, c, h: Csr.from_scipy(np.eye(3)), "sparse matrix of two dimensions; got ndarray"),
        (lambda p, c, h: sampled_spmm(p, h, 8), "must be a Csr, Ell or SampledPlan; got SparsePlan.*spmm"),
        (lambda p, c, h: spmm(p, h, values=jnp.ones(3)), r"values.*float32\[3\]"),
        (lambda p, c, h: sampled_spmm(c, h, 8, values=jnp.ones(3)), r"values.*of 5481, one for each.*float32\[3\]"),
        (lambda p, c, h: sampled_spmm(presample(c, 8), h, values=jnp.ones(3)), r"values.*of 5481.*float32\[3\]"),
        (
            lambda p, c, h: sampled_spmm(plan_sample(presample(c, 8)), h, values=jnp.ones(9)),
            r"values.*of 5481.*float32\[9\]",
        ),
        (
            lambda p, c, h: spmm(sparse_plan(random_csr(0, degrees=[0, 0])), h, values=jnp.ones(3)),
            r"values.*of 0, one for each.*float32\[3\]",
        ),
        (lambda p, c, h: spmm(p, h, values=jnp.ones(p.nnz, jnp.int32)), "floating-point vector"),
        (lambda p, c, h: spmm(p, h, reduce="max"), "reduce must be one of"),
        (lambda p, c, h: spmm(p, h, implementation="cuda"), "implementation must be one of"),
        (lambda p, c, h: sddmm(p, h, h), "a must have 18 rows"),
        (lambda p, c, h: sddmm(p, h[:18, :2], h), "one number of features"),
        (lambda p, c, h: segment_softmax(p, h[:, 0]), "one for each edge"),
        (lambda p, c, h: sampled_spmm(c, h), "width must be"),
        (lambda p, c, h: sampled_spmm(c, h, 8, strategy="fastrend"), "strategy must be one of"),
        (lambda p, c, h: sampled_spmm(c, h, 8, rescale="degree"), "a mean is scaled already"),
        (lambda p, c, h: sampled_spmm(c, h, 8, rescale="rows", reduce="sum"), "rescale must be one of"),
        (lambda p, c, h: sampled_spmm(c, h, 8, self_loop_bias=-1.0), "self_loop_bias must be at least 0"),
        (lambda p, c, h: sampled_spmm(c, h, 8, self_loop_bias=float("nan")), "at least 0, finite.*got nan"),
        (lambda p, c, h: sampled_spmm(c, h, 8, reduce="sum", self_loop_bias=1.0), "no divisor"),
        (lambda p, c, h: sampled_spmm(presample(c, 8), h, 8), "picked already"),
        (lambda p, c, h: sampled_spmm(presample(c, 8), h, strategy="bucket"), "picked already"),
        (lambda p, c, h: sampled_spmm(presample(c, 8), h[:-1]), "h must have 50 rows"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message):
    csr = random_csr(0)
    with pytest.raises(UserError, match=message):
        call(sparse_plan(csr), csr, jnp.asarray(_features(csr)))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_is_promoted_implicitly(implementation, strict_promotion):
    csr = random_csr(0, degrees=[3, 0, 300, 5])
    h, values = jnp.asarray(_features(csr), jnp.bfloat16), jnp.asarray(csr.values)
    p, ell = sparse_plan(csr), presample(csr, 8, strategy="fastrand")

    @jax.jit
    def all_of_it(h, values):
        out = spmm(p, h, values=segment_softmax(p, values), reduce="mean", implementation=implementation)
        out += sampled_spmm(ell, h, values=values, implementation=implementation)
        return out + sampled_spmm(ell, quantize_rows(h), implementation=implementation).astype(out.dtype)

    d_h, d_values = jax.vjp(all_of_it, h, values)[1](jnp.ones((4, FEATURES), jnp.bfloat16))
    assert (d_h.dtype, d_values.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.gpu
def test_products_of_cusparse_equal_scipy():
    csr = random_csr(0, columns=400)
    h = _features(csr)
    weights = jnp.asarray(csr.values)
    out, pull = jax.vjp(lambda h, v: product(sparse_plan(csr), h, values=v, implementation="cusparse"), h, weights)
    _close(out, _matrix(csr, csr.values) @ h)
    d_h, _ = pull(jnp.ones_like(out))
    _close(d_h, _matrix(csr, csr.values).T @ np.ones(out.shape))


@pytest.mark.gpu
def test_cusparse_takes_no_more_edges_than_the_matrix_has_places():
    csr = random_csr(0)
    with pytest.raises(UnsupportedError, match=r"got \d+ in 18 x 50"):
        spmm(sparse_plan(csr), jnp.asarray(_features(csr)), implementation="cusparse")


@pytest.mark.slow
def test_an_implementation_of_another_platform_is_refused():
    csr = random_csr(0)
    assert compat.platform() == "cpu"
    with pytest.raises(UnsupportedError, match='"cusparse" runs on gpu; got cpu'):
        spmm(sparse_plan(csr), jnp.asarray(_features(csr)), implementation="cusparse")
