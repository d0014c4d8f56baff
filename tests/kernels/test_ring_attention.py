"""One kernel on several devices: what goes round is attended to once, and nothing is written while it is read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels.flash_attention import blocks
from scalejax.kernels.ring_attention import pallas_tpu, ring_attention
from scalejax.parallel.context_inference import NO_KEY, NO_QUERY, pass_kv
from scalejax.parallel.mesh import MeshShape, make_mesh

MODES = ("on_wait", "eager")
"""Copies happen when they are waited for, before which their target is NaN, or as soon as they are started."""
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (2, 1)}


@pytest.fixture(autouse=True)
def _simulator():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def races_found():
    assert interpret_pallas_call.races is not None
    return interpret_pallas_call.races.races_found


def problem(ranks, heads=(2, 1), batch=1, queries=16, keys=24, dtype=jnp.float32, seed=0):
    """Tokens anywhere: each device has `queries` and `keys` places, of which some are empty."""
    rng = np.random.default_rng(seed)
    total = ranks * keys

    def array(length, heads):
        return jnp.asarray(rng.normal(size=(batch, length, heads, 128)), dtype)

    key_positions = np.stack([rng.permutation(total) for _ in range(batch)])
    query_positions = np.stack([rng.permutation(total)[: ranks * queries] for _ in range(batch)])
    key_positions[:, ::7] = NO_KEY
    query_positions[:, ::5] = NO_QUERY
    positions = (jnp.asarray(x, jnp.int32) for x in (query_positions, key_positions))
    return (array(ranks * queries, heads[0]), *(array(total, heads[1]) for _ in range(2)), *positions)


CUT = P(None, "context", None, None)


def on_devices(attend, mesh, spec=CUT):
    """attend(q, k, v, query_positions, key_positions) under jit and a shard_map."""
    rows = P(*spec[:2])
    return jax.jit(
        jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3 + (rows,) * 2, out_specs=spec, check_vma=False)
    )


def ring(mesh, mode=None, **options):
    """The kernel, simulated, or the definition; its log-sum-exp behind its result."""
    options |= {"implementation": "reference"}
    if mode is not None:
        simulated = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
        options |= {"implementation": "pallas_tpu", "interpret": simulated}

    def attend(q, k, v, query_positions, key_positions):
        positions = {"query_positions": query_positions, "key_positions": key_positions}
        out, lse = ring_attention(q, k, v, **positions, **options)
        return jnp.concatenate([out.astype(jnp.float32), lse.swapaxes(1, 2)[..., None]], axis=-1)

    return on_devices(attend, mesh)


def mesh_of(ranks, **axes):
    shape = MeshShape(**{"fsdp": 1, "context": ranks} | axes)
    return make_mesh(shape, jax.devices()[: ranks * int(np.prod([*axes.values(), 1]))])


def check(ranks, mode, arrays, repeats=1, tolerance=1e-5, **options):
    mesh = mesh_of(ranks)
    want = ring(mesh, **options)(*arrays)
    run = ring(mesh, mode, **options)
    for _ in range(repeats):
        np.testing.assert_allclose(run(*arrays), want, rtol=tolerance, atol=tolerance)
        assert not races_found()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), [("on_wait", 2), ("on_wait", 8), ("eager", 8)])
def test_it_is_the_definition_however_copies_run_and_without_a_race(mode, ranks):
    check(ranks, mode, problem(ranks), repeats=5)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "window"), [("mha", 9), ("gqa", None), ("gqa", 9), ("mqa", None)])
def test_rows_heads_and_windows(heads, window):
    check(2, "on_wait", problem(2, HEADS[heads], batch=2), window=window)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_do_not_divide(mode, monkeypatch):
    """Two blocks of queries and of keys a device, the last ones partly filled; results wait in main memory."""
    monkeypatch.setitem(blocks.TPU, "", blocks.TpuBlocks(queries=128, keys=128, vmem_bytes=2**25))
    check(2, mode, problem(2, queries=130, keys=200), repeats=2)


@pytest.mark.slow
def test_blocks_of_four_devices_whose_tokens_lie_in_their_order(monkeypatch):
    """Most pairs of blocks are hidden or whole, and differ by device and turn."""
    monkeypatch.setitem(blocks.TPU, "", blocks.TpuBlocks(queries=128, keys=128, vmem_bytes=2**25))
    arrays = problem(4, queries=256, keys=256)
    positions = jnp.arange(1024, dtype=jnp.int32)[None]
    for mode in MODES:
        check(4, mode, (*arrays[:3], positions, positions), repeats=2)


@pytest.mark.slow
def test_bfloat16():
    check(2, "on_wait", problem(2, dtype=jnp.bfloat16), tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["room", "arrival"])
def test_a_missing_wait_is_found(missing, monkeypatch):
    """What guards the kernel guards this test: without it devices write where others read."""
    if missing == "room":
        monkeypatch.setattr(pallas_tpu, "give_room", lambda *_: None)
        monkeypatch.setattr(pallas_tpu, "wait_for_room", lambda *_: None)
    else:
        monkeypatch.setattr(pallas_tpu, "wait_for_arrival", lambda *_: None)
    arrays, run = problem(4), ring(mesh_of(4), "eager")
    run(*arrays).block_until_ready()
    assert races_found()


@pytest.mark.slow
def test_devices_of_other_axes_have_rings_of_their_own():
    mesh = mesh_of(2, fsdp=2, tensor=2)
    arrays = problem(2, (4, 2), batch=2)
    spec = P("fsdp", "context", "tensor", None)

    def attend(ring, q, k, v, query_positions, key_positions):
        positions = {"query_positions": query_positions, "key_positions": key_positions}
        simulated = {"interpret": pltpu.InterpretParams(detect_races=True)} if ring == "kernel" else {}
        return pass_kv(q, k, v, **positions, ring=ring, **simulated)

    got, want = (on_devices(functools.partial(attend, ring), mesh, spec)(*arrays) for ring in ("kernel", "permutes"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not races_found()


def test_keys_pass_by_from_the_device_before():
    """Of four devices; of two the devices before and behind are one."""
    names = jnp.asarray([[[device, row] for row in range(2)] for device in range(4)], jnp.int32)
    seen = jax.vmap(functools.partial(pallas_tpu.in_turns, axis="context"), axis_name="context")(names)
    turns = [[[(device - turn) % 4, row] for turn in range(4) for row in range(2)] for device in range(4)]
    np.testing.assert_array_equal(seen, turns)


def refused(error, match, ranks=2, attend=ring_attention, change=lambda *arrays: arrays, **options):
    def local(q, k, v, query_positions, key_positions):
        q, k, v = change(q, k, v)
        out = attend(q, k, v, query_positions=query_positions, key_positions=key_positions, **options)
        return out[0] if isinstance(out, tuple) else out

    with pytest.raises(error, match=match):
        on_devices(local, mesh_of(ranks)).lower(*problem(ranks))


def test_mistakes_name_the_argument():
    refused(ValueError, r"k must have the dtype of q, float32; got bfloat16\. Cast", change=_narrow)
    refused(ValueError, r"v must have the shape of k, \(1, 24, 1, 128\); got \(1, 23, 1, 128\)", change=_short)
    refused(ValueError, "window must be an int >= 1", window=0)
    refused(UserError, "implementation must be one of reference, pallas_tpu; got 'xla'", implementation="xla")
    refused(UserError, "pass_kv: ring must be one of None, kernel, permutes", attend=pass_kv, ring="kernels")
    refused(
        ValueError, 'implementation must be None for ring="kernel"', attend=pass_kv, ring="kernel", implementation="xla"
    )


def _narrow(q, k, v):
    return q, k.astype(jnp.bfloat16), v


def _short(q, k, v):
    return q, k, v[:, :-1]


def test_a_name_never_falls_back():
    def half(*arrays):
        return (x[..., :64] for x in arrays)

    refused(UnsupportedError, r'"pallas_tpu" takes heads that 128 divides, as memory is cut; got 64\.', change=half)
    refused(UnsupportedError, "takes heads that 128 divides", change=half, attend=pass_kv, ring="kernel")
    refused(UnsupportedError, "needs several devices along the axis; got 1. Take", ranks=1)
