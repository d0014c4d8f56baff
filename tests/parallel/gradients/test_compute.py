import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stablehlo
from covering import covering
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import fsdp, pipeline
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients import blocks
from scalejax.parallel.gradients.compute import ROWS, Keys, Loss, LossAndGradients, LossInputs, gradients
from scalejax.parallel.mesh import AXES, BATCH_AXES, MeshShape
from scalejax.parallel.rules import Rules

pytestmark = pytest.mark.usefixtures("x64")

B, D, C, LAYERS, DEVICES = 64, 16, 4, 4, 8
SHAPES = {f"layer{i}/weight": (D, D) for i in range(LAYERS)} | {"head/weight": (D, C), "head/bias": (C,)}
TRAINED = {"all": frozenset(SHAPES), "last": frozenset(("layer3/weight", "head/weight", "head/bias"))}
FULL = Fsdp(form="explicit")

SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "DDP")
PRODUCT = [
    case
    for case in itertools.product(SHARDINGS, ("implicit", "explicit"), ("communicate", "local"), (1, 4), TRAINED)
    if case[1] == "explicit" or (case[0] != "DDP" and case[2] == "communicate")
]
in_every_way = pytest.mark.parametrize(
    ("sharding", "form", "accumulate", "parts", "trained"),
    covering(PRODUCT),
)


def make_mesh(**sizes):
    return meshes.make_mesh(MeshShape(**sizes or {"replica": 2, "fsdp": 4}))


def strategy_of(sharding, form="explicit", accumulate="communicate"):
    if sharding == "DDP":
        return Ddp(accumulate=accumulate)
    return Fsdp(sharding=sharding, form=form, accumulate=accumulate)


def over_data(mean):
    """A mean over the devices that share a batch; where one program sees all of it, it is that already."""
    axes = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis in BATCH_AXES)
    return jax.lax.pmean(mean, axes) if axes else mean


def loss(given):
    """Residual layers over looked-up rows, less the mean of the batch and of those before, and a head.

    Targets are what the step before guessed of the same examples; the rows are mixed by a constant.
    """
    rows = given.batch["rows"] if given.inputs is None else given.inputs["rows"]
    x = jnp.tanh(rows @ given.constants["mixing"])
    for i in range(LAYERS):
        path = f"layer{i}/weight"
        x = x + jnp.tanh(x @ given.gather({path: given.params[path]})[path])
    mean = over_data(x.mean(0))
    x = x - mean[None] - given.variables["mean"][None]
    head = given.gather({path: p for path, p in given.params.items() if path.startswith("head")})
    logits = x @ head["head/weight"] + head["head/bias"][None]
    losses = -(given.variables["queue"] * jax.nn.log_softmax(logits)).sum(-1)
    weights = given.batch["weights"]
    found = Loss(
        (losses * weights).sum(),
        weights.sum(),
        sums={"squares": (losses**2).sum(), "examples": jnp.asarray(len(x))},
        outputs={"logits": logits, "number": given.batch["number"]},
    )
    mean = 0.9 * given.variables["mean"] + 0.1 * mean
    return found, jax.lax.stop_gradient({"mean": mean, "queue": jax.nn.softmax(logits)})


def example():
    """Parameters and what goes with them, as NumPy arrays. Uneven weights: a mean of means would be wrong."""
    rng = np.random.default_rng(0)
    params = {path: rng.normal(size=shape) * 0.3 for path, shape in SHAPES.items()}
    batch = {"weights": np.linspace(0.1, 2, B) * rng.random(B), "number": np.arange(B)}
    others = {
        "inputs": {"rows": rng.normal(size=(B, D))},
        "variables": {"mean": rng.normal(size=D) * 0.1, "queue": rng.dirichlet(np.ones(C), size=B)},
        "constants": {"mixing": rng.normal(size=(D, D)) * 0.3},
    }
    return params, batch, others


def specs_of(strategy, mesh):
    axes = {path: (("input", "output")[-len(shape) :], shape) for path, shape in SHAPES.items()}
    return {p.name: p.spec for p in fsdp.place(axes, strategy, mesh=mesh)}


