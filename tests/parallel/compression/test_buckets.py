"""Gradients of `Ddp` in compressed buckets: bytes by level of links, one host, gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.compression.compressors import Blocks, Fp16, OneBit, TopKEntries
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.gradients.blocks import StepContext
from scalejax.parallel.gradients.compute import Loss, gradients
from scalejax.parallel.links import SentBytes
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding
from scalejax.plan.compiled import collectives

SHAPES = {"a": (64, 48), "b": (3, 5, 256), "small": (7,)}


def dot(given):
    """A loss whose gradient of each device is its row of the batch."""
    params = given.gather(given.params)
    return Loss(sum((params[path] * given.batch[path][0]).sum() for path in SHAPES), jnp.float32(1)), {}


def prepared(compression, shape, parts=1):
    """(gradients, parameters, gradients of each device)."""
    mesh = meshes.make_mesh(shape)
    strategy = Ddp(compression=compression, accumulate="local")
    run = gradients(dot, strategy, mesh=mesh, specs=dict.fromkeys(SHAPES, P()), parts=parts)
    rng = np.random.default_rng(0)
    given = {path: rng.standard_t(3, (8, *shape)).astype(np.float32) for path, shape in SHAPES.items()}
    return run, {path: jnp.zeros(shape) for path, shape in SHAPES.items()}, given


def compiled(run, params, given):
    state = jax.jit(run.init_exchange)(params)
    context = StepContext(jnp.int32(0), jax.random.key(0))
    given = jax.device_put(given, meshes.batch_sharding(run.mesh))
    step = jax.jit(lambda params, given, state: run(params, given, exchange=state, context=context))
    return step.lower(params, given, state).compile(), state


def buckets(compressor, **fields):
    return Compression(compressor=compressor, plain_below=512, bucket_bytes=16_384, **fields)


HOSTS = MeshShape(replica=2, fsdp=4)
CASES = [
    (buckets(OneBit()), HOSTS),
    (buckets(TopKEntries(k=0.05), owner=Fp16()), MeshShape(replica=8, fsdp=1)),
    (buckets(Blocks(), error_feedback="none"), HOSTS),
    (buckets(OneBit()), MeshShape(fsdp=8)),
]


@pytest.mark.default_cases("onebit", "one host")
@pytest.mark.parametrize(("compression", "shape"), CASES, ids=["onebit", "topk", "int4", "one host"])
def test_bytes_by_level_are_those_of_the_compiled_step(compression, shape):
    """And on one host gradients are summed as they are, which is said."""
    run, params, given = prepared(compression, shape)
    step, state = compiled(run, params, given)
    exchange, whole = run.compressed(params), run.whole(params)
    stated = sum(exchange.sent(whole, run.mesh.shape).values(), SentBytes())
    found = collectives.sent(explain_sharding(step, run.mesh), run.mesh.shape)
    # But for numbers of a few bytes: the loss, and whether all is finite.
    assert (found.within, found.between) == pytest.approx((stated.within, stated.between), abs=32)
    remarks = exchange.remarks(whole, run.mesh.shape)
    if shape == MeshShape(fsdp=8):
        reduced = step(params, jax.device_put(given, meshes.batch_sharding(run.mesh)), state)
        for path, x in given.items():
            np.testing.assert_allclose(reduced.params[path], x.sum(0), rtol=1e-5, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, reduced.exchange, state)
        assert stated.between == 0
        assert "the mesh has one: they are summed as they are. Set --set placement.mesh.replica=N" in remarks[0]
    assert "B a step within its host (an index of replica) and" in remarks[-1]


def test_a_gradient_that_is_not_finite_leaves_all_that_is_remembered_on_every_device():
    """Wherever it is: the small gradient travels as it is, and its step is none for the large ones either."""
    run, params, given = prepared(buckets(OneBit()), HOSTS)
    step, state = compiled(run, params, given)
    sharding = meshes.batch_sharding(run.mesh)
    before = step(params, jax.device_put(given, sharding), state).exchange
    assert all(np.abs(np.asarray(own["worker"])).max() > 0 for own in before.values())
    for path, value in (("small", np.nan), ("a", np.inf)):
        spoilt = {name: np.array(x) for name, x in given.items()}
        spoilt[path].reshape(8, -1)[3, 5] = value
        after = step(params, jax.device_put(spoilt, sharding), before)
        assert not np.isfinite(np.asarray(after.params[path])).all()
        jax.tree.map(np.testing.assert_array_equal, after.exchange, before)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 1])
def test_residuals_of_several_hosts_are_applied_by_one(devices):
    """In its first step, all at once: of whole numbers nothing is missing. Then gradients are what they are."""
    compression = buckets(TopKEntries(k=0.05))
    run, params, given = prepared(compression, HOSTS)
    given = {path: np.rint(20 * x) for path, x in given.items()}
    step, state = compiled(run, params, given)
    exact, applied = ({path: np.zeros(shape) for path, shape in SHAPES.items()} for _ in range(2))
    for _ in range(3):
        found = step(params, jax.device_put(given, meshes.batch_sharding(run.mesh)), state)
        state = found.exchange
        exact = {path: x + given[path].sum(0) for path, x in exact.items()}
        applied = {path: x + np.asarray(found.params[path]) for path, x in applied.items()}
    assert np.abs(exact["a"] - applied["a"]).max() > 20

    mesh = meshes.make_mesh(MeshShape(fsdp=devices), jax.devices()[:devices])
    alone = gradients(dot, run.strategy, mesh=mesh, specs=dict.fromkeys(SHAPES, P()))
    state = {
        name: alone.compressed(params).resized(name, jax.tree.map(np.asarray, own), {"replica": 1, "fsdp": devices})
        for name, own in state.items()
    }
    one = jax.jit(lambda given, state: alone(params, given, exchange=state, context=StepContext(0, jax.random.key(0))))
    rows = {path: x if devices == 8 else x.sum(0, keepdims=True) for path, x in given.items()}
    spoilt = {path: np.where(np.arange(x.shape[-1]) == 3, np.inf, x) for path, x in rows.items()}
    kept = one(spoilt, state).exchange
    jax.tree.map(np.testing.assert_array_equal, kept, state)
    for _ in range(2):
        found = one(rows, state)
        state = found.exchange
        exact = {path: x + given[path].sum(0) for path, x in exact.items()}
        applied = {path: x + np.asarray(found.params[path]) for path, x in applied.items()}
        jax.tree.map(np.testing.assert_array_equal, applied, exact)
        assert not any(np.asarray(own[name]).any() for own in state.values() for name in ("worker", "owner"))


def test_momentum_is_not_dropped_in_silence_on_one_host():
    run, params, given = prepared(buckets(OneBit(), momentum=0.9), MeshShape(fsdp=8))
    with pytest.raises(UserError, match=r"momentum=0\.9 is part of what travels.*the mesh has one"):
        compiled(run, params, given)


def test_what_is_remembered_follows_the_factor_of_the_loss_and_its_length_does_not():
    run, params, _ = prepared(buckets(OneBit()), HOSTS)
    state = {"bucket 0": {"worker": jnp.ones((8, 2, 4)), "owner": jnp.ones((8, 4)), "values": jnp.full(8, 30)}}
    halved = run.rescaled(params, state, jnp.float32(0.5))["bucket 0"]
    assert float(halved["worker"].max()) == float(halved["owner"].max()) == 0.5
    np.testing.assert_array_equal(halved["values"], state["bucket 0"]["values"])
    root = run.compressed(params).residual(params, state, jnp.float32(2))
    assert float(root) == pytest.approx(np.sqrt(8 * 2 * 4 + 8 * 4) / 2)


@pytest.mark.slow
def test_errors_are_of_the_sum_of_all_parts():
    """Whole numbers: gradients of four parts, and their sum in one, leave the same errors to the bit."""
    found = []
    for parts in (4, 1):
        run, params, _ = prepared(buckets(TopKEntries(k=0.05)), HOSTS, parts)
        rng = np.random.default_rng(3)
        rows = {path: rng.integers(-50, 50, (8, 4, *shape)).astype(np.float32) for path, shape in SHAPES.items()}
        given = {
            path: x.reshape(32, *x.shape[2:]) if parts == 4 else x.sum(axis=1, dtype=np.float32)
            for path, x in rows.items()
        }
        given = jax.device_put(given, meshes.batch_sharding(run.mesh))
        context = StepContext(jnp.int32(0), jax.random.key(0))
        state = jax.jit(run.init_exchange)(params)
        step = jax.jit(lambda params, given, state, run=run, c=context: run(params, given, exchange=state, context=c))
        result = step(params, given, state)
        found.append(jax.tree.map(np.asarray, (result.params, result.exchange)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert any(np.abs(x["worker"]).max() > 0 for x in found[0][1].values())


def test_what_is_too_small_to_travel_compressed_is_not_left_without_momentum():
    run, params, _ = prepared(buckets(OneBit(), momentum=0.9), HOSTS)
    with pytest.raises(UserError, match=r"momentum=0\.9 is part of what travels compressed, and 'small' and 0 more do"):
        jax.jit(run.init_exchange)(params)


def test_an_empty_parameter_is_not_compressed():
    run, params, _ = prepared(Compression(plain_below=0), HOSTS)
    named = run.compressed(params)
    assert "none" not in named._buckets({**params, "none": jnp.zeros((0, 3))})[0]


def test_a_dtype_of_sums_beside_compression_is_refused():
    with pytest.raises(UserError, match="reduce_dtype=bfloat16 beside compression"):
        Ddp(compression=Compression(), reduce_dtype="bfloat16")


class Mine(OneBit):
    """A compressor of a user's own that does not say what it is."""

    __repr__ = object.__repr__


def test_runs_with_a_compressor_of_ones_own_know_each_other_again():
    first, again = (Ddp(compression=Compression(compressor=Mine())).remembers for _ in range(2))
    assert first == again
    assert "Mine(" in first
    assert Ddp(compression=Compression()).remembers == f"Ddp {Compression()!r}"
