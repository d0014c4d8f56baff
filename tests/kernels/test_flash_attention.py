"""Attention: the reference against loops in NumPy, every implementation and its gradients against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import arrays, assert_matches_reference, by_loops, cotangents, of_reference
from flash_attention_cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.errors import UnsupportedError
from scalejax.kernels.flash_attention import api, blocks, flash_attention, flash_attention_gradients, pallas_gpu
from scalejax.kernels.flash_attention.visibility import Visibility

pytestmark = pytest.mark.usefixtures("strict_promotion")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_loops_in_float64(name, x64):
    case = CASES[name]
    operands, masks = arrays(case, jnp.float64)
    out, lse = flash_attention(*operands, **masks, implementation="reference")
    wanted_out, wanted_lse = by_loops(*case.operands(), **case.masks())
    np.testing.assert_allclose(out, wanted_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["all at once", "queries before the keys"])
def test_gradients_of_the_reference_equal_finite_differences_of_the_loops(name):
    case = Case(batch=2, queries=5, keys=7, heads=2, width=3, offset=(2, -3), window=4, documents=2)
    if name == "queries before the keys":
        case = Case(queries=4, keys=3, heads=2, width=3, offset=-2)
    (_, _), grads = of_reference(case)
    with jax.enable_x64(True):
        d_out, d_lse = (np.asarray(x) for x in cotangents(case, jnp.float64))

    def total(*operands):
        out, lse = by_loops(*operands, **case.masks())
        return (out * d_out).sum() + (np.where(np.isfinite(lse), lse, 0) * d_lse).sum()

    for number, grad in enumerate(grads):
        random = np.random.default_rng(number)
        direction = random.normal(size=grad.shape)
        lower, upper = ([*case.operands()] for _ in range(2))
        lower[number] = lower[number] - 1e-5 * direction
        upper[number] = upper[number] + 1e-5 * direction
        np.testing.assert_allclose((grad * direction).sum(), (total(*upper) - total(*lower)) / 2e-5, rtol=1e-7)


LONG = (
    "full", "no multiples of a block", "window with keys after the query", "documents, both ways", "permuted queries",
)  # fmt: skip
"""Only in slow runs: what they have, another case has too."""


@pytest.mark.default_cases("all at once", "window", "queries before the keys")
@pytest.mark.parametrize("name", CASES)
def test_chunks_of_xla_equal_the_reference_with_gradients(name):
    assert_matches_reference("xla", CASES[name])


@pytest.mark.default_cases("all at once")
@pytest.mark.parametrize(
    "name",
    [pytest.param("no multiples of a block", marks=pytest.mark.slow), "all at once", "queries before the keys"],
)
def test_small_chunks_equal_the_reference_to_float64(name, monkeypatch, x64):
    """Chunks so small that every loop turns several times, in float64, where nothing hides in rounding."""
    monkeypatch.setattr(blocks, "XLA", blocks.XlaChunks(queries=16, keys=24, scores=3 * 16 * 24))
    jax.clear_caches()  # sizes of blocks are no arguments
    assert_matches_reference("xla", CASES[name], jnp.float64, rtol=1e-12)
    jax.clear_caches()


SMALL_BLOCKS = {
    "pallas_tpu": ("TPU", {"": blocks.TpuBlocks(queries=32, keys=128, vmem_bytes=2**25)}),
    "pallas_gpu": (
        "GPU",
        {
            "": blocks.GpuBlocks(
                forward=blocks.GpuTiles(queries=32, keys=16, warps=4, stages=2),
                query_gradient=blocks.GpuTiles(queries=16, keys=32, warps=4, stages=2),
                key_gradients=blocks.GpuTiles(queries=32, keys=32, warps=4, stages=2),
            )
        },
    ),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that several of them pass by."""
    for name, sizes in SMALL_BLOCKS.values():
        monkeypatch.setattr(blocks, name, sizes)
    jax.clear_caches()  # sizes of blocks are no arguments
    yield
    jax.clear_caches()


FEW = ["all at once"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("implementation", SMALL_BLOCKS)
def test_interpreted_kernels_equal_the_reference_with_gradients(implementation, name, small_blocks):
    assert_matches_reference(implementation, CASES[name], interpret=True)


@pytest.mark.parametrize("implementation", SMALL_BLOCKS)
def test_kernels_are_traced_where_nothing_is_hidden_and_blocks_divide(implementation):
    x = jax.ShapeDtypeStruct((1, 128, 2, 16), jnp.float32)

    def loss(*operands):
        return flash_attention(*operands, mask="full", implementation=implementation, interpret=True)[0].sum()

    assert jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), x, x, x) == (x, x, x)


