"""Rows of tokens from text."""

import pathlib

import numpy as np
import pytest
from quantized_cases import write_model

from scalejax.errors import UserError
from scalejax.inference import text_rows
from scalejax.models.llm import model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return model_folder.open_folder(folder)


def test_a_text_is_cut_into_rows_that_begin_as_texts_do(model, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 200)
    rows = text_rows.read_rows(model, tmp_path / "a.txt", 1100)
    bos = model.tokenizer.build().bos
    assert rows.shape == (2, 512)
    assert (rows[:, 0] == bos).all()
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.frombuffer(b"abcdefgh" * 200, np.uint8)[: 2 * 511])
    assert text_rows.read_rows(model, tmp_path / "a.txt", 64).shape == (1, 64)


def test_a_short_text_is_one_row(model, tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert text_rows.read_rows(model, tmp_path / "a.txt", 1000).shape == (1, 4)


def test_the_standard_library_is_text_that_every_machine_has(model):
    assert text_rows.read_rows(model, None, 2048).shape == (4, 512)


@pytest.mark.parametrize(
    ("text", "tokens", "words"),
    [
        ("nowhere", 100, "--text nowhere does not exist"),
        ("empty", 100, "has 0 tokens"),
        ("a.txt", 1, "--tokens must be"),
    ],
)
def test_text_that_is_not_there_is_refused(model, tmp_path, monkeypatch, text, tokens, words):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("empty").write_text("")
    with pytest.raises(UserError, match=words):
        text_rows.read_rows(model, pathlib.Path(text), tokens)


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    write_model(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json, which --text needs"):
        text_rows.read_rows(model_folder.open_folder(tmp_path / "theirs"), None, 100)
