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


def of_all_devices(x: jax.Array) -> jax.Array:
    """x [B, S, ...] of all devices: rows of the batch axes and positions of `context`, where these are manual.

    Its order is that of the global batch.
    """
    batch, positions = _manual()
    x = jax.lax.all_gather(x, batch, axis=0, tiled=True) if batch else x
    return jax.lax.all_gather(x, positions, axis=1, tiled=True) if positions else x


def of_this_device(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `of_all_devices`: the part of x that is of this device, of the first two sizes of `shape`."""
    for dim, axes in enumerate(_manual()):
        if axes:
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * shape[dim], shape[dim], dim)
    return x


def _manual() -> tuple[tuple[str, ...], tuple[str, ...]]:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in BATCH_AXES if axis in manual), tuple(axis for axis in ("context",) if axis in manual)
