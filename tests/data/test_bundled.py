"""What ships with the package: each file has its source and licence, and all of it is small."""

import gzip
import hashlib
import pathlib
import re

import numpy as np

import scalejax.data.bundled
from scalejax.data.images.brain import icbm152
from scalejax.data.images.nuclei import nuclei

FOLDER = pathlib.Path(scalejax.data.bundled.__file__).parent
FILES = [path for path in FOLDER.iterdir() if path.is_file()]
DATA = sorted(p for p in FILES if p.suffix not in (".py", ".md") and not p.name.endswith("-LICENSE"))
LARGEST_BYTES = 8_000_000


def test_all_files_together_are_small_and_the_readme_says_how_large() -> None:
    sizes = {path.name: path.stat().st_size for path in FILES}
    assert sum(sizes.values()) <= LARGEST_BYTES, sizes
    said = re.search(r"together are ([\d.]+) MB of the 8 MB", (FOLDER / "README.md").read_text())
    assert said is not None
    assert float(said[1]) == round(sum(sizes.values()) / 1e6, 1)


def test_the_table_names_every_file_with_its_licence() -> None:
    readme = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| .+ \| (.+) \|$", readme, re.MULTILINE))
    assert sorted(rows) == [path.name for path in DATA]
    assert all(rows.values())
    named = set(re.findall(r"`([\w.-]+-LICENSE)`", " ".join(rows.values())))
    assert named == {path.name for path in FOLDER.glob("*-LICENSE")}
    for name in named:
        text = (FOLDER / name).read_text()
        granted = ("Permission is hereby granted, free of charge", "Redistribution and use", "Permission to use, copy,")
        assert any(words in text for words in granted)
        assert re.search(r"Copyright.*20\d\d", text)


def test_the_nuclei_are_the_published_ones() -> None:
    picture, instances = nuclei()
    assert (picture.shape, picture.dtype, instances.dtype) == ((512, 512), np.uint8, np.int32)
    assert (int(picture.max()), np.unique(instances).size - 1) == (235, 125)
    assert round((instances > 0).mean(), 3) == 0.199
    with np.load(FOLDER / "nuclei.npz") as arrays:
        assert np.array_equal(arrays["image"], picture)  # nothing was lost with the upper 8 bits


def test_the_brain_has_the_shares_of_tissue_of_its_source() -> None:
    brain = icbm152()
    assert brain.t1.shape == brain.grey.shape == brain.white.shape == (99, 117, 95)
    shares = np.bincount(brain.tissues().ravel()) / brain.t1.size
    np.testing.assert_allclose(shares, (0.803, 0.124, 0.073), atol=3e-3)  # those of all voxels, at 1 mm
    middle = brain.affine @ [49, 67, 36, 1]
    np.testing.assert_array_equal(middle, [0, 0, 0, 1])
    mirrored = brain.t1[::-1].astype(float)
    assert np.corrcoef(brain.t1.ravel(), mirrored.ravel())[0, 1] > 0.99  # the first axis goes from ear to ear


def test_tiny_shakespeare_is_the_text_that_others_train_on() -> None:
    text = gzip.decompress((FOLDER / "tiny_shakespeare.txt.gz").read_bytes())
    assert (len(text), text.count(b"\n"), len(set(text))) == (1_115_394, 40_000, 65)
    assert hashlib.sha256(text).hexdigest().startswith("86c4e6aa9db7c042")
