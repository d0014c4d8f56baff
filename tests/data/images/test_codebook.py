"""Images to codes and back: the nearest of centres that k-means found, equal on every machine."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.images.codebook import PatchCodebook, from_patches, to_patches, train_codebook
from scalejax.data.images.sources import FashionMnist
from scalejax.errors import UserError


def images(count: int, seed: int = 0) -> np.ndarray:
    """Smooth stripes, no two alike."""
    random = np.random.default_rng(seed)
    angle, width, offset = random.random((3, count, 1, 1)) * [[[[3.0]]], [[[0.5]]], [[[9.0]]]]
    y, x = np.mgrid[:28, :28]
    return np.rint(127.5 + 127.5 * np.sin((x * np.cos(angle) + y * np.sin(angle)) * (width + 0.1) + offset)).astype(
        np.uint8
    )


def test_patches_are_four_by_four_row_after_row() -> None:
    found = images(2)
    patches = to_patches(found)
    assert patches.shape == (2, 49, 16)
    np.testing.assert_array_equal(patches[1, 9].reshape(4, 4), found[1, 4:8, 8:12])
    np.testing.assert_array_equal(from_patches(patches), found)


def test_codes_are_the_nearest_centres_and_decode_to_them() -> None:
    found = images(20)
    codebook = train_codebook(found, 32)
    codes = codebook.encode(found)
    assert (codes.shape, codes.dtype) == ((20, 49), np.int32)
    distances = ((to_patches(found)[:, :, None].astype(int) - codebook.centres.astype(int)) ** 2).sum(-1)
    np.testing.assert_array_equal(codes, distances.argmin(-1))  # the first of equals
    decoded = codebook.decode(codes)
    assert (decoded.shape, decoded.dtype) == ((20, 28, 28), np.uint8)
    assert codebook.error(found) == pytest.approx(((decoded.astype(float) - found) ** 2).mean())
    assert codebook.error(found) == pytest.approx(distances.min(-1).mean() / 16)
    np.testing.assert_array_equal(codebook.encode(decoded), codes)  # centres are their own codes


def test_centres_are_the_rounded_means_of_their_patches() -> None:
    found = images(20)
    codebook = train_codebook(found, 16, iterations=200)
    codes, patches = codebook.encode(found).reshape(-1), to_patches(found).reshape(-1, 16)
    for number, centre in enumerate(codebook.centres):
        mean = patches[codes == number].mean(0)
        np.testing.assert_array_equal(centre, np.floor(mean + 0.5))


def test_the_error_falls_with_iterations_and_with_codes() -> None:
    found = images(40)
    errors = [train_codebook(found, 32, iterations=n).error(found) for n in (0, 1, 20)]
    assert errors[0] > errors[1] > errors[2]
    assert train_codebook(found, 64).error(found) < errors[2] < found.astype(float).var() / 5


def test_a_seed_gives_one_codebook_and_more_copies_of_an_image_do_not_change_what_is_distinct() -> None:
    found = images(10)
    digests = [train_codebook(found, 16, seed=seed).digest() for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6))
def test_as_many_codes_as_patches_lose_nothing(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    kinds = random.integers(0, 256, (count, 4, 4)).astype(np.uint8)
    found = kinds[random.integers(0, count, (3, 7, 7))].transpose(0, 1, 3, 2, 4).reshape(3, 28, 28)
    distinct = len(np.unique(to_patches(found).reshape(-1, 16), axis=0))
    codebook = train_codebook(found, distinct)
    np.testing.assert_array_equal(codebook.decode(codebook.encode(found)), found)


def test_more_codes_than_distinct_patches_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.codes=3: the training images have 2 distinct patches"):
        train_codebook(np.stack([np.zeros((28, 28), np.uint8), np.full((28, 28), 9, np.uint8)]), 3)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (np.full((2, 49), 16), r"codes must lie in \[0, 16\); got 16 for patch 0 of image 0"),
        (np.full((2, 49), -1), "got -1 for patch 0"),
        (np.zeros((2, 48), int), r"codes must be integers\[N, 49\].*got int64\[2, 48\]"),
        (np.zeros(49, int), r"got int64\[49\]"),
        (np.zeros((1, 49)), "got float64"),
    ],
)
def test_codes_of_no_image_are_refused(codes: np.ndarray, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train_codebook(images(4), 16).decode(codes)


def test_a_codebook_is_what_its_file_says(tmp_path: pathlib.Path) -> None:
    codebook = train_codebook(images(10), 16)
    (tmp_path / "codebook.npz").write_bytes(codebook.to_bytes())
    assert PatchCodebook.read(tmp_path / "codebook.npz").digest() == codebook.digest()
    assert codebook.to_bytes() == codebook.to_bytes()


@pytest.mark.parametrize("centres", [np.zeros((4, 15), np.uint8), np.zeros((4, 16)), np.zeros(16, np.uint8)])
def test_a_file_that_is_no_codebook_is_refused(tmp_path: pathlib.Path, centres: np.ndarray) -> None:
    np.savez(tmp_path / "codebook.npz", centres=centres)
    with pytest.raises(UserError, match="is no codebook"):
        PatchCodebook.read(tmp_path / "codebook.npz")
    with pytest.raises(UserError, match="is no codebook"):
        PatchCodebook.read(tmp_path / "gone.npz")


@pytest.mark.slow
def test_held_out_clothes_are_drawn_almost_as_well_as_those_of_training() -> None:
    """On 1,000 pictures; with all 4,000 and 25 iterations it is 554 and 579, of pixels whose variance is 8,152."""
    found = FashionMnist().read()
    train, held = found.pixels[:4000:4], found.pixels[4000:]
    codebook = train_codebook(train, 128, iterations=10)
    errors = codebook.error(train), codebook.error(held)
    assert errors[0] < errors[1] < 1.15 * errors[0]
    assert errors[1] < 640


def test_no_images_have_no_codes():
    codebook = PatchCodebook(np.zeros((3, 16), np.uint8))
    assert codebook.encode(np.zeros((0, 28, 28), np.uint8)).shape == (0, 49)
