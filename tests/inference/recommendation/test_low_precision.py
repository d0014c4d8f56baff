"""Click models in low precision: scores, sizes, calibration, diagnosis, the search, the guard-rail."""

import dataclasses
import math
from typing import Any

import click_cases
import jax
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.inference.recommendation import (
    calibration,
    click_model,
    diagnosis,
    guard,
    lowering,
    operators,
    precision,
    report,
    search,
    study,
)
from scalejax.kernels import block_quant

MODELS = ["dlrm", "wukong", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dcnv2", "logistic"))]


@pytest.fixture(scope="module")
def dlrm():
    model = click_cases.model()
    return model, click_cases.labelled(model), calibrated(model)


def calibrated(model):
    return calibration.limits(model, [click_model.inputs_of(click_cases.batch(256, seed=9), click_cases.SCHEMA)])


def run(lowered, one):
    return np.asarray(lowered.score(lowered.arrays, click_model.inputs_of(one, click_cases.SCHEMA)))


@pytest.mark.default_cases("wukong")
@pytest.mark.parametrize("name", MODELS)
def test_float_scores_are_those_of_pooling_by_hand(name):
    model, one = click_cases.model(name), click_cases.batch()
    found = np.asarray(model.score(*model.arrays, click_model.inputs_of(one, click_cases.SCHEMA)))
    assert np.allclose(found, click_cases.by_hand(model, one), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_float32_lowering_changes_nothing_and_narrow_ones_little(name):
    model, one = click_cases.model(name), click_cases.batch()
    wanted = np.asarray(model.score(*model.arrays, click_model.inputs_of(one, click_cases.SCHEMA)))
    assert np.allclose(run(lowering.lower(model, precision.uniform(model)), one), wanted, rtol=1e-6, atol=1e-6)
    chosen = precision.uniform(model, tables="int8", dense="int8")
    error = run(lowering.lower(model, chosen), one) - wanted
    assert 0 < np.sqrt(np.mean(error**2)) < 0.05 * wanted.std()


@pytest.mark.slow
@pytest.mark.parametrize(("dense", "most"), [("float16", 0.01), ("int8", 0.15)])
def test_calibrated_scores_are_near_too(dlrm, dense, most):
    model, examples, limits = dlrm
    wanted = np.asarray(model.score(*model.arrays, examples.inputs[0]))
    lowered = lowering.lower(model, precision.uniform(model, dense=dense), limits)
    error = np.asarray(lowered.score(lowered.arrays, examples.inputs[0])) - wanted
    # Tails that calibration cuts off carry some of a score that was drawn and not learnt.
    assert 0 < np.sqrt(np.mean(error**2)) < most * wanted.std()


@pytest.mark.slow
def test_packed_tables_score_as_decoded_tables_to_the_bit(dlrm):
    model, _, _ = dlrm
    one = click_model.inputs_of(click_cases.batch(), click_cases.SCHEMA)
    for chosen in precision.TABLES[2:]:
        packed = lowering.lower(model, precision.uniform(model, tables=chosen), rows="minmax")
        decoded = {n: block_quant.dequantize_rows(t) for n, t in packed.arrays.tables.items()}
        ours = click_model.embed(model.configs, packed.arrays.tables, one)
        theirs = click_model.embed(model.configs, decoded, one)
        for feature in ours:
            assert np.array_equal(np.asarray(ours[feature]), np.asarray(theirs[feature]))


@pytest.mark.slow
def test_bytes_are_those_of_the_arrays(dlrm):
    model, _, limits = dlrm
    widths = ("float32", "float16", "int8", "float32", "int8", "float16", "float16", "int8", "float32")
    for tables, dense in zip(precision.TABLES, widths, strict=True):
        chosen = precision.uniform(model, tables=tables, dense=dense)
        arrays = dataclasses.replace(lowering.lower(model, chosen, limits, rows="minmax").arrays, limits={})
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
        assert held == precision.total_bytes(model, chosen), (tables, dense)
    assert precision.total_bytes(model, precision.uniform(model, tables="int4")) < 0.4 * precision.total_bytes(
        model, precision.uniform(model)
    )


@pytest.mark.slow
def test_calibration_finds_the_ranges_of_what_operators_are_given(dlrm):
    model, _, _ = dlrm
    batch = click_cases.batch(128, seed=3)
    inputs = [click_model.inputs_of(batch, click_cases.SCHEMA)]
    found = {path: (h.low, h.high) for path, h in calibration.histograms(model, inputs).items()}
    linear = {p for p, o in operators.find(model.shape).items() if o.kind == "linear"}
    assert (
        set(found) == linear == {"bottom/layers/0", "bottom/layers/1", "top/layers/0", "top/layers/1", "top/layers/2"}
    )
    low, high = found["bottom/layers/0"]
    assert (low, high) == (pytest.approx(batch.dense.min()), pytest.approx(batch.dense.max()))
    assert found["top/layers/1"][0] == 0  # after a ReLU


def test_the_range_of_least_error_cuts_a_long_tail_and_keeps_a_uniform_one():
    rng = np.random.default_rng(0)
    usual = np.abs(rng.normal(size=100_000))
    counts, edges = np.histogram(usual, calibration.BINS, range=(0, 60))
    counts = 20 * counts + (np.arange(calibration.BINS) == calibration.BINS - 1)  # two millions, and one far out
    low, high = calibration.least_error(calibration.Histogram(edges[0], edges[-1], counts))
    assert low == 0
    assert 4 < high < 40

    def error(high):
        step = high / 255
        decoded = step * np.clip(np.rint(usual / step), 0, 255)
        return 20 * np.square(decoded - usual).sum() + (60 - high) ** 2

    assert error(high) < 0.6 * error(60.0)
    assert error(high) < 1.1 * min(error(h) for h in np.linspace(2, 60, 200))
    even = np.full(calibration.BINS, 50)
    assert calibration.least_error(calibration.Histogram(-1.0, 1.0, even)) == (-1.0, 1.0)
    assert calibration.least_error(calibration.Histogram(2.0, 3.0, even))[0] == 0  # zero stays representable


@pytest.mark.slow
def test_diagnosis_points_at_the_operator_that_was_damaged(dlrm):
    model, examples, limits = dlrm
    chosen = precision.uniform(model, tables="int8", dense="int8")
    cut = {**limits, "top/layers/1": (0.0, limits["top/layers/1"][1] / 20)}  # most of its inputs saturate
    good, bad = (
        {
            (line.kind, line.name): line
            for line in diagnosis.diagnose(lowering.lower(model, chosen, l), examples.inputs[:1])
        }
        for l in (limits, cut)
    )
    assert good["operator", "top/layers/1"].alone > 30
    assert bad["operator", "top/layers/1"].alone < 15
    assert bad["operator", "top/layers/2"].alone > 30  # fine alone
    assert bad["operator", "top/layers/2"].within < good["operator", "top/layers/2"].within - 10
    assert bad["score", "score"].within < good["score", "score"].within - 10
    assert good["table", "user"].alone == good["table", "user"].within > 40
    exact = diagnosis.diagnose(lowering.lower(model, precision.uniform(model)), examples.inputs[:1])
    assert all(math.isinf(line.within) or math.isnan(line.alone) for line in exact)


@pytest.mark.slow
def test_emulated_scores_are_those_of_the_lowered_model(dlrm):
    model, examples, limits = dlrm
    chosen = precision.uniform(model, tables="int4", dense="int8")
    emulated = study.Emulation(model, limits).scores(chosen, examples)
    lowered = lowering.lower(model, chosen, limits)
    served = examples.scores(lambda inputs: lowered.score(lowered.arrays, inputs))
    assert np.abs(emulated - served).max() < 0.02 * served.std()  # a sum that is rounded may move a code
    assert abs(examples.ne(emulated) / examples.ne(served) - 1) < 1e-5


def made_up(losses, prices, unsure=0.0):
    """A study whose loss is a sum over choices, known as well as said."""
    names = [("table", name) for name in losses]
    start = precision.Precisions(dict.fromkeys(losses, "float32"), {})

    def gap(precisions):
        value = sum(losses[n].get(precisions.tables[n], 0.0) for n in losses)
        return click_model.Gap(value, value - unsure, value + unsure * (value > 0))

    return search.PrecisionStudy(
        start, names, lambda n: ("float32", "int8", "int4"), lambda n, p: prices[n[1]][p], gap, gap_held_out=gap
    )


def test_the_search_raises_what_gives_back_most_for_its_price():
    losses = {"a": {"int8": 1e-5, "int4": 4e-3}, "b": {"int8": 0, "int4": 1e-5}, "c": {"int8": 1e-4, "int4": 2e-4}}
    prices = {n: {"float32": 400, "int8": 110, "int4": 60} for n in losses}
    prices["c"] = {"float32": 4, "int8": 2, "int4": 1}
    found = search.search(made_up(losses, prices), budget=5e-4)
    assert found.precisions.tables == {"a": "int8", "b": "int4", "c": "int4"}  # "c" first, as it is cheap, in vain
    assert found.gap.value <= 5e-4
    assert found.held_out_gap == found.gap
    assert [s["step"] for s in found.path] == ["narrowest", "raise", "raise", "lower"]
    assert found.sensitivity[("table", "a"), "int4"] == pytest.approx(4e-3)


def test_the_search_lowers_again_what_was_raised_in_vain():
    # "a" is so cheap that it is raised between the two raises of "b", which alone bring the gap down.
    losses = {"a": {"int8": 0, "int4": 1e-5}, "b": {"int8": 1e-3, "int4": 5e-3}}
    prices = {"a": {"float32": 40, "int8": 20, "int4": 10}, "b": {"float32": 4000, "int8": 2000, "int4": 1000}}
    found = search.search(made_up(losses, prices), budget=5e-4)
    assert found.precisions.tables == {"a": "int4", "b": "float32"}
    assert [s["step"] for s in found.path] == ["narrowest", "raise", "raise", "raise", "lower"]


def test_where_one_of_two_can_be_lowered_again_it_is_the_more_expensive_one():
    # "a" and "b" are raised before "c", which alone brings the gap down; the budget has room for one of them.
    losses = {"a": {"int8": 0, "int4": 3e-4}, "b": {"int8": 0, "int4": 3e-4}, "c": {"int8": 0, "int4": 5e-3}}
    prices = {n: {"float32": 40 * k, "int8": 20 * k, "int4": 10 * k} for n, k in (("a", 1), ("b", 10), ("c", 1000))}
    found = search.search(made_up(losses, prices), budget=5e-4)
    assert [s["name"][1] for s in found.path[1:]] == ["a", "b", "c", "b"]
    assert found.precisions.tables == {"a": "int8", "b": "int4", "c": "int8"}


def test_a_budget_of_nothing_ends_with_the_widest():
    losses = {"a": {"int8": 1e-3, "int4": 2e-3}}
    prices = {"a": {"float32": 4, "int8": 2, "int4": 1}}
    found = search.search(made_up(losses, prices), budget=0.0)
    assert found.precisions.tables == {"a": "float32"}
    assert found.gap.value == 0


def test_the_search_does_not_trust_what_is_not_sure():
    losses = {"a": {"int8": 1e-5, "int4": 4e-4}, "b": {"int8": 1e-5, "int4": 2e-5}}
    prices = {n: {"float32": 4, "int8": 2, "int4": 1} for n in losses}
    assert search.search(made_up(losses, prices), budget=5e-4).precisions.tables == {"a": "int4", "b": "int4"}
    unsure = search.search(made_up(losses, prices, unsure=3e-4), budget=5e-4)
    assert unsure.precisions.tables == {"a": "int8", "b": "int4"}
    assert unsure.gap.high <= 5e-4


@pytest.mark.slow
def test_gaps_are_those_of_ne_and_auc_and_their_intervals_cover_resampling(dlrm):
    model, examples, limits = dlrm
    lowered = lowering.lower(model, precision.uniform(model, tables="int2"), limits, rows="minmax")
    wanted = examples.scores(lambda i: model.score(*model.arrays, i))
    found = examples.scores(lambda i: lowered.score(lowered.arrays, i))
    gaps = examples.gap(wanted, found), examples.auc_gap(wanted, found)
    assert gaps[0].value == pytest.approx(examples.ne(found) / examples.ne(wanted) - 1, abs=1e-7)
    assert gaps[1].value == pytest.approx(examples.auc(found) / examples.auc(wanted) - 1, abs=1e-12)
    rng, samples = np.random.default_rng(0), []
    for _ in range(300):
        i = rng.integers(0, len(wanted), len(wanted))
        part = dataclasses.replace(examples, labels=examples.labels[i], weights=examples.weights[i])
        samples.append([part.ne(found[i]) / part.ne(wanted[i]) - 1, part.auc(found[i]) / part.auc(wanted[i]) - 1])
    for gap, (low, high) in zip(gaps, np.percentile(samples, [2.5, 97.5], axis=0).T, strict=True):
        width = high - low
        assert abs(gap.low - low) < 0.2 * width
        assert abs(gap.high - high) < 0.2 * width


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "wukong"])
def test_a_search_of_a_model_stays_within_its_budget_and_is_smaller(dlrm, name):
    model, examples, limits = dlrm
    if name != "dlrm":
        model = click_cases.model(name)
        examples, limits = click_cases.labelled(model), calibrated(model)
    asked = study.study(model, limits, examples, click_cases.labelled(model, 512, seed=5))
    found = search.search(asked, budget=5e-3)
    assert found.gap.high <= 5e-3
    assert precision.total_bytes(model, found.precisions) < 0.5 * precision.total_bytes(model, precision.uniform(model))
    lowered = lowering.lower(model, found.precisions, limits)
    measured = report.with_search(
        report.measure(lowered, examples, calibration=examples.inputs[:1], repeats=2), found, 5e-3
    )
    assert measured["quality"]["gap"] == pytest.approx(found.gap.value, abs=1e-5)
    assert measured["bytes"]["share"] < 0.5
    assert [line["name"] for line in measured["operators"]][-1] == "score"
    assert len(report.tables(measured)) == 2


