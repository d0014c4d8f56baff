"""The text pipeline benchmark without its peer."""

import pathlib

import numpy as np
import pytest

from scalejax.bench.cases import text_pipeline
from scalejax.bench.harness import OutputsDiffer
from scalejax.data.text.files import TextData


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    for d in range(30):
        (tmp_path / f"{d}.txt").write_text(chr(65 + d) * 1000 * (d + 1))
    return tmp_path


@pytest.mark.parametrize("case", text_pipeline.CASES)
def test_cases_deliver_batches_and_figures(case: str, texts: pathlib.Path) -> None:
    contest = text_pipeline.prepare(case, None, texts)
    try:
        contest.ours(2)
        figures = contest.figures()
    finally:
        contest.close()
    assert contest.peer is None
    assert contest.examples == text_pipeline.ROWS * text_pipeline.LENGTH
    assert figures["documents"] == 30
    if case in ("best-fit", "first-fit"):
        assert figures["tokens"] == 1000 * 30 * 31 / 2 + 30
        assert 1 <= figures["rows over the fewest without cuts"] < 1.1


class Shifted:
    """A peer whose targets are one token off."""

    def __init__(self, tokens: np.ndarray, by: int) -> None:
        self._tokens, self._by = tokens, by

    def at(self, starts: list[int]) -> tuple["Numbers", "Numbers"]:
        length = text_pipeline.LENGTH
        both = [np.stack([self._tokens[s + d : s + d + length] for s in starts]) for d in (0, self._by)]
        return Numbers(both[0]), Numbers(both[1])


class Numbers:
    """An array with the method by which tensors become arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        return self._array


def test_a_peer_whose_rows_differ_is_noticed(texts: pathlib.Path) -> None:
    from scalejax.data.text.files import TextSplit

    config = TextData(
        path=str(texts),
        length=text_pipeline.LENGTH,
        split=TextSplit(train=1.0, validation=0.0),
        folder=str(texts / "cache"),
    )
    documents = [np.frombuffer(p.read_bytes(), np.uint8) for p in sorted(texts.glob("*.txt"))]
    tokens = np.concatenate([np.append(d.astype(np.uint16), 257) for d in documents])
    text_pipeline._check(config, Shifted(tokens, 1))
    with pytest.raises(OutputsDiffer):
        text_pipeline._check(config, Shifted(tokens, 2))