def placed(mesh, rows=ROWS, mean=None):
    """Batch and what goes with it, on the devices."""
    _, batch, others = example()
    specs = {"inputs": {"rows": rows}, "variables": {"mean": P(mean), "queue": ROWS}, "constants": {"mixing": P()}}
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.device_put(batch, meshes.batch_sharding(mesh)), jax.device_put(others, shardings)


def prepared(strategy, mesh=None, loss=loss, **options):
    """(gradients, params on the devices)."""
    mesh = mesh or make_mesh()
    specs = specs_of(strategy, mesh)
    options = {"variable_specs": {"queue": ROWS}, **options}
    run = gradients(loss, strategy, mesh=mesh, specs=specs, **options)
    return run, {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in example()[0].items()}


def cuts(parts, devices):
    """Rows of each part: every device cuts those that it holds."""
    return np.arange(B).reshape(devices, parts, -1).swapaxes(0, 1).reshape(parts, -1)


@functools.cache
def on_one_device(parts=1, devices=DEVICES):
    """By jax alone: parts one after the other, what belongs to examples put where it came from."""
    params, batch, others = example()

    def value(params, inputs, variables, batch):
        given = LossInputs(params, inputs, variables, others["constants"], batch, None, lambda block: block)
        found, new = loss(given)
        return found.sum, (found, new)

    step = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))
    total, inputs, outputs = None, {"rows": np.zeros((B, D))}, {"logits": np.zeros((B, C)), "number": np.zeros(B, int)}
    mean, queue = others["variables"]["mean"], np.zeros((B, C))
    for rows in cuts(parts, devices):
        variables = {"mean": mean, "queue": others["variables"]["queue"][rows]}
        part = {name: x[rows] for name, x in batch.items()}
        (grads, of_rows), (found, new) = step(params, {"rows": others["inputs"]["rows"][rows]}, variables, part)
        sums = (found.sum, found.weight, found.sums, grads)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        inputs["rows"][rows], queue[rows], mean = of_rows["rows"], new["queue"], new["mean"]
        for name, x in found.outputs.items():
            outputs[name][rows] = x
    return LossAndGradients(*total[:3], outputs, total[3], inputs, {"mean": mean, "queue": queue}, {})


@functools.cache
def on_devices(sharding, form, accumulate, parts, trained):
    run, params = prepared(strategy_of(sharding, form, accumulate), parts=parts, trained=TRAINED[trained])
    batch, others = placed(run.mesh)
    return jax.block_until_ready(jax.jit(run)(params, batch, **others))


