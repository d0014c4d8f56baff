"""Metric sums against definitions written out in float64 NumPy."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.mesh import BATCH_AXES, MeshShape, make_mesh
from scalejax.train.metrics import click as metrics
from scalejax.train.metrics import sums as metric_sums
from scalejax.train.metrics.protocol import Described

BINS = 512
update = jax.jit(metrics.update)


def literal_auc(labels, scores, weights):
    """Every pair of a positive and a negative, one by one."""
    won = total = 0.0
    labels, scores, weights = (np.asarray(a, np.float64) for a in (labels, scores, weights))
    for yi, si, wi in zip(labels, scores, weights, strict=True):
        for yj, sj, wj in zip(labels, scores, weights, strict=True):
            if yi == 1 and yj == 0:
                total += wi * wj
                won += wi * wj * (1.0 if si > sj else 0.5 if si == sj else 0.0)
    return won / total


def examples(seed, size, tasks=1, scale=1.5):
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, scale, (size, tasks)).astype(np.float32)
    labels = (rng.random((size, tasks)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], size).astype(np.float32)
    return logits, labels, weights


def literal_metrics(logits, labels, weights):
    l, y, w = (np.asarray(a, np.float64) for a in (logits, labels, weights))
    p = 1 / (1 + np.exp(-l))
    ce = -(y * np.log(p) + (1 - y) * np.log(1 - p))
    c = (w * y).sum() / w.sum()
    entropy = -(w * y).sum() * np.log(c) - (w * (1 - y)).sum() * np.log(1 - c)
    return {
        "examples": int((w > 0).sum()),
        "logloss": (w * ce).sum() / w.sum(),
        "ne": (w * ce).sum() / entropy,
        "calibration": (w * p).sum() / (w * y).sum(),
        "base_rate": c,
        "nonfinite": 0,
    }


def summed(batches, tasks=1, bins=BINS):
    sums = metrics.zeros(tasks, bins=bins)
    for batch in batches:
        sums = update(sums, *batch)
    return sums


def computed(sums, names=()):
    return metrics.compute(metric_sums.to_host(sums), names)


def test_matches_the_definitions_on_weighted_examples():
    batches = [examples(seed, 64) for seed in range(3)]
    got = computed(summed(batches))
    logits, labels, weights = (np.concatenate(a) for a in zip(*batches, strict=True))
    for name, want in literal_metrics(logits[:, 0], labels[:, 0], weights).items():
        # One batch is reduced in float32: 64 terms of eps 6e-8 each, with room for the logarithm.
        assert got[name] == pytest.approx(want, rel=1e-6), name
    exact = literal_auc(labels[:, 0], logits[:, 0], weights)
    assert abs(got["auc_hist"] - exact) <= got["auc_error_bound"] + 1e-12
    assert 0 < got["auc_error_bound"] < 0.01


def test_names_metrics_by_task_when_there_are_several():
    batch = examples(0, 64, tasks=2)
    got = computed(summed([batch], tasks=2), ["click", "buy"])
    for t, name in enumerate(("click", "buy")):
        want = literal_metrics(batch[0][:, t], batch[1][:, t], batch[2])
        assert got[f"ne/{name}"] == pytest.approx(want["ne"], rel=1e-6)
    assert "ne" not in got
    with pytest.raises(ValueError, match="2 tasks"):
        computed(summed([batch], tasks=2))


def test_predicting_the_base_rate_scores_an_entropy_of_one_and_half_the_pairs():
    _, labels, weights = examples(1, 64)
    c = (weights * labels[:, 0]).sum() / weights.sum()
    got = computed(summed([(np.full((64, 1), np.log(c / (1 - c)), np.float32), labels, weights)]))
    assert got["ne"] == pytest.approx(1, rel=1e-6)  # float32 losses
    assert got["calibration"] == pytest.approx(1, rel=1e-6)
    assert got["auc_hist"] == 0.5
    assert got["auc_error_bound"] == 0.5  # everything is tied: the histogram knows nothing and says so


def test_scaling_all_weights_changes_nothing_but_weights():
    logits, labels, weights = examples(2, 64)
    a, b = (computed(summed([(logits, labels, weights * k)])) for k in (1, 8))  # a power of two is exact
    assert a == b


def test_merged_shards_equal_the_whole():
    batches = [examples(seed, 64, tasks=2) for seed in range(4)]
    whole = metric_sums.to_host(summed(batches, tasks=2))
    parts = [metric_sums.to_host(summed(part, tasks=2)) for part in (batches[:3], batches[3:])]
    merged = metric_sums.merge(*parts)
    for field in dataclasses.fields(metrics.ClickSums):
        # Pairs carry every rounding error, so only float64 rounding is left.
        np.testing.assert_allclose(getattr(merged, field.name), getattr(whole, field.name), rtol=1e-13)


def test_padding_counts_nowhere_even_if_its_logits_are_not_numbers():
    logits, labels, weights = examples(3, 32)
    padded = (
        np.concatenate([logits, [[np.nan], [np.inf], [5.0]]]).astype(np.float32),
        np.concatenate([labels, [[1], [0], [1]]]).astype(np.float32),
        np.concatenate([weights, [0, 0, 0]]).astype(np.float32),
    )
    want = computed(summed([(logits, labels, weights)]))
    got = computed(summed([padded]))
    assert got["examples"] == want["examples"]
    assert got == pytest.approx(want, rel=1e-6)  # 35 terms are reduced in another order than 32


def test_losses_that_are_not_finite_are_counted_and_show():
    logits = np.array([[0.5], [np.nan], [-np.inf], [1.0]], np.float32)
    labels = np.array([[1], [0], [1], [0]], np.float32)
    got = computed(summed([(logits, labels, np.ones(4, np.float32))]))
    assert got["nonfinite"] == 2
    assert np.isnan(got["logloss"])
    assert got["auc_hist"] == 0  # over the two examples that have a score


def test_what_is_undefined_is_nan():
    empty = computed(metrics.zeros(1, bins=BINS))
    assert empty["examples"] == 0
    undefined = ("logloss", "ne", "calibration", "base_rate", "auc_hist", "auc_error_bound")
    assert all(np.isnan(empty[k]) for k in undefined)
    ones = computed(summed([(np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32), np.ones(4, np.float32))]))
    assert np.isfinite(ones["logloss"])
    assert all(np.isnan(ones[k]) for k in ("ne", "calibration", "auc_hist"))


def test_pairs_keep_what_float32_alone_would_lose():
    # 16,777,216 = 2**24: in plain float32 adding 1 to it changes nothing.
    big = dataclasses.replace(
        metrics.zeros(1, bins=2), weight=metric_sums.Pair(jnp.full((1,), 2.0**24), jnp.zeros((1,)))
    )
    batch = (np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32), np.ones(1, np.float32))

    @jax.jit
    def run(sums):
        return jax.lax.fori_loop(0, 1001, lambda _, s: metrics.update(s, *batch), sums)

    assert metric_sums.to_host(run(big)).weight[0] == 2.0**24 + 1001


def test_float64_under_x64(x64):
    logits, labels, weights = examples(4, 64)
    sums = summed([(logits, labels, weights)])
    assert sums.weight.value.dtype == jnp.float64
    want = literal_metrics(logits[:, 0], labels[:, 0], weights)
    got = computed(sums)
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.slow
def test_types_never_mix(strict_promotion):
    logits, labels, weights = examples(5, 16)
    sums = metrics.update(metrics.zeros(1, bins=BINS), jnp.asarray(logits, jnp.bfloat16), labels, weights)
    assert sums.cross_entropy.value.dtype == jnp.float32


def test_sharded_batches_give_the_same_sums_without_gathering_the_batch():
    mesh = make_mesh(MeshShape(fsdp=4, tensor=2))
    rows, replicated = NamedSharding(mesh, P(BATCH_AXES)), NamedSharding(mesh, P())
    batch = examples(6, 64, tasks=2)
    step = jax.jit(metrics.update, in_shardings=(replicated, rows, rows, rows), out_shardings=replicated)
    compiled = step.lower(metrics.zeros(2, bins=BINS), *batch).compile()
    assert "all-gather" not in compiled.as_text()
    placed = jax.device_put((metrics.zeros(2, bins=BINS), *batch), (replicated, rows, rows, rows))
    got, want = metric_sums.to_host(compiled(*placed)), metric_sums.to_host(summed([batch], tasks=2))
    np.testing.assert_array_equal(got.histogram, want.histogram)  # multiples of 1/2 add without rounding
    assert metrics.compute(got, "ab") == pytest.approx(metrics.compute(want, "ab"), rel=1e-6)


def test_both_forms_of_the_histogram_agree():
    rng = np.random.default_rng(7)
    index = jnp.asarray(rng.integers(0, BINS, 64), jnp.int32)
    weight = jnp.asarray(rng.choice([0.0, 0.5, 1.0], (64, 2)), jnp.float32)
    np.testing.assert_array_equal(  # exact: sums of halves
        metrics._scatter(BINS)(index, weight), metrics._one_hot_product(BINS)(index, weight)
    )


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.one_of(st.integers(-6, 6).map(float), st.floats(-40, 40, width=32)), min_size=16, max_size=16),
    labels=st.lists(st.booleans(), min_size=16, max_size=16),
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 4.0]), min_size=16, max_size=16),
)
def test_exact_auc_lies_within_the_bound(logits, labels, weights):
    y, w = np.asarray(labels, np.float32), np.asarray(weights, np.float32)
    s = np.asarray(logits, np.float32)
    got = computed(update(metrics.zeros(1, bins=32), s[:, None], y[:, None], w))
    if (w * y).sum() == 0 or (w * (1 - y)).sum() == 0:
        assert np.isnan(got["auc_hist"])
    else:
        assert abs(got["auc_hist"] - literal_auc(y, s, w)) <= got["auc_error_bound"] + 1e-12  # float64 rounding


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(start=st.floats(-60, 60, width=32), count=st.just(256))
def test_neighbouring_floats_never_swap_bins(start, count):
    steps = np.float32(start) * np.ones(count, np.float32)
    for i in range(1, count):
        steps[i] = np.nextafter(steps[i - 1], np.float32(np.inf))
    bins = _bin_of(jnp.asarray(steps))
    assert (np.diff(bins) >= 0).all()


@jax.jit
def _one_bin(logits):
    count = logits.shape[0]
    return jax.vmap(
        lambda l: metrics._histogram(l[None, None], jnp.ones((1, 1)), jnp.ones((1, 1)), metrics.BINS)[0, 1].argmax()
    )(logits.reshape(count))


def _bin_of(logits):
    return np.asarray(_one_bin(logits))


def test_sums_of_the_whole_run_survive_json_to_the_bit():
    windows = [metric_sums.to_host(summed([examples(seed, 64)])) for seed in range(3)]
    like = metric_sums.to_host(metrics.zeros(1))
    life = windows[0]
    for window in windows[1:]:
        life = metric_sums.from_json(json.loads(json.dumps(metric_sums.to_json(life))), like)
        life = metric_sums.merge(life, window)
    unbroken = functools.reduce(metric_sums.merge, windows)
    for field in dataclasses.fields(metrics.ClickSums):
        np.testing.assert_array_equal(getattr(life, field.name), getattr(unbroken, field.name))


def test_a_metric_says_what_its_values_are():
    one, two = metrics.ClickQuality(tasks=("label",)), metrics.ClickQuality(tasks=("click", "buy"))
    assert [value.name for value in one.values][:3] == ["logloss", "ne", "auc"]
    assert [value.name for value in two.values if value.title == "AUC"] == ["auc/click", "auc/buy"]
    for metric in (one, two):
        found = metric.compute(metric_sums.to_host(metric.zeros()))
        for value in metric.values:
            assert value.name in found or value.window in found or value.name.startswith("gauc"), value
        assert set(metric.lifetime) <= set(found)
    described = Described.from_dict(json.loads(json.dumps(Described.of((two,)).to_dict())))
    assert described == Described.of((two,))


def test_sums_of_finished_scores_equal_those_of_the_devices():
    batch = examples(8, 64, tasks=2)
    batch[0][3, 1] = np.nan
    batch[2][3] = 1.0
    host, device = metrics.of_scores(*batch, bins=BINS), metric_sums.to_host(summed([batch], tasks=2))
    np.testing.assert_array_equal(host.histogram, device.histogram)  # sums of halves, and bins in the same float32
    for field in dataclasses.fields(metrics.ClickSums):
        np.testing.assert_allclose(getattr(host, field.name), getattr(device, field.name), rtol=1e-6)  # float32


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\[B, 1\]"):
        metrics.update(metrics.zeros(1), jnp.zeros(8), jnp.zeros(8), jnp.ones(8))
    with pytest.raises(ValueError, match="even number"):
        metrics.zeros(1, bins=7)
