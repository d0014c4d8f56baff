"""A run that is killed and goes on."""

import itertools
import pathlib
from typing import Any

import pytest

from scalejax.train import loop
from scalejax.train.batches.pipeline import Pipeline
from scalejax.train.experiment import Experiment


class _Killed(BaseException):
    """As a signal would end it."""


def train(experiment: Experiment, folder: pathlib.Path, *, at: int) -> dict[str, Any]:
    """Trains until step `at` is to be dispatched, which does not happen, and resumes; returns the summary."""
    dispatch, numbers = Pipeline.step, itertools.count(1)

    def until(feed, state):
        if next(numbers) == at:
            raise _Killed
        return dispatch(feed, state)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(Pipeline, "step", until)
        loop.train(experiment, workdir=folder)
    return loop.train(experiment, workdir=folder, resume="must")