def test_the_gradients_of_keys_on_a_gpu_are_sums_over_the_query_heads_that_read_them():
    """One kernel of one block, whose six query heads read two of keys by threes, against NumPy."""
    rng = np.random.default_rng(0)
    q, d_out = (rng.normal(size=(1, 16, 6, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(1, 16, 2, 16)).astype(np.float32) for _ in range(2))
    nothing = dict.fromkeys(("offset", "query_positions", "key_positions", "query_segments", "key_segments"))
    seen = Visibility(causal=False, window=None, start=0, **nothing)
    scores = np.einsum("bshd,bthd->bhst", q, k.repeat(3, 2))
    lse = np.log(np.exp(scores).sum(-1))
    zero = np.zeros_like(lse)  # for what comes of out
    weights = np.exp(scores - lse[..., None])
    d_scores = weights * np.einsum("bshd,bthd->bhst", d_out, v.repeat(3, 2))
    wanted = (
        np.einsum("bhst,bshd->bthd", *pair).reshape(1, 16, 2, 3, 16).sum(3)
        for pair in ((d_scores, q), (weights, d_out))
    )
    operands = [x.reshape(16, -1) for x in (q, k, v, d_out)] + [(x * np.log2(np.e)).reshape(6, 16) for x in (lse, zero)]
    found = jax.jit(lambda *given: pallas_gpu._key_gradients(q, k, seen, 1.0, list(given), True))(*operands)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        (implementation, name)
        for i, name in enumerate(name for name in CASES if name not in FEW)
        for j, implementation in enumerate(SMALL_BLOCKS)
        if i % 2 == j or name in LONG
    ],
)
def test_interpreted_kernels_equal_the_reference_in_every_case(implementation, name, small_blocks):
    assert_matches_reference(implementation, CASES[name], interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", SMALL_BLOCKS)
def test_interpreted_kernels_equal_the_reference_with_blocks_of_a_chip(implementation):
    for case in CASES.values():
        assert_matches_reference(implementation, case, interpret=True)


@pytest.mark.parametrize("implementation", SMALL_BLOCKS)
def test_interpreted_kernels_sum_half_precision_in_float32(implementation):
    case = Case(queries=40, keys=56, offset=16, heads=4, kv_heads=2, width=32)
    operands, masks = arrays(case, jnp.bfloat16)
    out, lse = flash_attention(*operands, **masks, implementation=implementation, interpret=True)
    wanted_out, wanted_lse = by_loops(*(np.asarray(x, np.float64) for x in operands), **case.masks())
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted_out, atol=3 * 2.0**-8)


@pytest.mark.slow
def test_a_simulated_tpu_reads_nothing_that_was_not_written():
    """Memory that nobody wrote is NaN there, and addresses outside of an array raise."""
    from jax.experimental.pallas import tpu as pltpu

    case = Case(queries=20, keys=150, offset=130, documents=2, width=16)
    assert_matches_reference("pallas_tpu", case, interpret=pltpu.InterpretParams())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_operands_are_summed_in_float32(dtype):
    case = CASES["all at once"]
    operands, masks = arrays(case, dtype)
    out, lse = flash_attention(*operands, **masks, implementation="xla")
    wanted_out, wanted_lse = by_loops(*(np.asarray(x, np.float64) for x in operands), **case.masks())
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-4, atol=1e-4)  # products of halves are exact in float32
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted_out, atol=3 * float(jnp.finfo(dtype).eps))


