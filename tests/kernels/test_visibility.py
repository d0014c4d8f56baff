"""What is said of pairs of blocks, against the masks themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flash_attention_cases import CASES, Case

from scalejax.kernels.flash_attention import api, reference
from scalejax.kernels.flash_attention.visibility import HIDDEN, PARTLY, WHOLE, stretches


def _of(case):
    masks = {n: jnp.asarray(m) if isinstance(m, np.ndarray) else m for n, m in case.masks().items()}
    q, k, _ = (jnp.zeros(x.shape) for x in case.operands())
    names = ("segment_ids", "kv_segment_ids", "window", "query_offset", "query_positions", "key_positions")
    return api._visibility("test", q, k, k, masks["mask"], *(masks.get(name) for name in names))


def _blocks(visible, query_block, key_block):
    """(any, all) of each pair of blocks, of bool[B, S, T]; places past the end are not visible."""
    batch, queries, keys = visible.shape
    padded = np.pad(visible, ((0, 0), (0, -queries % query_block), (0, -keys % key_block)), mode="edge")
    cut = padded.reshape(batch, -1, query_block, padded.shape[2] // key_block, key_block)
    return cut.any(axis=(2, 4)), cut.all(axis=(2, 4))


SORTED = [name for name in CASES if CASES[name].permuted == "no"]


@pytest.mark.default_cases("documents", "permuted")
@pytest.mark.parametrize("name", CASES)
def test_no_visible_pair_is_hidden_and_no_partly_hidden_one_whole(name):
    case = CASES[name]
    visibility = _of(case)
    visible = np.asarray(reference.mask(visibility, case.batch, case.queries, case.num_keys))
    for query_block, key_block in ((16, 16), (8, 32), (256, 256)):
        some, every = _blocks(visible, query_block, key_block)
        sees = jax.jit(lambda sizes=(query_block, key_block): visibility.pairs(case.queries, case.num_keys, *sizes))()
        sees = np.broadcast_to(sees, some.shape)
        assert not (some & (sees == HIDDEN)).any()
        assert not (~every & (sees == WHOLE)).any()
        if case.num_keys % key_block:
            assert not (sees[:, :, -1] == WHOLE).any()
        for by, axis in (("query", 2), ("key", 1)):
            counted = np.maximum((sees != HIDDEN).sum(axis=axis), 1).sum(axis=1).max()
            assert counted <= visibility.most_pairs(case.queries, case.num_keys, query_block, key_block, by=by)


@pytest.mark.parametrize(
    "case",
    [Case(queries=96), Case(queries=96, window=20), Case(queries=64, keys=96, offset=32), Case(queries=64, offset=-70)],
)
def test_of_known_positions_everything_is_known_exactly_while_tracing(case):
    @jax.jit
    def trace():
        visibility = _of(case)
        visible = reference.mask(visibility, 1, case.queries, case.num_keys)
        sees = visibility.pairs(case.queries, case.num_keys, 16, 32)
        assert isinstance(sees, np.ndarray)
        return visible, sees

    visible, sees = (np.asarray(x) for x in trace())
    some, every = _blocks(visible, 16, 32)
    np.testing.assert_array_equal(sees, np.where(every, WHOLE, np.where(some, PARTLY, HIDDEN)))
    counted = np.maximum(some.sum(axis=2), 1).sum()
    assert _of(case).most_pairs(case.queries, case.num_keys, 16, 32, by="query") == counted


def test_documents_hide_blocks_of_other_documents():
    segments = jnp.repeat(jnp.arange(1, 5), 32)[None]
    q = jnp.zeros((1, 128, 1, 8))
    visibility = api._visibility("test", q, q, q, "causal", segments, None, None, None, None, None)
    np.testing.assert_array_equal(visibility.pairs(128, 128, 32, 32)[0], PARTLY * np.eye(4, dtype=int))


def test_a_walk_has_every_visible_block_and_skips_masks_only_where_all_is_visible():
    sees = np.random.default_rng(0).integers(0, 3, size=(200, 7))
    sees[:3] = HIDDEN
    for row, (first, begin, end, last) in zip(sees, stretches(sees), strict=True):
        assert 0 <= first <= begin <= end <= last <= 7
        assert (row[begin:end] == WHOLE).all()
        assert (row[:first] == HIDDEN).all()
        assert (row[last:] == HIDDEN).all()
        if (row == WHOLE).any():
            assert begin < end
    np.testing.assert_array_equal(stretches(sees), stretches(jnp.asarray(sees)))
