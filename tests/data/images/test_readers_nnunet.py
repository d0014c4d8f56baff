"""Folders in the layout of nnU-Net v2: what is read of them, and what is refused."""

import collections
import gzip
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from scalejax import optim
from scalejax.data import packed_files
from scalejax.data.images.augment import Augment
from scalejax.data.images.nnunet import MaskedImages, NnUnetFolder
from scalejax.data.images.volumes import fitted, read_volume, resampled, resampled_masks
from scalejax.errors import UserError
from scalejax.models.vision.unet import UNetConfig
from scalejax.train import loop
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment

pillow = pytest.importorskip("PIL.Image", reason="Pillow is of the extra images")
nibabel = pytest.importorskip("nibabel", reason="nibabel is of the extra images")
pydicom = pytest.importorskip("pydicom", reason="pydicom is of the extra images")

CT = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "liver": 1, "lesion": 2}}
WINDOW = (-160.0, 240.0)


def describe(folder: pathlib.Path, cases: int, ending: str = ".nii.gz", **others: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(exist_ok=True)
    content = {**CT, "file_ending": ending, "numTraining": cases, **others}
    (folder / "dataset.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def affine_of(spacing: tuple[float, float, float] = (2.0, 2.0, 5.0)) -> np.ndarray:
    affine = np.diag((*spacing, 1.0))
    affine[:3, 3] = (-10, -20, -30)
    return affine


def volume(number: int, shape: tuple[int, int, int] = (8, 10, 3)) -> tuple[np.ndarray, np.ndarray]:
    """A head and its mask: values say where they are."""
    rng = np.random.default_rng(number)
    voxels = rng.integers(-200, 300, shape).astype(np.int16)
    mask = np.zeros(shape, np.uint8)
    mask[2:5, 3:8] = 1
    mask[3, 4:6] = 2
    return voxels, mask


def write_nifti(path: pathlib.Path, voxels: np.ndarray, affine: np.ndarray | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(voxels, affine_of() if affine is None else affine).to_filename(path)


def ct(folder: pathlib.Path, cases: int = 5) -> pathlib.Path:
    describe(folder, cases)
    for n in range(cases):
        voxels, mask = volume(n)
        write_nifti(folder / "imagesTr" / f"ct_{n}_0000.nii.gz", voxels)
        write_nifti(folder / "labelsTr" / f"ct_{n}.nii.gz", mask)
    return folder


def of(folder: pathlib.Path, **options: Any) -> NnUnetFolder:
    return NnUnetFolder(**{"path": str(folder), "window": WINDOW} | options)


def test_volumes_become_slices_with_masks_and_the_number_of_their_case(tmp_path: pathlib.Path) -> None:
    data = MaskedImages(source=of(ct(tmp_path)), batch_size=4).build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 9, "validation": 3, "test": 3}
    assert data.schema.shape == (10, 8, 1)  # front to back, left to right
    assert data.schema.classes == ("background", "liver", "lesion")
    assert (data.schema.dtype, data.schema.window, data.schema.spacing) == ("float32", WINDOW, (2.0, 2.0))
    assert data.schema.slice_spacing == 5.0
    of_split = {split: set(arrays["cases"].tolist()) for split, arrays in data.splits.items()}
    assert sorted(case for cases in of_split.values() for case in cases) == [0, 1, 2, 3, 4]
    for arrays in data.splits.values():
        for image, mask, case, number in zip(
            arrays["images"], arrays["masks"], arrays["cases"], np.tile(range(3), 9), strict=False
        ):
            voxels, labels = volume(int(case))
            np.testing.assert_array_equal(image[..., 0], np.clip(voxels, *WINDOW)[:, ::-1, number].T)
            np.testing.assert_array_equal(mask, labels[:, ::-1, number].T)
    batch = next(data.train_batches(start_example=0))
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "images": ((4, 10, 8, 1), "float32"),
        "masks": ((4, 10, 8), "int32"),
        "cases": ((4,), "int32"),
        "weights": ((4,), "float32"),
    }


@pytest.mark.parametrize(
    ("axis", "shape", "number"), [("axial", (10, 8), 3), ("coronal", (3, 8), 10), ("sagittal", (3, 10), 8)]
)
def test_slices_are_cut_across_an_axis(tmp_path: pathlib.Path, axis, shape, number: int) -> None:
    ct(tmp_path, cases=1)
    found = of(tmp_path, axis=axis).read()
    assert found.images.shape == (number, *shape, 1)
    assert found.spacing == {"axial": (2.0, 2.0), "coronal": (5.0, 2.0), "sagittal": (5.0, 2.0)}[axis]
    assert found.slice_spacing == ({"axial": 5.0, "coronal": 2.0, "sagittal": 2.0}[axis],)


def other_way(voxels: np.ndarray, affine: np.ndarray, axes: tuple[int, ...], order: tuple[int, ...]):
    """The same volume with axes reversed and exchanged, and the affine that says so."""
    for axis in axes:
        affine = affine.copy()
        affine[:3, 3] += affine[:3, axis] * (voxels.shape[axis] - 1)
        affine[:3, axis] *= -1
        voxels = np.flip(voxels, axis)
    return np.ascontiguousarray(voxels.transpose(order)), affine[:, (*order, 3)]


def test_how_far_slices_are_apart_goes_with_each_case(tmp_path: pathlib.Path) -> None:
    ct(tmp_path, cases=4)
    for folder, array in zip(("imagesTr/ct_1_0000", "labelsTr/ct_1"), volume(1), strict=True):
        write_nifti(tmp_path / f"{folder}.nii.gz", array, affine_of((2.0, 2.0, 2.5)))
    assert of(tmp_path).read().slice_spacing == (5.0, 2.5, 5.0, 5.0)
    data = MaskedImages(source=of(tmp_path), validation=0.25, test=0.25).build()
    assert data.schema.slice_spacing == "by case"
    for arrays in data.splits.values():
        np.testing.assert_array_equal(arrays["slice_spacing"], np.where(arrays["cases"] == 1, 2.5, 5))
    volumes = of(tmp_path, spacing=(2.5, 2.0, 2.0)).read()
    assert volumes.slice_spacing == (2.5,) * 4
    assert np.bincount(volumes.cases).tolist() == [6, 3, 6, 6]
    only = of(tmp_path, spacing=(1.0, 1.0)).read()
    assert (only.spacing, only.slice_spacing) == ((1.0, 1.0), (5.0, 2.5, 5.0, 5.0))


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("spacing", [None, (3.0, 1.5)])
def test_volumes_that_point_elsewhere_land_on_the_same_grid(tmp_path: pathlib.Path, axes, order, spacing) -> None:
    voxels, mask = volume(0)
    for name in ("plain", "other"):
        describe(tmp_path / name, 1)
        for path, array in (("imagesTr/a_0000.nii.gz", voxels), ("labelsTr/a.nii.gz", mask)):
            changed = other_way(array, affine_of(), axes, order) if name == "other" else (array, affine_of())
            write_nifti(tmp_path / name / path, *changed)
    left_handed = np.linalg.det(nibabel.load(tmp_path / "other" / "labelsTr" / "a.nii.gz").affine) < 0
    swaps = order == (1, 0, 2)
    assert left_handed == ((len(axes) + swaps) % 2 == 1)
    plain, other = (of(tmp_path / name, spacing=spacing).read() for name in ("plain", "other"))
    np.testing.assert_array_equal(plain.images, other.images)
    np.testing.assert_array_equal(plain.masks, other.masks)
    assert plain.spacing == other.spacing


def test_slices_come_to_one_spacing_and_size(tmp_path: pathlib.Path) -> None:
    describe(tmp_path, 2)
    for n, (step, shape) in enumerate([(2.0, (20, 24, 2)), (1.0, (40, 48, 2))]):
        x, y, _ = np.meshgrid(*(np.arange(size) + 0.5 for size in shape), indexing="ij")
        voxels = ((x + 2 * y) * step).astype(np.float32)  # linear in millimetres
        mask = ((x * step > 10) & (x * step < 30) & (y * step > 8)).astype(np.uint8)
        affine = np.diag((step, step, 5.0, 1.0))
        write_nifti(tmp_path / "imagesTr" / f"a{n}_0000.nii.gz", voxels, affine)
        write_nifti(tmp_path / "labelsTr" / f"a{n}.nii.gz", mask, affine)
    options: Any = {"window": (0.0, 500.0)}
    with pytest.raises(
        UserError, match=r"case a1 are \[48, 40, 1\].*1 x 1 mm, those of a0 \[24, 20, 1\] with 2 x 2 mm"
    ):
        of(tmp_path, **options).read()
    found = of(tmp_path, spacing=(2.0, 2.0), **options).read()
    assert found.images.shape == (4, 24, 20, 1)
    np.testing.assert_allclose(found.images[0], found.images[2], atol=1e-3)
    np.testing.assert_array_equal(found.masks[0], found.masks[2])
    assert found.spacing == (2.0, 2.0)
    wide = of(tmp_path, spacing=(2.0, 2.0), size=(30, 22), **options).read()
    np.testing.assert_array_equal(wide.images[:, 3:27, 1:21], found.images)
    assert not wide.masks[:, :3].any()
    assert (wide.images[:, :3] == 0).all()  # the lowest of the window
    with pytest.raises(UserError, match=r"data.source.size=10,10 would cut .* pixels of classes off case a0"):
        of(tmp_path, spacing=(2.0, 2.0), size=(10, 10), **options).read()


def test_resampling_keeps_corners_and_masks_whole() -> None:
    mask = np.arange(16, dtype=np.int32).reshape(1, 4, 4)
    doubled = mask.repeat(2, 1).repeat(2, 2)
    np.testing.assert_array_equal(resampled_masks(mask, (9, 2, 2), (9, 1, 1)), doubled)
    np.testing.assert_array_equal(resampled_masks(mask, (2, 2, 2), (1, 1, 1)), doubled.repeat(2, 0))
    assert resampled_masks(mask, (1, 1, 1), (1, 1, 1)) is mask
    np.testing.assert_allclose(resampled(mask, (9, 1, 1), (9, 4, 4)), [[[7.5]]])
    np.testing.assert_array_equal(fitted(fitted(mask, (7, 9), -1), (4, 4), 0), mask)


@pytest.mark.parametrize("step", [1.0, 0.7])
def test_masks_lie_on_their_pictures_at_half_the_size(step: float) -> None:
    """Halfway between two pixels the nearest one would always be the later."""
    mask = np.zeros((1, 12, 12), np.int32)
    mask[:, 3:7, 5:9] = 1
    stored = float(np.float32(step))
    given, wanted = (5.0, stored, stored), (5.0, 2 * step, 2 * step)
    small, shown = resampled_masks(mask, given, wanted), resampled(mask, given, wanted)
    np.testing.assert_array_equal(small, shown >= 0.499)
    centres = [np.average(np.arange(6), weights=x[0].sum(1 - axis)) for x in (small, shown) for axis in (0, 1)]
    np.testing.assert_allclose(centres[:2], centres[2:], atol=1e-5)
    turned = resampled_masks(mask[:, ::-1, ::-1], given, wanted)
    np.testing.assert_array_equal(turned[:, ::-1, ::-1], small)


def test_a_spacing_is_in_millimetres_whatever_unit_the_header_names(tmp_path: pathlib.Path) -> None:
    for unit, wanted in (("mm", 50.0), ("unknown", 50.0), ("micron", 0.05), ("meter", 50_000.0)):
        image = nibabel.Nifti1Image(volume(0)[0], np.diag((50.0, 50.0, 50.0, 1.0)))
        image.header.set_xyzt_units(unit)
        image.to_filename(tmp_path / "x.nii.gz")
        np.testing.assert_allclose(read_volume(tmp_path / "x.nii.gz").spacing, wanted)


def test_a_sheared_volume_is_refused(tmp_path: pathlib.Path) -> None:
    affine = affine_of()
    affine[0, 1] = 0.8
    write_nifti(tmp_path / "x.nii", volume(0)[0], affine)
    with pytest.raises(UserError, match=r"x.nii: its axes stand at 68.2 degrees and not at right angles"):
        read_volume(tmp_path / "x.nii")


def test_a_mask_that_is_turned_a_little_is_refused_by_its_corners(tmp_path: pathlib.Path) -> None:
    ct(tmp_path)
    turned, angle = affine_of(), np.deg2rad(3.0)
    turned[:2, :2] = 2 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    one_label(tmp_path, volume(1)[1], turned)
    with pytest.raises(UserError, match=r"lie elsewhere in the scanner: their corners are up to 1.19 mm apart"):
        of(tmp_path).read()
    micro = np.diag((0.05, 0.05, 0.05, 1.0))
    for n in range(5):
        write_nifti(tmp_path / "imagesTr" / f"ct_{n}_0000.nii.gz", volume(n)[0], micro)
        write_nifti(tmp_path / "labelsTr" / f"ct_{n}.nii.gz", volume(n)[1], micro)
    micro[0, 3] = 0.009
    one_label(tmp_path, volume(1)[1], micro)
    with pytest.raises(UserError, match=r"corners are up to 0.009 mm apart"):
        of(tmp_path).read()


def slices_2d(folder: pathlib.Path, ending: str, cases: int = 4, colours: bool = False) -> np.ndarray:
    names = {"0": "R", "1": "G", "2": "B"} if colours else {"0": "grey"}
    describe(folder, cases, ending, channel_names=names)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (cases, 6, 7, 3) if colours else (cases, 6, 7)).astype(np.uint8)
    for n in range(cases):
        pillow.fromarray(pixels[n]).save(folder / "imagesTr" / f"x_{n:03d}_0000{ending}")
        pillow.fromarray((pixels[n] > 128).astype(np.uint8).reshape(6, 7, -1)[..., 0]).save(
            folder / "labelsTr" / f"x_{n:03d}{ending}"
        )
    return pixels