@pytest.mark.slow
def test_a_gap_is_over_float32_whatever_the_search_may_take(dlrm):
    model, examples, limits = dlrm
    asked = study.study(model, limits, examples, examples, tables=("int2",), dense_choices=("float32",))
    found = search.search(asked, budget=1e-6)
    emulation = study.Emulation(model, limits)
    scores = [emulation.scores(precision.uniform(model, tables=t), examples) for t in ("float32", "int2")]
    assert set(found.precisions.tables.values()) == {"int2"}
    assert found.gap == examples.gap(*scores)
    assert found.gap.value > 1e-6


def test_what_has_more_bytes_than_a_wider_precision_is_not_tried(dlrm):
    """Rows of 16 numbers: 24 bytes in int8 and 40 under 16 of their own; 12 in int4 and under 4 of their own."""
    model, examples, limits = dlrm
    asked = study.study(model, limits, examples, examples, tables=precision.TABLES)
    for config in model.configs:
        assert config.dim == 16
        narrow = ("float32", "float16", "int8", "int4", "kmeans4_shared", "int2", "kmeans2_shared")
        assert asked.choices(("table", config.name)) == narrow
    asked = study.study(model, limits, examples, examples, tables=("kmeans4", "kmeans2"))
    assert asked.choices(("table", model.configs[0].name)) == ("kmeans4", "kmeans2")


