"""Batches of pictures: the same for any process count and after a resume, as other streams are."""

import dataclasses

import numpy as np
import pytest

from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet, View
from scalejax.data.images.labelled import LabelledImages, LabelNoise
from scalejax.data.images.nuclei import TRAIN_CORNERS, NucleiTiles, nuclei, nuclei_regions
from scalejax.data.images.schema import ImageSchema
from scalejax.data.images.sources import Digits
from scalejax.errors import UserError

AUGMENT = Augment(crop=2, flip="horizontal", turn=10, noise=2)
SCHEMA = ImageSchema(height=8, width=8, channels=1, mean=(127.0,), std=(50.0,))


def pictures(count: int = 20, augment: Augment = AUGMENT, batch_size: int = 8) -> ImageDataSet:
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1)).astype(np.uint8)
    split = {"images": images, "labels": np.arange(count, dtype=np.int32)}
    return ImageDataSet({"train": split, "test": split}, batch_size=batch_size, schema=SCHEMA, augment=augment)


def some(stream, count: int) -> list[dict[str, np.ndarray]]:
    return [next(stream) for _ in range(count)]


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


VIEWS = (View(prefix="other_", channel=1), View(prefix="before_", channel=0, ahead=-1))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_have_slices_of_the_same_batches(processes: int) -> None:
    data = pictures()
    whole = some(data.train_batches(start_example=0, views=VIEWS), 6)  # over two ends of an epoch
    streams = [
        data.train_batches(start_example=0, process_index=p, process_count=processes, views=VIEWS)
        for p in range(processes)
    ]
    for batch in whole:
        parts = [next(stream) for stream in streams]
        assert_same(batch, {name: np.concatenate([part[name] for part in parts]) for name in batch})


def test_a_run_that_goes_on_sees_what_it_would_have_seen() -> None:
    data = pictures()
    whole = some(data.train_batches(start_example=0, views=VIEWS), 6)
    for batch, again in zip(whole[3:], data.train_batches(start_example=24, views=VIEWS), strict=False):
        assert_same(batch, again)


def test_an_example_looks_another_way_in_another_epoch_and_channel() -> None:
    data = pictures(count=8)
    stream = data.train_batches(start_example=0, views=VIEWS)
    first, second = next(stream), next(stream)
    order = np.argsort(first["labels"]), np.argsort(second["labels"])
    assert not np.array_equal(first["images"][order[0]], second["images"][order[1]])
    np.testing.assert_array_equal(first["labels"], first["other_labels"])
    assert not np.array_equal(first["images"], first["other_images"])
    np.testing.assert_array_equal(second["before_images"], first["images"])


def test_what_is_scored_is_not_augmented() -> None:
    data = pictures()
    scored = np.concatenate([batch["images"] for batch in data.eval_batches("test")])
    np.testing.assert_array_equal(scored[:20], data.splits["test"]["images"])


def test_augmentations_are_part_of_the_data() -> None:
    assert pictures().fingerprint() == pictures().fingerprint()
    assert pictures().fingerprint() != pictures(augment=Augment()).fingerprint()


def test_pictures_of_another_size_than_the_schema_says_are_refused() -> None:
    arrays = {"images": np.zeros((4, 4, 8, 1), np.uint8)}
    with pytest.raises(UserError, match=r"split 'train' must be uint8\[8, 8, 1\].*got uint8\[4, 8, 1\]"):
        ImageDataSet({"train": arrays}, batch_size=2, schema=SCHEMA, augment=Augment())
    with pytest.raises(UserError, match=r"data.augment.window=\(4, 8\): pictures .* shown whole in all splits, 8 x 8"):
        pictures(augment=Augment(window=(4, 8)))


@pytest.mark.parametrize("between", [None, [5, 5, 0, 5]])
def test_distances_by_case_come_with_the_pictures(between: list[int] | None) -> None:
    arrays = {"images": np.zeros((4, 8, 8, 1), np.uint8)}
    if between is not None:
        arrays["slice_spacing"] = np.array(between, np.float32)
    schema = dataclasses.replace(SCHEMA, slice_spacing="by case")
    with pytest.raises(UserError, match=r"split 'train' must have the array slice_spacing, millimetres above 0"):
        ImageDataSet({"train": arrays}, batch_size=2, schema=schema, augment=Augment())


@pytest.mark.parametrize("name", ["labels", "images"])
def test_arrays_without_pictures_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"split 'train' must have images \[N, H, W, C\]; it has {{'{name}': \[4\]"):
        ImageDataSet({"train": {name: np.zeros(4, np.int32)}}, batch_size=2, schema=SCHEMA, augment=Augment())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_of_arrays_that_are_no_numbers_are_refused(value: float) -> None:
    images = np.zeros((4, 8, 8, 1), np.float32)
    images[2, 3, 4] = value
    schema = dataclasses.replace(SCHEMA, dtype="float32")
    with pytest.raises(UserError, match=r"split 'test': images has 1 pixels that are NaN .* first at \[2, 3, 4, 0\]"):
        splits = {"train": {"images": np.zeros_like(images)}, "test": {"images": images}}
        ImageDataSet(splits, batch_size=2, schema=schema, augment=Augment())


