"""Perplexity and the distance of predictions, against sums in NumPy."""

import jax
import numpy as np
import pytest
from llama_cases import GQA, tensors, tokens, write_checkpoint

from scalejax.errors import UserError
from scalejax.inference import compare, generate
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh

ROWS = tokens(GQA, 5, 12)


def engine(folder, weights=None, config=GQA, **sizes):
    write_checkpoint(folder, config, weights)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return generate.load(model_folder.open_folder(folder), make_mesh(MeshShape(**sizes or {"fsdp": 1}), devices))


def log_probabilities(on):
    logits = np.asarray(on.logits(ROWS), np.float64)[:, :-1]
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    noisy = {name: array + 0.05 * np.sign(array) for name, array in tensors(GQA).items()}
    return engine(folder / "a"), engine(folder / "b", noisy)


@pytest.mark.slow
def test_sums_are_those_of_numpy(pair, monkeypatch):
    monkeypatch.setattr(compare, "_BATCH_TOKENS", 24)  # the last batch is filled up
    found = compare.compare(*pair, ROWS)
    first, second = (log_probabilities(on) for on in pair)
    want = [-np.take_along_axis(logs, ROWS[:, 1:, None], -1).mean() for logs in (first, second)]
    np.testing.assert_allclose([found.before.loss, found.after.loss], want, rtol=1e-5)
    np.testing.assert_allclose(found.before.perplexity, np.exp(want[0]), rtol=1e-4)
    np.testing.assert_allclose(found.divergence, (np.exp(first) * (first - second)).sum(-1).mean(), rtol=1e-4)
    assert found.agreement == (first.argmax(-1) == second.argmax(-1)).mean()
    assert found.before.tokens == 55
    assert compare.score(pair[0], ROWS) == found.before


def test_a_model_does_not_differ_from_itself(pair):
    found = compare.compare(pair[0], pair[0], ROWS)
    assert (found.divergence, found.agreement) == (0, 1)
    assert found.before == found.after


def test_what_cannot_be_compared_is_refused(pair, tmp_path):
    import dataclasses

    other = engine(tmp_path / "other", config=dataclasses.replace(GQA, vocabulary=100))
    with pytest.raises(UserError, match="vocabularies of 96 and 100 tokens"):
        compare.compare(pair[0], other, ROWS)
    with pytest.raises(UserError, match="at least 2 positions"):
        compare.score(pair[0], ROWS[:, :1])
    short = engine(tmp_path / "short", config=dataclasses.replace(GQA, max_positions=8))
    with pytest.raises(UserError, match="at most 8 positions"):
        compare.score(short, ROWS)
