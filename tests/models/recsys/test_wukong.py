"""Wukong against a literal NumPy form, and the statements its paper makes about the architecture."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from scalejax import nn
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.models.recsys import dhen, interactions, stack, wukong
from scalejax.models.recsys.wukong import Important, NarrowGroup, WukongConfig
from scalejax.train.task import Keys, whole

TINY = WukongConfig(
    dim=4,
    layers=2,
    fm_outputs=3,
    lcb_outputs=2,
    rank=3,
    attention_rows=2,
    attention_hidden=(5,),
    fmb_hidden=(7, 6),
    head_hidden=(5,),
    bottom_hidden=(6,),
)
FULL = dataclasses.replace(
    TINY,
    dense_vectors=2,
    feature_vectors=2,
    important=(Important(feature="c1", vectors=3),),
    narrow=(NarrowGroup(features=("c0", "c3"), dim=2, vectors=2, hidden=(5,)),),
)
F64 = nn.Dtypes(jnp.float64, jnp.float64)
F32 = nn.Dtypes()


# The oracle: one example at a time, one embedding at a time, float64.


def oracle_mlp(p, x):
    layers = [p["layers"][i] for i in range(len(p["layers"]))]
    for i, layer in enumerate(layers):
        x = x @ layer["kernel"] + layer["bias"]
        if i < len(layers) - 1:
            x = np.maximum(x, 0)
    return x


def oracle_norm(p, x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p["scale"] + p["bias"]


def oracle_mix(weight, x):
    return np.stack([sum(weight[i, j] * x[j] for j in range(len(x))) for i in range(len(weight))])


def oracle_layer(p, config, x):
    """x: [n, d], the vectors of one example."""
    n, d = x.shape
    gram = np.array([[np.dot(x[i], x[j]) for j in range(n)] for i in range(n)])
    if config.fm == "plain":
        f = gram
    elif config.fm == "lowrank":
        f = gram @ p["fm"]["y"]
    else:
        y = oracle_mlp(p["fm"]["mlp"], np.concatenate(list(oracle_mix(p["fm"]["compress"]["weight"], x))))
        f = gram @ (y.reshape(n, config.rank) / np.sqrt(n))
    a = oracle_mlp(p["mlp"], oracle_norm(p["fm_norm"], f.reshape(-1))).reshape(config.fm_outputs, d)
    mixed = [*a, *oracle_mix(p["lcb"]["weight"], x)]
    residual = oracle_mix(p["residual"]["weight"], x) if "residual" in p else x
    return np.stack([oracle_norm(p["norm"], m + r) for m, r in zip(mixed, residual, strict=True)])


def oracle_wukong(p, config, schema, embedded, dense):
    """One example: embedded {feature: [dim]}, dense [D] -> logits [T]."""
    d, x = config.dim, []
    if schema.dense:
        x += list(oracle_mlp(p["before"]["bottom"], dense).reshape(-1, d))
    narrow = [f for group in config.narrow for f in group.features]
    for feature in schema.keys:
        if feature not in narrow:
            x += list(embedded[feature].reshape(-1, d))
    for i, group in enumerate(config.narrow):
        joined = np.concatenate([embedded[f] for f in group.features])
        x += list(oracle_mlp(p["before"][f"narrow_{i}"], joined).reshape(-1, d))
    x = np.stack(x)
    for i in range(config.layers):
        x = oracle_layer(p["layers"][i], config, x)
    return oracle_mlp(p["head"], x.reshape(-1))


def forward(model):
    """The jitted call of a module."""
    graph, state = nnx.split(model)
    return lambda *args, **kwargs: jax.jit(lambda s, *a, **k: nnx.merge(graph, s)(*a, **k))(state, *args, **kwargs)


@pytest.mark.default_cases
@pytest.mark.parametrize("config", [TINY, FULL], ids=["plain_inputs", "important_and_narrow"])
@pytest.mark.parametrize("fm", ["lowrank", "plain", "attentive"])
def test_forward_matches_a_literal_numpy_form(config, fm, schema, examples, randomised, numpy_parameters, x64):
    config = dataclasses.replace(config, fm=fm)
    task = config.task(schema)
    model = randomised(task.init(nnx.Rngs(0), F64))
    batch = examples(task)
    embedded = batch.embedded
    logits = forward(model)(embedded, batch["dense"])
    p, embedded, dense = numpy_parameters(model), jax.tree.map(np.asarray, embedded), np.asarray(batch["dense"], float)
    for b in range(len(dense)):
        want = oracle_wukong(p, config, schema, {f: v[b] for f, v in embedded.items()}, dense[b])
        # float64 round-off of some 10^3 sums
        np.testing.assert_allclose(logits[b], want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("n", [5, 6], ids=["identity_residual", "projected_residual"])
@pytest.mark.parametrize("fm", ["lowrank", "plain", "attentive"])
def test_layer_matches_a_literal_numpy_form(n, fm, randomised, numpy_parameters, x64):
    config = dataclasses.replace(TINY, fm=fm)
    layer = randomised(wukong.WukongLayer(n, config, rngs=nnx.Rngs(0), dtypes=F64))
    assert (layer.residual is None) == (n == config.fm_outputs + config.lcb_outputs)
    x = np.random.default_rng(0).normal(size=(n, 3, config.dim))
    got = forward(layer)(jnp.asarray(x))
    for b in range(3):
        np.testing.assert_allclose(got[:, b], oracle_layer(numpy_parameters(layer), config, x[:, b]), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["layer", "none"])
@pytest.mark.parametrize("fm", ["lowrank", "plain", "attentive"])
def test_a_layer_is_that_of_dhen_with_two_modules_to_the_bit(fm, normalization):
    config = dataclasses.replace(TINY, fm=fm, normalization=normalization, dropout=0.2)
    ours = wukong.WukongLayer(6, config, rngs=nnx.Rngs(0), dtypes=F32)
    theirs = dhen.DhenLayer(config.layer(), interactions.LayerInputs(n=6, d=config.dim), rngs=nnx.Rngs(0), dtypes=F32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3, config.dim)), jnp.float32)

    def gradients(layer, *arguments):
        graph, state = nnx.split(layer)

        def loss(state, x):
            y = nnx.merge(graph, state)(x, *arguments)
            return (y**2).sum(), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, x)

    (ours_state, ours_x), ours_y = gradients(ours)
    (theirs_state, theirs_x), theirs_y = gradients(theirs, x[:0])
    assert np.array_equal(ours_y, theirs_y)
    assert np.array_equal(ours_x, theirs_x)
    leaves = [map(np.asarray, jax.tree.leaves(state)) for state in (ours_state, theirs_state)]
    ours_leaves, theirs_leaves = (sorted((leaf.shape, leaf.tobytes()) for leaf in each) for each in leaves)
    assert ours_leaves == theirs_leaves


def test_works_without_dense_features_and_with_one_task(examples, numpy_parameters, x64):
    schema = Schema(categorical=tuple(Categorical(name=f"c{i}", rows=9) for i in range(5)))
    task = TINY.task(schema)
    model = task.init(nnx.Rngs(0), F64)
    batch = examples(task, size=1)
    embedded = batch.embedded
    got = forward(model)(embedded, batch["dense"])
    one = {f: np.asarray(v[0]) for f, v in embedded.items()}
    want = oracle_wukong(numpy_parameters(model), TINY, schema, one, np.zeros(0))
    assert got.shape == (1, 1)
    np.testing.assert_allclose(got[0], want, rtol=1e-10)


# Statements about the factorization machine (sections 3.3 and 9 of the paper's analysis).


def test_sum_over_pairs_equals_half_of_square_of_sum_minus_sum_of_squares(x64):
    x = np.random.default_rng(0).normal(size=(7, 2, 5))
    f = interactions.PlainFm(TINY.layer().modules[0], interactions.LayerInputs(n=7, d=5), rngs=nnx.Rngs(0), dtypes=F64)(
        jnp.asarray(x)
    )
    pairs = np.triu(np.asarray(f), k=1).sum((1, 2))
    np.testing.assert_allclose(pairs, ((x.sum(0) ** 2).sum(-1) - (x**2).sum((0, 2))) / 2, rtol=1e-12)


def test_low_rank_form_equals_gram_times_y_in_value_and_gradient(x64):
    rng = np.random.default_rng(0)
    x, y, weight = (jnp.asarray(rng.normal(size=s)) for s in ((9, 2, 4), (9, 3), (2, 9, 3)))
    fast = lambda x, y: (nn.products(x, interactions.mix(y.T, x)) * weight).sum()  # noqa: E731
    slow = lambda x, y: (jnp.einsum("nbd,mbd,mk->bnk", x, x, y) * weight).sum()  # noqa: E731
    for a, b in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(fast, argnums=(0, 1)))(x, y)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(slow, argnums=(0, 1)))(x, y)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("n", "d", "k"), [(12, 5, 5), (12, 5, 8), (5, 12, 5), (12, 5, 4), (5, 12, 4)])
def test_gram_is_recovered_from_the_low_rank_form_exactly_when_rank_suffices(n, d, k, x64):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(n, k))
    z = np.asarray(nn.products(jnp.asarray(x)[:, None], interactions.mix(jnp.asarray(y).T, jnp.asarray(x)[:, None])))[0]
    gram = x @ x.T
    error = np.linalg.norm(z @ np.linalg.pinv(y.T @ z, rcond=1e-10) @ z.T - gram) / np.linalg.norm(gram)
    if k >= min(n, d):
        assert error < 1e-9  # the condition of Y^T Z, some 10^4, times round-off
    else:
        assert error > 1e-2


@pytest.mark.default_cases("lowrank")
@pytest.mark.parametrize("fm", ["lowrank", "attentive"])
def test_no_kind_but_the_plain_one_forms_the_gram_matrix(fm):
    n, config = 53, dataclasses.replace(TINY, fm=fm)
    layer = wukong.WukongLayer(n, config, rngs=nnx.Rngs(0), dtypes=F32)
    graph, state = nnx.split(layer)
    x = jnp.zeros((n, 2, config.dim))
    text = str(jax.make_jaxpr(jax.grad(lambda s, x: nnx.merge(graph, s)(x).sum(), argnums=(0, 1)))(state, x))
    assert f"{n},{n}" not in text


def polynomial(layers, zero_fm_block=False):
    """t -> stack(t X_0) with the norms off and every MLP linear; float64."""
    config = dataclasses.replace(TINY, layers=layers, activation="linear", normalization="none", fmb_hidden=(4,))
    built = [wukong.WukongLayer(n, config, rngs=nnx.Rngs(layers), dtypes=F64) for n in (6, *(layers - 1) * (5,))]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 1, config.dim)))

    if zero_fm_block:
        for layer in built:
            layer.mlp.layers[-1].kernel[...] = jnp.zeros_like(layer.mlp.layers[-1].kernel[...])

    def value(t):
        y = t * x
        for layer in built:
            y = layer(y)
        return y.reshape(-1)

    half = 2**layers + 1
    return np.asarray(jax.jit(jax.vmap(value))(jnp.arange(-half, half + 1) / half))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_interaction_order_is_two_to_the_number_of_layers(layers, x64):
    values, order = polynomial(layers), 2**layers
    scale = np.abs(values).max()
    noise = 2 ** (order + 1) * 2e-15 * scale  # differences of order m amplify round-off by up to 2^m
    assert np.abs(np.diff(values, n=order, axis=0)).max() > 1e3 * noise
    assert np.abs(np.diff(values, n=order + 1, axis=0)).max() < noise
    middle = len(values) // 2
    assert np.abs(values[middle]).max() == 0  # no order below 1
    assert np.abs(values[middle + 1] - values[middle - 1]).max() > 1e-3 * scale  # order 1 is there


def test_without_the_fm_block_the_stack_is_linear(x64):
    values = polynomial(2, zero_fm_block=True)
    assert np.abs(np.diff(values, n=2, axis=0)).max() < 1e-13 * np.abs(values).max()


@pytest.mark.default_cases("lowrank")
@pytest.mark.parametrize("fm", ["lowrank", "attentive"])
def test_permuting_inputs_and_the_matching_parameters_changes_nothing(fm, randomised, x64):
    config, n = dataclasses.replace(TINY, fm=fm), 6
    layer = randomised(wukong.WukongLayer(n, config, rngs=nnx.Rngs(0), dtypes=F64))
    rng = np.random.default_rng(0)
    x, order = jnp.asarray(rng.normal(size=(n, 2, config.dim))), rng.permutation(n)
    before = forward(layer)(x)
    flat = (order[:, None] * config.rank + np.arange(config.rank)).reshape(-1)  # the same order of the n x k entries
    for param in (layer.lcb.weight, layer.residual.weight):
        param[...] = param[...][:, order]
    if fm == "lowrank":
        layer.fm.y[...] = layer.fm.y[...][order]
    else:
        layer.fm.compress.weight[...] = layer.fm.compress.weight[...][:, order]
        last = layer.fm.mlp.layers[-1]
        last.kernel[...], last.bias[...] = last.kernel[...][:, flat], last.bias[...][flat]
    layer.mlp.layers[0].kernel[...] = layer.mlp.layers[0].kernel[...][flat]
    layer.fm_norm.scale[...] = layer.fm_norm.scale[...][flat]
    layer.fm_norm.bias[...] = layer.fm_norm.bias[...][flat]
    np.testing.assert_allclose(forward(layer)(x[order]), before, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_two_layers_learn_a_product_of_four_features_and_one_layer_cannot():
    """Parity of four signs is orthogonal to every polynomial of order 2, so one layer stays at log 2."""
    schema = Schema(categorical=tuple(Categorical(name=f"c{i}", rows=2) for i in range(4)))
    signs = np.array(np.meshgrid(*4 * [[-1, 1]])).reshape(4, -1).T  # all 16 inputs
    rows = np.random.default_rng(0).normal(size=(4, 2, 4))
    embedded = {f"c{i}": jnp.asarray(rows[i][(signs[:, i] > 0).astype(int)], jnp.float32) for i in range(4)}
    labels = jnp.asarray(signs.prod(1) > 0, jnp.float32)
    losses = {}
    for layers in (1, 2):
        config = WukongConfig(
            dim=4,
            layers=layers,
            fm_outputs=4,
            lcb_outputs=4,
            rank=4,
            fmb_hidden=(16,),
            head_hidden=(),
            activation="linear",
            normalization="none",
        )
        graph, state = nnx.split(config.build(schema, nnx.Rngs(0), F32))
        adam = optax.adam(3e-3)

        def loss(state, graph=graph):
            logits = nnx.merge(graph, state)(embedded, jnp.zeros((16, 0)))[:, 0]
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        @jax.jit
        def train(state, loss=loss, adam=adam):
            def step(carry, _):
                state, moments = carry
                value, gradient = jax.value_and_grad(loss)(state)
                updates, moments = adam.update(gradient, moments)
                return (optax.apply_updates(state, updates), moments), value

            return jax.lax.scan(step, (state, adam.init(state)), length=1500)[1]

        losses[layers] = float(train(state)[-1])
    assert losses[1] > 0.69
    assert losses[2] < 0.05


# Counts.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fm"),
    [
        *((FULL, fm) for fm in ("lowrank", "plain", "attentive")),
        (TINY, "attentive"),
        (dataclasses.replace(TINY, normalization="none", head_hidden=()), "lowrank"),
    ],
)
def test_parameter_and_flop_counts_equal_the_real_model(config, fm, schema, examples, dot_flops, strict_promotion):
    task = dataclasses.replace(config, fm=fm).task(schema)
    model = task.init(nnx.Rngs(0), F32)
    graph, state = nnx.split(model)
    assert sum(p.size for p in jax.tree.leaves(state)) == task.dense_parameters()
    batch = examples(task, size=4, dtype=np.float32)
    embedded = batch.embedded

    def loss(state, embedded):
        now = dataclasses.replace(batch, embedded=embedded)
        return task.loss(nnx.merge(graph, state), now, keys=None, gather=whole).sum

    forward_flops = dot_flops(jax.make_jaxpr(loss)(state, embedded))
    both = dot_flops(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(state, embedded))
    assert 3 * forward_flops == 4 * task.flops_per_example()
    # the gradient of the dense features is not needed, so the bottom MLP's first backward product is left out
    assert both == 4 * (task.flops_per_example() - 2 * 3 * config.bottom_hidden[0])


def test_tables_are_as_wide_as_the_role_of_their_feature_asks(schema):
    dims = {t.name: t.dim for t in FULL.task(schema).tables()}
    assert dims == {"c0": 2, "c1": 12, "c2": 8, "c3": 2, "c4": 8}
    assert FULL.input_vectors(schema) == 2 + (3 + 2 + 2) + 2


@pytest.mark.parametrize("size", sorted(wukong.SIZES))
def test_named_sizes_build(size, schema):
    task = wukong.SIZES[size].task(schema)
    model = nnx.eval_shape(lambda: task.init(nnx.Rngs(0), F32))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(model))) == task.dense_parameters()


# Numbers: dropout, dtypes, gradients.


@pytest.mark.slow
def test_dropout_is_off_without_a_key_and_random_with_one(schema, examples):
    task = dataclasses.replace(TINY, dropout=0.5, embedding_dropout=0.1).task(schema)
    call = forward(task.init(nnx.Rngs(0), F32))
    batch = examples(task, dtype=np.float32)
    embedded = batch.embedded
    a, b = (call(embedded, batch["dense"], key=jax.random.key(i)) for i in (0, 1))
    assert np.array_equal(call(embedded, batch["dense"]), call(embedded, batch["dense"]))
    assert not np.array_equal(a, b)
    assert np.array_equal(a, call(embedded, batch["dense"], key=jax.random.key(0)))


def test_every_layer_drops_by_a_key_of_its_own():
    seen = []

    def layer(x, dense, *, key):
        del dense
        seen.append(None if key is None else jax.random.key_data(key).tolist())
        return x

    frame = types.SimpleNamespace(layers=[layer, layer, layer], vectors_of_dense=0)
    for key in (jax.random.key(0), None):
        stack.InteractionStack.interact(frame, jnp.zeros((2, 1, 4)), key=key)
    assert len(set(map(tuple, seen[:3]))) == 3
    assert seen[3:] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("fm", ["lowrank", "attentive"])
def test_bfloat16_compute_is_close_to_float32_with_float32_logits_and_finite_gradients(
    fm, schema, examples, strict_promotion
):
    task = dataclasses.replace(FULL, fm=fm, dropout=0.1).task(schema)
    batch = examples(task, dtype=np.float32)
    embedded = batch.embedded
    losses = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        graph, state = nnx.split(task.init(nnx.Rngs(0), nn.Dtypes(compute=dtype)))

        @jax.jit
        def step(state, embedded, key, graph=graph):
            def loss(state, embedded):
                now = dataclasses.replace(batch, embedded=embedded)
                found = task.loss(nnx.merge(graph, state), now, keys=Keys(key, key), gather=whole)
                return found.sum / found.weight, found.outputs

            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state, embedded)

        (value, aux), gradients = step(state, embedded, jax.random.key(0))
        losses[dtype] = float(value)
        assert value.dtype == aux["logits"].dtype == jnp.float32
        assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    # 8 bits of mantissa through two layers and three MLPs
    assert losses[jnp.bfloat16] == pytest.approx(losses[jnp.float32], rel=0.03)


@pytest.mark.slow
def test_every_parameter_names_one_logical_axis_per_dimension(schema):
    for fm in ("lowrank", "attentive"):
        model = dataclasses.replace(FULL, fm=fm).build(schema, nnx.Rngs(0), F32)
        for path, param in nnx.iter_graph(model):
            if isinstance(param, nnx.Param):
                assert len(param.get_metadata()["logical_axes"]) == param[...].ndim, path


# Mistakes.


def test_names_a_feature_that_the_data_lacks(schema):
    config = dataclasses.replace(TINY, important=(Important(feature="c9"),))
    with pytest.raises(UserError, match=r"WukongConfig.important: 'c9' is not one of the 5 .* nearest are c"):
        config.task(schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1; got 0"),
        ({"fm": "cubic"}, "fm must be one of lowrank, plain, attentive; got 'cubic'"),
        ({"important": (Important(feature="a"), Important(feature="a"))}, "a appear twice"),
    ],
)
def test_refuses_a_config_that_makes_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)
