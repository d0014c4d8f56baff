"""transformers' Mixtral and ours: logits in float32 and float64, golden files, and folders both ways."""

import pathlib
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; benchmarks/peers.sh installs it")

import jax
import numpy as np
import torch
import transformers
from llama_cases import F64, MIXTRAL, model, scenarios, tensors, write_checkpoint

from scalejax.models.llm import model_folder
from scalejax.numerics.dtypes import FLOAT32

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models" / "llm" / "golden"))
from make import balance, logits, mixtral

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def ours(name, dtypes=FLOAT32):
    ids, segments, positions = scenarios(MIXTRAL)[name]
    run = jax.jit(lambda m, *inputs: m(*inputs))
    return np.asarray(run(model(MIXTRAL, dtypes=dtypes), ids, positions, segments))


@pytest.mark.parametrize("name", scenarios(MIXTRAL))
def test_logits_agree(name):
    np.testing.assert_allclose(ours(name), logits(mixtral(), *scenarios(MIXTRAL)[name]), atol=1e-4, rtol=0)


def test_logits_agree_in_float64(x64):
    """As far as its norms, its rotations and the softmax of its router allow, which are float32 always."""
    made = mixtral(torch.float64)
    ids = scenarios(MIXTRAL)["plain"][0]
    with torch.no_grad():
        want = made(torch.from_numpy(ids).long()).logits.numpy()
    assert want.dtype == np.float64
    np.testing.assert_allclose(ours("plain", F64), want, atol=1e-5, rtol=0)


def test_golden_files_are_those_of_this_version():
    golden = np.load(pathlib.Path(__file__).parents[1] / "models" / "llm" / "golden" / "mixtral.npz")
    made = mixtral()
    for name, inputs in scenarios(MIXTRAL).items():
        np.testing.assert_allclose(golden[name], logits(made, *inputs), atol=1e-5)
    np.testing.assert_allclose(golden["balance"], balance(MIXTRAL, scenarios(MIXTRAL)["plain"][0]), rtol=1e-6)


@pytest.mark.parametrize("written", ["separate", "fused"])
@pytest.mark.parametrize("original", [True, False], ids=["for each expert", "fused"])
def test_what_it_saves_is_read_and_what_is_written_it_loads(tmp_path, original, written):
    made = mixtral()
    made.save_pretrained(tmp_path / "theirs", save_original_format=original)
    opened = model_folder.open_folder(tmp_path / "theirs")
    model_folder.convert(opened, tmp_path / "again", to="huggingface", experts=written)
    again, weights = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "again"), tensors(MIXTRAL)
    state = again.state_dict()
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    np.testing.assert_array_equal(
        opened.source.read("layers/mlp/gate", 0, None)[2],
        weights["model.layers.0.block_sparse_moe.experts.2.w1.weight"].T,
    )
    ids = scenarios(MIXTRAL)["plain"]
    np.testing.assert_allclose(logits(again, *ids), logits(made, *ids), atol=1e-5)  # other products of experts


def test_a_folder_of_ours_is_theirs(tmp_path):
    write_checkpoint(tmp_path / "ours", MIXTRAL)
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "ours")
    ids = scenarios(MIXTRAL)["plain"]
    np.testing.assert_allclose(ours("plain"), logits(theirs, *ids), atol=1e-4, rtol=0)
