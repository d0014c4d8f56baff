"""Signs under one scale."""

import numpy as np
import pytest
from compressor_cases import back, encoded, heavy

from scalejax.errors import UserError
from scalejax.parallel.compression.compressors import OneBit


def scale_of(row, scale):
    row = row.astype(np.float64)
    return {"mean": abs(row).sum() / len(row), "l2": np.sqrt((row * row).sum() / len(row)), "none": 1.0}[scale]


@pytest.mark.parametrize("scale", ["mean", "l2", "none"])
@pytest.mark.parametrize("n", [16, 29])
def test_bits_and_scales_are_those_of_the_definition(scale, n):
    x = heavy(3, n)
    x[1, 3] = 0
    payload, decoded = encoded(OneBit(scale=scale), x), np.asarray(back(OneBit(scale=scale), x))
    assert set(payload) == {"signs", "scale"}
    for r in range(3):
        signs = [0] * -(-n // 8)
        for i in range(n):
            if x[r, i] < 0:
                signs[i // 8] += 2 ** (i % 8)
        assert np.asarray(payload["signs"])[r].tolist() == signs
        np.testing.assert_allclose(payload["scale"][r], [scale_of(x[r], scale)], rtol=1e-6)
        for i in range(n):
            assert decoded[r, i] == (-1 if x[r, i] < 0 else 1) * payload["scale"][r, 0]


@pytest.mark.parametrize("scale", ["mean", "l2", "none"])
def test_groups_are_rows_of_their_own_and_the_last_may_be_short(scale):
    x = heavy(3, 29)
    x[1, 8:16] = 0
    compressor = OneBit(scale=scale, group=8)
    payload, decoded = encoded(compressor, x), np.asarray(back(compressor, x))
    alone = [np.asarray(back(OneBit(scale=scale), x[:, i : i + 8])) for i in range(0, 29, 8)]
    np.testing.assert_allclose(decoded, np.concatenate(alone, axis=1), rtol=1e-6)
    assert payload["scale"].shape == (3, 4)
    assert compressor.payload_bytes(29) == sum(x[0].nbytes for x in map(np.asarray, payload.values())) == 4 + 4 * 4
    assert (decoded[1, 8:16] == 0).all()


def test_groups_keep_what_is_small_beside_what_is_large():
    """Two parameters in a row: under one scale the small one is lost in it."""
    x = heavy(1, 1024) * np.where(np.arange(1024) < 512, 1e-3, 1).astype(np.float32)
    missed = [np.linalg.norm((back(OneBit(group=group), x) - x)[0, :512]) for group in (None, 128)]
    assert missed[0] > 100 * np.linalg.norm(x[0, :512]) > 100 * missed[1]


def test_the_mean_contracts_by_what_the_sheet_says_and_more_is_no_better():
    x = heavy(50, 64)
    for row, got in zip(x.astype(np.float64), np.asarray(back(OneBit(), x), np.float64), strict=True):
        left, whole = ((got - row) ** 2).sum(), (row**2).sum()
        delta = abs(row).sum() ** 2 / (64 * whole)
        assert 0 < delta <= 1
        np.testing.assert_allclose(left, (1 - delta) * whole, rtol=1e-5)
        for factor in (0.9, 1.1):  # the mean is the best scale
            assert ((factor * got - row) ** 2).sum() > left


def test_a_sum_beyond_float32_is_nan():
    assert np.isnan(back(OneBit(), np.full((1, 64), 3e38, np.float32))).all()
    assert np.isnan(back(OneBit(scale="l2"), np.full((1, 64), 3e38, np.float32))).all()


def test_another_scale_is_refused():
    with pytest.raises(UserError, match="OneBit: scale must be one of mean, l2, none; got 'max'"):
        OneBit(scale="max")
    with pytest.raises(UserError, match="OneBit: group must be a whole number of at least 1; got 0"):
        OneBit(group=0)
