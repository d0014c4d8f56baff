"""Scores of a split: what cannot be measured is said, not averaged."""

import dataclasses

import jax
import pytest
import small_run

from scalejax.errors import UserError
from scalejax.parallel.mesh import make_mesh
from scalejax.train import program as programs
from scalejax.train import scoring


def test_scores_that_are_not_finite_are_refused(tmp_path):
    experiment = small_run.experiment(small_run.write(tmp_path / "rows.parquet"))
    data = experiment.data.build()
    program = programs.build(experiment, data.schema, make_mesh(experiment.mesh))
    state = program.init()
    batches = data.eval_batches("validation", process_index=0, process_count=1)
    assert scoring.score(program, state, batches).logits.shape == (data.num_examples("validation"), 1)
    state = dataclasses.replace(state, params=jax.tree.map(lambda p: p * float("nan"), state.params))
    batches = data.eval_batches("validation", process_index=0, process_count=1)
    with pytest.raises(UserError, match=r"not finite at step 0.*earlier checkpoint \(--step\)"):
        scoring.score(program, state, batches)
