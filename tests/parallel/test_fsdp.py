import functools
import itertools

import jax
import numpy as np
import optax
import pytest
import residual_stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
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
    """Losses and last parameters of a run whose gradients come from `gradients`."""

    @jax.jit
    def step(params, state, batch):
        total, weight, aux, grads = gradients(params, batch)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / weight, grads), state, params)
        return optax.apply_updates(params, updates), state, (total / weight, aux["correct"])

    state, losses = jax.jit(optimizer.init)(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return np.array(losses), params


@functools.cache
def on_one_device(optimizer):
    """The same by jax alone: no mesh, no strategy, no parts."""

    def gradients(params, batch):
        (total, (weight, aux)), grads = jax.value_and_grad(
            lambda p: (lambda s, w, a: (s, (w, a)))(*residual_stack.loss(p, batch, None)), has_aux=True
        )(params)
        return total, weight, aux, grads

    return train(gradients, OPTIMIZERS[optimizer](), residual_stack.params(), BATCHES)


def placed(strategy, mesh, params=None, rules=TENSOR):
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh, rules=rules)}
    params = residual_stack.params() if params is None else params
    return specs, {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()}


def on_mesh(strategy, mesh, optimizer, parts, loss=residual_stack.loss):
    specs, params = placed(strategy, mesh)
    gradients = fsdp.gradients(loss, strategy, mesh=mesh, specs=specs, parts=parts)
    batches = [jax.device_put(batch, meshes.batch_sharding(mesh)) for batch in BATCHES]
    losses, params = train(gradients, OPTIMIZERS[optimizer](), params, batches)
    for path, p in params.items():
        assert p.sharding.is_equivalent_to(NamedSharding(mesh, specs[path]), p.ndim)
    return losses, params


def assert_equals_one_device(strategy, mesh, optimizer, parts):
    expected, whole = on_one_device(optimizer)
    losses, params = on_mesh(strategy, mesh, optimizer, parts)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert losses[0, 0] > losses[-1, 0]
    for path, p in params.items():
        np.testing.assert_allclose(p, whole[path], rtol=1e-9, atol=1e-12, err_msg=path)


PRODUCT = list(itertools.product(STRATEGIES, MODES, OPTIMIZERS, MESHES, (1, 2)))


def covering(cases):
    """A subset in which every pair of values of two columns still occurs, chosen greedily."""
    pairs = [{(i, j, a[i], a[j]) for i, j in itertools.combinations(range(len(a)), 2)} for a in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("sharding", "mode", "optimizer", "shape", "parts"), covering(PRODUCT))
def test_equals_one_device(sharding, mode, optimizer, shape, parts):
    form, accumulate = mode
    strategy = Fsdp(sharding=sharding, form=form, accumulate=accumulate)
    assert_equals_one_device(strategy, meshes.make_mesh(MESHES[shape]), optimizer, parts)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("sharding", "mode", "optimizer", "shape", "parts"), PRODUCT)
def test_equals_one_device_everywhere(sharding, mode, optimizer, shape, parts):
    form, accumulate = mode
    strategy = Fsdp(sharding=sharding, form=form, accumulate=accumulate)
    assert_equals_one_device(strategy, meshes.make_mesh(MESHES[shape]), optimizer, parts)


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
        ({"accumulate": "never"}, "accumulate must be 'communicate' or 'local'; got 'never'"),
        ({"accumulate": "local"}, "accumulate='local' needs form='explicit'"),
        ({"reduce_dtype": "float32"}, "reduce_dtype='float32' needs form='explicit'"),
        ({"replicate_below": -1}, "replicate_below must be at least 0; got -1"),
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