def test_examples_of_one_label_are_refused(dlrm):
    """Their NE is no number, and a gap of no number is above no budget."""
    model, examples, limits = dlrm
    alike = dataclasses.replace(examples, labels=np.zeros_like(examples.labels))
    with pytest.raises(UserError, match="All 1,024 examples of the validation split have 0 as their 'label'"):
        study.study(model, limits, alike, examples)
    with pytest.raises(UserError, match="of the test split"):
        study.study(model, limits, examples, alike)


@pytest.mark.slow
def test_latencies_are_measured_for_every_choice(dlrm):
    model, examples, limits = dlrm
    asked = study.study(
        model,
        limits,
        examples,
        examples,
        objective="latency",
        tables=("float32", "int8"),
        dense_choices=("float32", "int8"),
    )
    prices = [asked.cost(name, chosen) for name in asked.names for chosen in asked.choices(name)]
    assert len(prices) == 2 * 3 + 2 * 5
    assert min(prices) > 0


def test_the_guard_is_quiet_for_a_good_model_and_raises_the_alarm_for_a_bad_one(dlrm):
    model, _, limits = dlrm
    good = lowering.lower(model, precision.uniform(model, tables="int8"), limits)
    bad = lowering.lower(model, precision.uniform(model, tables="int2", dense="int8"), limits)
    for lowered, wanted in ((good, "none"), (bad, "gap")):
        for with_labels in (False, True):
            watch = guard.Guard(model, lowered, budget=3e-4, share=1.0)
            examples = click_cases.labelled(model, 2048, seed=2)
            at = 0
            for inputs in examples.inputs:
                labels = examples.labels[at : at + 256] if with_labels else None
                served = watch.serve(inputs, labels)
                at += 256
                assert served.shape == (256, 1)
            state = watch.state()
            assert state.examples == 2048
            assert state.low < state.gap < state.high
            if with_labels:
                low = examples.scores(lambda i, lowered=lowered: lowered.score(lowered.arrays, i))
                wide = examples.scores(lambda i: model.score(*model.arrays, i))
                assert state.ne == pytest.approx(examples.ne(wide), rel=1e-6)
                assert state.gap == pytest.approx(examples.ne(low) / examples.ne(wide) - 1, abs=1e-7)
            if not with_labels:
                assert state.gap > 0
                assert state.alarm == wanted
    assert watch.close_window() == watch.windows[0]
    assert watch.state().examples == 0


