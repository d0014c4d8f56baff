"""What goes with the model of a run: a tokenizer.json that says what the run's own tokenizer says."""

import pytest

from scalejax.data import MixtureData, Stage, StagedData, TextData, TokenShards
from scalejax.data.text import tokenizer_files
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.tokenizer import ByteTokenizer, CharacterTokenizer
from scalejax.errors import UserError
from scalejax.inference import run_model

pytest.importorskip("tokenizers", reason="needs the extra llm")

TEXT = "def f(x):\r\n\t return 'é€😀'\n\n  \u2028 <b>"


def exported(tokenizer, folder):
    for name, content in tokenizer_files.of(tokenizer, "bos").items():
        (folder / name).write_text(content, encoding="utf-8")
    return HuggingFaceTokenizer(path=str(folder)).build()


@pytest.mark.parametrize("config", [ByteTokenizer(), CharacterTokenizer(alphabet=TEXT + "q")])
def test_exported_files_say_the_same(tmp_path, config):
    own = config.build()
    theirs = exported(own, tmp_path)
    ids = own.encode(TEXT)
    assert theirs.encode(TEXT).tolist() == ids.tolist()
    assert theirs.decode(ids) == TEXT
    stream = theirs.stream()
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == TEXT
    assert (theirs.bos, theirs.eos, theirs.pad) == (own.bos, own.eos, own.pad)
    assert theirs.special_ids == own.special_ids


def test_the_tokenizer_of_a_run_is_that_of_the_first_part_that_has_one():
    text, shards = TextData(), TokenShards(path="shards", ranges=(("text", 0, 320),))
    mixture = MixtureData(sources=((shards, 1.0), (text, 1.0), (TextData(seed=1), 1.0)))
    assert run_model._text_of(mixture) is text
    stages = (Stage(from_tokens=0, data=text), Stage(from_tokens=1, data=shards))
    assert run_model._text_of(StagedData(stages=stages)) is text
    assert run_model._text_of(MixtureData(sources=((shards, 1.0),))) is shards
    assert run_model._text_of(object()) is None


def test_an_exported_alphabet_refuses_other_characters_as_well(tmp_path):
    with pytest.raises(UserError, match="cannot represent the text"):
        exported(CharacterTokenizer(alphabet="ab").build(), tmp_path).encode("abc")