@pytest.mark.parametrize("ending", [".png", ".tif", ".bmp"])
@pytest.mark.parametrize("colours", [False, True])
def test_pictures_of_eight_bits_stay_as_they_are(tmp_path: pathlib.Path, ending: str, colours: bool) -> None:
    pixels = slices_2d(tmp_path, ending, colours=colours)
    found = NnUnetFolder(path=str(tmp_path)).read()
    assert found.images.dtype == np.uint8
    np.testing.assert_array_equal(found.images, pixels.reshape(4, 6, 7, -1))
    np.testing.assert_array_equal(found.masks, found.images[..., 0] > 128)
    assert (found.spacing, found.names, found.cases.tolist()) == (
        None,
        ("x_000", "x_001", "x_002", "x_003"),
        [0, 1, 2, 3],
    )
    with pytest.raises(UserError, match="does not say how far its pixels lie apart"):
        NnUnetFolder(path=str(tmp_path), spacing=(1.0, 1.0)).read()


def test_a_test_folder_is_the_test_split_and_others_are_shares_of_the_cases(tmp_path: pathlib.Path) -> None:
    ct(tmp_path)
    for n in (7, 8):
        voxels, mask = volume(n)
        write_nifti(tmp_path / "imagesTs" / f"ct_{n}_0000.nii.gz", voxels)
        write_nifti(tmp_path / "labelsTs" / f"ct_{n}.nii.gz", mask)
    data = MaskedImages(source=of(tmp_path)).build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 12, "validation": 3, "test": 6}
    assert set(data.splits["test"]["cases"].tolist()) == {5, 6}


