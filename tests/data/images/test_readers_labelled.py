"""Folders of classes, IDX files and npz of the user's own, whole and damaged."""

import gzip
import importlib
import pathlib
import struct
import sys
import zlib

import numpy as np
import pytest

from scalejax.data.images.augment import Augment
from scalejax.data.images.files import read_picture
from scalejax.data.images.labelled import LabelledImages
from scalejax.data.images.sources import FashionMnist, IdxFolder, ImageFolder
from scalejax.errors import UserError

pillow = pytest.importorskip("PIL.Image", reason="Pillow is of the extra images")
RNG = np.random.default_rng(0)


def write(path: pathlib.Path, pixels: np.ndarray, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow.fromarray(pixels).save(path, **options)


def picture(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape or (6, 8)).astype(np.uint8)


def folder_of(path: pathlib.Path, **options: object) -> LabelledImages:
    return LabelledImages(
        source=ImageFolder(path=str(path)), **{"batch_size": 2, "validation": 0.0, "test": 0.0} | options
    )  # pyright: ignore


def test_a_folder_of_class_folders_is_read_by_name(tmp_path: pathlib.Path) -> None:
    pixels = {
        f"{name}/{n}.{kind}": picture() for name in ("cat", "dog") for n, kind in enumerate(("png", "tif", "PNG"))
    }
    for name, image in pixels.items():
        write(tmp_path / name, image)
    (tmp_path / "cat" / "notes.txt").write_text("not a picture")
    (tmp_path / ".hidden").mkdir()
    data = folder_of(tmp_path).build()
    assert data.schema.classes == ("cat", "dog")
    assert data.schema.shape == (6, 8, 1)
    np.testing.assert_array_equal(data.splits["train"]["labels"], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(data.splits["train"]["images"][..., 0], np.stack(list(pixels.values())))
    split = folder_of(tmp_path, validation=0.2, test=0.2).build()
    assert [split.num_examples(name) for name in ("train", "validation", "test")] == [3, 1, 2]


def test_all_forms_of_pictures_are_read_and_what_is_left_out_is_counted(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "0.png", picture(6, 8, 3))
    red = np.full((6, 8, 3), (254, 0, 0), np.uint8)
    write(tmp_path / "a" / "1.gif", red)
    write(tmp_path / "a" / "2.webp", red, lossless=True)
    write(tmp_path / "a" / "3.jfif", red, format="JPEG")
    assert folder_of(tmp_path).build().remarks == ()
    for place in ("a/.DS_Store", "a/notes.txt", "a/sub/4.png", "a/sub/5.png", "b/6.avif", "list"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    data = folder_of(tmp_path, seed=1).build()
    assert data.num_examples("train") == 5
    np.testing.assert_array_equal(data.splits["train"]["images"][1:4], [red] * 3)
    (remark,) = data.remarks
    said = (
        "5 file(s) were left out (2 of .png, 1 of .txt, 1 of .avif, 1 of no ending), such as a/notes.txt, a/sub/4.png"
    )
    assert said in remark


def test_pictures_of_eight_bits_beside_deeper_ones_are_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a" / "0.png", picture())
    write(tmp_path / "b" / "0.png", picture().astype(np.uint16) * 257)
    for window in (None, (0.0, 65535.0)):
        with pytest.raises(UserError, match=r"b/0.png has pixels of uint16, .*a/0.png of uint8: a window that suits"):
            folder_of(tmp_path, window=window).build()
    labels = np.arange(4) % 2
    deep = picture(4, 5, 5).astype(np.uint16)
    np.savez(
        tmp_path / "x.npz", train_images=picture(4, 5, 5), train_labels=labels, test_images=deep, test_labels=labels
    )
    with pytest.raises(UserError, match=r"x.npz: test has pixels of uint16, train of uint8"):
        folder_of(tmp_path / "x.npz", window=(0.0, 65535.0)).build()


def test_a_mean_and_a_deviation_that_are_given_are_those_of_the_schema(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "0.png", picture())
    schema = folder_of(tmp_path, mean=(120.0,), std=(60.0,)).schema()
    assert (schema.mean, schema.std) == ((120.0,), (60.0,))
    with pytest.raises(UserError, match=r"must have a number for each of 1 channel"):
        folder_of(tmp_path, mean=(120.0, 1.0, 1.0)).schema()


def jpeg_with_exif(path: pathlib.Path, pixels: np.ndarray) -> bytearray:
    tags = pillow.Exif()
    tags[0x0112] = 3  # upside down
    write(path, pixels, exif=tags)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize("at", [4, 8])  # where tags begin; how many there are
def test_a_damaged_exif_block_is_one_warning(tmp_path: pathlib.Path, at: int) -> None:
    path = tmp_path / "x.jpg"
    data = jpeg_with_exif(path, picture(8, 8, 3))
    held = read_picture(path)
    place = data.find(b"Exif\0\0") + 6 + at
    data[place : place + 2] = b"\xff\xff"
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"x.jpg has a damaged EXIF block .*: the picture may be turned") as said:
        found = read_picture(path)
    assert len(said) == 1
    np.testing.assert_array_equal(found, held if at == 8 else held[::-1, ::-1])


def test_of_a_phone_s_two_pictures_the_first_is_read(tmp_path: pathlib.Path) -> None:
    pixels = picture(16, 16, 3)
    write(tmp_path / "plain.jpg", pixels)
    other = [pillow.fromarray(picture(8, 8, 3))]
    write(tmp_path / "phone.jpg", pixels, format="MPO", save_all=True, append_images=other)
    np.testing.assert_array_equal(read_picture(tmp_path / "phone.jpg"), read_picture(tmp_path / "plain.jpg"))
    write(tmp_path / "moves.gif", pixels, save_all=True, append_images=[pillow.fromarray(picture(16, 16, 3))])
    with pytest.raises(UserError, match=r"moves.gif has 2 pages"):
        read_picture(tmp_path / "moves.gif")


def test_a_file_that_would_start_a_program_is_not_opened(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow gives EPS to Ghostscript, whatever the file is called."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 10.03.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UserError, match=r"a.png is no picture that can be read"):
        read_picture(path)
    assert not (tmp_path / "ran").exists()


def test_folders_of_splits_are_the_splits(tmp_path: pathlib.Path) -> None:
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for n in range(count):
            write(tmp_path / split / "a" / f"{n}.jpg", picture(6, 8, 3))
            write(tmp_path / split / "b" / f"{n}.jpg", picture(6, 8, 3))
    data = folder_of(tmp_path, validation=0.5, test=0.3).build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 6, "validation": 4, "test": 2}
    assert data.schema.shape == (6, 8, 3)
    write(tmp_path / "test" / "c" / "0.jpg", picture(6, 8, 3))
    with pytest.raises(UserError, match="has the class 'c' in test and not in train, which has a, b"):
        folder_of(tmp_path, seed=1, validation=0.4).build()


def test_sizes_and_colours_must_be_one_or_are_made_so(tmp_path: pathlib.Path) -> None:
    big = np.kron(np.arange(4).reshape(2, 2) * 60, np.ones((8, 8))).astype(np.uint8)
    write(tmp_path / "a" / "0.png", big)
    write(tmp_path / "b" / "0.png", picture(8, 8))
    with pytest.raises(UserError, match=r"b/0.png has 8 x 8 pixels and 1 channel.*--set data.size=16,16 makes them so"):
        folder_of(tmp_path).build()
    data = folder_of(tmp_path, size=(2, 2)).build()
    small = data.splits["train"]["images"][0, ..., 0].astype(int)
    assert np.abs(small - [[0, 60], [120, 180]]).max() <= 40  # antialiased: each is mostly the mean of what it covers
    write(tmp_path / "b" / "0.png", picture(16, 16, 3))
    with pytest.raises(UserError, match=r"3 channel\(s\).*--set data.channels=1 \(grey\)"):
        folder_of(tmp_path).build()
    assert folder_of(tmp_path, channels=1).schema().channels == 1
    data = folder_of(tmp_path, channels=3).build()
    np.testing.assert_array_equal(data.splits["train"]["images"][0], big[..., None].repeat(3, 2))


def test_sixteen_bits_need_a_window(tmp_path: pathlib.Path) -> None:
    deep = RNG.integers(0, 4000, (2, 5, 5)).astype(np.uint16)
    for name, image in zip("ab", deep, strict=True):
        write(tmp_path / name / "0.png", image)
        write(tmp_path / name / "1.tif", image)
    with pytest.raises(UserError, match=r"a/0.png has pixels of uint16 from .* --set data.window="):
        folder_of(tmp_path).build()
    data = folder_of(tmp_path, window=(1000.0, 2000.0)).build()
    assert (data.schema.dtype, data.schema.window) == ("float32", (1000.0, 2000.0))
    assert "1000.0, 2000.0" in data.schema.identity()["data.window"]
    found = data.splits["train"]["images"][..., 0]
    np.testing.assert_array_equal(found, np.clip(deep[[0, 0, 1, 1]], 1000, 2000).astype(np.float32))
    other = folder_of(tmp_path, window=(1000.0, 2001.0)).schema()
    assert other.identity()["data.window"] != data.schema.identity()["data.window"]
    with pytest.raises(UserError, match=r"data.window must be a smaller and a larger value; got 5.0,5.0"):
        folder_of(tmp_path, window=(5.0, 5.0)).build()


def png_of_sixteen_bits(path: pathlib.Path, channels: int) -> None:
    """Pillow writes none with colours."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = RNG.integers(0, 300, (4, 5 * channels)).astype(">u2")
    head = struct.pack(">IIBBBBB", 5, 4, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def tiff_of_sixteen_bits(path: pathlib.Path) -> None:
    """One strip of colours, little endian; Pillow writes none."""
    tags = [(256, 3, 1, 5), (257, 3, 1, 4), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, 128), (277, 3, 1, 3), (278, 3, 1, 4), (279, 4, 1, 120)]
    head = b"II*\0" + struct.pack("<IH", 8, 9) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    path.write_bytes(head + struct.pack("<I", 0) + struct.pack("<HHH", 16, 16, 16) + bytes(120))


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_sixteen_bits_are_refused_and_not_cut(tmp_path: pathlib.Path, channels: int) -> None:
    png_of_sixteen_bits(tmp_path / "x.png", channels)
    tiff_of_sixteen_bits(tmp_path / "x.tif")
    for name in ("x.png", "x.tif"):
        with pytest.raises(UserError, match=rf"{name} has colours of 16 bits, of which Pillow reads 8\. Convert"):
            read_picture(tmp_path / name)
    png_of_sixteen_bits(tmp_path / "grey.png", 1)
    assert read_picture(tmp_path / "grey.png").dtype == np.uint16


def test_pixels_that_are_no_numbers_are_refused(tmp_path: pathlib.Path) -> None:
    holed = RNG.random((5, 5)).astype(np.float32)
    write(tmp_path / "a" / "0.tif", holed)
    holed[2, 3] = np.nan
    write(tmp_path / "b" / "0.tif", holed)
    with pytest.raises(UserError, match=r"b/0.tif has 1 pixels that are NaN or infinite, the first at \[2, 3, 0\]"):
        folder_of(tmp_path, window=(0.0, 1.0)).build()
    np.savez(tmp_path / "x.npz", images=np.stack([holed, holed]), labels=np.arange(2))
    with pytest.raises(UserError, match=r"x.npz has 2 pixels that are NaN or infinite"):
        folder_of(tmp_path / "x.npz").build()  # before it is said that a window is missing


def test_palettes_transparency_and_how_a_camera_was_held(tmp_path: pathlib.Path) -> None:
    colours = np.zeros((4, 4, 3), np.uint8)
    colours[:2, :, 0], colours[2:, :, 2] = 255, 255
    write(tmp_path / "plain.png", colours)
    pillow.fromarray(colours).convert("P").save(tmp_path / "palette.png")
    pillow.fromarray(colours).convert("RGBA").save(tmp_path / "clear.png")
    for name in ("plain", "palette", "clear"):
        np.testing.assert_array_equal(read_picture(tmp_path / f"{name}.png"), colours)
    assert read_picture(tmp_path / "palette.png", masks=True).ndim == 2
    shaded = pillow.fromarray(colours).convert("P")
    shaded.save(tmp_path / "shaded.png", transparency=bytes((0, 128, 255)))
    np.testing.assert_array_equal(read_picture(tmp_path / "shaded.png"), colours)
    pillow.fromarray(colours[..., 0] > 0).save(tmp_path / "bits.png")
    np.testing.assert_array_equal(read_picture(tmp_path / "bits.png"), colours[..., 0])
    np.testing.assert_array_equal(read_picture(tmp_path / "bits.png", masks=True), colours[..., 0] // 255)
    tags = pillow.Exif()
    tags[0x0112] = 3  # upside down
    write(tmp_path / "held.tif", colours, exif=tags)
    np.testing.assert_array_equal(read_picture(tmp_path / "held.tif"), colours[::-1, ::-1])
    with pytest.raises(UserError, match=r"plain.png has 3 colours; a mask has one number a pixel"):
        read_picture(tmp_path / "plain.png", masks=True)
    pages = [pillow.fromarray(picture(4, 4)) for _ in range(2)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(UserError, match=r"pages.tif has 2 pages"):
        read_picture(tmp_path / "pages.tif")


@pytest.mark.parametrize("kind", ["png", "jpg", "tif"])
def test_a_truncated_picture_is_refused_or_whole(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    write(path, picture(24, 24))
    whole, data = read_picture(path), path.read_bytes()
    refused = 0
    for length in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:length])
        try:
            np.testing.assert_array_equal(read_picture(path), whole)
        except UserError as error:
            assert f"x.{kind} is no picture that can be read" in str(error)
            refused += 1
    assert refused > 40


def test_folders_that_cannot_teach_anything_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"gone has no folders. Give a folder that has one for each class"):
        folder_of(tmp_path / "gone").build()
    write(tmp_path / "one" / "a" / "0.png", picture())
    with pytest.raises(UserError, match=r"has the class 'a' alone, and there is nothing to tell it from"):
        folder_of(tmp_path / "one").build()
    (tmp_path / "one" / "b").mkdir()
    with pytest.raises(UserError, match=r"one/b has no picture \(.png, .jpg.*Remove the folder"):
        folder_of(tmp_path / "one", seed=1).build()


def test_without_pillow_folders_say_what_to_install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a" / "0.png", picture())
    write(tmp_path / "b" / "0.png", picture())
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r"needs the library Pillow, which is not installed: pip install Pillow"):
        folder_of(tmp_path).build()


def test_an_npz_may_have_splits_and_colours(tmp_path: pathlib.Path) -> None:
    images, labels = picture(7, 5, 6, 3), np.array([0, 1, 2, 0, 1, 2, 0])
    np.savez(
        tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=images[:2], test_labels=labels[:2]
    )
    data = folder_of(tmp_path / "x.npz").build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 7, "test": 2}
    assert data.schema.classes == ("0", "1", "2")
    np.testing.assert_array_equal(data.splits["train"]["images"], images)
    np.savez(tmp_path / "y.npz", images=images.astype(np.float32) / 255, labels=labels)
    with pytest.raises(UserError, match="has pixels of float32 from"):
        folder_of(tmp_path / "y.npz").build()
    assert folder_of(tmp_path / "y.npz", window=(0.0, 1.0)).schema().dtype == "float32"


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": np.zeros(2, int)}, r"must have images, numbers \[N, H, W\]"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "2 images and 3 labels from 0 to 0"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, -1])}, "labels from -1 to 0"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2, int)}, "has one class alone"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.ones(2, int)}, "has one class alone"),
        (
            {"test_images": np.zeros((2, 4, 4), np.uint8), "test_labels": np.arange(2)},
            r"must have images.* got float64\[0\] and float64\[0\] for train",
        ),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2)}, r"got uint8\[2, 4, 4\] and float64\[2\]"),
    ],
)
def test_an_npz_of_something_else_is_refused(tmp_path: pathlib.Path, arrays: dict[str, np.ndarray], said: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=said):
        folder_of(tmp_path / "x.npz").build()


def test_all_pictures_of_one_class_are_refused_also_if_more_have_names(tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "x.npz", images=picture(4, 5, 5), labels=np.zeros(4, int))
    with pytest.raises(UserError, match=r"x.npz has one class alone to learn from"):
        LabelledImages(source=ImageFolder(path=str(tmp_path / "x.npz"), names=("a", "b"))).build()


@pytest.mark.parametrize("side", [24, 32])
def test_splits_of_an_npz_must_have_pictures_of_one_size(tmp_path: pathlib.Path, side: int) -> None:
    labels = np.arange(8) % 2
    arrays = {"train_images": picture(8, 28, 28), "test_images": picture(8, side, side)}
    np.savez(tmp_path / "x.npz", **arrays, train_labels=labels, test_labels=labels)
    said = rf"pictures \[{side}, {side}, 1\] .* in test and \[28, 28, 1\] in train.*--set data.size=28,28"
    with pytest.raises(UserError, match=said):
        folder_of(tmp_path / "x.npz").build()
    assert folder_of(tmp_path / "x.npz", size=(28, 28)).build().splits["test"]["images"].shape == (8, 28, 28, 1)


def test_a_window_larger_than_pictures_has_no_middle_for_the_other_splits() -> None:
    with pytest.raises(UserError, match=r"data.augment.window=32,32 is larger than pictures of 28 x 28, whose middle"):
        LabelledImages(augment=Augment(crop=4, window=(32, 32))).build()


@pytest.mark.parametrize("size", [(0, 5), (-1, 5), (5,)])
def test_a_size_that_is_none_is_refused(size) -> None:
    with pytest.raises(UserError, match=r"data.size must be a height and a width in pixels, each at least 1; got \("):
        LabelledImages(size=size).build()


def test_two_folders_of_one_split_are_refused(tmp_path: pathlib.Path) -> None:
    for split in ("train", "val", "validation"):
        for name in ("a", "b"):
            write(tmp_path / split / name / "0.png", picture())
    with pytest.raises(UserError, match=r"has val and validation, which are one split. Put the pictures of both into"):
        folder_of(tmp_path).build()


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder: pathlib.Path) -> dict[str, np.ndarray]:
    arrays = {
        "train-images-idx3-ubyte": picture(20, 5, 4),
        "train-labels-idx1-ubyte": np.arange(20, dtype=np.uint8) % 3,
        "t10k-images-idx3-ubyte": picture(6, 5, 4),
        "t10k-labels-idx1-ubyte": np.arange(6, dtype=np.uint8) % 3,
    }
    for n, (name, array) in enumerate(arrays.items()):
        path = folder / f"{name}.gz" if n % 2 else folder / name
        path.write_bytes(gzip.compress(idx(array)) if n % 2 else idx(array))
    return arrays


def test_idx_files_are_read_packed_or_not(tmp_path: pathlib.Path) -> None:
    arrays = write_idx(tmp_path)
    data = LabelledImages(source=IdxFolder(path=str(tmp_path), names=("a", "b", "c")), batch_size=2).build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 18, "validation": 2, "test": 6}
    np.testing.assert_array_equal(data.splits["test"]["images"][..., 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.splits["test"]["labels"], arrays["t10k-labels-idx1-ubyte"])
    assert data.schema.classes == ("a", "b", "c")
    with pytest.raises(UserError, match=r"20 labels from 0 to 2 for train.*below the number of classes \(2\)"):
        LabelledImages(source=IdxFolder(path=str(tmp_path), names=("a", "b"))).build()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"])
def test_a_truncated_idx_file_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    write_idx(tmp_path)
    data = (tmp_path / name).read_bytes()
    for length in range(0, len(data), max(1, len(data) // 40)):
        (tmp_path / name).write_bytes(data[:length])
        with pytest.raises(UserError, match=f"{name} is no whole IDX file of bytes"):
            LabelledImages(source=IdxFolder(path=str(tmp_path)), seed=length).build()
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"has no file {name.removesuffix('.gz')} or .*dataset-fashion-mnist"):
        LabelledImages(source=IdxFolder(path=str(tmp_path))).build()


DEBIAN = pathlib.Path(IdxFolder().path)


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_all_of_fashion_mnist_has_the_bundled_pictures_first() -> None:
    data = LabelledImages(source=IdxFolder(names=FashionMnist.names), validation=0.0).build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 60_000, "test": 10_000}
    bundled = LabelledImages(validation=0.0).build()
    for split, each in (("train", 400), ("test", 100)):
        labels = data.splits[split]["labels"]
        first = np.sort(np.concatenate([np.flatnonzero(labels == c)[:each] for c in range(10)]))
        for name in ("images", "labels"):
            np.testing.assert_array_equal(data.splits[split][name][first], bundled.splits[split][name])


def test_reading_imports_no_library_of_pictures_before_it_must() -> None:
    module = importlib.import_module("scalejax.data.images.labelled")
    assert not {"PIL", "nibabel", "pydicom"} & set(vars(module))
