"""Rows of text: every token once, targets inside documents, the same rows however they are read."""

import collections
import dataclasses
import itertools
import pathlib
import sysconfig
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalejax.data.reading import share
from scalejax.data.text.corpus import Corpus
from scalejax.data.text.dataset import Counts
from scalejax.data.text.files import TextData, TextSplit
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.tokenizer import ByteTokenizer, CharacterTokenizer
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError

ALL = TextSplit(train=1.0, validation=0.0)
PACKINGS = ["concatenate", "first-fit", "best-fit"]
LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """40 documents that differ, from empty ones to some of three rows."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for d in range(40):
        size = int(rng.integers(0, 90)) if d else 0
        (folder / f"{d:02}.txt").write_text("".join(chr(65 + (d + 3 * i) % 58) for i in range(size)))
    return folder


def make(texts: pathlib.Path, /, **fields: Any) -> TextData:
    options = {"path": str(texts), "length": LENGTH, "batch_size": 6, "split": ALL, "folder": str(texts / "cache")}
    return TextData(**(options | fields))


def joined(batches: list[TokenBatch]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([b.arrays()[name] for b in batches]) for name in batches[0].arrays()}


def epoch(data: TextData, number: int = 0) -> TokenBatch:
    examples = data.build().examples
    rows = examples.num_examples("train")
    return examples.stream(number * rows, (number + 1) * rows)


def pairs(batch: TokenBatch) -> collections.Counter:
    """(token, next token) wherever a target counts, and (token, None) elsewhere."""
    counts: collections.Counter = collections.Counter()
    for token, target, weight, segment in zip(
        batch.tokens.flat, batch.targets.flat, batch.weights.flat, batch.segment_ids.flat, strict=True
    ):
        if segment:
            counts[int(token), int(target) if weight else None] += 1
    return counts


def documents(folder: pathlib.Path) -> list[list[int]]:
    return [[*path.read_bytes(), 257] for path in sorted(folder.glob("*.txt"))]


def test_concatenated_rows_are_the_stream_of_documents_and_targets_stay_inside_them(folder: pathlib.Path) -> None:
    data = make(folder, order="file", packing="concatenate").build()
    stream = [(a, b is not None, b or 0) for d in documents(folder) for a, b in zip(d, [*d[1:], None], strict=True)]
    assert data.num_examples("train") == -(-len(stream) // LENGTH)
    got = joined(list(data.eval_batches("train")))
    flat = {name: array.reshape(-1)[: len(stream)] for name, array in got.items()}
    assert flat["tokens"].tolist() == [token for token, _, _ in stream]
    assert flat["weights"].tolist() == [float(more) for _, more, _ in stream]
    assert flat["targets"].tolist() == [target for _, _, target in stream]
    assert all(not array.reshape(-1)[len(stream) :].any() for array in got.values())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("order", ["shuffled", "file"])
def test_every_epoch_has_every_token_and_every_target_once(folder: pathlib.Path, packing: str, order: str) -> None:
    expected = collections.Counter(pair for d in documents(folder) for pair in zip(d, [*d[1:], None], strict=True))
    data = make(folder, packing=packing, order=order, seed=5)
    first, second = epoch(data, 0), epoch(data, 1)
    assert pairs(first) == pairs(second) == expected
    same = np.array_equal(first.tokens, second.tokens)
    assert same == (order == "file")
    assert sorted(map(bytes, first.tokens)) == sorted(map(bytes, second.tokens))  # rows are packed once


@pytest.mark.parametrize("packing", PACKINGS)
def test_segments_count_from_one_and_positions_restart_with_them_or_run_through(
    folder: pathlib.Path, packing: str
) -> None:
    batch = epoch(make(folder, packing=packing))
    for segments, positions in zip(batch.segment_ids.tolist(), batch.positions.tolist(), strict=True):
        runs = [(segment, len(list(run))) for segment, run in itertools.groupby(segments)]
        numbered = [segment for segment, _ in runs if segment]
        assert numbered == list(range(1, len(numbered) + 1))
        assert [segment for segment, _ in runs][len(numbered) :] in ([], [0])
        assert positions == [i if segment else 0 for segment, n in runs for i in range(n)]
    through = epoch(make(folder, packing=packing, positions="row"))
    assert (through.positions == np.arange(LENGTH)).all()
    np.testing.assert_array_equal(through.segment_ids, batch.segment_ids)
    assert batch.segment_ids.max() > 1


@pytest.mark.parametrize(
    ("order", "packing"),
    [*itertools.product(["shuffled", "file"], PACKINGS), ("random-crops", "concatenate")],
)
def test_any_start_and_any_number_of_processes_read_the_same_rows(
    folder: pathlib.Path, order: str, packing: str
) -> None:
    data = make(folder, order=order, packing=packing).build()
    whole = joined(list(itertools.islice(data.train_batches(start_example=0), 30)))
    assert 2 * data.num_examples("train") < len(whole["tokens"])  # epochs go by
    for start, processes in ((0, 2), (6, 3), (55, 6), (91, 1)):
        streams = [
            data.train_batches(start_example=start, process_index=p, process_count=processes) for p in range(processes)
        ]
        for k in range(4):
            batch = joined([next(stream) for stream in streams])
            for name, array in batch.items():
                np.testing.assert_array_equal(array, whole[name][start + 6 * k : start + 6 * k + 6])
    larger = data.with_batch_size(10).train_batches(start_example=12)
    np.testing.assert_array_equal(next(larger).tokens, whole["tokens"][12:22])


def test_seeds_choose_the_order_and_rows_of_another_seed_are_packed_anew(folder: pathlib.Path) -> None:
    first, second, again = (epoch(make(folder, packing="best-fit", window=8, seed=s)) for s in (0, 1, 0))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert set(map(bytes, first.tokens)) != set(map(bytes, second.tokens))
    assert pairs(first) == pairs(second)


def test_evaluation_passes_once_over_a_split_and_fills_up_with_rows_of_weight_0(folder: pathlib.Path) -> None:
    data = make(folder, split=TextSplit(train=0.5, validation=0.3), packing="first-fit").build()
    rows = data.num_examples("validation")
    assert rows % 6
    for processes in (1, 2, 3):
        parts = [
            list(data.eval_batches("validation", process_index=p, process_count=processes)) for p in range(processes)
        ]
        got = joined([batch for batches in zip(*parts, strict=True) for batch in batches])
        assert len(got["tokens"]) == -(-rows // 6) * 6
        assert not any(array[rows:].any() for array in got.values())
        expected = data.examples.held("validation", 0, rows).arrays()
        assert all(np.array_equal(got[name][:rows], expected[name]) for name in got)
    assert expected["weights"].any()
    assert [len(batch) for batch in data.range_batches(3, 11)] == [6, 6]


def test_documents_are_split_by_their_text_wherever_they_stand(tmp_path: pathlib.Path) -> None:
    split = TextSplit(train=0.5, validation=0.25)
    texts = [f"document {d} {'x' * (d % 7)}" for d in range(400)]

    def held(name: str, order: list[str]) -> dict[str, set[str]]:
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in order))
        config = make(tmp_path, path=str(tmp_path / f"{name}.jsonl"), split=split, packing="first-fit")
        data = dataclasses.replace(config, length=64).build()
        found: dict[str, set[str]] = {}
        for which in ("train", "validation", "test"):
            batch = data.examples.held(which, 0, data.num_examples(which))
            text = ByteTokenizer().build().decode(batch.tokens[batch.segment_ids > 0], specials="show")
            found[which] = set(text.removesuffix("<|eos|>").split("<|eos|>"))
        return found

    first = held("a", texts)
    assert set.union(*first.values()) == set(texts)
    assert sum(map(len, first.values())) == len(texts)
    shares = [len(first[which]) / len(texts) for which in ("train", "validation", "test")]
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=0.08)  # three standard deviations
    # Other documents around them, another order, repeats: each stays where it was.
    second = held("b", [*texts[::-1], "something else", texts[0]])
    assert all(first[which] == second[which] - {"something else"} for which in first)


def test_splits_by_position_cut_the_stream_and_share_no_token(tmp_path: pathlib.Path) -> None:
    text = "".join(chr(33 + i % 90) for i in range(1003))
    (tmp_path / "a.txt").write_text(text)
    split = TextSplit(train=0.9, validation=0.05, by="position")
    config = make(tmp_path, path=str(tmp_path / "a.txt"), split=split, packing="concatenate", order="file")
    data = dataclasses.replace(config, marks="none").build()
    found = []
    for which in ("train", "validation", "test"):
        batch = data.examples.held(which, 0, data.num_examples(which))
        used = batch.segment_ids > 0
        found.append(ByteTokenizer().build().decode(batch.tokens[used]))
        assert batch.weights[used].sum() == used.sum() - 1  # the last target would lie in the next split
    assert found == [text[:902], text[902:952], text[952:]]


def test_random_crops_are_stretches_of_the_training_text_from_anywhere(tmp_path: pathlib.Path) -> None:
    text = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 600)))
    (tmp_path / "a.txt").write_text(text)
    data = TextData(
        path=str(tmp_path / "a.txt"),
        tokenizer=CharacterTokenizer(path=str(tmp_path / "a.txt")),
        length=16,
        packing="concatenate",
        order="random-crops",
        marks="none",
        split=TextSplit(train=0.5, validation=0.5, by="position"),
        folder=str(tmp_path / "cache"),
    ).build()
    assert data.schema == TokenSchema(vocabulary=26, length=16)
    assert data.num_examples("train") == 299 // 16
    batch = data.examples.stream(0, 8520)
    decode = CharacterTokenizer(alphabet=text).build().decode
    starts = np.array([text.index(decode(row)) for row in batch.tokens])
    for start, row in zip(starts[:50], batch.targets, strict=False):
        assert decode(row) == text[start + 1 : start + 17]
    assert batch.weights.all()
    assert batch.segment_ids.max() == 1
    # 284 places have a row and its last target in the training half; 30 draws each.
    counts = np.bincount(starts, minlength=284)
    assert counts.size == 284
    assert stats.chisquare(counts).pvalue > 1e-3


@given(st.lists(st.integers(0, 70), min_size=1, max_size=25), st.integers(1, 20), st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_rows_resume_anywhere_to_the_byte(sizes: list[int], length: int, window: int, draw: st.DataObject) -> None:
    from scalejax.data.text.files import PackedText
    from scalejax.data.text.packing import ConcatenatedRows, fit

    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tokens = np.random.RandomState(0).randint(0, 300, offsets[-1]).astype(np.uint16)
    hashes = np.random.RandomState(1).randint(0, 2**62, len(sizes)).astype(np.uint64)
    corpus = Corpus(tokens, offsets, hashes, 320, "digest", "test")
    packing = draw.draw(st.sampled_from(PACKINGS))
    config = TextData(length=length, packing=packing, window=window, split=ALL)

    class InMemory(PackedText):
        def _pack(self, split: str, spans: Any) -> Any:
            if packing == "concatenate":
                return ConcatenatedRows(spans, length)
            parts = list(fit(spans, length, packing, 10**6))  # one window: a single FittedRows, or none
            return parts[0] if parts else ConcatenatedRows(spans, length)

    examples = InMemory(corpus, TokenSchema(320, length), config)
    rows = examples.num_examples("train")
    if rows == 0:
        return
    whole = examples.stream(0, 3 * rows).arrays()
    start = draw.draw(st.integers(0, 3 * rows))
    stop = draw.draw(st.integers(start, 3 * rows))
    for name, array in examples.stream(start, stop).arrays().items():
        np.testing.assert_array_equal(array, whole[name][start:stop])


@pytest.mark.slow
def test_the_standard_library_is_the_default_and_needs_no_file(tmp_path: pathlib.Path) -> None:
    data = TextData(folder=str(tmp_path), length=512, batch_size=4).build()
    counts = Counts.of(data.examples.stream(0, data.num_examples("train")))
    assert counts.tokens > 5_000_000
    assert counts.targets > 0.99 * counts.tokens
    assert counts.tokens > 0.99 * 512 * counts.rows  # hardly any padding
    text = ByteTokenizer().build().decode(data.examples.stream(0, 1000).tokens.reshape(-1))
    assert text.count("    def ") > 100
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    from scalejax.data.text.sources import SUFFIXES, find_texts

    names = [file.name for file in find_texts(None, SUFFIXES)]
    assert names == sorted(names)
    assert {"json/decoder.py", "textwrap.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert all((stdlib / name).is_file() for name in names)


def test_the_fingerprint_tells_what_decides_the_rows_and_nothing_else(folder: pathlib.Path) -> None:
    same = [make(folder), make(folder, batch_size=3, threads=1, folder=str(folder / "other")), make(folder)]
    other = [
        make(folder, length=16),
        make(folder, seed=1),
        make(folder, packing="first-fit"),
        make(folder, packing="concatenate"),
        make(folder, window=5),
        make(folder, positions="row"),
        make(folder, order="file"),
        make(folder, marks="both"),
        make(folder, split=TextSplit()),
        make(folder, vocabulary=512),
        make(folder, path=str(folder / "07.txt")),
    ]
    prints = [data.build().fingerprint() for data in [*same, *other]]
    assert len(set(prints[:3])) == 1
    assert len(set(prints)) == 1 + len(other)


def test_marks_open_and_end_each_document(folder: pathlib.Path) -> None:
    documents = sorted(folder.glob("*.txt"))
    for marks, ends in (("none", [[], []]), ("begin", [[256], []]), ("end", [[], [257]]), ("both", [[256], [257]])):
        data = make(folder, marks=marks, order="file", packing="concatenate").build()
        batch = data.examples.held("train", 0, data.num_examples("train"))
        expected = [i for path in documents for i in (*ends[0], *path.read_bytes(), *ends[1])]
        assert batch.tokens[batch.segment_ids > 0].tolist() == expected


def test_fields_are_set_from_the_command_line() -> None:
    from scalejax.configs import overrides
    from scalejax.configs.llm import llama

    sets = [
        "data.tokenizer=there/tokenizer.json",
        "data.split.by=position",
        "data.path=['a.txt','b']",
        "data.length=64",
    ]
    data = overrides.apply(llama.tiny(), sets).data
    assert isinstance(data, TextData)
    assert data.tokenizer == HuggingFaceTokenizer(path="there/tokenizer.json")
    assert (data.split.by, data.path, data.length) == ("position", ("a.txt", "b"), 64)
    data = overrides.apply(llama.tiny(), ["data.tokenizer=CharacterTokenizer", "data.tokenizer.path=x.txt"]).data
    assert isinstance(data, TextData)
    assert data.tokenizer == CharacterTokenizer(path="x.txt")


def test_fields_that_contradict_one_another_are_refused(folder: pathlib.Path) -> None:
    for fields, match in (
        ({"length": 0}, "data.length must be at least 1; got 0"),
        ({"window": 0}, "data.window must be at least 1"),
        ({"batch_size": 0}, "data.batch_size must be at least 1"),
        ({"threads": 0}, "data.threads must be at least 1"),
        ({"order": "random-crops", "packing": "first-fit"}, "cuts windows"),
        ({"vocabulary": 300}, "data.vocabulary=300 is too small: the tokenizer has ids up to 319"),
        ({"tokenizer": CharacterTokenizer(alphabet="ab"), "marks": "both"}, "wants bos, which the tokenizer does not"),
        ({"tokenizer": CharacterTokenizer(alphabet="ab"), "marks": "none"}, r"\.txt: encode: character"),
        ({"path": str(folder / "nowhere")}, "does not exist"),
        ({"path": ()}, "names nothing"),
        ({"suffixes": (".c",)}, r"holds no file whose name ends in \.c"),
    ):
        with pytest.raises(UserError, match=match):
            make(folder, **fields).build()
    with pytest.raises(UserError, match="more than 1"):
        TextSplit(train=0.9, validation=0.2)
    data = make(folder).build()
    with pytest.raises(UserError, match="split 'dev' does not exist"):
        data.num_examples("dev")
    with pytest.raises(UserError, match="cannot be divided evenly among 4"):
        data.train_batches(process_count=4)
    with pytest.raises(UserError, match="must not be negative"):
        data.train_batches(start_example=-1)
    with pytest.raises(UserError, match="0 <= start <= stop"):
        data.range_batches(2, 1)
    with pytest.raises(ValueError, match="process_index"):
        share(8, 2, 2)
    empty = make(folder, split=TextSplit(train=0.0, validation=1.0)).build()
    with pytest.raises(UserError, match="training split is empty"):
        empty.train_batches()
    with pytest.raises(UserError, match="training split is empty"):
        empty.range_batches(0, 1)
    with pytest.raises(UserError, match=r"data.length=5000 leaves no crop: the training split has \d+ tokens"):
        make(folder, order="random-crops", packing="concatenate", length=5000).build()
