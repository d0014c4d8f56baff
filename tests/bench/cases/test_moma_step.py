"""The benchmark of MoMa's step: equal FLOPs are checked, pieces are those of a layer, empty places are counted."""

import dataclasses

import numpy as np
import pytest

from scalejax.bench import harness, token_step
from scalejax.bench.cases import moma_step
from scalejax.bench.cases.moma_step import Size
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.models.llm.llama3.parts import OutputRmsNorm

SMALL = Size(
    LlamaConfig(layers=1, dim=16, ffn_dim=32, heads=2, kv_heads=2, vocabulary=32, remat="none", norm=OutputRmsNorm()),
    rows=2,
    length=32,
)


@pytest.mark.slow
def test_both_sides_are_timed_and_rated():
    contest = moma_step.contest("4t4i", "dense", SMALL)
    contest.check()
    contest.ours(1)
    contest.peer(1)
    figures = contest.figures()
    assert all(figures[name] > 0 for name in ("routing", "gather", "experts"))
    assert contest.examples == 64


@pytest.mark.slow
def test_models_of_other_flops_are_not_timed(monkeypatch):
    wide = dataclasses.replace(moma_step.PARTS["8x"], count=32)
    monkeypatch.setitem(moma_step.PARTS, "8x", wide)  # its router has 4 times the columns
    with pytest.raises(harness.OutputsDiffer, match="FLOPs a token"):
        moma_step.contest("8x", "dense", SMALL).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "share", "bounds", "empty"),
    [
        ("4t4i", 0.5, (0.5, 0.5), 0),
        ("4t4i", 0.5, (0.25, 0.75), 1 / 3),  # places for 1.5 times the tokens
        ("4t4i", 0.0, (0.0, 1.0), 1 / 2),
        ("4t4i", 0.25, (0.0, 1.0), 1 / 2),
        ("8x", 0.25, (0.0, 1.0), 0),
    ],
)
def test_empty_places_follow_from_the_bounds_and_not_from_the_share(case, share, bounds, empty):
    assert moma_step.empty_places(case, SMALL, share, bounds) == pytest.approx(empty)


def test_random_rows_have_as_many_tokens_of_a_modality_as_there_is_room_for():
    batch = token_step.random_batch(moma_step.schema_of(SMALL, (0.25, 0.25)), 3, seed=0)
    np.testing.assert_array_equal((batch.modality == 1).sum(1), [8, 8, 8])
    np.testing.assert_array_equal(batch.tokens >= 16, batch.modality == 1)
    np.testing.assert_array_equal(batch.targets[:, :-1], batch.tokens[:, 1:])
