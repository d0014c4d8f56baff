"""Pictures, masks and points change together, by numbers that follow from seed, example and channel alone."""

import dataclasses
import time

import numpy as np
import pytest

from scalejax.data.images import augment
from scalejax.data.images.augment import Augment, relabel
from scalejax.errors import UserError

EVERYTHING = Augment(
    crop=3,
    flip="both",
    quarter_turns=True,
    turn=30,
    scale=(0.8, 1.2),
    shift=2,
    brightness=(0.8, 1.2),
    contrast=(0.8, 1.2),
    noise=3,
)


def examples(count: int = 6, height: int = 12, width: int = 12, channels: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    # No two points of an object are equally far out, and sixteenths of a pixel are exact where they are mirrored.
    ends = 3 + (np.argsort(rng.random((count, 3, 80, 2)), 2)[:, :, :4] / 16).astype(np.float32)
    ends[1, 2] = np.nan
    return {
        "images": rng.integers(0, 256, (count, height, width, channels)).astype(np.uint8),
        "masks": rng.integers(0, 3, (count, height, width)).astype(np.int32),
        "ends": ends,
        "points": np.concatenate([relabel(ends), ends.mean(2, keepdims=True)], 2),
        "labels": np.arange(count, dtype=np.int32),
    }


def applied(config: Augment, arrays: dict[str, np.ndarray], channel: int = 0, first: int = 0, seed: int = 0):
    return config.apply(arrays, np.arange(len(arrays["images"])) + first, seed=seed, channel=channel)


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype


ONE_EACH = [
    Augment(crop=3),
    Augment(window=(8, 10)),
    Augment(window=(8, 10), crop=1, turn=10),
    Augment(flip="both"),
    Augment(quarter_turns=True),
    Augment(turn=20),
    Augment(brightness=(0.5, 2.0), contrast=(0.5, 2.0)),
    Augment(noise=2.0),
    EVERYTHING,
]


@pytest.mark.parametrize(
    "config", ONE_EACH, ids=lambda c: "-".join(n for n, v in vars(c).items() if v != getattr(Augment(), n))
)
def test_an_example_looks_the_same_in_any_batch(config: Augment) -> None:
    arrays = examples()
    whole = applied(config, arrays)
    for cut in (1, 2, 5):
        first = applied(config, {name: array[:cut] for name, array in arrays.items()})
        rest = applied(config, {name: array[cut:] for name, array in arrays.items()}, first=cut)
        assert_equal(whole, {name: np.concatenate([first[name], rest[name]]) for name in whole})
    assert not np.array_equal(whole["images"], applied(config, arrays, channel=1)["images"])
    assert not np.array_equal(whole["images"], applied(config, arrays, seed=1)["images"])
    assert not np.array_equal(whole["images"], applied(config, arrays, first=6)["images"])
    assert whole["images"].dtype == np.uint8
    assert np.array_equal(whole["labels"], arrays["labels"])


def test_nothing_happens_if_nothing_is_said() -> None:
    arrays = examples()
    assert_equal(applied(Augment(), arrays), arrays)


def test_a_crop_shows_a_window_of_the_padded_picture() -> None:
    arrays = examples(count=40)
    found = applied(Augment(crop=2), arrays)
    corners = set()
    for n in range(40):
        padded = np.pad(arrays["images"][n], ((2, 2), (2, 2), (0, 0)))
        places = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.array_equal(padded[i : i + 12, j : j + 12], found["images"][n])
        ]
        assert len(places) == 1
        ((i, j),) = places
        corners.add((i, j))
        np.testing.assert_array_equal(found["masks"][n], np.pad(arrays["masks"][n], 2)[i : i + 12, j : j + 12])
        np.testing.assert_allclose(found["ends"][n], arrays["ends"][n] + [2 - j, 2 - i], atol=1e-5)
    assert len(corners) > 15


@pytest.mark.parametrize("config", [Augment(crop=6), Augment(scale=(0.5, 0.5)), Augment(crop=1, turn=45)])
def test_beyond_the_edge_lies_the_least_of_a_scan_and_black_of_a_picture(config: Augment) -> None:
    scan = examples()["images"].astype(np.float32) + 10 * np.arange(6, dtype=np.float32)[:, None, None, None] - 160
    found = applied(config, {"images": scan})["images"]
    least = scan.min((1, 2))
    np.testing.assert_allclose(found.min((1, 2)), least, atol=1e-4)
    assert ((found - least[:, None, None]) < 1e-4).any((1, 2, 3)).all()
    bright = {"images": np.full((6, 12, 12, 1), 200, np.uint8)}
    assert (applied(config, bright)["images"] == 0).any((1, 2, 3)).sum() >= 5
    assert applied(dataclasses.replace(config, fill=7), bright)["images"].min() == 7


