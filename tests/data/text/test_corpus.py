"""Tokenised documents on disk: what was read, made once, private, whole or not there."""

import itertools
import json
import os
import pathlib
import socket
import stat
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from scalejax.data.text import corpus as token_corpus
from scalejax.data.text.corpus import Corpus, open_corpus, tokenised
from scalejax.data.text.sources import SUFFIXES, find_texts
from scalejax.data.text.tokenizer import Bytes, ByteTokenizer, CharacterTokenizer
from scalejax.errors import UserError

TEXTS = {"a.txt": "hello", "b.txt": "", "c.txt": "é€😀" * 50, "d.txt": "hello"}


def documents_of(corpus: Corpus) -> list[np.ndarray]:
    return [corpus.tokens[a:b] for a, b in itertools.pairwise(corpus.offsets)]


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "source").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "source" / name).write_text(text)
    return tmp_path / "source"


def corpus_of(source: pathlib.Path, tokenizer: Any = None, **options: Any) -> Corpus:
    files = find_texts(str(source), SUFFIXES)
    return tokenised(files, tokenizer or ByteTokenizer().build(), folder=source.parent / "cache", **options)


def test_documents_are_the_files_in_order_with_their_marks(source: pathlib.Path) -> None:
    corpus = corpus_of(source, marks="both")
    assert [d.tolist() for d in documents_of(corpus)] == [[256, *text.encode(), 257] for text in TEXTS.values()]
    assert corpus.tokens.dtype == np.uint16
    assert len(corpus) == 4
    hashes = corpus.hashes.tolist()
    assert hashes[0] == hashes[3]  # equal texts
    assert len(set(hashes)) == 3


def test_each_column_of_a_file_is_a_corpus_of_its_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text('{"text": "body", "title": "head"}\n')
    for column, text in (("text", b"body"), ("title", b"head")):
        (document,) = documents_of(corpus_of(tmp_path / "source", column=column, marks="none"))
        assert bytes(document.tolist()) == text


class Large(Bytes):
    """Bytes behind 69,000 other ids."""

    vocabulary = 70_000

    def encode_many(self, texts: Any) -> list[np.ndarray]:
        return [ids + 69_000 for ids in super().encode_many(texts)]


def test_ids_beyond_16_bits_are_kept(source: pathlib.Path) -> None:
    corpus = corpus_of(source, Large(), marks="none")
    assert [d.tolist() for d in documents_of(corpus)] == [[69_000 + b for b in t.encode()] for t in TEXTS.values()]


@pytest.mark.parametrize("characters", [1, 7, 10**6])
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_contents_do_not_depend_on_how_much_is_encoded_at_once(
    source: pathlib.Path, monkeypatch: pytest.MonkeyPatch, characters: int, blocks: int
) -> None:
    whole = corpus_of(source)
    monkeypatch.setattr(token_corpus, "_BATCH_CHARACTERS", characters)
    monkeypatch.setattr(token_corpus, "_BATCH_BLOCKS", blocks)
    monkeypatch.setattr("scalejax.data.text.sources.PIECE_CHARACTERS", 3)
    files = find_texts(str(source), SUFFIXES)
    cut = tokenised(files, ByteTokenizer().build(), folder=source.parent / "again")
    for name in ("tokens", "offsets", "hashes"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
    assert cut.digest == whole.digest


class Counting(Bytes):
    """Counts what it encodes."""

    def __init__(self) -> None:
        self.texts = 0

    def encode_many(self, texts: Any) -> list[np.ndarray]:
        self.texts += len(texts)
        return super().encode_many(texts)


def test_text_is_tokenised_once_until_a_file_or_the_tokenizer_changes(source: pathlib.Path) -> None:
    tokenizer = Counting()
    first = corpus_of(source, tokenizer)
    assert corpus_of(source, tokenizer).digest == first.digest
    assert tokenizer.texts == 4
    assert corpus_of(source, tokenizer, marks="none").digest != first.digest
    (source / "a.txt").write_text("jello")  # as long as before
    changed = corpus_of(source, tokenizer)
    assert tokenizer.texts == 12
    assert bytes(documents_of(changed)[0][:-1].tolist()) == b"jello"
    characters = CharacterTokenizer(alphabet="".join(TEXTS.values()) + "j").build()
    assert corpus_of(source, characters, marks="none").vocabulary == 8


def test_files_read_elsewhere_have_the_same_digest(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first = corpus_of(source)
    os.rename(source, tmp_path / "moved")
    assert corpus_of(tmp_path / "moved").digest == first.digest


def test_the_folder_is_private_and_holds_plain_arrays(source: pathlib.Path) -> None:
    corpus = corpus_of(source)
    path = pathlib.Path(corpus.where)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)] == [0o700, 0o700]
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]  # nothing half-made stays
    assert sorted(p.name for p in path.iterdir()) == ["about", "hashes", "offsets", "tokens"]
    about = json.loads((path / "about").read_text())
    raw = np.fromfile(path / "tokens", about["arrays"]["tokens"]["dtype"])
    np.testing.assert_array_equal(raw, corpus.tokens)
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1


