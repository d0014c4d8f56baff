"""The only place that knows differences between jax versions."""

# pyright: reportPrivateUsage=false

import ctypes
import inspect
import signal
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from jax._src import clusters

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_Segments = tuple[jax.Array | None, jax.Array | None]
"""Of queries and of keys; both or none."""


def detected_processes() -> int:
    """Processes of the cluster that jax detects from the environment; 0 where it detects none.

    `jax.distributed.initialize()` raises where there is no cluster, and jax offers no public way to ask beforehand.
    """
    with warnings.catch_warnings():
        # On Kubernetes without its client package: jax advises to install it, also to processes that are alone. What
        # pods of one Job must be told, `train.distributed` says.
        warnings.simplefilter("ignore")
        environments = clusters.ClusterEnv._cluster_types
        found = next((env for env in environments if not env.opt_in_only_method and env.is_env_present()), None)
    return 0 if found is None else found.get_process_count()


def detected_job(timeout_s: int) -> tuple[str, int, int]:
    """(address of process 0, processes, this process) of the cluster that jax detects, as it would find them."""
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout_s)
    coordinator, processes, process_id, _ = found
    assert coordinator is not None
    return coordinator, int(processes or 1), int(process_id or 0)


def abort_late() -> None:
    """From here on `abort()` takes six seconds, in which other threads go on; once in a process of several.

    jax aborts a process, in a thread of C++ that no option stops, as soon as process 0 is gone. `train.peers` ends it
    at about the same moment, with a line that says why and another status, and must not lose that race.
    """
    libc = ctypes.CDLL(None)
    # A handler gets the number of its signal: sleep(6). It needs no lock of Python's, which the main thread may hold.
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def device_kind() -> str:
    """`jax.Device.device_kind` of what is being compiled for: the chip of the ambient mesh, or the first device."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if described is None else described.device_kind


def platform() -> str:
    """ "cpu", "gpu" or "tpu", of what is being compiled for: as in `device_kind`."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    found = jax.default_backend() if described is None else described.platform
    return "gpu" if found in ("cuda", "rocm") else found


def cores() -> int:
    """Of one device of what is being compiled for: as in `device_kind`."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    found = getattr(jax.devices()[0], "num_cores", None) if described is None else described.num_cores
    return found or 1


def has_scaled_matmul(platform: str) -> bool:
    """Whether jax.nn.scaled_matmul has a rule for "cpu", "gpu" or "tpu": 0.10 for GPUs alone, 0.12 for all of them."""
    major, minor = (int(part) for part in jax.__version__.split(".")[:2])
    return platform == "gpu" or (major, minor) >= (0, 12)


class WithDerivative(Protocol[P, T_co]):
    """A function whose derivative is set by `defvjp`, as `jax.custom_vjp` has it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def defvjp(
        self, fwd: Callable[..., tuple[object, object]], bwd: Callable[..., object], symbolic_zeros: bool = False
    ) -> None: ...


def custom_vjp(*nondiff_argnums: int) -> Callable[[Callable[P, T]], WithDerivative[P, T]]:
    """`jax.custom_vjp` that keeps the function's signature for type checkers, which jax's own forgets."""

    def decorate(function: Callable[P, T]) -> WithDerivative[P, T]:
        return cast("WithDerivative[P, T]", jax.custom_vjp(function, nondiff_argnums=nondiff_argnums))

    return decorate


def splash_kernel(
    lengths: tuple[int, int],
    *,
    heads: int,
    causal: bool,
    window: int | None,
    offset: int,
    query_block: int,
    key_block: int,
    interpret: bool,
) -> Any:
    """jax's splash attention for one row: masks and block sizes, as `splash_forward` and `splash_backward` take it.

    Args:
      lengths: (S, T).
      heads: H.
      causal: Whether keys after the query are hidden.
      window: Keys this far before the query, or farther, are hidden; None = none are.
      offset: Position of query 0 among the keys.
      query_block: Queries of a block; divides S.
      key_block: Keys of a block; divides T.
      interpret: Whether to run on a CPU.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if causal and window is not None:
        mask = masks.LocalMask(lengths, (window - 1, 0), offset)
    else:
        mask = masks.CausalMask(lengths, offset) if causal else masks.FullMask(lengths)
    sizes = splash.BlockSizes(
        block_q=query_block,
        block_kv=key_block,
        block_kv_compute=key_block,
        block_q_dkv=query_block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=key_block,
        block_q_dq=query_block,
        block_kv_dq=key_block,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )


def splash_forward(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, H, S, D], lse float32[B, H, S]) of scaled q [B, H, S, D], k and v [B, K, T, D]."""

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments) -> tuple[jax.Array, jax.Array]:
        out, (lse,) = kernel(q, k, v, _splash_segments(segments))
        return out, lse

    return jax.vmap(of_row)(q, k, v, (query_segments, key_segments))


