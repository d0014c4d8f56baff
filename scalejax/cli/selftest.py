"""The collectives that everything in scalejax is built from, run over all devices and checked value by value."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalejax.parallel.mesh import AXES


def run(mesh: Mesh) -> dict[str, str]:
    """Runs each collective in int32 and float32 over all axes of the mesh.

    Device i of n holds x[j] = 100 i + j, j < n: small integers, exact in both types, so every result has one right
    value whatever the order of the sums.

    Returns:
      {collective: "ok", or what was wrong}. Each process looks at the devices it owns.
    """
    devices = mesh.size
    held = 100 * np.arange(devices)[:, None] + np.arange(devices)
    total = held.sum(axis=0)
    wanted: dict[str, tuple[Callable[[jax.Array], jax.Array], np.ndarray]] = {
        "psum": (lambda x: lax.psum(x, AXES), np.tile(total, (devices, 1))),
        "all_gather": (lambda x: lax.all_gather(x, AXES).reshape(-1), np.tile(held.reshape(-1), (devices, 1))),
        "all_to_all": (lambda x: lax.all_to_all(x, AXES, 0, 0, tiled=True), held.T),
        "ppermute": (
            lambda x: lax.ppermute(x, AXES, [(i, (i + 1) % devices) for i in range(devices)]),
            np.roll(held, 1, axis=0),
        ),
        "psum_scatter": (lambda x: lax.psum_scatter(x, AXES, tiled=True), total[:, None]),
    }
    return {name: _check(mesh, collective, right) for name, (collective, right) in wanted.items()}


def _check(mesh: Mesh, collective: Callable[[jax.Array], jax.Array], right: np.ndarray) -> str:
    devices = mesh.size

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(), out_specs=(P(AXES), P(AXES)))
    def both() -> tuple[jax.Array, jax.Array]:
        x = 100 * lax.axis_index(AXES) + jnp.arange(devices, dtype=jnp.int32)
        return collective(x)[None], collective(x.astype(jnp.float32))[None]

    try:
        results = both()
        for result in results:
            for shard in result.addressable_shards:
                got, want = np.asarray(shard.data), right[shard.index]
                if not np.array_equal(got, want):
                    return f"wrong on {shard.device} in {result.dtype}: got {got.ravel()[:4]}, not {want.ravel()[:4]}"
    except jax.errors.JaxRuntimeError as error:
        return f"failed: {str(error).partition(chr(10))[0]}"
    return "ok"
