"""A Hopper machine that is not here, for its compiler."""

import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

# What XLA asks a device for; the numbers are those of NVIDIA's H100 SXM data sheet and CUDA's device properties.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

needs_cuda_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs CUDA's compiler: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, of the version of jax",
)


def devices(hosts: int, in_host: int) -> list[jax.Device]:
    """GPUs of hosts that are not here."""
    machine = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_H100, topology=f"{hosts}x1x{in_host}"
    )
    return machine.devices


def mesh(count: int) -> Mesh:
    """That many GPUs of one process, along "x"."""
    return Mesh(np.array(devices(1, count)), ("x",), axis_types=(AxisType.Auto,))


def compile_for(where: Mesh, function, *args, **jit_options):
    """`function` compiled for a mesh."""
    with jax.sharding.use_abstract_mesh(where.abstract_mesh):
        return jax.jit(function, **jit_options).trace(*args).lower().compile()
