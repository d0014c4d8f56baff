"""Rows of images among text: inside of the bounds to the token, and known from nothing but their number."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.images.interleaved import (
    Caption,
    InterleavedRows,
    Material,
    RowContents,
    RowStyle,
    capacities,
    possible_rows,
)
from scalejax.data.text.dataset import TokenDataSet
from scalejax.data.text.modalities import InterleavedIds
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError

IDS = InterleavedIds(text=30, codes=8)  # 30 begin, 31 end, 32-39 codes
CAPTIONS = [np.array([20, 21], np.int32), np.array([22, 23, 24], np.int32)]
IMAGE = 6  # codes of an image, here
TEXT = {"train": (0, 3000), "validation": (3000, 3400), "test": (3400, 3900)}
TOKENS = np.arange(3900) % 19  # ids of text; those of captions are others


def material(images: int = 37) -> dict[str, Material]:
    """Image n of the train split has the codes of n in base 8 behind zeros; those of other splits go on from there."""
    found, first = {}, 0
    for split, count in (("train", images), ("validation", 25), ("test", 20)):
        numbers = np.arange(first, first + count)
        codes = (numbers[:, None] // 8 ** np.arange(IMAGE - 1, -1, -1)) % 8
        found[split] = Material(codes.astype(np.int32), numbers % 2, TOKENS[slice(*TEXT[split])])
        first += count
    return found


def rows(
    length: int = 64,
    share: tuple[float, float] = (0.3, 0.7),
    caption: Caption = "either",
    marks: Any = "text",
    images: int = 37,
    **style: Any,
) -> InterleavedRows:
    modalities = IDS.modalities(marks)
    schema = TokenSchema(IDS.vocabulary, length, modalities.names, capacities(length, share))
    made = {"image_share": share, "caption": caption, "positions": "document", "seed": 0} | style
    return InterleavedRows(schema, IDS, modalities, material(images), CAPTIONS, RowStyle(**made), "text")


def documents(batch: TokenBatch, row: int) -> list[list[int]]:
    tokens, segments = batch.tokens[row], batch.segment_ids[row]
    return [tokens[segments == s].tolist() for s in range(1, int(segments.max()) + 1)]


def image_number(document: list[int]) -> int:
    begin = document.index(IDS.begin_image)
    assert document[begin + IMAGE + 1] == IDS.end_image
    codes = np.array(document[begin + 1 : begin + 1 + IMAGE]) - IDS.first_code
    return int((codes * 8 ** np.arange(IMAGE - 1, -1, -1)).sum())


def literal_share(batch: TokenBatch) -> np.ndarray:
    """Image tokens over all tokens of each row, by the modality that the batch says."""
    assert batch.modality is not None
    return (batch.modality == 1).sum(1) / (batch.modality >= 0).sum(1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(20, 200),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from(["before", "after", "either", "none"]),
    st.sampled_from(["text", "image"]),
)
def test_every_row_is_inside_of_the_bounds_and_of_the_capacities(
    length: int, bounds: tuple[float, float], caption: Caption, marks: str
) -> None:
    share = (min(bounds), max(bounds))
    try:
        examples = rows(length, share, caption, marks)
    except UserError as error:
        assert "data.image_share" in str(error)
        return
    for batch in (examples.stream(0, 40), examples.held("validation", 0, 40)):
        found = literal_share(batch)
        assert ((found >= share[0] - 1e-9) & (found <= share[1] + 1e-9)).all()
        assert batch.modality is not None
        for number in range(2):
            assert ((batch.modality == number).sum(1) <= examples.schema.capacity(number)).all()


@pytest.mark.parametrize(
    ("caption", "marks"), [*itertools.product(["before", "after", "either", "none"], ["text", "image"])]
)
def test_a_document_is_text_that_one_whole_image_and_its_caption_interrupt(caption: Caption, marks: str) -> None:
    batch = rows(caption=caption, marks=marks).stream(0, 60)
    sides = set()
    for row in range(60):
        texts = []
        for document in documents(batch, row):
            image = image_number(document)
            name = CAPTIONS[image % 2].tolist()
            begin = document.index(IDS.begin_image)
            before, behind = document[:begin], document[begin + IMAGE + 2 :]
            if caption != "none":
                if name == before[len(before) - len(name) :]:
                    sides.add("before")
                    before = before[: -len(name)]
                else:
                    sides.add("after")
                    assert behind[: len(name)] == name
                    behind = behind[len(name) :]
            texts += before + behind
        assert max(texts) < 19  # no other caption, no other image
        steps = np.diff(texts) % 19
        assert (steps == 1).all()  # one stretch of text through the row
    assert sides == {"either": {"before", "after"}, "none": set()}.get(caption, {caption})


def test_rows_are_full_and_have_different_numbers_of_images() -> None:
    batch = rows().stream(0, 100)
    assert (batch.segment_ids > 0).all()
    assert batch.modality is not None
    counts = (batch.modality == 1).sum(1) // IMAGE
    assert set(counts.tolist()) == {4, 5}  # 24 to 30 of 64; a sixth has no room beside captions and marks
    assert 30 < (counts == 4).sum() < 70
    np.testing.assert_array_equal(batch.modality == 1, batch.tokens >= IDS.first_code)


def test_modalities_of_marks_follow_the_map() -> None:
    text, image = (rows(marks=marks).stream(0, 20) for marks in ("text", "image"))
    for batch, number in ((text, 0), (image, 1)):
        assert batch.modality is not None
        marks = (batch.tokens == IDS.begin_image) | (batch.tokens == IDS.end_image)
        assert marks.any()
        assert (batch.modality[marks] == number).all()


def test_targets_stay_inside_of_documents() -> None:
    batch = rows().stream(0, 10)
    last = np.diff(batch.segment_ids, axis=1, append=0) != 0
    np.testing.assert_array_equal(batch.weights, (~last).astype(np.float32))
    np.testing.assert_array_equal(batch.targets[:, :-1][~last[:, :-1]], batch.tokens[:, 1:][~last[:, :-1]])
    starts = np.diff(batch.segment_ids, axis=1, prepend=0) != 0
    assert (batch.positions[starts] == 0).all()
    assert (rows(positions="row").stream(0, 3).positions == np.arange(64)).all()


def test_rows_of_text_alone() -> None:
    batch = rows(share=(0, 0)).stream(0, 30)
    assert batch.modality is not None
    assert (batch.modality == 0).all()
    assert (batch.segment_ids == 1).all()
    assert (np.diff(batch.tokens, axis=1) % 19 == 1).all()
    assert len(set(batch.tokens[:, 0].tolist())) > 5


def test_rows_of_images_alone_are_filled_up_with_padding() -> None:
    examples = rows(share=(1, 1), caption="none", marks="image")
    assert examples.schema.capacities == (0, 64)
    batch = examples.stream(0, 9)
    assert batch.modality is not None
    np.testing.assert_array_equal(batch.modality, [[1] * 64] * 9)
    examples = rows(length=66, share=(1, 1), caption="none", marks="image")
    assert examples.tokens_per_row == 64
    batch = examples.stream(0, 9)
    assert batch.modality is not None
    np.testing.assert_array_equal(batch.modality, [[1] * 64 + [-1] * 2] * 9)
    np.testing.assert_array_equal(batch.segment_ids[:, 64:], 0)


def test_possible_rows_are_those_that_are_fullest() -> None:
    assert possible_rows(100, (0.4, 0.7), image_tokens=20, beside=5) == (RowContents(2, 60), RowContents(3, 40))
    assert possible_rows(100, (0.0, 1.0), image_tokens=49, beside=9) == (RowContents(0, 100), RowContents(1, 51))
    # One image and as much text as the bounds let be beside it.
    assert possible_rows(100, (0.8, 1.0), image_tokens=60, beside=0) == (RowContents(1, 15),)


@pytest.mark.parametrize("share", [(0.52, 0.54), (0.95, 1.0)])
def test_bounds_that_no_row_is_inside_of_are_refused_with_the_numbers(share: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"no row of data.length=20 is inside. An image has 6 tokens .* 5 of text"):
        rows(length=20, share=share)


def test_capacities_follow_from_the_bounds() -> None:
    assert capacities(10, (0.3, 0.7)) == (7, 7)
    assert capacities(256, (0.0, 1.0)) == (256, 256)
    assert capacities(256, (0.0, 0.0)) == (256, 0)
    assert capacities(100, (0.1, 0.29)) == (90, 29)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.length=5000: a row may have 3\d\d\d tokens of text, .* has 3000"):
        rows(length=5000)


def same(a: TokenBatch, b: TokenBatch) -> bool:
    return all(np.array_equal(array, b.arrays()[name]) for name, array in a.arrays().items())


def test_rows_depend_on_nothing_but_their_number_and_the_seed() -> None:
    whole = rows().stream(0, 50)
    for start, stop in ((0, 50), (7, 8), (13, 37)):
        part = rows().stream(start, stop)
        for name, array in part.arrays().items():
            np.testing.assert_array_equal(array, whole.arrays()[name][start:stop])
    assert not same(rows(seed=1).stream(0, 50), whole)


def test_batches_go_on_anywhere_in_any_size_with_any_threads() -> None:
    def read(start: int, count: int, batch_size: int, threads: int, **process: int) -> np.ndarray:
        data = TokenDataSet(rows(), batch_size=batch_size, threads=threads)
        batches = itertools.islice(data.train_batches(start_example=start, **process), count)
        return np.concatenate([np.stack([b.tokens, b.modality, b.segment_ids]) for b in batches], axis=1)  # pyright: ignore

    whole = read(0, 10, 12, 1)
    np.testing.assert_array_equal(read(60, 5, 12, 3), whole[:, 60:])
    np.testing.assert_array_equal(read(0, 30, 4, 2), whole)
    shares = [read(0, 10, 12, 2, process_index=p, process_count=2).reshape(3, 10, 6, 64) for p in range(2)]
    np.testing.assert_array_equal(np.concatenate(shares, axis=2).reshape(3, 120, 64), whole)


def test_an_epoch_of_places_has_each_image_once_in_an_order_of_its_own() -> None:
    # Every row has exactly four images: 24 of 64 tokens.
    examples = rows(share=(0.37, 0.38))
    numbers = [image_number(d) for row in range(74) for d in documents(examples.stream(row, row + 1), 0)]
    epochs = [numbers[start : start + 37] for start in range(0, 8 * 37, 37)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8


def test_held_out_rows_have_images_and_text_of_their_own() -> None:
    examples = rows()
    seen: dict[str, list[int]] = {}
    for split in ("train", "validation", "test"):
        count = examples.num_examples(split)
        batch = examples.held(split, 0, count)
        assert len(batch) == count > 0
        seen[split] = [image_number(d) for row in range(count) for d in documents(batch, row)]
        assert len(set(seen[split])) == len(seen[split])
    drawn = {image_number(d) for row in range(50) for d in documents(examples.stream(row, row + 1), 0)}
    assert drawn == set(range(37))
    assert set(seen["train"]) <= drawn
    assert set(seen["validation"]) <= set(range(37, 62))
    assert set(seen["test"]) <= set(range(62, 82))


def test_stretches_of_text_are_of_their_split_alone_and_never_twice_in_a_held_out_one() -> None:
    examples = rows(share=(0, 0))
    numbered = material()
    for split, each in numbered.items():
        start = TEXT[split][0]
        numbered[split] = dataclasses.replace(each, text=np.arange(*TEXT[split]))
        assert numbered[split].text[0] == start
    wide = InterleavedIds(text=4000, codes=8)
    schema = TokenSchema(wide.vocabulary, 64, ("text", "image"), (64, 0))
    style = RowStyle(image_share=(0.0, 0.0), caption="none", positions="document", seed=0)
    examples = InterleavedRows(schema, wide, wide.modalities(), numbered, CAPTIONS, style, "text")
    drawn = examples.stream(0, 400).tokens
    assert drawn.max() < 3000
    assert drawn.max() > 2900
    assert drawn.min() < 100
    for split in ("validation", "test"):
        held = examples.held(split, 0, 1000).tokens
        assert len(held) == (TEXT[split][1] - TEXT[split][0]) // 64
        assert np.unique(held).size == held.size
        assert held.min() == TEXT[split][0]
        assert held.max() < TEXT[split][1]


def test_fewer_images_than_a_row_has_are_seen_more_than_once_in_training() -> None:
    examples = rows(images=3)
    assert examples.num_examples("train") == 1
    numbers = [image_number(d) for d in documents(examples.stream(0, 1), 0)]
    assert len(numbers) >= 4
    assert set(numbers) == {0, 1, 2}
    assert set(image_number(d) for d in documents(examples.held("train", 0, 1), 0)) == {0, 1, 2}


def test_the_fingerprint_knows_what_rows_are_made_of() -> None:
    one = rows().fingerprint()
    assert rows().fingerprint() == one
    others = [
        rows(length=65),
        rows(share=(0.3, 0.6)),
        rows(caption="before"),
        rows(marks="image"),
        rows(images=36),
        rows(seed=1),
        rows(positions="row"),
    ]
    assert len({one, *(each.fingerprint() for each in others)}) == 8


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="split 'dev' does not exist"):
        rows().num_examples("dev")
