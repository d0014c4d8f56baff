"""Mixture-of-depths: a layer sees its best tokens alone and in their places; the others go around it to the bit."""

import dataclasses
import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_language_run as small
from flax import nnx
from jax.test_util import check_grads
from llama_cases import F64, GQA
from paged_cases import Rows

from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm import families
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.models.llm.llama3 import rope
from scalejax.models.llm.llama3.model import Llama
from scalejax.models.llm.llama3.parts import GatedMlp, OutputRmsNorm
from scalejax.models.llm.moma import TABLE_1, ModalityExperts, published
from scalejax.nn import Dtypes
from scalejax.nn.pages import EMPTY
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.train.experiment import Precision

RANGES = (("text", 0, 50), ("image", 50, 90))
SCHEMA = TokenSchema(vocabulary=90, length=16, modalities=("text", "image"), capacities=(16, 16), ranges=RANGES)
TEXT = TokenSchema(vocabulary=90, length=16)
CHOICE = ExpertChoice(auxiliary=AuxiliaryRouter())
MLPS = {
    "dense": GatedMlp(),
    "top-k": Experts(count=4, router=TopK(k=2)),
    "by modality": ModalityExperts(groups=(("text", 2), ("image", 3)), router=CHOICE),
}


def model(depth, mlp=MLPS["dense"], layers=4, **changes):
    """A decoder whose weights are larger than they begin, so that layers and routers differ."""
    config = dataclasses.replace(GQA, layers=layers, mlp=mlp, depth=depth, **changes)
    schema = SCHEMA if isinstance(mlp, ModalityExperts) else TEXT
    made = config.bound(schema).task(schema).init(nnx.Rngs(0), F64)
    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda x: 6 * x, state))


def pair(depth, number=1, **changes):
    """The module with the parameters of one pair of layers, of which the second adds nothing."""
    graph, state = nnx.split(model(depth, **changes).layers)
    module = nnx.merge(graph, jax.tree.map(lambda x: x[number], state))
    for weight in (module.all.attention.out, module.all.mlp.down):
        weight[...] = jnp.zeros_like(weight[...])
    return module


@pytest.fixture
def rows(x64):
    """x, segment ids and positions: a row of two documents, and one that ends with padding."""
    x = jax.random.normal(jax.random.key(1), (2, 16, GQA.dim))
    segments = np.ones((2, 16), np.int32)
    segments[0, 9:], segments[1, 13:] = 2, 0
    positions = np.stack([np.r_[0:9, 0:7], np.arange(16)]).astype(np.int32)
    return x, jnp.asarray(segments), jnp.asarray(positions)


def angles(positions):
    return rope.angles(positions, rope.frequencies(GQA.width, GQA.rope_theta))


@nnx.jit
def first_layer(module, rows):
    """What the layer that sees some tokens makes of x, and the numbers."""
    x, segments, positions = rows
    prepared = module.prepare(segments != 0, jnp.zeros_like(segments), room="all")
    return module.with_numbers(x, module.numbers(len(x)), prepared, angles(positions), segments, positions)


@nnx.jit
def block(module, x, segments, positions):
    """What the layer makes of tokens if it takes all of them."""
    return module.some(x, angles(positions), segments, positions)


def literal(module, x, segments, positions):
    """The same for one row, by the block on the tokens that are taken and nothing else."""
    scores = 1 / (1 + np.exp(-np.asarray(x) @ np.asarray(module.router[...])[:, 0]))
    real = np.flatnonzero(np.asarray(segments))
    k = max(1, int(fractions.Fraction(str(module.part.capacity)) * len(real))) if len(real) else 0
    taken = np.sort(real[np.argsort(-scores[real], kind="stable")[:k]])
    own = [jnp.asarray(a)[None, taken] for a in (x, segments, positions)]
    y = np.array(x)
    if k:
        layer = block(module, *own)
        y[taken] += scores[taken][:, None] * np.asarray(layer - own[0])[0]
    return y, taken


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0.01, 0.6])
def test_a_layer_is_the_block_on_its_best_tokens_at_their_own_positions(rows, capacity):
    module = pair(MixtureOfDepths(capacity=capacity))
    y, _ = first_layer(module, rows)
    for row, made in zip(zip(*rows, strict=True), np.asarray(y), strict=True):
        expected, taken = literal(module, *row)
        np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-11)
        others = np.setdiff1d(np.arange(16), taken)
        np.testing.assert_array_equal(made[others], np.asarray(row[0])[others])
        assert (made[taken] != np.asarray(row[0])[taken]).any(1).all()


