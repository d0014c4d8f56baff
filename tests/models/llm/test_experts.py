"""Experts in a decoder: the layer equals loops, the losses of the router their formulas, and devices change nothing."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small_language_run as small
from flax import nnx
from llama_cases import F64, GQA, rows, tokens
from rich.console import Console

from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.inference import generate, run_model
from scalejax.models.llm import experts
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.expert_use import SUMS, ExpertUse, UseSums
from scalejax.models.llm.experts import ExpertChoice, Experts, Prepared, TopK
from scalejax.nn import Dtypes
from scalejax.numerics.quantized import static
from scalejax.numerics.quantized.weights import StaticWeight
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.checkpoints import trained
from scalejax.train.metrics.protocol import names_of
from scalejax.train.reports import console, report
from scalejax.train.state import ModelShape
from scalejax.train.task import Batch, whole

EXPERTS = Experts(count=4, router=TopK(k=2))
EXECUTIONS = {
    "grouped": EXPERTS,
    **{
        name: Experts(count=4, router=TopK(k=2, capacity_factor=2.0), execution=name)
        for name in ("batched", "sequential")
    },
    "batched, with drops": Experts(count=4, router=TopK(k=2, capacity_factor=0.5), execution="batched"),
}
CONFIG = dataclasses.replace(GQA, mlp=EXPERTS)


@pytest.fixture
def stream(x64):
    """Two rows of 16 positions, of which some are padding."""
    rng = np.random.default_rng(0)
    real = np.ones((2, 16), bool)
    real[0, 12:] = real[1, 3] = False
    return jnp.asarray(rng.standard_normal((2, 16, GQA.dim))), jnp.asarray(real)


def layer(part, number=1, dtypes=F64):
    """The module with the parameters of one layer, larger than they begin, so that experts differ."""
    module = part.build(GQA, nnx.Rngs(0), dtypes)
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda x: 20 * x[number], state))


@nnx.jit
def through(module, x, real):
    return module.with_numbers(x, Prepared(real), module.numbers(2))


def silu(x):
    return x / (1 + np.exp(-x))


def literal(module, x, real, k, capacity):
    """(y, [entropy], gates of each expert, dropped) of a loop over tokens."""
    router, gate, up, down = (np.asarray(p[...]) for p in (module.router, module.gate, module.up, module.down))
    x, real = np.asarray(x).reshape(-1, x.shape[-1]), np.asarray(real).reshape(-1)
    y, entropy, gates, dropped = np.zeros_like(x), 0.0, [[] for _ in gate], 0
    left = np.full(len(gate), capacity)
    for t in np.flatnonzero(real):
        p = np.exp(x[t] @ router - (x[t] @ router).max())
        p /= p.sum()
        entropy -= (p * np.log(p)).sum()
        chosen = np.argsort(-p, kind="stable")[:k]
        for e in chosen:
            gates[e].append(p[e] / p[chosen].sum())
            if left[e] == 0:
                dropped += 1
                continue
            left[e] -= 1
            y[t] += gates[e][-1] * ((silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e])
    return y, entropy, gates, dropped


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_layer_is_the_loop_over_its_tokens(stream, execution):
    x, real = stream
    module = layer(EXECUTIONS[execution])
    capacity = {"grouped": x.size, "batched, with drops": 8}.get(execution, 32)
    y, numbers = through(module, x, real)
    expected, entropy, gates, dropped = literal(module, x, real, 2, capacity)
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(numbers["entropy"].sum(), entropy, rtol=1e-10)
    np.testing.assert_array_equal(numbers["load"].sum(0), [list(map(len, gates)), np.zeros(4)])
    use = EXECUTIONS[execution].metrics(2)[0]
    found = use.tabulate(UseSums(**{name: np.asarray(numbers[name].sum(0)) for name in SUMS}))
    np.testing.assert_allclose(found["gate_mean"], [list(map(np.mean, gates)), [np.nan] * 4], rtol=1e-10)
    spread = [np.std(each) / np.mean(each) for each in gates]
    np.testing.assert_allclose(found["gate_cv"], [spread, [np.nan] * 4], rtol=1e-8)
    assert int(numbers["dropped"].sum()) == dropped
    assert (dropped > 0) == ("drops" in execution)
    assert numbers["tokens"].tolist() == [12, 15]
    assert numbers["layer"].tolist() == [1, 1]


def test_the_use_of_experts_is_a_share_of_what_it_is_named_after():
    """Two layers of two experts, 8 tokens with 2 choices each: 3 of 16 choices a layer are dropped."""
    load = np.array([[8.0, 8.0], [16.0, 0.0]])
    totals = {"tokens": 16.0, "entropy": 8.0, "dropped": 6.0, "unseen": 1.0, "once": 4.0}
    sums = UseSums(load=load, gates=load / 2, gates_squared=load / 4, **{n: np.float64(x) for n, x in totals.items()})
    assert ExpertUse(layers=2, experts=2, k=2, group="text").compute(sums) == {
        "expert_load_max/text": 2.0,
        "experts_unused/text": 1.0,
        "gate_spread/text": 0.0,
        "router_entropy/text": 0.5,
        "dropped/text": 6 / 32,
        "tokens_unseen/text": 1 / 16,
        "tokens_seen_once/text": 1 / 4,
    }


@pytest.mark.slow
def test_the_implementation_of_grouped_products_is_that_of_the_config(stream):
    x, real = stream
    forms = {}
    for name in ("blocks", "ragged_dot"):
        module = layer(dataclasses.replace(EXPERTS, implementation=name))
        run = lambda x, module=module: module.with_numbers(x, Prepared(real), module.numbers(2))[0]  # noqa: E731
        forms[name] = str(jax.make_jaxpr(run)(x)), run(x)
    assert "ragged_dot" in forms["ragged_dot"][0]
    assert "ragged_dot" not in forms["blocks"][0]
    np.testing.assert_allclose(forms["ragged_dot"][1], forms["blocks"][1], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "nvfp4"])
def test_what_an_expert_multiplies_is_quantized_under_its_own_scale(stream, format):
    """The numbers of a table that are nearest; of NVFP4 `static.encode` of one row at a time."""
    x = stream[0].astype(jnp.float32)
    module = layer(EXPERTS, dtypes=Dtypes())
    shape = ModelShape.of(module)
    params = shape.split(module)
    largest = {"fp8_e4m3": 448.0, "int8": 127.0, "nvfp4": 2688.0}[format]
    scales = {"gate": [1.5, 2, 3, 0], "up": [1.5, 2, 3, 0], "down": [40.0, 50, 60, 70]}
    scales = {name: jnp.asarray(own, jnp.float32) / largest for name, own in scales.items()}
    weights = {n: StaticWeight(array=params[n], scale=own, format=format, path=n) for n, own in scales.items()}

    def quantized(row, scale):
        if scale == 0:
            return row
        if format == "nvfp4":
            return np.asarray(static.encode(jnp.asarray(row)[None], jnp.float32(scale), format)[0] * scale)
        numbers = np.arange(-128, 128, dtype=np.float32)
        if format == "fp8_e4m3":
            numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            numbers = np.unique(numbers[np.isfinite(numbers)])
        return numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, row / scale)] * scale

    p = {name: np.asarray(value) for name, value in params.items()}
    rows = np.asarray(x).reshape(-1, x.shape[-1])
    expected = np.zeros_like(rows)
    for t, row in enumerate(rows):
        score = np.exp(row @ p["router"])
        chosen = np.argsort(-score)[:2]
        for e in chosen:
            read = {name: quantized(row, float(scales[name][e])) for name in ("gate", "up")}
            between = silu(read["gate"] @ p["gate"][e]) * (read["up"] @ p["up"][e])
            made = quantized(between.astype(np.float32), float(scales["down"][e])) @ p["down"][e]
            expected[t] += score[e] / score[chosen].sum() * made
    found = np.asarray(shape.merge({**params, **weights})(x)).reshape(expected.shape)
    plain = np.asarray(shape.merge(params)(x)).reshape(expected.shape)
    wrong = np.abs(found - expected).max(1) > 1e-3 * np.abs(expected).max()
    assert wrong.mean() < 0.05  # a sum that rounds otherwise may move a number to the next
    assert np.abs(plain - expected).max() > 0.01 * np.abs(expected).max()


def test_room_for_a_broken_number_of_tokens_is_rounded_up(monkeypatch):
    """Of 10 tokens with 2 choices each and three experts, and of 3 rows of 5 that three experts choose from."""

    class Asked(Exception):
        pass

    def ask(*_, count, capacity):
        raise Asked(count, capacity)

    monkeypatch.setattr(experts.routing, "routes_with_capacity", ask)
    x, gates = (jax.ShapeDtypeStruct((2, 5, width), jnp.float32) for width in (3, 2))
    for router, devices, wanted in (
        (TopK(k=2, capacity_factor=1.0), 1, (3, 7)),  # 20 / 3
        (TopK(k=2, capacity_factor=1.25), 1, (3, 9)),  # 25 / 3
        (TopK(k=2, pair_factor=0.55), 3, (3, 4)),  # 11 / 3
    ):
        execution = "grouped" if router.capacity_factor is None else "batched"
        run = experts._Run(Experts(count=3, router=router, execution=execution), 4, ((), ()))
        weights = jax.ShapeDtypeStruct((3 // devices, 3, 4), jnp.float32)
        local = functools.partial(experts._chosen, router=router, run=run)
        with pytest.raises(Asked) as asked:
            jax.eval_shape(local, x, gates.update(dtype=jnp.int32), gates, weights)
        assert asked.value.args == wanted
    scores, real = jax.ShapeDtypeStruct((3, 5, 3), jnp.float32), jax.ShapeDtypeStruct((3, 5), bool)
    for factor, places in ((1.0, 5), (1.25, 7)):  # 15 / 3, and 18.75 / 3
        with pytest.raises(Asked) as asked:
            jax.eval_shape(functools.partial(experts._of_all, factor=factor, cut=((), ())), scores, real)
        assert asked.value.args == (3, places)


@pytest.mark.slow
def test_without_numbers_nothing_is_dropped(stream):
    x, _ = stream
    module = layer(EXECUTIONS["batched, with drops"])
    expected = literal(module, x, np.ones((2, 16), bool), 2, x.size)[0]
    np.testing.assert_allclose(module(x).reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_losses_of_the_router_are_their_formulas(stream, k):
    """The balance loss as transformers computes it for Mixtral, of one layer."""
    x, _ = stream
    part = Experts(count=4, router=TopK(k=k, balance=1.0, z=0.0))
    module = layer(part)
    real = np.ones((2, 16), bool)

    def losses(x):
        numbers = through(module, x, jnp.asarray(real))[1]
        numbers["layer"] = jnp.full_like(numbers["layer"], GQA.layers)
        return numbers

    logits = np.asarray(x).reshape(32, -1) @ np.asarray(module.router[...])
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    mask = np.zeros((32, k, 4))
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :k]
    np.put_along_axis(mask, chosen[:, :, None], 1, axis=2)
    balance = (mask.mean(0) * p.mean(0)[None, :]).sum() * 4
    z = (np.log(np.exp(logits).sum(1)) ** 2).sum()
    numbers = losses(x)
    np.testing.assert_allclose(numbers["balance"].sum() / 32, balance, rtol=1e-12)
    np.testing.assert_allclose(numbers["z"].sum(), z, rtol=1e-12)
    np.testing.assert_allclose(part.losses(numbers), balance * 32 / GQA.layers, rtol=1e-12)
    weighed = Experts(count=4, router=TopK(k=k, balance=0.0, z=0.5))
    np.testing.assert_allclose(weighed.losses(numbers), 0.5 * z / GQA.layers, rtol=1e-12)


@pytest.mark.slow
def test_the_balance_loss_pulls_experts_level(x64):
    """By its gradient alone, from a router that sends all tokens to one expert."""
    part = Experts(count=4, router=TopK(k=1))
    module = part.build(dataclasses.replace(GQA, layers=1), nnx.Rngs(0), F64)
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda x: x[0], state)
    x = jax.random.normal(jax.random.key(0), (4, 64, GQA.dim)).at[:, :, 0].set(1.0)
    real = jnp.ones((4, 64), bool)
    router = 0.2 * jax.random.normal(jax.random.key(1), (GQA.dim, 4)).at[0, 1].set(30.0)

    @jax.jit
    def step(router):
        def loss(router):
            module = nnx.merge(graph, nnx.State({**state, "router": state["router"].replace(router)}))
            numbers = module.with_numbers(x, Prepared(real), module.numbers(4))[1]
            return numbers["balance"].sum() / 256, numbers["load"].sum((0, 1))

        (value, load), gradient = jax.value_and_grad(loss, has_aux=True)(router)
        return router - gradient, value, load

    loads = []
    for _ in range(100):
        router, value, load = step(router)
        loads.append(np.asarray(load))
    assert loads[0].max() == 256
    assert loads[-1].max() < 128
    assert value < 1.3  # 1 is the least


def chosen_by_loop(module, x, real, groups):
    """y and who saw whom, by the pseudocode of MoMa, each group of tokens (numbers of rows) by itself."""
    router, gate, up, down = (np.asarray(p[...]) for p in (module.router, module.gate, module.up, module.down))
    x, real = np.asarray(x), np.asarray(real)
    y, saw = np.zeros_like(x), np.zeros((*real.shape, len(gate)))
    for group in groups:
        tokens = [(b, s) for b in group for s in range(real.shape[1]) if real[b, s]]
        k = max(len(tokens) // len(gate), 1) if tokens else 0
        for e in range(len(gate)):
            scores = {at: 1 / (1 + np.exp(-x[at] @ router[:, e])) for at in tokens}
            for at in sorted(tokens, key=lambda at: (-scores[at], at))[:k]:
                y[at] += scores[at] * ((silu(x[at] @ gate[e]) * (x[at] @ up[e])) @ down[e])
                saw[*at, e] = 1
    return y, saw


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["batched", "sequential"])
@pytest.mark.parametrize(("group", "groups"), [("device", [[0, 1]]), ("sequence", [[0], [1]])])
def test_experts_that_choose_are_the_loop_of_the_paper(stream, group, groups, execution):
    x, real = stream
    part = Experts(count=4, router=ExpertChoice(group=group), execution=execution)
    module = layer(part)
    y, numbers = through(module, x, real)
    expected, saw = chosen_by_loop(module, x, real, groups)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(numbers["load"][:, 0], saw.sum(1))
    scores = 1 / (1 + np.exp(-np.asarray(x) @ np.asarray(module.router[...])))
    np.testing.assert_allclose(numbers["gates"][:, 0], (saw * scores).sum(1), rtol=1e-10)
    np.testing.assert_allclose(numbers["gates_squared"][:, 0], (saw * scores**2).sum(1), rtol=1e-10)
    assert float(numbers["unseen"].sum()) == (saw.sum(2)[np.asarray(real)] == 0).sum() > 0
    assert not part.losses(numbers)
    assert not numbers["dropped"].any()


def test_only_models_that_can_are_said_to_generate():
    assert task().advice()
    assert not task(dataclasses.replace(CONFIG, mlp=Experts(router=ExpertChoice(), execution="batched"))).advice()


def test_nothing_is_generated_where_experts_choose(stream):
    module = layer(Experts(count=4, router=ExpertChoice(), execution="batched"))
    with pytest.raises(UserError, match=r"nothing can be generated and no text scored\. Train auxiliary routers"):
        module(stream[0])


def test_a_later_token_changes_an_earlier_one_where_experts_choose_and_only_there(stream):
    x, real = stream
    other = x.at[1, 15].set(9.0)

    def moved(part):
        module = layer(part)
        before, after = (through(module, rows, real)[0] for rows in (x, other))
        return bool((before[:, :15] != after[:, :15]).any())

    assert moved(Experts(count=4, router=ExpertChoice(group="sequence"), execution="batched"))
    assert not moved(EXPERTS)


def task(config=CONFIG, length=16):
    return config.task(TokenSchema(vocabulary=90, length=length))


def batch_of(config=CONFIG):
    segments, positions = rows(5, 7, 4)
    ids = tokens(config, 1, 16)
    arrays = {"tokens": ids, "targets": ids, "segment_ids": segments, "positions": positions}
    return Batch({**arrays, "weights": np.ones(ids.shape, np.float32)})


SHORT = {
    "top-k": EXPERTS,
    **{
        group: Experts(count=4, router=ExpertChoice(group=group), execution="batched")
        for group in ("sequence", "device", "global")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_rows_that_fill_a_last_short_batch_change_nothing(x64, name):
    """They are padding: no expert sees them, and they do not count where experts choose their share."""
    bound = task(dataclasses.replace(CONFIG, mlp=SHORT[name]))
    model = bound.init(nnx.Rngs(0), F64)
    short = batch_of()
    filled = Batch({name: np.pad(np.asarray(rows), ((0, 2), (0, 0))) for name, rows in short.fields.items()})
    loss = nnx.jit(lambda model, batch: bound.loss(model, batch, keys=None, gather=whole))
    alone, padded = (loss(model, batch) for batch in (short, filled))
    np.testing.assert_allclose(padded.sum, alone.sum, rtol=1e-12)
    for name, value in alone.sums.items():
        np.testing.assert_allclose(padded.sums[name], value, rtol=1e-12, err_msg=name)


def test_the_best_checkpoint_is_that_of_the_loss_without_later_tokens_once_there_is_one():
    choosing = ExpertChoice(), ExpertChoice(auxiliary=AuxiliaryRouter())
    parts = [Experts(count=4, router=router, execution="batched") for router in choosing]
    first = [next(iter(names_of(task(dataclasses.replace(CONFIG, mlp=part)).metrics()))) for part in (EXPERTS, *parts)]
    assert first == ["loss", "loss_topk", "loss"]


@pytest.mark.slow
def test_the_loss_is_the_cross_entropy_and_the_losses_of_the_router(x64):
    bound = task()
    model = bound.init(nnx.Rngs(0), F64)
    loss = bound.loss(model, batch_of(), keys=None, gather=whole)
    plain = task(dataclasses.replace(CONFIG, mlp=Experts(count=4, router=TopK(k=2, balance=0.0))))
    without = plain.loss(model, batch_of(), keys=None, gather=whole)
    np.testing.assert_allclose(loss.sums["cross_entropy"], without.sum, rtol=1e-12)
    load = np.asarray(loss.sums["experts/load"])
    assert load.shape == (GQA.layers, 4)
    np.testing.assert_array_equal(load.sum(1), [32] * GQA.layers)
    assert float(loss.sum - without.sum) > 0.01 * 2 * 16 * 0.99  # k a token at least, times its factor
    values = {}
    for metric in bound.metrics():
        sums = metric.update(metric.zeros(), loss, batch_of())
        values |= metric.compute(jax.tree.map(lambda pair: np.asarray(pair.value), sums, is_leaf=_is_pair))
    np.testing.assert_allclose(values["loss"], float(without.sum) / 16, rtol=1e-6)
    np.testing.assert_allclose(values["expert_load_max"], (load / 8).max(), rtol=1e-6)
    assert values["experts_unused"] == (load == 0).sum()
    assert values["dropped"] == 0
    assert 0 < values["router_entropy"] <= np.log(4) + 1e-6


def _is_pair(x):
    return hasattr(x, "error")


def test_parameters_and_work_are_counted_by_what_a_token_meets():
    dense = dataclasses.replace(CONFIG, mlp=type(GQA.mlp)())
    extra = CONFIG.parameters() - dense.parameters()
    assert extra == GQA.layers * (3 * 3 * GQA.dim * GQA.ffn_dim + 4 * GQA.dim)
    more = GQA.layers * (4 * GQA.dim + 3 * GQA.dim * GQA.ffn_dim)
    assert CONFIG.flops_per_token(64) - dense.flops_per_token(64) == 6 * more


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


@pytest.fixture(scope="module")
def whole_run(texts, tmp_path_factory):
    """(experiment, its folder, its summary)"""
    made = small.experiment(texts, model=dataclasses.replace(small.MODEL, mlp=EXPERTS))
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return made, folder, loop.train(made, workdir=folder)


@pytest.mark.slow
def test_a_run_in_two_halves_has_the_same_bits(whole_run, tmp_path):
    made, _, whole = whole_run
    loop.train(dataclasses.replace(made, steps=8), workdir=tmp_path / "halves")
    again = loop.train(made, workdir=tmp_path / "halves")
    assert whole["val_loss"] == again["val_loss"]


@pytest.mark.slow
def test_a_run_says_how_experts_are_used(whole_run):
    _, folder, whole = whole_run
    assert (folder / "metrics.jsonl").read_text().splitlines()[-1].count("expert_load_max")
    assert whole["val_experts_unused"] == 0
    assert 1 <= whole["val_expert_load_max"] < 4
    spread = np.asarray(whole["val_gate_cv"])
    assert spread.shape == np.shape(whole["val_gate_mean"]) == (small.MODEL.layers, 4)
    np.testing.assert_allclose(spread.mean(), whole["val_gate_spread"])
    table = Console(width=120, file=io.StringIO())
    table.print(console.closing_table(whole, report.read_described(folder)))
    printed = table.file.getvalue()
    assert "mean gate of each expert" in printed
    assert " ".join(f"{value:.2f}" for value in spread[0]) in printed
    page = (folder / "report.html").read_text()
    assert " ".join(f"{value:.2f}" for value in spread[0]) in page


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(k=0), "k must be a whole number of at least 1; got 0"),
        (lambda: TopK(scores="linear"), "scores must be softmax or sigmoid; got 'linear'"),
        (lambda: TopK(balance=-1.0), "balance must be 0 or more, and finite; got -1.0"),
        (lambda: TopK(capacity_factor=0.0), "capacity_factor must be above 0 and finite, or None; got 0.0"),
        (lambda: Experts(count=0), "count must be a whole number of at least 1; got 0"),
        (lambda: Experts(count=2, router=TopK(k=3)), "router.k must be at most count; got 3 of 2 experts"),
        (lambda: Experts(execution="fast"), "execution must be grouped, batched or sequential; got 'fast'"),
        (lambda: Experts(implementation="fast"), "implementation must be one of .*; got 'fast'"),
        (lambda: Experts(execution="batched"), "execution='batched' does not go with .*capacity_factor=None"),
        (lambda: Experts(router=TopK(capacity_factor=1.0)), "execution='grouped' does not go with .*1.0"),
        (lambda: Experts(router=ExpertChoice()), "execution='grouped' does not go with router=ExpertChoice"),
        (lambda: ExpertChoice(group="row"), "group must be sequence, device or global; got 'row'"),
        (lambda: ExpertChoice(capacity_factor=1.0), "goes with group='global' alone; in a device"),
        (lambda: TopK(pair_factor=-1.0), r"pair_factor must be above 0 and finite, or None; got -1\.0"),
        (lambda: TopK(capacity_factor=1.0, pair_factor=2.0), r"leave pair_factor=2\.0 out"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_a_bias_that_keeps_experts_even_is_used_in_generation_too(tmp_path):
    """It is a variable and no parameter: greedy tokens are those of full passes with it."""
    texts = small.write(tmp_path / "documents")
    part = Experts(count=4, router=TopK(k=2, balance=0.0, bias_rate=0.1))
    made = small.experiment(texts, model=dataclasses.replace(small.MODEL, mlp=part))
    loop.train(made, workdir=tmp_path / "run")
    opened = run_model.open_run(tmp_path / "run", made)
    engine = generate.load(opened, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))
    (found,) = engine.generate([[97, 98, 99]], max_tokens=4)
    state = trained.open_run(tmp_path / "run")
    assert np.asarray(state.variables["layers/mlp/bias"][...]).any()
    model = opened.config.task(made.data.schema()).init(nnx.Rngs(0), Dtypes("float32"))
    shape = ModelShape.of(model)
    arrays = {path: jnp.asarray(x[...]) for path, x in (*state.params.items(), *state.variables.items())}
    full = jax.jit(lambda *given: shape.merge(arrays)(*given))
    ids = [97, 98, 99]
    for _ in range(4):
        tokens = jnp.asarray([[*ids, *[0] * (8 - len(ids))]])
        logits = full(tokens, jnp.arange(8)[None], jnp.ones_like(tokens))
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    assert list(found.tokens) == ids[3:]
