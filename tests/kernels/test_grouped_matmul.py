"""Grouped products equal one product a group in NumPy, with gradients, whatever the groups; Pallas is interpreted."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering

from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels.grouped_matmul import grouped_gated_mlp, grouped_matmul, tiles

INNER, OUTER, BLOCK = 6, 5, 4
SIZES = {
    "even": [8, 8, 8, 8],
    "some are empty": [0, 20, 0, 12],
    "one has all": [0, 0, 0, 32],
    "rows are left": [4, 0, 8, 4],
    "none": [0, 0, 0, 0],
}
IMPLEMENTATIONS = ["reference", "blocks", "ragged_dot"]
KERNELS = ["pallas_tpu", "pallas_gpu", "megablox"]

# Groups that begin and end inside tiles of 16 rows.
UNEVEN = {
    "inside tiles": [7, 1, 5, 20, 16, 3],
    "some are empty": [0, 37, 0, 0, 15, 0],
    "one has all": [0, 0, 52, 0, 0, 0],
    "rows are left": [3, 0, 17, 0, 6, 0],
    "none": [0, 0, 0, 0, 0, 0],
}


def case(sizes, dtype=np.float64, rows=32, inner=INNER, outer=OUTER):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((rows, inner)), rng.standard_normal((len(sizes), inner, outer))
    g = rng.standard_normal((rows, outer))
    return x.astype(dtype), weights.astype(dtype), np.asarray(sizes, np.int32), g.astype(dtype)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of everything, turns of a loop in each, and parts of tiles at each end."""
    one = tiles.TpuTiles(rows=32, columns=128, depth_bytes=512, chunk=16, vmem_bytes=2**24)
    two = tiles.GpuTiles(rows=16, columns=64, depth=64, warps=4, stages=2)
    monkeypatch.setattr(tiles, "TPU", {"": one})
    monkeypatch.setattr(tiles, "GPU", {"": tiles.GpuSizes(one=two, two=two, together=2)})


def literal_mlp(x, gate, up, down, sizes, g):
    """A gated MLP, and gradients of x, gate, up and down, group by group."""
    a, b = (literal(x, w, sizes, np.zeros((len(x), gate.shape[2])))[0] for w in (gate, up))
    share = 1 / (1 + np.exp(-a))
    y, to_hidden, to_down = literal(a * share * b, down, sizes, g)
    _, x_of_gate, to_gate = literal(x, gate, sizes, to_hidden * b * share * (1 + a * (1 - share)))
    _, x_of_up, to_up = literal(x, up, sizes, to_hidden * a * share)
    return y, x_of_gate + x_of_up, to_gate, to_up, to_down


def literal(x, weights, sizes, g):
    """Product, and gradients of x and weights, group by group."""
    y, to_x, to_weights = np.zeros_like(g), np.zeros_like(x), np.zeros_like(weights)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        y[rows], to_x[rows] = x[rows] @ weights[group], g[rows] @ weights[group].T
        to_weights[group] = x[rows].T @ g[rows]
        begin += size
    return y, to_x, to_weights


