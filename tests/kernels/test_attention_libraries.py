"""Attention of libraries, by name: what they have equals the reference, what they lack is refused and said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_matches_reference
from flash_attention_cases import Case

from scalejax import compat
from scalejax.errors import UnsupportedError
from scalejax.kernels.flash_attention import api, flash_attention

pytestmark = pytest.mark.usefixtures("strict_promotion")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2, queries=128, keys=256, offset=128, documents=3, window=50, heads=4, kv_heads=2, width=32),
        Case(queries=128, heads=4, kv_heads=2),
        Case(queries=256, keys=128, offset=-40),
        Case(queries=128, keys=256, mask="full", documents=2),
    ],
)
def test_splash_equals_the_reference_with_a_cotangent_of_lse(case):
    assert_matches_reference("splash", case, interpret=True)


Q = np.ones((2, 256, 4, 128), jnp.bfloat16)
IDS = np.ones((2, 256), np.int32)


@pytest.mark.without_a_gpu
@pytest.mark.parametrize(
    ("implementation", "args", "message"),
    [
        ("splash", {"query_offset": jnp.int32(3)}, "an offset that is an int"),
        ("splash", {"query_positions": IDS}, "no positions"),
        ("splash", {"mask": "full", "window": 4}, 'windows of mask "causal" only'),
        ("cudnn", {"query_offset": 3}, "no offset"),
        ("cudnn", {"segment_ids": IDS}, "no segment ids"),
        ("cudnn", {}, "needs an NVIDIA GPU with cuDNN"),
    ],
)
def test_a_library_that_lacks_a_case_says_so_and_nothing_else_is_run(implementation, args, message):
    with pytest.raises(UnsupportedError, match=f"{message}.* model.attention=none"):
        flash_attention(Q, Q, Q, implementation=implementation, **args)


@pytest.mark.parametrize(
    ("implementation", "shape", "dtype", "message"),
    [
        ("splash", (1, 100, 2, 64), jnp.float32, "multiples of 128; got 100"),
        ("splash", (1, 128, 2, 64), jnp.float16, "float32 and bfloat16"),
        ("cudnn", (1, 128, 2, 64), jnp.float32, "bfloat16 and float16"),
        ("cudnn", (1, 128, 2, 256), jnp.bfloat16, "at most 128 values"),
        ("pallas_tpu", (1, 128, 2, 64), jnp.float16, "float32 and bfloat16"),
        ("pallas_tpu", (1, 128, 1, 1024), jnp.float32, "at most 512 values"),
        ("pallas_gpu", (1, 128, 1, 512), jnp.float32, "at most 256 values"),
    ],
)
def test_shapes_and_dtypes_that_are_missing_are_refused(implementation, shape, dtype, message):
    q = jnp.ones(shape, dtype)
    with pytest.raises(UnsupportedError, match=message):
        flash_attention(q, q, q, implementation=implementation)


def test_more_pairs_of_blocks_than_scalar_memory_holds_are_refused():
    q = jax.ShapeDtypeStruct((2048, 8192, 1, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2048, 8192), jnp.int32)
    with pytest.raises(UnsupportedError, match="Cut the batch or the sequence"):
        jax.eval_shape(lambda q, ids: flash_attention(q, q, q, segment_ids=ids, implementation="pallas_tpu"), q, ids)


def _device(platform, kind):
    described = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.AbstractMesh((), (), abstract_device=described)


def _chosen(where, q, *, d_lse=False, **masks):
    said = {"mask": "causal", **masks}
    names = ("segment_ids", "kv_segment_ids", "window", "query_offset", "query_positions", "key_positions")
    visibility = api._visibility("test", q, q, q, said["mask"], *(said.get(name) for name in names))
    with jax.sharding.use_abstract_mesh(where):
        return api._choose(api._Call(1.0, None, False), q, q, q, visibility, d_lse=d_lse).implementation


def test_none_takes_the_best_that_has_the_case(monkeypatch):
    tpu, gpu = _device("tpu", "TPU v6 lite"), _device("cuda", "NVIDIA H200")
    assert _chosen(tpu, Q) == "splash"
    assert _chosen(tpu, Q, segment_ids=IDS, window=5) == "splash"
    assert _chosen(tpu, Q, query_offset=jnp.int32(3)) == "pallas_tpu"
    assert _chosen(tpu, Q.astype(jnp.float16)) == "xla"
    assert _chosen(gpu, Q) == "pallas_gpu"  # no cuDNN here
    monkeypatch.setattr(compat, "cudnn_version", lambda: 91000)
    assert _chosen(gpu, Q) == "cudnn"
    assert _chosen(gpu, Q, d_lse=True) == "pallas_gpu"
    assert _chosen(gpu, Q, segment_ids=IDS) == "pallas_gpu"
    assert _chosen(_device("cpu", "cpu"), Q) == "xla"


def test_cudnn_is_called_forward_and_backward_with_the_result_of_any_forward(monkeypatch):
    """Lowered for a GPU that is not here: its two calls, with the window and the scale that were asked for."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(compat, "cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)

    def run(q, k, v, d_out):
        def out(q, k, v):
            return flash_attention(q, k, v, window=77, scale=0.25, implementation="cudnn")[0]

        value, pull = jax.vjp(out, q, k, v)
        return value, pull(d_out)

    k = Q[:, :, :2]
    text = jax.jit(run).trace(Q, k, k, Q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('call_target_name = "__cudnn$fmhaSoftmax"') + text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("fmhaSoftmaxBackward") >= 1
    assert text.count('\\"sliding_window_length\\": 77') + text.count("sliding_window_length\\22: 77") == 2
    assert text.count('\\"fmha_scale\\": 0.25') + text.count("fmha_scale\\22: 0.25") == 2


def test_a_cotangent_of_lse_is_refused_by_cudnn(monkeypatch):
    monkeypatch.setattr(compat, "cudnn_version", lambda: 91000)
    d_lse = jnp.ones((2, 4, 256))
    with pytest.raises(UnsupportedError, match="cotangent of lse"):
        api.flash_attention_gradients(Q, Q, Q, Q, d_lse, Q, d_lse, implementation="cudnn")