def test_a_window_is_cut_and_objects_outside_are_gone() -> None:
    arrays = examples(count=50, height=30, width=20)
    found = applied(Augment(window=(8, 6)), arrays)
    assert found["images"].shape == (50, 8, 6, 2)
    there = ~np.isnan(found["ends"]).any((2, 3))
    assert 5 < there.sum() < 100
    assert np.nanmin(found["ends"]) >= 0
    assert np.nanmax(found["ends"][..., 0]) <= 5
    assert np.nanmax(found["ends"][..., 1]) <= 7
    np.testing.assert_array_equal(np.isnan(found["points"]).any((2, 3)), ~there)


@pytest.mark.parametrize(("flip", "axis"), [("horizontal", 2), ("vertical", 1)])
def test_half_of_the_pictures_are_mirrored_with_what_belongs_to_them(flip, axis) -> None:
    arrays = examples(count=60)
    found = applied(Augment(flip=flip), arrays)
    mirrored = (found["images"] != arrays["images"]).any((1, 2, 3))
    assert 20 < mirrored.sum() < 40
    np.testing.assert_array_equal(found["images"][mirrored], np.flip(arrays["images"], axis)[mirrored])
    np.testing.assert_array_equal(found["masks"][mirrored], np.flip(arrays["masks"], axis)[mirrored])
    wanted = arrays["ends"][mirrored].copy()
    wanted[..., 2 - axis] = 11 - wanted[..., 2 - axis]
    np.testing.assert_array_equal(found["ends"][mirrored], wanted)
    # Top, left, bottom, right: left and right change places, or top and bottom do.
    swap = [0, 3, 2, 1, 4] if flip == "horizontal" else [2, 1, 0, 3, 4]
    wanted = arrays["points"][mirrored][:, :, swap].copy()
    wanted[..., 2 - axis] = 11 - wanted[..., 2 - axis]
    np.testing.assert_array_equal(found["points"][mirrored], wanted)
    twice = applied(Augment(flip=flip), found)
    assert_equal(twice, arrays)


def quarter_turned(points: np.ndarray, side: int, count: int) -> np.ndarray:
    for _ in range(count):
        points = np.stack([points[..., 1], side - 1 - points[..., 0]], -1)
    return points


def test_quarter_turns_are_those_of_numpy_and_names_move_on() -> None:
    arrays = examples(count=40)
    found = applied(Augment(quarter_turns=True), arrays)
    seen = set()
    for n in range(40):
        (count,) = (k for k in range(4) if np.array_equal(np.rot90(arrays["images"][n], k), found["images"][n]))
        seen.add(count)
        np.testing.assert_array_equal(found["masks"][n], np.rot90(arrays["masks"][n], count))
        np.testing.assert_array_equal(found["ends"][n], quarter_turned(arrays["ends"][n], 12, count))
        # Counterclockwise, what was on top comes to lie on the left, and the right one on top.
        named = np.roll(quarter_turned(arrays["points"][n][:, :4], 12, count), count, axis=1)
        np.testing.assert_array_equal(found["points"][n][:, :4], named)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("side", [12, 13])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_turn_by_ninety_degrees_is_a_quarter_turn_of_picture_mask_and_points(side: int, count: int) -> None:
    arrays = examples(height=side, width=side)
    zeros = np.zeros(6, np.int64)
    found = augment._affine(
        arrays,
        turns=[np.pi / 2 * count] * 6,
        scales=np.ones(6),
        shifts=np.zeros((2, 6)),
        corner=(zeros, zeros),
        shown=(side, side),
        fill=np.zeros(()),
    )
    np.testing.assert_array_equal(np.rint(found["images"]), np.rot90(arrays["images"], count, axes=(1, 2)))
    np.testing.assert_array_equal(found["masks"], np.rot90(arrays["masks"], count, axes=(1, 2)))
    np.testing.assert_allclose(found["ends"], quarter_turned(arrays["ends"], side, count), atol=1e-5)