@pytest.mark.parametrize(
    "change", [{"mean": (1.0, 2.0)}, {"std": (1.0, 2.0)}, {"std": (0.0,)}, {"std": (np.nan,)}, {"channels": 3}]
)
def test_a_schema_without_a_mean_and_a_deviation_of_each_channel_is_refused(change) -> None:
    with pytest.raises(UserError, match=r"ImageSchema: mean and std must have a number for each of \d channel\(s\)"):
        dataclasses.replace(SCHEMA, **change)


@pytest.mark.parametrize(("corner", "said"), [((7.5, 3.5), None), ((7.6, 3.0), "7.6, 3"), ((3.0, 3.6), "3, 3.6")])
def test_points_lie_inside_of_pictures_that_are_wider_than_high(corner: tuple[float, float], said: str | None) -> None:
    points = np.array([[corner, (0.0, 1.0), (1.0, 2.0), (2.0, 0.0)]], np.float32)[None]
    split = {"images": np.zeros((1, 4, 8, 1), np.uint8), "points": points}
    schema = dataclasses.replace(SCHEMA, height=4)

    def build() -> ImageDataSet:
        return ImageDataSet({"train": split}, batch_size=1, schema=schema, augment=Augment())

    if said is None:
        build()
        return
    with pytest.raises(UserError, match=f"x, y = {said}, outside of a picture that is 8 wide and 4 high"):
        build()


def ends_of(points: list[list[float]]) -> np.ndarray:
    """Of four pictures the second object of the third one alone."""
    found = np.full((4, 2, 4, 2), np.nan, np.float32)
    found[2, 1] = points
    return found


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("masks", np.zeros((4, 8, 7), np.int32), r"has masks \[4, 8, 7\] for images \[4, 8, 8\]"),
        (
            "masks",
            np.full((4, 8, 8), 2, np.int32),
            r"masks of example 0 has 2, and the schema has the classes 0 to 1 \(a, b\)",
        ),
        ("labels", np.array([0, 1, -1, 0], np.int32), "labels of example 2 has -1"),
        (
            "points",
            np.full((4, 1, 4, 2), 7.6, np.float32),
            "points of example 0 has x, y = 7.6, 7.6, outside of a picture",
        ),
        ("ends", np.full((4, 1, 4, 2), -1.0, np.float32), "ends of example 0 has x, y = -1, -1"),
        ("ends", np.zeros((4, 4, 2), np.float32), r"ends must be \[N, objects, K, 2\].*got \[4, 4, 2\]"),
        ("points", np.zeros((4, 1, 3, 2), np.float32), r"points must be \[N, objects, 4 or 5, 2\].*got \[4, 1, 3, 2\]"),
        ("ends", ends_of([[1, 1], [np.nan, 2], [6, 6], [7, 5]]), "ends of example 2, object 1 are NaN in part"),
        ("points", ends_of([[1, 1], [np.nan, 2], [6, 6], [7, 5]]), "points of example 2, object 1 are NaN in part"),
        (
            "ends",
            ends_of([[1, 1], [2, 2], [6, 6], [7, 5]]),
            r"split 'train': ends of example 2, object 1: its diameters do not meet \(1, 1, 2, 2, 6, 6, 7, 5\)",
        ),
    ],
)
def test_masks_labels_and_points_that_do_not_go_with_pictures_are_refused(name, array, said: str) -> None:
    split = {"images": np.zeros((4, 8, 8, 1), np.uint8), name: array}
    schema = dataclasses.replace(SCHEMA, classes=("a", "b"))
    with pytest.raises(UserError, match=said):
        ImageDataSet({"train": split}, batch_size=2, schema=schema, augment=Augment())


def test_points_that_are_not_there_and_on_the_edge_are_taken() -> None:
    points = np.array([np.nan, 0.0, 7.0, 7.5], np.float32).reshape(4, 1, 1, 1).repeat(4, 2).repeat(2, 3)
    split = {"images": np.zeros((4, 8, 8, 1), np.uint8), "points": points}
    assert ImageDataSet({"train": split}, batch_size=2, schema=SCHEMA, augment=AUGMENT).num_examples("train") == 4


def test_labelled_pictures_are_split_with_what_is_published_as_the_test() -> None:
    config = LabelledImages(batch_size=16)
    data, schema = config.build(), config.schema()
    assert [data.num_examples(split) for split in ("train", "validation", "test")] == [3600, 400, 1000]
    assert schema.shape == (28, 28, 1)
    assert schema.classes[9] == "ankle boot"
    train = data.splits["train"]["images"].astype(np.float64)
    np.testing.assert_allclose((*schema.mean, *schema.std), (train.mean(), train.std()), rtol=1e-5)
    batch = next(data.train_batches(start_example=0))
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "images": ((16, 28, 28, 1), "uint8"),
        "labels": ((16,), "int32"),
        "true_labels": ((16,), "int32"),
        "weights": ((16,), "float32"),
    }
    other = LabelledImages(batch_size=16, split_seed=1).build()
    assert not np.array_equal(other.splits["validation"]["images"], data.splits["validation"]["images"])
    np.testing.assert_array_equal(other.splits["test"]["images"], data.splits["test"]["images"])
    together = np.concatenate([data.splits[split]["images"] for split in data.splits])
    assert len({image.tobytes() for image in together}) == 5000


