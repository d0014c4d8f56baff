"""Dice of volumes against literal sums, HD95 against all pairs of surface voxels and against SciPy's transform."""

import itertools
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from scalejax.parallel.gradients.compute import Loss
from scalejax.train.batch import Batch
from scalejax.train.metrics.segmentation import Surfaces, VolumeDice, dice, hausdorff
from scalejax.train.metrics.sums import to_host

NAMES = ("first", "second", "third")


def slices(seed, shape=(9, 12, 10), structures=3):
    """Predicted and true labels of some slices of three cases, whose slices do not lie together."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, structures + 1, shape) * (ndimage.gaussian_filter(rng.normal(size=shape), 1) > 0)
    predicted = np.where(rng.random(shape) < 0.2, rng.integers(0, structures + 1, shape), true)
    return predicted.astype(np.uint8), true.astype(np.int32), np.array([2, 0, 5] * 3, np.int32)[: shape[0]]


def counted(predicted, true, structures=3):
    of = [[(p == k) & (t == k), p == k, t == k] for k in range(1, structures + 1) for p, t in [(predicted, true)]]
    return np.array([[x.sum((1, 2)) for x in row] for row in of], np.float32).transpose(2, 0, 1)


def literal_dice(predicted, true, cases, structures=3):
    """Structure -> its Dice of each case that has it, voxel by voxel."""
    found = {}
    for k, case in itertools.product(range(1, structures + 1), sorted(set(cases))):
        both = either = 0
        for number, own in enumerate(cases):
            for pixel in np.ndindex(true.shape[1:]) if own == case else ():
                p, t = predicted[number][pixel] == k, true[number][pixel] == k
                both, either = both + (p and t), either + int(p) + int(t)
        if either:
            found.setdefault(k, []).append(2 * both / either)
    return found


def test_dice_is_of_volumes_and_not_of_slices():
    predicted, true, cases = slices(0)
    collected = {"counts": counted(predicted, true), "cases": cases}
    found = VolumeDice(structures=NAMES).exact(collected, intervals="none")
    wanted = {k: np.mean(of_cases) for k, of_cases in literal_dice(predicted, true, cases).items()}
    for k, name in enumerate(NAMES, 1):
        assert found[f"dice/{name}"] == pytest.approx(wanted[k], rel=1e-12)
    assert found["dice"] == pytest.approx(np.mean(list(wanted.values())), rel=1e-12)
    assert found["cases"] == 3
    of_slices = VolumeDice(structures=NAMES).exact(collected | {"cases": np.arange(9)}, intervals="none")
    assert of_slices["dice"] != pytest.approx(found["dice"], rel=1e-3)


def test_what_neither_has_does_not_count_and_what_one_has_counts_as_nothing():
    predicted, true, cases = slices(1)
    true[(true == 2) & (cases == 5)[:, None, None]] = 0
    predicted[(predicted == 2) & (cases == 5)[:, None, None]] = 0
    predicted[(predicted == 3) & (cases == 0)[:, None, None]] = 0
    wanted = literal_dice(predicted, true, cases)
    assert [len(of_cases) for of_cases in wanted.values()] == [3, 2, 3]
    assert wanted[3][0] == 0
    found = VolumeDice(structures=NAMES).exact({"counts": counted(predicted, true), "cases": cases}, intervals="none")
    assert found["dice/second"] == pytest.approx(np.mean(wanted[2]))
    assert found["dice/third"] == pytest.approx(np.mean(wanted[3]))
    nowhere = VolumeDice(structures=NAMES).exact({"counts": np.zeros((2, 3, 3)), "cases": cases[:2]}, intervals="none")
    assert math.isnan(nowhere["dice"])


def test_windows_have_the_dice_of_all_their_pixels_and_padding_is_not_among_them():
    predicted, true, _ = slices(2)
    metric = VolumeDice(structures=NAMES)
    sums = metric.zeros()
    for rows in (slice(0, 4), slice(4, 9)):
        counts = counted(predicted[rows], true[rows])
        padded = np.concatenate([counts, 100 * np.ones_like(counts[:1])])
        weights = np.append(np.ones(len(counts), np.float32), 0)
        loss = Loss(jnp.zeros(()), jnp.zeros(()), outputs={"counts": jnp.asarray(padded)})
        sums = metric.update(sums, loss, Batch({"weights": jnp.asarray(weights)}))
    wanted = np.mean([v[0] for v in literal_dice(predicted, true, np.zeros(9, int)).values()])
    assert metric.compute(to_host(sums)) == {"dice_pixels": pytest.approx(wanted, rel=1e-6)}


def surface(mask):
    """Voxels with a face to what is not of the mask, or to the border."""
    found = []
    for voxel in np.argwhere(mask):
        for axis, step in itertools.product(range(mask.ndim), (-1, 1)):
            other = voxel.copy()
            other[axis] += step
            if not 0 <= other[axis] < mask.shape[axis] or not mask[tuple(other)]:
                found.append(voxel)
                break
    return np.array(found)


def all_pairs(first, second, spacing, percentile):
    a, b = (surface(mask) * np.array(spacing) for mask in (first, second))
    distances = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
    return max(np.percentile(distances.min(axis), percentile) for axis in (0, 1))


@pytest.mark.parametrize("percentile", [95, 100])
@pytest.mark.parametrize(("shape", "spacing"), [((9, 11), (1.0, 2.5)), ((5, 8, 7), (3.0, 1.0, 0.7))])
def test_hausdorff_is_that_of_all_pairs_of_surface_voxels(shape, spacing, percentile):
    rng = np.random.default_rng(3)
    for _ in range(4):
        first, second = (ndimage.gaussian_filter(rng.normal(size=shape), 1) > 0.1 for _ in range(2))
        wanted = all_pairs(first, second, spacing, percentile)
        assert hausdorff(first, second, spacing, percentile) == pytest.approx(wanted, rel=1e-12)
        assert hausdorff(first, first, spacing, percentile) == 0


def test_hausdorff_of_a_shift_is_the_shift():
    first, second = np.zeros((2, 20, 30), bool)
    first[5:9, 5:9] = second[5:9, 15:19] = True
    assert hausdorff(first, second, (1.0, 0.5), 100) == 5
    inside = ndimage.distance_transform_edt(~first, sampling=(1.0, 0.5))[second]
    assert hausdorff(first, second, (1.0, 0.5), 100) == inside.max()


def test_surfaces_are_of_volumes_where_slices_have_a_distance():
    predicted, true, cases = slices(4)
    true[(true == 2) & (cases == 5)[:, None, None]] = 0
    collected = {"predicted": predicted, "masks": true, "cases": cases}
    metric = Surfaces(structures=NAMES, spacing=(2.0, 1.0), between=4.0)
    found = metric.exact(collected, intervals="none")
    of = {
        (k, case): hausdorff(predicted[cases == case] == k, true[cases == case] == k, (4.0, 2.0, 1.0))
        for k in (1, 2, 3)
        for case in (0, 2, 5)
    }
    assert math.isnan(of[2, 5])
    assert found["hd95_missed"] == 1
    assert found["hd95/second"] == pytest.approx(np.mean([of[2, 0], of[2, 2]]))
    assert found["hd95"] == pytest.approx(np.mean([np.nanmean([of[k, c] for c in (0, 2, 5)]) for k in (1, 2, 3)]))
    flat = Surfaces(structures=NAMES, spacing=(2.0, 1.0)).exact(collected, intervals="none")
    of_slices = [[hausdorff(p == k, t == k, (2.0, 1.0)) for p, t in zip(predicted, true, strict=True)] for k in (1, 3)]
    assert flat["hd95/first"] == pytest.approx(np.nanmean(of_slices[0]))
    assert flat["hd95/third"] == pytest.approx(np.nanmean(of_slices[1]))


def test_slices_of_each_case_are_as_far_apart_as_it_says():
    predicted, true, cases = slices(4)
    collected = {"predicted": predicted, "masks": true, "cases": cases}
    distances = {0: 1.0, 2: 4.0, 5: 2.5}
    metric = Surfaces(structures=NAMES, spacing=(2.0, 1.0), between="by case")
    assert "slice_spacing" in metric.collects
    assert metric.values[0].unit == "mm, mean over cases and structures"
    by_case = np.array([distances[case] for case in cases.tolist()], np.float32)
    found = metric.exact(collected | {"slice_spacing": by_case}, intervals="none")
    of = [
        hausdorff(predicted[cases == case] == 1, true[cases == case] == 1, (between, 2.0, 1.0))
        for case, between in distances.items()
    ]
    assert found["hd95/first"] == pytest.approx(np.mean(of))


def test_pictures_of_truth_and_prediction_are_kept(tmp_path):
    predicted, true, cases = slices(5)
    images = np.random.default_rng(0).normal(size=(*true.shape, 1))
    collected = {"predicted": predicted, "masks": true, "cases": cases, "images": images[:6]}
    Surfaces(structures=NAMES).keep(tmp_path, "test", collected, ())
    (path,) = (tmp_path / "evaluation" / "pictures").iterdir()
    content = json.loads(path.read_text())
    assert path.name == "test-masks.json"
    assert "lines the edges of the true ones" in content["caption"]
    assert content["svg"].startswith("<svg")


def test_dice_of_nothing_is_not_a_number():
    assert dice(np.array([[1.0, 2, 2], [0, 0, 0]])).tolist()[0] == 0.5
    assert math.isnan(dice(np.zeros(3)))
