"""transformers' Llama and ours: logits, packed documents, caches, generated tokens, and checkpoints both ways."""

import json
import pathlib
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; benchmarks/peers.sh installs it")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from llama_cases import CASES, GQA, model, scenarios, tensors, tokens
from paged_cases import Rows

from scalejax.inference import generate
from scalejax.models.llm import model_folder, safetensors
from scalejax.models.llm.llama3 import rope
from scalejax.numerics.dtypes import FLOAT32, Dtypes
from scalejax.parallel.mesh import MeshShape, make_mesh

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models" / "llm" / "golden"))
from make import logits, peer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def ours(config, name, dtypes=FLOAT32):
    ids, segments, positions = scenarios(config)[name]
    return np.asarray(jax.jit(lambda m, *inputs: m(*inputs))(model(config, dtypes=dtypes), ids, positions, segments))


@pytest.mark.parametrize("name", scenarios(GQA))
@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case, name):
    config = CASES[case]
    want = logits(peer(config, tensors(config)), *scenarios(config)[name])
    np.testing.assert_allclose(ours(config, name), want, atol=1e-4, rtol=0)


def test_golden_logits_are_those_of_this_version():
    golden = np.load(pathlib.Path(__file__).parents[1] / "models" / "llm" / "golden" / "logits.npz")
    for case, config in CASES.items():
        made = peer(config, tensors(config))
        for name, inputs in scenarios(config).items():
            np.testing.assert_allclose(golden[f"{case}: {name}"], logits(made, *inputs), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_logits_agree(case):
    """The mean divergence of the two, each in bfloat16, against the 0.015 that MaxText asks of a conversion."""
    config = CASES[case]
    made = peer(config, tensors(config), torch.bfloat16)
    for name, inputs in scenarios(config).items():
        got = jax.nn.log_softmax(ours(config, name, dtypes=Dtypes(jnp.bfloat16, jnp.bfloat16)))
        want = jax.nn.log_softmax(logits(made, *inputs))
        divergence = float((jnp.exp(want) * (want - got)).sum(-1).mean())
        assert divergence <= 0.015, (name, divergence)


@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_agree_step_by_step(case):
    config = CASES[case]
    ids = tokens(config, 1, 12)
    made, llama = peer(config, tensors(config)), model(config)
    extend, read = jax.jit(lambda m, *rest: m.extend(*rest)), Rows(1, 16)
    got, cache = extend(llama, ids[:, :7], read.reading([7], 7), llama.cache(read.pages))
    with torch.no_grad():
        out = made(torch.from_numpy(ids[:, :7]).long(), use_cache=True)
        for at in range(7, 12):
            np.testing.assert_allclose(got, out.logits[:, -1].numpy(), atol=1e-4, rtol=0)
            token = ids[:, at : at + 1]
            out = made(torch.from_numpy(token).long(), past_key_values=out.past_key_values, use_cache=True)
            got, cache = extend(llama, token, read.reading([1], 1), cache)
    np.testing.assert_allclose(got, out.logits[:, -1].numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", [None, rope.RopeScaling(), rope.RopeScaling(factor=32.0)])
@pytest.mark.parametrize("width", [64, 128])
def test_rotary_frequencies_are_equal_to_the_bit(width, scaling):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = {"rope_type": "default", "rope_theta": 5e5}
    if scaling is not None:
        given = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": scaling.factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = transformers.LlamaConfig(
        hidden_size=2 * width, num_attention_heads=2, rope_parameters=given, max_position_embeddings=131_072
    )
    np.testing.assert_array_equal(rope.frequencies(width, 5e5, scaling), LlamaRotaryEmbedding(config).inv_freq.numpy())


# Folders.


@pytest.fixture(params=[(case, dtype) for case in CASES for dtype in ("float32", "bfloat16")], ids=str)
def saved(request, tmp_path):
    """(config, the model, its folder as transformers writes it, in shards)."""
    case, dtype = request.param
    config = CASES[case]
    made = peer(config, tensors(config)).to(getattr(torch, dtype))
    made.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return config, made, tmp_path / "theirs"


def test_folders_of_transformers_come_back_as_they_were(saved, tmp_path):
    config, made, folder = saved
    opened = model_folder.open_folder(folder)
    assert opened.config == config
    assert len(opened.shards) > 1
    model_folder.convert(opened, tmp_path / "ours", to="model")
    model_folder.convert(model_folder.open_folder(tmp_path / "ours"), tmp_path / "back", to="huggingface")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    want = made.state_dict()
    assert again.state_dict().keys() == want.keys()
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == want[name].dtype
        assert torch.equal(tensor, want[name]), name
    skipped = {"_name_or_path", "transformers_version"}
    before, after = ({k: v for k, v in m.config.to_dict().items() if k not in skipped} for m in (made, again))
    assert after == before
    stored = {name: tensor.read() for name, tensor in safetensors.open_folder(tmp_path / "back").items()}
    for name, tensor in safetensors.open_folder(folder).items():
        assert stored[name].tobytes() == tensor.read().tobytes(), name


@pytest.mark.parametrize("schema", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", ["gqa", "wide heads, scaled"])
def test_either_schema_of_what_is_written_is_enough(tmp_path, case, schema):
    config = CASES[case]
    peer(config, tensors(config)).save_pretrained(tmp_path / "theirs")
    model_folder.convert(model_folder.open_folder(tmp_path / "theirs"), tmp_path / "ours", to="model")
    model_folder.convert(model_folder.open_folder(tmp_path / "ours"), tmp_path / "back", to="huggingface")
    path = tmp_path / "back" / "config.json"
    content = json.loads(path.read_text())
    dropped = {"rope_parameters": ("rope_scaling", "rope_theta"), "rope_scaling": ("rope_parameters",)}[schema]
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in dropped}))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    name = "beyond 8192"
    np.testing.assert_allclose(logits(again, *scenarios(config)[name]), ours(config, name), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_agree(tmp_path, case):
    config = CASES[case]
    made = peer(config, tensors(config))
    made.save_pretrained(tmp_path / "theirs")
    prompts = [tokens(config, 1, 20)[0, :n].tolist() for n in (20, 3, 11)]
    engine = generate.load(model_folder.open_folder(tmp_path / "theirs"), make_mesh(MeshShape(), jax.devices()[:1]))
    got = engine.generate(prompts, max_tokens=24)
    for prompt, continuation in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = made.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        assert continuation.tokens == tuple(out[0, len(prompt) :].tolist())
