"""Hidden units of MLPs that leave a model and come back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from scalejax import nn, optim
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import (
    Convolution,
    DotProduct,
    FactorizationMachine,
    FeatureCross,
    LinearCompression,
    MlpExperts,
    SecondMoment,
    SelfAttention,
)
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.models.recsys.stack import NarrowGroup
from scalejax.models.recsys.towers import TowersConfig
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.parallel.towers import Partition
from scalejax.surgery import units
from scalejax.surgery.alternation import narrowed
from scalejax.surgery.units import ResizeUnits
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.trained import Trained
from scalejax.train.state import ModelShape

SCHEMA = Schema(
    categorical=tuple(Categorical(name=name, rows=20) for name in ("a", "b", "c", "d")),
    dense=("x", "y"),
    labels=("label",),
)
DLRM = DlrmConfig(dim=4, bottom_hidden=(12,), top_hidden=(16, 12))
WUKONG = WukongConfig(
    dim=4, layers=2, fm_outputs=3, lcb_outputs=2, rank=2, fmb_hidden=(8,), head_hidden=(12,), bottom_hidden=(8,)
)
ONE_LAYER = dataclasses.replace(WUKONG, layers=1)
EVERY_MODULE = (
    LinearCompression(outputs=4),
    FactorizationMachine(outputs=4, kind="attentive", rank=2, hidden=(8, 6), attention_rows=2, attention_hidden=(7,)),
    DotProduct(outputs=4, hidden=(9,)),
    FeatureCross(outputs=4),
    SecondMoment(outputs=4),
    SelfAttention(outputs=4, hidden=10),
    Convolution(outputs=4),
    MlpExperts(outputs=4, experts=3, hidden=(11, 5)),
)
DHEN = DhenConfig(
    dim=4,
    layers=(EnsembleLayer(modules=EVERY_MODULE, ensemble="sum"),),
    repeats=2,
    bottom_hidden=(6,),
    head_hidden=(8,),
)
ONE_ENSEMBLE = dataclasses.replace(
    DHEN,
    repeats=1,
    layers=(
        EnsembleLayer(
            modules=(
                FactorizationMachine(outputs=4, kind="attentive", rank=2, hidden=(8,), attention_hidden=(6,)),
                SelfAttention(outputs=4, hidden=10),
                MlpExperts(outputs=4, experts=2, hidden=(8,)),
            ),
            ensemble="sum",
        ),
    ),
)
MODELS = {
    "DLRM": DLRM,
    "DLRM without dense features": dataclasses.replace(DLRM, bottom_hidden=()),
    "DCNv2": DcnV2Config(dim=4, bottom_hidden=(12,), deep_hidden=(16, 12, 8)),
    "Wukong": dataclasses.replace(WUKONG, narrow=(NarrowGroup(features=("c", "d"), dim=2, hidden=(5,)),)),
    "Wukong, attentive": dataclasses.replace(WUKONG, fm="attentive"),
    "DHEN": DHEN,
}


transformation_of = functools.cache(lambda optimizer: optimizer.build(10))


def built(config, seed=0):
    """In float32, or in float64 under `x64`."""
    dtype = jnp.result_type(float)
    return config.build(SCHEMA, nnx.Rngs(seed), nn.Dtypes(dtype, dtype))


def params_of(config, seed=0):
    """Parameters by path, with biases that are not zero."""
    return dict(drawn(config, seed, jnp.result_type(float)))


@functools.cache
def drawn(config, seed, dtype):
    del dtype  # of `built`
    rng, shape = np.random.default_rng(seed), ModelShape.of(nnx.eval_shape(lambda: built(config)))
    found = {path: np.array(x) for path, x in jax.jit(lambda: shape.split(built(config, seed)))().items()}
    return {p: rng.normal(size=x.shape).astype(x.dtype) if p.endswith("bias") else x for p, x in found.items()}


def batch(rows=16, seed=0):
    rng = np.random.default_rng(seed)
    embedded = {f: rng.normal(size=(rows, 4)).astype(np.float32) for f in SCHEMA.keys}
    return embedded, rng.normal(size=(rows, 2)).astype(np.float32), rng.integers(2, size=(rows, 1)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, embedded, dense):
    shape = ModelShape.of(nnx.eval_shape(lambda: built(config)))
    return shape.merge(params)(embedded, dense)


def state_of(config, params, optimizer, steps=0):
    """Arrays of a run by the names of a checkpoint, after some steps on noise."""
    transformation = transformation_of(optimizer)
    params = {path: jnp.asarray(x) for path, x in params.items()}
    state = transformation.init(params)
    for step in range(steps):
        params, state = train(config, transformation, params, state, batch(seed=step))
    return named(params, state)


def named(params, state):
    return {name: np.asarray(x) for name, x in manifests.named_leaves({"params": params, "optimizer": state}).items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(config, transformation, params, state, data, masks=None):
    """One step; where there are masks, of units that are multiplied by zero."""

    def loss(params):
        own = params if masks is None else {path: x * masks[path] for path, x in params.items()}
        z = logits(config, own, *data[:2])
        return optax.sigmoid_binary_cross_entropy(z, data[2].astype(z.dtype)).mean()

    updates, state = transformation.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_hidden_layers_are_those_of_all_mlps_of_a_model(config):
    model = nnx.eval_shape(lambda: built(config))
    wanted = {
        f"{'/'.join(map(str, path))}/layers/{number}": layer.kernel.shape[1]
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nn.Mlp)
        for number, layer in enumerate(list(module.layers)[:-1])
    }
    found = units.hidden_layers(ModelShape.of(model).params)
    assert {layer.name: layer.width for layer in found} == wanted
    assert len(found) == len(wanted) > 0


@pytest.mark.slow
def test_mlps_that_are_stacked_over_towers_keep_their_units():
    machine = FactorizationMachine(outputs=2, rank=2, hidden=(6,))
    towers = TowersConfig(base=DLRM, towers=Partition(towers=(("a",), ("b", "c", "d"))), modules=(machine,))
    half = narrowed(towers, 0.5)
    assert half == dataclasses.replace(towers, base=HALF["DLRM"][1])
    found = units.hidden_layers(params_of(towers))
    assert [layer.name for layer in found] == ["over/bottom/layers/0", "over/top/layers/0", "over/top/layers/1"]
    made = ResizeUnits().operate(trained(towers), trained(half))
    assert {path: x.shape for path, x in made.params.items()} == {path: x.shape for path, x in params_of(half).items()}
    narrow = dataclasses.replace(towers, modules=(dataclasses.replace(machine, hidden=(3,)),))
    with pytest.raises(
        UserError, match=r"modules/0/mlp/layers/0/bias .* whose parameters are stacked, .*over the towers"
    ):
        ResizeUnits().operate(trained(towers), trained(narrow))


def test_the_norm_score_is_the_product_of_norms_and_knows_no_scale_of_a_relu():
    params = params_of(DLRM)
    (layer,) = [layer for layer in units.hidden_layers(params) if layer.name == "top/layers/0"]
    scores = units.norm_scores(params, layer)
    for j in range(16):
        into, out = params["top/layers/0/kernel"][:, j], params["top/layers/1/kernel"][j]
        np.testing.assert_allclose(scores[j], np.sqrt((into**2.0).sum() * (out**2.0).sum()), rtol=1e-6)
    factors = np.random.default_rng(1).uniform(0.1, 10, 16).astype(np.float32)
    other = dict(params)
    other[layer.kernel], other[layer.bias] = params[layer.kernel] * factors, params[layer.bias] * factors
    other[layer.out] = params[layer.out] / factors[:, None]
    embedded, dense, _ = batch()
    np.testing.assert_allclose(
        logits(DLRM, other, embedded, dense), logits(DLRM, params, embedded, dense), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(units.norm_scores(other, layer), scores, rtol=1e-6)


@pytest.mark.slow
def test_the_taylor_score_adds_the_squares_of_what_the_loss_changes_by_without_each_weight(x64):
    model = DLRM.build(SCHEMA, nnx.Rngs(0), nn.Dtypes(jnp.float64, jnp.float64))
    shape = ModelShape.of(model)
    params, (embedded, dense, labels) = shape.split(model), batch()
    (layer,) = [layer for layer in units.hidden_layers(params) if layer.name == "top/layers/0"]

    @jax.jit
    def loss(params):
        z = shape.merge(params)(embedded, dense)
        return optax.sigmoid_binary_cross_entropy(z, labels.astype(np.float64)).mean()

    params[layer.bias] = params[layer.bias] + 0.1
    squares = {path: np.square(slope) for path, slope in jax.grad(loss)(params).items()}
    scores = units.taylor_scores(params, squares, layer)
    for j in (0, 5):
        total = 0.0
        places = [(layer.bias, (j,))]
        places += [(layer.kernel, (i, j)) for i in range(params[layer.kernel].shape[0])]
        places += [(layer.out, (j, k)) for k in range(params[layer.out].shape[1])]
        for path, index in places:
            by = [loss({**params, path: params[path].at[index].multiply(1 + sign * 1e-5)}) for sign in (1, -1)]
            total += float((by[0] - by[1]) / 2e-5) ** 2
        np.testing.assert_allclose(scores[j], total, rtol=1e-5)


def test_the_best_are_kept_in_their_order_and_of_equal_ones_the_first():
    np.testing.assert_array_equal(units.best(np.array([1.0, 5.0, 5.0, 0.0, 5.0]), 2), [1, 2])
    np.testing.assert_array_equal(units.best(np.array([3.0, 0.0, 1.0, 9.0]), 3), [0, 2, 3])


HALF = {
    "DLRM": (DLRM, dataclasses.replace(DLRM, bottom_hidden=(6,), top_hidden=(8, 6))),
    "Wukong": (ONE_LAYER, dataclasses.replace(ONE_LAYER, fmb_hidden=(4,), head_hidden=(6,), bottom_hidden=(4,))),
    "DCNv2": (MODELS["DCNv2"], narrowed(MODELS["DCNv2"], 0.5)),
    "DHEN": (ONE_ENSEMBLE, narrowed(ONE_ENSEMBLE, 0.5)),
}
EACH = optim.AdamW(learning_rate=optim.Constant(value=1e-2), counts="each")


@pytest.fixture(params=HALF, scope="module")
def halves(request):
    """(model, its half, a state of the former after some steps, shapes of a state of the latter)."""
    full, half = HALF[request.param]
    return full, half, state_of(full, params_of(full), EACH, steps=3), state_of(half, params_of(half), EACH)


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["zero", "resume"])
def test_where_all_widths_stay_the_state_is_as_it_was(growth, halves):
    _, _, wide, _ = halves
    surgery = ResizeUnits(growth=growth, score="taylor")
    surgery.check([wide], wide)
    for name, array in surgery.operate_state([wide], wide, [EACH]).items():
        np.testing.assert_array_equal(array, wide[name], err_msg=name)


@pytest.mark.slow
def test_a_cut_takes_the_best_units_with_their_moments_and_counts(halves):
    _, _, wide, narrow = halves
    ResizeUnits().check([wide], narrow)
    made = ResizeUnits().operate_state([wide], narrow, [EACH])
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in narrow.items()}
    params = {name.removeprefix("params."): x for name, x in wide.items() if name.startswith("params.")}
    for layer in units.hidden_layers(params):
        into, out = params[layer.kernel], params[layer.out]
        score = [np.linalg.norm(into[:, j]) * np.linalg.norm(out[j]) for j in range(layer.width)]
        kept = sorted(sorted(range(layer.width), key=lambda j: -score[j])[: layer.width // 2])
        for kind in ("params", "optimizer.0.mu", "optimizer.0.nu", "optimizer.0.count"):
            np.testing.assert_array_equal(made[f"{kind}.{layer.bias}"], wide[f"{kind}.{layer.bias}"][kept])
    assert (
        made["optimizer.0.count.top/layers/0/bias" if "top/layers/0/bias" in params else "optimizer.2.count"].max() == 3
    )


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["each", "one"])
def test_a_cut_by_the_taylor_score_goes_by_the_mean_of_squared_gradients(counts):
    """Against Adam's second moments in NumPy, of the gradients of each step."""
    full, half = HALF["DLRM"]
    optimizer = dataclasses.replace(EACH, b2=0.9, counts=counts)
    transformation, params = transformation_of(optimizer), {p: jnp.asarray(x) for p, x in params_of(full).items()}
    state, means = transformation.init(params), {path: np.zeros(x.shape) for path, x in params.items()}
    for step in range(4):
        data = batch(seed=step)

        def loss(params, data=data):
            return optax.sigmoid_binary_cross_entropy(logits(full, params, *data[:2]), data[2]).mean()

        for path, slope in jax.grad(loss)(params).items():
            means[path] = 0.9 * means[path] + 0.1 * np.square(np.asarray(slope, np.float64))
        params, state = train(full, transformation, params, state, data)
    wide, narrow = named(params, state), state_of(half, params_of(half), optimizer)
    surgery = ResizeUnits(score="taylor")
    surgery.check([wide], narrow)
    made, others = (each.operate_state([wide], narrow, [optimizer]) for each in (surgery, ResizeUnits()))
    differ = False
    for layer in units.hidden_layers(params):
        terms = {path: np.square(np.asarray(params[path], np.float64)) * means[path] for path in means}
        score = [
            terms[layer.kernel][:, j].sum() + terms[layer.bias][j] + terms[layer.out][j].sum()
            for j in range(layer.width)
        ]
        kept = sorted(sorted(range(layer.width), key=lambda j: -score[j])[: layer.width // 2])
        np.testing.assert_array_equal(made[f"params.{layer.bias}"], wide[f"params.{layer.bias}"][kept])
        differ |= bool((made[f"params.{layer.bias}"] != others[f"params.{layer.bias}"]).any())
    assert differ


ELSEWHERE = optim.For(paths="elsewhere/.*", optimizer=optim.AdamW(b2=0.5))


@pytest.mark.parametrize("b2", [0.999, 0.8])
def test_new_units_are_not_cut_because_their_second_moments_are_young(b2):
    """Of units with equal weights those with the larger mean of squares stay, whatever steps they have seen."""
    full, half = HALF["DLRM"]
    wide, narrow = state_of(full, params_of(full), EACH, steps=1), state_of(half, params_of(half), EACH)
    optimizer = dataclasses.replace(EACH, b2=b2)
    young = {layer.name: np.arange(layer.width // 2) for layer in units.hidden_layers(params_of(full))}
    for name in wide:
        kind, _, path = name.rpartition(".")
        if kind == "params":
            wide[name] = np.ones_like(wide[name])
        if kind == "optimizer.0.nu":
            is_young = mask({path: wide[name]}, young)[path]
            steps = np.where(is_young, 2, 500)
            wide[f"optimizer.0.count.{path}"] = steps.astype(np.int32)
            wide[name] = (np.where(is_young, 3.0, 1.0) * (1 - b2**steps)).astype(np.float32)
    for own in (optimizer, optim.ByPath(rules=(ELSEWHERE, optim.For(paths=".*", optimizer=optimizer)))):
        made = ResizeUnits(score="taylor").operate_state([wide], narrow, [own])
        for layer in units.hidden_layers(params_of(half)):
            np.testing.assert_array_equal(made[f"optimizer.0.count.{layer.bias}"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["norm", "taylor"])
def test_a_cut_and_a_growth_that_resumes_are_the_identity(score, halves):
    _, _, wide, narrow = halves
    surgery = ResizeUnits(growth="resume", score=score)
    made = surgery.operate_state([wide], narrow, [EACH])
    surgery.check([wide, made], wide)
    back = surgery.operate_state([wide, made], wide, [EACH] * 2)
    assert list(back) == list(wide)
    for name, array in wide.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
        assert back[name].dtype == array.dtype


def test_what_two_cuts_took_comes_back_as_it_was_at_each():
    quarter = dataclasses.replace(DLRM, bottom_hidden=(3,), top_hidden=(8, 3))
    full, half = HALF["DLRM"]
    surgery, fresh = ResizeUnits(growth="resume"), [state_of(c, params_of(c), EACH) for c in (half, quarter)]
    first = state_of(full, params_of(full), EACH, steps=1)
    second = {name: x + 1 for name, x in surgery.operate_state([first], fresh[0], [EACH]).items()}  # as if trained
    third = {name: x + 1 for name, x in surgery.operate_state([second], fresh[1], [EACH]).items()}
    back = surgery.operate_state([first, second, third], first, [EACH] * 3)
    moved = {name: back[name] - first[name] for name in back}
    values = np.round(moved["params.top/layers/0/bias"]).astype(int).tolist()
    assert sorted(values) == [0] * 8 + [2] * 8
    values = np.round(moved["params.bottom/layers/0/bias"]).astype(int).tolist()
    assert sorted(values) == [0] * 6 + [1] * 3 + [2] * 3
    # One of the states before is enough to go back to the half.
    np.testing.assert_array_equal(
        surgery.operate_state([first, second, third], second, [EACH] * 3)["params.top/layers/0/bias"],
        third["params.top/layers/0/bias"],
    )


@pytest.mark.default_cases("Wukong")
def test_growth_keeps_the_function_and_new_units_begin_at_nothing(halves):
    full, half, wide, narrow = halves
    before = ResizeUnits().operate_state([wide], narrow, [EACH])
    fresh = state_of(full, params_of(full, seed=5), EACH)
    ResizeUnits().check([before], fresh)
    made = ResizeUnits().operate_state([before], fresh, [EACH])
    embedded, dense, _ = batch(64, seed=9)
    small, large = (
        {name.removeprefix("params."): jnp.asarray(x) for name, x in state.items() if name.startswith("params.")}
        for state in (before, made)
    )
    np.testing.assert_allclose(
        logits(full, large, embedded, dense), logits(half, small, embedded, dense), rtol=1e-6, atol=1e-6
    )
    masks = mask(large, {layer.name: np.arange(layer.width // 2) for layer in units.hidden_layers(large)})
    np.testing.assert_array_equal(
        logits(full, large, embedded, dense),
        logits(full, {path: x * masks[path] for path, x in large.items()}, embedded, dense),
    )
    for layer in units.hidden_layers(large):
        old = layer.width // 2
        assert not made[f"params.{layer.out}"][old:].any()
        came = made[f"params.{layer.kernel}"][:, old:]
        mine = fresh[f"params.{layer.kernel}"][:, old:]
        rows = (
            slice(None)
            if (previous := f"{layer.layers}/{layer.number - 1}/kernel") not in large
            else slice(0, large[previous].shape[1] // 2)
        )
        np.testing.assert_array_equal(came[rows], mine[rows])
        for kind in ("mu", "nu", "count"):
            assert not made[f"optimizer.0.{kind}.{layer.kernel}"][:, old:].any()
            assert not made[f"optimizer.0.{kind}.{layer.out}"][old:].any()
    assert made["optimizer.2.count"] == 3


def mask(params, kept):
    """Ones where a parameter belongs to kept units alone, else zeros."""
    ones = {path: np.ones(x.shape, x.dtype) for path, x in params.items()}
    zeros = {path: np.zeros(x.shape, x.dtype) for path, x in params.items()}
    return units.put(units.cut(ones, kept), kept, zeros)


@pytest.mark.slow
def test_steps_with_masked_units_are_the_steps_of_the_model_without_them(halves, x64):
    """In float64: sums have another order, and Adam makes steps of any size of what is left of gradients near zero."""
    full, half, _, _ = halves
    params = {path: jnp.asarray(x) for path, x in params_of(full).items()}
    kept = {
        layer.name: units.best(units.norm_scores(params, layer), layer.width // 2)
        for layer in units.hidden_layers(params)
    }
    masks, transformation = mask(params, kept), transformation_of(EACH)
    state = transformation.init(params)
    small = {path: jnp.asarray(x) for path, x in units.cut(params, kept).items()}
    small_state = transformation.init(small)
    for step in range(5):
        params, state = train(full, transformation, params, state, batch(seed=step), masks)
        small, small_state = train(half, transformation, small, small_state, batch(seed=step))
    gathered = units.cut(named(params, state), kept)
    for name, array in named(small, small_state).items():
        np.testing.assert_allclose(gathered[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
    moved = max(np.abs(small[path] - units.cut(params_of(full), kept)[path]).max() for path in small)
    assert moved > 1e-2


@pytest.mark.slow
def test_new_units_have_a_bias_correction_of_their_own():
    """Against Adam in NumPy, of numbers of which some begin after three steps and some come back after a rest."""
    rng, transformation = np.random.default_rng(0), dataclasses.replace(EACH, weight_decay=0.0).build(20)
    path = "mlp/layers/0/bias"
    names = {"mlp/layers/0/kernel": (3, 4), path: (4,), "mlp/layers/1/kernel": (4, 2), "mlp/layers/1/bias": (2,)}

    def drawn(width):
        cut = lambda shape: tuple(width if n == 4 else n for n in shape)  # noqa: E731
        return {name: jnp.asarray(rng.normal(size=cut(shape)), jnp.float32) for name, shape in names.items()}

    params = {name: x[:2] if name == path else x for name, x in drawn(2).items()}
    state = transformation.init(params)
    want = np.asarray(params[path], np.float64)
    m, v, t = np.zeros(4), np.zeros(4), np.zeros(4)

    def step(params, state, want, width):
        grads = drawn(width)
        g = np.asarray(grads[path], np.float64)
        own = slice(0, width)
        t[own] += 1
        m[own] = 0.9 * m[own] + 0.1 * g
        v[own] = 0.999 * v[own] + 0.001 * g**2
        want = want - 1e-2 * (m[own] / (1 - 0.9 ** t[own])) / (np.sqrt(v[own] / (1 - 0.999 ** t[own])) + 1e-8)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, want

    for _ in range(3):
        params, state, want = step(params, state, want, 2)
    wide = drawn(4)
    fresh = named(wide, transformation.init(wide))
    made = ResizeUnits().operate_state([named(params, state)], fresh, [EACH])
    want = np.concatenate([want, np.asarray(made[f"params.{path}"][2:], np.float64)])
    structure = jax.tree.structure({"params": wide, "optimizer": transformation.init(wide)})
    tree = jax.tree.unflatten(structure, [jnp.asarray(made[name]) for name in fresh])
    params, state = tree["params"], tree["optimizer"]
    for _ in range(4):
        params, state, want = step(params, state, want, 4)
    np.testing.assert_array_equal(t, [7, 7, 4, 4])
    np.testing.assert_allclose(params[path], want, rtol=1e-5, atol=1e-6)


def trained(config, seed=0):
    return Trained(params=params_of(config, seed), step=3, origin="a test")


def test_a_model_is_cut_and_grown_outside_of_a_run():
    full, half = HALF["DLRM"]
    cut = ResizeUnits().operate(trained(full), trained(half, 1))
    embedded, dense, _ = batch()
    back = ResizeUnits().operate(cut, trained(full, 2))
    np.testing.assert_allclose(
        logits(full, back.params, embedded, dense), logits(half, cut.params, embedded, dense), rtol=1e-6, atol=1e-6
    )


def test_averages_are_cut_and_grown_as_parameters_are():
    full, half = HALF["DLRM"]
    averages = {"ema": {path: x + 1 for path, x in params_of(full).items()}}
    there = dataclasses.replace(trained(full), averages=averages, copies=params_of(full))
    cut = ResizeUnits().operate(there, trained(half, 1))
    assert not cut.copies  # of the model before
    for path, x in cut.params.items():
        np.testing.assert_array_equal(cut.averages["ema"][path], x + 1, err_msg=path)
    fresh = trained(full, 2)
    grown = ResizeUnits().operate(cut, fresh).averages["ema"]
    assert {path: x.shape for path, x in grown.items()} == {path: x.shape for path, x in fresh.params.items()}
    np.testing.assert_array_equal(grown["top/layers/1/kernel"][:8, :6], cut.averages["ema"]["top/layers/1/kernel"])
    np.testing.assert_array_equal(grown["top/layers/0/kernel"][:, 8:], fresh.params["top/layers/0/kernel"][:, 8:])
    assert not grown["top/layers/1/kernel"][8:].any()


def test_a_cut_changes_the_output_by_at_most_the_norms_of_the_removed_contributions():
    """An MLP in NumPy, in float64. Behind the second hidden layer the difference is the contribution itself; what the
    first one loses passes a ReLU, which makes no difference larger, and the last matrix."""
    rng = np.random.default_rng(0)
    sizes = {0: (6, 20), 1: (20, 12), 2: (12, 3)}
    params = {f"mlp/layers/{i}/kernel": rng.normal(size=shape) for i, shape in sizes.items()}
    params |= {f"mlp/layers/{i}/bias": rng.normal(size=shape[1]) for i, shape in sizes.items()}
    x = rng.normal(size=(50, 6))

    def forward(own):
        w, b = ([own[f"mlp/layers/{i}/{kind}"] for i in range(3)] for kind in ("kernel", "bias"))
        first = np.maximum(x @ w[0] + b[0], 0)
        second = np.maximum(first @ w[1] + b[1], 0)
        return first, second, second @ w[2] + b[2]

    def cut(first, second):
        shapes = {0: (6, first), 1: (first, second), 2: (second, 3)}
        fresh = {f"mlp/layers/{i}/kernel": np.zeros(shape) for i, shape in shapes.items()}
        fresh |= {f"mlp/layers/{i}/bias": np.zeros(shape[1]) for i, shape in shapes.items()}
        made = (Trained(params=own, step=0, origin="a test") for own in (params, fresh))
        return forward(ResizeUnits().operate(*made).params)

    def removed(layer, count):
        w, v = (params[f"mlp/layers/{i}/kernel"] for i in (layer, layer + 1))
        order = np.argsort(np.linalg.norm(w, axis=0) * np.linalg.norm(v, axis=1))
        return order[:count], v[order[:count]]

    first, second, y = forward(params)
    lost, v = removed(1, 5)
    last = second[:, lost] @ v
    np.testing.assert_allclose(y - cut(20, 7)[-1], last, rtol=1e-9, atol=1e-12)
    lost, v = removed(0, 6)
    bound = np.linalg.norm(first[:, lost] @ v, axis=1) * np.linalg.norm(params["mlp/layers/2/kernel"], 2)
    moved = np.linalg.norm(y - cut(14, 12)[-1], axis=1)
    assert (moved <= bound + 1e-12).all()
    assert moved.max() > 0.1 * bound.max()
    # Both: the second layer has lost less or more, by what it sees of the first.
    lost, v = removed(1, 5)
    seen = np.linalg.norm(cut(14, 12)[1][:, lost] @ v, axis=1)
    assert (np.linalg.norm(y - cut(14, 7)[-1], axis=1) <= bound + seen + 1e-12).all()


@pytest.mark.slow
def test_mistakes_are_named():
    full, half = HALF["DLRM"]
    deeper = dataclasses.replace(half, top_hidden=(8, 6, 6))
    other = dataclasses.replace(half, dim=8)
    logistic = LogisticConfig()
    mixed = optim.ByPath(
        rules=(optim.For(paths=".*kernel", optimizer=EACH), optim.For(paths=".*", optimizer=optim.Sgd()))
    )
    for config, surgery, message in (
        (deeper, ResizeUnits(), r"only one of the two models has the hidden layers top/layers/2\. Change widths alone"),
        (other, ResizeUnits(), r"params\.bottom/layers/1/bias is \[8\] .* and \[4\] in the one before"),
        (logistic, ResizeUnits(), r"has no MLP with a hidden layer"),
    ):
        with pytest.raises(UserError, match=message):
            surgery.operate(trained(full), trained(config))
    with pytest.raises(UserError, match=r"no state before has had the widths of the model to be .*growth='zero'"):
        ResizeUnits(growth="resume").operate(trained(half), trained(full))
    with pytest.raises(ValueError, match="ResizeUnits: growth must be one of"):
        ResizeUnits(growth="again")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ResizeUnits: score must be one of norm, taylor"):
        ResizeUnits(score="size")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"reads Adam's second moments .* none for .* or take score='norm'"):
        ResizeUnits(score="taylor").operate(trained(full), trained(half))
    plain = [state_of(config, params_of(config), optim.Sgd()) for config in (full, half)]
    with pytest.raises(UserError, match=r"reads Adam's second moments .* Train it with optimizer=Adam or AdamW"):
        ResizeUnits(score="taylor").check(plain[:1], plain[1])
    ResizeUnits().check(plain[:1], plain[1])
    parted = [state_of(config, params_of(config), mixed) for config in (full, half)]
    with pytest.raises(UserError, match=r"reads Adam's second moments .* Train it with optimizer=Adam or AdamW"):
        ResizeUnits(score="taylor").check(parted[:1], parted[1])
    one = dataclasses.replace(EACH, counts="one")
    states = [state_of(config, params_of(config), one) for config in (half, full)]
    with pytest.raises(UserError, match=r"counts its steps once .*'bottom/layers/0' .*--set optimizer\.counts=each, "):
        ResizeUnits().check(states[:1], states[1])
    ResizeUnits().check(states[1:], states[0])  # to cut they need no counts of their own
