"""Attention of a model by a named implementation: what it cannot be is a message, not a bug."""

import jax
import jax.numpy as jnp
import pytest

from scalejax import nn
from scalejax.errors import UserError

Q, K = jnp.ones((1, 8, 4, 16)), jnp.ones((1, 8, 2, 16))


@pytest.mark.parametrize("name", ["splash", "pallas_tpu", "cudnn", "pallas_gpu"])
def test_kernels_of_another_platform_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"model.attention={name} is for a \w+, .* compiled for a CPU.*attention=none"):
        jax.jit(lambda q, k: nn.attend(q, k, k, implementation=name))(Q, K)