def splash_backward(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    lse: jax.Array,
    d_out: jax.Array,
    correction: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of what `splash_forward` took, where `correction` [B, H, S] may hold a cotangent of lse.

    Splash's own derivative has none, but the two kernels that it consists of do not ask where it comes from.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    said, sizes = kernel.kwargs, kernel.kwargs["block_sizes"]
    layouts = {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    common: dict[str, Any] = {
        "is_mqa": False,
        "mask_value": said["mask_value"],
        "attn_logits_soft_cap": None,
        "mask_function": said["mask_function"],
        "interpret": said["interpret"],
        **layouts,
    }

    def of_row(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments, lse: jax.Array, d_out: jax.Array, di: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands = (q, k, v, _splash_segments(segments), None, lse, d_out, di)
        _, d_k, d_v = splash._splash_attention_bwd_dkv(
            *operands,
            bq=sizes.block_q_dkv,
            bkv=sizes.block_kv_dkv,
            bkv_compute=sizes.block_kv_dkv_compute,
            mask_info=kernel.dkv_mask_info,
            use_fused_bwd_kernel=False,
            **common,
        )
        d_q = splash._splash_attention_bwd_dq(
            *operands, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info, **common
        )
        return d_q, d_k, d_v

    return jax.vmap(of_row)(q, k, v, (query_segments, key_segments), lse, d_out, correction)


def _splash_segments(segments: _Segments) -> object:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    queries, keys = segments
    return None if queries is None or keys is None else splash.SegmentIds(queries, keys)


def ragged_paged_attention(
    q: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    *,
    scale: float,
    window: int | None,
    pages_of_block: int,
    queries_of_block: int,
    vmem_bytes: int,
) -> jax.Array:
    """jax's own kernel for TPUs: queries of R rows, one behind the other, attend to pages.

    Args:
      q: float[N, H, D].
      pages: [P, page, 2 K, D].
      lengths: int32[R], keys of each row; its queries are the last of them.
      table: int32[R, W], pages of each row.
      starts: int32[R + 1], the first query of each row, and the end.
      scale: Of scores.
      window: Positions, or None.
      pages_of_block: Pages that are read at a time.
      queries_of_block: Queries that are held at a time.
      vmem_bytes: Vector memory that the kernel may use.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention(
        q,
        pages,
        lengths,
        table,
        starts,
        jnp.full(1, lengths.shape[0], jnp.int32),
        sm_scale=scale,
        sliding_window=window,
        num_kv_pages_per_block=pages_of_block,
        num_queries_per_block=queries_of_block,
        vmem_limit_bytes=vmem_bytes,
    )


def cudnn_version() -> int | None:
    """Version of the cuDNN that jax has loaded, or None where it has none or no GPU is there."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if jax.default_backend() != "gpu":
        return None
    try:
        return cudnn.check_cudnn_version()
    except RuntimeError:
        return None


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """(out [B, S, H, D], lse float32[B, H, S]) by cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    results: Any = cudnn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        sliding_window_length=window,
        return_residual=True,
    )
    return results


def cudnn_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v by cuDNN, from a result that is known.

    What jax offers differentiates its own forward pass only; its rule takes (out, lse) of any. From 0.11 on the rule
    has one argument more.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    none = jnp.zeros(0, q.dtype)
    rule = cudnn._dot_product_attention_bwd_rule
    modified: tuple[tuple[()], ...] = ((),) if "score_mod" in inspect.signature(rule).parameters else ()
    given: dict[str, object] = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        "return_residual": False,
        "score_mod": None,
        "is_training": True,
        "cudnn_version": cudnn.check_cudnn_version(),
        "res": (q, k, v, *(none,) * 7, *modified, lse, out),
        "grad_output": d_out,
    }
    grads = rule(**{name: given[name] for name in inspect.signature(rule).parameters})
    return grads[0], grads[1], grads[2]


def cusparse_product(
    values: jax.Array, indices: jax.Array, indptr: jax.Array, h: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """[N, F], a CSR of shape (N, M) times h [M, F], by cuSPARSE.

    What jax offers publicly takes this path where an option of the whole process says so.
    """
    from jax.experimental.sparse import _lowerings

    @jax.custom_batching.sequential_vmap
    def product(values: jax.Array, indices: jax.Array, indptr: jax.Array, h: jax.Array) -> jax.Array:
        return _lowerings.csr_spmm_p.bind(values, indices, indptr, h, transpose=False, shape=shape)

    return product(values, indices, indptr, h)
