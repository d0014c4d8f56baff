"""Fewer bits on the wire: how far off, what stays, and that nothing changes by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import (
    OPTIMIZERS,
    batch,
    device_features,
    given_grads,
    numpy_stack,
    plan_of,
    random_logical,
    wide_tables,
)

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding import wire
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.plan import Exchange
from scalejax.parallel.mesh import MeshShape

# Largest error as a share of the element (half types) or of the largest magnitude of its vector (scaled types): half a
# unit in the last place; int8 has 127 steps.
ERRORS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0.5 / 127}
SCALED = ("float8_e4m3fn", "float8_e5m2", "int8")


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_within_half_a_unit(kind):
    rng = np.random.default_rng(1)
    vectors = jnp.asarray(rng.normal(size=(500, 24)) * 10.0 ** rng.integers(-3, 3, (500, 1)), jnp.float32)
    vectors = vectors.at[7].set(0)
    got = wire.decode(wire.encode(vectors, kind), kind, jnp.float32)
    most = abs(vectors).max(axis=1, keepdims=True)
    # Scaled types near zero have an absolute grid, a share of the largest; 1.001 for the rounding of the scale.
    bound = ERRORS[kind] * 1.001 * (most if kind in SCALED else abs(vectors))
    smallest = 2.0**-25 if kind == "float16" else 1e-30  # half its subnormal unit
    assert (abs(got - vectors) <= bound + smallest).all()
    assert wire.encode(vectors, kind).dtype.itemsize * wire.encode(vectors, kind).shape[1] == {
        "bfloat16": 48,
        "float16": 48,
    }.get(kind, 28)


def test_float16_is_clamped_to_its_range():
    vectors = jnp.float32([[1e6, -1e6, 1.0]])
    np.testing.assert_array_equal(
        wire.decode(wire.encode(vectors, "float16"), "float16", jnp.float32), [[65504, -65504, 1]]
    )


@pytest.mark.parametrize("kind", ERRORS)
def test_nan_stays_visible(kind):
    got = wire.decode(wire.encode(jnp.float32([[1, np.nan, 2]]), kind), kind, jnp.float32)
    assert np.isnan(np.asarray(got)[0, 1])


def run(exchange, kind="row_wise"):
    tables = wide_tables(OPTIMIZERS["sgd decoupled"])
    on = EmbeddingCollection(
        tables=tables,
        mesh=meshes.make_mesh(MeshShape(replica=2), jax.devices()[:8]),
        plan=plan_of(kind, tables),
        exchange=exchange,
    )
    host = batch(16, weighted=True)
    grads = {name: 1e-6 * g for name, g in given_grads(tables, host).items()}

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return embedded, on.update(state, routing, grads)

    state, features = numpy_stack(on, random_logical(on)), device_features(on, host, 16)
    compiled = jax.jit(step).lower(state, features)
    embedded, new = jax.jit(step)(state, features)
    before = on.to_logical(state)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), on.to_logical(new), before)
    return embedded, moved, compiled.as_text()


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        pytest.param("row_wise", "bfloat16", "float16", marks=pytest.mark.slow),
        pytest.param("table_wise", "int8", "float8_e5m2", marks=pytest.mark.slow),
        ("row_wise", "int8", "float8_e5m2"),
        ("table_wise", "bfloat16", "float16"),
    ],
)
def test_forward_and_backward_travel_as_they_are_told(kind, forward, backward):
    exact, change, text = run(Exchange(capacity_factor=8.0), kind)
    assert "bf16" not in text
    assert "xi8>" not in text
    embedded, moved, text = run(
        Exchange(capacity_factor=8.0, forward=forward, backward=backward, loss_scale=1024.0), kind
    )
    names = {"bfloat16": "bf16", "float16": "f16", "int8": "i8", "float8_e5m2": "i8"}
    sent = [line for line in text.splitlines() if "all_to_all" in line]
    assert any(f"x{names[forward]}>" in line for line in sent)
    assert any(f"x{names[backward]}>" in line for line in sent)
    for name, value in exact.items():
        most = 4 * 0.3 * 3  # ids of a bag, largest row, largest weight
        np.testing.assert_allclose(embedded[name], value, atol=3 * ERRORS[forward] * most)
        assert not np.array_equal(embedded[name], value)
    for name, leaves in change.items():
        largest = abs(leaves["rows"]).max()
        np.testing.assert_allclose(moved[name]["rows"], leaves["rows"], atol=16 * ERRORS[backward] * largest)
        assert abs(moved[name]["rows"]).max() > 0  # the loss scale keeps gradients of 1e-6 above float16's smallest


def test_what_cannot_travel_is_refused():
    with pytest.raises(UserError, match=r"forward must be one of full, bfloat16.*got 'float4'"):
        Exchange(forward="float4")
    with pytest.raises(UserError, match="loss_scale must be a positive number; got 0"):
        Exchange(loss_scale=0.0)
    with pytest.raises(UserError, match="spill must be 'fail' or 'count'; got 'drop'"):
        Exchange(spill="drop")
