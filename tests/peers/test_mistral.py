"""transformers' Mistral and ours: windows, caches, generated tokens, and folders both ways."""

import dataclasses
import pathlib
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; benchmarks/peers.sh installs it")

import jax
import numpy as np
import torch
import transformers
from llama_cases import F64, GQA, MISTRAL, MIXTRAL, model, scenarios, tokens, write_checkpoint

from scalejax.inference import generate
from scalejax.models.llm import model_folder
from scalejax.numerics.dtypes import FLOAT32
from scalejax.parallel.mesh import MeshShape, make_mesh

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models" / "llm" / "golden"))
from make import mistral, windowed_logits

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
WIDE = dataclasses.replace(MISTRAL, window=7, heads=4, head_dim=16)
WINDOWED_MIXTRAL = dataclasses.replace(MIXTRAL, window=4)


def ours(config, name, dtypes=FLOAT32):
    ids, segments, positions = scenarios(config)[name]
    run = jax.jit(lambda m, *inputs: m(*inputs))
    return np.asarray(run(model(config, dtypes=dtypes), ids, positions, segments))


@pytest.mark.parametrize("name", ["plain", "beyond 8192"])
@pytest.mark.parametrize(
    ("config", "family"),
    [
        (MISTRAL, transformers.MistralForCausalLM),
        (WIDE, transformers.MistralForCausalLM),
        (dataclasses.replace(MISTRAL, window=1), transformers.MistralForCausalLM),
        (WINDOWED_MIXTRAL, transformers.MixtralForCausalLM),
    ],
    ids=["window 4", "wide heads, window 7", "window 1", "mixtral"],
)
def test_logits_agree(config, family, name):
    ids, _, positions = scenarios(config)[name]
    want = windowed_logits(mistral(config=config, family=family), ids, positions)
    np.testing.assert_allclose(ours(config, name), want, atol=1e-4, rtol=0)
    assert np.abs(ours(dataclasses.replace(config, window=None), name) - want).max() > 0.1


def test_logits_agree_in_float64(x64):
    """As far as its norms and rotations allow, which are float32 always."""
    ids, _, positions = scenarios(MISTRAL)["plain"]
    want = windowed_logits(mistral(torch.float64), ids, positions)
    assert want.dtype == np.float64
    np.testing.assert_allclose(ours(MISTRAL, "plain", F64), want, atol=1e-5, rtol=0)


def test_golden_logits_are_those_of_this_version():
    golden = np.load(pathlib.Path(__file__).parents[1] / "models" / "llm" / "golden" / "mistral.npz")
    made = mistral()
    for name in ("plain", "beyond 8192"):
        ids, _, positions = scenarios(MISTRAL)[name]
        np.testing.assert_allclose(golden[name], windowed_logits(made, ids, positions), atol=1e-5)


@pytest.mark.parametrize("window", [4, None])
def test_what_it_saves_is_read_and_what_is_written_it_loads(tmp_path, window):
    made = mistral()
    made.config.sliding_window = window
    made.save_pretrained(tmp_path / "theirs")
    opened = model_folder.open_folder(tmp_path / "theirs")
    assert opened.config == dataclasses.replace(GQA, window=window)
    assert not opened.remarks
    model_folder.convert(opened, tmp_path / "ours", to="model")
    model_folder.convert(model_folder.open_folder(tmp_path / "ours"), tmp_path / "back", to="huggingface")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    # Without a window the two families are one.
    assert type(again).__name__ == ("LlamaForCausalLM" if window is None else "MistralForCausalLM")
    assert getattr(again.config, "sliding_window", None) == window
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_config_that_says_no_window_has_that_of_transformers(tmp_path):
    assert transformers.MistralConfig().sliding_window == 4096
    assert transformers.MistralConfig().num_key_value_heads == 8


def test_greedy_tokens_agree(tmp_path):
    write_checkpoint(tmp_path / "theirs", MISTRAL)
    made = mistral()
    prompts = [tokens(MISTRAL, 1, 20)[0, :n].tolist() for n in (20, 3, 11)]
    engine = generate.load(model_folder.open_folder(tmp_path / "theirs"), make_mesh(MeshShape(), jax.devices()[:1]))
    got = engine.generate(prompts, max_tokens=24)
    for prompt, continuation in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = made.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        assert continuation.tokens == tuple(out[0, len(prompt) :].tolist())
