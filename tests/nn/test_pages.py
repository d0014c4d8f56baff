"""A cache of pages against dense attention over the whole row, whatever lies in other pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import Rows

from scalejax import compat, nn
from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.paged_attention import ragged
from scalejax.nn.pages import EMPTY, KV_FORMATS
from scalejax.parallel.mesh import MeshShape, make_mesh

LENGTHS = (37, 9, 20)
HEADS, GROUPS, WIDTH = 6, 2, 16


dense = jax.jit(flash_attention, static_argnames="window")


def projections():
    shapes, rng = ((3, 40, HEADS, WIDTH), (3, 40, GROUPS, WIDTH), (3, 40, GROUPS, WIDTH)), np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def empty(pages, layers=2):
    return nn.PagedCache.empty(pages, layers=layers, kv_heads=GROUPS, width=WIDTH, dtype=jnp.float32)


@jax.jit
def extend(cache, q, k, v, reading):
    """Both layers, the first with other keys."""
    cache, reading = cache.admit(reading)
    _, cache = cache.extend(jnp.int32(0), q, k + 1, v - 1, reading)
    return cache.extend(jnp.int32(1), q, k, v, reading)


@jax.jit
def admit(cache, reading):
    return cache.admit(reading)


def read_in_pieces(cache, rows, arrays, pieces):
    """Outputs of every row, and the cache; pieces are (counts, width)."""
    out, at = [[] for _ in LENGTHS], np.zeros(3, int)
    for counts, width in pieces:
        places = np.minimum(at[:, None] + np.arange(width), 39)
        cut = [x[np.arange(3)[:, None], places] for x in arrays]
        got, cache = extend(cache, *cut, rows.reading(counts, width))
        for b, count in enumerate(counts):
            out[b].append(np.asarray(got)[b, :count])
        at += counts
    assert tuple(at) == LENGTHS
    return [np.concatenate(parts) for parts in out], cache


PIECES = [((16, 8, 16), 16), ((16, 0, 2), 16), ((1, 1, 1), 1), ((3, 0, 0), 16), ((1, 0, 1), 1)]
SHORT_FIRST = [((8, 8, 8), 8), ((16, 0, 9), 16), ((1, 1, 1), 1), ((11, 0, 1), 16), ((1, 0, 1), 1)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [8, 16])
def test_pieces_and_single_tokens_equal_dense_attention(page):
    arrays = projections()
    want, _ = dense(*arrays)
    # Rows begin where others have been, and what these left is not seen.
    rows = Rows(3, 40, page)
    before, _ = admit(empty(rows.pages), Rows(3, 40, page).reading((40, 40, 40), 40))
    stale = dataclasses.replace(before, kv=before.kv + 7)
    got, cache = read_in_pieces(stale, rows, arrays, SHORT_FIRST)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[b], want[b, :length], atol=2e-6)
    seen = np.asarray(cache.positions)[0, rows.table].reshape(3, -1)
    for b, length in enumerate(LENGTHS):
        assert seen[b, :length].tolist() == list(range(length))
        begun = -(-length // page) * page
        assert (seen[b, length:begun] == EMPTY).all()


@functools.cache
def as_cpus_read(kept="compute"):
    """Outputs of every row, and the cache."""
    pages = dataclasses.replace(Rows(3, 40, 8).pages, format=kept)
    return read_in_pieces(empty(pages), Rows(3, 40, 8), projections(), PIECES)


@pytest.mark.slow
@pytest.mark.parametrize("kept", KV_FORMATS)
def test_tokens_first_gives_the_same(kept, monkeypatch):
    """What chips other than CPUs have: another order of the arrays, and the kernel's signature for single tokens."""
    (want, _), pages = as_cpus_read(kept), dataclasses.replace(Rows(3, 40, 8).pages, format=kept)
    monkeypatch.setattr(compat, "platform", lambda: "other")
    jax.clear_caches()
    cache = empty(pages)
    assert cache.kv.shape == (2, 15, 8, 2 * GROUPS, WIDTH)
    got, _ = read_in_pieces(cache, Rows(3, 40, 8), projections(), PIECES)
    jax.clear_caches()
    for b in range(3):
        np.testing.assert_allclose(got[b], want[b], atol=2e-6)