def test_k_is_that_of_the_printed_capacity():
    """0.7 * 90 and 0.57 * 100 are below 63 and 57 in binary."""
    for capacity, tokens, k in ((0.7, 90, 63), (0.57, 100, 57), (0.25, 99, 24)):
        assert MixtureOfDepths(capacity=capacity).most(tokens)[-1] == k


@pytest.mark.slow
def test_layers_begin_as_those_of_a_dense_model_of_as_many():
    """What they write into the residual stream is smaller by the root of twice their number."""
    made = dataclasses.replace(GQA, layers=8, dim=64, ffn_dim=256)
    dense, depth = (
        Llama(dataclasses.replace(made, depth=depth), nnx.Rngs(0), Dtypes()).layers
        for depth in (None, MixtureOfDepths())
    )
    for block in (depth.some, depth.all):
        np.testing.assert_allclose(block.mlp.down[...].std(), dense.mlp.down[...].std(), rtol=0.02)


@pytest.mark.slow
def test_at_a_capacity_of_1_it_is_the_gated_dense_layer(rows):
    x, segments, positions = rows
    segments = jnp.ones_like(segments)
    module = pair(MixtureOfDepths(capacity=1.0))
    layer = block(module, x, segments, positions)
    expected = x + jax.nn.sigmoid(x @ module.router[...]) * (layer - x)
    np.testing.assert_allclose(first_layer(module, (x, segments, positions))[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_tokens_of_a_device_are_one_packed_row(rows):
    """Two rows compete for the places of both, and no token attends to one of the other row."""
    x, segments, positions = rows
    module = pair(MixtureOfDepths(capacity=0.25, group="device"))
    x = x.at[0].add(module.router[..., 0])  # so that more of the first row are among the best of both
    packed = x.reshape(32, -1), jnp.r_[segments[0], jnp.where(segments[1] != 0, segments[1] + 7, 0)], jnp.r_[*positions]
    expected, taken = literal(module, *packed)
    y, _ = first_layer(module, (x, segments, positions))
    np.testing.assert_allclose(y.reshape(32, -1), expected, rtol=1e-9, atol=1e-11)
    assert len(taken) == int(0.25 * 29)
    assert (taken < 16).sum() > int(0.25 * 16)


@pytest.mark.slow
def test_gradients_go_through_the_layer_and_the_scores(rows):
    x, segments, positions = rows
    module = pair(MixtureOfDepths(capacity=0.5))
    graph, state = nnx.split(module)
    weights = jax.random.normal(jax.random.key(2), x.shape)

    @jax.jit
    def loss(x, state):
        return (first_layer(nnx.merge(graph, state), (x, segments, positions))[0] * weights).sum()

    _, of_state = jax.jit(jax.grad(loss, (0, 1)))(x, state)
    assert np.asarray(of_state["router"][...]).any()
    check_grads(lambda x: loss(x, state), (x,), order=1, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-6)
    router = state["router"][...]

    @jax.jit
    def of_router(router):
        changed = jax.tree.map(lambda x: x, state)
        changed["router"][...] = router
        return loss(x, changed)

    check_grads(of_router, (router,), order=1, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-6)


AUXILIARY = MixtureOfDepths(capacity=0.5, auxiliary=AuxiliaryRouter())


@pytest.fixture
def texts_and_images(x64):
    tokens = jax.random.randint(jax.random.key(3), (2, 16), 0, 90)
    return tokens, jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32)


@pytest.mark.slow
def test_with_auxiliary_routers_no_later_token_matters_and_without_them_some_do(texts_and_images):
    made, (tokens, positions, segments) = model(AUXILIARY, MLPS["dense"]), texts_and_images
    other = tokens.at[:, 9].set((tokens[:, 9] + 45) % 90)

    @functools.partial(jax.jit, static_argnums=1)
    def hidden(tokens, routing):
        return made.hidden_with_numbers(tokens, positions, segments, routing=routing)[0]

    causal = [np.asarray(hidden(ids, "causal")) for ids in (tokens, other)]
    np.testing.assert_array_equal(causal[0][:, :9], causal[1][:, :9])
    assert (causal[0][:, 9:] != causal[1][:, 9:]).any()
    seeing = [np.asarray(hidden(ids, "batch")) for ids in (tokens, other)]
    assert (seeing[0][:, :9] != seeing[1][:, :9]).any()


@pytest.mark.slow
def test_a_cache_gives_the_logits_of_the_whole_row(texts_and_images):
    """Each layer has its own visibility: what a token finds there are the tokens that this layer took."""
    made, (tokens, positions, segments) = model(AUXILIARY, MLPS["by modality"]), texts_and_images
    whole = np.asarray(jax.jit(made.__call__)(tokens, positions, segments))
    step, rows = jax.jit(made.extend), Rows(2, 16)
    cache = made.cache(rows.pages)
    # A prompt of 5 and one of 8 tokens, each read with room to spare; the shorter one catches up.
    logits, cache = step(tokens[:, :8], rows.reading([5, 8], 8), cache)
    for row, at in ((0, 4), (1, 7)):
        np.testing.assert_allclose(logits[row], whole[row, at], rtol=1e-9, atol=1e-9)
    late = jnp.stack([tokens[0, 5:13], tokens[1, :8]])
    _, cache = step(late, rows.reading([3, 0], 8), cache)
    for at in range(8, 16):
        logits, cache = step(tokens[:, at : at + 1], rows.reading([1, 1], 1), cache)
        np.testing.assert_allclose(logits, whole[:, at], rtol=1e-9, atol=1e-9)
    by_row = np.asarray(cache.some.positions)[:, rows.table].reshape(-1, 2, 16)
    taken = (by_row < EMPTY).sum(-1)
    assert (taken > 0).any()
    assert (taken < 16).any()
    np.testing.assert_array_equal(np.asarray(cache.all.positions)[0, rows.table].reshape(2, 16), [range(16)] * 2)


def test_what_a_unit_had_before_is_not_seen_by_layers_that_do_not_take_its_first_token(texts_and_images):
    made, (tokens, *_) = model(AUXILIARY), texts_and_images
    step, cache = jax.jit(made.extend), made.cache(Rows(2, 16).pages)
    for ids in (tokens[::-1], (tokens + 7) % 50):
        _, cache = step(ids, Rows(2, 16).reading([16, 16], 16), cache)
    reading = Rows(2, 16).reading([13, 16], 16)
    again, cache = step(tokens, reading, cache)
    fresh, own = step(tokens, reading, made.cache(Rows(2, 16).pages))
    # Where no layer takes what was not taken before either, the data would not show it.
    firsts = np.asarray(own.some.positions)[:, Rows(2, 16).table][..., 0]
    assert (firsts == EMPTY).any()
    np.testing.assert_array_equal(again, fresh)
    np.testing.assert_array_equal(cache.some.positions, own.some.positions)


@pytest.mark.slow
def test_auxiliary_routers_learn_who_was_taken_and_nothing_else_does(rows):
    x, segments, positions = rows
    module = pair(AUXILIARY)
    graph, state = nnx.split(module)

    def loss(state, x):
        module = nnx.merge(graph, state)
        numbers = first_layer(module, (x, segments, positions))[1]
        return module.part.routed(GatedMlp()).losses(numbers), numbers

    (value, numbers), (of_state, of_x) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(state, x)
    expected = taken_in_all = 0
    for row in zip(*rows, strict=True):
        labels = np.zeros(16)
        labels[literal(module, *row)[1]] = 1
        p = np.asarray(jax.nn.sigmoid(module._guess(row[0][None])))[0, :, 0]
        each = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
        expected += each[np.asarray(row[1]) != 0].sum()
        taken_in_all += labels.sum()
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    assert float(numbers["depth/load"].sum()) == taken_in_all
    assert not np.asarray(of_x).any()
    for path, gradient in nnx.to_flat_state(of_state):
        assert np.asarray(gradient[...]).any() == ("auxiliary" in path[0]), path


@pytest.mark.slow
def test_the_use_of_experts_is_told_by_layer(texts_and_images):
    """Layers that see some tokens and those that see all, in their order."""
    mlp, (tokens, positions, segments) = MLPS["top-k"], texts_and_images
    made = model(MixtureOfDepths(capacity=0.25), mlp)
    numbers = jax.jit(lambda *given: made.hidden_with_numbers(*given)[2])(tokens, positions, segments)
    load = made.config.routed.sums(numbers)["experts/load"]
    np.testing.assert_array_equal(load.sum(1), [2 * 2 * 4, 2 * 2 * 16] * 2)
    names = [value.name for metric in made.config.routed.metrics(4) for value in metric.values]
    assert "expert_load_max" in names


@pytest.mark.parametrize(("size", "percent"), [("90M", 1.6), ("435M", 0.2), ("1.4B", 2.7)])
def test_published_sizes_cost_as_much_as_the_dense_model(size, percent):
    """With head and causal attention at 4,096, routers of experts left out."""
    dense = published(size, GatedMlp()).flops_per_token(4096)
    depth = published(size, GatedMlp(), depth=MixtureOfDepths()).flops_per_token(4096)
    np.testing.assert_allclose(100 * (depth / dense - 1), percent, atol=0.15)
    for sparse in (published(size), published(size, Experts(count=8, router=ExpertChoice(), execution="batched"))):
        assert abs(sparse.flops_per_token(4096) / dense - 1) < 0.05
    assert abs(published(size, depth=MixtureOfDepths()).flops_per_token(4096) / dense - 1) < 0.05


@pytest.mark.parametrize("size", TABLE_1)
def test_parameters_are_those_of_the_published_table(size):
    found = [published(size, mlp, depth=MixtureOfDepths()).parameters() for mlp in (GatedMlp(), None)]
    np.testing.assert_allclose(found, TABLE_1[size].parameters[2:], rtol=0.06)


EXPLICIT = Fsdp(sharding="FULL_SHARD", form="explicit")
MESHES = {
    "explicit fsdp": (EXPLICIT, MeshShape(fsdp=8)),
    "tensor": (Fsdp(), MeshShape(fsdp=4, tensor=2)),
    "explicit tensor x expert": (EXPLICIT, MeshShape(fsdp=2, tensor=2, expert=2)),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def trained(texts, depth, shape, strategy=EXPLICIT, mlp=MLPS["top-k"]):
    model = dataclasses.replace(small.MODEL, layers=4, mlp=mlp, depth=depth, stage_parts=1)
    run = small.bind(texts, shape, model=model, strategy=strategy, precision=Precision(params="float64"))
    state, host = run.begin()
    state, losses = small.steps(run, state, host, 3)
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def on_one_device(texts):
    with jax.enable_x64(True):
        return trained(texts, MixtureOfDepths(), MeshShape(fsdp=1), EXPLICIT, mlp=MLPS["top-k"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_devices_change_nothing_but_the_order_of_sums(texts, on_one_device, mesh):
    strategy, shape = MESHES[mesh]
    losses, params = on_one_device
    with jax.enable_x64(True):
        found, got = trained(texts, MixtureOfDepths(), shape, strategy, mlp=MLPS["top-k"])
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    for path, value in params.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-9, atol=1e-12, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Fsdp(), EXPLICIT], ids=["implicit", "explicit"])
def test_a_packed_row_is_that_of_a_device_in_both_forms(texts, strategy):
    """The forms agree, and differ from one device, where there is one packed row."""
    depth = MixtureOfDepths(group="device")
    with jax.enable_x64(True):
        (one, _), (some, _), (same, _) = (
            trained(texts, depth, *on)
            for on in ((MeshShape(fsdp=1),), (MeshShape(fsdp=4), strategy), (MeshShape(fsdp=4), EXPLICIT))
        )
    np.testing.assert_allclose(some, same, rtol=1e-12)
    assert abs(some[0] - one[0]) > 1e-7


@pytest.mark.parametrize("shape", [MeshShape(fsdp=4, stage=2), MeshShape(fsdp=4, context=2)])
def test_what_cuts_rows_or_layers_is_refused(texts, shape, x64):
    with pytest.raises(UserError, match=r"does not run on a mesh with (stage|context)=2"):
        trained(texts, MixtureOfDepths(), shape)


def test_bad_settings_are_refused():
    for capacity in (0, 1.5, "0.25", True):
        with pytest.raises(ValueError, match=f"capacity must be above 0 and at most 1; got {capacity!r}"):
            MixtureOfDepths(capacity=capacity)
    with pytest.raises(ValueError, match="group must be sequence or device"):
        MixtureOfDepths(group="global")
    with pytest.raises(ValueError, match="an even number; got 3"):
        dataclasses.replace(GQA, layers=3, depth=MixtureOfDepths())
    with pytest.raises(ValueError, match="depth must be a part"):
        dataclasses.replace(GQA, depth=0.25)


@pytest.mark.slow
def test_without_auxiliary_routers_nothing_is_generated(texts_and_images):
    made, (tokens, *_) = model(MixtureOfDepths()), texts_and_images
    with pytest.raises(UserError, match="MixtureOfDepths without an auxiliary router"):
        made.extend(tokens, Rows(2, 16).reading([16, 16], 16), made.cache(Rows(2, 16).pages))
    with pytest.raises(UserError, match="no text scored"):
        made(*texts_and_images)
    assert made.config.task(TEXT).advice() == {}


@pytest.mark.slow
def test_a_folder_of_others_cannot_hold_it():
    family = families.of(dataclasses.replace(GQA, depth=MixtureOfDepths(), norm=OutputRmsNorm()))
    with pytest.raises(UserError, match="mixture-of-depths have no form in folders"):
        family.entries()
