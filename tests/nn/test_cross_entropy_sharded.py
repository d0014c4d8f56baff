"""The loss of a linear head on a mesh: equal to one device, its gradient summed over devices once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax import nn
from scalejax.parallel.mesh import BATCH_AXES, MeshShape, make_mesh
from scalejax.plan.compiled import collectives, hlo

B, S, E, V, POSITIONS = 8, 24, 16, 64, 4


def arguments():
    random = np.random.default_rng(0)
    return (
        jnp.asarray(random.normal(size=(B, S, E))),
        jnp.asarray(random.normal(size=(E, V))),
        jnp.asarray(random.integers(0, V, (B, S)), jnp.int32),
        jnp.asarray(random.random((B, S)) < 0.8, jnp.float64),
    )


def gradients(x, weight, targets, weights):
    def loss(x, weight):
        return nn.linear_cross_entropy(x, weight, targets, weights, positions=POSITIONS)

    return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)


@pytest.mark.default_cases("two", "context", "three")
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(fsdp=8),
        MeshShape(replica=2, fsdp=4),
        MeshShape(fsdp=4, tensor=2),
        MeshShape(fsdp=2, context=4),
        MeshShape(fsdp=2, context=2, tensor=2),
    ],
    ids=["fsdp", "two", "tensor", "context", "three"],
)
def test_devices_change_nothing_and_sum_the_gradient_of_the_head_once(x64, shape):
    args = arguments()
    want = jax.jit(gradients)(*args)
    mesh = make_mesh(shape)
    rows = NamedSharding(mesh, P(BATCH_AXES, "context"))
    head = NamedSharding(mesh, P(None, "tensor"))
    placed = [jax.device_put(a, head if a.shape == (E, V) else rows) for a in args]
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients, out_shardings=(NamedSharding(mesh, P()), (rows, head))).lower(*placed).compile()
    got = compiled(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, want)
    found = collectives.of_module(hlo.parse(compiled.as_text()), mesh)
    head_bytes = E * V * 8 // mesh.shape["tensor"]
    data = {axis for axis in ("replica", "fsdp", "context") if mesh.shape[axis] > 1}
    over_data = [c for c in found if data & set(c.axes) and c.bytes / c.count >= head_bytes]
    assert sum(c.count for c in over_data) == 1, over_data
    assert set(over_data[0].axes) == data


@pytest.mark.parametrize("length", [24, 22])  # 22 positions do not divide over the four that cut them
def test_inside_a_shard_map_over_rows_the_positions_are_cut_as_well(x64, length):
    x, weight, targets, weights = arguments()
    x, targets, weights = (a[:, :length] for a in (x, targets, weights))
    want = jax.jit(gradients)(x, weight, targets, weights)
    mesh = make_mesh(MeshShape(fsdp=2, context=4))

    def local(x, weight, targets, weights):
        value, (d_x, d_weight) = gradients(x, weight, targets, weights)
        return jax.lax.psum(value, "fsdp"), (d_x, jax.lax.psum(d_weight, "fsdp"))

    rows = P("fsdp")
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=(P(), (rows, P())), axis_names={"fsdp"},
        check_vma=False,
    )  # fmt: skip
    got = jax.jit(sharded)(x, weight, targets, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, want)


def test_no_slice_is_put_together_from_several_devices(x64):
    args = arguments()
    mesh = make_mesh(MeshShape(fsdp=2, context=4))
    rows = NamedSharding(mesh, P(BATCH_AXES, "context"))
    placed = [jax.device_put(a, NamedSharding(mesh, P()) if a.shape == (E, V) else rows) for a in args]
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients, out_shardings=(None, (rows, None))).lower(*placed).compile()
    kinds = {c.kind for c in collectives.of_module(hlo.parse(compiled.as_text()), mesh) if c.axes}
    assert kinds == {"all-reduce"}
