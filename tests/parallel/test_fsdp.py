import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import residual_stack
from covering import covering
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling, take_step_if
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import Rules

STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
MODES = (("explicit", "communicate"), ("explicit", "local"), ("implicit", "communicate"))
MESHES = {
    "fsdp8": MeshShape(fsdp=8),
    "replica2-fsdp4": MeshShape(replica=2, fsdp=4),
    "replica2-fsdp2-tensor2": MeshShape(replica=2, fsdp=2, tensor=2),
}
TENSOR = Rules(axes=(("hidden", ("tensor",)), ("vocabulary", ("tensor",))))
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "clipped momentum": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9)),
}
STEPS = 4
BATCHES = [residual_stack.batch(rows=32, seed=seed) for seed in range(STEPS)]


def train(gradients, optimizer, params, batches):
    """Losses and last parameters of a run with the gradients of the jitted function `gradients`."""

    @jax.jit
    def update(params, state, weight, grads):
        updates, state = optimizer.update(jax.tree.map(lambda g: g / weight, grads), state, params)
        return optax.apply_updates(params, updates), state

    state, losses = jax.jit(optimizer.init)(params), []
    for batch in batches:
        total, weight, aux, grads = gradients(params, batch)
        params, state = jax.block_until_ready(update(params, state, weight, grads))  # steps must not queue on a CPU
        losses.append((total / weight, aux["correct"]))
    return np.array(losses), params


@functools.cache
def on_one_device(optimizer, steps):
    """The same by jax alone: no mesh, no strategy, no parts."""

    @jax.jit
    def gradients(params, batch):
        (total, (weight, aux)), grads = jax.value_and_grad(
            lambda p: (lambda s, w, a: (s, (w, a)))(*residual_stack.loss(p, batch, None)), has_aux=True
        )(params)
        return total, weight, aux, grads

    return train(gradients, OPTIMIZERS[optimizer](), residual_stack.params(), repeated(BATCHES, steps))


def repeated(batches, steps):
    return itertools.islice(itertools.cycle(batches), steps)


def placed(strategy, mesh, params=None, rules=TENSOR):
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh, rules=rules)}
    params = residual_stack.params() if params is None else params
    return specs, {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()}


def strategy_of(sharding, mode):
    form, accumulate = mode
    if sharding == "DDP":
        return Ddp(bucket_bytes=2000, accumulate=accumulate), None
    return Fsdp(sharding=sharding, form=form, accumulate=accumulate), TENSOR


@functools.cache
def jitted_gradients(sharding, mode, shape, parts):
    """One program for all optimizers."""
    (strategy, rules), mesh = strategy_of(sharding, mode), meshes.make_mesh(MESHES[shape])
    specs, _ = placed(strategy, mesh, rules=rules)
    return jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs, parts=parts))


def assert_equals_one_device(sharding, mode, optimizer, shape, parts, steps=STEPS):
    expected, whole = on_one_device(optimizer, steps)
    (strategy, rules), mesh = strategy_of(sharding, mode), meshes.make_mesh(MESHES[shape])
    specs, params = placed(strategy, mesh, rules=rules)
    batches = [jax.device_put(batch, meshes.batch_sharding(mesh)) for batch in BATCHES]
    run = jitted_gradients(sharding, mode, shape, parts)
    losses, params = train(run, OPTIMIZERS[optimizer](), params, repeated(batches, steps))
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert losses[0, 0] > losses[-1, 0]
    for path, p in params.items():
        assert p.sharding.is_equivalent_to(NamedSharding(mesh, specs[path]), p.ndim)
        np.testing.assert_allclose(p, whole[path], rtol=1e-9, atol=1e-12, err_msg=path)


PRODUCT = [
    case
    for case in itertools.product((*STRATEGIES, "DDP"), MODES, MESHES, (1, 2), OPTIMIZERS)
    if case[:2] != ("DDP", ("implicit", "communicate"))  # buckets are stated
]


@pytest.mark.default_cases(
    "SHARD_GRAD_OP-mode2-replica2-fsdp2-tensor2-2-clipped momentum", "HYBRID_SHARD_ZERO2-mode6-replica2-fsdp4-1-adamw"
)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("sharding", "mode", "shape", "parts", "optimizer"), covering(PRODUCT))
def test_equals_one_device(sharding, mode, shape, parts, optimizer):
    assert_equals_one_device(sharding, mode, optimizer, shape, parts)


