"""The map from ids to modalities."""

import numpy as np
import pytest

from scalejax.data.text.modalities import InterleavedIds, ModalityMap
from scalejax.errors import UserError

IDS = InterleavedIds(text=5, codes=3)  # 0-4 text, 5 begin, 6 end, 7-9 codes
TOKENS = np.array([[0, 4, 5, 7, 9, 6, 1, 0], [7, 8, 9, 7, 8, 9, 0, 0]])
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize(("marks", "row"), [("text", [0, 0, 0, 1, 1, 0, 0, -1]), ("image", [0, 0, 1, 1, 1, 1, 0, -1])])
def test_marks_around_an_image_are_of_the_modality_that_was_chosen(marks: str, row: list[int]) -> None:
    found = IDS.modalities(marks).of(TOKENS, SEGMENTS)  # pyright: ignore[reportArgumentType]
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, [row, [1] * 6 + [-1] * 2])


def test_marks_are_text_unless_said_otherwise() -> None:
    assert IDS.modalities() == IDS.modalities("text")
    assert IDS.modalities().names == ("text", "image")
    assert (IDS.begin_image, IDS.end_image, IDS.first_code, IDS.vocabulary) == (5, 6, 7, 10)


def test_rows_of_one_modality_and_rows_of_none() -> None:
    modalities = IDS.modalities()
    np.testing.assert_array_equal(modalities.of(np.zeros((1, 4), int), np.ones((1, 4), int)), [[0] * 4])
    np.testing.assert_array_equal(modalities.of(np.full((1, 4), 8), np.ones((1, 4), int)), [[1] * 4])
    np.testing.assert_array_equal(modalities.of(np.zeros((1, 4), int), np.zeros((1, 4), int)), [[-1] * 4])


@pytest.mark.parametrize("token", [10, -1, 4000])
def test_an_id_outside_of_the_map_is_refused_and_named_with_the_map(token: int) -> None:
    tokens = TOKENS.copy()
    tokens[1, 2] = token
    with pytest.raises(UserError, match=rf"Token {token} of row 1, position 2, .*: text \[0, 7\), image \[7, 10\)"):
        IDS.modalities().of(tokens, SEGMENTS)
    tokens[1, 2], tokens[1, 7] = 7, token  # padding is not looked at
    IDS.modalities().of(tokens, SEGMENTS)


def test_an_id_in_a_gap_of_the_map_is_refused() -> None:
    modalities = ModalityMap(ranges=(("text", 0, 2), ("image", 4, 6), ("text", 8, 9)))
    assert modalities.names == ("text", "image")
    np.testing.assert_array_equal(modalities.of(np.array([[1, 5, 8]]), np.ones((1, 3), int)), [[0, 1, 0]])
    with pytest.raises(UserError, match="Token 3 of row 0"):
        modalities.of(np.array([[1, 3]]), np.ones((1, 2), int))


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ((), "maps no id"),
        ((("text", 3, 3),), r"ids \[3, 3\) of 'text' are no range"),
        ((("text", -1, 3),), r"ids \[-1, 3\) of 'text' are no range"),
        ((("image", 2, 5), ("text", 0, 3)), "id 2 of 'image' lies in another range too"),
    ],
)
def test_a_map_that_says_nothing_or_two_things_of_an_id_is_refused(
    ranges: tuple[tuple[str, int, int], ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        ModalityMap(ranges=ranges)
