"""Makes logits.npz: what transformers computes for the small Llamas of tests/cases/llama_cases.py, in float32.

Needs transformers and torch (benchmarks/peers.sh); run from the root of a checkout:

    PYTHONPATH=.:tests/cases python tests/models/llm/golden/make.py
"""

import pathlib

import numpy as np
import torch
import transformers
from llama_cases import CASES, scenarios, tensors

from scalejax.models.llm.llama3 import huggingface
from scalejax.models.llm.llama3.huggingface import SpecialTokens


def peer(config, weights, dtype=torch.float32):
    """transformers' model with these weights."""
    content = huggingface.write_config(config, SpecialTokens(bos=1, eos=(2,)), "float32")
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(content)).to(dtype)
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    if config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state)
    return made.eval()


def logits(made, ids, segments, positions):
    """float32[B, S, V]; documents are told apart by an explicit mask."""
    dtype = next(made.parameters()).dtype
    seen = np.tril(np.ones((ids.shape[1],) * 2, bool)) & (segments[:, :, None] == segments[:, None, :])
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(torch.from_numpy(~seen), torch.finfo(dtype).min)[:, None]
    with torch.no_grad():
        out = made(
            torch.from_numpy(ids).long(), attention_mask=mask, position_ids=torch.from_numpy(positions.copy()).long()
        )
    return out.logits.float().numpy()


if __name__ == "__main__":
    found = {}
    for case, config in CASES.items():
        made = peer(config, tensors(config))
        for name, inputs in scenarios(config).items():
            found[f"{case}: {name}"] = logits(made, *inputs)
    path = pathlib.Path(__file__).parent / "logits.npz"
    np.savez_compressed(path, transformers=np.array(transformers.__version__), **found)
    print(f"{path}: {path.stat().st_size:,} bytes, transformers {transformers.__version__}")
