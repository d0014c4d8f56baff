import pathlib
import zipfile

import numpy as np
import pytest

from scalejax.data import MovielensData
from scalejax.errors import UserError

INSIDE = "recbole/dataset_example/ml-100k/"
GENRES = ["Action", "Comedy Drama", "", "Drama Action War"]


def files() -> dict[str, str]:
    rng = np.random.default_rng(0)
    users = [f"{u}\t{20 + u % 5}\t{'MF'[u % 2]}\tjob{u % 3}\t{u:05d}" for u in range(1, 11)]
    items = [f"{i}\ttitle {i}\t{1990 + i % 4}\t{GENRES[i % 4]}" for i in range(1, 21)]
    inter = [f"{rng.integers(1, 11)}\t{rng.integers(1, 21)}\t{rng.integers(1, 6)}\t{n}" for n in range(200)]
    return {
        "ml-100k.user": "\n".join(["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", *users]),
        "ml-100k.item": "\n".join(
            ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", *items]
        ),
        "ml-100k.inter": "\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *inter]),
    }


def wheel(path: pathlib.Path, content: dict[str, str]) -> str:
    with zipfile.ZipFile(path, "w") as z:
        for name, text in content.items():
            z.writestr(INSIDE + name, text + "\n")
    return str(path)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return wheel(tmp_path / "recbole.whl", files())


def test_ratings_users_and_films_are_joined(path: str) -> None:
    data = MovielensData(path=path, batch_size=16).build()
    assert data.schema == MovielensData(path=path).schema()
    assert data.schema.keys == ("user_id", "age", "gender", "occupation", "item_id", "release_year", "class")
    assert [data.num_examples(s) for s in ("train", "validation", "test")] == [160, 20, 20]
    assert data.schema["class"].length is None
    assert data.schema["class"].capacity == 3.0
    test = np.sort(np.random.RandomState(0).permutation(200)[180:])
    ratings = [line.split("\t") for line in files()["ml-100k.inter"].splitlines()[1:]]
    users, items = (sorted({str(k) for k in range(1, n)}) for n in (11, 21))
    batches = list(data.eval_batches("test"))
    assert [len(b) for b in batches] == [16, 16]
    lists = [b.features.to_lists() for b in batches]
    genres = ["Action", "Comedy", "Drama", "War"]
    for n, row in enumerate(test):
        user, item, rating, _ = ratings[row]
        found = {key: ids[n % 16] for key, ids in lists[n // 16].items()}
        assert found["user_id"] == [users.index(user)]
        assert found["item_id"] == [items.index(item)]
        assert found["age"] == [int(user) % 5]
        assert found["gender"] == [["F", "M"].index("MF"[int(user) % 2])]
        assert found["release_year"] == [int(item) % 4]
        assert [genres[g] for g in found["class"]] == GENRES[int(item) % 4].split()
        assert batches[n // 16].labels[n % 16, 0] == (int(rating) >= 4)


def test_a_folder_with_the_files_gives_the_same(path: str, tmp_path: pathlib.Path) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    assert MovielensData(path=str(tmp_path)).build().fingerprint() == MovielensData(path=path).build().fingerprint()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ml-100k.user", None, r"ml-100k\.user is not in the wheel; wanted recbole==1\.2\.1"),
        ("ml-100k.inter", lambda text: text[:-8], r"ml-100k\.inter has . fields instead of 4 in line 201; truncated"),
        ("ml-100k.item", lambda text: text.splitlines()[0], r"ml-100k\.item has no rows"),
        ("ml-100k.item", lambda text: text.replace("class", "klass"), "has no column 'class'"),
        ("ml-100k.inter", lambda text: text + "\n99\t1\t3\t0", "rates with user_id '99'"),
    ],
)
def test_incomplete_files_are_refused(tmp_path: pathlib.Path, name: str, change, message: str) -> None:
    content = files()
    if change is None:
        del content[name]
    else:
        content[name] = change(content[name])
    with pytest.raises(UserError, match=message):
        MovielensData(path=wheel(tmp_path / "bad.whl", content)).build()


def test_a_missing_or_truncated_wheel_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="no such file"):
        MovielensData(path=path + ".none").build()
    whole = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not a complete wheel"):
        MovielensData(path=path).build()
