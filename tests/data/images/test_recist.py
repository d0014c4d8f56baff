"""RECIST crosses: from masks against scikit-image, from DeepLesion's file, from four points; and what is refused."""

import csv
import math

import numpy as np
import pytest

from scalejax.data.images import recist
from scalejax.data.images.augment import Augment
from scalejax.data.images.nuclei import nuclei
from scalejax.errors import UserError


def ellipses(count, seed=0, side=96):
    """Masks of random ellipses, and half of their axes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side]
    for _ in range(count):
        long = rng.uniform(8, 40)
        short, angle = long * rng.uniform(0.35, 1), rng.uniform(0, math.pi)
        dx, dy = x - side / 2 - rng.uniform(-1, 1), y - side / 2 - rng.uniform(-1, 1)
        u, v = dx * math.cos(angle) + dy * math.sin(angle), dy * math.cos(angle) - dx * math.sin(angle)
        yield ((u / long) ** 2 + (v / short) ** 2 <= 1), long, short


def measured(instances):
    return pytest.importorskip("skimage.measure").regionprops(instances)


def test_the_long_diameter_is_that_of_scikit_image_and_both_are_the_axes_of_a_smooth_ellipse():
    away, axes = [], []
    for mask, _, _ in ellipses(200):
        (properties,) = measured(mask.astype(np.int32))
        long, short = recist.lengths(recist.cross(mask))
        away.append(abs(long - properties.feret_diameter_max))
        axes.append((abs(long - properties.axis_major_length), abs(short - properties.axis_minor_length)))
    assert max(away) < 1  # scikit-image's hull is that of an image of the hull, and a little wider
    assert (np.percentile(axes, 95, axis=0) < 1).all(), np.percentile(axes, 95, axis=0)


def test_of_nuclei_the_long_diameter_is_within_two_pixels_of_scikit_image():
    _, instances = nuclei()
    numbers, ends = recist.crosses(instances)
    properties = measured(instances)
    assert numbers.tolist() == [one.label for one in properties]
    assert len(numbers) == 125
    away = abs(recist.lengths(ends)[:, 0] - [one.feret_diameter_max for one in properties])
    assert away.max() < 2
    recist.check_crosses(ends, 512, 512, "nucleus {}")


def test_of_coins_too():
    data, filters = pytest.importorskip("skimage.data"), pytest.importorskip("skimage.filters")
    measure, morphology = pytest.importorskip("skimage.measure"), pytest.importorskip("skimage.morphology")
    grey = data.coins()
    mask = morphology.closing(grey > filters.threshold_otsu(grey), morphology.footprint_rectangle((3, 3)))
    properties = [one for one in measure.regionprops(measure.label(mask)) if 500 < one.area < 4000]
    assert len(properties) == 22
    for one in properties:
        assert abs(recist.lengths(recist.cross(one.image))[0] - one.feret_diameter_max) < 2


def literal_cross(mask):
    """Lengths of the diameters, by all pairs of outer sides and, for the short one, by a fine sweep over the hull."""
    spatial = pytest.importorskip("scipy.spatial")
    y, x = np.nonzero(mask)
    sides = np.concatenate([np.stack([x + dx, y + dy], -1) for dx, dy in ((0.5, 0), (-0.5, 0), (0, 0.5), (0, -0.5))])
    away = np.linalg.norm(sides[:, None] - sides[None], axis=-1)
    a, b = (sides[n] for n in np.unravel_index(away.argmax(), away.shape))
    along = (b - a) / np.linalg.norm(b - a)
    across = np.array([-along[1], along[0]])
    hull = spatial.ConvexHull(sides)
    widest = 0.0
    for s in np.linspace(0, away.max(), 4001)[1:-1]:
        # The hull is where normals . p + offsets <= 0; along the line a + s along + t across that bounds t.
        slope = hull.equations[:, :2] @ across
        level = hull.equations[:, :2] @ (a + s * along) + hull.equations[:, 2]
        bound = -level / np.where(abs(slope) < 1e-12, np.nan, slope)
        widest = max(widest, np.nanmin(bound[slope > 1e-12]) - np.nanmax(bound[slope < -1e-12]))
    return away.max(), widest


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_diameters_are_the_longest_chord_and_the_longest_perpendicular_one(seed):
    rng = np.random.default_rng(seed)
    blob = rng.uniform(0, 1, (12, 15)) > 0.6  # of any shape
    ends = recist.cross(blob)
    long, short = literal_cross(blob)
    np.testing.assert_allclose(recist.lengths(ends), [long, short], atol=0.02)
    assert recist.lengths(ends)[0] == pytest.approx(long)
    assert abs((ends[1] - ends[0]) @ (ends[3] - ends[2])) < 1e-9
    recist.check_crosses(ends[None], 12, 15, "blob {}", slack=0)


def test_one_pixel_has_a_cross_of_its_size():
    mask = np.zeros((5, 5), bool)
    mask[2, 3] = True
    np.testing.assert_allclose(recist.lengths(recist.cross(mask)), [1, 1])
    assert set(map(tuple, recist.cross(mask).tolist())) == {(2.5, 2), (3.5, 2), (3, 1.5), (3, 2.5)}


def test_four_points_in_any_order_become_the_same_cross():
    _, ends = recist.crosses(nuclei()[1])
    rng = np.random.default_rng(0)
    shuffled = np.stack([one[rng.permutation(4)] for one in ends])
    np.testing.assert_allclose(recist.lengths(recist.ordered(shuffled)), recist.lengths(ends))


def test_crosses_that_are_none_are_refused():
    good = np.array([[10.0, 10], [30, 10], [20, 5], [20, 14]])
    absent = np.full((4, 2), np.nan)
    recist.check_crosses(np.stack([good, absent]), 20, 40, "lesion {}")
    apart = good + np.array([[0, 0], [0, 0], [0, 9], [0, 9]])
    with pytest.raises(UserError, match=r"lesion 1: its diameters do not meet \(10, 10, .*recist.ordered"):
        recist.check_crosses(np.stack([good, apart]), 40, 40, "lesion {}")
    with pytest.raises(
        UserError, match=r"lesion 2: the point \(30, 10\) is outside of the picture, which is 30 pixels wide and"
    ):
        recist.check_crosses(np.stack([good - [1, 0], absent, good]), 20, 30, "lesion {}")
    parallel = np.array([[10.0, 10], [30, 10], [15, 10], [25, 10]])
    with pytest.raises(UserError, match="do not meet"):
        recist.check_crosses(parallel[None], 40, 40, "lesion {}")
    with pytest.raises(UserError, match=r"data.objects=1: a picture has 2 objects. Set data.objects to 2"):
        recist.filled([np.stack([good, good])], 1, "data.objects")


HEADER = (
    *("File_name", "Patient_index", "Study_index", "Series_ID", "Key_slice_index", "Measurement_coordinates"),
    *("Bounding_boxes", "Lesion_diameters_Pixel_", "Normalized_lesion_location", "Coarse_lesion_type"),
    *("Possibly_noisy", "Slice_range", "Spacing_mm_px_", "Image_size", "DICOM_windows", "Patient_gender"),
    *("Patient_age", "Train_Val_Test"),
)


def row(file, ends, split, **changes):
    """A line of DL_info.csv, its box made of the marks as DeepLesion's are."""
    ends = np.asarray(ends, float)
    low, high = ends.min(0) - 5, ends.max(0) + 5
    values = dict.fromkeys(HEADER, "1") | {
        "File_name": file,
        "Measurement_coordinates": ", ".join(f"{value:g}" for value in ends.ravel()),
        "Bounding_boxes": ", ".join(f"{value:g}" for value in (*low, *high)),
        "Lesion_diameters_Pixel_": ", ".join(f"{value:g}" for value in recist.lengths(ends)),
        "Possibly_noisy": "0",
        "Spacing_mm_px_": "0.488281, 0.488281, 5",
        "Image_size": "64, 64",
        "DICOM_windows": "-175, 275",
        "Train_Val_Test": str(split),
    }
    return values | changes


