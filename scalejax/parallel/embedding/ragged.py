"""The exchange without padding: only what there is travels, by `ragged_all_to_all`.

A device has its occurrences sorted by destination, one run per destination; they arrive one run per sender, packed:

    sender      runs: device 0 | device 1 ...      owner     from device 0 | from device 1 | ... (free)
                [ 4  9  9 | 2 | ... ]                        [ 4  9  9     | 7             | .  .  . ]

Who sends how much is agreed on first, in two small all_to_alls. What arrives comes in the order that buckets of fixed
size have, without the gaps between them: all sums are the same to the bit. An owner has room for a number of arrivals,
not for a number per sender; what comes beyond it is not sent, and counted.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from scalejax.errors import UserError

PLATFORMS = ("tpu", "gpu", "cuda", "rocm")
"""Where XLA has the collective."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Who sends what to whom, on one device of N. All int32[N], by the other device.

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


def agree(starts: jax.Array, wanted: jax.Array, *, room: int, axes: tuple[str, ...]) -> Runs:
    """What is sent, of what each device wants to send.

    Args:
      starts: int32[N], where the run for each device begins.
      wanted: int32[N], its length.
      room: Arrivals that a device has room for.
      axes: Mesh axes of the N devices.
    """
    asked = lax.all_to_all(jnp.stack([wanted, starts], axis=1), axes, 0, 0, tiled=True)
    begins = jnp.cumsum(asked[:, 0]) - asked[:, 0]
    granted = jnp.clip(room - begins, 0, asked[:, 0])
    begins = jnp.minimum(begins, room)
    answer = lax.all_to_all(jnp.stack([granted, begins], axis=1), axes, 0, 0, tiled=True)
    return Runs(starts, answer[:, 0], answer[:, 1], begins, granted, asked[:, 1])


def to_owners(values: jax.Array, runs: Runs, *, room: int, fill: int, axes: tuple[str, ...]) -> jax.Array:
    """[occurrences, ...], sorted by destination -> [room, ...] arrivals; `fill` where nothing arrived."""
    empty = jnp.full((room, *values.shape[1:]), fill, values.dtype)
    return lax.ragged_all_to_all(
        values, empty, runs.starts, runs.sizes, runs.places, runs.arrival_sizes, axis_name=axes
    )


def to_senders(values: jax.Array, runs: Runs, *, count: int, axes: tuple[str, ...]) -> jax.Array:
    """[room, ...] arrivals -> [count, ...], where `to_owners` had them from; zeros for what it did not send."""
    empty = jnp.zeros((count, *values.shape[1:]), values.dtype)
    return lax.ragged_all_to_all(
        values, empty, runs.arrival_starts, runs.arrival_sizes, runs.origins, runs.sizes, axis_name=axes
    )


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