def test_digits_without_a_test_of_their_own_have_a_share_set_apart() -> None:
    pytest.importorskip("sklearn.datasets", reason="scikit-learn is of the extra test")
    data = LabelledImages(source=Digits(), validation=0.1, test=0.2, size=(14, 14), channels=3).build()
    assert [data.num_examples(split) for split in ("train", "validation", "test")] == [1257, 180, 360]
    assert data.schema.shape == (14, 14, 3)
    with pytest.raises(UserError, match=r"data.validation=0.9 and data.test=0.1 of 1797 pictures leave none for train"):
        LabelledImages(source=Digits(), validation=0.9, test=0.1).build()
    with pytest.raises(UserError, match=r"data.test must be a share.*got 1"):
        LabelledImages(source=Digits(), test=1.0).build()


def test_a_window_shows_the_middle_where_pictures_are_scored() -> None:
    data = LabelledImages(augment=Augment(window=(24, 20))).build()
    assert next(data.train_batches(start_example=0))["images"].shape == (128, 24, 20, 1)
    whole = LabelledImages().build()
    np.testing.assert_array_equal(
        data.splits["test"]["images"], whole.splits["test"]["images"][:, 2:26, 4:24], strict=True
    )


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_wrong_labels_are_a_share_of_training_and_validation_alone(kind) -> None:
    data = LabelledImages(noise=LabelNoise(kind=kind, rate=0.4)).build()
    for split in ("train", "validation"):
        labels, true = data.splits[split]["labels"], data.splits[split]["true_labels"]
        wrong = labels != true
        assert abs(wrong.mean() - 0.4) < 4 * np.sqrt(0.24 / len(labels))
        steps = np.bincount((labels - true)[wrong] % 10, minlength=10)
        assert steps[0] == 0
        if kind == "pair":
            assert steps[1] == wrong.sum()
        else:
            assert np.abs(steps[1:] / wrong.sum() - 1 / 9).max() < 5 / np.sqrt(wrong.sum())
    np.testing.assert_array_equal(data.splits["test"]["labels"], data.splits["test"]["true_labels"])
    clean = LabelledImages().build()
    np.testing.assert_array_equal(clean.splits["train"]["labels"], data.splits["train"]["true_labels"])
    again = LabelledImages(noise=LabelNoise(kind=kind, rate=0.4, seed=1)).build()
    assert not np.array_equal(again.splits["train"]["labels"], data.splits["train"]["labels"])


def test_noise_is_nested_in_more_noise() -> None:
    true = np.arange(1000) % 10
    few, many = (LabelNoise(rate=rate).apply(true, 10, 0) for rate in (0.2, 0.6))
    assert ((many != true) | (few == true)).all()
    np.testing.assert_array_equal(LabelNoise(rate=0.0).apply(true, 10, 0), true)
    two = LabelNoise(rate=0.5).apply(true % 2, 2, 0)
    assert set(two) == {0, 1}


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_of_noise_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="rate must be at least 0 and less than 1"):
        LabelNoise(rate=rate)


def test_a_kind_of_noise_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="LabelNoise: kind must be one of symmetric, pair; got 'asym'"):
        LabelNoise(kind="asym", rate=0.4)  # pyright: ignore[reportArgumentType]


def test_nuclei_are_trained_on_and_scored_in_different_places() -> None:
    picture, instances = nuclei()
    regions = nuclei_regions()
    assert {split: images.shape for split, (images, _) in regions.items()} == {
        "train": (4, 256, 256),
        "validation": (2, 128, 128),
        "test": (4, 128, 128),
    }
    seen = np.zeros((512, 512), bool)
    for top, left in TRAIN_CORNERS:
        seen[top : top + 256, left : left + 256] = True
    assert not seen[256:, 256:].any()
    assert not seen[384:].any()
    assert seen.mean() == 0.625  # of three quarters all but the two tiles of validation
    np.testing.assert_array_equal(np.block([[*regions["test"][0][:2]], [*regions["test"][0][2:]]]), picture[256:, 256:])
    np.testing.assert_array_equal(np.hstack([*regions["validation"][1]]), instances[384:, :256])


def test_tiles_of_nuclei_come_from_random_places_with_their_instances() -> None:
    data = NucleiTiles(batch_size=32, augment=Augment(window=(128, 128))).build()
    batch = next(data.train_batches(start_example=0))
    assert batch["images"].shape == (32, 128, 128, 1)
    assert batch["instances"].shape == (32, 128, 128)
    assert len({image.tobytes() for image in batch["images"]}) == 32
    inside, outside = batch["images"][batch["instances"] > 0], batch["images"][batch["instances"] == 0]
    assert inside.mean() > 2 * outside.mean()
    assert sum(len(b["weights"]) for b in data.eval_batches("test")) >= 4
