"""Sets of XLA options by name: what hides collectives behind compute, and how they are put together.

Whether gathers of the next layer run while this one computes is decided by the compiler's scheduler. JAX has no
interface to it but options, of which there are hundreds; these few sets are what published training setups of the same
kind use (MaxText's flag library for TPU, NVIDIA's JAX toolbox for GPU). None of them changes results by more than the
order of sums.

    options = xla_flags.compiler_options(("tpu-async-collectives", "tpu-data-parallel-overlap"), "tpu")
    step = jax.jit(step, compiler_options=options)

A recipe names them: `Experiment(xla_flags=("gpu-latency-hiding",))`.
"""

import collections
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args

from scalejax.errors import UserError

Platform = Literal["cpu", "tpu", "gpu"]
Value = bool | int | str

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """Options that belong together.

    Attributes:
      platform: Whose compiler knows them.
      why: What they are for.
      options: ((name, value), ...).
      at_most: ((kind of device, devices of a slice), ...): on larger slices of that kind the compiler refuses programs
        under these options.
    """

    platform: Platform
    why: str
    options: tuple[tuple[str, Value], ...]
    at_most: tuple[tuple[str, int], ...] = ()

    def compiles_on(self, devices: Iterable[Any]) -> bool:
        """Whether no slice among the devices is too large."""
        slices = collections.Counter((d.device_kind, getattr(d, "slice_index", 0)) for d in devices)
        limits = dict(self.at_most)
        return all(count <= limits.get(kind, count) for (kind, _), count in slices.items())


SETS: dict[str, FlagSet] = {
    "cpu-plain-products": FlagSet(
        "cpu",
        "Matrix products go to Eigen one by one, not in fusions to YNNPACK, which take longer where they are small.",
        (("xla_cpu_experimental_ynn_fusion_type", ""),),
    ),
    "tpu-async-collectives": FlagSet(
        "tpu",
        "All-gathers and permutes start early and end late, fused with the compute between.",
        (
            ("xla_tpu_enable_latency_hiding_scheduler", True),
            ("xla_tpu_enable_async_collective_fusion", True),
            ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True),
            ("xla_tpu_enable_async_collective_fusion_multiple_steps", True),
            ("xla_tpu_overlap_compute_collective_tc", True),
            ("xla_enable_async_all_gather", True),
            ("xla_enable_async_collective_permute", True),
        ),
    ),
    "tpu-async-all-to-all": FlagSet(
        "tpu",
        "Exchanges of embedding rows start early and end late; without it v5p and v6e wait for each of them.",
        (("xla_tpu_enable_async_all_to_all", True),),
        at_most=(("TPU v5 lite", 16),),
    ),
    "tpu-async-all-reduce": FlagSet(
        "tpu",
        "The same for all-reduces, which NO_SHARD, Ddp and hybrid strategies need.",
        (
            ("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", True),
            ("xla_enable_async_all_reduce", True),
        ),
    ),
    "tpu-data-parallel-overlap": FlagSet(
        "tpu",
        "Gradient sums of data parallelism run beside the backward pass of earlier layers.",
        (
            ("xla_tpu_enable_data_parallel_all_reduce_opt", True),
            ("xla_tpu_data_parallel_opt_different_sized_ops", True),
        ),
    ),
    "tpu-gather-pipelining": FlagSet(
        "tpu",
        "Gathers of a scanned layer move one iteration ahead, in the backward pass too.",
        (("xla_tpu_enable_ag_backward_pipelining", True), ("xla_tpu_megacore_fusion_allow_ags", False)),
    ),
    "tpu-separate-all-reduces": FlagSet(
        "tpu",
        "The compiler leaves all-reduces apart as a program states them: one a bucket of `Ddp`.",
        (("xla_jf_crs_combiner_threshold_count", 1),),
    ),
    "tpu-sparse-core-collectives": FlagSet(
        "tpu",
        "Collectives run on the SparseCores of v5p, v6e and 7x, and leave the TensorCore to compute.",
        (
            ("xla_tpu_enable_sparse_core_collective_offload_all_gather", True),
            ("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", True),
            ("xla_tpu_enable_sparse_core_collective_offload_all_reduce", True),
        ),
    ),
    "tpu-host-offload": FlagSet(
        "tpu",
        "Copies from and to host memory overlap with compute, and the scheduler watches memory.",
        (
            ("xla_tpu_enable_all_experimental_scheduler_features", True),
            ("xla_tpu_enable_scheduler_memory_pressure_tracking", True),
            ("xla_tpu_host_transfer_overlap_limit", 24),
            ("xla_max_concurrent_host_send_recv", 100),
        ),
    ),
    "gpu-latency-hiding": FlagSet(
        "gpu",
        "The scheduler starts collectives early; they run on a stream that goes first.",
        (
            ("xla_gpu_enable_latency_hiding_scheduler", True),
            ("xla_gpu_enable_highest_priority_async_stream", True),
        ),
    ),
    "gpu-double-buffering": FlagSet(
        "gpu",
        "Two iterations of a scan over layers are compiled as one, so that gathers of one overlap with the other.",
        (("xla_gpu_enable_while_loop_double_buffering", True),),
    ),
    "gpu-large-messages": FlagSet(
        "gpu",
        "Collectives are put together up to 1 GiB: few launches, less overlap.",
        (
            ("xla_gpu_all_gather_combine_threshold_bytes", 1024 * _MIB),
            ("xla_gpu_reduce_scatter_combine_threshold_bytes", 1024 * _MIB),
            ("xla_gpu_all_reduce_combine_threshold_bytes", 1024 * _MIB),
        ),
    ),
    "gpu-separate-all-reduces": FlagSet(
        "gpu",
        "All-reduces are put together up to 25 MiB only, as the buckets of `Ddp` are.",
        (("xla_gpu_all_reduce_combine_threshold_bytes", 25 * _MIB),),
    ),
    "gpu-deterministic": FlagSet(
        "gpu",
        "No operation whose result depends on timing: resumed runs equal uninterrupted ones.",
        (("xla_gpu_exclude_nondeterministic_ops", True),),
    ),
}


