"""A sequence cut over devices: results and gradients are those of dense attention, bytes those that are stated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stablehlo
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels.flash_attention import flash_attention
from scalejax.parallel import context
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan.compiled import collectives, hlo

B, S, H, K, D = 2, 22, 4, 2, 8  # 22 divides by 2 n for n = 1 alone
METHODS = ("all_gather", "ring")
DOCUMENTS = ((5, 1, 9, 7), (3, 12, 7))  # of no chunk's length, so that they cross chunks


def places():
    """Positions that restart with each document in the first row and run through the second, and segment ids."""
    segments = np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in DOCUMENTS])
    restarted = np.concatenate([np.arange(n) for n in DOCUMENTS[0]])
    return np.stack([restarted, np.arange(S)]).astype(np.int32), segments.astype(np.int32)


def problem(dtype=np.float64, length=S, heads=H, kv_heads=K):
    rng = np.random.default_rng(0)
    q, d_out = (rng.normal(size=(B, length, heads, D)) for _ in range(2))
    k, v = (rng.normal(size=(B, length, kv_heads, D)) for _ in range(2))
    d_lse = rng.normal(size=(B, heads, length))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, d_out, d_lse))


def dense(q, k, v, visible):
    """softmax(q k^T / sqrt(D)) v by its definition, visible bool[B, S, S]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(visible[:, None], jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(D), -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


def documents_visible():
    _, segments = places()
    return np.tri(S, dtype=bool)[None] & (segments[:, :, None] == segments[:, None, :])


def with_gradients(attend):
    def run(q, k, v, d_out, d_lse):
        def value(q, k, v):
            out, lse = attend(q, k, v)
            return (out * d_out).sum() + (lse * d_lse).sum(), (out, lse)

        (_, (out, lse)), grads = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return {"out": out, "lse": lse, "q": grads[0], "k": grads[1], "v": grads[2]}

    return jax.jit(run)


def cut(ranks, attend=context.context_attention, **options):
    """Attention of whole arrays in their own order, cut over `ranks` devices in zigzag order."""
    mesh = make_mesh(MeshShape(fsdp=1, context=ranks), jax.devices()[:ranks])
    positions, segments = (context.zigzag(x, ranks) for x in places())
    rows = P(None, "context")

    def local(q, k, v, positions, segments):
        return attend(q, k, v, positions=positions, segment_ids=segments, **options)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows,) * 5, out_specs=(rows, P(None, None, "context")), check_vma=False
    )

    def run(q, k, v):
        out, lse = sharded(*(context.zigzag(x, ranks) for x in (q, k, v)), positions, segments)
        return context.unzigzag(out, ranks, S), context.unzigzag(lse, ranks, S, axis=2)

    return run


def assert_equal(got, want, **tolerance):
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, err_msg=name, **tolerance)


SLOW = pytest.mark.slow  # to compile