def test_a_case_that_is_learnt_from_is_not_tested(tmp_path: pathlib.Path) -> None:
    ct(tmp_path)
    voxels, mask = volume(3)
    write_nifti(tmp_path / "imagesTs" / "ct_3_0000.nii.gz", voxels)
    write_nifti(tmp_path / "labelsTs" / "ct_3.nii.gz", mask)
    with pytest.raises(UserError, match="case ct_3 is in imagesTr and in imagesTs, and what is learnt from must not"):
        MaskedImages(source=of(tmp_path)).build()


def test_masks_of_the_test_without_pictures_are_refused(tmp_path: pathlib.Path) -> None:
    write_nifti(ct(tmp_path) / "labelsTs" / "ct_7.nii.gz", volume(7)[1])
    with pytest.raises(UserError, match=r"ct_7.nii.gz is the mask of no case"):
        MaskedImages(source=of(tmp_path)).build()


def test_a_window_shows_the_middle_of_slices_and_masks_where_they_are_scored(tmp_path: pathlib.Path) -> None:
    source = of(ct(tmp_path))
    whole, data = (MaskedImages(source=source, augment=a).build() for a in (Augment(), Augment(window=(6, 4))))
    assert data.schema.shape == (6, 4, 1)
    assert next(data.train_batches(start_example=0))["masks"].shape == (8, 6, 4)
    for split in ("validation", "test"):
        for name in ("images", "masks"):
            np.testing.assert_array_equal(data.splits[split][name], whole.splits[split][name][:, 2:8, 2:6])
        np.testing.assert_array_equal(data.splits[split]["cases"], whole.splits[split]["cases"])