LONG = [case for case in itertools.product((*STRATEGIES, "DDP"), MODES, OPTIMIZERS) if case[:2] != ("DDP", MODES[2])]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("sharding", "mode", "optimizer"), covering(LONG, columns=[]))
def test_equals_one_device_for_fifty_steps(sharding, mode, optimizer):
    assert_equals_one_device(sharding, mode, optimizer, "replica2-fsdp4", parts=2, steps=50)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Fsdp(form="explicit"), Ddp()], ids=["full", "ddp"])
def test_every_device_and_part_draws_with_a_key_of_its_own(strategy):
    def loss(params, batch, key, gather):
        drawn = jax.random.randint(key, (), 0, 4096)
        return gather(params)["w"].sum(), batch["x"].sum(), {"drawn": jnp.zeros(4096, jnp.int32).at[drawn].add(1)}

    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    (where,) = fsdp.place({"w": (("in",), (8,))}, strategy, mesh=mesh)
    run = jax.jit(fsdp.gradients(loss, strategy, mesh=mesh, specs={"w": where.spec}, parts=2))
    params = {"w": jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, where.spec))}
    batch = {"x": jax.device_put(np.ones(16, np.float32), meshes.batch_sharding(mesh))}
    total, weight, aux, grads = run(params, batch, jax.random.key(0))
    assert (total, weight, int(aux["drawn"].sum())) == (8 * 16, 16, 16)
    assert (aux["drawn"] > 0).sum() >= 15  # sixteen draws of 4,096 numbers may meet once
    np.testing.assert_array_equal(grads["w"], 16)


def test_places_the_largest_dimension_that_divides_and_never_the_layers():
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    axes = {
        "layers/w": (("layers", "input", "hidden"), (64, 24, 16)),
        "layers/odd": (("layers", "input", "hidden"), (64, 9, 16)),
        "scale": (("norm",), (9,)),
        "small": (("norm",), (8,)),
    }
    found = {p.name: p for p in fsdp.place(axes, Fsdp(replicate_below=9), mesh=mesh)}
    both = ("replica", "fsdp")
    assert {name: p.spec for name, p in found.items()} == {
        "layers/w": P(None, both),
        "layers/odd": P(None, None, both),
        "scale": P(),
        "small": P(),
    }
    assert found["scale"].reason == "no free dimension of (9,) divides by replica=2xfsdp=4"
    assert found["small"].reason == "8 elements are fewer than replicate_below=9"
    assert found["layers/w"].reason == ""


def test_rules_choose_the_dimension_where_they_name_fsdp():
    mesh = meshes.make_mesh(MeshShape(fsdp=4, tensor=2))
    rules = Rules(axes=(("embed", ("fsdp",)), ("hidden", ("tensor",))))
    axes = {"up": (("layers", "embed", "hidden"), (2, 8, 64)), "down": (("layers", "hidden", "embed"), (2, 64, 8))}
    for sharding, up, down in (
        ("FULL_SHARD", P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")),
        ("NO_SHARD", P(None, None, "tensor"), P(None, "tensor")),
    ):
        specs = {p.name: p.spec for p in fsdp.place(axes, Fsdp(sharding=sharding), mesh=mesh, rules=rules)}
        assert specs == {"up": up, "down": down}


def test_hybrid_strategies_shard_inside_a_replica_alone():
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    axes = {"w": (("input",), (8,))}
    specs = {s: fsdp.place(axes, Fsdp(sharding=s), mesh=mesh)[0].spec for s in STRATEGIES}
    assert specs == {
        "NO_SHARD": P(),
        "SHARD_GRAD_OP": P(("replica", "fsdp")),
        "FULL_SHARD": P(("replica", "fsdp")),
        "HYBRID_SHARD": P("fsdp"),
        "HYBRID_SHARD_ZERO2": P("fsdp"),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharding": "ZERO3"}, "sharding must be one of NO_SHARD, .*; got 'ZERO3'"),
        ({"form": "auto"}, "form must be 'implicit' or 'explicit'; got 'auto'"),
        ({"accumulate": "never"}, "accumulate must be .communicate. or .local.; got 'never'"),
        ({"accumulate": "local"}, "accumulate='local' needs form='explicit'"),
        ({"reduce_dtype": "float32"}, "reduce_dtype='float32' needs form='explicit'"),
        ({"replicate_below": -1}, "replicate_below must be at least 0; got -1"),
        (
            {"param_dtype": "bf16"},
            "param_dtype must be one of float64, float32, bfloat16, float16, or None; got 'bf16'",
        ),
    ],
)
def test_refuses_combinations_by_name(fields, message):
    with pytest.raises(UserError, match=message):
        Fsdp(**fields)


