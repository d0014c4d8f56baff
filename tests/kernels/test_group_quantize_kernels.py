"""Kernels of integer groups under interpret mode: to the bit what XLA makes of the same numbers and seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels import group_quantize
from scalejax.kernels.group_quantize import IntGroups, pallas_gpu, pallas_tpu

BACKENDS = ["pallas_gpu", "pallas_tpu"]
SEED = np.array([3, 9], np.uint32)
SLOW = pytest.mark.slow
FOUR, EIGHT = IntGroups(bits=4, size=128), IntGroups(bits=8, size=256)
LONG = IntGroups(bits=4, size=2048)


def numbers(*shape):
    """Heavy tails, a NaN, an infinity and a group of zeros."""
    x = np.random.default_rng(0).standard_t(3, shape).astype(np.float32)
    x[0, 5], x[-1, -1] = np.nan, np.inf
    x[0, -128:] = 0
    return jnp.asarray(x)


def assert_same(run, backend):
    """`run(**how)` by XLA and by the kernel."""
    ours = jax.tree.leaves(run(implementation=backend, interpret=True))
    theirs = jax.tree.leaves(run(implementation="xla"))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        words = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
        a, b = np.asarray(a), np.asarray(b)
        number = a == a  # a NaN that a GPU makes has other bits than XLA's
        np.testing.assert_array_equal(number, b == b)
        np.testing.assert_array_equal(a.view(words)[number], b.view(words)[number])


def groups_of(x, format):
    return group_quantize.quantize(x, format, SEED, implementation="xla")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("format", "count", "seed", "transform"),
    [
        (FOUR, 3, SEED, "hadamard"),  # of two rows, so that a byte's row has groups of both
        pytest.param(FOUR, 140, None, "none", marks=SLOW),  # several tiles
        pytest.param(EIGHT, 5, SEED, "none", marks=SLOW),
        pytest.param(EIGHT, 9, None, "hadamard", marks=SLOW),
        pytest.param(LONG, 3, SEED, "hadamard", marks=SLOW),
        pytest.param(LONG, 2, None, "none", marks=SLOW),
    ],
)
def test_quantizing(backend, format, count, seed, transform):
    x = numbers(2, count * format.size)
    assert_same(lambda **how: group_quantize.quantize(x, format, seed, transform=transform, **how), backend)


def test_no_two_steps_of_a_tpu_draw_alike(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "_ROWS", 128)
    x = jnp.tile(numbers(1, 128 * 128)[0], 2)  # of each of two steps the same
    assert_same(lambda **how: group_quantize.quantize(x, FOUR, SEED, **how), "pallas_tpu")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("format", "count", "transform"),
    [
        (FOUR, 3, "hadamard"),
        *(pytest.param(f, 3, t, marks=SLOW) for f, t in ((FOUR, "none"), (EIGHT, "hadamard"), (LONG, "none"))),
    ],
)
def test_summing_over_devices(backend, format, count, transform):
    groups = groups_of(numbers(3, count * format.size), format)
    assert_same(lambda **how: group_quantize.dequantize_sum(groups, format, transform=transform, **how), backend)


@SLOW
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "to"), [(EIGHT, FOUR), (FOUR, EIGHT), (EIGHT, IntGroups(bits=4, size=512))])
def test_summing_and_quantizing_again(backend, format, to):
    groups = groups_of(numbers(3, 1024), format)
    for seed in (SEED, None):
        assert_same(lambda seed=seed, **how: group_quantize.requantize(groups, format, to, seed, **how), backend)


@SLOW
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "dtype"), [(FOUR, "float32"), (LONG, "bfloat16"), (EIGHT, "bfloat16")])
def test_adding_to_a_copy(backend, format, dtype):
    groups = groups_of(numbers(2, 3 * format.size), format)
    base = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3 * format.size)), dtype)
    assert_same(lambda **how: group_quantize.dequantize_add(base, groups, format, **how), backend)
    assert_same(lambda **how: group_quantize.dequantize(groups, format, **how), backend)


@SLOW
@pytest.mark.parametrize(("bits", "size"), [(4, 64), (8, 32), (4, 8192)])
def test_the_least_and_the_largest_groups_of_a_gpu(bits, size, monkeypatch):
    """And rows of which several are loaded at a time, with one left over."""
    monkeypatch.setattr(pallas_gpu, "BLOCKS", pallas_gpu.GpuBlocks(elements=2048, warps=4, unroll=2))
    jax.clear_caches()  # sizes are no arguments
    format, x = IntGroups(bits=bits, size=size), numbers(3, 2 * 8192)
    assert_same(lambda **how: group_quantize.quantize(x, format, SEED, transform="hadamard", **how), "pallas_gpu")
    groups = groups_of(x, format)
    assert_same(lambda **how: group_quantize.dequantize_sum(groups, format, **how), "pallas_gpu")
    to = IntGroups(bits=12 - bits, size=256)
    assert_same(lambda **how: group_quantize.requantize(groups, format, to, SEED, **how), "pallas_gpu")
    monkeypatch.undo()
    jax.clear_caches()


def test_requantizing_and_adding_are_what_their_names_say():
    groups = groups_of(numbers(3, 1024), EIGHT)
    total = np.asarray(sum(np.asarray(group_quantize.dequantize(groups, EIGHT), np.float64)))
    found = group_quantize.dequantize(group_quantize.requantize(groups, EIGHT, FOUR), FOUR)
    finite = np.isfinite(total)
    step = np.repeat(np.abs(np.where(finite, total, 0)).reshape(-1, 128).max(1) / 7, 128)
    assert finite.sum() > 500
    assert np.all(np.abs(found - total)[finite] <= step[finite] * 0.5001)
    base = np.random.default_rng(1).standard_normal((3, 1024)).astype(np.float32)
    moved = np.asarray(group_quantize.dequantize_add(jnp.asarray(base), groups, EIGHT))
    np.testing.assert_allclose(
        moved, base.astype(np.float64) + np.asarray(group_quantize.dequantize(groups, EIGHT), np.float64), rtol=1e-6
    )


def test_the_sum_of_what_was_transformed_is_transformed_back():
    x = np.random.default_rng(2).standard_t(3, (4, 512)).astype(np.float32)
    groups = group_quantize.quantize(jnp.asarray(x), IntGroups(bits=8, size=32), transform="hadamard")
    found = group_quantize.dequantize_sum(groups, IntGroups(bits=8, size=32), transform="hadamard")
    exact = x.astype(np.float64).sum(0)
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_kernel_lacks_is_said_and_nothing_else_is_taken(backend):
    format = IntGroups(bits=4, size=96)
    with pytest.raises(UnsupportedError, match="group sizes"):
        group_quantize.quantize(jnp.zeros(96), format, implementation=backend, interpret=True)
    assert group_quantize.quantize(jnp.zeros(96), format).codes.shape == (48,)


def test_what_cannot_be_added_or_passed_on_is_refused():
    groups = group_quantize.quantize(jnp.zeros(256), FOUR)
    with pytest.raises(UserError, match=r"base must be float32 or bfloat16 .* \[256\]; got float16\[256\]"):
        group_quantize.dequantize_add(jnp.zeros(256, jnp.float16), groups, FOUR)
    with pytest.raises(UserError, match="got float32\\[128\\]"):
        group_quantize.dequantize_add(jnp.zeros(128), groups, FOUR)
    one = group_quantize.quantize(jnp.zeros((1, 256)), FOUR)
    with pytest.raises(UserError, match="groups have 512 values"):
        group_quantize.requantize(one, FOUR, IntGroups(bits=4, size=512))
    with pytest.raises(UserError, match="implementation must be one of"):
        group_quantize.dequantize(groups, FOUR, implementation="triton")
