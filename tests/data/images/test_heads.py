"""Slices of heads: slabs with a gap, and two heads on one grid."""

import importlib.util
import pathlib

import numpy as np
import pytest

from scalejax.data.images.augment import Augment
from scalejax.data.images.brain import icbm152
from scalejax.data.images.heads import TissueSlabs, TwoHeads
from scalejax.errors import UserError

COLIN = pathlib.Path(TwoHeads().colin)
needs_colin = pytest.mark.skipif(
    importlib.util.find_spec("nibabel") is None or not (COLIN / "aal.nii.gz").exists(),
    reason="needs nibabel, and Debian's mricron-data",
)


def test_slabs_are_of_tissues_and_no_slice_lies_beside_one_of_another_split():
    data = TissueSlabs().build()
    head = icbm152()
    tissues = head.tissues()
    heights = {}
    for split, arrays in data.splits.items():
        heights[split] = []
        for image, mask, case in zip(arrays["images"], arrays["masks"], arrays["cases"], strict=True):
            whole = np.zeros((117, 99), int)
            whole[2:114, 1:97] = image[..., 0]
            (found,) = (
                k
                for k in range(4 + 8 * case, 10 + 8 * case)
                if (head.t1[:, ::-1, k].T[2:114, 1:97] == whole[2:114, 1:97]).all()
            )
            np.testing.assert_array_equal(mask, tissues[:, ::-1, found].T[2:114, 1:97])
            heights[split].append(found)
    assert {split: len(of) for split, of in heights.items()} == {"train": 36, "validation": 6, "test": 12}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert min(abs(a - b) for a in heights[one] for b in heights[other]) >= 3
    assert data.schema.classes == ("background", "grey matter", "white matter")
    assert (data.splits["train"]["subjects"] == data.splits["train"]["cases"]).all()


def test_a_window_is_refused_where_slices_are_shown_whole():
    with pytest.raises(UserError, match=r"window=\(64, 64\): pictures of this data set are shown whole .*112 x 96"):
        TissueSlabs(augment=Augment(window=(64, 64))).build()


def test_test_pictures_may_be_changed_and_no_others():
    plain, noisy = TissueSlabs().build(), TissueSlabs(test_change=Augment(noise=20)).build()
    for split in plain.splits:
        same = (plain.splits[split]["images"] == noisy.splits[split]["images"]).all()
        assert same == (split != "test")
        np.testing.assert_array_equal(plain.splits[split]["masks"], noisy.splits[split]["masks"])


@needs_colin
def test_two_heads_lie_on_one_grid():
    data = TwoHeads(size=(108, 91)).build()
    head = data.splits["test"]
    assert [len(data.splits[s]["cases"]) for s in ("train", "validation", "test")] == [16, 8, 27]
    # (i, j, k) of Colin at 1 mm is (i + 8, j + 9, k + 1) of ICBM: of every second voxel one grid serves both.
    t1 = icbm152().t1[4:95, 5:113]
    bright = head["images"][0].max() / t1[:, :, 23].max()
    np.testing.assert_allclose(head["images"][0, ..., 0], t1[:, ::-1, 23].T * bright, rtol=1e-6)
    sizes = {name: (head["masks"] == label).sum() for label, name in enumerate(data.schema.classes)}
    published = {"caudate": 15623, "putamen": 16452, "thalamus": 17099, "hippocampus": 15075}  # of 1 mm3
    for name, voxels in published.items():
        assert sizes[name] == pytest.approx(voxels / 8, rel=0.03)
    subjects = np.concatenate([arrays["subjects"] for arrays in data.splits.values()])
    assert len(set(subjects)) == len(subjects)
    # Left and right of what the labels name lie where the brains are.
    inside = head["images"][head["masks"] > 0]
    assert (inside > 0.3).mean() > 0.99


@needs_colin
@pytest.mark.parametrize("slices", [4, 32])
def test_slices_that_validate_are_the_same_for_any_number_and_teach_nothing(slices):
    data, other = TwoHeads(slices=slices).build(), TwoHeads(slices=8).build()
    np.testing.assert_array_equal(data.splits["validation"]["masks"], other.splits["validation"]["masks"])
    assert data.schema == other.schema
    assert len(data.splits["train"]["images"]) == slices
    for image in data.splits["train"]["images"]:
        assert (image != data.splits["validation"]["images"]).any((1, 2, 3)).all()


@needs_colin
def test_a_head_of_1_mm_gives_every_slice(tmp_path):
    small = icbm152().t1
    t1 = np.zeros((197, 233, 189), np.uint8)
    t1[::2, ::2, ::2] = small
    t1[::2, ::2, 1::2] = small[:, :, :-1]
    np.savez(tmp_path / "icbm.npz", t1=t1)
    every = TwoHeads(icbm=str(tmp_path / "icbm.npz")).build().splits["test"]
    second = TwoHeads().build().splits["test"]
    assert len(every["images"]) == 54
    np.testing.assert_array_equal(every["masks"][1::2], second["masks"])
    scale = every["images"][1].max() / second["images"][0].max()
    np.testing.assert_allclose(every["images"][1::2], second["images"] * scale, rtol=1e-5)


def test_files_that_are_not_there_or_no_heads_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.colin: .*ch2bet.nii.gz is missing. Install Debian's mricron-data"):
        TwoHeads(colin=str(tmp_path)).build()
    if importlib.util.find_spec("nibabel") is None or not (COLIN / "aal.nii.gz").exists():
        return
    with pytest.raises(UserError, match=r"data\.icbm: .* cannot be read as an npz with 't1'"):
        TwoHeads(icbm=str(tmp_path / "none.npz")).build()
    np.savez(tmp_path / "small.npz", t1=np.zeros((3, 3, 3), np.uint8))
    with pytest.raises(UserError, match=r"must be \[197, 233, 189\], ICBM 152 at 1 mm; got \[3, 3, 3\]"):
        TwoHeads(icbm=str(tmp_path / "small.npz")).build()
    with pytest.raises(UserError, match=r"data\.slices must be at most 46; got 50"):
        TwoHeads(slices=50).build()
