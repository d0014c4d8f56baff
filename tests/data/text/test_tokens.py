"""What batches of tokens hold: five arrays of text, and the modality of each token where there are several."""

import dataclasses
import pathlib

import numpy as np
import pytest

from scalejax.data.text.dataset import TokenDataSet
from scalejax.data.text.files import TextData, TextSplit
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError

TWO = TokenSchema(10, 4, ("text", "image"), (3, 2))
FIVE = ["tokens", "targets", "weights", "segment_ids", "positions"]


def test_text_has_the_arrays_that_it_had() -> None:
    batch = TokenBatch.empty(2, 3)
    assert list(batch.arrays()) == FIVE
    assert batch.modality is None
    assert TokenSchema(10, 4).capacity(0) == 4


@pytest.mark.parametrize(
    ("packing", "fingerprint"),
    [
        ("best-fit", "d111731743f8d610b68dc647cdbb1a3b41f812cbc4ba4b51fe495d4e90ad6e7e"),
        ("concatenate", "54c9a10327764d830da715f3a219b7092371e846a2c901900d5d3bbddb7d1d37"),
    ],
)
def test_runs_on_text_of_before_there_were_modalities_go_on(
    tmp_path: pathlib.Path, packing: str, fingerprint: str
) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 9)
    data = TextData(
        path=str(tmp_path / "a.txt"),
        length=16,
        packing=packing,  # pyright: ignore[reportArgumentType]
        split=TextSplit(by="position"),
        folder=str(tmp_path / "kept"),
    )
    assert data.build().fingerprint() == fingerprint


def test_padding_is_of_no_modality_and_rows_keep_theirs() -> None:
    batch = TokenBatch.empty(3, 4, modalities=2)
    assert list(batch.arrays()) == [*FIVE, "modality"]
    assert batch.modality is not None
    assert batch.modality.dtype == np.int8
    one = TokenBatch.empty(1, 4, modalities=2)
    assert one.modality is not None
    one.modality[:] = [[0, 1, 1, -1]]
    batch.place(slice(1, 2), one)
    np.testing.assert_array_equal(batch.modality, [[-1] * 4, [0, 1, 1, -1], [-1] * 4])


@dataclasses.dataclass
class Rows:
    """Implements `TokenExamples`: five rows of given modalities."""

    modality: list[int]
    schema: TokenSchema = TWO

    def num_examples(self, split: str) -> int:
        return 5

    def stream(self, start: int, stop: int) -> TokenBatch:
        batch = TokenBatch.empty(stop - start, 4, modalities=2)
        assert batch.modality is not None
        batch.modality[:] = self.modality
        batch.segment_ids[:] = batch.modality >= 0
        return batch

    def held(self, split: str, start: int, stop: int) -> TokenBatch:
        return self.stream(start, stop)

    def fingerprint(self) -> str:
        return "rows"


def test_the_last_batch_of_a_split_is_filled_up_with_padding_of_no_modality() -> None:
    last = list(TokenDataSet(Rows([0, 1, 1, 0]), batch_size=4).eval_batches("test"))[-1]
    assert last.modality is not None
    np.testing.assert_array_equal(last.modality, [[0, 1, 1, 0]] + [[-1] * 4] * 3)


@pytest.mark.parametrize(
    ("modality", "said"),
    [
        ([0, 0, 0, 0], "Row 0 has 4 tokens of text, and there is room for 3 in a row of 4"),
        ([1, 1, 1, -1], "Row 0 has 3 tokens of image, and there is room for 2 in a row of 4"),
    ],
)
def test_a_row_of_more_tokens_than_there_is_room_for_is_refused_with_both_numbers(
    modality: list[int], said: str
) -> None:
    data = TokenDataSet(Rows(modality), batch_size=2)
    with pytest.raises(UserError, match=said):
        next(data.train_batches(start_example=0))


def test_a_batch_without_modalities_is_refused_where_its_schema_has_several() -> None:
    examples = Rows([0, 0, 1, 1])
    examples.stream = lambda start, stop: TokenBatch.empty(stop - start, 4)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"no `modality`, but its schema has text, image"):
        next(TokenDataSet(examples, batch_size=2).train_batches(start_example=0))