def test_refuses_specs_of_another_strategy():
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    for sharding, spec in (
        ("NO_SHARD", P("fsdp")),
        ("FULL_SHARD", P("fsdp")),
        ("HYBRID_SHARD", P(("replica", "fsdp"))),
    ):
        with pytest.raises(UserError, match=f"'w' is sharded over .* but {sharding} on this mesh"):
            fsdp.gradients(residual_stack.loss, Fsdp(sharding=sharding), mesh=mesh, specs={"w": spec})


def test_refuses_a_batch_that_does_not_divide():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    specs, params = placed(Fsdp(), mesh)
    gradients = fsdp.gradients(residual_stack.loss, Fsdp(), mesh=mesh, specs=specs, parts=3)
    with pytest.raises(UserError, match=r"a batch of 16 does not divide into 3 parts on 8 devices \(fsdp=8\).* 24"):
        gradients(params, residual_stack.batch(rows=16))
    with pytest.raises(UserError, match="parts must be at least 1; got 0"):
        fsdp.gradients(residual_stack.loss, Fsdp(), mesh=mesh, specs=specs, parts=0)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["explicit", "implicit"])
def test_masters_stay_wide_while_narrow_copies_travel(form):
    # float64 masters, float32 copies: on one device that is the loss of the cast parameters.
    reduce = "float64" if form == "explicit" else None
    strategy = Fsdp(form=form, param_dtype="float32", reduce_dtype=reduce, output_dtype="bfloat16")
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    specs, params = placed(strategy, mesh, rules=None)
    gradients = jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs))
    total, _, aux, grads = gradients(params, jax.device_put(BATCHES[0], meshes.batch_sharding(mesh)))
    narrow = jax.tree.map(np.float32, residual_stack.params())
    expected, reference = jax.value_and_grad(lambda p: residual_stack.loss(p, BATCHES[0], None)[0])(narrow)
    assert aux["correct"].dtype == jnp.bfloat16
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for path, g in grads.items():
        assert g.dtype == jnp.float64
        np.testing.assert_allclose(g, reference[path], rtol=1e-3, atol=1e-4, err_msg=path)  # float32 products
        assert np.abs(np.asarray(g) - np.float32(g)).max() > 0 or form == "implicit" or g.ndim == 1


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "form"), [("FULL_SHARD", "explicit"), ("HYBRID_SHARD", "implicit")])
def test_float16_overflow_on_one_device_skips_the_step_everywhere(sharding, form):
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    strategy = Fsdp(sharding=sharding, form=form, param_dtype="float16")
    specs, params = placed(strategy, mesh, jax.tree.map(np.float32, residual_stack.params()), rules=None)
    gradients = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs)
    config = LossScaling(initial=2.0**10, interval=1)

    @jax.jit
    def step(params, scale, batch):
        _, weight, _, grads = gradients(params, batch, scale=scale.scale)
        grads, finite = scale.unscale(grads)
        new = jax.tree.map(lambda p, g: p - 0.1 * g / weight, params, grads)
        return take_step_if(finite, new, params), scale.update(finite, config), finite

    batch = residual_stack.batch(rows=32)
    heavy = {**batch, "weights": batch["weights"].copy()}
    heavy["weights"][-1] = 1e6  # one row of the last device: its gradients leave float16
    scale, seen = config.init(), []
    for rows in (batch, heavy, batch):
        before = params
        params, scale, finite = step(params, scale, jax.device_put(rows, meshes.batch_sharding(mesh)))
        seen.append((bool(finite), float(scale.scale)))
        same = [
            np.array_equal(a.data, b.data)
            for path, p in params.items()
            for a, b in zip(p.addressable_shards, before[path].addressable_shards, strict=True)
        ]
        assert all(same) == (not finite)
    assert seen == [(True, 2.0**11), (False, 2.0**10), (True, 2.0**11)]


