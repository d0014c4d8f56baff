"""transformers' Llama and ours: logits, packed documents, caches, generated tokens, and checkpoints both ways."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; benchmarks/peers.sh installs it")

import jax
import numpy as np
import torch
import transformers
from llama_cases import CASES, model, tensors, tokens

from scalejax.models.llm.llama3 import huggingface
from scalejax.models.llm.llama3.huggingface import SpecialTokens

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

BEYOND = 10_000  # a position beyond the 8,192 of the first release


def peer(config, weights=None, dtype=torch.float32):
    content = huggingface.write_config(config, SpecialTokens(bos=1, eos=(2,)), "float32")
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(content)).to(dtype)
    weights = {name: torch.from_numpy(w) for name, w in (weights or tensors(config)).items()}
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    made.load_state_dict(weights)
    return made.to(dtype).eval()


def peer_logits(made, ids, **more):
    with torch.no_grad():
        return made(torch.from_numpy(ids).long(), **more).logits.float().numpy()


def ours(config, ids, segments=None, positions=None, **dtypes):
    segments = np.ones_like(ids) if segments is None else segments
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape) if positions is None else positions
    return np.asarray(jax.jit(lambda m, *a: m(*a))(model(config, **dtypes), ids, positions, segments))


@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case):
    config = CASES[case]
    ids = tokens(config, 2, 40)
    np.testing.assert_allclose(ours(config, ids), peer_logits(peer(config), ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_beyond_8192_positions(case):
    config = CASES[case]
    ids = tokens(config, 1, 24)
    positions = (BEYOND + np.arange(24, dtype=np.int32))[None]
    theirs = peer_logits(peer(config), ids, position_ids=torch.from_numpy(positions).long())
    np.testing.assert_allclose(ours(config, ids, positions=positions), theirs, atol=1e-4, rtol=0)
