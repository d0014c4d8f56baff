import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.gradients import scaling
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding

SPECS = {"a": P("fsdp"), "b": P(None, ("replica", "fsdp")), "c": P()}


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(MeshShape(replica=2, fsdp=4))


def gradients(mesh, seed=0):
    rng = np.random.default_rng(seed)
    host = {"a": rng.normal(size=8), "b": rng.normal(size=(3, 16)), "c": rng.normal(size=5)}
    host = {name: x.astype(np.float32) for name, x in host.items()}
    return host, {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in host.items()}


def norm_of(host):
    return np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in host.values()))


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clips_sharded_gradients_by_the_norm_of_all_of_them(mesh, limit):
    host, sharded = gradients(mesh)
    clipped, norm = jax.jit(lambda g: scaling.clip_by_global_norm(g, limit))(sharded)
    np.testing.assert_allclose(norm, norm_of(host), rtol=1e-6)
    expected, _ = optax.clip_by_global_norm(limit).update(host, optax.EmptyState())
    for name, g in clipped.items():
        np.testing.assert_allclose(g, expected[name], rtol=1e-6)
        assert g.sharding.is_equivalent_to(sharded[name].sharding, g.ndim)


def test_a_norm_moves_single_numbers_alone(mesh):
    _, sharded = gradients(mesh)
    found = explain_sharding(jax.jit(scaling.global_norm).lower(sharded).compile(), mesh)
    assert found
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.bytes for c in found) <= 4 * len(sharded)


def test_a_norm_of_shards_added_per_device_would_count_copies_twice(mesh):
    # What the plain sum must not be mistaken for: each device's own norm, added up over devices.
    host, sharded = gradients(mesh)
    wrong = jax.shard_map(
        lambda g: jnp.sqrt(jax.lax.psum(scaling.global_norm(g) ** 2, ("replica", "fsdp"))),
        mesh=mesh,
        in_specs=(SPECS,),
        out_specs=P(),
    )
    assert abs(float(wrong(sharded)) - norm_of(host)) > 0.1


def test_norms_of_float16_do_not_overflow():
    assert float(scaling.global_norm({"a": jnp.full(4, 6e4, jnp.float16)})) == pytest.approx(12e4, rel=1e-3)


def test_refuses_a_limit_that_is_not_positive():
    with pytest.raises(UserError, match="limit must be positive; got 0"):
        scaling.clip_by_global_norm({}, 0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [0, 7])
def test_one_shard_with_inf_skips_the_step_on_all_devices(mesh, bad, position):
    config = LossScaling(initial=8.0)
    host, sharded = gradients(mesh)
    host["a"][position] = bad  # one device of each replica holds it
    sharded["a"] = jax.device_put(host["a"], sharded["a"].sharding)
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = jax.tree.map(jnp.ones_like, sharded)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, scale, grads):
        grads, finite = scale.unscale(grads)
        updates, new_state = optimizer.update(grads, state, params)
        new = (optax.apply_updates(params, updates), new_state)
        return *scaling.take_step_if(finite, new, (params, state)), scale.update(finite, config)

    new, new_state, scale = step(params, state, config.init(), sharded)
    for name, p in new.items():
        for shard in p.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), 1.0, err_msg=f"{name} on {shard.device}")
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(new_state))
    assert (float(scale.scale), int(scale.skipped), int(scale.clean_steps)) == (4.0, 1, 0)


def test_a_check_of_each_device_alone_would_disagree(mesh):
    host, sharded = gradients(mesh)
    host["a"][0] = np.inf
    sharded["a"] = jax.device_put(host["a"], sharded["a"].sharding)
    alone = jax.shard_map(
        lambda g: scaling.all_finite(g)[None], mesh=mesh, in_specs=(SPECS,), out_specs=P(("replica", "fsdp"))
    )(sharded)
    assert alone.tolist() == [False, True, True, True] * 2
    assert not jax.jit(scaling.all_finite)(sharded)


def test_the_scale_grows_after_clean_steps_and_falls_with_an_overflow():
    config = LossScaling(initial=4.0, interval=3, smallest=2.0)
    state, scales = config.init(), []
    for finite in (True, True, True, True, False, True, True, False, False, False, True, True, True):
        state = state.update(jnp.asarray(finite), config)
        scales.append(float(state.scale))
    # Three clean steps double it; an overflow halves it and starts the count again; 2 is the least.
    assert scales == [4, 4, 8, 8, 4, 4, 4, 2, 2, 2, 2, 2, 4]
    assert int(state.skipped) == 4


def test_a_scale_that_float32_cannot_hold_stays():
    config = LossScaling(initial=2.0**127, interval=1)
    assert float(config.init().update(jnp.asarray(True), config).scale) == 2.0**127


def test_unscaled_gradients_are_those_of_the_loss():
    state = LossScaling(initial=1024.0).init()
    grads, finite = state.unscale({"w": jnp.asarray([1024.0, 2.0], jnp.float32)})
    assert bool(finite)
    np.testing.assert_array_equal(grads["w"], [1.0, 2.0 / 1024])


@pytest.mark.parametrize("fields", [{"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}, {"initial": 0.5}])
def test_refuses_scaling_that_cannot_work(fields):
    with pytest.raises(UserError, match="LossScaling: needs growth > 1"):
        LossScaling(**fields)
