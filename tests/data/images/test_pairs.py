"""Pairs: never one subject with itself, templates augmented by themselves, the same after a resume."""

import itertools

import numpy as np
import pytest
from scipy import ndimage
from segmentation_cases import SCHEMA, SIDE, drawn

from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.pairs import CHANNEL, Candidates, Pairs, alike, subjects_of
from scalejax.errors import UserError

SHIFTED = Augment(shift=3, noise=0.1)


def data_set(count=40, batch_size=8, augment=SHIFTED, **more):
    train = drawn(count, 0) | {"rows": np.arange(count, dtype=np.int32)}
    train |= {name: value[:count] for name, value in more.items()}
    test = {name: value[:8] for name, value in train.items()}
    return ImageDataSet({"train": train, "test": test}, batch_size=batch_size, schema=SCHEMA, augment=augment, seed=3)


def batches(pairs, count, **position):
    return list(itertools.islice(pairs.train_batches(**({"start_example": 0} | position)), count))


@pytest.mark.parametrize("near", [None, 3, 1000])
def test_no_subject_stands_beside_itself_and_all_others_may(near):
    data = data_set(subjects=np.random.default_rng(0).integers(0, 5, 40).astype(np.int32) * 7)
    subjects = data.splits["train"]["subjects"]
    pairs = Pairs(data, alike=near)
    positions = np.arange(4000)
    rows = data.rows_at(positions)
    partners = pairs.partners(rows, positions)
    assert (subjects[rows] != subjects[partners]).all()
    likeness = alike(data.splits["train"]["images"], data.splits["train"]["images"])
    for row in range(40):
        met = set(partners[rows == row].tolist())
        others = np.flatnonzero(subjects != subjects[row])
        if near == 3:
            assert met == set(others[np.argsort(-likeness[row, others], kind="stable")[:3]].tolist())
        elif near is None:
            assert met <= set(others.tolist())
            assert len(met) > 0.8 * len(others)  # of 100 draws


def test_targets_are_those_of_the_data_and_templates_have_a_channel_of_their_own():
    data = data_set()
    pairs = Pairs(data)
    for number, batch in enumerate(batches(pairs, 6)):
        positions = 8 * number + np.arange(8)
        for name, wanted in data.seen(positions, channel=0).items():
            np.testing.assert_array_equal(batch[name], wanted)
        rows = pairs.partners(data.rows_at(positions), positions)
        train = {name: data.splits["train"][name][rows] for name in ("images", "masks")}
        wanted = SHIFTED.apply(train, positions, seed=3, channel=CHANNEL)
        np.testing.assert_array_equal(batch["template_images"], wanted["images"])
        np.testing.assert_array_equal(batch["template_masks"], wanted["masks"])
        same = SHIFTED.apply(train, positions, seed=3, channel=0)
        assert (batch["template_images"] != same["images"]).any((1, 2, 3)).all()


def test_pairs_are_the_same_after_a_resume_and_for_any_number_of_processes():
    whole = batches(Pairs(data_set(), alike=5), 7)
    again = batches(Pairs(data_set(), alike=5), 3, start_example=4 * 8)
    for one, two in zip(whole[4:], again, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
    parts = [batches(Pairs(data_set(), alike=5), 7, process_index=p, process_count=2) for p in range(2)]
    for one, first, second in zip(whole, *parts, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], np.concatenate([first[name], second[name]]))


def test_pictures_of_one_subject_are_refused():
    with pytest.raises(UserError, match="All 40 training pictures are of subject 7, and a target must not be its own"):
        Pairs(data_set(subjects=np.full(40, 7, np.int32)))
    with pytest.raises(UserError, match=r"the data has images, masks\. Give it the array 'subjects' or 'cases'"):
        subjects_of({"images": np.zeros(1), "masks": np.zeros(1)})


def test_likeness_is_the_correlation_of_averaged_pictures():
    images = np.random.default_rng(0).normal(size=(4, 24, 16, 1))
    small = images[..., 0].reshape(4, 8, 3, 8, 2).mean((2, 4)).reshape(4, -1)
    np.testing.assert_allclose(alike(images, images), np.corrcoef(small), atol=1e-12)
    smooth = ndimage.gaussian_filter(np.random.default_rng(1).normal(size=(5, 30, 19)), (0, 3, 3))[..., None]
    moved = 2 * np.roll(smooth, 1, 1) + 5 + np.random.default_rng(2).normal(0, 0.01, smooth.shape)
    np.testing.assert_array_equal(alike(moved, smooth).argmax(1), np.arange(5))


def test_a_target_has_no_share_in_its_own_subject_whatever_its_split():
    data = data_set()
    for candidates in (Candidates.first(data, 5), Candidates.spaced(data, 6)):
        batch = {name: array[:12] for name, array in data.splits["train"].items()}
        own = subjects_of(batch)[:, None] == candidates.subjects
        for choose in ("one", "nearest", "ensemble"):
            found = candidates.weights(batch, choose)
            assert own.any()
            assert (found[own] == 0).all()
            np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
            free = candidates.weights(batch | {"cases": batch["cases"] + 1000}, choose)
            if choose == "one":
                assert (free.argmax(1) == 0).all()
            if choose == "nearest":
                likeness = alike(batch["images"], candidates.arrays["images"])
                np.testing.assert_array_equal(free.argmax(1), likeness.argmax(1))
            if choose == "ensemble":
                np.testing.assert_allclose(free, 1 / len(candidates.subjects))
    one = Candidates.spaced(data, 1)
    with pytest.raises(UserError, match="all candidates are of its subject"):
        one.weights(batch, "nearest")


def test_the_one_template_may_be_named_and_must_exist():
    data = data_set()
    np.testing.assert_array_equal(Candidates.first(data, 5).arrays["masks"][0], data.splits["train"]["masks"][5])
    with pytest.raises(UserError, match=r"model.templates.row=40 is no picture of the training split, which has 40"):
        Candidates.first(data, 40)


def test_templates_of_evaluations_are_the_middle_of_what_windows_are_cut_from():
    train = {
        name: np.pad(x, ((0, 0), (2, 2), (1, 1), *((0, 0),) * (x.ndim - 3))) if x.ndim > 2 else x
        for name, x in drawn(8, 0).items()
    }
    augment = Augment(window=(SIDE, SIDE))
    data = ImageDataSet({"train": train, "test": drawn(8, 1)}, batch_size=8, schema=SCHEMA, augment=augment)
    found = Candidates.spaced(data, 8).arrays
    np.testing.assert_array_equal(found["images"], drawn(8, 0)["images"])
    np.testing.assert_array_equal(found["masks"], drawn(8, 0)["masks"])
