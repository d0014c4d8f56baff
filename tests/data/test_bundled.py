"""What ships with the package: each file has its source and licence, and all of it is small."""

import gzip
import hashlib
import pathlib
import re

import scalejax.data.bundled

FOLDER = pathlib.Path(scalejax.data.bundled.__file__).parent
DATA = sorted(p for p in FOLDER.iterdir() if p.suffix not in (".py", ".md") and not p.name.endswith("-LICENSE"))
LARGEST_BYTES = 8_000_000


def test_all_files_together_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert sum(sizes.values()) <= LARGEST_BYTES, sizes


def test_the_table_names_every_file_with_its_licence() -> None:
    readme = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| .+ \| (.+) \|$", readme, re.MULTILINE))
    assert sorted(rows) == [path.name for path in DATA]
    assert all(rows.values())
    named = set(re.findall(r"`([\w.-]+-LICENSE)`", " ".join(rows.values())))
    assert named == {path.name for path in FOLDER.glob("*-LICENSE")}
    for name in named:
        text = (FOLDER / name).read_text()
        assert "Permission is hereby granted, free of charge" in text
        assert re.search(r"Copyright.*20\d\d", text)


def test_tiny_shakespeare_is_the_text_that_others_train_on() -> None:
    text = gzip.decompress((FOLDER / "tiny_shakespeare.txt.gz").read_bytes())
    assert (len(text), text.count(b"\n"), len(set(text))) == (1_115_394, 40_000, 65)
    assert hashlib.sha256(text).hexdigest().startswith("86c4e6aa9db7c042")