def test_the_guard_sees_scores_that_are_not_finite_and_samples_a_share(dlrm):
    model, _, _ = dlrm
    lowered = lowering.lower(model, precision.uniform(model))
    watch = guard.Guard(model, lowered, budget=1e-3, share=0.25, seed=3)
    inputs = click_model.inputs_of(click_cases.batch(8), click_cases.SCHEMA)
    for _ in range(80):
        watch.serve(inputs)
    assert 80 <= watch.state().examples <= 8 * 40
    wrong = np.zeros((4, 1), np.float32)
    wrong[2] = np.nan
    watch.compare(np.zeros((4, 1), np.float32), wrong)
    assert (watch.state().alarm, watch.state().nonfinite) == ("nonfinite", 1)


def test_the_gap_of_a_guard_is_that_of_labelled_examples_with_several_tasks_and_weights():
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(900, 2)) * 2 - np.array([0, 3])
    served = wanted + 0.1 * rng.normal(size=wanted.shape) + 0.02
    labels = (rng.random(wanted.shape) < 1 / (1 + np.exp(-wanted))).astype(np.float32)
    weights = rng.integers(1, 4, 900).astype(np.float32)
    watch = guard.Guard(*nothing(), budget=1e-3)
    for part in np.split(np.arange(900), 3):
        watch.compare(wanted[part], served[part], labels[part], weights[part])
    state, examples = watch.state(), click_model.Labelled((), (), labels, weights)
    gap = examples.gap(wanted, served)
    assert state.ne == pytest.approx(examples.ne(wanted), rel=1e-6)
    # The guard's interval is that of a sample: wider by half of one part in so many examples.
    assert (state.gap, state.low, state.high) == pytest.approx(gap, rel=3e-3)


