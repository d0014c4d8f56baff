"""Mini-batches of a graph: some nodes, a few neighbours of each, a few neighbours of those, in arrays of fixed shape.

A model of L layers needs L hops around the nodes it is asked about. `NeighborSampler.sample` draws them from the inside
out and numbers the nodes it met anew, each once:

    nodes[:n_L]   the seeds, each once         nodes[:n_l]   those whose state after layer l is needed
    hops[l]       for each of nodes[:n_(l+1)], up to fanouts[l] of its neighbours, as positions in nodes[:n_l]

So layer l reads rows [0, n_l), writes rows [0, n_(l+1)), and the own state of a node is the row of the same number.
Shapes are the largest that can occur (`capacities`); what is beyond the counts is padding: row 0, of no consequence.

Neighbours are drawn without replacement, all of them where there are no more than the fan-out, from hashes of (seed,
batch, hop, node): a batch depends on nothing else, so it can be made again at any time and in any process.
"""

import dataclasses

import numpy as np

from scalejax.data.graphs.adjacency import Adjacency
from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HOPS = 0x40B5


@dataclasses.dataclass(frozen=True)
class Hop:
    """Sampled neighbours of R rows, at most S each.

    Attributes:
      indices: int32[R, S], positions among the nodes of the hop before; 0 beyond `counts`.
      edges: int64[R, S], positions in the adjacency's edges; 0 beyond `counts`.
      counts: int32[R], neighbours that a row has here: min(degree, S); 0 in padding.
      degrees: int32[R], neighbours that it has in the graph; 0 in padding.
    """

    indices: np.ndarray
    edges: np.ndarray
    counts: np.ndarray
    degrees: np.ndarray


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """What a model needs to know around B seeds.

    Attributes:
      nodes: int32[n_0], node ids; padding is node 0.
      valid: int32[], how many of them are no padding.
      hops: One a layer, in the order in which the model computes them: outermost first.
      seeds: int32[B], where the state of each seed is after the last layer; seeds may repeat.
    """

    nodes: np.ndarray
    valid: np.ndarray
    hops: tuple[Hop, ...]
    seeds: np.ndarray


class NeighborSampler:
    """Draws neighbourhoods of a graph.

    Args:
      adjacency: The graph, rows being destinations; with self loops where the model wants them.
      fanouts: Neighbours of a node that a layer reads, outermost layer first, as in DGL: fanouts[0] is of the first
        layer of the model, which is farthest from the seeds. (PyG's `num_neighbors` lists them the other way round.)
      seed: Of everything random.
    Raises:
      UserError: no fan-out, or one below 1.
    """

    def __init__(self, adjacency: Adjacency, fanouts: tuple[int, ...], *, seed: int = 0) -> None:
        if not fanouts or min(fanouts) < 1:
            raise UserError(
                f"NeighborSampler: fanouts must be at least 1 each, one a layer, outermost first; got {fanouts}."
            )
        if adjacency.shape[0] != adjacency.shape[1]:
            raise UserError(f"NeighborSampler: the adjacency must be square; got {adjacency.shape}.")
        self.adjacency, self.fanouts, self.seed = adjacency, fanouts, seed

    def capacities(self, batch_size: int) -> tuple[int, ...]:
        """n_0, ..., n_L for B seeds: rows that are set aside."""
        sizes = [min(batch_size, self.adjacency.shape[0])]
        for fanout in reversed(self.fanouts):
            sizes.append(min(sizes[-1] * (1 + fanout), self.adjacency.shape[0]))
        return tuple(reversed(sizes))

    def sample(self, seeds: np.ndarray, batch: int = 0) -> Neighborhood:
        """The neighbourhood of seeds.

        Args:
          seeds: integers[B], node ids, repeats allowed.
          batch: Number of the batch: another number, other neighbours.
        Raises:
          UserError: there are no seeds, or one is no node.
        """
        ids = np.asarray(seeds)
        nodes = self.adjacency.shape[0]
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < nodes:
            raise UserError(f"sample: seeds must be node ids in [0, {nodes}), at least one; got {ids}.")
        sizes = self.capacities(ids.size)
        found, places = np.unique(ids, return_inverse=True)
        met = found.astype(np.int64)
        position = np.full(nodes, -1, np.int64)
        position[met] = np.arange(met.size)
        hops: list[Hop] = []
        for layer in reversed(range(len(self.fanouts))):
            key = key_of(_HOPS, self.seed, batch, layer)
            edges, counts, degrees = self._draw(met, self.fanouts[layer], key)
            taken = np.arange(self.fanouts[layer]) < counts[:, None]
            columns = np.where(taken, self.adjacency.indices[edges] if self.adjacency.num_edges else 0, 0)
            drawn = columns[taken]
            # In the order in which they are met, not of their numbers: the prefix of earlier nodes must stay.
            fresh, first = np.unique(drawn[position[drawn] < 0], return_index=True)
            fresh = fresh[np.argsort(first, kind="stable")]
            position[fresh] = met.size + np.arange(fresh.size)
            rows = sizes[layer + 1]
            hops.append(
                Hop(
                    _padded(np.where(taken, position[columns], 0), rows, np.int32),
                    _padded(edges, rows, np.int64),
                    _padded(counts, rows, np.int32),
                    _padded(degrees, rows, np.int32),
                )
            )
            met = np.concatenate([met, fresh])
        return Neighborhood(
            nodes=_padded(met, sizes[0], np.int32),
            valid=np.int32(met.size),  # pyright: ignore[reportArgumentType]
            hops=tuple(reversed(hops)),
            seeds=places.astype(np.int32).reshape(-1),
        )

    def _draw(self, nodes: np.ndarray, fanout: int, key: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(positions in the edges int64[R, S], how many of them count, degrees), without replacement.

        Floyd's sampling of a row's positions: the j-th draw is from the first n - S + j + 1 of them, and takes the last
        of these where it hits what was drawn before. Every subset is equally likely.
        """
        begin = self.adjacency.indptr[nodes]
        degrees = self.adjacency.indptr[nodes + 1] - begin
        counts = np.minimum(degrees, fanout)
        picks = np.broadcast_to(np.arange(fanout), (nodes.size, fanout)).copy()
        large = np.flatnonzero(degrees > fanout)
        if large.size:
            state = mix(nodes[large].astype(np.uint64) * _GOLDEN + np.uint64(key))
            chosen = np.empty((large.size, fanout), np.int64)
            for j in range(fanout):
                last = degrees[large] - fanout + j
                state = mix(state + _GOLDEN)
                draw = (state % (last + 1).astype(np.uint64)).astype(np.int64)
                repeated = (chosen[:, :j] == draw[:, None]).any(1)
                chosen[:, j] = np.where(repeated, last, draw)
            picks[large] = np.sort(chosen, axis=1)
        picks = np.where(np.arange(fanout) < counts[:, None], picks + begin[:, None], 0)
        return picks, counts, degrees


def _padded(array: np.ndarray, rows: int, dtype: type) -> np.ndarray:
    out = np.zeros((rows, *array.shape[1:]), dtype)
    out[: array.shape[0]] = array
    return out