random_cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    queries=st.integers(1, 40),
    keys=st.integers(1, 50),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([8, 12]),
    mask=st.sampled_from(["causal", "full"]),
    window=st.none() | st.integers(1, 30),
    offset=st.integers(-20, 40),
    documents=st.integers(0, 3),
    permuted=st.sampled_from(["no", "queries", "both"]),
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=random_cases)
def test_any_mask_and_shape_equals_the_loops(case):
    operands, masks = arrays(case, jnp.float32)
    out, lse = flash_attention(*operands, **masks, implementation="xla")
    wanted_out, wanted_lse = by_loops(*case.operands(), **case.masks())
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out, wanted_out, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_cotangent_of_lse_alone_and_of_out_alone():
    case = CASES["documents"]
    operands, masks = arrays(case, jnp.float32)
    for pick in (0, 1):

        def loss(operands, name, pick=pick):
            return jnp.sin(flash_attention(*operands, **masks, implementation=name)[pick]).sum()

        grads, wanted = (jax.grad(loss)(operands, name) for name in ("xla", "reference"))
        for one, two in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_parts_of_the_keys_merge_to_the_whole_with_gradients():
    """What a ring over keys does: results merged by their lse, through jax's own derivative of the merge."""
    case = Case(batch=2, queries=48, keys=96, offset=48, heads=4, kv_heads=2, width=16)
    (q, k, v), _ = arrays(case, jnp.float32)

    def whole(q, k, v):
        return flash_attention(q, k, v, query_offset=48, implementation="reference")[0]

    def merged(q, k, v):
        outs, lses = zip(
            *(
                flash_attention(q, k[:, at : at + 32], v[:, at : at + 32], query_offset=48 - at, implementation="xla")
                for at in (0, 32, 64)  # some queries see nothing of the last part
            ),
            strict=True,
        )
        shares = jax.nn.softmax(jnp.stack(lses), axis=0)  # parts B H S
        return (jnp.stack(outs) * jnp.swapaxes(shares, 2, 3)[..., None]).sum(axis=0)

    value, pull = jax.vjp(merged, q, k, v)
    wanted, wanted_pull = jax.vjp(whole, q, k, v)
    np.testing.assert_allclose(value, wanted, atol=1e-5)
    cotangent = jnp.sin(wanted * 9)
    for one, two in zip(pull(cotangent), wanted_pull(cotangent), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5)


@pytest.mark.slow
def test_gradients_from_a_result_of_all_keys_add_up_over_parts_of_them():
    case = Case(batch=2, queries=48, heads=4, kv_heads=2, width=16)
    (q, k, v), _ = arrays(case, jnp.float32)
    (out, lse), pull = jax.vjp(lambda *x: flash_attention(*x, implementation="reference"), q, k, v)
    d_out, d_lse = jnp.sin(9 * out), jnp.cos(lse)
    parts = [
        flash_attention_gradients(
            q, k[:, part], v[:, part], out, lse, d_out, d_lse, query_offset=-part.start, implementation="xla"
        )
        for part in (slice(0, 20), slice(20, 48))
    ]
    d_q, d_k, d_v = pull((d_out, d_lse))
    np.testing.assert_allclose(sum(p[0] for p in parts), d_q, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([p[1] for p in parts], axis=1), d_k, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([p[2] for p in parts], axis=1), d_v, atol=1e-5)


def _temporary_bytes(length, *, gradient):
    def call(q, k, v):
        return flash_attention(q, k, v, implementation="xla")[0]

    def with_gradient(q, k, v, d_out):
        return jax.vjp(call, q, k, v)[1](d_out)

    q = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)
    args = (q, q, q, q) if gradient else (q, q, q)
    compiled = jax.jit(with_gradient if gradient else call).trace(*args).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_temporary_memory_grows_with_the_length_and_not_with_its_square(gradient):
    shorter, longer = (_temporary_bytes(n, gradient=gradient) for n in (16384, 32768))
    assert longer < 2.1 * shorter
    assert longer < 4 * 32768**2 * 4 / 100  # the scores of all heads, in bytes


