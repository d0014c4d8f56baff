"""Text with images in it to ids and back."""

import numpy as np
import pytest

from scalejax.data.images.tokenizer import InterleavedTokenizer, whole_images
from scalejax.data.text.tokenizer import ByteTokenizer

MADE = InterleavedTokenizer(text=ByteTokenizer(), codes=16).build()
IDS = MADE.ids
IMAGE = [IDS.begin_image, *(IDS.first_code + np.arange(49) % 16), IDS.end_image]


def test_marks_are_tokens_in_a_prompt_and_text_elsewhere():
    parsed = MADE.encode("ab<image>c</image>", specials="parse").tolist()
    assert parsed == [97, 98, IDS.begin_image, 99, IDS.end_image]
    assert MADE.encode("<image>").tolist() == list(b"<image>")
    assert MADE.encode("", specials="parse").size == 0
    assert MADE.vocabulary == IDS.first_code + 16
    assert MADE.special_ids["<image>"] == IDS.begin_image


@pytest.mark.parametrize("cut", [1, 3, 60])
def test_a_stream_gives_the_text_of_all_tokens_and_never_half_a_character(cut):
    ids = [*"ä".encode(), *IMAGE, *"né".encode(), 0xC3, *IMAGE, 98]
    stream = MADE.stream()
    pieces = [stream.push(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    assert "".join(pieces) + stream.finish() == MADE.decode(ids) == "ä<image>né\ufffd<image>b"
    assert MADE.decode(IMAGE, specials="show") == "<image></image>"


def test_whole_images_are_found_and_no_others():
    short, wrong = IMAGE[:40], [IDS.begin_image, 97, *IMAGE[2:-1]]
    found = whole_images([98, *IMAGE, *wrong, 99, *IMAGE, *short], IDS)
    np.testing.assert_array_equal(found, np.stack([np.arange(49) % 16] * 2))
    assert whole_images([98], IDS).shape == (0, 49)
