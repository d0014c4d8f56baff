"""A run on images among text: it keeps its codebook, shows what that draws, and goes on to the same bits."""

import dataclasses
import json

import numpy as np
import pytest
import small_language_run as small

from scalejax.data.images.codebook import PatchCodebook
from scalejax.data.images.sources import ImageFolder
from scalejax.data.images.tokenizer import InterleavedTokenizer
from scalejax.data.images.two_modality import CODEBOOK, TwoModalityData
from scalejax.data.text.files import TextSplit
from scalejax.data.text.mixture import MixtureData
from scalejax.data.text.shards import TokenShards
from scalejax.errors import UserError
from scalejax.inference import run_model
from scalejax.models.llm.experts import ExpertChoice
from scalejax.models.llm.moma import ModalityExperts
from scalejax.surgery.experts import Upcycle
from scalejax.train import loop, phases
from scalejax.train.checkpoints.trained import open_run
from scalejax.train.experiment import Checkpoints, Phase
from scalejax.train.metrics.evaluation import read_pictures
from scalejax.train.run_folder import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Twelve steps of a Llama on 200 images of few patches."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    kinds = random.integers(0, 256, (40, 4, 4)).astype(np.uint8)
    images = kinds[random.integers(0, 40, (200, 7, 7))].transpose(0, 1, 3, 2, 4).reshape(200, 28, 28)
    np.savez(folder / "images.npz", images=images, labels=np.arange(200) % 3)
    data = TwoModalityData(
        images=ImageFolder(path=str(folder / "images.npz")),
        codes=16,
        path=str(small.write(folder / "texts")),
        length=64,
        batch_size=8,
        image_share=(0.7, 0.8),
        folder=str(folder / "kept"),
    )
    return small.experiment(folder / "texts", data=data)


@pytest.fixture(scope="module")
def trained(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, loop.train(experiment, workdir=folder)


def test_the_folder_has_the_codebook_and_the_report_what_it_draws(experiment, trained):
    folder, _ = trained
    data = experiment.data.build()
    assert PatchCodebook.read(folder / CODEBOOK).digest() == data.codebook.digest()
    (picture,) = read_pictures(folder)
    error = data.codebook.error(data.images["validation"].pixels)
    assert f"error of a pixel {error:.0f} of 255²" in picture.caption
    assert picture.caption in (folder / "report.html").read_text()


def test_a_run_that_was_interrupted_writes_the_same_metrics(experiment, trained, tmp_path):
    loop.train(dataclasses.replace(experiment, steps=4), workdir=tmp_path)
    (tmp_path / CODEBOOK).unlink()
    loop.train(experiment, workdir=tmp_path, resume="must")
    windows = [[r for r in read_lines(f / "metrics.jsonl") if r["step"] > 4] for f in (trained[0], tmp_path)]
    assert windows[0] == windows[1]
    assert len(windows[0]) >= 3
    assert (tmp_path / CODEBOOK).exists()


def test_it_is_scored_with_its_own_codes_alone(experiment, trained):
    folder, closing = trained
    found = loop.evaluate(experiment, workdir=folder, split="validation")
    assert found["val_loss"] == pytest.approx(closing["val_loss"])
    other = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, seed=1))
    with pytest.raises(UserError, match="is of other data"):
        loop.evaluate(other, workdir=folder, split="validation")


def test_its_language_model_has_the_tokenizer_of_its_text(experiment, trained):
    model = run_model.open_run(trained[0], experiment)
    assert model.tokenizer == InterleavedTokenizer(text=experiment.data.tokenizer, codes=16)
    assert model.config.vocabulary == experiment.data.ids().vocabulary == 320 + 2 + 16


def resumed(experiment, folder):
    """Metrics of the last steps, of a run in one piece and of one that was interrupted."""
    loop.train(experiment, workdir=folder / "whole")
    loop.train(dataclasses.replace(experiment, steps=4), workdir=folder / "halves")
    loop.train(experiment, workdir=folder / "halves", resume="must")
    names = ("whole", "halves")
    return [[r for r in read_lines(folder / name / "metrics.jsonl") if r["step"] > 4] for name in names]


def test_a_run_on_a_mixture_keeps_the_codebook_and_goes_on_to_the_same_bits(experiment, tmp_path):
    one = dataclasses.replace(experiment.data, caption="before")
    data = MixtureData(sources=((one, 1.0), (dataclasses.replace(one, caption="after"), 1.0)), batch_size=8)
    mixed = dataclasses.replace(experiment, data=data)
    whole, again = resumed(mixed, tmp_path)
    assert whole == again
    digest = one.build().codebook.digest()
    assert PatchCodebook.read(tmp_path / "whole" / CODEBOOK).digest() == digest
    assert run_model.open_run(tmp_path / "whole", mixed).tokenizer == InterleavedTokenizer(text=one.tokenizer, codes=16)
    assert len(read_pictures(tmp_path / "whole")) == 1


def test_a_model_of_modalities_trains_on_tokens_of_ones_own(experiment, tmp_path):
    random = np.random.default_rng(0)
    parts = [
        np.concatenate([random.integers(2, 60, 20), random.integers(60, 90, 9), random.integers(2, 60, 8), [1]])
        for _ in range(400)
    ]
    (tmp_path / "shards").mkdir()
    np.save(tmp_path / "shards" / "a.npy", np.concatenate(parts).astype(np.uint16))
    data = TokenShards(
        path=str(tmp_path / "shards"),
        ranges=(("text", 0, 60), ("image", 60, 90)),
        image_share=(0.1, 0.5),
        separator=1,
        length=64,
        batch_size=8,
        split=TextSplit(train=0.8, validation=0.2),
        folder=str(tmp_path / "kept"),
    )
    mlp = ModalityExperts(groups=(("text", 2), ("image", 2)))
    made = dataclasses.replace(experiment, data=data, model=dataclasses.replace(experiment.model, mlp=mlp))
    whole, again = resumed(made, tmp_path)
    assert whole == again
    model = run_model.open_run(tmp_path / "whole", made)
    assert model.tokenizer is None
    assert (model.config.vocabulary, model.config.mlp.capacities, model.tokens.eos) == (90, (57, 32), (1,))


def test_one_expert_a_modality_becomes_two_in_a_phase_and_noise_parts_them(experiment, tmp_path):
    """Data go on where they were, the optimizer and its schedule begin anew, and no metric is told twice."""
    one, two = (ModalityExperts(groups=(("text", n), ("image", n))) for n in (1, 2))
    noisy = dataclasses.replace(two, router=ExpertChoice(noise="gumbel"))
    phase = Phase(name="experts", steps=3, changes={"model.mlp": noisy}, surgery=Upcycle())
    model = dataclasses.replace(experiment.model, mlp=one)
    saved = Checkpoints(every=0, every_seconds=0)
    made = dataclasses.replace(experiment, model=model, steps=4, phases=(phase,), checkpoints=saved)
    summary = loop.train(made, workdir=tmp_path / "run")
    assert (summary["steps"], summary["examples"]) == (7, 7 * 8)
    assert [run.optimizer_from for run in phases.resolved(made)] == [0, 4]
    before, last = (open_run(tmp_path / "run", step).params for step in (4, 7))
    for name in ("text", "image"):
        path = f"layers/mlp/{name}/up"
        assert before[path].shape[1] == 1
        assert (last[path][:, 0] != last[path][:, 1]).any()
    measures = json.loads((tmp_path / "run" / "measures.json").read_text())
    names = [value["name"] for value in measures["values"]]
    assert len(names) == len(set(names))
