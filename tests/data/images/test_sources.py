"""Images of all sources are 28 x 28 and grey, with the names of their classes."""

import importlib
import pathlib
import sys

import numpy as np
import pytest

from scalejax.data.images.pictures import png
from scalejax.data.images.sources import Digits, FashionMnist, ImageFolder, scaled
from scalejax.errors import UserError


def test_fashion_mnist_is_bundled_with_five_hundred_pictures_a_class() -> None:
    found = FashionMnist().read()
    assert (found.pixels.shape, found.pixels.dtype) == ((5000, 28, 28), np.uint8)
    np.testing.assert_array_equal(np.bincount(found.labels), [500] * 10)
    np.testing.assert_array_equal(np.bincount(found.labels[:4000]), [400] * 10)  # the published training part
    assert found.names[0] == "t-shirt"
    assert found.names[9] == "ankle boot"
    assert len({image.tobytes() for image in found.pixels}) == 5000
    assert found.pixels[found.labels == 1, :, :4].mean() < 1  # trousers are narrow
    assert found.pixels[found.labels == 8, :, :4].mean() > 30  # bags are not


def test_digits_are_enlarged_three_times_within_a_black_edge() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is of the extra test")
    found, given = Digits().read(), datasets.load_digits()
    assert found.pixels.shape == (1797, 28, 28)
    assert not found.pixels[:, :2].any()
    assert not found.pixels[:, :, 26:].any()
    np.testing.assert_array_equal(found.pixels[:, 3:26:3, 3:26:3], np.rint(given.images * 255 / 16))
    np.testing.assert_array_equal(found.pixels[:, 2:26:3, 4:26:3], found.pixels[:, 3:26:3, 3:26:3])
    np.testing.assert_array_equal(found.labels, given.target)
    assert found.names[7] == "seven"


def test_without_scikit_learn_digits_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        Digits().read()


@pytest.mark.parametrize("shape", [(28, 28), (56, 84), (14, 14), (37, 31), (8, 8)])
def test_scaling_takes_the_mean_of_what_a_pixel_covers(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.float64)
    side = min(shape)
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    square = image[top : top + side, left : left + side]
    # Both grids are whole on one of side * 28 pixels.
    fine = square.repeat(28, 0).repeat(28, 1)
    means = fine.reshape(28, side, 28, side).mean((1, 3))
    np.testing.assert_allclose(scaled(image), means, atol=0.5 + 1e-9)
    assert (scaled(np.full(shape, 255.0)) == 255).all()


def test_a_folder_of_folders_names_its_classes(tmp_path: pathlib.Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28)).astype(np.uint8)
    for place, image in zip(("boot/b", "boot/a", "hat/c"), pixels, strict=True):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / f"{place}.png").write_bytes(png(image))
    imsave = importlib.import_module("matplotlib.image").imsave
    colours = np.zeros((56, 56, 3), np.uint8)
    colours[..., 0] = 255
    imsave(tmp_path / "hat" / "d.png", colours)
    found = ImageFolder(path=str(tmp_path)).read()
    np.testing.assert_array_equal(found.pixels[:3], pixels[[1, 0, 2]])
    np.testing.assert_array_equal(found.pixels[3], 85)  # the mean of red, green and blue
    assert (found.labels.tolist(), found.names) == ([0, 0, 1, 1], ("boot", "hat"))


def test_an_npz_of_images_has_names_if_they_are_given(tmp_path: pathlib.Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28)).astype(np.uint8)
    path = str(tmp_path / "images.npz")
    np.savez(path, images=images, labels=np.array([0, 2, 1, 0, 2]))
    found = ImageFolder(path=path).read()
    np.testing.assert_array_equal(found.pixels, images)
    assert found.names == ("0", "1", "2")
    assert ImageFolder(path=path, names=("a", "b", "c")).read().names == ("a", "b", "c")
    with pytest.raises(UserError, match="5 images and 5 labels from 0 to 2"):
        ImageFolder(path=path, names=("a", "b")).read()


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": np.zeros(2, int)}, r"must have images uint8\[N, H, W\]"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, r"got images float64\[2, 4, 4\]"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "2 images and 3 labels"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, -1])}, "labels from -1 to 0"),
    ],
)
def test_an_npz_of_something_else_is_refused(tmp_path: pathlib.Path, arrays: dict[str, np.ndarray], said: str) -> None:
    np.savez(tmp_path / "images.npz", **arrays)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=said):
        ImageFolder(path=str(tmp_path / "images.npz")).read()


def test_damaged_and_missing_files_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"has no folder with \*\.png files"):
        ImageFolder(path=str(tmp_path)).read()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(png(np.zeros((28, 28), np.uint8))[:40])
    with pytest.raises(UserError, match=r"x\.png is no PNG that can be read"):
        ImageFolder(path=str(tmp_path)).read()
    with pytest.raises(UserError, match="is no complete npz"):
        ImageFolder(path=str(tmp_path / "gone.npz")).read()
