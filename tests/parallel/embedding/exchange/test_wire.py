"""Fewer bits on the wire: how far off, what stays, and that nothing changes by default."""

import re

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
from scalejax.numerics.qsnr import qsnr
from scalejax.numerics.quantize import cast
from scalejax.parallel import mesh as meshes
from scalejax.parallel.compression import codec
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.exchange import wire
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

# Largest error as a share of the element (half types) or of the largest magnitude of its vector (scaled types): half a
# unit in the last place; int8 has 127 steps.
ERRORS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0.5 / 127}
SCALED = ("float8_e4m3fn", "float8_e5m2", "int8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_within_half_a_unit(kind):
    rng = np.random.default_rng(1)
    vectors = jnp.asarray(rng.normal(size=(500, 24)) * 10.0 ** rng.integers(-3, 3, (500, 1)), jnp.float32)
    vectors = vectors.at[7].set(0)
    got = wire.decode(wire.encode(vectors, kind), kind, jnp.float32, dim=24)
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
        wire.decode(wire.encode(vectors, "float16"), "float16", jnp.float32, dim=3), [[65504, -65504, 1]]
    )


@pytest.mark.parametrize("kind", ERRORS)
def test_nan_stays_visible(kind):
    vectors = np.ones((300, 8), np.float32)
    vectors[[0, 200], [1, 7]] = np.nan
    got = jax.jit(lambda v: wire.decode(wire.encode(v, kind), kind, jnp.float32, dim=8))(vectors)
    assert np.isnan(np.asarray(got)[[0, 200], [1, 7]]).all()
    assert np.isfinite(np.asarray(got)[1:200]).all()


@pytest.mark.parametrize("kind", SCALED)
def test_vectors_whose_scale_would_be_subnormal_stay_numbers(kind):
    """Hardware that takes subnormal numbers for zero would divide by it."""
    vectors = jnp.float32([[1, -1 / 3, 0, 0.5]]) * jnp.float32([[1e-35], [1e-36], [1e-37], [2e-38]])
    got = jax.jit(lambda v: wire.decode(wire.encode(v, kind), kind, jnp.float32, dim=4))(vectors)
    least = float(jnp.finfo(jnp.float32).tiny)  # the step, where the scale is the least that there is
    bound = ERRORS[kind] * 1.001 * abs(vectors).max(axis=1, keepdims=True) + 0.5 * least
    assert (abs(np.asarray(got, np.float64) - vectors) <= bound).all()
    assert np.asarray(got)[:3, 0].all()


@pytest.mark.default_cases("int8")
@pytest.mark.parametrize("kind", SCALED)
def test_nothing_travels_as_nothing(kind):
    for shape in ((0, 8), (3, 0)):
        sent = wire.encode(jnp.zeros(shape), kind)
        assert wire.decode(sent, kind, jnp.float32, dim=shape[1]).shape == shape


@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_block_formats_are_the_cast_of_every_vector_to_the_bit(dtype):
    vectors = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5, 24)), dtype)
    for kind in ("bdr_mx6", "mxfp8_e4m3"):
        encoded = wire.encode(vectors, kind)
        assert (encoded.dtype, encoded.shape) == (jnp.uint8, (4, 5, {"bdr_mx6": 2 + 2 + 15, "mxfp8_e4m3": 25}[kind]))
        got = wire.decode(encoded, kind, vectors.dtype, dim=24)
        np.testing.assert_array_equal(got, cast(vectors, kind, axis=-1, tail="pad"))


def run(exchange, kind="row_wise", size=1e-6):
    tables = wide_tables(OPTIMIZERS["sgd decoupled"])
    on = EmbeddingCollection(
        tables=tables,
        mesh=meshes.make_mesh(MeshShape(replica=2), jax.devices()[:8]),
        plan=plan_of(kind, tables),
        exchange=exchange,
    )
    host = batch(16, weighted=True)
    grads = {name: size * g for name, g in given_grads(tables, host).items()}

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return embedded, on.update(state, routing, grads)

    state, features = numpy_stack(on, random_logical(on)), device_features(on, host, 16)
    # What the program asks for: the compiler for CPUs widens some types on the wire. What that for TPUs sends is in
    # tests/aot/test_wire_formats.py.
    lowered = jax.jit(step).lower(state, features)
    embedded, new = jax.jit(step)(state, features)
    before = on.to_logical(state)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), on.to_logical(new), before)
    return embedded, moved, lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
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


# dB of Gaussian vectors under one scale a block (docs/numerics.md), and a decibel for sums of bags and few vectors.
FIDELITY = {"bdr_mx9": 46.6, "bdr_mx6": 28.4, "bdr_mx4": 15.8, "mxfp8_e4m3": 30.5, "mxfp6_e2m3": 31.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("row_wise", "bdr_mx6", "mxfp8_e4m3"),
        ("table_wise", "mxfp6_e2m3", "bdr_mx9"),
        ("column_wise", "bdr_mx4", "bdr_mx6"),
    ],
)
def test_block_formats_travel_as_bytes_and_within_their_fidelity(kind, forward, backward):
    exact, change, _ = run(Exchange(capacity_factor=8.0), kind, size=1.0)
    embedded, moved, text = run(Exchange(capacity_factor=8.0, forward=forward, backward=backward), kind, size=1.0)
    sent = [line for line in text.splitlines() if "all_to_all" in line]
    assert {dtype for line in sent for dtype in re.findall(r"tensor<[0-9x]+x(\w+)>", line)} == {"i32", "i64", "ui8"}
    if kind == "row_wise":  # rows alone, which travel as they are; with bags of other lengths they fill up lanes
        widths = {int(width) for line in sent for width in re.findall(r"x(\d+)xui8>", line)}
        assert widths == {codec.encoded_bytes(32, format) for format in (forward, backward)}
    for found, expected, format in (
        (embedded, exact, forward),
        ({name: x["rows"] for name, x in moved.items()}, {name: x["rows"] for name, x in change.items()}, backward),
    ):
        dB = qsnr(*(np.concatenate([np.ravel(side[name]) for name in expected]) for side in (expected, found)))
        assert FIDELITY[format] - 1.5 < dB < FIDELITY[format] + 6, (format, dB)


def test_what_cannot_travel_is_refused():
    with pytest.raises(UserError, match=r"forward must be one of full, bfloat16.*got 'float4'"):
        Exchange(forward="float4")
    with pytest.raises(UserError, match=r"backward must be one of full, .*bdr_mx6, .*mxfp8_e4m3.*; got 'mx6'"):
        Exchange(backward="mx6")
    with pytest.raises(UserError, match="loss_scale must be a positive number; got 0"):
        Exchange(loss_scale=0.0)
    with pytest.raises(UserError, match="overflow must be one of fail, count; got 'drop'"):
        Exchange(overflow="drop")
