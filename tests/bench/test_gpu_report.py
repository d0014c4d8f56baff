"""What the benchmarks of GPU kernels share, as far as it needs no GPU."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs in a checkout")


def test_every_repetition_is_computed(scripts: Any) -> None:
    """A loop whose turns give the same would be one turn to a compiler."""
    seen: list[float] = []

    def call(x: jax.Array, weights: jax.Array) -> jax.Array:
        out = x @ weights
        jax.debug.callback(lambda out: seen.append(float(out[0, 0])), out)
        return out

    x, weights = np.ones((2, 8), np.float32), np.full((8, 8), 0.5, np.float32)
    out = jax.jit(scripts("gpu_report").repeated(call, 5))(x, weights)
    np.testing.assert_array_equal(out, x @ weights)
    jax.effects_barrier()
    assert seen == [4.0] * 5
    # The product stays in the loop too where nothing but its result is used.
    text = jax.jit(scripts("gpu_report").repeated(jnp.matmul, 5)).lower(x, weights).compile().as_text()
    assert text.count(" dot(") == 2
    assert "while(" in text


def test_programs_are_compiled_by_their_names(scripts: Any) -> None:
    lowered = {n: jax.jit(lambda x, n=n: x * n).lower(np.float32(1)) for n in (2, 3, 5)}
    found = {n: float(program(np.float32(7))) for n, program in scripts("gpu_report").compiled(lowered).items()}
    assert found == {2: 14.0, 3: 21.0, 5: 35.0}
