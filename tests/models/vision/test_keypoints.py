"""Targets, losses and grouping of key points against their definitions in NumPy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.models.vision import keypoints
from scalejax.models.vision.enumerated import enumerated
from scalejax.models.vision.keypoints import Grouping


def random_crosses(rng, count, side=128.0, longest=50.0):
    """Ends of perpendicular diameters that meet, float64[count, 4, 2], within a picture."""
    long = rng.uniform(6, longest, count)
    short, angle = long * rng.uniform(0.3, 1, count), rng.uniform(0, math.pi, count)
    middle = rng.uniform(longest / 2 + 1, side - longest / 2 - 1, (count, 2))
    along = np.stack([np.cos(angle), np.sin(angle)], -1)
    across = np.stack([-along[:, 1], along[:, 0]], -1)
    ends = [s * d[:, None] / 2 * v for d, v in ((long, along), (short, across)) for s in (1, -1)]
    return middle[:, None] + np.stack(ends, 1)


def literal_radius(width, height, iou=0.7):
    """The least of three ways to lose IoU, each found by bisection on its own definition."""

    def bisected(overlap):
        low, high = 0.0, max(width, height)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if overlap(middle) >= iou else (low, middle)
        return low

    area = width * height
    if not area:
        return 0.0

    def moved(r):
        both = max(width - r, 0) * max(height - r, 0)
        return both / (2 * area - both)

    def inner(r):
        return max(width - 2 * r, 0) * max(height - 2 * r, 0) / area

    def outer(r):
        return area / ((width + 2 * r) * (height + 2 * r))

    return min(map(bisected, (moved, inner, outer)))


@pytest.mark.parametrize("size", [(3, 3), (10, 4), (7, 31), (50, 50), (1, 20)])
def test_the_radius_is_how_far_corners_may_move_at_an_iou_of_seven_tenths(size):
    found = keypoints.radius(*(jnp.float32(value) for value in size))
    assert float(found) == pytest.approx(literal_radius(*size), abs=1e-4)


def literal_targets(ends, height, width, stride):
    """(heat [h, w, 5], cells [n, 5, 2]) of one picture."""
    heat, cells = np.zeros((height, width, 5)), []
    for one in ends[np.isfinite(ends).all((1, 2))]:
        x, y = one.T
        outermost = [one[y.argmin()], one[x.argmin()], one[y.argmax()], one[x.argmax()]]
        own = [
            (min(max(int(p[0] // stride), 0), width - 1), min(max(int(p[1] // stride), 0), height - 1))
            for p in outermost
        ]
        (_, ty), (lx, _), (_, by), (rx, _) = own
        own.append((math.floor((lx + rx + 0.5) / 2), math.floor((ty + by + 0.5) / 2)))
        reach = int(literal_radius(math.ceil(np.ptp(x) / stride), math.ceil(np.ptp(y) / stride)) + 1e-6)
        sigma = (2 * reach + 1) / 6
        for n, (cx, cy) in enumerate(own):
            for row in range(max(cy - reach, 0), min(cy + reach + 1, height)):
                for column in range(max(cx - reach, 0), min(cx + reach + 1, width)):
                    bump = math.exp(-((row - cy) ** 2 + (column - cx) ** 2) / (2 * sigma**2))
                    heat[row, column, n] = max(heat[row, column, n], bump)
        cells.append(own)
    return heat, np.array(cells)


@pytest.mark.slow
def test_targets_equal_their_definition_and_are_one_at_key_points():
    rng = np.random.default_rng(0)
    ends = np.full((3, 6, 4, 2), np.nan)
    for picture, count in enumerate((6, 3, 0)):
        ends[picture, :count] = random_crosses(rng, count, side=512, longest=300)
    with jax.enable_x64(True):
        found = jax.tree.map(np.asarray, keypoints.targets(jnp.asarray(ends), 128, 128, 4))
    for picture, count in enumerate((6, 3, 0)):
        heat, cells = literal_targets(ends[picture], 128, 128, 4)
        np.testing.assert_allclose(found.heat[picture], heat, atol=1e-12)
        assert ((heat > 0) & (heat < 1)).sum() > 5 * count or not count  # bumps are wider than a cell
        assert found.present[picture].sum() == count
        for own, true in zip(found.cells[picture], cells, strict=False):
            np.testing.assert_array_equal(own, true)
            assert all(found.heat[picture, y, x, n] == 1 for n, (x, y) in enumerate(own))


def test_extremes_are_by_coordinate_and_one_end_may_be_two_of_them():
    oblique = jnp.array([[10.0, 10.0], [40.0, 50.0], [30.0, 26.0], [20.0, 34.0]])
    found = np.asarray(keypoints.extremes(oblique))
    np.testing.assert_array_equal(found, [[10, 10], [10, 10], [40, 50], [40, 50]])
    upright = jnp.array([[20.0, 5.0], [20.0, 45.0], [10.0, 25.0], [30.0, 25.0]])
    np.testing.assert_array_equal(np.asarray(keypoints.extremes(upright)), [[20, 5], [10, 25], [20, 45], [30, 25]])


def test_the_highest_cells_of_a_map_that_is_no_square_are_named_by_column_and_row():
    heat = np.zeros((1, 2, 3, 5), np.float32)
    heat[0, 0, 2, 1], heat[0, 0, 1, 4], heat[0, 1, 0, 3], heat[0, 1, 2, 0] = 0.9, 0.7, 0.5, 0.8
    heights, cells = keypoints.top(jnp.asarray(heat), 2)
    np.testing.assert_array_equal(heights, np.float32([[[0.9, 0.7], [0.8, 0.5]]]))
    np.testing.assert_array_equal(cells, [[[[1, 2], [4, 1]], [[0, 2], [3, 0]]]])


@pytest.mark.slow
def test_focal_loss_equals_its_definition():
    rng = np.random.default_rng(1)
    logits, heat = rng.normal(0, 4, (2, 5, 6, 3)), rng.uniform(0, 0.99, (2, 5, 6, 3))
    heat[0, 2, 3], heat[1] = 1, np.minimum(heat[1], 0.9)
    p = np.clip(1 / (1 + np.exp(-logits)), 1e-4, 1 - 1e-4)
    each = np.where(heat == 1, (1 - p) ** 2 * np.log(p), (1 - heat) ** 4 * p**2 * np.log(1 - p))
    with jax.enable_x64(True):
        found = keypoints.focal(jnp.asarray(logits), jnp.asarray(heat))
        np.testing.assert_allclose(found, -each.sum((1, 2, 3)), rtol=1e-12)
        moved = jax.grad(lambda x: keypoints.focal(x, jnp.asarray(heat)).sum())(jnp.asarray(logits))
        inside = (p > 1e-4) & (p < 1 - 1e-4)
        step = 1e-6
        for place in [(0, 2, 3, 1), (1, 4, 0, 2), (0, 0, 0, 0)]:
            assert inside[place]
            shift = np.zeros_like(logits)
            shift[place] = step
            up, down = (
                keypoints.focal(jnp.asarray(logits + sign * shift), jnp.asarray(heat)).sum() for sign in (1, -1)
            )
            # Two sums of about 100 whose difference is divided by 2e-6: 1e-8 is lost.
            assert float(moved[place]) == pytest.approx(float(up - down) / (2 * step), rel=1e-6, abs=2e-8)


def literal_aggregation(line):
    """One line, from both sides, one cell after another; what ExtremeNet's loops do."""

    def from_left(values):
        sums = values.copy()
        for i in range(1, len(values)):
            if values[i] >= values[i - 1]:
                sums[i] += sums[i - 1]
        return sums - values

    return from_left(line) + from_left(line[::-1])[::-1]


