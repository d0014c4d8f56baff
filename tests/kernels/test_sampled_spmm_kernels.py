"""Pallas kernels of sparse products under interpret mode. Oracles: the XLA form, scipy, and literal picks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from graph_cases import literal_picks, random_csr
from jax.experimental.pallas import tpu as pltpu

from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels.sampled_spmm import presample, quantize_rows, sampled_spmm, sparse_plan, spmm

WAIT = pltpu.InterpretParams()  # copies happen when they are waited for; unwritten memory is NaN
EAGER = pltpu.InterpretParams(dma_execution_mode="eager")
KERNELS = [("pallas_tpu", True), ("pallas_gpu", True)]
SIMULATED = [
    pytest.param("pallas_tpu", WAIT, marks=pytest.mark.slow),
    pytest.param("pallas_tpu", EAGER, marks=pytest.mark.slow),
]
BY_DEFAULT = [pytest.param("pallas_tpu", True, marks=pytest.mark.slow), ("pallas_gpu", True)]
"""Interpreting the loops of a TPU takes seconds a program."""
SHORT = (0, 1, 3, 7, 8, 9, 0, 40, 577, 5, 0)
"""Empty rows at the front, inside and at the end; some at both sides of a width of 8, and a multiple of the prime."""

product = jax.jit(spmm, static_argnames=("reduce", "implementation", "interpret"))
sampled = jax.jit(
    sampled_spmm,
    static_argnames=("width", "strategy", "rate", "reduce", "rescale", "self_loop_bias", "implementation", "interpret"),
)


@pytest.fixture(autouse=True)
def _strict(strict_promotion):
    yield
    pltpu.reset_tpu_interpret_mode_state()


def _features(csr, features, seed=7):
    return np.random.default_rng(seed).standard_normal((csr.shape[1], features)).astype(np.float32)


def _matrix(csr):
    values = np.ones(csr.nnz) if csr.values is None else csr.values.astype(np.float64)
    return scipy.sparse.csr_matrix((values, csr.indices, csr.indptr), shape=csr.shape)


def _close(ours, theirs, rtol=1e-5):
    theirs = np.asarray(theirs, np.float64)
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), theirs, rtol=rtol, atol=rtol * max(1, np.abs(theirs).max())
    )


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "interpret"), [*KERNELS, *SIMULATED])
def test_sums_and_means_of_picked_edges_equal_those_of_xla(implementation, interpret):
    csr = random_csr(0, degrees=SHORT)
    h = _features(csr, 6)
    means = presample(dataclasses.replace(csr, values=None), 8, strategy="fastrand")
    sums = presample(csr, 40, strategy="quadratic_residue")
    for ell, options in (
        (means, {"self_loop_bias": 1.0}),
        (sums, {"reduce": "sum", "rescale": "degree"}),
    ):
        out = sampled(ell, h, implementation=implementation, interpret=interpret, **options)
        assert out.dtype == jnp.float32
        _close(out, sampled(ell, h, implementation="xla", **options), 1e-6)
        assert not np.asarray(out)[np.diff(csr.indptr) == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rate"),
    [
        ("bucket", None),
        ("fastrand", None),
        ("quadratic_residue", None),
        ("rate", 0.3),
        ("rate_stride", 0.3),
    ],
)
def test_positions_are_computed_inside_the_gpu_kernel(strategy, rate):
    csr = random_csr(1)
    h = _features(csr, 5)
    out = sampled(csr, h, 40, strategy=strategy, rate=rate, reduce="sum", implementation="pallas_gpu", interpret=True)
    picks = literal_picks(csr, 40, strategy, rate=rate)
    _close(out, [(h[csr.indices[p]].astype(np.float64) * csr.values[p, None]).sum(axis=0) for p in picks])


def test_edges_picked_inside_the_gpu_kernel_are_never_written_to_memory():
    csr = random_csr(1, weighted=False)
    width = 37

    def shapes(**options):
        def run(csr, h):
            return sampled_spmm(csr, h, width, strategy="fastrand", interpret=True, **options)

        jaxpr = jax.make_jaxpr(run)(jax.tree.map(jnp.asarray, csr), _features(csr, 5))
        return {v.aval.shape for equation in jaxpr.eqns for v in equation.outvars}

    picked = (csr.shape[0], width)
    assert picked not in shapes(implementation="pallas_gpu")
    assert picked in shapes(implementation="pallas_tpu")


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "interpret"), KERNELS)
@pytest.mark.parametrize("weighted", [True, False])
def test_exact_products_equal_scipy_on_rows_of_every_bin_and_cut_rows(implementation, interpret, weighted):
    csr = random_csr(2, weighted=weighted)
    h = _features(csr, 6)
    theirs = _matrix(csr) @ h
    _close(product(sparse_plan(csr), h, implementation=implementation, interpret=interpret), theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "interpret"), [*KERNELS, SIMULATED[0]])
def test_rows_of_more_edges_than_two_passes_hold_are_summed(implementation, interpret):
    csr = random_csr(0, degrees=[3, 70000, 0, 300] if interpret is True else [3, 2000, 0, 300])
    h = _features(csr, 6)
    _close(product(sparse_plan(csr), h, implementation=implementation, interpret=interpret), _matrix(csr) @ h)


@pytest.mark.parametrize("features", [1, 300, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("implementation", "interpret"), BY_DEFAULT)
def test_any_number_of_features_is_summed(implementation, interpret, features):
    csr = random_csr(3, degrees=SHORT)
    h = _features(csr, features)
    ell = presample(csr, 100, strategy="fastrand")
    _close(sampled(ell, h, reduce="sum", implementation=implementation, interpret=interpret), _matrix(ell.to_csr()) @ h)


@pytest.mark.default_cases("*-True")
@pytest.mark.parametrize(("implementation", "interpret"), [("pallas_tpu", WAIT), SIMULATED[1], KERNELS[0]])
def test_a_tpu_sums_wide_features_in_ranges_and_many_slots_in_chunks(implementation, interpret):
    csr = random_csr(4, degrees=[90, 0, 9, *[0] * 127, 4])
    h = _features(csr, 600)  # two ranges of words; two blocks of rows; two chunks of slots
    ell = presample(csr, 12)
    _close(sampled(ell, h, reduce="sum", implementation=implementation, interpret=interpret), _matrix(ell.to_csr()) @ h)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "interpret"), [*KERNELS, SIMULATED[0]])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_narrow_features_are_summed_in_float32(implementation, interpret, dtype):
    csr = random_csr(5, degrees=SHORT)
    h = jnp.asarray(_features(csr, 300))
    h = quantize_rows(h) if dtype == jnp.int8 else h.astype(dtype)
    wide = h.dequantize() if dtype == jnp.int8 else h.astype(jnp.float32)
    ell = presample(csr, 100)
    out = sampled(ell, h, reduce="sum", implementation=implementation, interpret=interpret)
    assert out.dtype == (jnp.float32 if dtype == jnp.int8 else dtype)
    theirs = _matrix(ell.to_csr()) @ np.asarray(wide, np.float64)
    # The result is rounded once, to 8 or 11 bits; a sum in that format would be off by more.
    _close(out, theirs, {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.int8: 1e-5}[dtype])


@pytest.mark.default_cases("pallas_gpu-True-plan")
@pytest.mark.parametrize("graph", ["csr", "ell", "plan"])
@pytest.mark.parametrize(("implementation", "interpret"), BY_DEFAULT)
def test_gradients_equal_those_of_xla(implementation, interpret, graph):
    csr = random_csr(6, degrees=[0, 3, 40, 9, 300])
    h, values = _features(csr, 6), csr.values
    cotangent = np.random.default_rng(2).standard_normal((csr.shape[0], 6)).astype(np.float32)
    made = {"csr": lambda: csr, "ell": lambda: presample(csr, 8), "plan": lambda: sparse_plan(csr)}[graph]()

    def gradients(implementation, interpret):
        def run(h, values):
            options = {"values": values, "implementation": implementation, "interpret": interpret}
            if graph == "plan":
                return spmm(made, h, reduce="mean", **options)
            return sampled_spmm(made, h, 8 if graph == "csr" else None, self_loop_bias=1.0, **options)

        return jax.jit(lambda h, v: jax.vjp(run, h, v)[1](cotangent))(h, values)

    for ours, theirs in zip(gradients(implementation, interpret), gradients("xla", False), strict=True):
        assert np.asarray(theirs).any()
        _close(ours, theirs, 1e-6)


@pytest.mark.parametrize(("implementation", "interpret"), [*KERNELS, SIMULATED[0]])
def test_nan_reaches_the_rows_that_read_it_and_no_others(implementation, interpret):
    csr = random_csr(1, degrees=[2, 0, 30, 3, 1], columns=40)
    h = _features(csr, 6)
    h[[0, csr.indices[-1]]] = np.nan
    ell = presample(csr, 8)
    out = np.asarray(sampled(ell, h, implementation=implementation, interpret=interpret))
    reads = [np.isin([0, csr.indices[-1]], row[:n]).any() for row, n in zip(ell.indices, ell.counts, strict=True)]
    assert np.array_equal(~np.isfinite(out).all(axis=1), reads)
    assert any(reads)
    assert not all(reads)


@pytest.mark.parametrize(("implementation", "interpret"), BY_DEFAULT)
def test_a_row_is_summed_to_the_same_bits_whatever_is_around_it(implementation, interpret):
    degrees = [50, 7, 0, 100, 31]
    csr = random_csr(8, degrees=degrees)
    h = _features(csr, 6)
    ell = presample(csr, 40, strategy="fastrand")
    order = np.asarray([3, 1, 4, 0, 2])
    turned = jax.tree.map(lambda a: a[order], ell)
    ours, theirs = (sampled(e, h, implementation=implementation, interpret=interpret) for e in (ell, turned))
    assert np.array_equal(np.asarray(ours)[order], theirs)


@pytest.mark.default_cases("pallas_gpu")
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_graphs_without_rows_edges_or_features_give_zeros(implementation):
    for rows, columns, features in itertools.product((0, 3), (0, 4), (0, 2)):
        csr = random_csr(0, degrees=[0] * rows, columns=max(columns, 1))
        csr = dataclasses.replace(csr, shape=(rows, columns))
        out = sampled_spmm(csr, np.ones((columns, features)), 4, implementation=implementation, interpret=True)
        assert out.shape == (rows, features)
        assert not out.any()


@pytest.mark.default_cases("pallas_gpu")
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_float64_is_refused_by_a_kernel(implementation, x64):
    csr = random_csr(0, degrees=[3])
    h = jnp.asarray(_features(csr, 2), jnp.float64)
    for run in (lambda **o: spmm(sparse_plan(csr), h, **o), lambda **o: sampled_spmm(csr, h, 2, **o)):
        with pytest.raises(UnsupportedError, match="takes float32, bfloat16, float16 and int8 features; got float64"):
            run(implementation=implementation, interpret=True)


def test_kernels_run_where_their_chip_is_or_interpreted():
    csr = random_csr(0, degrees=[3])
    h = _features(csr, 2)
    for implementation in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(UnsupportedError, match="got cpu"):
            sampled_spmm(csr, h, 2, implementation=implementation)
    for implementation in ("xla", None):
        with pytest.raises(UserError, match="interpret is for the kernels pallas_gpu and pallas_tpu"):
            spmm(sparse_plan(csr), h, implementation=implementation, interpret=True)
