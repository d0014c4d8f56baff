"""Stages as one stream: what each step sees, and that a run goes on from anywhere."""

import dataclasses
import itertools

import numpy as np
import pytest

from scalejax.data import Stage, StagedData, TextData
from scalejax.data.text.tokenizer import CharacterTokenizer
from scalejax.errors import UserError


@pytest.fixture
def staged(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    random = np.random.default_rng(0)
    for number in range(40):
        (text / f"{number:02}.txt").write_text("".join(chr(97 + c) for c in random.integers(0, 26, 200)))
    short = TextData(path=str(text), length=16, batch_size=4, folder=str(tmp_path / "cache"))
    return StagedData(
        stages=(
            Stage(from_tokens=0, data=short),
            Stage(from_tokens=150, data=dataclasses.replace(short, batch_size=8)),
            Stage(from_tokens=500, data=dataclasses.replace(short, length=32, batch_size=8, seed=1)),
        )
    )


def first(data, count, **where):
    return list(itertools.islice(data.train_batches(**where), count))


def test_shapes_change_with_the_first_step_at_which_so_many_tokens_were_seen(staged):
    shapes = [batch.tokens.shape for batch in first(staged.build(), 9)]
    # 3 steps of 64 tokens reach 192, 3 of 128 reach 576.
    assert shapes == [(4, 16)] * 3 + [(8, 16)] * 3 + [(8, 32)] * 3
    assert (staged.batch_size, staged.batch_sizes, staged.schema().length) == (8, (4, 8, 8), 32)


def test_a_larger_batch_goes_on_in_the_same_rows_and_other_rows_begin_anew(staged):
    got = first(staged.build(), 8)
    plain = staged.stages[0].data.build()
    rows = np.concatenate([batch.tokens for batch in got[:6]])
    want = np.concatenate([b.tokens for b in first(plain.with_batch_size(12), 3, start_example=0)])
    np.testing.assert_array_equal(rows, want)
    last = first(staged.stages[2].data.build(), 2, start_example=0)
    np.testing.assert_array_equal(got[6].tokens, last[0].tokens)
    np.testing.assert_array_equal(got[7].tokens, last[1].tokens)


@pytest.mark.parametrize("step", range(9))
def test_going_on_from_any_step_equals_never_having_stopped(staged, step):
    data = staged.build()
    whole = first(data, 10)
    seen = sum(len(batch) for batch in whole[:step])
    for process in range(2):
        again = first(data, 10 - step, start_example=seen, process_index=process, process_count=2)
        for expected, got in zip(whole[step:], again, strict=True):
            half = len(expected) // 2
            np.testing.assert_array_equal(got.tokens, expected.tokens[process * half : (process + 1) * half])


def test_what_cannot_be_is_refused(staged, tmp_path):
    with pytest.raises(UserError, match="row 5 lies within a batch of 4 rows"):
        next(staged.build().train_batches(start_example=5))
    letters = tmp_path / "letters.txt"
    letters.write_text("abc")
    other = dataclasses.replace(staged.stages[2].data, tokenizer=CharacterTokenizer(path=str(letters)))
    mixed = StagedData(stages=(*staged.stages[:2], dataclasses.replace(staged.stages[2], data=other)))
    with pytest.raises(UserError, match="all must have one vocabulary"):
        mixed.schema()
    with pytest.raises(UserError, match="from_tokens must begin at 0"):
        StagedData(stages=staged.stages[1:]).build()


def test_the_fingerprint_knows_where_stages_begin(staged):
    later = dataclasses.replace(staged.stages[2], from_tokens=900)
    moved = StagedData(stages=(*staged.stages[:2], later))
    assert moved.build().fingerprint() != staged.build().fingerprint()
    assert staged.build().fingerprint() == staged.build().fingerprint()