def test_pictures_are_interpolated_where_scipy_says_they_come_from() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    arrays = {"images": examples(height=17, width=21)["images"].astype(np.float32)}
    turn, scale, shift = 0.3, 0.9, (1.5, -2.25)
    zeros = np.zeros(6, np.int64)
    found = augment._affine(
        arrays,
        turns=[turn] * 6,
        scales=np.full(6, scale),
        shifts=np.repeat(np.array(shift)[:, None], 6, 1),
        corner=(zeros, zeros),
        shown=(17, 21),
        fill=np.array(7.0),
    )
    # Out pixel (y, x) comes from m + R^-1 (p - m - t) / s.
    back = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) / scale
    middle = np.array([8.0, 10.0])
    offset = middle - back @ (middle + shift)
    for n in range(6):
        for c in range(2):
            wanted = ndimage.affine_transform(
                arrays["images"][n, ..., c].astype(float), back, offset, order=1, mode="grid-constant", cval=7.0
            )
            np.testing.assert_allclose(found["images"][n, ..., c], wanted, atol=1e-2)


@pytest.mark.parametrize(
    "config", [EVERYTHING, Augment(turn=180, scale=(0.7, 1.4), shift=4), Augment(window=(27, 27), turn=45)]
)
def test_masks_and_points_stay_with_the_picture(config: Augment) -> None:
    config = dataclasses.replace(config, brightness=(1.0, 1.0), contrast=(1.0, 1.0), noise=0.0)
    rng = np.random.default_rng(1)
    count, side = 24, 40
    masks = np.zeros((count, side, side), np.int32)
    masks[:, 10:30, 12:24] = 1
    x, y = rng.uniform(14, 22, count), rng.uniform(12, 28, count)
    rows, columns = np.mgrid[:side, :side]
    blobs = np.exp(-((rows - y[:, None, None]) ** 2 + (columns - x[:, None, None]) ** 2) / 8)
    images = np.stack([masks.astype(np.float32), blobs.astype(np.float32)], -1)
    points = np.stack([x, y], -1)[:, None, None].repeat(4, 2).astype(np.float32)
    found = config.apply({"images": images, "masks": masks, "points": points}, np.arange(count), seed=0, channel=0)
    picture = found["images"][..., 0]
    sure = (picture == 0) | (picture == 1)
    assert sure.mean() > 0.7
    np.testing.assert_array_equal(found["masks"][sure], picture[sure])
    shown = found["images"].shape[1]
    inside = 0
    for n in range(count):
        x, y = found["points"][n, 0, 0]
        if not np.isnan(x) and 2 < x < shown - 3 and 2 < y < shown - 3:
            inside += 1
            row, column = np.unravel_index(found["images"][n, ..., 1].argmax(), (shown, shown))
            assert abs(row - y) <= 1
            assert abs(column - x) <= 1
    assert inside >= 8


def test_names_go_by_coordinate_and_may_coincide() -> None:
    oblique = np.array([[9.0, 1.0], [2.0, 7.0], [4.0, 3.0], [6.0, 5.0]])
    np.testing.assert_array_equal(relabel(oblique), [[9, 1], [2, 7], [2, 7], [9, 1]])
    for order in ([3, 1, 0, 2], [1, 0, 2, 3]):
        np.testing.assert_array_equal(relabel(oblique[order]), relabel(oblique))
    square = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    named = relabel(square)
    np.testing.assert_array_equal(named, [[0, 0], [0, 4], [4, 4], [4, 0]])
    np.testing.assert_array_equal(relabel(square[::-1]), named)
    np.testing.assert_array_equal(relabel(quarter_turned(square, 5, 1)), np.roll(quarter_turned(named, 5, 1), 1, 0))
    square[2, 1] = np.nan
    assert np.isnan(relabel(square)).all()


def test_ends_name_points_that_names_alone_would_have_lost() -> None:
    # On an oblique cross two names are one end; after a turn by 45 degrees the other ends are the outermost.
    ends = np.array([[14.0, 6.0], [6.0, 14.0], [8.0, 8.0], [12.0, 12.0]], np.float32)[None, None]
    arrays = {"images": np.zeros((1, 21, 21, 1), np.uint8), "ends": ends, "points": relabel(ends)}
    found = Augment(turn=60).apply(arrays, np.arange(1), seed=3, channel=0)
    np.testing.assert_array_equal(found["points"], relabel(found["ends"]))