@pytest.mark.slow
def test_pieces_through_a_kernel_that_knows_no_positions_are_the_same(monkeypatch):
    """What TPUs have: pages of all layers, those of a row in the order of its tokens, its queries the last of them."""
    (want, _), other = as_cpus_read(), Rows(3, 40, 8)
    calls = []

    def definition(q, pages, lengths, table, starts, *, scale, window, **_):
        calls.append(q.shape)
        number = jnp.arange(q.shape[0], dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(starts, number, side="right") - 1, lengths.shape[0] - 1)
        place = lengths[row] - starts[row + 1] + number
        found = pages[table[row]].reshape(q.shape[0], -1, *pages.shape[2:])
        places = jnp.broadcast_to(jnp.arange(found.shape[1], dtype=jnp.int32)[None], found.shape[:2])
        positions = {"query_positions": place[:, None], "key_positions": places}
        out, _ = flash_attention(
            q[:, None], found[:, :, 0::2], found[:, :, 1::2], **positions, window=window, scale=scale
        )
        return out[:, 0]

    monkeypatch.setattr(compat, "platform", lambda: "other")
    monkeypatch.setattr(compat, "ragged_paged_attention", definition)
    monkeypatch.setattr(ragged, "suits", lambda *_: True)
    jax.clear_caches()
    got, _ = read_in_pieces(empty(other.pages), other, projections(), PIECES)
    jax.clear_caches()
    assert calls
    for b in range(3):
        np.testing.assert_allclose(got[b], want[b], atol=2e-6)


def test_a_table_may_name_pages_of_others_behind_those_of_a_row():
    """A wide table for a long row makes short rows name pages that are not theirs."""
    arrays, rows = projections(), Rows(3, 40, 8)
    want, _ = dense(*arrays)
    of_long = rows.table[0].copy()
    rows.table[1, 2:] = of_long[:3]  # positions 0 to 23 of another row, as if they were 16 to 39 of this
    rows.table[2, 3:] = of_long[1:3]
    got, _ = read_in_pieces(empty(rows.pages), rows, arrays, PIECES)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[b], want[b, :length], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 5, 17])
