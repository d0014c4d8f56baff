import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import residual_stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import fsdp, offload
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape


@pytest.fixture
def fresh_check():
    offload._problem.cache_clear()
    yield
    offload._problem.cache_clear()


def test_offloading_passes_here_and_is_tested_once(fresh_check, monkeypatch):
    calls = []
    plain = offload._equal
    monkeypatch.setattr(offload, "_equal", lambda *args: calls.append(args) or plain(*args))
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    offload.check(mesh.devices)
    offload.check(mesh.devices)
    assert len(calls) == 2  # parameters, residuals


@pytest.mark.parametrize("broken", ["_from_host", "_residuals_on_host"])
def test_a_jaxlib_that_gets_gradients_wrong_is_refused(fresh_check, monkeypatch, broken):
    right = getattr(offload, broken)
    monkeypatch.setattr(offload, broken, lambda params, x: right(params, x).at[2].multiply(1.01))
    with pytest.raises(UserError, match=r"gives other gradients with offloaded .* offload='none'"):
        offload.check()


class _Device:
    """A device without host memory."""

    device_kind, process_index, client = "toaster", 0, None

    def __init__(self):
        self.client = self

    def addressable_memories(self):
        return []

    def __getattr__(self, name):
        raise AttributeError(name)


def test_a_device_without_host_memory_is_refused():
    device = _Device()
    device.__dict__["client"] = type("Client", (), {"process_index": staticmethod(lambda: 0)})
    with pytest.raises(UserError, match="on toaster has no memory of kind 'pinned_host'"):
        offload.check([device])


def steps(what, count=3):
    """Losses and parameters of a few steps, and the compiled step, with this state in host memory between them."""
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    strategy = Fsdp(form="explicit")
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh)}
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    optimizer = optax.adamw(0.01)
    gradients = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs)
    params = jax.device_put(residual_stack.params(np.float32), shardings)
    state = optimizer.init(params)
    whole = NamedSharding(mesh, P())
    moments = jax.tree_util.tree_map_with_path(lambda at, x: shardings[at[-1].key] if x.ndim else whole, state)
    state = jax.device_put(state, moments)
    rest = (
        offload.on_host(params) if what == "optimizer and parameters" else shardings,
        offload.on_host(state) if what != "none" else moments,
    )

    def step(params, state, batch):
        params, state = offload.fetch((params, state), (shardings, moments))
        total, weight, _, grads = gradients(params, batch)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / weight, grads), state, params)
        params = optax.apply_updates(params, updates)
        return *offload.put_back((params, state), rest), total / weight

    run = jax.jit(step, out_shardings=(*rest, whole), donate_argnums=(0, 1))
    params, state = jax.device_put(params, rest[0]), jax.device_put(state, rest[1])
    losses = []
    for seed in range(count):
        batch = jax.device_put(residual_stack.batch(seed=seed), meshes.batch_sharding(mesh))
        params, state, loss = run(params, state, batch)
        losses.append(float(loss))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}
    return losses, jax.tree.map(np.asarray, params), kinds, {p.sharding.memory_kind for p in params.values()}


@pytest.mark.slow
def test_training_with_offloaded_state_equals_training_without():
    losses, params, *_ = steps("none")
    for what, param_kind in (("optimizer", "device"), ("optimizer and parameters", "pinned_host")):
        offloaded, offloaded_params, state_kinds, param_kinds = steps(what)
        assert (state_kinds, param_kinds) == ({"pinned_host"}, {param_kind})
        np.testing.assert_allclose(offloaded, losses, rtol=1e-6)
        for path, p in params.items():
            np.testing.assert_allclose(offloaded_params[path], p, rtol=1e-4, atol=1e-6, err_msg=path)


def test_fetch_and_stow_are_copies():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    sharding = {"w": NamedSharding(mesh, P("fsdp"))}
    x = {"w": jax.device_put(jnp.arange(16.0), sharding["w"])}

    def there_and_back(x):
        away = offload.put_back(x, rest)
        return offload.fetch(away, sharding), away

    rest = offload.on_host(x)
    assert offload.on_host(jnp.ones(())).memory_kind == "device"
    back, away = jax.jit(there_and_back, out_shardings=(sharding, rest))(x)
    assert away["w"].sharding.memory_kind == "pinned_host"
    assert away["w"].sharding.spec == P("fsdp")
    assert back["w"].sharding.memory_kind == "device"
    np.testing.assert_array_equal(back["w"], x["w"])
