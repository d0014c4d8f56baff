"""Graphs that are computed: random ones with the degrees of real ones, and neighbours by features.

Equal arguments give equal graphs on any machine: random numbers are hashes of integers (`data.permutation.mix`), since
NumPy may change the streams of its generators.
"""

import math

import numpy as np

from scalejax.data.graphs.adjacency import Adjacency
from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError, check_at_least

_GOLDEN = 0x9E3779B97F4A7C15
_POWER, _RMAT = 0x9031, 0x43A7


def power_law(nodes: int, edges: int, *, exponent: float = 2.1, seed: int = 0) -> Adjacency:
    """A directed graph whose in- and out-degrees fall as a power law (Chung and Lu, 2002), repeats left in.

    Both ends of each edge are drawn with probability proportional to (rank + 1)^(-1 / (exponent - 1)), ranks of sources
    and destinations being numbers of the nodes in two unrelated random orders.

    Args:
      nodes: N.
      edges: E.
      exponent: Of the degree distribution, above 1; 2.1 is usual of graphs of the web, larger is more even.
      seed: Of everything random.
    """
    _check(nodes=nodes, edges=edges)
    if not exponent > 1:
        raise UserError(f"power_law: exponent must be above 1; got {exponent}.")
    weight = np.arange(1, nodes + 1, dtype=np.float64) ** (-1 / (exponent - 1))
    edges_of = np.cumsum(weight) / weight.sum()
    ends = []
    for side in range(2):
        order = np.argsort(_bits(nodes, _POWER, seed, side, 0), kind="stable")
        drawn = np.searchsorted(edges_of, _uniform(edges, _POWER, seed, side, 1), side="right")
        ends.append(order[np.minimum(drawn, nodes - 1)])
    return Adjacency.from_edges(ends[0], ends[1], shape=(nodes, nodes))


def rmat(
    scale: int,
    edges: int,
    *,
    probabilities: tuple[float, float, float, float] = (0.57, 0.19, 0.19, 0.05),
    seed: int = 0,
) -> Adjacency:
    """R-MAT (Chakrabarti et al., 2004): each edge falls into one quarter of the matrix, `scale` times over.

    Args:
      scale: The graph has 2**scale nodes.
      edges: E, repeats left in.
      probabilities: Of the quarters (source low or high, destination low or high): low-low, low-high, high-low,
        high-high; those of Graph500 by default.
      seed: Of everything random.
    """
    _check(scale=scale, edges=edges)
    if min(probabilities) < 0 or abs(math.fsum(probabilities) - 1) > 1e-6:
        raise UserError(f"rmat: probabilities must not be negative and must add up to 1; got {probabilities}.")
    bounds = np.cumsum(probabilities)[:3]
    senders, receivers = np.zeros(edges, np.int64), np.zeros(edges, np.int64)
    for level in range(scale):
        quarter = np.searchsorted(bounds, _uniform(edges, _RMAT, seed, level), side="right")
        senders, receivers = 2 * senders + quarter // 2, 2 * receivers + quarter % 2
    return Adjacency.from_edges(senders, receivers, shape=(1 << scale, 1 << scale))


def knn(features: np.ndarray, neighbors: int, *, block: int = 1024) -> Adjacency:
    """The graph of nearest neighbours by Euclidean distance, in both directions, columns sorted, no loops.

    Of equally near nodes those with lower numbers are taken.

    Args:
      features: number[N, F].
      neighbors: k of each node, before reverse edges are added; fewer than N.
      block: Rows compared at once: block * N distances are held.
    """
    points = np.asarray(features, np.float64)
    if points.ndim != 2 or not np.isfinite(points).all():
        raise UserError(f"knn: features must be finite numbers [N, F]; got shape {points.shape}.")
    nodes = points.shape[0]
    if not 1 <= neighbors < nodes:
        raise UserError(f"knn: neighbors must be at least 1 and fewer than the {nodes} nodes; got {neighbors}.")
    squares = (points * points).sum(1)
    found = np.empty((nodes, neighbors), np.int64)
    for start in range(0, nodes, block):
        rows = slice(start, min(start + block, nodes))
        distance = squares[rows, None] - 2 * points[rows] @ points.T + squares[None, :]
        distance[np.arange(distance.shape[0]), np.arange(rows.start, rows.stop)] = np.inf
        found[rows] = np.argsort(distance, axis=1, kind="stable")[:, :neighbors]
    receivers = np.repeat(np.arange(nodes), neighbors)
    return Adjacency.from_edges(found.ravel(), receivers, shape=(nodes, nodes)).with_reverse()


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        check_at_least(name, size, 1)


def _bits(count: int, *key: int) -> np.ndarray:
    """uint64[count] of hashes."""
    return mix(np.uint64(key_of(*key)) + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN))


def _uniform(count: int, *key: int) -> np.ndarray:
    """float64[count] in [0, 1)."""
    return (_bits(count, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