def _calls(jaxpr, name):
    """Calls of a jitted function in a program, those in its parts included."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.params.get("name") == name
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            count += _calls(inner, name) if hasattr(inner, "eqns") else 0
    return count


def test_a_policy_that_saves_the_named_results_runs_the_forward_pass_once():
    def loss(q, k, v):
        out, lse = flash_attention(jnp.sin(q), k, v, implementation="xla")
        return out.sum() + lse.sum()

    operands, _ = arrays(CASES["causal"], jnp.float32)

    def passes(policy):
        gradient = jax.value_and_grad(jax.checkpoint(loss, policy=policy))
        return _calls(jax.make_jaxpr(gradient)(*operands).jaxpr, "_run")

    assert passes(jax.checkpoint_policies.nothing_saveable) == 3  # forward, forward again, backward
    assert passes(jax.checkpoint_policies.save_only_these_names(api.OUT_NAME, api.LSE_NAME)) == 2


def test_nothing_to_see_gives_zeros_and_minus_infinity():
    q = jnp.ones((2, 3, 4, 8))
    out, lse = flash_attention(q, jnp.ones((2, 0, 2, 8)), jnp.ones((2, 0, 2, 8)), mask="full")
    assert not out.any()
    assert np.isneginf(lse).all()
    assert flash_attention(q[:, :0], q, q)[0].shape == (2, 0, 4, 8)


def test_a_scale_is_used_as_given():
    (q, k, v), _ = arrays(CASES["causal"], jnp.float32)
    given, _ = flash_attention(q, k, v, scale=0.3)
    wanted, _ = flash_attention(q * (0.3 * q.shape[-1] ** 0.5), k, v)
    np.testing.assert_allclose(given, wanted, atol=1e-5)


@pytest.mark.default_cases("xla")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_row_of_a_batch_and_every_group_of_heads_is_on_its_own(implementation):
    """What a shard of the batch and of the heads computes is what it would be in the whole."""
    case = CASES["all at once"]
    (q, k, v), masks = arrays(case, jnp.float32)
    out, lse = flash_attention(q, k, v, **masks, implementation=implementation)
    row = {n: m[1:] if isinstance(m, jax.Array) else m for n, m in masks.items()}
    part, part_lse = flash_attention(q[1:, :, 3:], k[1:, :, 1:], v[1:, :, 1:], **row, implementation=implementation)
    np.testing.assert_allclose(part, out[1:, :, 3:], atol=1e-6)
    np.testing.assert_allclose(part_lse, lse[1:, 3:], atol=1e-6)


# NumPy's: nothing is compiled while tests are collected.
_Q, _K = np.ones((2, 8, 4, 16), np.float32), np.ones((2, 12, 2, 16), np.float32)
_IDS = np.ones((2, 8), np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": _Q[0]}, "q must have shape"),
        ({"v": _K[:, :3]}, "v must have the shape of k"),
        ({"k": _K[:1], "v": _K[:1]}, "rows and the head dim"),
        ({"k": np.ones((2, 12, 3, 16), np.float32), "v": np.ones((2, 12, 3, 16), np.float32)}, "got 3 for 4"),
        ({"q": np.ones((2, 8, 4, 16), np.int32)}, "q must be float32"),
        ({"k": _K.astype(jnp.bfloat16)}, "k must have the dtype of q"),
        ({"mask": "banded"}, "'banded'"),
        ({"window": 0}, "window must be an int >= 1"),
        ({"window": 2.5}, "window must be an int >= 1"),
        ({"window": True}, "window must be an int >= 1"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"kv_segment_ids": np.ones((2, 12), jnp.int32)}, "without segment_ids"),
        ({"segment_ids": _IDS}, "S = 8, T = 12"),
        ({"segment_ids": _IDS, "kv_segment_ids": _IDS}, r"kv_segment_ids must be integers of shape \(2, 12\)"),
        ({"segment_ids": np.ones((2, 8), np.float32), "kv_segment_ids": _IDS}, "segment_ids must be integers"),
        ({"query_offset": 1.5}, "query_offset must be an int"),
        ({"query_offset": np.ones(3, jnp.int32)}, r"\(B,\) = \(2,\)"),
        ({"query_positions": _IDS, "query_offset": 3}, "exclude each other"),
        ({"query_positions": _IDS[:1]}, "query_positions must be integers"),
        ({"key_positions": _IDS}, "key_positions must be integers"),
        ({"implementation": "fast"}, "'fast'"),
    ],
)
def test_rejects_what_it_cannot_mean(change, message):
    args = {"q": _Q, "k": _K, "v": _K, **change}
    with pytest.raises(ValueError, match=message):
        flash_attention(args.pop("q"), args.pop("k"), args.pop("v"), **args)


def test_results_of_other_shapes_are_rejected():
    out, lse = flash_attention(_Q, _K, _K)
    with pytest.raises(ValueError, match="lse must have the shape"):
        flash_attention_gradients(_Q, _K, _K, out, lse[:, :2], out)
    with pytest.raises(UnsupportedError, match="differentiated by jax"):
        flash_attention_gradients(_Q, _K, _K, out, lse, out, implementation="reference")