def check(names: Iterable[str]) -> None:
    """Refuses sets that do not exist or disagree, whatever the machine at hand.

    Raises:
      UserError: as `compiler_options`.
    """
    names = tuple(names)
    for platform in get_args(Platform):
        compiler_options(names, platform)


def compiler_options(names: Iterable[str], platform: str, devices: Iterable[Any] = ()) -> dict[str, Value]:
    """The options of several sets, for `jax.jit(..., compiler_options=...)` or `lowered.compile(compiler_options=...)`.

    Args:
      names: Keys of `SETS`.
      platform: What is compiled for: "tpu", "gpu" (or "cuda"), "cpu". Sets of other platforms are left out, so that a
        recipe may name those of all machines that it is meant for.
      devices: Those that run the program; sets that their compiler refuses (`FlagSet.at_most`) are left out too.

    Raises:
      UserError: a name does not exist, or two sets of this platform disagree.
    """
    wanted = "gpu" if platform in ("cuda", "rocm") else platform
    devices = tuple(devices)
    chosen: dict[str, Value] = {}
    origin: dict[str, str] = {}
    for name in names:
        if name not in SETS:
            near = difflib.get_close_matches(name, SETS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(SETS)}."
            raise UserError(f"xla_flags: there is no set {name!r}. {hint}")
        if SETS[name].platform != wanted or not SETS[name].compiles_on(devices):
            continue
        for option, value in SETS[name].options:
            if chosen.setdefault(option, value) != value:
                raise UserError(
                    f"xla_flags: {origin[option]!r} and {name!r} disagree about {option}: {chosen[option]} and "
                    f"{value}. Name one of them."
                )
            origin.setdefault(option, name)
    return chosen
