"""FROC against a sweep over thresholds, and what it says in cases that one can count."""

import json

import numpy as np
import pytest

from scalejax.train.metrics import detection
from scalejax.train.metrics.detection import Froc, froc


def literal_overlap(a, b, criterion):
    both = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None).prod()
    own, other = (a[2:] - a[:2]).prod(), (b[2:] - b[:2]).prod()
    return both / (own + other - both if criterion == "iou" else own)


def literal_sweep(boxes, scores, truth, criterion="iou"):
    """[(threshold, false positives a picture, sensitivity)], one threshold after another, one box after another."""
    points = []
    for threshold in sorted({float(s) for own in scores for s in own if s > 0}, reverse=True):
        wrong, found, lesions = 0, 0, 0
        for own, score, there in zip(boxes, scores, truth, strict=True):
            hit = np.zeros(len(there), bool)
            for box, s in zip(own, score, strict=True):
                if s <= 0 or s < threshold:
                    continue
                over = [literal_overlap(box, lesion, criterion) >= 0.5 for lesion in there]
                wrong += not any(over)
                hit |= np.array(over, bool).reshape(len(there))
            found, lesions = found + hit.sum(), lesions + len(there)
        points.append((threshold, wrong / len(boxes), found / max(lesions, 1)))
    return points


def scene(seed, pictures=6):
    """Lesions, boxes near them and elsewhere, with scores of which many are equal."""
    rng = np.random.default_rng(seed)
    boxes, scores, truth = [], [], []
    for _ in range(pictures):
        corner = rng.uniform(0, 80, (rng.integers(0, 4), 2))
        there = np.concatenate([corner, corner + rng.uniform(8, 30, corner.shape)], -1)
        near = there[rng.integers(0, len(there), 6)] + rng.normal(0, 3, (6, 4)) if len(there) else np.zeros((0, 4))
        start = rng.uniform(0, 80, (3, 2))
        own = np.concatenate([near, np.concatenate([start, start + rng.uniform(5, 30, (3, 2))], -1)])
        boxes.append(np.concatenate([np.minimum(own[:, :2], own[:, 2:]), np.maximum(own[:, :2], own[:, 2:])], -1))
        scores.append(np.round(rng.uniform(0, 1, len(own)), 1))
        truth.append(there)
    return boxes, scores, truth


@pytest.mark.parametrize("criterion", ["iou", "iobb"])
@pytest.mark.parametrize("seed", range(4))
def test_the_curve_equals_a_sweep_over_thresholds(seed, criterion):
    boxes, scores, truth = scene(seed)
    curve = froc(boxes, scores, truth, criterion=criterion)
    found = np.stack([curve.thresholds, curve.false_positives, curve.sensitivity], -1)
    points = np.array(literal_sweep(boxes, scores, truth, criterion))
    # Thresholds at which nothing happens (a further hit on a lesion) are left out of the curve.
    happens = np.append(True, (points[1:, 1:] != points[:-1, 1:]).any(-1)) & (points[:, 1:].sum(-1) > 0)
    np.testing.assert_allclose(found, points[happens], atol=1e-12)
    assert (np.diff(curve.sensitivity) >= 0).all()
    at = np.linspace(0, points[-1, 1] + 1, 57)
    sensitivities = np.array([curve.at(x) for x in at])
    assert (np.diff(sensitivities) >= 0).all()
    assert sensitivities[-1] == points[-1, 2]
    # Between two numbers of false positives the curve is a line from the higher end of one to that of the next.
    best = {0.0: 0.0} | {fp: max(s for _, f, s in points.tolist() if f == fp) for _, fp, _ in points.tolist()}
    xs = sorted(best)
    np.testing.assert_allclose(sensitivities, np.interp(at, xs, [best[x] for x in xs]), atol=1e-12)


LESION = np.array([[10.0, 10, 30, 30]])


def test_a_second_hit_on_a_found_lesion_is_neither():
    boxes = [np.array([[10.0, 10, 30, 30], [11, 11, 31, 31], [60, 60, 70, 70]])]
    curve = froc(boxes, [np.array([0.9, 0.8, 0.7])], [LESION])
    assert curve.at(0) == 1
    assert curve.false_positives[-1] == 1


def test_a_box_in_a_lesion_is_a_hit_by_its_own_area_and_none_by_union():
    inside = [np.array([[15.0, 15, 20, 20]])]
    assert froc(inside, [np.ones(1)], [LESION], criterion="iobb").at(0) == 1
    assert froc(inside, [np.ones(1)], [LESION]).at(16) == 0