def nothing():
    """Models for a guard that is given scores."""
    none: Any = None
    return none, none


def test_the_guard_refuses_labels_and_weights_that_would_hide_a_gap():
    wanted = np.random.default_rng(0).normal(size=(8, 1))
    for labels, weights, words in (
        (np.full((8, 1), np.nan), None, r"labels must lie in \[0, 1\]"),
        (np.ones(8), None, r"labels must have the shape of scores, \(8, 1\); got \(8,\)"),
        (None, -np.ones(8), "weights must be finite and at least 0"),
        (None, np.ones((8, 1)), r"one for each of 8 examples; got \(8, 1\)"),
    ):
        watch = guard.Guard(*nothing(), budget=1e-3)
        with pytest.raises(UserError, match=words):
            watch.compare(wanted, wanted + 5, labels, weights)
        assert watch.state().examples == 0


def test_the_guard_is_not_sure_of_one_example_and_is_of_many_that_were_certain():
    watch = guard.Guard(*nothing(), budget=1e-3)
    watch.compare(np.zeros((1, 1)), np.full((1, 1), 5.0))
    assert (watch.state().alarm, watch.state().high) == ("none", np.inf)
    watch = guard.Guard(*nothing(), budget=1e-3)
    watch.compare(np.full((8, 1), 500.0), np.full((8, 1), -500.0))  # the float model loses nothing at all
    assert (watch.state().alarm, watch.state().ne) == ("gap", 0)


