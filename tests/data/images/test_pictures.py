"""Grey pictures as files that other programs read."""

import base64
import importlib
import io
import re

import numpy as np

from scalejax.data.images.pictures import png, sheet, svg


def test_a_png_is_read_by_others_as_what_it_was() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9)).astype(np.uint8)
    read = importlib.import_module("matplotlib.image").imread(io.BytesIO(png(pixels)))
    np.testing.assert_array_equal(np.rint(read * 255), pixels)


def test_a_sheet_has_images_side_by_side() -> None:
    images = np.arange(3, dtype=np.uint8)[:, None, None] * np.ones((3, 4, 5), np.uint8)
    found = sheet(images, 2)
    assert found.shape == (10, 12)
    assert (found[:4, :5] == 0).all()
    assert (found[:4, 7:] == 1).all()
    assert (found[6:, :5] == 2).all()
    assert (found[4:6] == 255).all()
    assert (found[6:, 5:] == 255).all()


def test_an_svg_holds_its_png() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9)).astype(np.uint8)
    text = svg(pixels, scale=3)
    assert 'width="27" height="15"' in text
    data = re.search(r"base64,([^\"]+)", text)
    assert data is not None
    assert base64.b64decode(data[1]) == png(pixels)
