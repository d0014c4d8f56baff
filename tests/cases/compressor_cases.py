"""What tests of compressors share: one of each kind, data with heavy tails, and a way there and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.parallel.compression.compressors import (
    Blocks,
    Fp16,
    Identity,
    LinearDithering,
    NaturalDithering,
    OneBit,
    RandomKEntries,
    TopKEntries,
)

KEY = jnp.array([20, 20], jnp.uint32)

EACH = {
    "identity": Identity(),
    "fp16": Fp16(),
    "onebit": OneBit(),
    "onebit-l2": OneBit(scale="l2"),
    "onebit-none": OneBit(scale="none"),
    "topk": TopKEntries(k=0.1),
    "topk-float16": TopKEntries(k=3, values="float16"),
    "randomk": RandomKEntries(k=5),
    "randomk-unscaled": RandomKEntries(k=0.2, scale="none", values="float16"),
    "linear": LinearDithering(levels=7),
    "linear-l2": LinearDithering(levels=20, scale="l2"),
    "natural": NaturalDithering(levels=7),
    "natural-l2": NaturalDithering(levels=10, scale="l2"),
    "int4": Blocks(format="int4:128"),
    "int8-nearest": Blocks(format="int8:128", rounding="ties_to_even"),
    "mx6": Blocks(format="bdr_mx6", scale_rule="rceil"),
}


def heavy(*shape, seed=0):
    """Student's t with three degrees of freedom, each row of a size of its own."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))).astype(np.float32)


def key_of(compressor, key=KEY):
    return None if compressor.traits.keys == "none" else key


@functools.partial(jax.jit, static_argnums=0)
def encoded(compressor, x, key=None):
    return compressor.encode(x, key)


@functools.partial(jax.jit, static_argnums=0)
def back(compressor, x, key=None):
    """What comes back of x."""
    return compressor.decode(compressor.encode(x, key), x.shape[1], key)


@functools.partial(jax.jit, static_argnums=(0, 2))
def many(compressor, x, count):
    """float32[count, rows, n]: what comes back under as many keys."""
    keys = jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 7, jnp.uint32)], axis=1)
    return jax.vmap(lambda key: compressor.decode(compressor.encode(x, key), x.shape[1], key))(keys)


def off(rounds, x):
    """How many standard errors the mean of rounds lies from x at most; float32 roundings are forgiven."""
    rounds = np.asarray(rounds, np.float64)
    error = rounds.std(axis=0, ddof=1) / np.sqrt(len(rounds))
    distance = abs(rounds.mean(axis=0) - x) - 1e-6 * abs(x).max(axis=-1, keepdims=True)
    return (np.maximum(distance, 0) / np.maximum(error, 1e-30)).max()