@pytest.mark.slow
def test_gradients_of_a_scaled_loss_are_scaled():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    for strategy in (Fsdp(form="implicit"), Ddp()):
        specs, params = placed(strategy, mesh, jax.tree.map(np.float32, residual_stack.params()), rules=None)
        gradients = jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs))
        batch = jax.device_put(BATCHES[0], meshes.batch_sharding(mesh))
        total, _, _, grads = gradients(params, batch)
        scaled_total, _, _, scaled = gradients(params, batch, scale=8.0)
        assert total == scaled_total
        for path, g in grads.items():
            np.testing.assert_array_equal(8 * g, scaled[path])  # a power of two: exact


def init(key):
    """Parameters large enough that a whole one would show in the memory of a device."""
    keys = jax.random.split(key, 2)
    return {
        "layers/w": jax.random.normal(keys[0], (4, 256, 512)) * 0.02,
        "head": jax.random.uniform(keys[1], (512, 1024), minval=-1.0),
        "scale": jnp.ones(512),
    }


@pytest.mark.default_cases("hybrid")
@pytest.mark.parametrize("strategy", [Fsdp(), Fsdp(sharding="HYBRID_SHARD"), Ddp()], ids=["full", "hybrid", "ddp"])
def test_sharded_initialisation_equals_that_of_one_device_to_the_bit(strategy):
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    shapes = jax.eval_shape(init, jax.random.key(0))
    axes = {path: (("layers", "in", "out")[3 - s.ndim :], s.shape) for path, s in shapes.items()}
    specs = {p.name: p.spec for p in fsdp.place(axes, strategy, mesh=mesh)}
    run = fsdp.sharded_init(init, mesh=mesh, specs=specs)
    whole = jax.jit(init)(jax.random.key(3))
    for path, p in run(jax.random.key(3)).items():
        assert p.sharding.is_equivalent_to(NamedSharding(mesh, specs[path]), p.ndim)
        assert np.asarray(p).tobytes() == np.asarray(whole[path]).tobytes(), path


def test_sharded_initialisation_never_holds_a_whole_parameter():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    specs = {"layers/w": P(None, None, "fsdp"), "head": P("fsdp"), "scale": P("fsdp")}
    compiled = fsdp.sharded_init(init, mesh=mesh, specs=specs).lower(jax.random.key(0)).compile()
    memory, alone = compiled.memory_analysis(), jax.jit(init).lower(jax.random.key(0)).compile().memory_analysis()
    for kind in ("output_size_in_bytes", "temp_size_in_bytes"):
        assert 8 * getattr(memory, kind) < 1.01 * getattr(alone, kind)
    assert "512,1024]" not in compiled.as_text()
    assert "256,512]" not in compiled.as_text()


@pytest.mark.slow
def test_refuses_random_numbers_that_depend_on_the_sharding():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    with jax.threefry_partitionable(False), pytest.raises(UserError, match="jax_threefry_partitionable is off"):
        fsdp.sharded_init(init, mesh=mesh, specs={})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "DDP"])
def test_bfloat16_sums_run_beside_an_automatic_axis(strategy):
    # XLA for CPU aborts on them as they stand.
    mesh = meshes.make_mesh(MESHES["replica2-fsdp2-tensor2"])
    if strategy == "DDP":
        strategy, rules = Ddp(param_dtype="bfloat16"), None
    else:
        strategy, rules = Fsdp(sharding=strategy, form="explicit", param_dtype="bfloat16"), TENSOR
    specs, params = placed(strategy, mesh, jax.tree.map(np.float32, residual_stack.params()), rules=rules)
    gradients = jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs))
    *_, grads = gradients(params, jax.device_put(BATCHES[0], meshes.batch_sharding(mesh)))
    whole = jax.jit(jax.grad(lambda p: residual_stack.loss(p, BATCHES[0], None)[0]))(residual_stack.params(np.float32))
    for path, g in grads.items():
        assert g.dtype == np.float32
        # The whole model computes with 8 bits; a sum that is missing would be off by half.
        assert np.linalg.norm(g - whole[path]) < 0.1 * np.linalg.norm(whole[path]), path