def test_colours_change_by_factors() -> None:
    images = np.full((200, 4, 4, 1), 100.0, np.float32)
    images[:, :2] = 50
    numbers = np.arange(200)
    bright = Augment(brightness=(0.5, 1.5)).apply({"images": images}, numbers, seed=0, channel=0)["images"]
    factors = bright[:, 3, 3, 0] / 100
    np.testing.assert_allclose(bright, images * factors.reshape(-1, 1, 1, 1), rtol=1e-6)
    assert factors.min() < 0.55
    assert factors.max() > 1.45
    contrast = Augment(contrast=(0.5, 2.0)).apply({"images": images}, numbers, seed=0, channel=0)["images"]
    np.testing.assert_allclose(contrast.mean((1, 2, 3)), 75, rtol=1e-5)
    factors = (contrast[:, 3, 0, 0] - contrast[:, 0, 0, 0]) / 50
    assert factors.min() < 0.6
    assert factors.max() > 1.9
    noise = Augment(noise=2.0).apply({"images": images}, numbers, seed=0, channel=0)["images"] - images
    assert abs(noise.mean()) < 0.15
    assert abs(noise.std() - 2) < 0.1
    grey = Augment(brightness=(3.0, 3.0)).apply({"images": images.astype(np.uint8)}, numbers, seed=0, channel=0)[
        "images"
    ]
    assert set(np.unique(grey)) == {150, 255}


def test_each_channel_keeps_its_own_mean_and_least_value_and_all_have_the_factors_of_their_picture() -> None:
    rng = np.random.default_rng(2)
    images = (rng.normal(size=(8, 6, 6, 3)) * [1, 5, 20] + [10, 100, 1000]).astype(np.float32)

    def changed(config: Augment) -> np.ndarray:
        return applied(config, {"images": images})["images"]

    contrast = changed(Augment(contrast=(0.5, 2.0)))
    np.testing.assert_allclose(contrast.mean((1, 2)), images.mean((1, 2)), rtol=1e-5)
    factors = contrast.std((1, 2)) / images.std((1, 2))
    np.testing.assert_allclose(factors, factors[:, :1].repeat(3, 1), rtol=1e-3)
    assert factors[:, 0].std() > 0.1
    factors = changed(Augment(brightness=(0.5, 2.0))) / images
    np.testing.assert_allclose(factors, np.broadcast_to(factors[:, :1, :1, :1], images.shape), rtol=1e-5)
    assert factors[:, 0, 0, 0].std() > 0.1
    noise = changed(Augment(noise=2.0)) - images
    assert abs(np.corrcoef(noise.reshape(-1, 3).T) - np.eye(3)).max() < 0.2
    np.testing.assert_array_equal(changed(Augment(crop=6)).min((1, 2)), images.min((1, 2)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Augment(crop=-1), "crop must be at least 0; got -1"),
        (lambda: Augment(scale=(0.0, 1.0)), "scale must be the smallest and the largest factor"),
        (lambda: Augment(contrast=(2.0, 1.0)), r"got 2\.0,1\.0"),
        (lambda: Augment(window=(0, 3)), "window must be a height and a width"),
        (lambda: Augment(window=(3,)), r"window must be a height and a width in pixels.*got \(3,\)"),  # pyright: ignore
        (lambda: Augment(window=(14, 12), crop=1).middle(examples()), "larger than pictures of 12 x 12, whose middle"),
        (lambda: Augment(window=(14, 3)).shown(12, 12), "larger than pictures of 12 x 12"),
        (lambda: Augment(quarter_turns=True).shown(12, 13), "needs square pictures; these are 12 x 13"),
    ],
)
def test_what_cannot_be_is_refused(make, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "config", "copies"),
    [((128, 28, 28, 1), Augment(crop=2, flip="horizontal"), 300), ((8, 256, 256, 1), Augment(turn=15), 3000)],
)
def test_it_is_as_fast_as_so_many_copies_in_float32(shape, config: Augment, copies: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)

    def seconds(run) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    times = [
        (
            seconds(lambda: config.apply({"images": images}, np.arange(shape[0]), seed=0, channel=0)),
            seconds(lambda: [images.astype(np.float32) * 0.5 for _ in range(20)]) / 20,
        )
        for _ in range(7)
    ]
    ours, copy = (min(column) for column in zip(*times, strict=True))
    assert ours < copies * copy, ours / copy
