"""Makes logits.npz, mistral.npz and mixtral.npz: what transformers computes for small models.

Those of tests/cases/llama_cases.py, in float32; the losses of Mixtral's router besides.

Needs transformers and torch (benchmarks/peers.sh); run from the root of a checkout:

    PYTHONPATH=.:tests/cases python tests/models/llm/golden/make.py
"""

import pathlib
import tempfile

import numpy as np
import torch
import transformers
from llama_cases import CASES, MISTRAL, MIXTRAL, scenarios, tensors, write_checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

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


def mixtral(dtype=torch.float32, config=MIXTRAL):
    """transformers' Mixtral with the weights of ours, read from a folder of one tensor for each expert."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(pathlib.Path(folder), config)
        options = {"dtype": dtype, "experts_implementation": "eager"}  # its grouped products have no float64
        return transformers.MixtralForCausalLM.from_pretrained(folder, **options).eval()


def mistral(dtype=torch.float32, config=MISTRAL, family=transformers.MistralForCausalLM):
    """transformers' Mistral with the weights of ours, read from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(pathlib.Path(folder), config)
        return family.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def windowed_logits(made, ids, positions):
    """float32[B, S, V] of rows that are a document each; the window is transformers' own."""
    with torch.no_grad():
        return made(torch.from_numpy(ids).long(), position_ids=torch.from_numpy(positions.copy()).long()).logits.numpy()


def balance(config, ids):
    """The balance loss of the first layer of a Mixtral, without its factor."""
    made = mixtral(config=config)
    with torch.no_grad():
        first = made(torch.from_numpy(ids).long(), output_router_logits=True).router_logits[0]
    return float(load_balancing_loss_func((first,), config.mlp.count, config.mlp.router.k))


if __name__ == "__main__":
    found = {}
    for case, config in CASES.items():
        made = peer(config, tensors(config))
        for name, inputs in scenarios(config).items():
            found[f"{case}: {name}"] = logits(made, *inputs)
    path = pathlib.Path(__file__).parent / "logits.npz"
    np.savez_compressed(path, transformers=np.array(transformers.__version__), **found)
    print(f"{path}: {path.stat().st_size:,} bytes, transformers {transformers.__version__}")

    made, found = mistral(), {}
    for name in ("plain", "beyond 8192"):
        ids, _, positions = scenarios(MISTRAL)[name]
        found[name] = windowed_logits(made, ids, positions)
    path = path.with_name("mistral.npz")
    np.savez_compressed(path, transformers=np.array(transformers.__version__), **found)
    print(f"{path}: {path.stat().st_size:,} bytes")

    made, found = mixtral(), {}
    for name, inputs in scenarios(MIXTRAL).items():
        found[name] = logits(made, *inputs)
    found["balance"] = np.array(balance(MIXTRAL, scenarios(MIXTRAL)["plain"][0]))
    path = path.with_name("mixtral.npz")
    np.savez_compressed(path, transformers=np.array(transformers.__version__), **found)
    print(f"{path}: {path.stat().st_size:,} bytes")