def test_voxels_of_less_than_a_thousandth_of_a_millimetre_are_read(tmp_path: pathlib.Path) -> None:
    write_nifti(tmp_path / "x.nii", volume(0)[0], np.diag((5e-4, 5e-4, 5e-4, 1.0)))
    np.testing.assert_allclose(read_volume(tmp_path / "x.nii").spacing, 5e-4)
    flat = np.diag((1.0, 1.0, 1.0, 1.0))
    flat[0, 1] = flat[1, 0] = 1
    image = nibabel.Nifti1Image(volume(0)[0], None)
    image.set_sform(flat, 1)
    image.to_filename(tmp_path / "flat.nii")
    with pytest.raises(UserError, match="does not say where its voxels lie"):
        read_volume(tmp_path / "flat.nii")


def test_mri_is_standardized_by_case(tmp_path: pathlib.Path) -> None:
    ct(tmp_path)
    with pytest.raises(UserError, match=r"has pixels of int16 from .*window=.*data.source.standardize=case for MRI"):
        of(tmp_path, window=None).read()
    config = MaskedImages(source=of(tmp_path, window=None, standardize="case"))
    data = config.build()
    for case in range(5):
        voxels = np.concatenate([a["images"][a["cases"] == case].ravel() for a in data.splits.values()])
        assert abs(voxels.mean()) < 1e-4
        assert abs(voxels.std() - 1) < 1e-4
    assert data.schema.standardized
    assert data.schema.identity()["data.standardized"] == "by case"


