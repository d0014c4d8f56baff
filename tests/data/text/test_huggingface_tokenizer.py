"""A tokenizer.json and the files beside it; the library itself is the oracle for what a text encodes to."""

import json
import pathlib
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalejax.data.text import chat, huggingface_tokenizer
from scalejax.data.text.huggingface_tokenizer import HuggingFace, HuggingFaceTokenizer
from scalejax.errors import UserError

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra llm")

SPECIALS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
]  # fmt: skip
CONFIG = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": {"content": "<|end_of_text|>", "special": True},
    "chat_template": chat.LLAMA3,
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def byte_level() -> Any:
    """A byte-level BPE as Llama 3's is, in small."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, héllo wörld 😀 "] * 20, trainer)
    return tokenizer


def sentencepiece_like() -> Any:
    """Spaces as ▁ and bytes as <0x..>, as in Llama 2 and Mistral."""
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>"])}
    for name in [*(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehlorw", "he", "ll", "▁w", "▁wor"]:
        vocabulary[name] = len(vocabulary)
    merges = [("h", "e"), ("l", "l"), ("▁", "w")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    decoders = tokenizers.decoders
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> HuggingFace:
    return HuggingFaceTokenizer(path=str(folder)).build()


def test_roles_of_special_tokens_come_from_the_files_beside_it(folder: pathlib.Path, tokenizer: HuggingFace) -> None:
    assert tokenizer.vocabulary == byte_level().get_vocab_size()
    assert tokenizer.special_ids == {name: i for i, name in enumerate(SPECIALS)}
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, None)
    assert tokenizer.stop_ids == (1, 4, 5)
    own = HuggingFaceTokenizer(path=str(folder / "tokenizer.json"), eos="<|eot_id|>", pad="<|eom_id|>").build()
    assert (own.bos, own.eos, own.pad, own.stop_ids) == (0, 5, 4, (5, 1, 4))
    assert own.fingerprint() != tokenizer.fingerprint()
    with pytest.raises(UserError, match="no token '</s>', which eos names"):
        HuggingFaceTokenizer(path=str(folder), eos="</s>").build()


def test_stop_ids_of_the_generation_config_count(tmp_path: pathlib.Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_text|>"}')
    assert HuggingFaceTokenizer(path=str(tmp_path)).build().stop_ids == (1, 7, 5, 4)


@given(TEXTS.filter(lambda text: "<|" not in text))  # in which the library reads special tokens
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_the_library_s_and_come_back(tokenizer: HuggingFace, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.tolist() == ORACLE.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert [part.tolist() for part in tokenizer.encode_many([text, "", text])] == [ids.tolist(), [], ids.tolist()]


def test_names_of_special_tokens_in_documents_are_text(tokenizer: HuggingFace) -> None:
    text = "a<|eot_id|>b"
    assert not set(range(len(SPECIALS))) & set(tokenizer.encode(text).tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    parsed = tokenizer.encode(text, specials="parse").tolist()
    assert parsed[1:-1] == [5]
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, specials="show") == text


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: pathlib.Path) -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = HuggingFaceTokenizer(path=str(tmp_path)).build().encode("qqqqqqqqqqqqqqqqqqqq")
    assert ids.size == 20


def test_long_texts_and_long_runs_are_encoded_in_pieces(
    tokenizer: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_tokenizer, "_RUN_CHARACTERS", 10)
    monkeypatch.setattr(
        huggingface_tokenizer, "pieces", lambda text: (text[i : i + 30] for i in range(0, len(text), 30))
    )
    text = "hello hello hellohellohello" + " " * 25 + "hello world"
    # Runs longer than 10 are cut every 10 characters from where they begin.
    expected = ["hello hello hellohello", "hello   ", " " * 10, " " * 10, "  hello wo", "rld"]
    assert "".join(expected) == text
    ids = tokenizer.encode(text).tolist()
    assert ids == [i for part in expected for i in ORACLE.encode(part, add_special_tokens=False).ids]
    assert ids != ORACLE.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def stream_of(tokenizer: HuggingFace, ids: list[int], size: int) -> str:
    stream = tokenizer.stream()
    parts = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return "".join(parts) + stream.finish()


@given(st.lists(st.integers(0, 281), max_size=30), st.integers(1, 3))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stream_of_any_ids_says_what_decoding_them_at_once_says(
    tokenizer: HuggingFace, ids: list[int], size: int
) -> None:
    assert stream_of(tokenizer, ids, size) == tokenizer.decode(ids)


@given(TEXTS | st.text("abcdehlorw €", max_size=20), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_stream_keeps_spaces_and_characters_of_several_bytes(text: str, size: int) -> None:
    ids = LIKE_LLAMA_2.encode(text).tolist()
    assert stream_of(LIKE_LLAMA_2, ids, size) == LIKE_LLAMA_2.decode(ids) == text


def test_a_stream_never_gives_out_half_a_character(tokenizer: HuggingFace) -> None:
    stream = tokenizer.stream()
    given_out = [stream.push([i]) for i in tokenizer.encode("q€q").tolist()]
    assert given_out == ["q", "", "", "€", "q"]


def test_ids_outside_the_vocabulary_are_refused(tokenizer: HuggingFace) -> None:
    with pytest.raises(UserError, match=f"got {tokenizer.vocabulary} at position 1"):
        tokenizer.decode([3, tokenizer.vocabulary])  # the library itself says nothing


def test_conversations_are_written_as_llama_3_does(tokenizer: HuggingFace) -> None:
    messages = [
        {"role": "user", "content": " 1 + 1? "},
        {"role": "assistant", "content": "print(1 + 1)", "expects_result": True},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.render_chat(messages)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nprint(1 + 1)<|eom_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer.encode(text, specials="parse")
    assert [int(i) for i in ids if i < len(SPECIALS)] == [0, 2, 3, 5, 2, 3, 4, 2, 3, 5, 2, 3]
    assert tokenizer.render_chat(messages, reply="none").endswith("2<|eot_id|>")


def with_template(folder: pathlib.Path, template: str) -> HuggingFace:
    return HuggingFaceTokenizer(path=str(folder), chat_template=template).build()


def test_a_template_cannot_reach_out_of_its_sandbox(folder: pathlib.Path) -> None:
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set x = messages.append(1) %}",
    ):
        with pytest.raises(UserError, match="fails on these messages"):
            with_template(folder, template).render_chat([{"role": "user", "content": "x"}])


def test_what_a_template_refuses_or_lacks_is_said(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(UserError, match="refuses these messages: roles must alternate"):
        with_template(folder, "{{ raise_exception('roles must alternate') }}").render_chat(messages)
    with pytest.raises(UserError, match="no valid Jinja"):
        with_template(folder, "{% for %}").render_chat(messages)
    with pytest.raises(UserError, match=r"messages\[1\] has no role"):
        with_template(folder, "x").render_chat([*messages, {"content": "y"}])
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="there is no chat template"):
        HuggingFaceTokenizer(path=str(tmp_path)).build().render_chat(messages)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}<é>{{ date_string }}")
    made = HuggingFaceTokenizer(path=str(tmp_path)).build()
    assert made.render_chat([{"role": "user", "content": "<é>"}], variables={"date_string": 5}) == '"<é>"<é>5'


def test_two_tokens_of_one_id_and_an_empty_template_are_one_message_each(folder: pathlib.Path, tmp_path: pathlib.Path):
    content = json.loads((folder / "tokenizer.json").read_text())
    first, second, *_ = content["model"]["vocab"]
    content["model"]["vocab"][second] = content["model"]["vocab"][first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the tokens .* and .* have one id, \d+: the file is damaged"):
        HuggingFaceTokenizer(path=str(tmp_path)).build()
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for empty in ("", " \n"):
        (tmp_path / "chat_template.jinja").write_text(empty)
        with pytest.raises(UserError, match=r"chat_template.jinja: the chat template is empty"):
            HuggingFaceTokenizer(path=str(tmp_path)).build()


def test_files_that_are_no_tokenizer_are_refused_and_pickles_never_loaded(tmp_path: pathlib.Path) -> None:
    def refused(name: str, content: bytes | None, match: str) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=match):
            HuggingFaceTokenizer(path=str(tmp_path / name)).build()

    refused("missing.json", None, "does not exist")
    refused("", None, "has no tokenizer.json; it has no tokenizer file")
    refused("tokenizer.model", b"\x0a\x0c\x0a\x05<unk>\xff", "not a tokenizer.json .*must be converted")
    refused("", None, "it has tokenizer.model")
    refused("a.json", pickle.dumps([1]), "pickle")
    refused("tokenizer.bin", b"{}", "pickle")
    refused("b.json", b'{"model": {"type"', "not a tokenizer.json")
    refused("tokenizer_config.json", json.dumps(CONFIG).encode(), "describes no tokenizer")
    refused("c.json", b'{"model": {"type": "NoSuchModel"}}', "tokenizers library .* cannot read it")
    refused("empty.json", tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode(), "has no token")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    refused("d.json", byte_level().to_str().encode(), "wanted a JSON object; got list")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    refused("d.json", None, "chat_template must be text; got 3")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    refused("d.json", None, r"generation_config.json: eos_token_id must be a token id .* got \['</s>'\]")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1099511627776}')
    refused("d.json", None, r"generation_config.json: eos_token_id must be a token id .* got 1099511627776")


@pytest.mark.parametrize("last", [2**31 - 1, 2**31, 2**32 - 1])
def test_ids_beyond_int32_are_refused_when_the_file_is_opened(tmp_path: pathlib.Path, last: int) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": last}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(UserError, match=rf"tokenizer\.json: the token 'b' has id {last}, but ids must be at most"):
        HuggingFaceTokenizer(path=str(tmp_path)).build()


def test_a_text_that_the_library_cannot_encode_is_refused() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="nothing"))
    tokenizer = HuggingFace(words, {}, stop_ids=(), template=None, fingerprint="", where="words")
    assert tokenizer.encode("a").tolist() == [0]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_many(["a", text])):
        with pytest.raises(UserError, match="words cannot represent the text"):
            encode("b")
        with pytest.raises(UserError, match="half of a surrogate pair"):
            encode("\ud83d")


ORACLE = byte_level()
LIKE_LLAMA_2 = HuggingFace(sentencepiece_like(), {}, stop_ids=(), template=None, fingerprint="", where="test")