def test_windows(window):
    arrays, rows = projections(), Rows(3, 40, 8)
    want, _ = dense(*arrays, window=window)

    @jax.jit
    def step(cache, q, k, v, reading):
        cache, reading = cache.admit(reading)
        return cache.extend(jnp.int32(1), q, k, v, reading, window=window)

    got, cache = step(empty(rows.pages), *(x[:, :24] for x in arrays), rows.reading((24, 24, 24), 24))
    np.testing.assert_allclose(got, want[:, :24], atol=2e-6)
    got, _ = step(cache, *(x[:, 24:25] for x in arrays), rows.reading((1, 1, 1), 1))
    np.testing.assert_allclose(got, want[:, 24:25], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kept", KV_FORMATS)
def test_stored_formats_are_as_near_as_their_steps(kept):
    arrays, rows = projections(), Rows(3, 40, 8)
    want, _ = dense(*arrays)
    pages = dataclasses.replace(rows.pages, format=kept)
    _, plain = extend(empty(rows.pages), *arrays, Rows(3, 40, 8).reading((40, 40, 40), 40))
    cache = empty(pages).with_static_scales(plain)
    got, cache = read_in_pieces(cache, rows, arrays, PIECES)
    worst = max(np.abs(got[b] - want[b, :length]).max() for b, length in enumerate(LENGTHS))
    # int8: 1 / 254 of the largest of a head; float8: 1 / 16 of each.
    low, high = {"compute": (0, 2e-6), "int8": (1e-4, 0.03), "float8": (1e-3, 0.2)}[kept]
    assert low <= worst <= high
    assert cache.kv.dtype == {"compute": jnp.float32, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}[kept]


def test_what_float8_cannot_hold_is_not_something_else():
    rows = Rows(1, 8, 8)
    cache = empty(dataclasses.replace(rows.pages, format="float8"))
    big = jnp.full((1, 1, GROUPS, WIDTH), 1e4)
    out, _ = extend(cache, jnp.ones((1, 1, HEADS, WIDTH)), big, big, rows.reading([1], 1))
    assert np.isnan(out).all()


def test_a_copy_of_a_page_is_one():
    rows, (_, cache) = Rows(3, 40, 8), as_cpus_read()
    source, target, none = rows.table[0, 1], rows.table[1, 4], rows.pages.pages
    copied = cache.copied(jnp.array([[source, 0]]), jnp.array([[target, none]]))
    changed = [i for i in range(none) if (np.asarray(copied.kv[:, i]) != np.asarray(cache.kv[:, i])).any()]
    assert changed == [target]
    np.testing.assert_array_equal(copied.kv[:, target], cache.kv[:, source])
    np.testing.assert_array_equal(copied.positions[:, target], cache.positions[:, source])


def test_later_tokens_of_a_unit_that_has_not_begun_reach_nobody_even_if_they_are_not_finite():
    """Its page was of the same unit of another row, and so its positions are those that this row will have there."""
    rows = Rows(2, 16, 8)
    q, k, v = (a[:2, :8] for a in projections())

    @jax.jit
    def read(cache):
        cache, reading = cache.admit(rows.reading([8, 3], 8))
        return cache.extend(jnp.int32(0), q, k, v, reading)[0]

    clean = empty(rows.pages)
    before = np.array(clean.positions)
    for table in rows.table:
        before[:, table] = np.arange(8 * len(table)).reshape(-1, 8)
    used = dataclasses.replace(clean, kv=jnp.full_like(clean.kv, jnp.nan), positions=jnp.asarray(before))
    np.testing.assert_array_equal(read(used)[1, :3], read(clean)[1, :3])


@pytest.mark.slow
@pytest.mark.parametrize("kept", KV_FORMATS)
def test_what_a_unit_had_before_reaches_nobody_even_if_it_is_not_finite(kept):
    shape = dataclasses.replace(Rows(2, 16, 8).pages, format=kept)
    q, k, v = (a[:2, :8] for a in projections())

    @jax.jit
    def read(cache, k, v):
        cache, reading = cache.admit(Rows(2, 16, 8).reading([8, 3], 8))
        return cache.extend(jnp.int32(0), q, k, v, reading)

    bad = dataclasses.replace(empty(shape), kv=jnp.full_like(empty(shape).kv, jnp.nan if kept != "int8" else 1))
    if kept == "int8":
        bad = dataclasses.replace(bad, scales=jnp.full_like(bad.scales, jnp.nan))
    np.testing.assert_array_equal(read(bad, k, v)[0][:, :3], read(empty(shape), k, v)[0][:, :3])
    # Kernels read pages where they lie: those that begin are zero, whatever columns their first tokens stand in.
    reading = Rows(2, 16, 8).reading([12, 3], 12)
    begun = [Rows(2, 16, 8).table[0, 0], Rows(2, 16, 8).table[0, 1], Rows(2, 16, 8).table[1, 0]]
    shuffled = dataclasses.replace(reading, positions=reading.positions[:, ::-1])
    kv = np.asarray(jax.jit(type(bad).emptied)(bad, shuffled).kv, np.float32)
    assert not kv[:, begun].any()
    other = [page for page in range(shape.pages) if page not in begun]
    np.testing.assert_array_equal(kv[:, other], np.asarray(bad.kv, np.float32)[:, other])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}])
def test_a_mesh_changes_nothing(mesh):
    """Heads over `tensor`, whole where they do not divide."""
    arrays, rows = projections(), Rows(3, 40, 8)
    want, _ = dense(*arrays)
    devices = make_mesh(MeshShape(fsdp=1, **mesh), jax.devices()[: mesh["tensor"]])
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh), jax.set_mesh(devices):
        got, _ = read_in_pieces(empty(rows.pages), rows, arrays, [*PIECES[:2], ((5, 1, 2), 16)])
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[b], want[b, :length], atol=2e-6)
