"""Every module against a literal NumPy form in float64, forward and backward."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from scalejax import nn
from scalejax.errors import UserError
from scalejax.models.recsys import interactions
from scalejax.models.recsys.interactions import LayerInputs

F64 = nn.Dtypes(jnp.float64, jnp.float64)
N, D, DENSE, OUT = 5, 4, 2, 3

MODULES = {
    "linear": interactions.LinearCompression(outputs=OUT),
    "plain FM": interactions.FactorizationMachine(outputs=OUT, kind="plain", hidden=(6,)),
    "low-rank FM": interactions.FactorizationMachine(outputs=OUT, rank=2, hidden=(6,), normalization="none"),
    "attentive FM": interactions.FactorizationMachine(
        outputs=OUT, kind="attentive", rank=2, hidden=(6,), attention_rows=2, attention_hidden=(5,)
    ),
    "products of all pairs": interactions.DotProduct(outputs=OUT, hidden=(6,)),
    "products of mixed pairs": interactions.DotProduct(outputs=OUT, mixed=3, hidden=(6,)),
    "cross": interactions.FeatureCross(outputs=OUT),
    "low-rank cross": interactions.FeatureCross(outputs=OUT, rank=2),
    "second moment": interactions.SecondMoment(outputs=OUT),
    "self-attention": interactions.SelfAttention(outputs=OUT, heads=2, hidden=7),
    "convolution": interactions.Convolution(outputs=OUT, channels=2, activation="relu"),
    "MLP": interactions.MlpExperts(outputs=OUT, hidden=(6,)),
    "experts": interactions.MlpExperts(outputs=OUT, experts=3, hidden=(6,)),
}


def literal_mlp(p, x):
    for i in range(len(p["layers"])):
        x = x @ p["layers"][i]["kernel"] + p["layers"][i]["bias"]
        x = np.maximum(x, 0) if i < len(p["layers"]) - 1 else x
    return x


def literal_norm(p, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def literal_fm(config, p, x, dense):
    del dense
    f = x @ x.T
    if config.kind == "lowrank":
        f = f @ p["fm"]["y"]
    if config.kind == "attentive":
        y = literal_mlp(p["fm"]["mlp"], (p["fm"]["compress"]["weight"] @ x).reshape(-1))
        f = f @ (y.reshape(N, config.rank) / math.sqrt(N))
    f = literal_norm(p["fm_norm"], f.reshape(-1)) if "fm_norm" in p else f.reshape(-1)
    return literal_mlp(p["mlp"], f).reshape(-1, D)


def literal_products(config, p, x, dense):
    z = x if config.mixed is None else p["mix"]["weight"] @ x
    pairs = [z[i] @ z[j] for i in range(len(z)) for j in range(i + 1, len(z))]
    return literal_mlp(p["mlp"], np.array([*dense.reshape(-1), *pairs])).reshape(-1, D)


def literal_cross(config, p, x, dense):
    del dense
    inner = x.reshape(-1) if config.rank is None else x.reshape(-1) @ p["down"]
    crossed = x.reshape(-1) * (inner @ p["affine"]["kernel"] + p["affine"]["bias"])
    return p["mix"]["weight"] @ crossed.reshape(N, D)


def literal_moments(config, p, x, dense):
    del config, dense
    return p["mix"]["weight"] @ (x.T @ x / N) + p["bias"]


def literal_attention(config, p, x, dense):
    del dense
    wide = D // config.heads
    qkv = (x @ p["qkv"]).reshape(N, config.heads, 3, wide)
    seen = np.zeros((N, D))
    for head in range(config.heads):
        q, k, v = (qkv[:, head, part] for part in range(3))
        for token in range(N):
            shares = softmax(np.array([q[token] @ k[other] for other in range(N)]) / math.sqrt(wide))
            seen[token, head * wide : (head + 1) * wide] = shares @ v
    x = literal_norm(p["norms"][0], x + seen @ p["out"]["kernel"] + p["out"]["bias"])
    x = literal_norm(p["norms"][1], x + np.stack([literal_mlp(p["mlp"], token) for token in x]))
    return p["mix"]["weight"] @ x


def literal_convolution(config, p, x, dense):
    del dense
    padded, filters = np.pad(x, 1), p["conv"]["kernel"]
    image = np.zeros((config.channels, N, D))
    for channel in range(config.channels):
        for i in range(N):
            for j in range(D):
                image[channel, i, j] = (padded[i : i + 3, j : j + 3] * filters[:, :, 0, channel]).sum()
        image[channel] += p["conv"]["bias"][channel]
    return p["mix"]["weight"] @ np.maximum(image, 0).reshape(-1, D)


def literal_experts(config, p, x, dense):
    del dense
    results = [literal_mlp(p["mlps"][i], x.reshape(-1)).reshape(-1, D) for i in range(config.experts)]
    if config.experts == 1:
        return results[0]
    shares = softmax(x.reshape(-1) @ p["gate"]["kernel"] + p["gate"]["bias"])
    return sum(share * result for share, result in zip(shares, results, strict=True))


LITERAL = {
    interactions.LinearCompression: lambda config, p, x, dense: p["weight"] @ x,
    interactions.FactorizationMachine: literal_fm,
    interactions.DotProduct: literal_products,
    interactions.FeatureCross: literal_cross,
    interactions.SecondMoment: literal_moments,
    interactions.SelfAttention: literal_attention,
    interactions.Convolution: literal_convolution,
    interactions.MlpExperts: literal_experts,
}


def build(config, randomised):
    return randomised(config.build(LayerInputs(n=N, d=D, dense=DENSE), rngs=nnx.Rngs(0), dtypes=F64))


def data(examples=3):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(N, examples, D))), jnp.asarray(rng.normal(size=(DENSE, examples, D)))


@pytest.mark.default_cases("experts")
@pytest.mark.parametrize("name", MODULES)
def test_is_its_literal_form(name, randomised, numpy_parameters, x64):
    config = MODULES[name]
    module = build(config, randomised)
    x, dense = data()
    got = np.asarray(nnx.jit(lambda module, x, dense: module(x, dense))(module, x, dense))
    assert got.shape == (OUT, 3, D)
    for b in range(3):
        want = LITERAL[type(config)](config, numpy_parameters(module), np.asarray(x[:, b]), np.asarray(dense[:, b]))
        np.testing.assert_allclose(got[:, b], want, rtol=1e-11, atol=1e-11)  # round-off of some 10^2 sums


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_finite_differences(name, randomised, x64):
    graph, state = nnx.split(build(MODULES[name], randomised))
    x, dense = data(2)
    of = jax.jit(lambda state, x: nnx.merge(graph, state)(x, dense))
    check_grads(of, (state, x), order=1, modes=("rev",), eps=1e-6)


def permuted(module, order):
    """The module with its mixing of vectors in another order."""
    weight = module.weight if isinstance(module, interactions.Mix) else module.mix.weight
    channels = weight.shape[1] // N
    columns = np.concatenate([channel * N + order for channel in range(channels)])
    weight[...] = weight[...][:, columns]
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("name", "commutes"), [("linear", True), ("self-attention", True), ("convolution", False)])
def test_an_order_of_vectors_matters_to_the_convolution_alone(name, commutes, randomised, x64):
    module, (x, dense) = build(MODULES[name], randomised), data()
    before, order = np.asarray(module(x, dense)), np.array([2, 0, 4, 1, 3])
    after = np.asarray(permuted(module, order)(x[order], dense))
    assert np.allclose(after, before, rtol=1e-11, atol=1e-11) == commutes


@pytest.mark.slow
def test_every_expert_drops_by_a_key_of_its_own(randomised, x64):
    config = dataclasses.replace(MODULES["experts"], dropout=0.5)
    module, (x, dense) = build(config, randomised), data()
    for mlp in module.mlps[1:]:
        for ours, first in zip(mlp.layers, module.mlps[0].layers, strict=True):
            ours.kernel[...], ours.bias[...] = first.kernel[...], first.bias[...]
    module.gate.kernel[...] = jnp.zeros_like(module.gate.kernel[...])
    module.gate.bias[...] = jnp.zeros_like(module.gate.bias[...])
    equal = dataclasses.replace(config, experts=1)
    alone = build(equal, randomised)
    for ours, first in zip(alone.mlps[0].layers, module.mlps[0].layers, strict=True):
        ours.kernel[...], ours.bias[...] = first.kernel[...], first.bias[...]
    np.testing.assert_allclose(module(x, dense), alone(x, dense), rtol=1e-12, atol=1e-12)
    key = jax.random.key(0)
    assert not np.allclose(module(x, dense, key=key), alone(x, dense, key=key))
    np.testing.assert_array_equal(module(x, dense, key=key), module(x, dense, key=key))


@pytest.mark.parametrize("name", ["FactorizationMachine", "DotProduct", "SelfAttention", "MlpExperts"])
def test_activations_and_dropout_are_looked_at_before_anything_is_built(name):
    make = getattr(interactions, name)
    with pytest.raises(UserError, match=f"{name}: activation must be one of relu, gelu, silu, linear; got 'tanhh'"):
        make(outputs=1, activation="tanhh")
    for rate in (-0.1, 1.0, 2.0, math.nan):
        with pytest.raises(UserError, match=rf"{name}: dropout must lie in \[0, 1\); got {rate}"):
            make(outputs=1, dropout=rate)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: interactions.LinearCompression(outputs=0), "LinearCompression: outputs must be .* at least 1; got 0"),
        (lambda: interactions.FactorizationMachine(outputs=1, kind="full"), "kind must be one of"),
        (lambda: interactions.FactorizationMachine(outputs=1, rank=0), "rank must be .* at least 1; got 0"),
        (lambda: interactions.DotProduct(outputs=1, mixed=1), "mixed must be .* at least 2; got 1"),
        (
            lambda: interactions.DotProduct(outputs=1).build(LayerInputs(n=1, d=D), rngs=nnx.Rngs(0), dtypes=F64),
            "DotProduct: .* needs two vectors or dense features; got 1 and no dense ones. Give the layer",
        ),
        (lambda: interactions.FeatureCross(outputs=1, rank=0), "rank must be .* at least 1; got 0"),
        (lambda: interactions.MlpExperts(outputs=1, experts=0), "experts must be .* at least 1; got 0"),
        (lambda: interactions.SelfAttention(outputs=1, hidden=0), "SelfAttention: hidden must be .* at least 1; got 0"),
        (
            lambda: interactions.DotProduct(outputs=1, hidden=(0,)),
            "DotProduct: hidden must be a whole number of at least 1; got 0",
        ),
        (
            lambda: interactions.MlpExperts(outputs=1, hidden=(8, -1)),
            "MlpExperts: hidden must be a whole number of at least 1; got -1",
        ),
        (
            lambda: interactions.FactorizationMachine(outputs=1, attention_hidden=(0,)),
            "FactorizationMachine: attention_hidden must be a whole number of at least 1; got 0",
        ),
        (
            lambda: nn.Mlp((4, 0, 1), rngs=nnx.Rngs(0)),
            "Mlp: sizes must be a whole number of at least 1; got 0",
        ),
        (
            lambda: interactions.SelfAttention(outputs=1, heads=3).build(
                LayerInputs(n=N, d=D), rngs=nnx.Rngs(0), dtypes=F64
            ),
            "heads must divide the width 4 of a vector; got 3. Take 1 or 2 or 4",
        ),
        (
            lambda: interactions.Convolution(outputs=1, kernel=4),
            "Convolution: kernel must be odd.*; got 4. Take 3 or 5",
        ),
        (lambda: interactions.Convolution(outputs=1, kernel=-1), "Convolution: kernel must be .* at least 1; got -1"),
        (lambda: interactions.Convolution(outputs=1, activation="x"), "Convolution: activation must be one of relu, "),
    ],
)
def test_what_cannot_be_built_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