def test_a_folder_that_others_can_write_is_refused(source: pathlib.Path) -> None:
    folder = source.parent / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UserError, match=r"can be written by others \(mode 0777\)"):
        corpus_of(source)


def test_a_folder_that_cannot_be_made_is_named(source: pathlib.Path) -> None:
    files = find_texts(str(source), SUFFIXES)
    (source.parent / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be kept there \(File exists\).*data.folder.*GiB are free"):
        tokenised(files, ByteTokenizer().build(), folder=source.parent / "file" / "cache")


def test_a_damaged_corpus_is_refused_with_what_to_do(source: pathlib.Path) -> None:
    path = pathlib.Path(corpus_of(source).where)
    for name in ("tokens", "offsets", "hashes"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=rf"damaged \({name} has another checksum"):
            open_corpus(path)
        open_corpus(path, "sizes")
        (path / name).write_bytes(content)
    open_corpus(path)
    with open(path / "tokens", "ab") as file:
        file.write(b"xx")
    with pytest.raises(UserError, match=r"damaged \(tokens has \d+ bytes, not \d+\). Delete this folder"):
        open_corpus(path)
    (path / "about").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        open_corpus(path)


def test_a_token_outside_the_vocabulary_is_noticed_when_its_row_is_read(source: pathlib.Path) -> None:
    from scalejax.data.text.files import TextData

    config = TextData(
        path=str(source), length=16, folder=str(source.parent / "cache"), packing="concatenate", verify="sizes"
    )
    path = pathlib.Path(corpus_of(source).where)
    tokens = np.memmap(path / "tokens", np.uint16, mode="r+")
    tokens[:] = 999
    tokens.flush()
    with pytest.raises(UserError, match="token 999 is outside the vocabulary of 320"):
        config.build().examples.stream(0, 1)


def test_what_fails_half_way_leaves_nothing_behind(source: pathlib.Path) -> None:
    (source / "z.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"z.txt: is not UTF-8"):
        corpus_of(source)
    assert list((source.parent / "cache").iterdir()) == []
    (source / "z.txt").write_text("fine")
    assert len(corpus_of(source)) == 5


def test_what_a_killed_process_was_making_goes_with_the_next_corpus(source: pathlib.Path) -> None:
    folder = source.parent / "cache"
    folder.mkdir(mode=0o700)
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    host = socket.gethostname()
    left = {
        folder / f".making-{host}-{killed.pid}-abc": False,
        folder / f".making-{host}-{os.getpid()}-abc": True,  # this process lives
        folder / f".making-another-host-{killed.pid}-abc": True,
    }
    for path in left:
        (path / "made").mkdir(parents=True)
    corpus_of(source)
    assert {path: path.exists() for path in left} == left


def test_two_that_make_the_same_corpus_at_once_share_it(source: pathlib.Path) -> None:
    both = threading.Barrier(2, timeout=30)

    class Waiting(Bytes):
        def encode_many(self, texts: Any) -> list[np.ndarray]:
            both.wait()  # neither has found the other's
            return super().encode_many(texts)

    made: list[Corpus] = []
    workers = [threading.Thread(target=lambda: made.append(corpus_of(source, Waiting()))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({corpus.where for corpus in made}) == 1
    assert len(made) == 2
    assert [p.name for p in (source.parent / "cache").iterdir()] == [pathlib.Path(made[0].where).name]


def test_progress_counts_bytes_of_files(source: pathlib.Path) -> None:
    seen: list[tuple[int, int]] = []
    corpus_of(source, progress=lambda done, total: seen.append((done, total)))
    sizes = np.cumsum([len(text.encode()) for text in TEXTS.values()]).tolist()
    assert seen == [(done, sizes[-1]) for done in sizes]
    corpus_of(source, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 4  # nothing to do


def test_long_work_says_on_standard_error_how_far_it_is(
    source: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    corpus_of(source, marks="none")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(token_corpus, "_SECONDS_BETWEEN_LINES", 0.0)
    corpus_of(source)
    assert capsys.readouterr().err.count("Tokenising text: ") == 4


def test_where_tokens_are_kept_unless_a_folder_is_named(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus = tokenised(find_texts(str(source), SUFFIXES), ByteTokenizer().build())
    assert pathlib.Path(corpus.where).parent == tmp_path / "xdg" / "scalejax" / "text"
