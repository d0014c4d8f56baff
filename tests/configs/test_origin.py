"""Experiments that begin with a folder or a run have its model and its tokenizer; what contradicts them is refused."""

import json

import pytest
from llama_cases import CASES, write_checkpoint

from scalejax.configs import origin, overrides, serialization
from scalejax.errors import UserError
from scalejax.models.llm import model_folder
from scalejax.train import architecture

SCALED = CASES["tied, scaled by 32"]
SETS = ("data.path=text.txt", "data.length=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of Hugging Face of another shape than that of any recipe."""
    path = tmp_path_factory.mktemp("theirs") / "model"
    write_checkpoint(path, SCALED)
    vocabulary = {chr(ord("a") + i): i for i in range(26)}
    content = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("recipe", ["llama-pretrain-1b", "llama-smoke"])
def test_config_and_tokenizer_of_a_folder_become_those_of_the_experiment(folder, recipe):
    resolved = origin.resolve(recipe, [*SETS, f"init={folder}"])
    experiment = resolved.experiment
    assert not list(architecture.differences(experiment.model, SCALED))
    assert str(experiment.data.tokenizer.path) == str(folder / "tokenizer.json")
    assert experiment.data.vocabulary in (None, 96)
    assert overrides.apply(serialization.configs.load(recipe), resolved.sets) == experiment
    (remark,) = resolved.remarks
    assert "model.rope_theta" not in remark  # 500,000 in both
    assert "model.norm_eps=1e-06 (1e-05)" in remark
    assert "data.tokenizer=" in remark


def test_a_model_folder_of_ours_says_the_same(folder, tmp_path):
    model_folder.convert(model_folder.open_folder(folder), tmp_path / "ours", to="model")
    resolved = origin.resolve("llama-smoke", [*SETS, f"init={tmp_path / 'ours'}"])
    assert not list(architecture.differences(resolved.experiment.model, SCALED))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.rope_theta=1e4", r"model.rope_theta is 500000.0 in init=.*, and --set says 10000.0. Leave it out"),
        ("model.norm_eps=1e-5", r"model.norm_eps is 1e-06 in init=.*, and --set says 1e-05"),
        ("model.window=8", r"model.window is None in init=.*, and --set says 8"),
        ("model.tie_embeddings=false", r"model.tie_embeddings is True in init=.*, and --set says False"),
        ("model.rope_scaling=none", r"model.rope_scaling is RopeScaling in init=.*, and --set says None"),
        ("model.rope_scaling.factor=8.0", r"model.rope_scaling.factor is 32.0 in init=.*, and --set says 8.0"),
        ("model.max_positions=64", r"model.max_positions is 16384 in init=.*, and --set says 64"),
        ("data.tokenizer=ByteTokenizer", r"data.tokenizer\.\.\.: ByteTokenizer is not the tokenizer of init=.*model"),
    ],
)
def test_a_setting_of_the_user_that_contradicts_is_refused_with_both_values(folder, setting, words):
    with pytest.raises(UserError, match=words):
        origin.resolve("llama-pretrain-1b", [*SETS, setting, f"init={folder}"])


def test_what_agrees_may_be_said_and_how_it_is_computed_is_free(folder):
    same = ["model.layers=2", "model.norm_eps=1e-6", f"data.tokenizer.path={folder}", "model.remat=none"]
    resolved = origin.resolve("llama-pretrain-1b", [*SETS, *same, f"init={folder}"])
    assert resolved.experiment.model.remat == "none"
    assert resolved.experiment.data.tokenizer.path == str(folder)


def test_a_part_that_no_setting_names_is_refused(folder, tmp_path):
    write_checkpoint(tmp_path / "mixtral", CASES["gqa"])
    content = json.loads((tmp_path / "mixtral" / "config.json").read_text())
    content |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    (tmp_path / "mixtral" / "config.json").write_text(json.dumps(content | {"num_experts_per_tok": 2}))
    with pytest.raises(UserError, match=r"model.mlp is Experts there and GatedMlp here, and no.*Take a recipe"):
        origin.resolve("llama-smoke", [*SETS, f"init={tmp_path / 'mixtral'}"])


def test_a_run_keeps_what_its_folder_brought_when_that_has_gone(folder, tmp_path):
    begun = folder.rename(tmp_path / "model")
    sets = [*SETS, f"init={begun}"]
    resolved = origin.resolve("llama-smoke", sets)
    record = serialization.record("llama-smoke", resolved.sets, resolved.experiment)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text(json.dumps({**record, **resolved.record}))
    begun.rename(folder)
    again = origin.resolve("llama-smoke", [*sets, "steps=9"], tmp_path / "run")
    assert again.experiment.model == resolved.experiment.model
    assert not again.remarks
    assert serialization.reload(record).model == resolved.experiment.model


@pytest.mark.parametrize(
    ("recipe", "settings", "clash"),
    [
        (
            "llama-smoke",
            ["model.rope_theta=7e4", "model.layers=3", "data.tokenizer=CharacterTokenizer"],
            "model.layers=2",
        ),
        ("wukong-smoke", ["model.activation=gelu", "model.layers=1"], "model.activation=relu"),
        ("unet-smoke", ["model.norm=batch"], "model.norm=instance"),
        ("gat-smoke", ["model.slope=0.1"], "model.slope=0.3"),
    ],
)
def test_the_model_of_a_run_is_that_of_a_run_that_begins_with_it(tmp_path, recipe, settings, clash):
    if "data.tokenizer=CharacterTokenizer" in settings:
        settings = [*settings, "data.tokenizer.alphabet=' abc'"]
    there = overrides.apply(serialization.configs.load(recipe), settings)
    (tmp_path / "checkpoints").mkdir()
    record = serialization.record(recipe, settings, there)
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    resolved = origin.resolve(recipe, [f"init={tmp_path}"])
    assert resolved.experiment.model == there.model
    assert getattr(resolved.experiment.data, "tokenizer", None) == getattr(there.data, "tokenizer", None)
    with pytest.raises(UserError, match=f"{clash.partition('=')[0]} is .* in init="):
        origin.resolve(recipe, [f"init={tmp_path}", clash])


def test_bytes_stay_bytes_where_a_folder_holds_them_for_others(tmp_path):
    from scalejax.data.text import tokenizer_files
    from scalejax.data.text.tokenizer import ByteTokenizer

    write_checkpoint(tmp_path / "theirs", CASES["gqa"])
    (tmp_path / "theirs" / "tokenizer.json").write_text(
        tokenizer_files.of(ByteTokenizer().build(), "bos")["tokenizer.json"]
    )
    experiment = origin.resolve("llama-smoke", [*SETS, f"init={tmp_path / 'theirs'}"]).experiment
    assert experiment.data.tokenizer == ByteTokenizer()
