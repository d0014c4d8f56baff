"""Numbers of the NumPy functions on top of BytePS's tests, run on one vector.

Repository bytedance/byteps, commit 96e2d2259c1fda7e81dd6c071e4db22d44e8330b, tests/pytorch: `onebit` of test_onebit.py,
`topk` of test_topk.py, `randomk` of test_randomk.py and `dithering` of test_dithering.py, the last two from the state
[2020, 2020] of their generator. They draw other numbers than we do: compared are values, not what is drawn.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from compressor_cases import KEY, back, many

from scalejax.parallel.compression.compressors import (
    LinearDithering,
    NaturalDithering,
    OneBit,
    RandomKEntries,
    TopKEntries,
)

X = np.float32([[0.75, -1.5, 0.0625, 3.0, -0.3, 0.02, -2.2, 1.1, 0.0, -0.9, 0.45, 2.9]])

SIGNS = [1, -1, 1, 1, -1, 1, -1, 1, 1, -1, 1, 1]
SCALED = 1.0985416173934937
TOP = {
    1: {3: 3.0},
    3: {3: 3.0, 6: -2.200000047683716, 11: 2.9000000953674316},
    5: {1: -1.5, 3: 3.0, 6: -2.200000047683716, 7: 1.100000023841858, 11: 2.9000000953674316},
}
RANDOM = {
    3: {0: 3.0, 4: -1.2000000476837158},
    5: {0: 1.8000000715255737, 4: -0.7200000286102295, 7: 2.640000104904175},
}
# The value of level 1 and levels.
DITHERED = {
    ("linear", "max", 2): (1.5, [1, -1, 1, 2, -1, 1, -1, 1, 0, -1, 1, 1]),
    ("linear", "max", 4): (0.75, [1, -2, 1, 4, -1, 1, -3, 2, 0, -2, 1, 3]),
    ("linear", "max", 8): (0.375, [2, -4, 1, 8, -1, 1, -6, 3, 0, -3, 2, 7]),
    ("linear", "l2", 2): (2.6162619590759277, [1, -1, 1, 2, -1, 0, -1, 1, 0, -1, 1, 1]),
    ("linear", "l2", 4): (1.3081309795379639, [1, -2, 1, 3, -1, 1, -2, 1, 0, -1, 1, 2]),
    ("linear", "l2", 8): (0.6540654897689819, [2, -3, 1, 5, -1, 1, -3, 2, 0, -2, 1, 4]),
    ("natural", "max", 2): (1.5, [1, -1, 1, 2, -1, 1, -1, 1, 0, -1, 1, 1]),
    ("natural", "max", 4): (0.375, [2, -4, 1, 8, -1, 1, -4, 4, 0, -4, 2, 4]),
    ("natural", "max", 8): (0.0234375, [32, -64, 4, 128, -16, 1, -64, 64, 0, -64, 32, 64]),
    ("natural", "l2", 2): (2.6162619590759277, [1, -1, 1, 2, -1, 0, -1, 1, 0, -1, 1, 1]),
    ("natural", "l2", 4): (0.6540654897689819, [2, -4, 1, 8, -1, 1, -4, 2, 0, -2, 1, 4]),
    ("natural", "l2", 8): (0.04087909311056137, [32, -64, 2, 128, -8, 1, -64, 32, 0, -32, 16, 64]),
}


def dense(entries):
    return np.float32([[entries.get(i, 0.0) for i in range(12)]])


def test_signs():
    np.testing.assert_allclose(back(OneBit(), X), SCALED * np.float32([SIGNS]), rtol=1e-6)
    np.testing.assert_array_equal(back(OneBit(scale="none"), X), np.float32([SIGNS]))


@pytest.mark.parametrize("k", TOP)
def test_the_largest(k):
    np.testing.assert_array_equal(back(TopKEntries(k=k), X), dense(TOP[k]))


@pytest.mark.slow
@pytest.mark.parametrize("k", RANDOM)
def test_values_at_random_places(k):
    found = np.asarray(many(RandomKEntries(k=k), X, 50))[:, 0]
    for i, value in RANDOM[k].items():
        assert set(np.round(found[:, i], 5).tolist()) == {0.0, np.round(np.float32(value), 5)}
    # Theirs drew a place twice in both.
    assert np.count_nonzero(dense(RANDOM[k])) < k
    assert np.count_nonzero(back(RandomKEntries(k=12), X, KEY)) == 11


@pytest.mark.default_cases(first=4)
@pytest.mark.parametrize(("kind", "scale", "levels"), DITHERED)
def test_stochastic_levels(kind, scale, levels):
    unit, recorded = DITHERED[kind, scale, levels]
    compressor = (LinearDithering if kind == "linear" else NaturalDithering)(levels=levels, scale=scale)
    found = np.asarray(many(compressor, jnp.asarray(X), 4000))[:, 0] / unit
    np.testing.assert_allclose(found, np.round(found), atol=1e-4)
    for i, level in enumerate(recorded):
        ours = set(np.round(found[:, i]).astype(int).tolist())
        assert len(ours) <= 2
        assert level in ours