def test_lesions_that_do_not_count_are_no_false_positives_either():
    boxes, both = [np.array([[10.0, 10, 30, 30], [50, 50, 60, 60]])], np.array([[10.0, 10, 30, 30], [50, 50, 60, 60]])
    curve = froc(boxes, [np.array([0.5, 0.9])], [both], counted=[np.array([True, False])])
    assert curve.at(0) == 1
    assert len(curve.found_at) == 1
    assert curve.false_positives.tolist() == [0]


def test_pictures_without_lesions_or_without_boxes_count():
    empty = np.zeros((0, 4))
    curve = froc([np.array([[0.0, 0, 9, 9]]), empty], [np.ones(1), np.zeros(0)], [empty, LESION])
    assert curve.false_positives.tolist() == [0.5]
    assert curve.at(8) == 0
    nothing = froc([empty], [np.zeros(0)], [LESION])
    assert (nothing.at(4), len(nothing.thresholds)) == (0, 0)
    assert np.isnan(nothing.overlap_of_hits(4))


def test_a_split_without_lesions_has_no_sensitivity():
    """A 0 would be taken for the worst model."""
    values = Froc().exact(collected() | {"ends": np.full_like(collected()["ends"], np.nan)}, intervals="none")
    assert np.isnan(values["froc"])
    assert np.isnan(values["sensitivity_4"])
    assert np.isnan(values["regressed"])


def test_what_is_regressed_is_a_share_of_boxes_that_find_a_lesion():
    found = collected()
    found["regressed"][0, 0], found["regressed"][1, 0] = False, True  # a hit, and a false positive
    assert Froc().exact(found, intervals="none")["regressed"] == 0
    found["regressed"][0, 0], found["regressed"][1, 0] = True, False
    assert Froc().exact(found, intervals="none")["regressed"] == 1


def test_the_overlap_of_hits_is_that_of_the_best_box_that_finds_a_lesion():
    boxes = [np.array([[10.0, 10, 30, 40], [10, 10, 30, 30], [60, 60, 70, 70]])]
    curve = froc(boxes, [np.array([0.9, 0.5, 0.7])], [LESION])
    assert curve.overlap_of_hits(0.0) == pytest.approx(2 / 3)


def collected(pictures=3):
    """What a task collects: on the first picture the lesion is found, on the second another box, then nothing."""
    ends = np.full((pictures, 2, 4, 2), np.nan, np.float32)
    ends[:2, 0] = [[10, 20], [30, 20], [20, 12], [20, 28]]
    boxes = np.zeros((pictures, 2, 4), np.float32)
    boxes[:2, 0], boxes[1, 0] = [10, 12, 30, 28], [60, 60, 80, 80]
    scores = np.zeros((pictures, 2), np.float32)
    scores[:2, 0] = 0.8, 0.9
    images = np.random.default_rng(0).integers(0, 255, (pictures, 96, 96, 1)).astype(np.uint8)
    regressed = np.zeros((pictures, 2), bool)
    return {
        "boxes": boxes,
        "scores": scores,
        "diameters": np.nan_to_num(ends),
        "regressed": regressed,
        "ends": ends,
        "images": images,
    }


def test_the_metric_says_what_the_curve_says_and_keeps_pictures(tmp_path):
    metric = Froc()
    values = metric.exact(collected(), intervals="none")
    assert values["sensitivity_4"] == 0.5
    assert values["hit_overlap"] == pytest.approx(1)
    assert values["lesions"] == 2
    names = [value.name for value in metric.values]
    assert names[0] == "froc"
    assert set(names) == set(values)
    metric.keep(tmp_path, "test", collected(), ())
    for name in ("froc", "lesions"):
        held = json.loads((tmp_path / "evaluation" / "pictures" / f"test-{name}.json").read_text())
        assert held["svg"].startswith("<svg")
        assert held["svg"].endswith("</svg>")
    # Two diameters of each of two lesions, and of each of the two that were found, which have boxes.
    assert held["svg"].count("<polygon") == 4 + 4
    assert held["svg"].count("<rect") == 2
    assert Froc().shows == ("images",)


def test_boxes_have_their_padding():
    found = detection.boxes_of(np.array([[[10.0, 20], [30, 20], [20, 12], [20, 28]]]), 5.0)
    np.testing.assert_array_equal(found, [[5, 7, 35, 33]])
    padded = collected() | {"boxes": collected()["boxes"] + np.float32([-5, -5, 5, 5])}
    assert Froc(padding=5.0).exact(padded, intervals="none")["hit_overlap"] == pytest.approx(1)