def assert_close(found, expected, rtol):
    """Sums over devices are added in another order. Losses are sums of positive terms, off by a few units of float64's
    2e-16: 1e-12. Terms of gradients cancel: 1e-9, and 1e-12 where nothing is left."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-3 * rtol), found, expected)


def lies(x, spec, mesh=None):
    return x.sharding.is_equivalent_to(NamedSharding(mesh or make_mesh(), spec), x.ndim)


@pytest.mark.slow
@in_every_way
def test_losses_and_sums_equal_one_device(sharding, form, accumulate, parts, trained):
    found, expected = on_devices(sharding, form, accumulate, parts, trained), on_one_device(parts)
    assert_close((found.sum, found.weight, found.sums), (expected.sum, expected.weight, expected.sums), 1e-12)
    assert found.sums["examples"] == B


@pytest.mark.slow
@in_every_way
def test_trained_parameters_alone_get_gradients_those_of_one_device(sharding, form, accumulate, parts, trained):
    found, expected = on_devices(sharding, form, accumulate, parts, trained), on_one_device(parts)
    assert_close(found.params, {path: expected.params[path] for path in TRAINED[trained]}, 1e-9)
    for path, spec in specs_of(strategy_of(sharding, form), make_mesh()).items():
        assert path not in found.params or lies(found.params[path], spec)


@in_every_way
def test_gradients_of_inputs_come_back_by_example(sharding, form, accumulate, parts, trained):
    found, expected = on_devices(sharding, form, accumulate, parts, trained), on_one_device(parts)
    assert_close(found.inputs, expected.inputs, 1e-9)
    assert lies(found.inputs["rows"], ROWS)


@in_every_way
def test_outputs_come_back_by_example(sharding, form, accumulate, parts, trained):
    found, expected = on_devices(sharding, form, accumulate, parts, trained), on_one_device(parts)
    np.testing.assert_array_equal(found.outputs["number"], np.arange(B))
    assert_close(found.outputs, expected.outputs, 1e-12)
    assert lies(found.outputs["logits"], ROWS)


@in_every_way
def test_variables_go_from_part_to_part_and_rows_of_them_with_the_batch(sharding, form, accumulate, parts, trained):
    found, expected = on_devices(sharding, form, accumulate, parts, trained), on_one_device(parts)
    assert_close(found.variables, expected.variables, 1e-12)
    assert lies(found.variables["mean"], P())
    assert lies(found.variables["queue"], ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_inputs_and_variables_keep_shardings_over_other_axes(form, parts):
    mesh = make_mesh(replica=2, fsdp=2, tensor=2)
    specs = {"mean": P("tensor"), "queue": ROWS}
    run, params = prepared(Fsdp(form=form), mesh, parts=parts, input_specs=P(AXES), variable_specs=specs)
    batch, others = placed(mesh, rows=P(AXES), mean="tensor")
    found, expected = jax.jit(run)(params, batch, **others), on_one_device(parts, devices=4)
    assert_close((found.inputs, found.variables), (expected.inputs, expected.variables), 1e-9)
    assert lies(found.inputs["rows"], P(AXES), mesh)
    assert lies(found.variables["mean"], P("tensor"), mesh)


def stated(strategy, with_inputs=True, **options):
    """Collectives of a step as it is stated."""
    run, params = prepared(strategy, **options)
    batch, others = placed(run.mesh)
    if not with_inputs:
        batch |= others.pop("inputs")
    return stablehlo.stated_collectives(jax.jit(run).lower(params, batch, **others), run.mesh)


@pytest.mark.default_cases(first=2)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("strategy", [FULL, Ddp()], ids=["full", "ddp"])
def test_inputs_are_not_exchanged(strategy, parts):
    def numbers(with_inputs):
        return sorted((c.kind, c.axes, c.bytes, c.count) for c in stated(strategy, with_inputs, parts=parts))

    assert numbers(True) == numbers(False)


def test_nothing_is_reduced_of_frozen_layers():
    def reductions(trained):
        found = [c for c in stated(FULL, trained=TRAINED[trained]) if c.kind == "reduce-scatter"]
        return sum(c.count for c in found if c.bytes == c.count * D * D * 8)

    assert (reductions("all"), reductions("last")) == (4, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class OneBit(blocks.Stateless):
    """A toy exchange: signs of gradients and their mean size travel, and each device remembers what that leaves out."""

    inner: blocks.UncompressedExchange

    def gather(self, shards, state):
        return self.inner.gather(shards, state)

    def reduce(self, gradients, state, kept):
        wanted = {path: g + state[path]["residual"] for path, g in gradients.items()}
        sent = {path: jnp.sign(w) * jnp.abs(w).mean() for path, w in wanted.items()}
        reduced, _ = self.inner.reduce(sent, {}, kept)
        return reduced, {path: {**state[path], "residual": w - sent[path]} for path, w in wanted.items()}

    def init(self, shards):
        zero = {"updates": jnp.zeros((), jnp.int32), "held": jnp.zeros(())}
        return {path: {"residual": jnp.zeros(SHAPES[path]), **zero} for path in shards}

    def after_update(self, shards, state, context):
        return {path: {**s, "updates": s["updates"] + 1, "held": shards[path].sum()} for path, s in state.items()}


class Signs(Fsdp):
    """A strategy with that exchange."""

    def exchange(self, layouts, axes):
        return OneBit(super().exchange(layouts, axes))


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "parts"), [("communicate", 1), ("communicate", 4), ("local", 4)])
def test_a_run_goes_on_to_the_bit_with_the_state_of_an_exchange(accumulate, parts):
    strategy = Signs(sharding="HYBRID_SHARD", form="explicit", accumulate=accumulate)
    run, params = prepared(strategy, parts=parts)
    batch, others = placed(run.mesh)

    @jax.jit
    def step(params, state):
        found = run(params, batch, exchange=state, scale=1 / B, **others)
        params = {path: p - 0.1 * found.params[path] for path, p in params.items()}
        return params, run.after_update(params, found.exchange)

    def steps(params, state, count):
        for _ in range(count):
            params, state = jax.block_until_ready(step(params, state))
        return params, state

    first = jax.jit(run.init_exchange)(params)
    for path, shape in SHAPES.items():
        assert first[path]["residual"].shape == (DEVICES, *shape)
        assert lies(first[path]["residual"], run.exchange_specs(first)[path]["residual"])
    through = steps(params, first, 12)
    half, state = steps(params, first, 6)
    shardings = jax.tree.map(functools.partial(NamedSharding, run.mesh), run.exchange_specs(state))
    state = jax.device_put(jax.device_get(state), shardings)
    jax.tree.map(np.testing.assert_array_equal, steps(half, state, 6), through)

    params, state = through
    for path, s in state.items():
        np.testing.assert_array_equal(s["updates"], [12] * DEVICES)
        assert np.abs(s["residual"]).max() > 1e-3
        np.testing.assert_allclose(s["held"].sum() / 2, params[path].sum(), rtol=1e-12)  # one shard a device, twice


@pytest.mark.slow
def test_residuals_stay_bounded_in_units_of_the_mean_alone():
    # What a heavy batch leaves out is too much for a light one, unless both are counted by weight.
    run, params = prepared(Signs(sharding="HYBRID_SHARD", form="explicit"))
    batch, others = placed(run.mesh)
    init = jax.jit(run.init_exchange)

    @jax.jit
    def step(state, factor, scale):
        heavier = {**batch, "weights": batch["weights"] * factor}
        found = run(params, heavier, exchange=state, scale=scale, **others)
        return found.params["head/bias"] / (found.weight * scale), found.exchange

    def most_astray(in_means):
        """How far the sum of what optimizers got is from that of the mean gradients, at most."""
        state, astray, most = init(params), 0.0, []
        for number in range(50):
            factor = 100.0 if number % 2 else 1.0
            got, state = jax.block_until_ready(step(state, factor, 1 / (weight * factor) if in_means else 1.0))
            astray = astray + got - exact
            most.append(np.abs(astray).max() / np.abs(exact).max())
        return most

    weight = batch["weights"].sum()
    exact = on_one_device().params["head/bias"] / weight
    means, sums = most_astray(in_means=True), most_astray(in_means=False)
    assert max(means) < 3  # times the largest gradient
    assert sums[49] > 1.5 * sums[24] > 300  # and growing


def drawing(given):
    """Hands out what it draws."""
    (w,) = given.gather(given.params).values()
    count = len(given.batch["x"])
    bits = {name: jax.random.bits(getattr(given.keys, name)) for name in ("step", "examples")}
    own = jax.vmap(jax.random.bits)(given.keys.of_examples(count))
    outputs = {**{name: jnp.full(count, drawn) for name, drawn in bits.items()}, "own": own}
    return Loss(w.sum(), given.batch["x"].sum(), outputs=outputs), {}


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("strategy", "devices"), [(Fsdp(), 1), (FULL, DEVICES)], ids=["implicit", "explicit"])
def test_a_step_has_one_key_and_every_device_and_part_its_own(strategy, devices, parts):
    run = jax.jit(gradients(drawing, strategy, mesh=make_mesh(), specs={"w": P()}, parts=parts))

    def drawn(seed):
        return run({"w": np.ones(8)}, {"x": np.ones(B)}, keys=Keys(*jax.random.split(jax.random.key(seed)))).outputs

    first = drawn(0)
    numbers = {name: len(set(np.asarray(x).tolist())) for name, x in first.items()}
    assert numbers == {"step": 1, "examples": devices * parts, "own": B}
    jax.tree.map(np.testing.assert_array_equal, drawn(0), first)
    assert all((drawn(1)[name] != x).all() for name, x in first.items())


def test_keys_of_examples_are_those_that_evaluation_gave():
    each = jax.random.split(jax.random.key(1), 5)
    assert Keys(each[0], each).of_examples(5) is each
    assert len(set(map(int, jax.vmap(jax.random.bits)(Keys(each[0], each[0]).of_examples(5))))) == 5


@pytest.mark.default_cases
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("sharding", "form"), sorted({case[:2] for case in PRODUCT}))
def test_a_parameter_that_was_never_fetched_is_named(sharding, form, parts):
    def forgetful(given):
        def gather(block):
            fetched = given.gather({path: p for path, p in block.items() if path != "head/bias"})
            return {path: fetched.get(path, p) for path, p in block.items()}

        return loss(dataclasses.replace(given, gather=gather))

    def trace(loss):
        run, params = prepared(strategy_of(sharding, form), loss=loss, parts=parts)
        batch, others = placed(run.mesh)
        jax.eval_shape(functools.partial(run, **others), params, batch)

    trace(loss)
    with pytest.raises(UserError, match="The loss never fetched 'head/bias': every parameter"):
        trace(forgetful)


def towers(given):
    """Each half of an example's features goes through the weights of its tower; on devices, where these are."""
    weights = given.gather({"towers": given.params["towers"]})["towers"]
    x = given.batch["x"]  # B 2 D
    apart = "replica" in jax.sharding.get_abstract_mesh().manual_axes
    if apart:
        x = jax.lax.all_to_all(x, "replica", split_axis=1, concat_axis=0, tiled=True)  # 2B 1 D
    x = jnp.tanh(jnp.einsum("btd,tde->bte", x, weights))
    if apart:
        x = jax.lax.all_to_all(x, "replica", split_axis=0, concat_axis=1, tiled=True)
    head = given.gather({"head": given.params["head"]})["head"]
    return Loss(((x.reshape(len(x), -1) @ head) ** 2).sum(), jnp.asarray(1.0 * len(x))), {}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("accumulate", ["communicate", "local"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_parameters_of_one_replica_alone_get_the_gradients_of_one_device(sharding, accumulate, parts):
    rng = np.random.default_rng(0)
    params = {"towers": rng.normal(size=(2, D, D)), "head": rng.normal(size=(2 * D, C))}
    x = rng.normal(size=(B, 2, D))
    mesh, strategy = make_mesh(), strategy_of(sharding, accumulate=accumulate)
    (head,) = fsdp.place({"head": (("input", "output"), (2 * D, C))}, strategy, mesh=mesh)
    towers_spec = P("replica", "fsdp") if sharding == "HYBRID_SHARD" else P("replica")  # of a tower, in shards or whole
    specs = {"towers": towers_spec, "head": head.spec}
    run = jax.jit(gradients(towers, strategy, mesh=mesh, specs=specs, parts=parts, apart={"towers": ("replica",)}))
    found = run({path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()}, {"x": x})
    whole = functools.partial(
        LossInputs, inputs=None, variables={}, constants=None, batch={"x": x}, keys=None, gather=dict
    )
    expected = jax.jit(jax.grad(lambda params: towers(whole(params))[0].sum))(params)
    for path, gradient in expected.items():
        np.testing.assert_allclose(found.params[path], gradient, rtol=0, atol=4e-14 * np.abs(gradient).max())


def staged(given):
    """Layers that are a pipeline over stages, on inputs that the first stage reads, and the last one again."""
    rows = given.inputs["rows"]
    parts = rows.reshape(2, rows.shape[0] // 2, D)

    def layer(layer, x):
        return x + jnp.tanh(x @ given.gather({"layers/weight": layer})["layers/weight"])

    x = pipeline.run_stages(layer, given.params["layers/weight"], parts).reshape(rows.shape)
    losses = pipeline.on_last_stage(jnp.square(x - given.batch["x"] * rows).sum(1))
    return Loss(losses.sum(), pipeline.on_last_stage(jnp.float64(len(x))), {}, {"losses": losses}), {}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("sharding", ["NO_SHARD", "FULL_SHARD"])
def test_inputs_of_a_pipeline_get_the_gradients_of_all_stages(sharding, parts):
    rng = np.random.default_rng(0)
    params, rows, x = (
        {"layers/weight": rng.normal(size=(LAYERS, D, D)) / 4},
        rng.normal(size=(B, D)),
        rng.normal(size=(B, D)),
    )
    mesh, strategy = make_mesh(fsdp=2, replica=2, stage=2), strategy_of(sharding)
    described = {"layers/weight": (("layers", "input", "output"), (LAYERS, D, D))}
    (placed,) = fsdp.place(described, strategy, mesh=mesh, rules=Rules(axes=(("layers", ("stage",)),)))
    specs = {placed.name: placed.spec}
    run = jax.jit(gradients(staged, strategy, mesh=mesh, specs=specs, parts=parts, handled=("stage",)))
    weight = jax.device_put(params["layers/weight"], NamedSharding(mesh, placed.spec))
    found = run({"layers/weight": weight}, {"x": x}, inputs={"rows": rows})

    def whole(params, rows):
        y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), rows, params["layers/weight"])
        losses = jnp.square(y - x * rows).sum(1)
        return losses.sum(), losses

    (of_params, of_rows), losses = jax.grad(whole, argnums=(0, 1), has_aux=True)(params, rows)
    np.testing.assert_allclose(found.inputs["rows"], of_rows, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found.outputs["losses"], losses, rtol=1e-12)
    np.testing.assert_allclose(found.params["layers/weight"], of_params["layers/weight"], rtol=1e-11, atol=1e-11)


def test_refuses_what_cannot_be_meant():
    mesh = make_mesh()
    make = functools.partial(gradients, loss, mesh=mesh)
    specs = specs_of(FULL, mesh)
    with pytest.raises(UserError, match="parts must be at least 1; got 0"):
        make(FULL, specs=specs, parts=0)
    with pytest.raises(UserError, match="trained names 'layer9/weight', and specs do not"):
        make(FULL, specs=specs, trained=["layer9/weight"])
    with pytest.raises(UserError, match=r"handled=\('stage',\) needs form='explicit'"):
        make(Fsdp(), specs=specs, handled=("stage",))
    with pytest.raises(UserError, match="apart names 'tower', and specs do not"):
        make(FULL, specs=specs, apart={"tower": ("replica",)})
    with pytest.raises(UserError, match="apart says that 'head/bias' differs along replica, but its sharding"):
        make(FULL, specs=specs, apart={"head/bias": ("replica",)})
    run, params = prepared(FULL, parts=3)
    batch, others = placed(mesh)
    with pytest.raises(UserError, match=r"a batch of 64 does not divide into 3 parts on 8 devices .* 48 or 72"):
        run(params, batch, **others)
    others["variables"]["queue"] = np.zeros((B - 1, C))
    with pytest.raises(UserError, match="a batch of 63 does not divide into 1 parts"):
        prepared(FULL)[0](params, batch, **others)


@pytest.mark.parametrize("strategy", [Fsdp(), FULL], ids=["implicit", "explicit"])
def test_a_loss_returns_every_variable(strategy):
    run, params = prepared(strategy, loss=lambda given: (loss(given)[0], {}))
    batch, others = placed(run.mesh)
    with pytest.raises(UserError, match=r"was given the variables \['mean', 'queue'\] and returned \[\]"):
        jax.eval_shape(functools.partial(run, **others), params, batch)


@pytest.mark.parametrize(("name", "unroll"), [("convolution", 4), ("product", 1)])
def test_on_a_cpu_parts_of_convolutions_are_no_loop(name, unroll):
    """Gradients of convolutions take ten times as long in a loop there."""

    def loss(given):
        filters = given.gather(dict(given.params))["filters"]
        if name == "product":
            return Loss((given.batch @ filters[0, 0]).sum(), jnp.float32(1)), {}
        y = jax.lax.conv_general_dilated(
            given.batch, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return Loss(y.sum(), jnp.float32(1)), {}

    mesh = meshes.make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    of_parts = gradients(loss, FULL, mesh=mesh, specs={"filters": P()}, parts=4)
    traced = str(jax.make_jaxpr(of_parts)({"filters": jnp.ones((3, 3, 2, 2))}, jnp.ones((8, 4, 4, 2))))
    assert re.findall(r"unroll=(\d+)", traced) == [str(unroll)]
