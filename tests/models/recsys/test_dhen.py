"""DHEN: what its layers are made of, and what a stack of them computes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax import nn
from scalejax.configs.recsys import dhen as recipes
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.models.recsys.dhen import DhenConfig, DhenLayer, EnsembleLayer
from scalejax.models.recsys.interactions import (
    DotProduct,
    FactorizationMachine,
    FeatureCross,
    LayerInputs,
    LinearCompression,
    SelfAttention,
)
from scalejax.train.task import Keys, whole

F64 = nn.Dtypes(jnp.float64, jnp.float64)
N, D, OUT = 5, 4, 5
X = np.random.default_rng(0).normal(size=(N, 3, D))
CROSS, FM = FeatureCross(outputs=OUT), FactorizationMachine(outputs=OUT, rank=2, hidden=(6,))


def build(layer, randomised, n=N):
    return randomised(DhenLayer(layer, LayerInputs(n=n, d=D), rngs=nnx.Rngs(0), dtypes=F64))


def norm(p, y):
    return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def call(layer, x=X):
    return np.asarray(layer(jnp.asarray(x), jnp.zeros((0, *x.shape[1:]))))


@pytest.mark.slow
@pytest.mark.parametrize("ensemble", ["concat", "sum", "weighted"])
@pytest.mark.parametrize("outputs", [5, 3], ids=["as many vectors", "fewer vectors"])
def test_a_layer_is_the_norm_of_modules_and_shortcut(ensemble, outputs, randomised, numpy_parameters, x64):
    modules = (FeatureCross(outputs=outputs), FactorizationMachine(outputs=outputs, rank=2, hidden=(6,)))
    layer = build(EnsembleLayer(modules=modules, ensemble=ensemble), randomised)
    p = numpy_parameters(layer)
    crossed, machine = (np.asarray(module(jnp.asarray(X))) for module in layer.interactions)
    together = {
        "concat": lambda: np.concatenate([crossed, machine]),
        "sum": lambda: crossed + machine,
        "weighted": lambda: p["alpha"][0] * crossed + p["alpha"][1] * machine,
    }[ensemble]()
    assert (layer.shortcut is None) == (len(together) == N)
    short = X if layer.shortcut is None else np.einsum("ln,nbd->lbd", p["shortcut"]["weight"], X)
    np.testing.assert_allclose(call(layer), norm(p["norm"], together + short), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinearCompression(outputs=OUT), CROSS, FM], ids=lambda m: type(m).__name__)
def test_with_one_module_every_ensemble_is_module_and_shortcut(module, randomised, numpy_parameters, x64):
    for ensemble in ("concat", "sum", "weighted"):
        layer = build(EnsembleLayer(modules=(module,), ensemble=ensemble), randomised)
        alone = np.asarray(layer.interactions[0](jnp.asarray(X)))
        if ensemble == "weighted":
            alone = alone * numpy_parameters(layer)["alpha"][0]
        np.testing.assert_allclose(call(layer), norm(numpy_parameters(layer)["norm"], alone + X), rtol=1e-11)


def test_linear_modules_alone_are_a_residual_linear_stack(randomised, numpy_parameters, x64):
    layers = [
        build(EnsembleLayer(modules=(LinearCompression(outputs=OUT),), ensemble="sum"), randomised) for _ in range(3)
    ]
    got, want = jnp.asarray(X), X
    for layer in layers:
        p = numpy_parameters(layer)
        got = layer(got, jnp.zeros((0, 3, D)))
        want = norm(p["norm"], np.einsum("ln,nbd->lbd", p["interactions"][0]["weight"], want) + want)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def zeroed(part):
    graph, state = nnx.split(part)
    return nnx.merge(graph, jax.tree.map(jnp.zeros_like, state))


@pytest.mark.slow
def test_without_modules_the_shortcut_is_left_and_without_shortcut_the_ensemble(randomised, numpy_parameters, x64):
    layer = build(EnsembleLayer(modules=(CROSS, FM), ensemble="sum"), randomised, n=6)
    x = np.random.default_rng(1).normal(size=(6, 3, D))
    p = numpy_parameters(layer)
    parts = sum(np.asarray(module(jnp.asarray(x))) for module in layer.interactions)
    kept, layer.shortcut = layer.shortcut, zeroed(layer.shortcut)
    np.testing.assert_allclose(call(layer, x), norm(p["norm"], parts), rtol=1e-11, atol=1e-12)
    layer.shortcut = kept
    layer.interactions = nnx.List([zeroed(module) for module in layer.interactions])
    short = np.einsum("ln,nbd->lbd", p["shortcut"]["weight"], x)
    np.testing.assert_allclose(call(layer, x), norm(p["norm"], short), rtol=1e-11, atol=1e-12)


def test_a_weighted_sum_starts_as_the_sum_and_learns_its_weights(x64):
    weighted, plain = (
        DhenLayer(
            EnsembleLayer(modules=(CROSS, FM), ensemble=ensemble), LayerInputs(n=N, d=D), rngs=nnx.Rngs(0), dtypes=F64
        )
        for ensemble in ("weighted", "sum")
    )
    np.testing.assert_array_equal(call(weighted), call(plain))
    graph, state = nnx.split(weighted)

    @jax.jit
    @jax.grad
    def gradient_of(state):
        return (nnx.merge(graph, state)(jnp.asarray(X), jnp.zeros((0, 3, D))) ** 3).sum()

    gradient = gradient_of(state)
    assert np.abs(gradient["alpha"][...]).min() > 1e-3


def test_a_stack_mixes_k_to_the_n_compositions(x64):
    """Of linear modules A_i without the shortcut the result is the sum of all products of one A a layer."""
    matrices = np.random.default_rng(2).normal(size=(3, 2, N, N))  # layers, modules
    x = jnp.asarray(X)
    for own in matrices:
        layer = EnsembleLayer(
            modules=(LinearCompression(outputs=N), LinearCompression(outputs=N)), ensemble="sum", normalization="none"
        )
        layer = DhenLayer(layer, LayerInputs(n=N, d=D), rngs=nnx.Rngs(0), dtypes=F64)
        for module, matrix in zip(layer.interactions, own, strict=True):
            module.weight[...] = jnp.asarray(matrix)
        x = layer(x, x[:0]) - x
    compositions = [c @ b @ a for a, b, c in itertools.product(*matrices)]
    assert len(compositions) == 2**3
    np.testing.assert_allclose(x, np.einsum("kln,nbd->lbd", np.stack(compositions), X), rtol=1e-10, atol=1e-10)


SMALL = DhenConfig(
    dim=4,
    layers=(
        EnsembleLayer(modules=(DotProduct(outputs=3, mixed=3, hidden=(6,)), LinearCompression(outputs=2))),
        EnsembleLayer(modules=(CROSS, SelfAttention(outputs=5)), ensemble="weighted"),
    ),
    repeats=2,
    bottom_hidden=(6,),
    head_hidden=(5,),
)


@pytest.mark.slow
def test_layers_may_differ_and_repeat(schema, examples, x64):
    task = SMALL.task(schema)
    model = task.init(nnx.Rngs(0), F64)
    assert [len(layer.interactions) for layer in model.layers] == [2] * 4
    assert [layer.shortcut is None for layer in model.layers] == [False, True, True, True]  # 6 vectors go in
    assert not np.array_equal(
        model.layers[1].interactions[0].mix.weight[...], model.layers[3].interactions[0].mix.weight[...]
    )
    batch = examples(task)
    assert nnx.eval_shape(lambda: model(batch.embedded, batch["dense"])).shape == (6, 2)
    # The dense features reach the dot products of later layers, too.
    first = model.embed(batch.embedded, batch["dense"])
    later = model.layers[2].interactions[0]
    x = jnp.ones((5, 6, 4))
    assert not np.allclose(later(x, first[:1]), later(x, 2 * first[:1]))


@pytest.mark.slow
def test_works_without_dense_features(examples, x64):
    schema = Schema(categorical=tuple(Categorical(name=f"c{i}", rows=9) for i in range(5)))
    task = SMALL.task(schema)
    batch = examples(task)
    assert task.init(nnx.Rngs(0), F64)(batch.embedded, batch["dense"]).shape == (6, 1)


@pytest.mark.slow
def test_a_step_has_gradients_of_every_parameter(schema, examples):
    task = SMALL.task(schema)
    graph, state = nnx.split(task.init(nnx.Rngs(0), nn.FLOAT32))
    batch = examples(task, dtype=np.float32)

    def loss(state):
        found = task.loss(nnx.merge(graph, state), batch, keys=Keys(jax.random.key(0), jax.random.key(1)), gather=whole)
        return found.sum / found.weight

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(state)):
        assert np.abs(leaf).max() > 0


def test_the_size_for_the_flights_has_the_flops_and_the_identity_as_shortcut():
    schema = Schema(
        categorical=tuple(Categorical(name=f"c{i}", rows=9) for i in range(16)), dense=tuple(f"x{i}" for i in range(7))
    )
    task = recipes.flights().model.task(schema)
    head, bottom = 544 * 256 + 256 * 128 + 128, 7 * 64 + 64 * 32
    cross = 544 * 544 + 136 * 136 * 4
    machine = 2 * 136 * 12 * 4 + 136 * 12 * 256 + 256 * 544
    assert task.flops_per_example() == 6 * (head + bottom + 2 * (cross + machine))
    assert all(layer.shortcut is None for layer in task._abstract.layers)
    assert {table.dim for table in task.tables()} == {32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """The first vectors, each times a number of its own."""

    outputs: int
    lacks: int = 0

    def build(self, inputs, *, rngs, dtypes):
        del inputs, rngs
        return Scaled(self.outputs - self.lacks, dtypes)


class Scaled(nnx.Module):
    def __init__(self, count, dtypes):
        self.scale = nnx.Param(jnp.ones((count, 1, 1), dtypes.params))

    def __call__(self, x, dense, *, key=None):
        del dense, key
        return self.scale[...] * x[: len(self.scale[...])]


def test_a_module_of_ones_own_stands_in_a_layer_and_returns_what_it_says(schema, examples, randomised, x64):
    layer = build(EnsembleLayer(modules=(Scales(outputs=3), FM), normalization="none"), randomised)
    own, machine = layer.interactions
    wanted = np.concatenate([own.scale[...] * X[:3], machine(jnp.asarray(X))])
    np.testing.assert_allclose(call(layer) - np.asarray(layer.shortcut(jnp.asarray(X))), wanted, rtol=1e-11, atol=1e-12)
    for ensemble in ("concat", "sum"):
        modules = (Scales(outputs=3, lacks=1), Scales(outputs=3))
        config = dataclasses.replace(SMALL, layers=(EnsembleLayer(modules=modules, ensemble=ensemble),))
        task = config.task(schema)
        model, batch = task.init(nnx.Rngs(0), F64), examples(task)
        with pytest.raises(
            UserError, match=r"^Scales: its module returned \[2, 6, 4\], .* be \[3, 6, 4\]. Mend .* `outp"
        ):
            model(batch.embedded, batch["dense"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnsembleLayer(modules=()), "at least one module"),
        (
            lambda: DhenConfig(layers=(LinearCompression(outputs=4),)),
            r"layers must be layers of modules; got LinearCompression\(outputs=4\)\. Write EnsembleLayer",
        ),
        (
            lambda: EnsembleLayer(modules=LinearCompression(outputs=4)),
            r"EnsembleLayer: modules must be a tuple, \(LinearCompression\(\.\.\.\),\) with the comma; got LinearCompr",
        ),
        (
            lambda: DhenConfig(layers=EnsembleLayer(modules=(CROSS,))),
            r"DhenConfig: layers must be a tuple, \(EnsembleLayer\(\.\.\.\),\) with the comma; got EnsembleLayer\(",
        ),
        (lambda: EnsembleLayer(modules=("linear",)), "must be interactions such as Linear.*got 'linear'"),
        (
            lambda: EnsembleLayer(modules=(LinearCompression(outputs=3), FeatureCross(outputs=4)), ensemble="sum"),
            "equally many vectors; got LinearCompression 3, FeatureCross 4",
        ),
        (lambda: EnsembleLayer(modules=(CROSS,), ensemble="mean"), "ensemble must be one of"),
        (lambda: EnsembleLayer(modules=(CROSS,), normalization="batch"), "normalization must be one of"),
        (lambda: DhenConfig(layers=()), "at least one EnsembleLayer"),
        (lambda: dataclasses.replace(SMALL, repeats=0), "repeats must be a whole number of at least 1; got 0"),
    ],
)
def test_what_cannot_be_built_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