@pytest.mark.default_cases("2-all_gather", "4-ring")
@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        (1, "ring"),
        (2, "all_gather"),
        (4, "ring"),
        pytest.param(8, "all_gather", marks=SLOW),
        pytest.param(8, "ring", marks=SLOW),
    ],
)
def test_results_and_gradients_are_those_of_dense_attention(x64, ranks, method):
    want = with_gradients(functools.partial(dense, visible=documents_visible()))(*problem())
    got = with_gradients(cut(ranks, method=method, implementation="xla"))(*problem())
    assert_equal(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_ring_of_many_devices_is_a_loop_and_gives_the_same(x64, monkeypatch):
    monkeypatch.setattr(context, "_UNROLLED", 2)
    want = with_gradients(functools.partial(dense, visible=documents_visible()))(*problem())
    found = with_gradients(cut(4, method="ring"))
    assert "while" in found.lower(*problem()).as_text()
    assert_equal(found(*problem()), want, rtol=1e-12, atol=1e-12)


def merged_without_weights(q, k, v, *, positions, segment_ids):
    """A ring whose parts are differentiated one by one, their log-sum-exps taken for constants."""
    ranks = lax.axis_size("context")
    held, total = (k, v, positions, segment_ids), None
    for _ in range(ranks):
        keys, values, key_positions, key_segments = held
        out, lse = flash_attention(
            q, keys, values, query_positions=positions, key_positions=key_positions, segment_ids=segment_ids,
            kv_segment_ids=key_segments,
        )  # fmt: skip
        part = (out, lax.stop_gradient(lse))
        total = part if total is None else context.merge(total, part)
        held = context.pass_on("context", ranks, held)
    return total


@pytest.mark.slow
def test_parts_differentiated_one_by_one_have_the_right_result_and_wrong_gradients(x64):
    q, k, v, d_out, d_lse = problem()
    arguments = q, k, v, d_out, 0 * d_lse
    want = with_gradients(functools.partial(dense, visible=documents_visible()))(*arguments)
    got = with_gradients(cut(2, merged_without_weights))(*arguments)
    np.testing.assert_allclose(got["out"], want["out"], rtol=1e-12, atol=1e-12)
    for name in ("q", "k"):
        assert np.abs(got[name] - want[name]).max() > 0.01, name


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nested", [False, True], ids=["jit", "shard_map"])
def test_whole_arrays_under_a_mesh_in_any_order_of_tokens(x64, method, nested):
    mesh = make_mesh(MeshShape(fsdp=2, context=2, tensor=2))
    q, k, v, d_out, d_lse = problem(kv_heads=1)  # fewer than devices along `tensor`
    positions, segments = places()
    order = np.random.default_rng(1).permutation(S)
    want = with_gradients(lambda *args: (dense(*args, documents_visible())[0], jnp.zeros(())))(q, k, v, d_out, d_lse)

    def attend(q, k, v, positions, segments):
        return context.sharded_context_attention(q, k, v, positions=positions, segment_ids=segments, method=method)

    if nested:
        rows = P("fsdp")
        attend = jax.shard_map(
            attend, in_specs=(rows,) * 5, out_specs=rows, axis_names={"fsdp", "replica"}, check_vma=False
        )

    def run(q, k, v):
        return attend(*(x[:, order] for x in (q, k, v, positions, segments)))[:, np.argsort(order)], jnp.zeros(())

    with jax.set_mesh(mesh):
        got = with_gradients(run)(q, k, v, d_out, d_lse)
    del want["lse"]
    assert_equal(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_without_segments_what_fills_a_row_up_is_seen_by_nobody(x64):
    q, k, v, *_ = problem()
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    run = jax.jit(context.sharded_context_attention, static_argnames=("mask", "method"))
    with jax.set_mesh(make_mesh(MeshShape(fsdp=1, context=8))):
        for mask, visible in (("causal", np.tri(S, dtype=bool)), ("full", np.ones((S, S), bool))):
            got = run(q, k, v, positions=positions, mask=mask, method="ring")
            want = dense(q, k, v, np.broadcast_to(visible, (B, S, S)))[0]
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


LONG, LAYERS = 32, 2


def sent(ranks, method, dtype, *, gradients, compiled):
    """{kind: bytes of keys, values and their gradients that a device must send along `context` in all layers}.

    Layers are scanned, as in a model: forward and backward pass are loops of their own.
    """
    mesh = make_mesh(MeshShape(fsdp=1, context=ranks), jax.devices()[:ranks])
    rows, stacked = (NamedSharding(mesh, P(*entries)) for entries in ((None, "context"), (None, None, "context")))
    q = jax.ShapeDtypeStruct((B, LONG, H, D), dtype, sharding=rows)
    k, v = (jax.ShapeDtypeStruct((LAYERS, B, LONG, K, D), dtype, sharding=stacked) for _ in range(2))
    positions = jax.ShapeDtypeStruct((B, LONG), jnp.int32, sharding=rows)

    def value(q, k, v, positions):
        def layer(q, kv):
            return q + context.sharded_context_attention(q, *kv, positions=positions, method=method), None

        return lax.scan(layer, q, (k, v))[0].astype(jnp.float32).sum()

    run = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)) if gradients else value)
    with jax.set_mesh(mesh):
        lowered = run.lower(q, k, v, positions)
        if compiled:
            found = collectives.of_module(hlo.parse(lowered.compile().as_text()), mesh)
        else:
            found = stablehlo.stated_collectives(lowered, mesh)
    assert all(c.trip_count_known for c in found)
    kinds = {}
    for c in found:
        if c.minimum_bytes > B * LONG * 4 * c.count:  # neither positions nor the sum of the loss
            kinds[c.kind] = kinds.get(c.kind, 0) + c.minimum_bytes
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["stated", "compiled"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_is_what_is_stated(method, gradients, compiled):
    ranks, dtype = 4, jnp.float32 if compiled else jnp.bfloat16  # a CPU widens bfloat16
    one = LAYERS * 2 * B * LONG * K * D * (ranks - 1) // ranks
    pair, wide = one * jnp.dtype(dtype).itemsize, one * 4
    found = sent(ranks, method, dtype, gradients=gradients, compiled=compiled)
    if method == "all_gather":
        want = {"all-gather": pair} | ({"reduce-scatter": wide} if gradients else {})
    else:
        want = {"collective-permute": 2 * pair + wide if gradients else pair}
    assert found == want


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_errors_of_bfloat16_hardly_grow_with_the_devices(method):
    exact = with_gradients(functools.partial(dense, visible=documents_visible()))(*problem(np.float32))
    errors = {}
    for ranks in (1, 8):
        got = with_gradients(cut(ranks, method=method))(*problem(jnp.bfloat16))
        errors[ranks] = {n: np.std(np.asarray(got[n], np.float32) - exact[n]) for n in ("out", "q", "k", "v")}
    for name, error in errors[8].items():
        # Kernels round the part of each device; no sum of parts is rounded on its way.
        assert error < 1.5 * errors[1][name], (name, errors)


def test_a_layout_can_be_undone_and_gives_each_device_the_same_work():
    for ranks in (1, 2, 3, 8):
        rows = np.arange(2 * 37).reshape(2, 37)
        laid = context.zigzag(rows, ranks, fill=-1)
        assert laid.shape[1] == context.padded_length(37, ranks)
        assert laid.shape[1] % (2 * ranks) == (0 if ranks > 1 else 37 % 2)
        np.testing.assert_array_equal(context.zigzag(jnp.asarray(rows), ranks, fill=-1), laid)
        np.testing.assert_array_equal(context.unzigzag(laid, ranks, 37), rows)
        np.testing.assert_array_equal(context.unzigzag(laid.T, ranks, 37, axis=0), rows.T)
    laid = context.zigzag(np.arange(32)[None], 4)[0].reshape(4, 8)
    assert laid[1].tolist() == [4, 5, 6, 7, 24, 25, 26, 27]
    assert len({int((mine + 1).sum()) for mine in laid}) == 1  # pairs that a causal mask shows


def test_a_method_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r'method must be "all_gather" or "ring"; got \'tree\''):
        context.check_method("tree")
