"""Experts grouped by modality: the layer is the paper's loop, groups do not see each other, and gradients are exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import F64, GQA

from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm.experts import ExpertChoice, Experts, Prepared, TopK
from scalejax.models.llm.llama3.parts import GatedMlp, OutputRmsNorm
from scalejax.models.llm.moma import TABLE_1, ModalityExperts, published
from scalejax.nn import counts, routing
from scalejax.train.batch import Batch

TEXT, IMAGE, PADDING = 0, 1, -1
SCHEMA = TokenSchema(vocabulary=90, length=16, modalities=("text", "image"), capacities=(16, 16))


def layer(part, number=1):
    """The module with the parameters of one layer, larger than they begin, so that experts differ."""
    module = part.bound(SCHEMA).build(GQA, nnx.Rngs(0), F64) if isinstance(part, ModalityExperts) else part
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda x: 20 * x[number], state))


def layer_of(part):
    """The same of a part whose capacities are stated."""
    graph, state = nnx.split(part.build(GQA, nnx.Rngs(0), F64))
    return nnx.merge(graph, jax.tree.map(lambda x: 20 * x[1], state))


def run(module, x, modality):
    return in_layer(module, x, jnp.asarray(modality, jnp.int8))


@nnx.jit
def in_layer(module, x, modality):
    order = module.prepare(modality != PADDING, jnp.zeros_like(modality, jnp.int32), modality, room="data")
    return module.with_numbers(x, order, module.numbers(len(x)))


def silu(x):
    return x / (1 + np.exp(-x))


def ffn(group, e, x):
    gate, up, down = (np.asarray(p[...]) for p in (group.gate, group.up, group.down))
    return (silu(x @ gate[e]) * (x @ up[e])) @ down[e]


def literal(module, x, modality, names=("text", "image")):
    """y of the pseudocode of the sheet: all rows are one group."""
    x, modality = np.asarray(x), np.asarray(modality)
    flat, kinds = x.reshape(-1, x.shape[2]), modality.reshape(-1)
    y = np.zeros_like(flat)
    for number, name in enumerate(names):
        group, idx = module.group(name), np.flatnonzero(kinds == number)
        router = np.asarray(group.router[...])
        scores = 1 / (1 + np.exp(-flat[idx] @ router))
        k = max(len(idx) // router.shape[1], 1) if len(idx) else 0
        for e in range(router.shape[1]):
            top = np.argsort(-scores[:, e], kind="stable")[:k]
            y[idx[top]] += scores[top, e][:, None] * ffn(group, e, flat[idx[top]])
    return y.reshape(x.shape)


def kinds(name):
    rng = np.random.default_rng(3)
    found = rng.integers(0, 2, (2, 16))
    if name == "padded":
        found[0, 11:] = found[1, 4] = PADDING
    if name == "all text":
        found[:] = TEXT
    if name == "all images":
        found[:] = IMAGE
    if name == "one token of an image":
        found[:] = TEXT
        found[1, 7] = IMAGE
    return found


MODALITIES = ("mixed", "padded", "all text", "all images", "one token of an image")


@pytest.fixture
def x(x64):
    return jax.random.normal(jax.random.key(1), (2, 16, GQA.dim))


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["batched", "sequential"])
@pytest.mark.parametrize("name", MODALITIES)
def test_a_layer_is_the_loop_of_the_paper(x, name, execution):
    modality = kinds(name)
    module = layer(ModalityExperts(groups=(("text", 4), ("image", 2)), execution=execution))
    y, numbers = run(module, x, modality)
    np.testing.assert_allclose(y, literal(module, x, modality), rtol=1e-10, atol=1e-12)
    for number, (group, experts) in enumerate((("text", 4), ("image", 2))):
        tokens = (modality == number).sum()
        load = np.asarray(numbers[f"{group}/load"]).sum((0, 1))
        np.testing.assert_array_equal(load, np.full(experts, max(tokens // experts, 1) if tokens else 0))
        assert float(numbers[f"{group}/tokens"].sum()) == tokens
        assert not numbers[f"{group}/dropped"].any()


@pytest.mark.slow
def test_a_capacity_that_holds_all_tokens_changes_nothing(x):
    """Places beyond the true count are masked: k is that of the tokens, not of the places."""
    modality = kinds("mixed")
    most = [int((modality == number).sum(1).max()) for number in (TEXT, IMAGE)]
    part = ModalityExperts(groups=(("text", 4), ("image", 2)))
    wide, tight = layer(part), layer_of(dataclasses.replace(part, capacities=tuple(most)))
    np.testing.assert_allclose(run(tight, x, modality)[0], run(wide, x, modality)[0], rtol=1e-12)


def test_each_modality_has_the_places_that_the_data_say():
    part = ModalityExperts(groups=(("text", 4), ("image", 2)), capacities=(5, 12))
    module, modality = counts.abstract(part.build, GQA), jnp.asarray(kinds("padded"), jnp.int8)
    real = modality != PADDING
    for room, places in (("data", (5, 12)), ("all", (16, 16))):
        order = jax.jit(lambda room=room: module.prepare(real, jnp.zeros((2, 16), jnp.int32), modality, room=room))()
        for number, (name, size) in enumerate(zip(("text", "image"), places, strict=True)):
            assert order.routes[name].tokens.shape == (2, size)
            for row in range(2):
                own = np.flatnonzero(np.asarray(modality[row]) == number)[:size]
                np.testing.assert_array_equal(order.routes[name].tokens[row, : own.size], own)
                assert (np.asarray(order.routes[name].tokens[row, own.size :]) == 16).all()


def test_the_loss_of_a_modality_is_that_of_the_targets_that_are_of_it():
    """Where a text ends and an image begins, the last token of the text has a target of the image."""
    ranges = (("text", 0, 50), ("image", 50, 90))
    task = GQA.task(dataclasses.replace(SCHEMA, ranges=ranges))
    targets, weights = np.array([[3, 60, 61, 7]]), np.array([[1.0, 0.5, 2.0, 4.0]], np.float32)
    tokens = np.array([[2, 3, 60, 61]])
    x, head = jnp.ones((1, 4, 2)), jnp.zeros((2, 90))  # all classes are alike

    @jax.jit
    def loss(fields):
        return task._cross_entropy(x, head, Batch(fields, purpose="evaluation"))

    total, found = loss({"tokens": tokens, "targets": targets, "weights": weights})
    assert {name: float(value) for name, value in found.items() if "weight" in name} == {
        "weight/text": 5.0,
        "weight/image": 2.5,
    }
    np.testing.assert_allclose(found["cross_entropy/text"], 5 * np.log(90), rtol=1e-5)
    np.testing.assert_allclose(total, 7.5 * np.log(90), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacities"), [("all text", (16, 0)), ("all images", (0, 16))])
def test_a_modality_that_the_data_never_have_needs_no_places(x, name, capacities):
    """Rows of text alone, as the data may be set to; gradients of what has no tokens are zeros."""
    part = ModalityExperts(groups=(("text", 4), ("image", 2)), capacities=capacities)
    module, modality = layer_of(part), kinds(name)
    np.testing.assert_allclose(run(module, x, modality)[0], literal(module, x, modality), rtol=1e-10, atol=1e-12)
    graph, state = nnx.split(module)
    found = jax.jit(jax.grad(lambda state: run(nnx.merge(graph, state), x, modality)[0].sum()))(state)
    empty = "image" if name == "all text" else "text"
    assert not any(np.asarray(g[...]).any() for path, g in nnx.to_flat_state(found) if path[0] == empty)
    assert all(np.asarray(g[...]).any() for path, g in nnx.to_flat_state(found) if path[0] != empty)


@pytest.mark.slow
def test_tokens_in_another_order_come_out_in_that_order(x):
    module, modality = layer(ModalityExperts()), kinds("mixed")
    order = np.random.default_rng(5).permutation(16)
    y, _ = run(module, x, modality)
    turned, _ = run(module, x[:, order], modality[:, order])
    np.testing.assert_allclose(turned, y[:, order], rtol=1e-12)


@pytest.mark.slow
def test_an_image_changes_no_text_but_through_the_choice_of_mixed_experts(x):
    modality = kinds("mixed")
    modality[1, 3] = IMAGE
    other = x.at[1, 3].set(7.0)
    module = layer(ModalityExperts())
    text = modality == TEXT
    before, after = (np.asarray(run(module, rows, modality)[0]) for rows in (x, other))
    np.testing.assert_array_equal(after[text], before[text])
    assert (after[1, 3] != before[1, 3]).any()
    mixed = layer(Experts(count=8, router=ExpertChoice(), execution="batched").build(GQA, nnx.Rngs(0), F64))
    before, after = (
        np.asarray(mixed.with_numbers(rows, Prepared(jnp.ones((2, 16), bool)), mixed.numbers(2))[0])
        for rows in (x, other)
    )
    assert (after[text] != before[text]).any()


@pytest.mark.slow
def test_one_expert_a_modality_is_an_ffn_that_its_score_weighs(x):
    module, modality = layer(ModalityExperts(groups=(("text", 1), ("image", 1)))), kinds("padded")
    expected = np.zeros(x.shape)
    for number, name in enumerate(("text", "image")):
        group = module.group(name)
        score = 1 / (1 + np.exp(-np.asarray(x) @ np.asarray(group.router[...])))
        expected += np.where((modality == number)[..., None], score * ffn(group, 0, np.asarray(x)), 0)
    np.testing.assert_allclose(run(module, x, modality)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_one_group_is_the_mixed_modal_form(x):
    schema = TokenSchema(vocabulary=90, length=16, modalities=("all",))
    part = ModalityExperts(groups=(("all", 8),)).bound(schema)
    module = layer(part.build(GQA, nnx.Rngs(0), F64))
    mixed = layer(Experts(count=8, router=ExpertChoice(), execution="batched").build(GQA, nnx.Rngs(0), F64))
    y, _ = run(module, x, np.zeros((2, 16)))
    expected, _ = mixed.with_numbers(x, Prepared(jnp.ones((2, 16), bool)), mixed.numbers(2))
    np.testing.assert_allclose(y, expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "all text"])
def test_gradients_are_those_of_finite_differences_and_there_for_experts_without_tokens(x, name):
    modality, module = kinds(name), layer(ModalityExperts(groups=(("text", 2), ("image", 2))))
    graph, state = nnx.split(module)
    weights = jax.random.normal(jax.random.key(2), x.shape)

    @jax.jit
    def loss(state, x):
        return (run(nnx.merge(graph, state), x, modality)[0] * weights).sum()

    of_state, of_x = jax.jit(jax.grad(loss, (0, 1)))(state, x)
    draw = np.random.default_rng(0)

    def difference(of, at):
        return (loss(*of(at + 1e-6)) - loss(*of(at - 1e-6))) / 2e-6

    for path, gradient in nnx.to_flat_state(of_state):
        value = np.asarray(gradient[...])
        assert np.isfinite(value).all()
        if name == "all text" and path[0] == "image":
            assert not value.any()
            continue
        for index in draw.integers(0, value.size, 3):
            at = np.unravel_index(index, value.shape)

            def moved(number, path=path, at=at):
                flat = dict(nnx.to_flat_state(state))
                flat[path] = flat[path].replace(flat[path][...].at[at].set(number))
                return nnx.from_flat_state(list(flat.items())), x

            here = float(dict(nnx.to_flat_state(state))[path][...][at])
            np.testing.assert_allclose(value[at], difference(moved, here), rtol=1e-4, atol=1e-7, err_msg=str(path))
    at = (1, 3, 2)
    expected = difference(lambda number: (state, x.at[at].set(number)), float(x[at]))
    np.testing.assert_allclose(of_x[at], expected, rtol=1e-4, atol=1e-7)


def test_a_batch_has_to_say_of_which_modality_its_tokens_are(x):
    module = layer(ModalityExperts())
    with pytest.raises(UserError, match="neither the batch nor model"):
        module.prepare(jnp.ones((2, 16), bool), jnp.ones((2, 16), jnp.int32), room="data")


@pytest.mark.parametrize("size", TABLE_1)
def test_parameters_are_those_of_the_published_table(size):
    row = TABLE_1[size]
    models = (published(size, GatedMlp()), published(size))
    layers, dim, ffn, heads = row.depth
    models += tuple(
        dataclasses.replace(m, layers=layers, dim=dim, ffn_dim=2 * ffn // 3, heads=heads, kv_heads=heads)
        for m in models
    )
    for model, printed in zip(models, row.parameters, strict=True):
        np.testing.assert_allclose(model.parameters(), printed, rtol=0.06)


def config(**changes):
    return dataclasses.replace(GQA, mlp=ModalityExperts(), norm=OutputRmsNorm(), **changes)


def test_the_loss_and_the_use_of_experts_are_of_each_modality(x64):
    task = config().task(SCHEMA)
    model = task.init(nnx.Rngs(0), F64)
    assert [path for path in model.layers.mlp.group("text").gate[...].shape] == [GQA.layers, 4, GQA.dim, GQA.ffn_dim]
    names = [value.name for metric in task.metrics() for value in metric.values]
    assert "dropped/text" in names
    assert "dropped/image" in names
    assert task.fields()["modality"].dtype == "int8"
    assert task.advice() == {}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ModalityExperts(groups=()), ValueError, r"groups must name each modality once; got \(\)"),
        (lambda: ModalityExperts(groups=(("a", 1), ("a", 2))), ValueError, "groups must name each modality once"),
        (lambda: ModalityExperts(groups=(("a b", 1),)), ValueError, "named like a variable, such as 'text'; got 'a b'"),
        (lambda: ModalityExperts(capacities=(3,)), ValueError, "capacities must be one number for each of 2 groups"),
        (lambda: ModalityExperts(router=TopK()), ValueError, "router must be an ExpertChoice; got TopK"),
        (
            lambda: ModalityExperts(groups=(("text", 0),)),
            ValueError,
            "count must be a whole number of at least 1; got 0",
        ),
        (
            lambda: ModalityExperts(capacities=(3, 16)).bound(SCHEMA),
            UserError,
            r"capacities=\(3, 16\), but rows of the data have up to \(16, 16\) tokens",
        ),
        (
            lambda: ModalityExperts(ranges=(("text", 0, 5),)).bound(
                dataclasses.replace(SCHEMA, ranges=(("text", 0, 50), ("image", 50, 90)))
            ),
            UserError,
            "but the data say",
        ),
        (
            lambda: config().task(TokenSchema(vocabulary=90, length=16)),
            UserError,
            "model.mlp.groups are of text, image, but tokens of the data are of text",
        ),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.slow
def test_choice_and_weight_see_the_same_noise_and_only_where_there_are_keys(x64):
    """The loop of the paper with noisy scores, of text alone, whose places are its positions."""
    part = ModalityExperts(router=ExpertChoice(noise="gumbel"))
    module, modality = layer(part), kinds("all text")
    x = jax.random.normal(jax.random.key(1), (2, 16, GQA.dim))
    keys = jax.random.key_data(jax.random.split(jax.random.key(5), 2))
    order = module.prepare(jnp.ones((2, 16), bool), jnp.zeros((2, 16), jnp.int32), modality, keys, room="data")
    layers = jnp.full(2, 3, jnp.int32)
    numbers = {k: layers if k.endswith("layer") else v for k, v in module.numbers(2).items()}
    y, _ = module.with_numbers(x, order, numbers)
    logits = np.asarray(x @ module.group("text").router[...])
    noise = np.asarray(routing.logistic_noise(order.keys["text"], layers, jnp.asarray(logits)))
    assert (noise != np.asarray(routing.logistic_noise(order.keys["image"], layers, jnp.asarray(logits)))).all()
    flat, expected = np.asarray(x).reshape(32, -1), np.zeros((32, GQA.dim))
    scores = (1 / (1 + np.exp(-logits - noise))).reshape(32, 4)
    for e in range(4):
        top = np.argsort(-scores[:, e], kind="stable")[:8]
        expected[top] += scores[top, e][:, None] * ffn(module.group("text"), e, flat[top])
    np.testing.assert_allclose(np.asarray(y).reshape(32, -1), expected, rtol=1e-10, atol=1e-12)
    quiet, _ = run(module, x, modality)
    np.testing.assert_allclose(quiet, literal(module, x, modality), rtol=1e-10, atol=1e-12)
    assert part.draws
    assert not ModalityExperts().draws
