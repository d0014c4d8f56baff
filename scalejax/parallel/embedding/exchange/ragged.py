"""The exchange without buckets: only what there is travels, by `ragged_all_to_all`.

A device has its occurrences sorted by destination, one run per destination; they arrive one run per sender:

    sender      runs: device 0    | device 1 ...      owner     from device 0 | from device 1 | ... (free)
                [ 4  9  9  .      | 2  .  .  . ...]             [ 4  9  9  .  | 7  .  .  .    | .  .  . ]

Who sends how much is agreed on first, in two small all_to_alls. Arrivals come in the order that buckets of fixed size
have, with fewer gaps: all sums are the same to the bit. An owner has room for a number of arrivals, not for a number
per sender; what comes beyond it is not sent, and counted. Which ids that is differs from buckets of fixed size.

A TPU moves rows of 128 lanes, whatever is in them. So slots travel as many to a row as fill it (ids 128, vectors of 64
elements 2), and runs begin at multiples of `GRANULE` slots.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from scalejax.errors import UserError
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine, send

PLATFORMS = ("tpu", "gpu", "cuda", "rocm")
"""Where XLA has the collective."""


GRANULE = 128
"""Slots; where a run can begin."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedSplits:
    """Who sends what to whom, on one device of N. All int32[N], by the other device, in slots.

    Attributes:
      starts: Where the run for a device begins here.
      sizes: What is sent of it.
      places: Where it begins among the arrivals of that device.
      arrival_starts: Where the run of a device begins among the arrivals here.
      arrival_sizes: What comes of it.
      origins: Where that run begins at the device that sends it.
    """

    starts: jax.Array
    sizes: jax.Array
    places: jax.Array
    arrival_starts: jax.Array
    arrival_sizes: jax.Array
    origins: jax.Array


def slots_for(occurrences: int, devices: int) -> int:
    """Slots that runs of so many occurrences together can need."""
    return _aligned(occurrences) + devices * GRANULE


def agree(wanted: jax.Array, *, room: int, axes: tuple[str, ...]) -> ExchangeCoroutine[RaggedSplits]:
    """The splits of an exchange: what each device wants to send, as far as its receivers have room.

    Args:
      wanted: int32[N], occurrences for each device.
      room: Arrivals that a device has slots for, a multiple of `GRANULE`.
      axes: Mesh axes of the N devices.
    """
    starts = _begins(wanted)
    asked = yield from send(axes, jnp.stack([wanted, starts], axis=1))
    begins = jnp.minimum(_begins(asked[:, 0]), room)
    granted = jnp.minimum(asked[:, 0], room - begins)
    answer = yield from send(axes, jnp.stack([granted, begins], axis=1))
    return RaggedSplits(starts, answer[:, 0], answer[:, 1], begins, granted, asked[:, 1])


def to_owners(values: jax.Array, runs: RaggedSplits, *, room: int, fill: int, axes: tuple[str, ...]) -> jax.Array:
    """[slots, ...] by destination, `fill` between the runs -> [room, ...] arrivals, `fill` where nothing arrived."""
    sent = (runs.starts, runs.sizes, runs.places, runs.arrival_sizes)
    return _move(values, jnp.full((room, *values.shape[1:]), fill, values.dtype), sent, axes)


def to_senders(values: jax.Array, runs: RaggedSplits, *, count: int, axes: tuple[str, ...]) -> jax.Array:
    """[room, ...] arrivals -> [count, ...] slots, where `to_owners` had them from; else anything or zero."""
    sent = (runs.arrival_starts, runs.arrival_sizes, runs.origins, runs.sizes)
    return _move(values, jnp.zeros((count, *values.shape[1:]), values.dtype), sent, axes)


def _move(values: jax.Array, into: jax.Array, sent: tuple[jax.Array, ...], axes: tuple[str, ...]) -> jax.Array:
    width = math.prod(values.shape[1:])
    together = _LANES // math.gcd(width, _LANES)  # slots to a row; divides GRANULE
    starts, sizes, places, arrival_sizes = sent
    # Sizes are rounded up: runs begin at multiples of `GRANULE`, so that the rest of a last row is nobody's.
    moved = lax.ragged_all_to_all(
        values.reshape(-1, width * together),
        into.reshape(-1, width * together),
        starts // together,
        -(-sizes // together),
        places // together,
        -(-arrival_sizes // together),
        axis_name=axes,
    )
    return moved.reshape(into.shape)


def _begins(sizes: jax.Array) -> jax.Array:
    aligned = -(-sizes // GRANULE) * GRANULE
    return jnp.cumsum(aligned) - aligned


def _aligned(slots: int) -> int:
    return -(-slots // GRANULE) * GRANULE


_LANES = 128


def check_platform(mesh: Mesh) -> None:
    """Raises where XLA lacks the collective.

    Raises:
      UserError: naming the platform.
    """
    platform = mesh.devices.flat[0].platform
    if platform not in PLATFORMS:
        raise UserError(
            f"Exchange: all_to_all='ragged' needs a TPU or a GPU; XLA has no ragged_all_to_all on {platform!r}. Use "
            "all_to_all='padded', which gives the same bits."
        )
