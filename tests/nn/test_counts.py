"""Counts of abstract models against sums on paper."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from scalejax import nn
from scalejax.nn import counts

SIZES = (3, 5, 4, 2)


def mlp(sizes, rngs, dtypes):
    return nn.Mlp(sizes, rngs=rngs, dtypes=dtypes)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_an_mlp_has_its_matrices_and_biases():
    model = counts.abstract(mlp, SIZES)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))
    assert counts.parameters(model) == counts.parameters(nn.Mlp(SIZES, rngs=nnx.Rngs(0))) == 20 + 24 + 10
    assert counts.parameters(model, axes=2) == 15 + 20 + 8


@pytest.mark.parametrize("rows", [1, 7])
def test_its_products_are_one_a_weight_and_row(rows):
    assert counts.macs(counts.abstract(mlp, SIZES), shape(rows, 3)) == rows * (15 + 20 + 8)


def test_a_mesh_at_hand_changes_no_count():
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))

    def projected(model, x):
        return nn.project(x, model.layers[0].kernel[...])

    class Projected(nnx.Module):
        def __init__(self):
            self.mlp = nn.Mlp(SIZES, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return projected(self.mlp, nn.constrain(x, ("batch", "sequence", None)))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert counts.macs(Projected(), shape(1, 4, 3)) == 4 * 15


def test_layers_of_a_scan_count_each():
    class Stack(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros((6, 5, 5)), logical_axes=("layers", "input", "hidden"))

        def __call__(self, x):
            return nn.scan_layers(self, lambda layer, x, _: (x @ layer.weight[...], None), x)[0]

    assert counts.macs(Stack(), shape(2, 5)) == 6 * 2 * 25