@pytest.mark.parametrize("axis", [2, 3])
def test_aggregation_equals_the_sequential_definition_and_with_weight_zero_changes_nothing(axis):
    rng = np.random.default_rng(2)
    heat = np.round(rng.uniform(0, 1, (2, 2, 9, 12)), 1).astype(np.float32)  # with equal neighbours
    expected = heat + 0.1 * np.apply_along_axis(literal_aggregation, axis, heat)
    np.testing.assert_allclose(keypoints.aggregated(jnp.asarray(heat), axis, 0.1), expected, atol=2e-6)
    np.testing.assert_array_equal(keypoints.aggregated(jnp.asarray(heat), axis, 0.0), heat)


def test_peaks_are_what_no_neighbour_exceeds():
    heat = jnp.zeros((1, 1, 5, 5)).at[0, 0, 1, 1].set(0.5).at[0, 0, 1, 2].set(0.4).at[0, 0, 4, 4].set(0.2)
    found = np.asarray(keypoints.peaks(heat))[0, 0]
    assert (found[1, 1], found[1, 2], found[4, 4]) == (0.5, 0, np.float32(0.2))


def as_groups(picked, scores):
    """{numbers of the peaks: score}."""
    return {tuple(map(int, four)): float(score) for four, score in zip(picked, scores, strict=True)}


