"""Several new tokens a row and their pages: jax's kernel, interpreted, gives what dense attention does."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from scalejax import compat
from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.paged_attention import ragged

PAGE, WIDTH = 16, 128
ROWS = ((37, 20), (0, 1), (0, 0), (16, 32), (60, 3))
"""(tokens before, new ones) of each row; one has none."""


def problem(heads=(4, 2), dtype=jnp.float32, columns=32, gone=0, seed=0):
    """Arguments of `ragged.attention`; what no row has is 7 in keys and values, of the first `gone` units as well."""
    rng = np.random.default_rng(seed)
    queries, kv_heads = heads
    units = [-(-(before + new) // PAGE) for before, new in ROWS]
    pages = np.full((sum(units) + 2, PAGE, 2 * kv_heads, WIDTH), 7.0)
    free, most = iter(rng.permutation(sum(units))), max(units)
    table, first = np.full((len(ROWS), most), sum(units)), np.zeros(len(ROWS))
    positions = np.full((len(ROWS), columns), -1)
    for row, (before, new) in enumerate(ROWS):
        positions[row, :new] = before + np.arange(new)
        first[row] = min(gone, before // PAGE)
        for unit in range(units[row]):
            own = next(free)
            if unit >= first[row]:
                count = min(PAGE, before + new - unit * PAGE)
                pages[own, :count] = rng.normal(size=(count, 2 * kv_heads, WIDTH))
                table[row, int(unit - first[row])] = own
    q = rng.normal(size=(len(ROWS), columns, queries, WIDTH))
    numbers = (jnp.asarray(x, jnp.int32) for x in (table, positions, first))
    return jnp.asarray(q, dtype), jnp.asarray(pages, dtype), *numbers


def gathered(q, pages, table, positions, first, window):
    found = pages[table].astype(jnp.float32)
    keys, values = (found[:, :, :, which::2].reshape(len(ROWS), -1, pages.shape[2] // 2, WIDTH) for which in range(2))
    places = PAGE * first[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
    out, _ = flash_attention(
        q.astype(jnp.float32), keys, values, query_positions=positions, key_positions=places, window=window
    )
    return out


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel run as XLA, which takes it but for stores with a mask; the simulator of TPUs does not take it."""

    def store(ref, value, mask):
        ref[...] = jnp.where(mask, value, ref[...])

    def call(*args, **options):
        return pl.pallas_call(*args, interpret=True, **options)

    monkeypatch.setattr(kernel, "pl", types.SimpleNamespace(**vars(pl) | {"pallas_call": call}))
    monkeypatch.setattr(kernel, "pltpu", types.SimpleNamespace(**vars(pltpu) | {"store": store}))

    def run(*arguments, window):
        return jax.jit(lambda *given: ragged.attention(*given, window=window, scale=WIDTH**-0.5))(*arguments)

    yield run
    kernel.ragged_paged_attention.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dtype", "window", "gone"),
    [
        ((4, 2), jnp.float32, None, 0),
        ((4, 4), jnp.bfloat16, 20, 2),
        ((8, 2), jnp.float32, 20, 2),
        ((4, 1), jnp.bfloat16, None, 0),
    ],
)
def test_it_is_dense_attention(interpreted, heads, dtype, window, gone):
    arguments = problem(heads, dtype, gone=gone)
    got, want = interpreted(*arguments, window=window), gathered(*arguments, window)
    assert got.dtype == dtype
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance)
    assert not np.asarray(got, np.float32)[np.asarray(arguments[3]) < 0].any()


@pytest.mark.slow
def test_one_row_is_taken_as_it_is(interpreted):
    q, pages, table, positions, first = problem()
    arguments = q[:1], pages, table[:1], positions[:1], first[:1]
    want = gathered(q, pages, table, positions, first, None)[:1]
    np.testing.assert_allclose(interpreted(*arguments, window=None), want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_what_is_handed_to_jax_is_what_its_reference_takes(monkeypatch):
    """Without the kernel: rows, lengths and queries behind one another, as jax defines them."""

    def definition(q, pages, lengths, table, starts, *, scale, window, **_):
        number = np.asarray([lengths.shape[0]], np.int32)
        out = kernel.ref_ragged_paged_attention(
            q, pages, lengths, table, starts, number, sm_scale=scale, sliding_window=window
        )
        return jnp.pad(out, ((0, q.shape[0] - out.shape[0]), (0, 0), (0, 0)))

    monkeypatch.setattr(compat, "ragged_paged_attention", definition)
    arguments = problem(gone=1)
    got = ragged.attention(*arguments, window=20, scale=WIDTH**-0.5)
    np.testing.assert_allclose(got, gathered(*arguments, 20), rtol=2e-5, atol=2e-5)


def test_lengths_are_the_tokens_that_a_row_has_in_the_pages_of_its_table(monkeypatch):
    """In tokens, of which the pages before the first of the table have their share; a row without tokens has one."""
    handed = []

    def note(q, pages, lengths, table, starts, **_):
        handed.extend((lengths, starts))
        return q

    monkeypatch.setattr(compat, "ragged_paged_attention", note)
    q, pages, table, positions, first = problem(gone=2)

    @jax.jit
    def lengths_and_starts(positions, first):
        ragged.attention(q, pages, table, positions, first, window=20, scale=1.0)
        return handed

    lengths, starts = lengths_and_starts(positions, first)
    assert np.asarray(first).max() == 2
    counts = [max(new, 1) for _, new in ROWS]
    begun = [max(before - PAGE * min(2, before // PAGE), 0) if new else 0 for before, new in ROWS]
    np.testing.assert_array_equal(lengths, np.add(begun, counts))
    np.testing.assert_array_equal(starts, np.cumsum([0, *counts]))


def test_what_it_lacks():
    q, pages, *_ = problem()
    assert ragged.lacks(q, pages) is None
    assert "heads that 128 divides; got 64" in ragged.lacks(q[..., :64], pages[..., :64])
    assert "pages of the same; got float32 and int8" in ragged.lacks(q, pages.astype(jnp.int8))
    assert "takes pages of [page, 2 K, D]" in ragged.lacks(q, pages[:, None])
    assert "2 K, that fill tiles of memory; got 6" in ragged.lacks(q, jnp.zeros((2, 16, 6, 128)))
    assert "takes groups of 8 heads of queries a tile" in ragged.lacks(
        jnp.zeros((1, 8, 16, 128)), jnp.zeros((2, 16, 32, 128))
    )
    assert "at most 512 tokens; got 1024" in ragged.lacks(q, jnp.zeros((2, 1024, 4, 128)))
    assert not ragged.suits(q, pages)  # on a CPU
