"""Mixtures of text and stages of training."""

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest

from scalejax.data.text.files import TextData, TextSplit
from scalejax.data.text.interleave import Interleave
from scalejax.data.text.mixture import MixtureData
from scalejax.data.text.stages import Stage, plan
from scalejax.data.text.tokens import TokenBatch
from scalejax.errors import UserError

LETTERS = "abc"


@pytest.fixture
def sources(tmp_path: pathlib.Path) -> list[TextData]:
    """Three sources, each of its own letter, of 5, 11 and 23 documents."""
    made = []
    for letter, documents in zip(LETTERS, (5, 11, 23), strict=True):
        (tmp_path / letter).mkdir()
        for d in range(documents):
            (tmp_path / letter / f"{d:02}.txt").write_text(letter * (10 + 7 * d))
        made.append(
            TextData(
                path=str(tmp_path / letter),
                length=24,
                split=TextSplit(train=0.6, validation=0.2),
                folder=str(tmp_path / "cache"),
            )
        )
    return made


def joined(batches: list[TokenBatch]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([b.arrays()[name] for b in batches]) for name in batches[0].arrays()}


def test_rows_are_those_of_the_sources_in_the_order_of_the_weights(sources: list[TextData]) -> None:
    weights, schedule = (0.5, 0.3, 0.2), ((40, (0.1, 0.0, 0.9)),)
    mixture = MixtureData(sources=tuple(zip(sources, weights, strict=True)), schedule=schedule, batch_size=6).build()
    got = joined(list(itertools.islice(mixture.train_batches(), 20)))
    source, position = Interleave(weights, schedule).rows(0, 120)
    alone = [data.build().examples for data in sources]
    for row, (k, j) in enumerate(zip(source.tolist(), position.tolist(), strict=True)):
        for name, array in alone[k].stream(j, j + 1).arrays().items():
            np.testing.assert_array_equal(got[name][row], array[0])
        assert chr(got["tokens"][row, 0]) == LETTERS[k]


def test_any_start_and_any_number_of_processes_read_the_same_rows(sources: list[TextData]) -> None:
    data = MixtureData(sources=((sources[0], 1), (sources[2], 3)), schedule=((10, (2, 1)),), batch_size=4).build()
    whole = joined(list(itertools.islice(data.train_batches(), 12)))
    for start, processes in ((0, 2), (8, 4), (12, 1)):
        streams = [
            data.train_batches(start_example=start, process_index=p, process_count=processes) for p in range(processes)
        ]
        got = joined([next(stream) for _ in range(3) for stream in streams])
        for name, array in got.items():
            np.testing.assert_array_equal(array, whole[name][start : start + 12])


def test_validation_is_that_of_one_source_after_another(sources: list[TextData]) -> None:
    mixture = MixtureData(sources=((sources[1], 1), (sources[2], 1)), batch_size=5).build()
    built = [dataclasses.replace(data, batch_size=1).build() for data in sources[1:]]
    expected = joined([batch for data in built for batch in data.eval_batches("validation")])
    rows = mixture.num_examples("validation")
    assert rows == len(expected["tokens"]) > 5
    got = joined(list(mixture.eval_batches("validation")))
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name][:rows], array)
        assert not got[name][rows:].any()


def test_weights_may_change_ahead_of_a_run_but_not_at_its_beginning(sources: list[TextData]) -> None:
    def fingerprint(weights: tuple[float, float], schedule: tuple = ()) -> str:
        pairs = tuple(zip(sources[1:], weights, strict=True))
        return MixtureData(sources=pairs, schedule=schedule).build().fingerprint()

    assert fingerprint((1.0, 1.0)) == fingerprint((1.0, 1.0), ((100, (1.0, 2.0)),))
    assert fingerprint((1.0, 1.0)) != fingerprint((1.0, 2.0))


def test_sources_that_do_not_go_together_are_refused(sources: list[TextData], tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"data.sources\[1\] gives .*length=8"):
        MixtureData(sources=((sources[0], 1), (dataclasses.replace(sources[1], length=8), 1))).build()
    with pytest.raises(UserError, match="at least one"):
        MixtureData(sources=()).schema()
    held_out = dataclasses.replace(sources[1], split=TextSplit(train=0.0, validation=1.0))
    with pytest.raises(UserError, match=r"data.sources\[1\] has no training rows"):
        MixtureData(sources=((sources[0], 1), (held_out, 1))).build()
    MixtureData(sources=((sources[0], 1), (held_out, 0))).build()


def test_stages_begin_with_the_first_step_at_which_their_tokens_have_been_seen() -> None:
    short = TextData(length=8, batch_size=2)
    wide = dataclasses.replace(short, batch_size=6)
    long = TextData(length=32, batch_size=3, seed=1)
    stages = [Stage(from_tokens=at, data=data) for at, data in ((0, short), (100, wide), (400, long))]
    a, b, c = plan(stages, 1000)
    # 7 steps of 16 tokens, 6 of 48 and 7 of 96: the stages begin at 0, 112 and 400 tokens, and the last ends at 1,072.
    assert [(s.first_step, s.stop_step) for s in (a, b, c)] == [(0, 7), (7, 13), (13, 20)]
    # The wider batches go on in the same rows, the longer rows are another stream.
    assert [s.first_example for s in (a, b, c)] == [0, 14, 0]


def test_a_batch_size_ramp_reads_every_row_once(sources: list[TextData]) -> None:
    small = dataclasses.replace(sources[2], batch_size=2)
    large = dataclasses.replace(sources[2], batch_size=8)
    spans = plan([Stage(from_tokens=0, data=small), Stage(from_tokens=100, data=large)], 500)
    got = []
    for span in spans:
        batches = span.data.build().train_batches(start_example=span.first_example)
        got += list(itertools.islice(batches, span.stop_step - span.first_step))
    rows = sum(len(batch) for batch in got)
    expected = large.build().examples.stream(0, rows)
    for name, array in joined(got).items():
        np.testing.assert_array_equal(array, expected.arrays()[name])
    again = small.build().with_batch_size(8)
    following = next(again.train_batches(start_example=spans[1].first_example))
    np.testing.assert_array_equal(following.tokens, got[spans[1].first_step].tokens)


def test_stages_that_cannot_be_run_are_refused() -> None:
    data = TextData(length=8, batch_size=2)
    for stages, tokens, match in (
        ([(1, data)], 10, "begin at 0"),
        ([(0, data), (0, data)], 10, "ascend"),
        ([(0, data), (50, data)], 50, "before the stage from 50 begins"),
        ([(0, data), (50, data), (52, data)], 100, r"stages\[1\] from 50 tokens has no step"),
        ([], 10, "begin at 0"),
    ):
        with pytest.raises(UserError, match=match):
            plan([Stage(from_tokens=at, data=each) for at, each in stages], tokens)
