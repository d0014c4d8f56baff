"""Optimizer and schedule configs build what their docstrings say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax import optim
from scalejax.errors import UserError


def test_warmup_cosine_rises_linearly_peaks_and_ends_at_final():
    schedule = optim.WarmupCosine(peak=2.0, warmup=0.1, final=0.25).build(1000)
    values = [float(schedule(step)) for step in (0, 50, 100, 550, 1000)]
    # Halfway down a cosine from 2 to 0.5 is their mean.
    np.testing.assert_allclose(values, [0.0, 1.0, 2.0, 1.25, 0.5], atol=1e-6)


def test_warmup_linear_falls_linearly():
    schedule = optim.WarmupLinear(peak=1.0, warmup=0.2, final=0.0).build(10)
    values = [float(schedule(step)) for step in (1, 2, 6, 10)]
    np.testing.assert_allclose(values, [0.5, 1.0, 0.5, 0.0], atol=1e-6)


def test_schedule_without_warmup_starts_at_its_peak():
    assert float(optim.WarmupCosine(peak=3.0, warmup=0.0).build(10)(0)) == 3.0


@pytest.mark.parametrize("schedule", [optim.WarmupCosine, optim.WarmupLinear])
@pytest.mark.parametrize("warmup", [1, 100, -0.1])
def test_warmup_must_be_a_fraction(schedule, warmup):
    with pytest.raises(ValueError, match=rf"{schedule.__name__}: .*fraction of the run in \[0, 1\); got {warmup}"):
        schedule(warmup=warmup)


@pytest.mark.parametrize("kind", [optim.Sgd, optim.Adam, optim.AdamL2, optim.AdamW, optim.Lamb, optim.Lans])
def test_a_rate_that_is_no_schedule_is_refused(kind):
    remedy = rf"{kind.__name__}: learning_rate must be a schedule .*; got 0.003. .* is optim.Constant\(value=0.003\)"
    with pytest.raises(UserError, match=remedy):
        kind(learning_rate=0.003)
    with pytest.raises(UserError, match="got 'cosine'"):
        kind(learning_rate="cosine")


def test_adam_equals_its_equations():
    rng = np.random.default_rng(0)
    param = rng.normal(size=5)
    m, v, want = np.zeros(5), np.zeros(5), param.copy()
    transformation = optim.Adam(learning_rate=optim.Constant(value=0.1)).build(10)
    got = {"w": jnp.asarray(param, jnp.float32)}
    state = transformation.init(got)
    for t in range(1, 6):
        grad = rng.normal(size=5)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        want -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        updates, state = transformation.update({"w": jnp.asarray(grad, jnp.float32)}, state, got)
        got = {"w": got["w"] + updates["w"]}
    np.testing.assert_allclose(got["w"], want, rtol=2e-5)  # float32 against float64 over five steps


def test_adamw_decays_matrices_and_spares_vectors():
    transformation = optim.AdamW(learning_rate=optim.Constant(value=0.1), weight_decay=0.5).build(1)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    zero = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    updates, _ = transformation.update(zero, transformation.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], np.zeros(2))


def test_adamw_spares_stacked_scales():
    transformation = optim.AdamW(learning_rate=optim.Constant(value=0.1), weight_decay=0.5).build(1)
    params = {"layers/norm/scale": jnp.ones((3, 2)), "layers/mlp/up": jnp.ones((3, 2, 2))}
    zero = {name: jnp.zeros_like(p) for name, p in params.items()}
    updates, _ = transformation.update(zero, transformation.init(params), params)
    np.testing.assert_array_equal(updates["layers/norm/scale"], np.zeros((3, 2)))
    np.testing.assert_allclose(updates["layers/mlp/up"], np.full((3, 2, 2), -0.05), rtol=1e-6)


def test_the_schedule_of_the_405b_model_has_its_published_values():
    # arXiv 2407.21783, section 3.4.1: up to 8e-5 in 8,000 steps, cosine down to 8e-7 at step 1,200,000.
    schedule = optim.WarmupCosine(peak=8e-5, warmup=8_000 / 1_200_000, final=0.01).build(1_200_000)
    got = [float(schedule(step)) for step in (0, 7_999, 8_000, 1_200_000)]
    np.testing.assert_allclose(got, [0.0, 8e-5 * 7_999 / 8_000, 8e-5, 8e-7], rtol=1e-5)  # float32


def test_annealing_goes_linearly_to_nothing_from_where_the_cosine_ends():
    schedule = optim.WarmupCosineAnneal(peak=2.0, warmup=0.1, final=0.25, anneal=0.2).build(1000)
    values = [float(schedule(step)) for step in (0, 100, 450, 800, 900, 1000)]
    np.testing.assert_allclose(values, [0.0, 2.0, 1.25, 0.5, 0.25, 0.0], atol=1e-6)
    with pytest.raises(ValueError, match=r"anneal must be a fraction of the run in \[0, 0.9\); got 0.95"):
        optim.WarmupCosineAnneal(warmup=0.1, anneal=0.95)


def test_sgd_with_momentum_accumulates():
    transformation = optim.Sgd(learning_rate=optim.Constant(value=1.0), momentum=0.5).build(2)
    params = {"w": jnp.zeros(1)}
    state = transformation.init(params)
    for want in (-1.0, -1.5):
        updates, state = transformation.update({"w": jnp.ones(1)}, state, params)
        assert float(updates["w"][0]) == want


def test_adam_l2_adds_the_penalty_to_the_gradient_of_chosen_parameters():
    rng = np.random.default_rng(0)
    weight, grad = rng.normal(size=(2, 4))
    common = {"learning_rate": optim.Constant(value=0.1), "eps": 1.0}  # else Adam under one gradient is a sign alone
    transformation = optim.AdamL2(**common, l2=0.3, only="layers/0/").build(10)
    plain = optim.Adam(**common).build(10)
    params = {"layers/0/kernel": jnp.asarray(weight), "layers/1/kernel": jnp.asarray(weight)}
    grads = {name: jnp.asarray(grad) for name in params}
    penalised = {name: jnp.asarray(grad + (0.3 * weight if name == "layers/0/kernel" else 0)) for name in params}
    state, plain_state = transformation.init(params), plain.init(params)
    for _ in range(2):
        got, state = transformation.update(grads, state, params)
        want, plain_state = plain.update(penalised, plain_state, params)
        for name in params:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    with pytest.raises(UserError, match="no parameter begins with 'layer/'"):
        optim.AdamL2(only="layer/").build(10).init(params)


def test_optimizers_by_path_are_each_that_of_its_parameters():
    params = {"embed/weight": jnp.ones((3, 2)), "layers/mlp": jnp.full((2, 2), 2.0), "layers/norm/scale": jnp.ones(2)}
    grads = {name: 0.1 * (1 + i) * jnp.ones_like(p) for i, (name, p) in enumerate(params.items())}
    sgd, adam = optim.Sgd(momentum=0.9), optim.AdamW(learning_rate=optim.WarmupCosine(peak=0.1))
    rules = (optim.For(paths="embed/.*", optimizer=sgd), optim.For(paths=".*", optimizer=adam))
    both = optim.ByPath(rules=rules)
    assert both.learning_rate == adam.learning_rate

    def run(optimizer, names):
        own = {name: params[name] for name in names}
        built = optimizer.build(10)
        state = built.init(own)
        for _ in range(4):
            updates, state = built.update({name: grads[name] for name in names}, state, own)
            own = {name: own[name] + updates[name] for name in names}
        return own, state

    found, state = run(both, params)
    alone = run(sgd, ["embed/weight"])[0] | run(adam, ["layers/mlp", "layers/norm/scale"])[0]
    for name, value in alone.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    names = [path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(state)[0] if hasattr(path[-1], "key")]
    assert sorted(names) == sorted(["embed/weight", *["layers/mlp", "layers/norm/scale"] * 2])


@pytest.mark.parametrize(
    ("only", "penalised"), [("layers/0/", {"layers/0/kernel"}), ("", {"layers/0/kernel", "layers/1/kernel"})]
)
def test_adam_l2_by_path_adds_the_penalty_to_chosen_parameters_of_its_own_rule(only, penalised):
    rng = np.random.default_rng(0)
    names = ["layers/0/kernel", "layers/1/kernel", "head/kernel"]
    params, grads = ({name: jnp.asarray(rng.normal(size=4)) for name in names} for _ in range(2))
    common = {"learning_rate": optim.Constant(value=0.1), "eps": 1.0}  # else a first step of Adam is a sign alone
    adam = optim.Adam(**common)

    def updates(of_layers, grads):
        rules = (optim.For(paths="layers/.*", optimizer=of_layers), optim.For(paths=".*", optimizer=adam))
        built = optim.ByPath(rules=rules).build(10)
        return built.update(grads, built.init(params), params)[0]

    got = updates(optim.AdamL2(**common, l2=0.3, only=only), grads)
    want = updates(adam, {name: g + 0.3 * params[name] * (name in penalised) for name, g in grads.items()})
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    with pytest.raises(
        UserError, match=r"no parameter begins with 'head/'; there are layers/0/kernel, layers/1/kernel\."
    ):
        updates(optim.AdamL2(**common, only="head/"), grads)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["embed/.*"], "none names 'head/weight'. Add a last one for all others"),
        ([".*", "head/.*"], "'head/.*' is the first to name none of the 2 trained parameters"),
        (["embed/.*", "embed/.*", ".*"], "'embed/.*' is the first to name none"),
        (["embed/("], "paths must be a regular expression; got 'embed/[(]'"),
        ([], "must have at least one rule"),
    ],
)
def test_rules_that_leave_a_parameter_out_or_mean_nothing_are_refused(paths, message):
    with pytest.raises(UserError, match=message):
        rules = tuple(optim.For(paths=one, optimizer=optim.Sgd()) for one in paths)
        optim.ByPath(rules=rules).build(4).init({"embed/weight": jnp.ones(2), "head/weight": jnp.ones(2)})


@pytest.mark.parametrize("config", [optim.Adam(), optim.AdamW(weight_decay=0.1)], ids=lambda c: type(c).__name__)
def test_counts_of_each_number_are_the_count_of_all_where_all_begin_together(config):
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "bias": jnp.ones(2)}
    ends = []
    for counts in ("one", "each"):
        transformation = dataclasses.replace(config, counts=counts).build(10)
        got, state = params, transformation.init(params)
        grads = np.random.default_rng(1)
        for _ in range(5):
            g = {name: jnp.asarray(grads.normal(size=p.shape), jnp.float32) for name, p in got.items()}
            updates, state = transformation.update(g, state, got)
            got = {name: p + updates[name] for name, p in got.items()}
        ends.append(got)
    for name in params:
        np.testing.assert_allclose(ends[0][name], ends[1][name], rtol=1e-6)
    with pytest.raises(ValueError, match=rf"{type(config).__name__}: counts must be one of"):
        dataclasses.replace(config, counts="all")