def test_cases_of_eight_bits_beside_deeper_ones_are_refused(tmp_path: pathlib.Path) -> None:
    one_image(ct(tmp_path), volume(1)[0].astype(np.uint8))
    with pytest.raises(UserError, match=r"ct_1_0000.nii.gz has pixels of uint8, .*ct_0_0000.nii.gz of int16: a window"):
        of(tmp_path).read()
    assert of(tmp_path, window=None, standardize="case").read().images.dtype == np.float32


def test_labelled_slices_alone_may_be_trained_on(tmp_path: pathlib.Path) -> None:
    ct(tmp_path)
    for n in range(5):
        _, mask = volume(n)
        mask[:, :, 1] = 0
        write_nifti(tmp_path / "labelsTr" / f"ct_{n}.nii.gz", mask)
    data = MaskedImages(source=of(tmp_path), slices="labelled").build()
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 6, "validation": 3, "test": 3}
    assert (data.splits["train"]["masks"] > 0).any((1, 2)).all()


def test_augmented_masks_stay_with_their_slices(tmp_path: pathlib.Path) -> None:
    describe(tmp_path, 3)
    for n in range(3):
        _, mask = volume(n, (16, 16, 2))
        write_nifti(tmp_path / "imagesTr" / f"a{n}_0000.nii.gz", mask)  # the picture is its mask
        write_nifti(tmp_path / "labelsTr" / f"a{n}.nii.gz", mask)
    augment = Augment(flip="both", quarter_turns=True, crop=2)
    data = MaskedImages(
        source=of(tmp_path, window=None), batch_size=6, augment=augment, validation=0.34, test=0.0
    ).build()
    seen = set()
    for _, batch in zip(range(5), data.train_batches(start_example=0), strict=False):
        np.testing.assert_array_equal(batch["images"][..., 0], batch["masks"])
        seen |= {mask.tobytes() for mask in batch["masks"]}
    assert len(seen) > 12


def dicom(path: pathlib.Path, stored: np.ndarray, height: float, number: int, **changes: Any) -> None:
    """One slice of CT: stored values are HU + 1024."""
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = pydicom.uid.CTImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = f"1.2.3.{number + 1}"
    data.SeriesInstanceUID = "1.2.3"
    data.Rows, data.Columns = stored.shape
    data.PixelSpacing, data.SliceThickness = [2.0, 2.0], 5.0
    data.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    data.ImagePositionPatient = [10.0 - 2.0 * (stored.shape[1] - 1), 20 - 2.0 * (stored.shape[0] - 1), height]
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 0
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.RescaleSlope, data.RescaleIntercept = 1, -1024
    data.PixelData = stored.astype("<u2").tobytes()
    for name, value in changes.items():
        setattr(data, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)


def write_series(folder: pathlib.Path, voxels: np.ndarray) -> None:
    """What `write_nifti` writes, as a scanner would: rows go backwards, columns to the left, files in no order."""
    for k in range(voxels.shape[2]):
        stored = voxels[::-1, ::-1, k].T.astype(int) + 1024
        dicom(folder / f"{(7 * k) % 10}.dcm", stored, -30 + 5.0 * k, k)


def test_a_series_of_dicom_is_the_volume_that_nifti_has(tmp_path: pathlib.Path) -> None:
    ct(tmp_path / "nifti")
    describe(tmp_path / "dicom", 5)
    for n in range(5):
        voxels, mask = volume(n)
        write_series(tmp_path / "dicom" / "imagesTr" / f"ct_{n}_0000", voxels)
        write_nifti(tmp_path / "dicom" / "labelsTr" / f"ct_{n}.nii.gz", mask)
    a, b = of(tmp_path / "nifti").read(), of(tmp_path / "dicom").read()
    np.testing.assert_array_equal(a.images, b.images)
    np.testing.assert_array_equal(a.masks, b.masks)
    assert a.spacing == b.spacing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SeriesInstanceUID": "1.2.4"}, "files of 2 series"),
        ({"PixelSpacing": [1.0, 1.0]}, "slices of 2 sizes, spacings or directions"),
        ({"ImagePositionPatient": [0.0, 0.0, 40.0]}, "slices lie 5 to 60 mm apart"),
        ({"PhotometricInterpretation": "MONOCHROME1"}, "one grey slice a file"),
    ],
)
def test_files_that_are_no_stack_are_refused(tmp_path: pathlib.Path, change: dict[str, Any], said: str) -> None:
    voxels, _ = volume(0)
    write_series(tmp_path, voxels)
    dicom(tmp_path / "9.dcm", voxels[:, :, 0].T.astype(int) + 1024, -35.0, 9, **change)
    with pytest.raises(UserError, match=said):
        read_volume(tmp_path)


