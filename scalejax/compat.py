"""The only place that knows differences between jax versions."""

import inspect
import warnings
from typing import Any

import jax
from jax._src import clusters


def detected_processes() -> int:
    """Processes of the cluster that jax detects from the environment; 1 where it detects none.

    `jax.distributed.initialize()` raises where there is no cluster, and jax offers no public way to ask beforehand.
    """
    with warnings.catch_warnings():
        # On Kubernetes without its client package: jax advises to install it, also to processes that are alone.
        warnings.simplefilter("ignore")
        environments = clusters.ClusterEnv._cluster_types
        found = next((env for env in environments if not env.opt_in_only_method and env.is_env_present()), None)
    return 1 if found is None else found.get_process_count()


def device_kind() -> str:
    """`jax.Device.device_kind` of what is being compiled for: the chip of the ambient mesh, or the first device."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if described is None else described.device_kind


def platform() -> str:
    """ "cpu", "gpu" or "tpu", of what is being compiled for: as in `device_kind`."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    found = jax.default_backend() if described is None else described.platform
    return "gpu" if found in ("cuda", "rocm") else found


def copy_from_subcore(source: Any, destination: Any) -> None:
    """A synchronous copy out of the memory of a SparseCore's vector subcore.

    From 0.12 on such a copy completes without a semaphore, and jax warns where it is given one.
    """
    from jax.experimental.pallas import tpu as pltpu  # slow to import, and needed by this alone

    if "src_sem" in inspect.signature(pltpu.async_copy).parameters:
        pltpu.async_copy(source, destination, sem=None).wait()  # pyright: ignore[reportArgumentType]
    else:
        pltpu.sync_copy(source, destination)
