"""Scores of a split: what cannot be measured is said, not averaged."""

import dataclasses
import types

import jax
import numpy as np
import pytest
import small_run

from scalejax.errors import UserError
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.reports import summary as summaries
from scalejax.train.runs import binding, scoring


@pytest.mark.parametrize("first", [0, 64])
def test_examples_are_numbered_through_the_batches_of_a_split(first):
    program = types.SimpleNamespace(mesh=make_mesh(MeshShape()))
    numbers = scoring._numbers(program, first, 64)
    assert numbers.dtype == np.uint32
    np.testing.assert_array_equal(numbers, np.arange(first, first + 64))


@pytest.mark.slow
def test_scores_that_are_not_finite_are_refused(tmp_path):
    experiment = small_run.experiment(small_run.write(tmp_path / "rows.parquet"))
    data = experiment.data.build()
    program = binding.bind(experiment, data.schema, make_mesh(experiment.placement.mesh))
    state = program.init()
    batches = data.eval_batches("validation", process_index=0, process_count=1)
    assert scoring.score(program, state, batches).collected["logits"].shape == (data.num_examples("validation"), 1)
    state = dataclasses.replace(state, params=jax.tree.map(lambda p: p * float("nan"), state.params))
    batches = data.eval_batches("validation", process_index=0, process_count=1)
    with pytest.raises(UserError, match=r"not finite at step 0.*earlier checkpoint \(--step\)"):
        scoring.score(program, state, batches)


@pytest.mark.slow
@pytest.mark.parametrize("overflow", ["fail", "count"])
def test_overflow_ids_are_counted_or_refused(tmp_path, overflow):
    # Row r of the t-th table of a stack lives on device (r + t) % 8: all ids go to one device.
    hot = {"shop": 0, "hour": 7, "item": 6}
    rows = small_run.write(
        tmp_path / "rows.parquet", {name: np.full(small_run.ROWS, row, np.int32) for name, row in hot.items()}
    )
    experiment = small_run.experiment(rows, model=LogisticConfig(), tables__exchange=Exchange(overflow=overflow))
    data = experiment.data.build()
    program = binding.bind(experiment, data.schema, make_mesh(experiment.placement.mesh))
    state = program.init()
    batches = data.eval_batches("validation", process_index=0, process_count=1)
    if overflow == "fail":
        with pytest.raises(UserError, match="room for"):
            scoring.score(program, state, batches)
        return
    scores = scoring.score(program, state, batches)
    # A batch: 8 devices send 8 examples x 3 ids to one that has room for 8 + 3 x 2 of each.
    assert scores.overflow_ids == 8 * (24 - 14) * -(-data.num_examples("validation") // 64)
    summary = summaries.of_evaluation("validation", scores.measure())
    assert summary["val_overflow_ids"] == scores.overflow_ids
    assert [row.value for row in summaries.quality(summary)[0].rows if row.name == "ids without room"] == ["80"]
