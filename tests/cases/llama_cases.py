"""Small Llamas that tests share: shapes, weights that any library can make again, and checkpoints of them."""

import dataclasses
import json
import math
import zlib

import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax.models.llm import families, llama3, safetensors
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3 import huggingface
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.state import ModelShape

GQA = llama3.LlamaConfig(
    layers=2, dim=32, ffn_dim=48, heads=8, kv_heads=2, vocabulary=96, max_positions=16_384, rope_theta=500_000.0
)
# Long wavelengths begin early here, so that all three ranges of the scaling are met within a head of 16.
SCALED = llama3.RopeScaling(factor=8.0, original_positions=256)
CASES = {
    "gqa": GQA,
    "mha": dataclasses.replace(GQA, kv_heads=8, rope_theta=10_000.0),
    "mqa": dataclasses.replace(GQA, kv_heads=1, tie_embeddings=True),
    "wide heads, scaled": dataclasses.replace(GQA, heads=4, head_dim=16, rope_scaling=SCALED),
    "tied, scaled by 32": dataclasses.replace(
        GQA, tie_embeddings=True, rope_scaling=llama3.RopeScaling(factor=32.0, original_positions=64), norm_eps=1e-6
    ),
}
MISTRAL = dataclasses.replace(GQA, window=4)
MIXTRAL = dataclasses.replace(GQA, mlp=Experts(count=4, router=TopK(k=2)))
F32 = Dtypes()
F64 = Dtypes(jnp.float64, jnp.float64)


def tensors(config):
    """{name of Hugging Face: float32 array}, by integer arithmetic alone: the same bits everywhere."""
    family = families.of(config)
    sizes, made = family.sizes(config), {}
    for entry in family.entries(config):
        shape = entry.tensor_shape(sizes)
        for name, _, _ in entry.tensors(config.layers, sizes):
            uniform = _uniform(name, math.prod(shape)).reshape(shape)
            # Norms vary around 1; matrices by their inputs, large enough that attention is far from even.
            scale = 0.3 if len(shape) == 1 else 1.7 * (3.0 / shape[-1]) ** 0.5
            made[name] = (uniform * scale + (1.0 if len(shape) == 1 else 0.0)).astype(np.float32)
    return made


def tokens(config, *shape):
    """int32[shape] in [0, V)."""
    made = (_uniform("tokens", math.prod(shape)) + 1) / 2 * config.vocabulary
    return np.minimum(made.astype(np.int32), config.vocabulary - 1).reshape(shape)


def _uniform(name, count):
    """float64[count] in [-1, 1): the finaliser of MurmurHash3 over a counter."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode())) * np.uint64(2**31)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(33))).astype(np.float64) / 2**63 - 1


def parameters(config, weights):
    """The same by our paths."""
    family = families.of(config)
    sizes, made = family.sizes(config), {}
    for entry in family.entries(config):
        read = [entry.from_tensor(weights[name], sizes) for name, _, _ in entry.tensors(config.layers, sizes)]
        made[entry.path] = np.stack(read).reshape((config.layers,) * entry.stacked + entry.shape(sizes))
    return made


def model(config, weights=None, *, dtypes=F32):
    """A Llama with these weights (names of Hugging Face)."""
    shape = ModelShape.of(nnx.eval_shape(lambda: llama3.Llama(config, nnx.Rngs(0), dtypes)))
    params = parameters(config, tensors(config) if weights is None else weights)
    return shape.merge({name: jnp.asarray(params[name], dtypes.params) for name in shape.names})


def rows(*lengths, positions="restart"):
    """(segment_ids, positions) int32[1, S] of documents of these lengths in one row; "restart" or "run through"."""
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    runs = np.concatenate([np.arange(n) for n in lengths]) if positions == "restart" else np.arange(sum(lengths))
    return segments[None].astype(np.int32), runs[None].astype(np.int32)


def write_checkpoint(folder, config, weights=None, *, dtype="float32", shard_bytes=safetensors.SHARD_BYTES, **more):
    """A folder as Hugging Face would have it; `more` goes into config.json. Returns the weights as written."""
    weights = tensors(config) if weights is None else weights
    weights = {name: array.astype(jnp.dtype(dtype)) for name, array in weights.items()}
    folder.mkdir(exist_ok=True)
    plan = tuple(safetensors.Written(name, array.dtype, array.shape) for name, array in weights.items())
    safetensors.write_folder(folder, plan, weights.__getitem__, shard_bytes=shard_bytes)
    special = huggingface.SpecialTokens(bos=1, eos=(2,))
    content = families.of(config).write_config(config, special, dtype) | more
    (folder / "config.json").write_text(json.dumps(content))
    return weights


def scenarios(config):
    """{name: (tokens, segment_ids, positions)}: what golden logits and peers are compared on."""
    plain, packed, restart = tokens(config, 2, 12), tokens(config, 1, 16), rows(5, 7, 4)
    along = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    return {
        "plain": (plain, np.ones_like(plain), along),
        "beyond 8192": (plain[:1, :8], np.ones_like(plain[:1, :8]), 10_000 + along[:1, :8]),
        "packed, positions restart": (packed, *restart),
        "packed, positions run through": (packed, restart[0], rows(5, 7, 4, positions="run through")[1]),
    }
