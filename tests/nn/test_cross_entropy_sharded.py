"""The loss of a linear head on a mesh: equal to one device, its gradient summed over devices once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax import nn
from scalejax.parallel.mesh import BATCH_AXES, MeshShape, make_mesh
from scalejax.plan import collectives, hlo

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


@pytest.mark.parametrize(
    "shape",
    [MeshShape(fsdp=8), MeshShape(replica=2, fsdp=4), MeshShape(fsdp=4, tensor=2)],
    ids=["fsdp", "two", "tensor"],
)
def test_devices_change_nothing_and_sum_the_gradient_of_the_head_once(x64, shape):
    args = arguments()
    want = jax.jit(gradients)(*args)
    mesh = make_mesh(shape)
    rows = NamedSharding(mesh, P(BATCH_AXES))
    head = NamedSharding(mesh, P(None, "tensor"))
    placed = [jax.device_put(a, head if a.shape == (E, V) else rows) for a in args]
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients, out_shardings=(NamedSharding(mesh, P()), (rows, head))).lower(*placed).compile()
    got = compiled(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, want)
    found = collectives.of_module(hlo.parse(compiled.as_text()), mesh)
    head_bytes = E * V * 8 // mesh.shape["tensor"]
    over_data = [c for c in found if c.bytes and "fsdp" in c.axis and c.bytes / c.count >= head_bytes]
    assert sum(c.count for c in over_data) == 1, over_data