CROSS = np.array([[20.0, 20], [40, 30], [32, 20], [28, 28]])


def deep_lesion(folder, rows, slices=()):
    """A folder as DeepLesion is unpacked."""
    with (folder / "DL_info.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADER)
        writer.writeheader()
        writer.writerows(rows)
    image = pytest.importorskip("PIL.Image")
    for name, units in slices:
        path = folder / "Images_png" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray((np.asarray(units) + 32768).astype(np.uint16)).save(path)
    return folder


def test_marks_of_deep_lesion_are_read_and_its_boxes_are_five_pixels_around_them(tmp_path):
    rows = [row("000001_01_01_109.png", CROSS, 1), row("000001_01_01_109.png", CROSS[:, ::-1], 1)]
    rows += [row("000003_02_01_015.png", CROSS + 3, 2), row("000009_01_02_001.png", CROSS, 3)]
    marks = recist.read_marks(deep_lesion(tmp_path, rows) / "DL_info.csv")
    assert marks.files[::2] == ("000001_01_01/109.png", "000003_02_01/015.png")
    assert marks.split == ("train", "train", "validation", "test")
    np.testing.assert_allclose(marks.ends[2], CROSS + 3)
    around = np.concatenate([marks.ends.min(1) - recist.PADDING, marks.ends.max(1) + recist.PADDING], -1)
    np.testing.assert_allclose(marks.boxes, around)
    np.testing.assert_allclose(marks.lengths, recist.lengths(marks.ends), rtol=1e-4)
    assert marks.windows[0].tolist() == [-175, 275]
    assert marks.spacing[0].tolist() == [0.488281, 0.488281, 5]


def test_a_table_that_a_spreadsheet_has_saved_is_read_or_refused(tmp_path):
    path = deep_lesion(tmp_path, [row("000001_01_01_109.png", CROSS, 1)]) / "DL_info.csv"
    whole = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + whole)
    assert recist.read_marks(path).files == ("000001_01_01/109.png",)
    path.write_bytes(whole + "é\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"DL_info.csv cannot be read as a table in UTF-8 \('utf-8' codec"):
        recist.read_marks(path)
    with pytest.raises(UserError, match=r"File_name must be a series .*; got '../../x_1.png'"):
        recist.read_marks(deep_lesion(tmp_path, [row("../../x_1.png", CROSS, 1)]) / "DL_info.csv")


def test_slices_of_deep_lesion_are_read_in_a_window_with_their_neighbours(tmp_path):
    units = np.full((64, 64), -2000)
    units[:32], units[0, 0], units[0, 1] = 50, -175, 3000
    slices = [("000001_01_01/109.png", units), ("000001_01_01/110.png", units.T), ("000003_02_01/015.png", units)]
    rows = [row("000001_01_01_109.png", CROSS, 1), row("000001_01_01_109.png", CROSS + 2, 1)]
    folder = deep_lesion(tmp_path, [*rows, row("000003_02_01_015.png", CROSS, 3)], slices)
    data = recist.DeepLesion(path=str(folder), size=64, batch_size=1, objects=3).build()
    assert (data.num_examples("train"), data.num_examples("validation"), data.num_examples("test")) == (1, 0, 1)
    (batch,) = data.eval_batches("train")
    key = np.where(units == 50, 128, 0)  # (50 + 175) / 450 of 255, rounded
    key[0, 0], key[0, 1] = 0, 255
    np.testing.assert_array_equal(batch["images"][0, :, :, 1], key)
    np.testing.assert_array_equal(batch["images"][0, :, :, 2], key.T)
    np.testing.assert_array_equal(batch["images"][0, :, :, 0], key)  # 108 is not there
    np.testing.assert_allclose(batch["ends"][0, :2], [CROSS, CROSS + 2])
    assert np.isnan(batch["ends"][0, 2]).all()
    assert data.schema.window == (-175.0, 275.0)
    assert "data.window" in data.schema.identity()
    flipped = recist.DeepLesion(path=str(folder), size=64, batch_size=16, augment=Augment(flip="horizontal")).build()
    seen = next(flipped.train_batches(start_example=0))["ends"][:, 0]
    mirrored = CROSS * [-1, 1] + [63, 0]
    assert {np.allclose(one, CROSS) for one in seen} == {True, False}
    assert all(np.allclose(one, CROSS) or np.allclose(one, mirrored) for one in seen)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [row("a_1.png", CROSS + np.array([[0, 0], [0, 0], [0, 20], [0, 20]]), 1)],
            r"line 2: its diameters do not meet.*unsound",
        ),
        ([row("a_1.png", CROSS, 1), row("a_1.png", CROSS + 40, 1)], r"line 3: the point .* is outside of the picture"),
        ([row("a_x.png", CROSS, 1)], r"line 2: File_name must be a series and the number of a slice.*got 'a_x.png'"),
        (
            [row("a_1.png", CROSS, 1, Measurement_coordinates="20, 20, nan, 30, 32, 20, 28, 28")],
            r"line 2: Measurement_coordinates must be 8 numbers.*nan",
        ),
        ([row("a_1.png", CROSS, 1, Image_size="nan, 64")], r"line 2: Image_size must be 2 numbers.*'nan, 64'"),
        ([row("a_1.png", CROSS, 4)], r"line 2: Train_Val_Test must be 1, 2 or 3; got '4'"),
        ([row("a_1.png", CROSS, 1, Bounding_boxes="1, 2, 3")], r"line 2: Bounding_boxes must be 4 numbers.*'1, 2, 3'"),
    ],
)
def test_rows_that_mean_nothing_are_refused(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        recist.read_marks(deep_lesion(tmp_path, rows) / "DL_info.csv")


def test_rows_that_mean_nothing_and_noisy_ones_can_be_dropped(tmp_path):
    bad = [row("a_1.png", CROSS + 40, 1), row("b_1.png", CROSS, 1, Possibly_noisy="1"), row("c_1.png", CROSS, 1)]
    path = deep_lesion(tmp_path, bad) / "DL_info.csv"
    assert recist.read_marks(path, unsound="drop").files == ("c/1.png",)


def test_folders_and_slices_that_are_not_deep_lesion_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"DL_info.csv cannot be read"):
        recist.DeepLesion(path=str(tmp_path)).build()
    (tmp_path / "DL_info.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"has no column File_name, Train_Val_Test, Measurement_coordinates"):
        recist.DeepLesion(path=str(tmp_path)).build()
    folder = deep_lesion(tmp_path, [row("a_001.png", CROSS, 1)])
    with pytest.raises(UserError, match=r"a/001.png is not there. Unpack Images_png"):
        recist.DeepLesion(path=str(folder), size=64).build()
    deep_lesion(tmp_path, [row("a_001.png", CROSS, 1)], [("a/001.png", np.zeros((32, 64)))])
    with pytest.raises(UserError, match=r"is 32 x 64 pixels, and data.size=64"):
        recist.DeepLesion(path=str(folder), size=64).build()
    pytest.importorskip("PIL.Image").fromarray(np.zeros((64, 64), np.uint8)).save(
        folder / "Images_png" / "a" / "001.png"
    )
    with pytest.raises(UserError, match=r"must be grey with 16 bits.*uint8\[64, 64\]"):
        recist.DeepLesion(path=str(folder), size=64).build()
    with pytest.raises(UserError, match=r"data.augment.window=\(32, 32\): pictures .* shown whole .*512 x 512 pixels"):
        recist.DeepLesion(augment=Augment(window=(32, 32))).schema()
    for field, value in (("slices", 2), ("window", (5.0, 5.0))):
        with pytest.raises(UserError, match=f"data.{field} must be"):
            recist.DeepLesion(**{field: value}).schema()


def test_crosses_of_nuclei_are_those_of_what_a_tile_shows():
    data = recist.NucleiCrosses(
        batch_size=4, augment=Augment(window=(128, 128), flip="both", quarter_turns=True)
    ).build()
    batch = next(data.train_batches(start_example=20))
    for instances, ends in zip(batch["instances"], batch["ends"], strict=True):
        there = np.isfinite(ends).all((1, 2))
        sizes = np.bincount(instances.ravel())[1:]
        assert there.sum() == (sizes >= 25).sum() > 2
        for number, one in zip(np.flatnonzero(sizes >= 25) + 1, ends[there], strict=True):
            rows, columns = np.nonzero(instances == number)
            assert one[:, 0].min() >= columns.min() - 0.5
            assert one[:, 0].max() <= columns.max() + 0.5
            assert one[:, 1].min() >= rows.min() - 0.5
            assert one[:, 1].max() <= rows.max() + 0.5
    (test,) = data.eval_batches("test")
    assert np.isfinite(test["ends"]).all((2, 3)).sum() == 29


def test_batches_of_crosses_follow_from_the_number_of_the_example():
    def build(batch_size):
        return recist.NucleiCrosses(batch_size=batch_size, augment=Augment(window=(128, 128), flip="both")).build()

    (whole, again), second = (build(4).train_batches(start_example=8) for _ in range(2)), build(2)
    whole, again = next(whole), next(again)
    half = next(second.train_batches(start_example=10))
    for name in ("images", "ends"):
        np.testing.assert_array_equal(whole[name], again[name])
        np.testing.assert_array_equal(whole[name][2:], half[name])
    with pytest.raises(UserError, match=r"data.objects=3: a picture has \d+ objects"):
        next(recist.NucleiCrosses(objects=3).build().eval_batches("test"))
