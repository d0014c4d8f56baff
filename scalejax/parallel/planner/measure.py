"""Measures the constants of the formulas on the devices at hand; needs jax.

    measure_constants().save("constants.json")

Lookups: rows of several widths at random places are gathered and summed in bags, the forward compute of `estimators`.
Its seconds per id, a + bytes / rate, are fitted over the widths by least squares: `occurrence_s` and
`memory_bandwidth`.
Exchanges: an all_to_all over the devices of this process, one host; the network between hosts is not measured.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.planner.topology import Constants

WIDTHS = (16, 32, 64, 128, 256)
BAG = 16
"""Ids of a bag."""


def measure_constants(
    *,
    table_bytes: int = 2**28,
    ids: int = 2**18,
    exchange_bytes: int = 2**24,
    row_granule_bytes: int = 64,
    repeats: int = 7,
) -> Constants:
    """Constants of the devices of this process.

    Args:
      table_bytes: Size of the tables that are looked up: far more than caches hold.
      ids: Ids of a lookup, a multiple of 16.
      exchange_bytes: What each device sends in an exchange.
      row_granule_bytes: Taken as known: the smallest piece of memory that is fetched.
      repeats: Timed runs, of which the median counts.
    Raises:
      RuntimeError: times do not grow with bytes, so no rate can be told from them.
    """
    devices = jax.local_devices()
    rng = np.random.default_rng(0)
    moved, seconds = [], []
    for width in WIDTHS:
        rows = table_bytes // (4 * width)
        table = jnp.ones((rows, width), jnp.float32)
        places = jnp.asarray(rng.integers(0, rows, ids, np.int32))
        granules = -(-4 * width // row_granule_bytes) * row_granule_bytes
        moved.append(4 + granules + 4 * width / BAG)
        seconds.append(_median_s(lambda t=table, p=places: _lookup(t, p), repeats) / ids)
    rate, occurrence_s = fit_rate(moved, seconds)
    return Constants(
        device=devices[0].device_kind,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        memory_bandwidth=rate,
        occurrence_s=occurrence_s,
        row_granule_bytes=row_granule_bytes,
        intra_host_bandwidth=None if len(devices) == 1 else _exchange_rate(devices, exchange_bytes, repeats),
    )


def fit_rate(moved: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(bytes/s, seconds) such that seconds[i] is closest to seconds + moved[i] / rate; the seconds are not negative.

    Raises:
      RuntimeError: times do not grow with bytes.
    """
    x, y = np.asarray(moved, np.float64), np.asarray(seconds, np.float64)
    slope, constant = np.polyfit(x, y, 1)
    if constant < 0:
        slope, constant = (x * y).sum() / (x * x).sum(), 0.0
    if not slope > 0:
        raise RuntimeError(
            f"measure_constants: times must grow with the bytes moved; got {seconds} s for {moved} bytes an id. "
            "Measure on an idle machine, with a larger table_bytes and more ids."
        )
    return float(1 / slope), float(constant)


@jax.jit
def _lookup(table: jax.Array, places: jax.Array) -> jax.Array:
    return table[places].reshape(-1, BAG, table.shape[1]).sum(1)


def _exchange_rate(devices: Sequence[Any], exchange_bytes: int, repeats: int) -> float:
    """Bytes/s that leave a device."""
    n = len(devices)
    mesh = Mesh(np.array(devices), ("host",))
    each = -(-exchange_bytes // (4 * n * n)) * n

    @jax.jit
    def exchange(x: jax.Array) -> jax.Array:
        body = jax.shard_map(
            lambda part: lax.all_to_all(part, "host", 0, 0, tiled=True),
            mesh=mesh,
            in_specs=P("host"),
            out_specs=P("host"),
        )
        return body(x)

    x = jax.device_put(jnp.ones((n * n, each), jnp.float32), NamedSharding(mesh, P("host")))
    return (n - 1) * each * 4 / _median_s(lambda: exchange(x), repeats)


def _median_s(run: Callable[[], jax.Array], repeats: int) -> float:
    jax.block_until_ready(run())  # compiles
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return statistics.median(found)