def test_an_output_that_is_not_finite_any_more_is_no_small_noise():
    sums = diagnosis._Sums()
    for name, value in (("a", np.inf), ("b", np.nan), ("c", 1.0)):
        sums.add(("operator", name, "alone"), np.ones(2), np.array([1, value]))
    found = [report._json(sums.db(("operator", name, "alone"))) for name in "abc"]
    assert found == ["not finite", "not finite", "exact"]


def test_precisions_are_kept_in_a_file_and_belong_to_a_model(dlrm, tmp_path):
    model, _, _ = dlrm
    chosen = precision.uniform(model, tables="int4", dense="int8")
    chosen.save(tmp_path / "p.json")
    assert precision.load(tmp_path / "p.json", model) == chosen
    with pytest.raises(UserError, match="'before/bottom/layers/0' has no precision"):
        precision.load(tmp_path / "p.json", click_cases.model("wukong"))
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(UserError, match="is no file of precisions"):
        precision.load(tmp_path / "p.json", model)


def test_what_does_not_fit_is_refused_by_name(dlrm):
    model, _, limits = dlrm
    broken = {**model.tables, "shown": np.where(np.arange(50)[:, None] == 4, np.nan, model.tables["shown"])}
    with pytest.raises(UserError, match="Table 'shown': 1 rows are not finite, row 4 first"):
        lowering.lower(dataclasses.replace(model, tables=broken), precision.uniform(model, tables="int4"))
    name = "top/layers/0/kernel"
    params = {**model.params, name: np.where(np.arange(32) == 4, np.nan, model.params[name])}
    with pytest.raises(UserError, match=f"{name}: holds numbers that are not finite"):
        lowering.lower(dataclasses.replace(model, params=params), precision.uniform(model, dense="int8"))
    wide = {**model.tables, "user": model.tables["user"] * 1e7}
    for chosen, words in (("int4", "too large for int4"), ("float16", "does not fit float16")):
        with pytest.raises(UserError, match=words):
            lowering.lower(dataclasses.replace(model, tables=wide), precision.uniform(model, tables=chosen))
    with pytest.raises(UserError, match="operator bottom/layers/0 has no range"):
        lowering.lower(model, precision.uniform(model, dense="int8"), {})
    with pytest.raises(UserError, match="must be one of float32, float16; got 'int8'"):
        wukong = click_cases.model("wukong")
        chosen = precision.uniform(wukong).with_one(("operator", "layers/0/lcb"), "int8")
        precision.check(chosen, wukong)
    with pytest.raises(UserError, match="table user has shape"):
        click_model.bind(model.task, {**model.tables, "user": np.zeros((2, 2))}, model.params)
    bad = click_cases.batch(4)
    bad.features.values[0] = 300
    with pytest.raises(UserError, match="feature 'user': id 300 of example 0"):
        click_model.inputs_of(bad, click_cases.SCHEMA)
    with pytest.raises(UserError, match="budget must be at least 0"):
        search.search(made_up({"a": {}}, {"a": dict.fromkeys(("float32", "int8", "int4"), 1)}), budget=-1)
    with pytest.raises(UserError, match="share must lie in"):
        guard.Guard(model, lowering.lower(model, precision.uniform(model)), budget=1e-3, share=0)
    assert limits


@pytest.mark.slow
def test_lookups_of_int8_operators_do_not_depend_on_the_batch_when_calibrated(dlrm):
    model, _, limits = dlrm
    lowered = lowering.lower(model, precision.uniform(model, dense="int8"), limits)
    whole = click_cases.batch(32)
    half = dataclasses.replace(
        whole,
        features=whole.features.take(np.arange(16)),
        dense=whole.dense[:16],
        labels=whole.labels[:16],
        weights=whole.weights[:16],
    )
    assert np.allclose(run(lowered, whole)[:16], run(lowered, half), rtol=1e-5, atol=1e-6)