@functools.cache
def compiled(how):
    return jax.jit(functools.partial(keypoints.group, how=how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "side", "kind"),
    [
        (12, 8, "random"),
        (12, 8, "ties"),
        (10, 3, "coincident"),
        (7, 5, "few live"),
        (3, 8, "random"),
        (6, 8, "none live"),
    ],
)
def test_the_join_equals_the_enumeration_of_all_groups(count, side, kind):
    rng = np.random.default_rng(count)
    scores = np.sort(rng.uniform(0.05, 1, (3, 4, count)).astype(np.float32))[..., ::-1]
    if kind == "ties":
        scores = np.round(scores * 4) / 4
    elif kind == "few live":
        scores = np.where(np.arange(count) < 4, np.maximum(scores, np.float32(0.2)), np.float32(0.01))
    elif kind == "none live":
        scores = np.minimum(scores, np.float32(0.09))
    cells = rng.integers(0, side, (3, 4, count, 2)).astype(np.int32)
    centres = rng.uniform(0, 1, (3, side, side)).astype(np.float32)
    how = Grouping(peaks=count, boxes=count**4 if count < 11 else 6000)
    found = jax.tree.map(np.asarray, compiled(how)(scores, cells, centres))
    some = 0
    for n in range(3):
        picked, expected = enumerated(scores[n], cells[n], centres[n], how)
        assert len(picked) <= how.boxes
        real = found.scores[n] > 0
        groups, wanted = as_groups(found.picked[n][real], found.scores[n][real]), as_groups(picked, expected)
        assert groups.keys() == wanted.keys()
        assert all(groups[four] == pytest.approx(wanted[four], rel=2e-6) for four in groups)
        some += len(groups)
        # Falling, and the cell of the centre is the one whose height is in the score.
        assert (np.diff(found.scores[n]) <= 0).all()
        for four, (x, y), score in zip(
            found.picked[n][real], found.centres[n][real], found.scores[n][real], strict=True
        ):
            total = sum(scores[n, name, which] for name, which in enumerate(four)) + 2 * centres[n, y, x]
            assert score == pytest.approx(total / 6, rel=2e-6)
    assert (some > 3) == (kind != "none live")


@pytest.mark.slow
def test_of_more_groups_than_are_kept_the_best_are():
    rng = np.random.default_rng(5)
    scores = np.sort(rng.uniform(0.2, 1, (1, 4, 9)).astype(np.float32))[..., ::-1]
    cells, centres = rng.integers(0, 3, (1, 4, 9, 2)).astype(np.int32), rng.uniform(0, 1, (1, 3, 3)).astype(np.float32)
    how = Grouping(peaks=9, boxes=20)
    _, all_scores = enumerated(scores[0], cells[0], centres[0], how)
    assert len(all_scores) > 60
    found = np.asarray(compiled(how)(scores, cells, centres).scores[0])
    np.testing.assert_allclose(found, np.sort(all_scores)[::-1][:20], rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("live", [5, 13, 20, 30])
def test_every_size_of_the_join_gives_the_same(live):
    """Of 30 peaks a map so many count; joins are compiled for 8, 12, 16, 24 and all."""
    rng = np.random.default_rng(live)
    scores = np.sort(rng.uniform(0.2, 1, (1, 4, 30)).astype(np.float32))[..., ::-1]
    scores = np.where(np.arange(30) < live, scores, np.float32(0))
    x = np.array([30, 5, 30, 55])[:, None] + rng.integers(-5, 6, (4, 30))
    y = np.array([5, 30, 55, 30])[:, None] + rng.integers(-5, 6, (4, 30))
    cells, centres = np.stack([x, y], -1)[None].astype(np.int32), np.ones((1, 64, 64), np.float32)
    how = Grouping(peaks=30, boxes=50)
    _, all_scores = enumerated(scores[0], cells[0], centres[0], how)
    assert len(all_scores) == live**4  # all fit: as many pairs as there can be
    found = np.asarray(compiled(how)(scores, cells, centres).scores[0])
    np.testing.assert_allclose(found, np.sort(all_scores)[::-1][:50], rtol=2e-6)


def literal_iou(a, b):
    both = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None).prod()
    return both / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - both)


def random_boxes(rng, count):
    corner = rng.uniform(0, 60, (count, 2))
    return np.concatenate([corner, corner + rng.uniform(5, 40, (count, 2))], -1)


