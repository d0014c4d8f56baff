"""Pictures as files that other programs read, alone and in grids with what a model said of them."""

import base64
import importlib
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from scalejax.data.images.pictures import COLOURS, Drawn, Panel, grid, labelled, png, sheet, shown, svg


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


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.replace('xmlns="http://www.w3.org/2000/svg"', ""))


def pixels_of(image: ElementTree.Element) -> np.ndarray:
    data = base64.b64decode(image.attrib["href"].partition("base64,")[2])
    return np.rint(importlib.import_module("matplotlib.image").imread(io.BytesIO(data)) * 255)


def test_a_png_may_have_colours() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 3)).astype(np.uint8)
    read = importlib.import_module("matplotlib.image").imread(io.BytesIO(png(pixels)))
    np.testing.assert_array_equal(np.rint(read * 255), pixels)


def test_a_grid_shows_classes_below_pictures_and_marks_mistakes() -> None:
    grey, colours = np.arange(12, dtype=np.uint8).reshape(3, 4), np.zeros((3, 4, 3), np.uint8)
    found = parsed(grid([labelled(grey, "cat", "cat"), labelled(colours, "a<b", "dog")] * 2, columns=3))
    images, texts = list(found.iter("image")), list(found.iter("text"))
    assert len(images) == 4
    np.testing.assert_array_equal(pixels_of(images[0]), grey)
    assert pixels_of(images[1]).shape == (3, 4, 3)
    assert [text.text for text in texts[:3]] == ["cat", "dog…", "a<b"]
    assert (texts[0].attrib["fill"], texts[1].attrib["fill"]) == ("currentColor", "#d55e00")
    places = [group.attrib["transform"] for group in found]
    assert len(set(places)) == 4
    assert float(found.attrib["width"]) == 3 * (4 * 2 + 8)


def test_masks_are_lines_where_they_are_right_and_tints_where_a_model_gave_them() -> None:
    mask = np.zeros((5, 6), np.int32)
    mask[1:3, 2:5] = 1
    mask[4, 0] = 2
    panel = Panel(pixels=np.full((5, 6), 100, np.uint8), right=mask, said=np.flip(mask, 1))
    found = parsed(grid([panel], scale=3))
    first, second = found.iter("path")
    assert set(re.findall(r"M\d+ \d+[hv]\d+", first.attrib["d"])) == {"M2 1h3", "M2 3h3", "M2 1v2", "M5 1v2"}
    assert second.attrib["stroke"] == COLOURS[1]
    (image,) = found.iter("image")
    tinted = (pixels_of(image) != 100).any(-1)
    np.testing.assert_array_equal(tinted, np.flip(mask, 1) > 0)


def test_boxes_and_points_lie_on_the_middles_of_pixels() -> None:
    box = Drawn(kind="box", points=np.array([[1.0, 2.0], [4.0, 3.0]]), label=".9 & more", said=True)
    cross = Drawn(kind="points", points=np.array([[0.0, 0.0], [np.nan, 1.0], [5.0, 4.0]]))
    gone = Drawn(kind="box", points=np.full((2, 2), np.nan))
    shape = Drawn(kind="polygon", points=np.array([[0.0, 0.0], [3.0, 0.0], [3.0, 2.0]]))
    found = parsed(grid([Panel(pixels=np.zeros((6, 7), np.float32), drawn=(box, cross, gone, shape))]))
    (rect,) = found.iter("rect")
    assert [rect.attrib[name] for name in ("x", "y", "width", "height")] == ["1.5", "2.5", "3", "1"]
    assert "stroke-dasharray" in rect.attrib
    assert [(c.attrib["cx"], c.attrib["cy"]) for c in found.iter("circle")] == [("0.5", "0.5"), ("5.5", "4.5")]
    assert [p.attrib["points"] for p in found.iter("polygon")] == ["0.5,0.5 3.5,0.5 3.5,2.5"]
    assert [text.text for text in found.iter("text")] == [".9 & more"]


def test_values_are_shown_between_limits_and_the_middle_of_many_channels() -> None:
    scan = np.stack([np.zeros((2, 2)), np.array([[-200.0, -160.0], [40.0, 300.0]]), np.ones((2, 2))] * 3, -1)[..., :5]
    np.testing.assert_array_equal(shown(scan[..., 1:2], (-160, 240)), [[0, 0], [128, 255]])
    assert shown(scan).shape == (2, 2)
    np.testing.assert_array_equal(shown(np.full((2, 2), 7.0)), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="at least one picture"):
        grid([])
