"""Small schemas, batches and module surgery for the click models."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.data.examples.schema import Categorical, Schema
from scalejax.train.task import Batch


@pytest.fixture
def schema():
    """Five features, three numbers, two tasks."""
    return Schema(
        categorical=tuple(Categorical(name=f"c{i}", rows=10 + i) for i in range(5)),
        dense=("x", "y", "z"),
        labels=("click", "buy"),
    )


@pytest.fixture
def criteo():
    """The Criteo Terabyte shape: 26 features, 13 numbers; row counts play no part in the dense model."""
    return Schema(
        categorical=tuple(Categorical(name=f"c{i}", rows=4) for i in range(26)),
        dense=tuple(f"i{i}" for i in range(13)),
    )


@pytest.fixture
def examples():
    """Function (task, batch size, dtype) -> Batch with normal values."""

    def make(task, size=6, dtype=np.float64, seed=0):
        rng = np.random.default_rng(seed)
        embedded = {t.features[0]: jnp.asarray(rng.normal(size=(size, t.dim)), dtype) for t in task.tables()}
        fields = {
            "dense": jnp.asarray(rng.normal(size=(size, len(task.schema.dense))), jnp.float32),
            "labels": jnp.asarray(rng.integers(0, 2, size=(size, len(task.schema.labels))), jnp.float32),
            "weights": jnp.asarray(rng.uniform(0.5, 2.0, size=size), jnp.float32),
        }
        return Batch(fields, embedded)

    return make


@pytest.fixture
def randomised():
    """Function module -> module with every parameter drawn anew, so that no bias or scale hides at its start."""

    def make(module, seed=1):
        rng = np.random.default_rng(seed)
        graph, state = nnx.split(module)
        return nnx.merge(graph, jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.4, p.dtype), state))

    return make


@pytest.fixture
def numpy_parameters():
    """Function module -> nested dict of its parameters as NumPy arrays; list positions are integer keys."""

    def make(module):
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))

    return make


@pytest.fixture
def dot_flops():
    """Function jaxpr -> FLOPs of every dot_general in it, 2 a multiply-accumulate."""

    def count(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                lhs = equation.invars[0].aval.shape
                total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[i] for i in contracted)
            for value in equation.params.values():
                # of a choice by platform, the first branch stands for all
                inner = value[0] if isinstance(value, tuple) and value else value
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += count(inner)
        return total

    return lambda closed: count(closed.jaxpr)