@pytest.mark.slow
def test_soft_nms_equals_its_loop():
    rng = np.random.default_rng(3)
    boxes, scores = random_boxes(rng, 30), rng.uniform(0, 1, 30)
    expected, left = scores.copy(), list(range(30))
    while left:
        best = max(left, key=lambda n: expected[n])
        left.remove(best)
        for n in left:
            expected[n] *= math.exp(-(literal_iou(boxes[best], boxes[n]) ** 2) / 0.5)
    found = keypoints.soft_nms(jnp.asarray(boxes[None]), jnp.asarray(scores[None]), sigma=0.5)[0]
    np.testing.assert_allclose(found, np.where(expected >= 1e-3, expected, 0), rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_soft_nms_with_a_tiny_sigma_is_hard_nms(overlap):
    rng = np.random.default_rng(4)
    boxes, scores = random_boxes(rng, 40), rng.uniform(0.1, 1, 40)
    kept = []
    for n in np.argsort(-scores):
        if all(literal_iou(boxes[n], boxes[m]) <= overlap for m in kept):
            kept.append(n)
    found = keypoints.soft_nms(jnp.asarray(boxes[None]), jnp.asarray(scores[None]), sigma=1e-9, overlap=overlap)[0]
    assert 2 < len(kept) < 40
    np.testing.assert_array_equal(np.flatnonzero(found), np.sort(kept))
    np.testing.assert_allclose(np.asarray(found)[kept], scores[kept], rtol=1e-6)


@pytest.mark.slow
def test_a_box_around_many_is_halved_and_others_are_not():
    inside = [[n * 10.0, 0.0, n * 10.0 + 8, 8.0] for n in range(6)]
    boxes = jnp.array([[[0.0, 0, 60, 10], [0, 0, 28, 10], *inside]])
    scores = jnp.array([[0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]])
    found = np.asarray(keypoints.without_ghosts(boxes, scores, 4.0))[0]
    # The first has 4.1 inside of it, more than 4 x .6; the second 2.0, which is no more than 4 x .5.
    np.testing.assert_allclose(found, [0.3, *[0.5] * 7])
    low = jnp.where(jnp.arange(8) == 0, 0.15, scores)
    assert float(keypoints.without_ghosts(boxes, low, 4.0)[0, 0]) == pytest.approx(0.15)


@pytest.mark.slow
def test_diameters_are_read_from_four_points_that_are_apart_and_the_short_one_from_the_head_where_two_coincide():
    apart = jnp.array([[20.0, 5.0], [4.0, 24.0], [22.0, 45.0], [36.0, 26.0]])
    coincident = jnp.array([[10.0, 10.0], [10.5, 10.0], [40.0, 50.0], [40.0, 50.0]])
    head = jnp.array([[18.0, 34.0], [31.0, 26.0], [11.0, 11.0], [39.0, 49.0]])
    found, regressed = keypoints.diameters(jnp.stack([apart, coincident]), jnp.stack([head, head]), 4.0)
    assert regressed.tolist() == [False, True]
    np.testing.assert_array_equal(found[0], [[20, 5], [22, 45], [4, 24], [36, 26]])
    np.testing.assert_array_equal(found[1], [[10, 10], [40, 50], [18, 34], [31, 26]])


@pytest.mark.slow
def test_gradients_are_finite_where_there_is_no_object():
    maps = jnp.zeros((2, 8, 8, 5))
    wanted = jax.jit(keypoints.targets, static_argnums=(1, 2, 3))(jnp.full((2, 3, 4, 2), jnp.nan), 8, 8, 4)
    value, slope = jax.jit(jax.value_and_grad(lambda x: keypoints.focal(x, wanted.heat).sum()))(maps)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    assert not wanted.present.any()


@pytest.mark.slow
def test_a_group_below_a_threshold_is_none():
    cells = jnp.array([[[[4, 1]], [[1, 4]], [[4, 7]], [[7, 4]]]])
    scores, centres = jnp.full((1, 4, 1), 0.5), jnp.zeros((1, 9, 9)).at[0, 4, 4].set(0.5)
    how = Grouping(peaks=1, boxes=1)

    def score(scores, centres, how=how):
        return float(compiled(how)(scores, cells, centres).scores[0, 0])

    assert score(scores, centres) == pytest.approx(0.5)
    assert score(scores.at[0, 2, 0].set(0.09), centres) == 0
    assert score(scores, centres * 0.19) == 0
    lenient = dataclasses.replace(how, threshold=0.01, centre_threshold=0.01)
    assert score(scores, centres * 0.19, lenient) > 0
