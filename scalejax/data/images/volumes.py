"""Volumes in files, NIfTI (nibabel) and series of DICOM (pydicom), turned so that all have their axes alike."""

import dataclasses
import importlib
import io
import itertools
import math
import pathlib
import warnings
from typing import Any, Literal

import numpy as np

from scalejax.data import packed_files
from scalejax.data.images.files import library
from scalejax.errors import UserError

Axis = Literal["axial", "coronal", "sagittal"]
_AXES: dict[str, int] = {"sagittal": 0, "coronal": 1, "axial": 2}
NIFTI = (".nii", ".nii.gz")
_MILLIMETRES = {"meter": 1e3, "mm": 1.0, "micron": 1e-3, "unknown": 1.0}
"""Of the units that the header of a NIfTI file may name."""
_TIE = 1e-3
"""Shares of a pixel that differ by less are equal: spacings are float32 in files, and a factor of 2 need not be 2."""


@dataclasses.dataclass(frozen=True)
class Volume:
    """Voxels [I, J, K] counted from left to right, back to front and bottom to top of the patient.

    Axes are those of the file that lie nearest to these: a volume that is oblique in the scanner stays so.

    Attributes:
      voxels: As the file has them, scaled as it says.
      affine: float64[4, 4], voxels to millimetres.
    """

    voxels: np.ndarray
    affine: np.ndarray

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Millimetres from one voxel to the next, along each axis."""
        i, j, k = np.linalg.norm(self.affine[:3, :3], axis=0).tolist()
        return i, j, k

    def slices(self, axis: Axis) -> tuple[np.ndarray, tuple[float, float]]:
        """Pictures [N, H, W] across an axis, in its order, and their spacing along H and W.

        Front (axial) or top is up; the patient's left (or, sagittal, the back) is on the left.
        """
        number = _AXES[axis]
        across, up = (n for n in range(3) if n != number)
        pictures = np.moveaxis(self.voxels, number, 0).transpose(0, 2, 1)[:, ::-1]
        return pictures, (self.spacing[up], self.spacing[across])

    def between(self, axis: Axis) -> float:
        """Millimetres from one slice across an axis to the next."""
        return self.spacing[_AXES[axis]]

    def corners(self) -> np.ndarray:
        """float64[8, 3], millimetres: where the middles of the eight outermost voxels lie."""
        ends = itertools.product(*((0, size - 1) for size in self.voxels.shape))
        return np.array(list(ends)) @ self.affine[:3, :3].T + self.affine[:3, 3]


def read_volume(path: pathlib.Path) -> Volume:
    """A NIfTI file, or a folder of the DICOM files of one series.

    Raises:
      UserError: it cannot be read, is damaged, is no volume, or its axes do not stand at right angles.
    """
    return _read_series(path) if path.is_dir() else _read_nifti(path)


def _read_nifti(path: pathlib.Path) -> Volume:
    nibabel = library("nibabel", "nibabel", f"reading {path}")
    try:
        with packed_files.open_unpacked(path) as file:
            data = file.read()
        size = {int.from_bytes(data[:4], order) for order in ("little", "big")}
        image = (nibabel.Nifti2Image if 540 in size else nibabel.Nifti1Image).from_bytes(data)
        if 3000 <= int(image.header["intent_code"]) < 3100:
            raise ValueError("it is CIFTI, values of surfaces and not of the voxels of one volume")
        shape, kind = image.shape, image.get_data_dtype()
        # A damaged header may ask for more memory than there is.
        packed_files.check_ratio(int(np.prod(shape, dtype=float)) * kind.itemsize, path.stat().st_size)
        voxels = np.array(np.asanyarray(image.dataobj))
        affine = np.diag((*(_MILLIMETRES[image.header.get_xyzt_units()[0]],) * 3, 1.0)) @ image.affine
    except Exception as error:  # nibabel, zlib and numpy each raise their own for a damaged file
        raise UserError(
            f"{path} is no NIfTI file that can be read ({str(error) or type(error).__name__}). Copy or write it again."
        ) from error
    if voxels.dtype.kind not in "iuf":
        raise UserError(f"{path} has voxels of {voxels.dtype}. Write numbers, one a voxel.")
    if voxels.ndim > 3 and set(voxels.shape[3:]) == {1}:
        voxels = voxels.reshape(voxels.shape[:3])
    if voxels.ndim == 2:
        voxels = voxels[..., None]
    if voxels.ndim != 3 or not voxels.size:
        raise UserError(
            f"{path} has voxels {list(voxels.shape)}, not those of one volume. Write each channel or time as a file of "
            "its own (ID_0000, ID_0001, ...)."
        )
    return _canonical(nibabel, voxels, affine, path)


def _read_series(path: pathlib.Path) -> Volume:
    nibabel = library("nibabel", "nibabel", f"reading {path}")
    found = [_read_dicom(file) for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith(".")]
    if not found:
        raise UserError(f"{path} has no files. Put the DICOM files of one series into it.")
    if len(series := {one.series for one in found}) > 1:
        raise UserError(f"{path} has files of {len(series)} series. Give each series a folder of its own.")
    geometry = {(one.pixels.shape, one.spacing, one.directions) for one in found}
    if len(geometry) > 1:
        raise UserError(
            f"{path} has slices of {len(geometry)} sizes, spacings or directions: {sorted(map(str, geometry))[:2]}. "
            "Keep those of one stack."
        )
    row_spacing, column_spacing = found[0].spacing
    right, down = np.split(np.array(found[0].directions), 2)
    normal = np.cross(right, down)
    positions = np.array([one.position for one in found])
    heights = positions @ normal
    order = np.argsort(heights, kind="stable")
    steps = np.diff(heights[order])
    if len(found) > 1 and not (steps.min() > 1e-3 and steps.max() <= 1.05 * steps.min()):
        raise UserError(
            f"{path}: its {len(found)} slices lie {steps.min():.3g} to {steps.max():.3g} mm apart; they must be evenly "
            "spaced. Add the files that are missing, or remove those of another stack or of a second time."
        )
    first, last = positions[order[[0, -1]]]
    step = (last - first) / (len(found) - 1) if len(found) > 1 else normal * found[0].thickness
    beside = positions[order] - first - np.outer(np.arange(len(found)), step)
    beside -= np.outer(beside @ normal, normal)
    if (most := np.linalg.norm(beside, axis=1).max()) > 0.5 * min(row_spacing, column_spacing):
        raise UserError(
            f"{path}: its slices are shifted against each other by up to {most:.3g} mm, so that their pixels are no "
            "columns of voxels. Keep those of one stack, or resample them to one grid."
        )
    voxels = np.stack([found[n].pixels.T for n in order], -1)  # columns, rows, slices
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = right * column_spacing, down * row_spacing
    affine[:3, 2], affine[:3, 3] = step, first
    affine[:2] *= -1  # DICOM counts towards the patient's left and back
    return _canonical(nibabel, voxels, affine, path)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """What is used of a DICOM file: pixels [rows, columns] in units that it names, such as Hounsfield units; lengths
    in millimetres; directions of growing columns and of growing rows. A file that does not say where it lies is axial.
    """

    pixels: np.ndarray
    series: str
    spacing: tuple[float, float]
    thickness: float
    directions: tuple[float, ...]
    position: tuple[float, ...]


def _read_dicom(path: pathlib.Path) -> _Slice:
    pydicom = library("pydicom", "pydicom", f"reading {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are not as the standard wants them
            warnings.filterwarnings("error", "image size")  # of far too many pixels, by Pillow
            dicom = _open_dicom(pydicom, path)

            def numbers(name: str, *otherwise: float) -> tuple[float, ...]:
                value = dicom.get(name)
                values = otherwise if value is None else value if len(otherwise) > 1 else (value,)
                found = tuple(float(one) for one in values)
                if len(found) != len(otherwise) or not np.isfinite(found).all():
                    raise ValueError(f"{name} is {value}, not {len(otherwise)} number(s)")
                return found

            sides = (dicom.get(name) or 1 for name in ("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel"))
            bits = math.prod(map(int, sides)) * int(dicom.get("BitsAllocated") or 1)
            packed_files.check_ratio(bits // 8, path.stat().st_size)
            pixels = np.array(dicom.pixel_array)
            kind = dicom.get("PhotometricInterpretation")
            (slope,), (intercept,) = numbers("RescaleSlope", 1.0), numbers("RescaleIntercept", 0.0)
            rows, columns = numbers("PixelSpacing", *numbers("ImagerPixelSpacing", 1.0, 1.0))
            found = _Slice(
                pixels=pixels if (slope, intercept) == (1.0, 0.0) else pixels * slope + intercept,
                series=str(dicom.get("SeriesInstanceUID")),
                spacing=(rows, columns),
                thickness=numbers("SliceThickness", 1.0)[0],
                directions=numbers("ImageOrientationPatient", 1, 0, 0, 0, 1, 0),
                position=numbers("ImagePositionPatient", 0, 0, 0),
            )
    except Exception as error:  # pydicom has several of its own, also for what it has no decoder for
        raise UserError(
            f"{path} is no DICOM file that can be read ({str(error) or type(error).__name__}). Copy it again; if it is "
            "compressed, write it as explicit little endian."
        ) from error
    if pixels.ndim != 2 or kind != "MONOCHROME2":
        raise UserError(
            f"{path} has pixels {list(pixels.shape)}, {kind}; one grey slice a file (MONOCHROME2) can be read. Convert "
            "it to NIfTI."
        )
    return found


def _open_dicom(pydicom: Any, path: pathlib.Path) -> Any:
    """A data set with its file meta information. pydicom would unpack a deflated one without a bound."""
    reader = importlib.import_module("pydicom.filereader")
    with path.open("rb") as file:
        reader.read_preamble(file, False)
        meta = reader.read_dataset(file, False, True, stop_when=lambda tag, *_: tag >> 16 != 2)
        if meta.get("TransferSyntaxUID") != pydicom.uid.DeflatedExplicitVRLittleEndian:
            return pydicom.dcmread(path)
        dicom = reader.read_dataset(io.BytesIO(packed_files.inflated(file.read())), False, True)
    dicom.file_meta = pydicom.dataset.FileMetaDataset(meta)
    return dicom


def _canonical(nibabel: Any, voxels: np.ndarray, affine: np.ndarray, path: pathlib.Path) -> Volume:
    axes = affine[:3, :3]
    if not np.isfinite(affine).all() or abs(np.linalg.det(axes)) <= 1e-6 * np.linalg.norm(axes, axis=0).prod():
        raise UserError(
            f"{path} does not say where its voxels lie: its affine is {affine[:3].tolist()}. Write it with that of the "
            "scan."
        )
    _check_right_angles(axes, voxels.shape, path)
    orientation = nibabel.orientations.io_orientation(affine)
    turned = nibabel.orientations.apply_orientation(voxels, orientation)
    back = nibabel.orientations.inv_ornt_aff(orientation, voxels.shape)
    return Volume(np.ascontiguousarray(turned), affine @ back)


def _check_right_angles(axes: np.ndarray, shape: tuple[int, ...], path: pathlib.Path) -> None:
    """Refuses columns of an affine that lean so far that the end of one lies half a voxel beside where it should."""
    lengths = np.linalg.norm(axes, axis=0)
    cosines = np.abs((axes / lengths).T @ (axes / lengths)) * (1 - np.eye(3))
    beside = cosines * (lengths * (np.array(shape) - 1))[:, None] / lengths
    if beside.max() > 0.5:
        angle = np.degrees(np.arccos(cosines.flat[beside.argmax()]))
        raise UserError(
            f"{path}: its axes stand at {angle:.1f} degrees and not at right angles, as after an affine registration "
            "(a sheared sform) or with a tilted gantry, so that its spacing gives no distances. Resample it, and its "
            "mask, to a grid of right angles."
        )


Distances = tuple[float, float, float]
"""Millimetres from one slice to the next, and from one pixel to the next down and across."""


def resampled(pictures: np.ndarray, spacing: Distances, wanted: Distances) -> np.ndarray:
    """number[N, H, W] of a spacing at another, float32, linearly; the corners of their areas are kept."""
    return _resampled(pictures.astype(np.float32), spacing, wanted)


def resampled_masks(masks: np.ndarray, spacing: Distances, wanted: Distances) -> np.ndarray:
    """integers[N, H, W] likewise: each pixel gets the class with the largest share in what `resampled` mixes there.

    Of equal shares it is that of the higher number, as in nnU-Net. (The nearest pixel would not do: halfway between two
    it is always the later one, and masks lie half a pixel beside their pictures.)
    """
    if spacing == wanted:
        return masks
    found, most = None, np.zeros((), np.float32)
    for label in np.unique(masks):
        share = _resampled((masks == label).astype(np.float32), spacing, wanted)
        found = np.zeros(share.shape, masks.dtype) if found is None else found
        found[share >= most - _TIE] = label
        most = np.maximum(most, share)
    return masks if found is None else found


def _resampled(pictures: np.ndarray, spacing: Distances, wanted: Distances) -> np.ndarray:
    ratios = [new / old for new, old in zip(wanted, spacing, strict=True)]
    if all(abs(ratio - 1) < 1e-4 for ratio in ratios):
        return pictures
    ndimage = library("scipy.ndimage", "scipy", "data.source.spacing")
    return ndimage.affine_transform(
        pictures,
        ratios,
        [0.5 * ratio - 0.5 for ratio in ratios],
        output_shape=[max(1, round(size / ratio)) for size, ratio in zip(pictures.shape, ratios, strict=True)],
        order=1,
        mode="nearest",
    )


def fitted(pictures: np.ndarray, size: tuple[int, int], fill: float) -> np.ndarray:
    """[N, H, W] cut or filled up to a size about their middle."""
    for axis, wanted in zip((1, 2), size, strict=True):
        more = wanted - pictures.shape[axis]
        if more < 0:
            start = -more // 2
            pictures = pictures[(slice(None),) * axis + (slice(start, start + wanted),)]
        elif more:
            margins = [(0, 0)] * 3
            margins[axis] = (more // 2, more - more // 2)
            pictures = np.pad(pictures, margins, constant_values=fill)
    return pictures
