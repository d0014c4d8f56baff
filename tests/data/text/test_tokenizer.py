"""Bytes and characters to ids and back, at once and as a stream."""

import gzip
import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.text.sources import pieces
from scalejax.data.text.tokenizer import ByteTokenizer, Characters, CharacterTokenizer, check_vocabulary
from scalejax.errors import UserError

# Every code point that UTF-8 can hold; halves of surrogate pairs are refused.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_bytes_are_those_of_utf_8_and_come_back(text: str) -> None:
    tokenizer = ByteTokenizer().build()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text
    assert [part.tolist() for part in tokenizer.encode_many([text, "a"])] == [ids.tolist(), [97]]


@given(st.lists(st.integers(0, 319), max_size=60), st.lists(st.integers(0, 60), max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_stream_of_any_ids_says_what_decoding_them_at_once_says(ids: list[int], cuts: list[int]) -> None:
    tokenizer = ByteTokenizer().build()
    stream = tokenizer.stream()
    bounds = [0, *sorted(cuts), len(ids)]
    parts = [stream.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


def test_a_stream_never_gives_out_half_a_character() -> None:
    tokenizer = ByteTokenizer().build()
    stream = tokenizer.stream()
    given_out = [stream.push([i]) for i in tokenizer.encode("a€😀b").tolist()]
    assert given_out == ["a", "", "", "€", "", "", "", "😀", "b"]
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_read_from_text_only_where_that_is_asked_for() -> None:
    tokenizer = ByteTokenizer().build()
    assert tokenizer.encode("<|bos|>hi<|eos|>").max() < 256
    assert tokenizer.encode("<|bos|>hi<|eos|>", specials="parse").tolist() == [256, 104, 105, 257]
    ids = [256, 104, 300, 105, 257]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, specials="show") == "<|bos|>h<|reserved_300|>i<|eos|>"
    assert tokenizer.stop_ids == (tokenizer.eos,)


def test_ids_outside_the_vocabulary_and_halves_of_surrogate_pairs_are_refused() -> None:
    tokenizer = ByteTokenizer().build()
    with pytest.raises(UserError, match=r"\[0, 320\); got 320 at position 1"):
        tokenizer.decode([5, 320])
    with pytest.raises(UserError, match="got -1"):
        tokenizer.stream().push([-1])
    with pytest.raises(UserError, match=r"character 1 .* U\+D83D"):
        tokenizer.encode("a\ud83d")


def test_a_model_may_have_more_rows_than_the_tokenizer_ids_but_not_fewer() -> None:
    check_vocabulary(ByteTokenizer().build(), 320, "model.vocabulary")
    check_vocabulary(ByteTokenizer().build(), 512, "model.vocabulary")
    with pytest.raises(UserError, match=r"model.vocabulary=319 is too small.*ids up to 319"):
        check_vocabulary(ByteTokenizer().build(), 319, "model.vocabulary")


@given(st.text(max_size=40), st.integers(1, 10))
def test_pieces_of_a_text_are_no_longer_than_asked_for_and_lose_nothing(text: str, size: int) -> None:
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert all(len(piece) == size for piece in cut[:-1])
    assert all(1 <= len(piece) <= size for piece in cut)


@given(TEXT.filter(bool))
@settings(max_examples=100, deadline=None)
def test_characters_are_numbered_in_the_order_of_their_code_points(text: str) -> None:
    tokenizer = CharacterTokenizer(alphabet=text).build()
    assert tokenizer.vocabulary == len(set(text))
    assert tokenizer.encode(text).tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in tokenizer.encode(text)) + stream.finish() == text


def test_characters_may_come_from_a_file_also_a_packed_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("hello\n")
    for name in ("a.txt", "b.txt.gz"):
        assert CharacterTokenizer(path=str(tmp_path / name)).build().alphabet == "\nehlo"
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="holds no character"):
        CharacterTokenizer(path=str(tmp_path / "empty.txt")).build()
    with pytest.raises(UserError, match="either path or alphabet"):
        CharacterTokenizer().build()


@pytest.mark.parametrize(("text", "character"), [("abd", "'d'"), ("a€", "'€'"), ("A", "'A'")])
def test_a_character_outside_the_vocabulary_is_refused(text: str, character: str) -> None:
    with pytest.raises(UserError, match=f"character {character}"):
        Characters("abc").encode(text)


def test_fingerprints_tell_tokenizers_apart() -> None:
    made = [ByteTokenizer(), CharacterTokenizer(alphabet="ab"), CharacterTokenizer(alphabet="abc")]
    assert len({config.build().fingerprint() for config in made}) == 3
    assert CharacterTokenizer(alphabet="ba").build().fingerprint() == made[1].build().fingerprint()
