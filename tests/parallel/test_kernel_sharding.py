import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalejax.parallel import mesh as meshes
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import Rules

RULES = Rules(axes=(("batch", ("replica", "fsdp")), ("heads", ("tensor",))))
AXES = (("batch", "heads", None), ("heads",), ("batch",))


def op(x, w, ids):
    return jnp.sin(x) * w[None, :, None] * (1 + ids)[:, None, None]


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(MeshShape(fsdp=4, tensor=2))


def value_and_gradients(f):
    x = jnp.arange(8 * 4 * 3, dtype=jnp.float32).reshape(8, 4, 3) / 10
    w, ids = jnp.arange(4, dtype=jnp.float32) + 1, jnp.arange(8)

    def loss(x, w):
        out = f(x, w, ids)
        return (out**2).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)
    return out, *grads


def assert_equal_to_plain(f):
    # sums over the batch in another order: float32 rounding of sums of size 1e3
    for ours, plain in zip(value_and_gradients(f), value_and_gradients(op), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-6)


def test_equals_the_plain_op_under_jit(mesh):
    assert_equal_to_plain(shard_kernel(op, in_axes=AXES, out_axes=AXES[0], rules=RULES, mesh=mesh))


def test_equals_the_plain_op_under_a_set_mesh(mesh):
    with jax.set_mesh(mesh):
        assert_equal_to_plain(shard_kernel(op, in_axes=AXES, out_axes=AXES[0], rules=RULES))


@pytest.mark.parametrize("check_vma", [True, False])
def test_equals_the_plain_op_inside_a_partly_manual_shard_map(mesh, check_vma):
    inner = shard_kernel(op, in_axes=AXES, out_axes=AXES[0], rules=RULES)
    outer = jax.shard_map(
        lambda *args: inner(*args),
        mesh=mesh,
        in_specs=(P("fsdp"), P(), P("fsdp")),
        out_specs=P("fsdp"),
        axis_names={"fsdp"},
        check_vma=check_vma,
    )
    assert_equal_to_plain(outer)


def test_runs_as_it_is_where_every_axis_is_manual(mesh):
    inner = shard_kernel(op, in_axes=AXES, out_axes=AXES[0], rules=RULES)
    specs = (P("fsdp", "tensor"), P("tensor"), P("fsdp"))
    assert_equal_to_plain(jax.shard_map(lambda *args: inner(*args), mesh=mesh, in_specs=specs, out_specs=specs[0]))


def test_every_device_works_on_its_own_part(mesh):
    shapes = []

    def seen(x):
        shapes.append(x.shape)
        return x

    f = shard_kernel(seen, in_axes=(AXES[0],), out_axes=AXES[0], rules=RULES, mesh=mesh)
    jax.eval_shape(f, jnp.zeros((8, 4, 3)))
    jax.eval_shape(f, jnp.zeros((6, 4, 3)))  # a batch of 6 does not divide by 4
    assert shapes == [(2, 2, 3), (6, 2, 3)]


def test_several_results_keep_their_own_axes(mesh):
    f = shard_kernel(lambda x, w: (x * 2, w * 3), in_axes=AXES[:2], out_axes=AXES[:2], rules=RULES, mesh=mesh)
    x, w = jnp.ones((8, 4, 3)), jnp.arange(4.0)

    @jax.jit
    def grads(x, w):
        return jax.grad(lambda x, w: sum(out.sum() for out in f(x, w)), argnums=(0, 1))(x, w)

    dx, dw = grads(x, w)
    np.testing.assert_array_equal(dx, 2)
    np.testing.assert_array_equal(dw, 3)


def test_says_what_is_missing(mesh):
    f = shard_kernel(op, in_axes=AXES, out_axes=AXES[0], rules=RULES)
    with pytest.raises(ValueError, match="no mesh"):
        f(jnp.zeros((8, 4, 3)), jnp.zeros(4), jnp.zeros(8))
    g = shard_kernel(op, in_axes=AXES, out_axes=AXES[0], rules=RULES, mesh=mesh)
    with pytest.raises(ValueError, match="axis 'heads' has sizes 4 and 5"):
        g(jnp.zeros((8, 4, 3)), jnp.zeros(5), jnp.zeros(8))
