"""Text continued by a model: what is shown, where it ends, and what begins a prompt."""

import dataclasses

import jax
import numpy as np
import pytest
from llama_cases import GQA, tensors, write_checkpoint

from scalejax.data.text.huggingface_tokenizer import HuggingFace
from scalejax.data.text.tokenizer import ByteTokenizer
from scalejax.errors import UserError
from scalejax.inference import text
from scalejax.inference.generate import Continuation
from scalejax.inference.sampling import TokenSampling
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh

BYTES = dataclasses.replace(GQA, vocabulary=320, layers=1)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A model that says "abcabc..." whatever it is asked."""
    folder = tmp_path_factory.mktemp("model") / "theirs"
    weights = tensors(BYTES)
    table, head = np.zeros((320, 32), np.float32), np.zeros((320, 32), np.float32)
    for here, there in (("a", "b"), ("b", "c"), ("c", "a")):
        table[ord(here), ord(here) - ord("a")] = 1.0
        head[ord(there), ord(here) - ord("a")] = 1.0
    for name, w in weights.items():
        if "norm" not in name:
            w[...] = {"model.embed_tokens.weight": table, "lm_head.weight": head}.get(name, 0.0)
    write_checkpoint(folder, BYTES, weights)
    return open_writer(folder)


def open_writer(folder, **fields):
    model = dataclasses.replace(model_folder.open_folder(folder), tokenizer=ByteTokenizer(), **fields)
    return text.open_writer(model, make_mesh(MeshShape(), jax.devices()[:1]))


@pytest.mark.slow
def test_a_prompt_is_continued(writer):
    (got,) = writer.complete(["ab"], max_tokens=7)
    assert (got.prompt, got.text, got.ended) == ("ab", "cabcabc", "length")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "want"), [(["bc"], "ca"), (["ca", "bc"], ""), (["xyz"], "cabcabcab"), (["a", "bca"], "c")]
)
def test_texts_end_before_a_stop_text(writer, stop, want):
    (got,) = writer.complete(["ab"], max_tokens=9, stop=stop)
    assert (got.text, got.ended) == (want, "length" if stop == ["xyz"] else "stop")
    shown = []
    streamed = writer.stream("ab", max_tokens=9, stop=stop, show=shown.append)
    assert streamed == got
    assert "".join(shown) == want  # nothing of a stop text was shown before it was known for one


@pytest.mark.slow
def test_pieces_are_shown_as_they_come(writer):
    shown = []
    writer.stream("ab", max_tokens=5, show=shown.append)
    assert [piece for piece in shown if piece] == ["c", "a", "b", "c", "a"]


@pytest.mark.slow
def test_characters_of_several_bytes_are_shown_whole(writer):
    watch = text._Watch([writer.tokenizer.stream()], (), (shown := []).append)
    for n in range(1, 5):
        watch([list("é€".encode())[:n]])
    assert shown == ["é"]


@pytest.mark.parametrize("stops", [("bab",), ("xx", "bab"), ("b", "bab")])
def test_a_text_grows_to_the_first_stop_whatever_the_pieces(stops):
    tokens = list(b"aabbabcbab")
    end = 3 if "b" not in stops else 2
    for size in range(1, len(tokens) + 1):
        growing, shown = text.GrowingText(ByteTokenizer().build().stream(), stops), ""
        for start in range(0, len(tokens), size):
            growing.push(tokens[start : start + size])
            shown += growing.fresh()
            assert "aabbabcbab"[:end].startswith(shown)
        growing.finish()
        assert (shown + growing.fresh(), growing.end) == ("aabbabcbab"[:end], end)


class Says:
    """An engine that continues everything with the same tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def check(self, prompts, max_tokens):
        pass

    def generate(self, prompts, *, progress, **_):
        if progress is not None:
            for n in range(1, len(self.tokens) + 1):
                if not progress([list(self.tokens[:n])]):
                    break
        return [Continuation(self.tokens, "length")]


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_the_space_between_a_prompt_and_the_first_new_word_is_kept(stop):
    # Decoders of the kind of Llama 2 drop the space before the first word of what they decode.
    library = pytest.importorskip("tokenizers", reason="needs the extra llm")
    words = library.Tokenizer(library.models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    words.pre_tokenizer = library.pre_tokenizers.Metaspace()
    words.decoder = library.decoders.Metaspace()
    tokenizer = HuggingFace(words, {}, stop_ids=(), template=None, fingerprint="", where="test")
    assert (tokenizer.decode([1, 0]), tokenizer.decode([0, 1, 0])) == ("b a", "a b a")
    writer = text.Writer(Says((1, 0)), tokenizer, (), ())
    (got,) = writer.complete(["a" + " b" * 10], max_tokens=2, stop=stop)
    shown = []
    assert got.text == writer.stream("a", max_tokens=2, stop=stop, show=shown.append).text == " b a"
    assert "".join(shown) == " b a"


@pytest.mark.slow
def test_every_prompt_has_its_samples_in_order_whatever_the_batch(writer):
    hot = TokenSampling(temperature=3.0, seed=1)
    found = writer.complete(["a", "b"], max_tokens=6, sampling=hot, samples=3, batch_size=8)
    assert [c.prompt for c in found] == ["a"] * 3 + ["b"] * 3
    assert len({c.text for c in found}) == 6
    assert writer.complete(["a", "b"], max_tokens=6, sampling=hot, samples=3, batch_size=2) == found


@pytest.mark.slow
def test_names_of_special_tokens_are_these_tokens_in_prompts_and_stops(writer):
    assert writer.encode("a<|eos|>") == [256, 97, 257]
    assert writer.encode("<|bos|>a") == [256, 97]  # not twice
    assert writer.split_stops(["<|pad|>", "x"]) == (("x",), (2, 257, 258))  # 2 is what config.json names


def test_what_begins_a_text_is_said_by_the_model(tmp_path):
    write_checkpoint(tmp_path / "theirs", BYTES)
    assert open_writer(tmp_path / "theirs", begins="nothing").encode("a") == [97]
    with pytest.raises(UserError, match="prompt 3 is empty"):
        open_writer(tmp_path / "theirs", begins="nothing").complete(["a", "b", ""], max_tokens=3, batch_size=1)


def test_models_without_their_tokenizer_are_refused(tmp_path):
    write_checkpoint(tmp_path / "small", GQA)
    with pytest.raises(UserError, match="vocabulary=96 is too small: the tokenizer has ids up to 319"):
        open_writer(tmp_path / "small")
    model = model_folder.open_folder(tmp_path / "small")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        text.open_writer(model, make_mesh(MeshShape(), jax.devices()[:1]))


@pytest.mark.slow
def test_several_samples_that_would_be_the_same_are_refused(writer):
    with pytest.raises(UserError, match="all 2 would be the same"):
        writer.complete(["a"], max_tokens=3, samples=2)


@pytest.mark.slow
def test_an_empty_stop_is_refused(writer):
    with pytest.raises(UserError, match="--stop must be a text of at least one character"):
        writer.complete(["a"], max_tokens=3, stop=[""])