@pytest.mark.default_cases(first=4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients_are_those_of_each_group(x64, sizes, implementation):
    x, weights, sizes, g = case(SIZES[sizes])
    run = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), block=BLOCK, implementation=implementation))
    y, back = jax.vjp(run, jnp.asarray(x), jnp.asarray(weights))
    for found, expected in zip((y, *back(jnp.asarray(g))), literal(x, weights, sizes, g), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def mlp_case(sizes, dtype=np.float64, rows=32, inner=INNER, outer=OUTER):
    """x, gate, up, down, sizes and the cotangent of the result."""
    x, gate, sizes, _ = case(sizes, np.float64, rows, inner, outer)
    rng = np.random.default_rng(1)
    up, down, g = (rng.standard_normal(shape) for shape in (gate.shape, gate.swapaxes(1, 2).shape, x.shape))
    return *(jnp.asarray(a, dtype) for a in (x, gate, up, down)), sizes, jnp.asarray(g, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_gated_mlps_and_gradients_are_those_of_each_group(x64, sizes, implementation):
    *operands, sizes, g = mlp_case(SIZES[sizes])
    run = jax.jit(lambda *a: grouped_gated_mlp(*a, jnp.asarray(sizes), block=BLOCK, implementation=implementation))
    y, back = jax.vjp(run, *operands)
    expected = literal_mlp(*(np.asarray(a) for a in operands), sizes, np.asarray(g))
    for found, want in zip((y, *back(g)), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-12)


def near(found, expected, tolerance):
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert np.abs(found - expected).max() <= tolerance * max(1, np.abs(expected).max())


@functools.cache
def programs(implementation):
    """A product and a gated MLP with their gradients, compiled once for groups of any sizes."""
    how = {"implementation": implementation, "interpret": True}

    def product(x, weights, sizes, g):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **how), x, weights)
        return y, *back(g)

    def mlp(*given):
        *operands, sizes, g = given
        y, back = jax.vjp(lambda *a: grouped_gated_mlp(*a, sizes, **how), *operands)
        return y, *back(g), grouped_gated_mlp(*operands, sizes, **how)

    return jax.jit(product), jax.jit(mlp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "implementation", "dtype"), covering([*itertools.product(UNEVEN, KERNELS, ("float32", "bfloat16"))])
)
def test_kernels_equal_the_loop_whatever_the_groups(small_tiles, sizes, implementation, dtype):
    *operands, sizes, g = mlp_case(UNEVEN[sizes], dtype, rows=52, inner=200, outer=140)
    operands = [(a / 14).astype(dtype) for a in operands]
    wide = [np.asarray(a, np.float64) for a in operands]
    tolerance = 1e-6 if dtype == "float32" else 2**-7
    product, mlp = programs(implementation)

    g_hidden = jnp.asarray(np.random.default_rng(2).standard_normal((52, 140)), dtype)
    expected = literal(*wide[:2], sizes, np.asarray(g_hidden, np.float64))
    for found, want in zip(product(*operands[:2], sizes, g_hidden), expected, strict=True):
        assert found.dtype == dtype
        near(found, want, tolerance)

    *results, alone = mlp(*operands, sizes, g)
    near(alone, results[0], 0)
    # In 16 bits what is between the layers is rounded, and the products that gradients use.
    for found, want in zip(results, literal_mlp(*wide, sizes, np.asarray(g, np.float64)), strict=True):
        assert found.dtype == dtype
        near(found, want, 2 * tolerance)


@pytest.mark.parametrize("implementation", ["blocks", "ragged_dot"])
def test_half_precision_is_summed_in_float32(implementation):
    x, weights, sizes, g = case([4096, 0, 4096], np.float32, rows=8192)
    x, weights, g = (jnp.asarray(a, jnp.bfloat16) for a in (x, weights, np.ones_like(g)))
    run = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), block=64, implementation=implementation))
    y, back = jax.vjp(run, x, weights)
    wide = [np.asarray(a, np.float64) for a in (x, weights, g)]
    expected = literal(*wide[:2], sizes, wide[2])
    for found, want in zip((y, *back(g)), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=2**-7, atol=0.02)


def device(kind, platform):
    described = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=described))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("kind", "platform", "narrow", "wide"),
    [
        ("cpu", "cpu", {"scan"}, {"scan"}),
        ("TPU v5", "tpu", {"pallas_call", "scan"}, {"ragged_dot_general"}),  # a loop inside of the kernel
        ("NVIDIA H100 80GB HBM3", "cuda", {"pallas_call"}, {"ragged_dot_general"}),
    ],
)
def test_each_platform_takes_its_own_form(x64, kind, platform, narrow, wide, dtype):
    x, weights, sizes, _ = case(SIZES["even"], dtype)

    def loss(x, weights):
        y = grouped_gated_mlp(x, weights, weights, weights.swapaxes(1, 2), sizes, block=BLOCK)
        return (y @ grouped_matmul(x, weights, sizes, block=BLOCK)[: y.shape[1]]).sum()

    with device(kind, platform):
        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weights))
    forms = {"scan", "pallas_call", "ragged_dot_general"}
    assert {form for form in forms if f" {form}[" in text} == (narrow if dtype == np.float32 else wide)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_gate_and_up_are_one_kernel_in_each_direction(implementation):
    *operands, sizes, _ = mlp_case(SIZES["even"], np.float32)

    def loss(*operands):
        return grouped_gated_mlp(*operands, sizes, implementation=implementation).sum()

    forward = str(jax.make_jaxpr(loss)(*operands))
    both = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*operands))
    # Two forward, of the four gradients those of gate and up together.
    assert [text.count("pallas_call[") for text in (forward, both)] == [2, 6]