def test_a_series_that_lacks_a_slice_or_has_none_is_refused(tmp_path: pathlib.Path) -> None:
    voxels, _ = volume(0, (8, 10, 5))
    write_series(tmp_path, voxels)
    (tmp_path / "4.dcm").unlink()
    with pytest.raises(UserError, match=r"its 4 slices lie 5 to 10 mm apart; they must be evenly spaced"):
        read_volume(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no files"):
        read_volume(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.dcm").write_bytes((tmp_path / "0.dcm").read_bytes()[:600])
    with pytest.raises(UserError, match="is no DICOM file that can be read"):
        read_volume(tmp_path / "other")


def deflated(path: pathlib.Path, more: int = 0) -> None:
    """The same slice in the deflated transfer syntax, with a private element of so many bytes."""
    data = pydicom.dcmread(path)
    data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    if more:
        data.add_new(0x00091010, "OB", bytes(more))
    data.save_as(path, enforce_file_format=True)


def test_deflated_dicom_is_read_within_the_bound_of_all_packed_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_series(tmp_path / "s", volume(0)[0])
    plain = read_volume(tmp_path / "s")
    for path in (tmp_path / "s").iterdir():
        deflated(path)
    np.testing.assert_array_equal(read_volume(tmp_path / "s").voxels, plain.voxels)
    monkeypatch.setattr(packed_files, "ALWAYS_BYTES", 2**16)
    np.testing.assert_array_equal(read_volume(tmp_path / "s").voxels, plain.voxels)
    deflated(path, 2**20)
    assert path.stat().st_size < 2**12
    with pytest.raises(UserError, match=r"is no DICOM file that can be read \(it unpacks to more than 500 times"):
        read_volume(tmp_path / "s")
    path.write_bytes(path.read_bytes()[:-40])
    monkeypatch.setattr(packed_files, "ALWAYS_BYTES", 2**28)
    with pytest.raises(UserError, match=r"is no DICOM file that can be read \(its deflated part ends early"):
        read_volume(tmp_path / "s")


def test_a_dicom_header_that_asks_for_more_than_the_file_can_hold_is_refused(tmp_path: pathlib.Path) -> None:
    dicom(tmp_path / "0.dcm", np.zeros((4, 4)), 0.0, 0, Rows=60_000, Columns=60_000)
    with pytest.raises(UserError, match="unpacks to more than 500 times"):
        read_volume(tmp_path)


def test_a_nifti_file_that_is_a_bomb_behind_its_header_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.nii"
    write_nifti(path, volume(0)[0])
    whole = path.read_bytes()
    (tmp_path / "x.nii.gz").write_bytes(gzip.compress(whole + bytes(2**20)))
    monkeypatch.setattr(packed_files, "ALWAYS_BYTES", 2**16)
    with pytest.raises(UserError, match=r"x.nii.gz is no NIfTI file that can be read \(it unpacks to more than 500"):
        read_volume(tmp_path / "x.nii.gz")
    surfaces = bytearray(whole)
    surfaces[68:70] = np.array(3001, "<i2").tobytes()
    path.write_bytes(surfaces)
    with pytest.raises(UserError, match=r"x.nii is no NIfTI file that can be read \(it is CIFTI, values of surfaces"):
        read_volume(path)


def test_a_stack_that_leans_is_refused(tmp_path: pathlib.Path) -> None:
    """As of a scanner whose gantry is tilted: each slice lies a little further back than the one below."""

    def write(places: list[list[float]]) -> None:
        for k, place in enumerate(places):
            stored = volume(0)[0][:, :, 0] + 1024
            dicom(tmp_path / "tilted" / f"{k}.dcm", stored, 0.0, k, ImagePositionPatient=place)

    write([[0.0, 1.5 * k, 5.0 * k] for k in range(4)])
    with pytest.raises(UserError, match=r"tilted: its axes stand at 73.3 degrees .*tilted gantry"):
        read_volume(tmp_path / "tilted")
    write([[0.0, 3.0 * (k == 1), 5.0 * k] for k in range(4)])
    with pytest.raises(UserError, match=r"slices are shifted against each other by up to 3 mm"):
        read_volume(tmp_path / "tilted")


@pytest.mark.parametrize("ending", [".nii.gz", ".nii"])
def test_a_truncated_nifti_is_refused_or_whole(tmp_path: pathlib.Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    write_nifti(path, volume(0)[0])
    whole, data = read_volume(path).voxels, path.read_bytes()
    refused = 0
    for length in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:length])
        try:
            np.testing.assert_array_equal(read_volume(path).voxels, whole)
        except UserError as error:
            assert "is no NIfTI file that can be read" in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.nii", "x.nii.gz", "s/0.dcm"])
def test_a_flipped_bit_is_refused_or_read_and_nothing_else(tmp_path: pathlib.Path, name: str) -> None:
    write_series(tmp_path / "s", volume(0)[0])
    for ending in (".nii", ".nii.gz"):
        write_nifti(tmp_path / f"x{ending}", volume(0)[0])
    path = tmp_path / name
    whole = path.read_bytes()
    ends: collections.Counter[str] = collections.Counter()
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            read_volume(path.parent if name.endswith("dcm") else path)
            ends["read"] += 1
        except UserError:
            ends["refused"] += 1
    assert ends["refused"] >= 3
    if name.endswith("gz"):
        assert ends["refused"] > 20 * ends["read"]  # what is packed has a checksum


def test_a_header_that_asks_for_more_than_the_file_can_hold_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.nii"
    write_nifti(path, volume(0)[0])
    data = bytearray(path.read_bytes())
    data[42:48] = np.array([30000, 30000, 30000], "<i2").tobytes()
    path.write_bytes(data)
    with pytest.raises(UserError, match="unpacks to more than 500 times"):
        read_volume(path)


def one_label(folder: pathlib.Path, array: np.ndarray, affine: np.ndarray | None = None) -> None:
    write_nifti(folder / "labelsTr" / "ct_1.nii.gz", array, affine)


def one_image(folder: pathlib.Path, array: np.ndarray, affine: np.ndarray | None = None) -> None:
    write_nifti(folder / "imagesTr" / "ct_1_0000.nii.gz", array, affine)


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (lambda f: one_label(f, volume(0, (8, 10, 4))[1]), r"3 slice\(s\) of 10 x 8 and its mask .* 4 slice"),
    "place": (
        lambda f: one_label(f, volume(0)[1], affine_of((2.0, 2.0, 6.0))),
        "and its mask ct_1.nii.gz lie elsewhere in the scanner: their corners are up to 2 mm apart",
    ),
    "label": (
        lambda f: one_label(f, volume(0)[1] * 2),
        r"has the label 4 in 6 pixels; dataset.json has 0 \(background\)",
    ),
    "white": (lambda f: one_label(f, (volume(0)[1] > 0).astype(np.uint8) * 255), "White is often written as 255"),
    "fraction": (lambda f: one_label(f, volume(0)[1] * np.float32(0.5)), "has values that are no whole numbers"),
    "nan label": (lambda f: one_label(f, np.full((8, 10, 3), np.nan, np.float32)), "no whole numbers"),
    "nan": (lambda f: one_image(f, np.full((8, 10, 3), np.nan, np.float32)), "240 pixels that are NaN or infinite"),
    "time": (lambda f: one_image(f, np.zeros((8, 10, 3, 2), np.int16)), "not those of one volume. Write each channel"),
    "missing mask": (
        lambda f: (f / "labelsTr" / "ct_1.nii.gz").unlink(),
        "ct_1.nii.gz is missing: case ct_1 has pictures",
    ),
    "mask alone": (
        lambda f: write_nifti(f / "labelsTr" / "ct_9.nii.gz", volume(9)[1]),
        r"ct_9.nii.gz is the mask of no case: there is no imagesTr/ct_9_0000.nii.gz. Add the pictures",
    ),
    "stray": (lambda f: (f / "imagesTr" / "notes.txt").write_text(""), "notes.txt is not called ID_0000.nii.gz"),
    "channel": (
        lambda f: (f / "imagesTr" / "ct_1_0000.nii.gz").rename(f / "imagesTr" / "ct_1_0001.nii.gz"),
        "ct_1_0001.nii.gz is of channel 1, and dataset.json names 1",
    ),
    "second channel": (
        lambda f: describe(f, 5, channel_names={"0": "T1", "1": "T2"}),
        r"ct_0_0001.nii.gz is missing: channel 1 \(T2\) of case ct_0",
    ),
    "number": (lambda f: describe(f, 6), "numTraining=6, and imagesTr has 5 cases"),
    "no json": (lambda f: (f / "dataset.json").unlink(), "has no dataset.json that can be read"),
    "cut json": (lambda f: (f / "dataset.json").write_text('{"labels": {'), "has no dataset.json that can be read"),
    "list": (lambda f: (f / "dataset.json").write_text("[]"), "must be an object with channel_names"),
    "no names": (lambda f: describe(f, 5, channel_names=None), "needs 'channel_names', an object; got None"),
    "v1": (lambda f: describe(f, 5, channel_names=None, modality={"0": "CT"}), "looks like a file of nnU-Net v1"),
    "bool": (lambda f: describe(f, 5, numTraining=True), "needs 'numTraining', a number; got True"),
    "from one": (lambda f: describe(f, 5, channel_names={"1": "CT"}), "must be numbered from 0"),
    "ending": (lambda f: describe(f, 5, ending=".nrrd"), "file_ending '.nrrd' cannot be read. Convert"),
    "regions": (lambda f: describe(f, 5, labels={"background": 0, "whole": [1, 2]}), "labels are regions"),
    "order": (lambda f: describe(f, 5, regions_class_order=[1, 2]), "labels are regions"),
    "ignore": (
        lambda f: describe(f, 5, labels={"background": 0, "a": 1, "ignore": 2}),
        "label 'ignore' is not supported",
    ),
    "turned round": (lambda f: describe(f, 5, labels={"0": "background", "1": "a"}), "names first"),
    "gap": (
        lambda f: describe(f, 5, labels={"background": 0, "a": 2}),
        r"numbered 0, 1, 2, ... with \"background\": 0",
    ),
    "text": (lambda f: describe(f, 5, labels={"background": 0, "a": "1"}), "labels must be numbered 0, 1, 2"),
    "no background": (lambda f: describe(f, 5, labels={"a": 0, "b": 1}), 'with "background": 0'),
    "nothing": (lambda f: describe(f, 5, labels={"background": 0}), "the background alone"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    spoil, said = WRONG[name]
    spoil(ct(tmp_path))
    with pytest.raises(UserError, match=said):
        MaskedImages(source=of(tmp_path)).build()


def test_empty_folders_and_too_few_cases_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"gone has no dataset.json that can be read"):
        MaskedImages(source=of(tmp_path / "gone")).build()
    describe(tmp_path / "empty", 0)
    with pytest.raises(UserError, match=r"imagesTr has no pictures ID_0000.nii.gz. Put them there"):
        MaskedImages(source=of(tmp_path / "empty")).build()
    with pytest.raises(UserError, match=r"of 2 cases leave none for (validation|test)"):
        MaskedImages(source=of(ct(tmp_path / "two", 2))).build()
    for bad in (
        {"spacing": (0.0, 1.0)},
        {"spacing": (1.0,)},
        {"spacing": (0.0, 1.0, 1.0)},
        {"size": (0, 4)},
        {"size": (4,)},
    ):
        with pytest.raises(UserError, match="NnUnetFolder: "):
            NnUnetFolder(**bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_window(tmp_path: pathlib.Path) -> None:
    """Whoever reads the checkpoint would feed it other pixels than those that it learnt from."""

    def run(window: tuple[float, float], steps: int, resume: Any) -> None:
        experiment = Experiment(
            model=UNetConfig(widths=(4, 4)),
            data=MaskedImages(source=of(tmp_path / "data", window=window), batch_size=8),
            steps=steps,
            optimizer=optim.Sgd(learning_rate=optim.Constant(value=0.01)),
            checkpoints=Checkpoints(every=1),
            evaluation=Evaluation(every=10),
        )
        loop.train(experiment, workdir=tmp_path / "run", resume=resume)

    ct(tmp_path / "data")
    run(WINDOW, 1, "never")
    with pytest.raises(UserError, match=r"data.window is '.-160.0, 240.0.' in the checkpoint and '.-160.0, 200.0.'"):
        run((-160.0, 200.0), 2, "must")


@pytest.mark.parametrize("module", ["nibabel", "pydicom"])
def test_without_a_library_it_is_said_what_to_install(
    tmp_path: pathlib.Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_series(tmp_path / "series", volume(0)[0])
    write_nifti(tmp_path / "x.nii.gz", volume(0)[0])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"needs the library {module}, which is not installed: pip install {module}"):
        read_volume(tmp_path / ("x.nii.gz" if module == "nibabel" else "series"))
