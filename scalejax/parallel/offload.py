"""State that rests in host memory: optimizer state, and master parameters, that a step fetches and puts back.

A sharding has a memory kind; with "pinned_host" an array lives in page-locked memory of the host of its device, in the
same shards. Inside a jitted step it is copied to the device before it is used and its successor is copied back; the
compiler moves the copies beside compute where it can.

A compiler that gets a copy wrong trains on wrong numbers and says nothing (jaxlib 0.11.0 did on GPUs), so nothing is
offloaded before this process has seen, once, that offloaded gradients equal plain ones on its devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Sharding

from scalejax.errors import UserError
from scalejax.parallel.gradients.blocks import RematPolicy

if TYPE_CHECKING:
    from jaxtyping import PyTree

Tree = TypeVar("Tree")

Offload = Literal["none", "optimizer", "optimizer and parameters"]
"""What rests in host memory between steps."""

HOST = "pinned_host"


def on_host(tree: object) -> "PyTree[Sharding]":
    """Shardings in host memory for state that rests there.

    Args:
      tree: Pytree of arrays, or of ShapeDtypeStructs with shardings.

    Returns:
      Their shardings, with host memory in place of device memory except for scalars: a copy would gain nothing.
    """
    return jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST) if x.ndim else x.sharding, tree)


def fetch(tree: Tree, shardings: "PyTree[Sharding]") -> Tree:
    """Copies state to the devices, inside a jitted step.

    Args:
      tree: Pytree of arrays, in host memory or not.
      shardings: Where each lies on the devices.
    """
    return jax.tree.map(lambda x, s: jax.device_put(x, s.with_memory_kind("device")), tree, shardings)


def put_back(tree: Tree, shardings: "PyTree[Sharding]") -> Tree:
    """Copies state to where it rests, inside a jitted step whose `out_shardings` are these.

    Args:
      tree: Pytree of arrays.
      shardings: What `on_host` returned.
    """
    return jax.tree.map(jax.device_put, tree, shardings)


def check(devices: np.ndarray | Sequence[Any] | None = None) -> None:
    """Lets offloading pass where this jaxlib gets it right on these devices; tested once in a process.

    Args:
      devices: Devices of the mesh; None = the first of jax.

    Raises:
      UserError: they have no host memory that programs can reach, or offloaded gradients differ from plain ones.
    """
    device = next(iter(np.ravel(devices))) if devices is not None else jax.devices()[0]
    # The first device of a mesh may be another process's, on which nothing can be tried from here.
    if device.process_index != device.client.process_index():
        device = device.client.local_devices()[0]
    problem = _problem(device)
    if problem:
        raise UserError(
            f"offload: jaxlib {jaxlib.version.__version__} on {device.device_kind} {problem}, so nothing may be "
            "offloaded. Use offload='none' (--set placement.offload=none), or another jaxlib."
        )


@functools.cache
def _problem(device: Any) -> str:
    """What is wrong with offloading on a device; "" = nothing."""
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        return f"has no memory of kind {HOST!r}"
    differing = [
        name
        for name, offloaded in (("parameters", _from_host), ("residuals of a scan", _residuals_on_host))
        if not _equal(jax.jit(_plain), offloaded, device)
    ]
    return f"gives other gradients with offloaded {' and '.join(differing)}" if differing else ""


def _equal(plain: Callable[..., jax.Array], offloaded: Callable[..., jax.Array], device: Any) -> bool:
    rng = np.random.default_rng(0)
    params = rng.normal(size=(6, 64, 64)).astype(np.float32) / 8
    x = rng.normal(size=(32, 64)).astype(np.float32)
    place = jax.sharding.SingleDeviceSharding(device)
    ours, theirs = offloaded(jax.device_put(params, place), x), plain(jax.device_put(params, place), x)
    # Copies are exact; what surrounds them may be fused differently.
    scale = np.abs(np.asarray(theirs)).max()
    return bool(np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= 1e-5 * scale)


def _loss(params: jax.Array, x: jax.Array, policy: RematPolicy | None = None) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, "kept")
        return x + jnp.sin(x @ w), None

    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return jnp.square(jax.lax.scan(body, x, params)[0]).sum()


def _plain(params: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(_loss)(params, x)


def _from_host(params: jax.Array, x: jax.Array) -> jax.Array:
    place = params.sharding
    host = place.with_memory_kind(HOST)
    step = jax.jit(lambda p, x: jax.device_put(_plain(jax.device_put(p, place), x), host), out_shardings=host)
    return step(jax.device_put(params, host), x)


def _residuals_on_host(params: jax.Array, x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst=HOST
    )
    return jax.jit(jax.grad(functools.partial(_loss, policy=policy)))(params, x)
