"""Perplexity and the distance of predictions, against sums in NumPy."""

import dataclasses
import types

import jax
import numpy as np
import pytest
import small_language_run as small
from llama_cases import GQA, tensors, tokens, write_checkpoint

from scalejax.errors import UserError
from scalejax.inference import compare, generate, run_model, text_rows
from scalejax.inference import loop as scheduling
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop

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


class Bigrams:
    """An engine for which the last token says all of the next one."""

    config, params = GQA, None

    def __init__(self, seed):
        self.table = np.random.default_rng(seed).normal(size=(GQA.vocabulary,) * 2).astype(np.float32)
        self.programs = types.SimpleNamespace(read=self.read)

    def logits(self, rows):
        return self.table[rows]

    def read(self, params, tokens, reading, slots, state):
        return types.SimpleNamespace(logits=self.table[tokens[:, 0]])

    def log_probabilities(self):
        logits = self.table[ROWS[:, :-1]].astype(np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_sums_over_rows_do_not_depend_on_how_many_are_scored_at_once(monkeypatch):
    engines = Bigrams(0), Bigrams(1)
    monkeypatch.setattr(compare, "_BATCH_TOKENS", 24)  # 2, 2 and 1 of 5 rows
    found = compare.compare(*engines, ROWS)
    first, second = (one.log_probabilities() for one in engines)
    want = [-np.take_along_axis(logs, ROWS[:, 1:, None], -1).mean() for logs in (first, second)]
    np.testing.assert_allclose([found.before.loss, found.after.loss], want, rtol=1e-5)
    np.testing.assert_allclose(found.divergence, (np.exp(first) * (first - second)).sum(-1).mean(), rtol=1e-5)
    assert found.agreement == (first.argmax(-1) == second.argmax(-1)).mean()
    assert (found.before.tokens, found.after.tokens) == (55, 55)

    monkeypatch.setattr(compare, "_CACHED_ROWS", 2)
    state = types.SimpleNamespace(steps=types.SimpleNamespace(state=None))
    monkeypatch.setattr(scheduling, "make_loop", lambda engine, **sizes: state)
    cached = compare.score_cached(engines[0], ROWS, "compute", page=16)
    assert (cached.tokens, cached.loss) == (55, pytest.approx(want[0], rel=1e-5))


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


@pytest.mark.slow
def test_tokens_read_one_by_one_through_pages_have_the_loss_of_whole_rows(pair, monkeypatch):
    monkeypatch.setattr(compare, "_CACHED_ROWS", 2)  # the last batch is filled up
    found = compare.score_cached(pair[0], ROWS, "compute", page=16)
    want = compare.score(pair[0], ROWS)
    assert found.tokens == want.tokens
    assert found.loss == pytest.approx(want.loss, rel=1e-5)


def write_echoes(folder, seed, documents):
    """Texts of 63 letters; a letter is mostly the fourth before it, which attention alone can know."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    for number in range(documents):
        letters = random.integers(0, 26, 63)
        for at in range(4, 63):
            letters[at] = letters[at - 4] if random.random() < 0.9 else letters[at]
        (folder / f"{number:04}.txt").write_text("".join(chr(97 + letter) for letter in letters))
    return folder


@pytest.mark.slow
def test_the_held_out_loss_of_a_trained_model_hardly_grows_with_narrow_keys_and_values(tmp_path):
    experiment = small.experiment(
        write_echoes(tmp_path / "texts", 0, 600),
        model=dataclasses.replace(small.MODEL, dim=32, ffn_dim=64),
        steps=300,
        data__length=64,
        data__batch_size=16,
        checkpoints__every=300,
        log_every=300,
    )
    loop.train(experiment, workdir=tmp_path / "run")
    opened = run_model.open_run(tmp_path / "run", experiment)
    on = generate.load(opened, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]), dtype="float32")
    rows = text_rows.read_rows(opened, write_echoes(tmp_path / "held", 1, 64), 64 * 64)
    plain, int8, float8 = (compare.score_cached(on, rows, kept).loss for kept in ("compute", "int8", "float8"))
    assert plain == pytest.approx(compare.score(on, rows).loss, rel=1e-5)
    assert plain < 1.6  # of 3.26 for letters of which nothing is known
    assert int8 / plain - 1 <= 0.005
    assert float8 / plain - 1 <= 0.01
    assert int8 != plain != float8


@pytest.mark.slow
def test_a_model_does_not_differ_from_itself(pair):
    found = compare.compare(pair[0], pair[0], ROWS)
    assert (found.divergence, found.agreement) == (0, 1)
    assert found.before == found.after


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(pair, tmp_path):
    other = engine(tmp_path / "other", config=dataclasses.replace(GQA, vocabulary=100))
    with pytest.raises(UserError, match="vocabularies of 96 and 100 tokens"):
        compare.compare(pair[0], other, ROWS)
    with pytest.raises(UserError, match="at least 2 positions"):
        compare.score(pair[0], ROWS[:, :1])
    short = engine(tmp_path / "short", config=dataclasses.replace(GQA, max_positions=8))
    with pytest.raises(UserError, match="at most 8 positions"):
        compare.score(short, ROWS)
