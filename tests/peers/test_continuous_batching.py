"""Against continuous batching of transformers (`generate_batch`): requests of unequal lengths have the same tokens."""

import dataclasses

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; benchmarks/peers.sh installs it")

import jax
import numpy as np
import torch
import transformers
from llama_cases import GQA, tokens, write_checkpoint

from scalejax.inference import generate, loop
from scalejax.inference.requests import Request
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
IDS = tokens(GQA, 1, 400)[0].tolist()
PROMPTS = [IDS[a:b] for a, b in ((0, 5), (10, 60), (100, 101), (120, 140), (150, 281), (290, 299))]


def test_requests_in_fewer_slots_have_the_tokens_of_generate_batch(tmp_path):
    write_checkpoint(tmp_path / "theirs", dataclasses.replace(GQA, max_positions=256))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32, attn_implementation="sdpa"
    )
    how = transformers.GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)
    # Sizes are read from here alone; without them its cache takes 60 % of the machine's memory.
    sizes = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=32, max_batch_tokens=64)
    theirs = model.generate_batch(inputs=PROMPTS, generation_config=how, continuous_batching_config=sizes)
    want = [theirs[f"req_{number}"].generated_tokens for number in range(len(PROMPTS))]

    mesh = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    engine = generate.load(model_folder.open_folder(tmp_path / "theirs"), mesh)
    on = loop.make_loop(engine, slots=3, kv_tokens=512, page=16)
    for prompt in PROMPTS:
        on.submit(Request(prompt=tuple(prompt), max_tokens=12))
    found = [[] for _ in PROMPTS]
    while on.busy:
        for chunk in on.step():
            found[chunk.request] += chunk.tokens
    np.testing.assert_array_equal(found, want)
