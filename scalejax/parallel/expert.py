"""Experts that lie on the devices of `expert`: their tokens travel to them and come back by all-to-alls.

Every device keeps n / W of n experts for good, and has tokens of its own. What it sends to each expert, or to each
device, has a fixed number of places, so that the exchange is padded and shapes are static (Lepikhin et al., GShard,
arXiv 2006.16668):

    to_experts     [n, C, E] -> [n / W, W C, E]        of every device C places for each of the experts here
    from_experts   [n / W, W C, E] -> [n, C, E]        the way back, and its derivative

Both run inside a shard_map in which `expert` is manual. Each device sends (W - 1) / W of its n C places: of P places of
width E and b bytes an element P E b (W - 1) / W bytes, and in a training step four times a layer, there and back,
forward and backward.

`Travel` sends what is there and no more, by `jax.lax.ragged_all_to_all`, which TPUs and GPUs have and CPUs have not: of
T k choices those of experts elsewhere, b E bytes each. Where they arrive there is room for all that could come.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import compat
from scalejax.errors import UserError
from scalejax.parallel.mesh import BATCH_AXES

AXIS = "expert"

RAGGED_PLATFORMS = ("tpu", "gpu")
"""Where XLA has a ragged all-to-all."""


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Way:
    """Arguments of `jax.lax.ragged_all_to_all`, int32[W] each; offsets of what is sent are those where it arrives."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


@dataclasses.dataclass(frozen=True)
class Travel:
    """Rows on their way to the devices of their experts and back, as many as there are.

    A device has its rows sorted by expert, and so by device. Where they arrive those of the first device of the axis
    come first, each device's by expert.

    Attributes:
      there, back: The exchange each way.
      sent, room: Rows of an array before and after the way there.
      own: int32[room], which of the experts of this device a row is for; n / W behind the last row that arrives.
    """

    there: _Way
    back: _Way
    sent: int
    room: int
    own: jax.Array

    @classmethod
    def plan(cls, sizes: jax.Array, devices: int, *, sent: int, room: int) -> "Travel":
        """Finds out what all devices send.

        Args:
          sizes: int32[n], rows of each expert on this device.
          devices: W.
          sent: Rows of the arrays that are sent, at least the sum of `sizes`.
          room: Rows of the arrays that arrive, at least as many as could come.

        Raises:
          UserError: there is no such exchange on this platform.
        """
        if compat.platform() not in RAGGED_PLATFORMS:
            raise UserError(
                f"model.mlp.router.exchange='ragged' is for {' and '.join(RAGGED_PLATFORMS)}, and this is a "
                f"{compat.platform()}, for which XLA has no ragged all-to-all. Leave it 'padded', which computes the "
                "same and sends more."
            )
        here = sizes.shape[0] // devices
        every = jax.lax.all_gather(sizes, AXIS).reshape(devices, devices, here)  # from, to, expert
        rows, me = every.sum(2, dtype=every.dtype), jax.lax.axis_index(AXIS)
        leave, arrive = jnp.cumsum(rows, 1) - rows, jnp.cumsum(rows, 0) - rows  # where they begin: from, to
        ends = jnp.cumsum(every[:, me].reshape(-1))
        group = jnp.searchsorted(ends, jnp.arange(room, dtype=ends.dtype), side="right", method="compare_all")
        return cls(
            there=_Way(leave[me], rows[me], arrive[me], rows[:, me]),
            back=_Way(arrive[:, me], rows[:, me], leave[:, me], rows[me]),
            sent=sent,
            room=room,
            own=jnp.where(group < ends.size, group % here, here).astype(jnp.int32),
        )

    def to_experts(self, rows: jax.Array) -> jax.Array:
        """[sent, E] -> [room, E], zeros where nothing arrives."""
        return _ragged(self.room, rows, self.there, self.back)

    def from_experts(self, rows: jax.Array) -> jax.Array:
        """The way back, [room, E] -> [sent, E]."""
        return _ragged(self.sent, rows, self.back, self.there)


# With a derivative of its own, which needs no exchange of offsets: it is the other way.
@compat.custom_vjp(0)
def _ragged(room: int, rows: jax.Array, way: _Way, back: _Way) -> jax.Array:
    del back
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, *rows.shape[1:]), rows.dtype),
        way.input_offsets,
        way.send_sizes,
        way.output_offsets,
        way.recv_sizes,
        axis_name=AXIS,
    )


def _ragged_forward(
    room: int, rows: jax.Array, way: _Way, back: _Way
) -> tuple[jax.Array, tuple[jax.Array, _Way, _Way]]:
    return _ragged(room, rows, way, back), (jnp.zeros((rows.shape[0], 0), rows.dtype), way, back)


def _ragged_backward(room: int, saved: tuple[jax.Array, _Way, _Way], g: jax.Array) -> tuple[jax.Array, _Way, _Way]:
    del room
    like, way, back = saved
    nothing: _Way = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), way)
    return _ragged(like.shape[0], g, back, way), nothing, nothing


_ragged.defvjp(_ragged_forward, _ragged_backward)


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
