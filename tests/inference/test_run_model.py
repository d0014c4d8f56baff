"""What goes with the model of a run: a tokenizer.json that says what the run's own tokenizer says."""

import pytest

from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.tokenizer import ByteTokenizer, CharacterTokenizer
from scalejax.errors import UserError
from scalejax.inference import run_model

pytest.importorskip("tokenizers", reason="needs the extra llm")

TEXT = "def f(x):\r\n\t return 'é€😀'\n\n  \u2028 <b>"


def exported(tokenizer, folder):
    for name, content in run_model._tokenizer_made(tokenizer, "bos").items():
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


def test_an_exported_alphabet_refuses_other_characters_as_well(tmp_path):
    with pytest.raises(UserError, match="cannot represent the text"):
        exported(CharacterTokenizer(alphabet="ab").build(), tmp_path).encode("abc")
