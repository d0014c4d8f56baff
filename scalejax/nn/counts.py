"""Parameters and multiply-accumulates of a model, counted from its shapes: no array is made."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

from scalejax.numerics import flops
from scalejax.numerics.dtypes import FLOAT32, Dtypes

T = TypeVar("T")
_NO_MESH = jax.sharding.AbstractMesh((), ())


def abstract(build: Callable[..., T], *args: object, dtypes: Dtypes = FLOAT32) -> T:
    """The model that build(*args, rngs, dtypes) makes, without its arrays."""
    return nnx.eval_shape(lambda: build(*args, nnx.Rngs(0), dtypes))


def parameters(model: nnx.Module, *, axes: int = 0) -> int:
    """Parameters of a model, abstract or not; of those with at least so many axes."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return sum(math.prod(shape) for shape in shapes if len(shape) >= axes)


def macs(model: nnx.Module, *inputs: object, **settings: object) -> int:
    """Multiply-accumulates of the matrix products and convolutions of model(*inputs, **settings).

    Args:
      model: Abstract or not.
      inputs: Pytrees of arrays or of `jax.ShapeDtypeStruct`.
      settings: Arguments that are no arrays.
    """
    graph, state = nnx.split(model)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return (
            flops.count(jax.make_jaxpr(lambda state, *x: nnx.merge(graph, state)(*x, **settings))(state, *inputs)).total
            // 2
        )
