"""Experts that lie on the devices of `expert`: their tokens travel to them and come back by all-to-alls.

Every device keeps n / W of n experts for good, and has tokens of its own. What it sends to each expert, or to each
device, has a fixed number of places, so that the exchange is padded and shapes are static (Lepikhin et al., GShard,
arXiv 2006.16668):

    to_experts     [n, C, E] -> [n / W, W C, E]        of every device C places for each of the experts here
    from_experts   [n / W, W C, E] -> [n, C, E]        the way back, and its derivative

Both run inside a shard_map in which `expert` is manual. Each device sends (W - 1) / W of its n C places: of P places of
width E and b bytes an element P E b (W - 1) / W bytes, and in a training step four times a layer, there and back,
forward and backward.
"""

import math

import jax

from scalejax.parallel.mesh import BATCH_AXES

AXIS = "expert"


def to_experts(places: jax.Array, devices: int) -> jax.Array:
    """Sends places to the devices of their experts.

    Args:
      places: [n, C, ...], C places for each expert.
      devices: W, devices over which the experts lie; 1 = they are all here.

    Returns:
      [n / W, W C, ...], places of the experts of this device, those of the first device of the axis first.
    """
    if devices == 1:
        return places
    return jax.lax.all_to_all(places, AXIS, split_axis=0, concat_axis=1, tiled=True)


def from_experts(places: jax.Array, devices: int) -> jax.Array:
    """The inverse of `to_experts`, [n / W, W C, ...] -> [n, C, ...]."""
    if devices == 1:
        return places
    return jax.lax.all_to_all(places, AXIS, split_axis=1, concat_axis=0, tiled=True)


Cut = tuple[tuple[str, ...], tuple[str, ...]]
"""Mesh axes over which rows and positions are cut, see `cut_over`."""


def cut_over(rows: int, positions: int) -> Cut:
    """How `kernel_sharding.shard_kernel` cuts [rows, positions, ...] under the mesh in force; call it outside.

    What does not divide it leaves whole. Rows may be cut already, by a shard_map around.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return (), ()

    def free(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        left = tuple(axis for axis in axes if axis in mesh.axis_names and axis not in mesh.manual_axes)
        return left if size % math.prod(mesh.shape[axis] for axis in left) == 0 else ()

    before = tuple(axis for axis in BATCH_AXES if axis in mesh.manual_axes)
    return before + free(BATCH_AXES, rows), free(("context",), positions)


def of_all_devices(x: jax.Array, cut: Cut) -> jax.Array:
    """x [B, S, ...] of all devices, in the order of the global batch."""
    for dim, axes in enumerate(cut):
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


def of_this_device(x: jax.Array, shape: tuple[int, ...], cut: Cut) -> jax.Array:
    """The inverse of `of_all_devices`: the part of x that is of this device, of the first two sizes of `shape`."""
    for dim, axes in enumerate(cut):
        if axes:
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * shape[dim], shape[dim], dim)
    return x