def test_kernels_refuse_what_they_lack(x64):
    x, weights, sizes, _ = case(SIZES["even"])
    for name in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(UnsupportedError, match=r"got float64\. Take implementation=None"):
            grouped_matmul(x, weights, sizes, implementation=name)


def test_tokamax_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    x, weights, sizes, _ = case(SIZES["even"], np.float32)
    with pytest.raises(UserError, match=r"needs tokamax.*scalejax\[tokamax\]"):
        grouped_matmul(x, weights, sizes, implementation="tokamax")


@pytest.mark.peers
def test_tokamax_equals_the_loop():
    pytest.importorskip("tokamax")
    x, weights, sizes, g = case(UNEVEN["inside tiles"], np.float32, rows=52)
    run = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), implementation="tokamax"))
    y, back = jax.vjp(run, jnp.asarray(x), jnp.asarray(weights))
    for found, expected in zip((y, *back(jnp.asarray(g))), literal(x, weights, sizes, g), strict=True):
        near(found, expected, 1e-6)


@pytest.mark.parametrize("rows", [0, 8])
def test_nothing_to_multiply_gives_zeros(rows):
    x, weights, sizes = np.zeros((rows, 0), np.float32), np.zeros((2, 0, 3), np.float32), np.zeros(2, np.int32)
    np.testing.assert_array_equal(grouped_matmul(x, weights, sizes), np.zeros((rows, 3)))
    x, down = np.zeros((0, 4), np.float32), np.zeros((2, rows, 4), np.float32)
    gate = down.swapaxes(1, 2)
    np.testing.assert_array_equal(grouped_gated_mlp(x, gate, gate, down, sizes), np.zeros((0, 4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 5}, "block must divide the 32 rows of x; got 5"),
        ({"block": 0}, "block must divide"),
        ({"x": np.zeros((32, INNER + 1), np.float32)}, r"must be \[R, K\], \[n, K, N\] and \[n\]"),
        ({"sizes": np.zeros(3, np.int32)}, r"got .* and \(3,\)"),
        ({"x": np.zeros((32, INNER), jnp.bfloat16)}, "of one float dtype; got bfloat16 and float32"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    x, weights, sizes, _ = case(SIZES["even"], np.float32)
    given = {"x": x, "weights": weights, "sizes": sizes, "block": BLOCK, **change}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up": np.zeros((4, INNER, OUTER + 1), np.float32)}, r"must be \[R, E\], \[n, E, F\], .* \(4, 6, 6\)"),
        ({"down": np.zeros((4, INNER, OUTER), np.float32)}, r"\[n, F, E\] and \[n\]; got .* \(4, 6, 5\) and \(4,\)"),
        ({"down": np.zeros((4, OUTER, INNER), jnp.bfloat16)}, "got float32 and float32, float32, bfloat16"),
        ({"block": 5}, "grouped_gated_mlp: block must divide the 32 rows of x; got 5"),
    ],
)
def test_mlps_that_do_not_go_together_are_refused(change, message):
    names = ("x", "gate", "up", "down", "sizes")
    given = dict(zip(names, mlp_case(SIZES["even"], np.float32), strict=False))
    with pytest.raises(ValueError, match=message):
        grouped_gated_mlp(**{**given, **change})


def test_an_unknown_implementation_names_the_others():
    x, weights, sizes, _ = case(SIZES["even"], np.float32)
    with pytest.raises((ValueError, UserError), match="ragged_dot"):
        grouped_matmul(x, weights, sizes, implementation="cublas")
