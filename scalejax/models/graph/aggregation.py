"""What a layer reads of a graph: all edges of each row, or a few that were drawn.

A layer is given one of three things and does not care which: a `SparsePlan`, of a whole graph or of edges that were
drawn from it once; the same cut into blocks of rows over the devices of the ambient mesh, a `ShardedGraph`; or an
`Ell`, the neighbours that were drawn around a mini-batch. Rows are destinations. The own state of row i is row i of
what the layer reads: of a whole graph these are the same nodes, and neighbourhoods are numbered so.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax import nn
from scalejax.data.graphs import Adjacency
from scalejax.errors import UserError
from scalejax.kernels import sampled_spmm as ops
from scalejax.kernels.sampled_spmm import Csr, Ell, SparsePlan
from scalejax.parallel.graph import ShardedGraph, fetch_rows, own_block, shard_graph, sharded_spmm

Strategy = Literal["bucket", "fastrand", "quadratic_residue"]
Graph = SparsePlan | ShardedGraph | Ell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which edges of a row are read (ES-SpMM, arXiv 2104.10716).

    Attributes:
      width: Most edges of a row, S.
      strategy: How they are chosen, see `kernels.sampled_spmm.presample`.
      prime: Stride of "fastrand"; None = one of ten by seed.
      seed: Of strategies that take one.
      rescale: What becomes of the weights of edges that stay: "degree" = times n / min(n, S) where the row has n, so
        that a row keeps its sum on average; "none" = as they are. A mean over neighbours has no weights to scale.
    """

    width: int
    strategy: Strategy = "fastrand"
    prime: int | None = 577
    seed: int = 0
    rescale: Literal["degree", "none"] = "degree"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"Sampling: width must be at least 1; got {self.width}.")


def of_host(adjacency: Adjacency) -> SparsePlan:
    """The plan of a graph that was read on the host."""
    return ops.plan(_csr(adjacency))


def presampled(adjacency: Adjacency, sampling: Sampling) -> SparsePlan:
    """The plan of edges that are drawn here and now; every pass over it reads these."""
    return ops.plan(_drawn(adjacency, sampling))


def graph_of(adjacency: Adjacency, sampling: Sampling | None, mesh: Mesh | None = None) -> SparsePlan | ShardedGraph:
    """All edges, or those that are drawn: planned, or cut into blocks of rows where there is a mesh.

    Args:
      adjacency: The graph.
      sampling: Which edges; None = all.
      mesh: Its devices get a block each, in the order of the mesh; None = one device.
    """
    csr = _csr(adjacency) if sampling is None else _drawn(adjacency, sampling)
    return ops.plan(csr) if mesh is None else shard_graph(csr, mesh.size, mesh=mesh)


def num_rows(graph: Graph) -> int:
    """Rows of what a layer writes, padding included."""
    if isinstance(graph, ShardedGraph):
        return graph.devices * -(-graph.shape[0] // graph.devices)
    return graph.shape[0]


def _drawn(adjacency: Adjacency, sampling: Sampling) -> Csr:
    s = sampling
    ell = ops.presample(_csr(adjacency), s.width, strategy=s.strategy, prime=s.prime, seed=s.seed)
    if ell.values is not None and s.rescale == "degree":
        share = ell.degrees / np.maximum(ell.counts, 1)
        ell = dataclasses.replace(ell, values=ell.values * share.astype(ell.values.dtype)[:, None])
    return ell.to_csr()


def of_hop(
    indices: jax.Array, edges: jax.Array, counts: jax.Array, degrees: jax.Array, *, sources: int, values: Any
) -> Ell:
    """The arrays of a `data.graphs.Hop` as a graph.

    Args:
      indices: int32[R, S].
      edges: integers[R, S].
      counts: int32[R].
      degrees: int32[R].
      sources: Rows that the layer reads.
      values: float[E], weights of the edges of the whole graph, or None.
    """
    taken = None if values is None else values[edges]  # anything in slots without an edge, which nothing reads
    known = None if values is None else values.shape[0]
    return Ell(indices, edges, counts, degrees, taken, shape=(indices.shape[0], sources), csr_nnz=known)


def aggregate(graph: Graph, h: jax.Array, *, reduce: Literal["sum", "mean"]) -> jax.Array:
    """Sums, by the weights of edges, or means over what each row reads: [M, F] -> [N, F]; empty rows give zeros.

    Weights of an `Ell` are those of the whole graph, and so they are multiplied by n / min(n, S).
    """
    if isinstance(graph, SparsePlan):
        return ops.spmm(graph, h, reduce=reduce)
    if isinstance(graph, ShardedGraph):
        return sharded_spmm(graph, h, mesh=_ambient_mesh(), reduce=reduce)
    return ops.sampled_spmm(graph, h, reduce=reduce, rescale="degree" if reduce == "sum" else "none")


def attend(
    graph: Graph, h: jax.Array, sources: jax.Array, targets: jax.Array, *, slope: float, rate: float, key: Any
) -> jax.Array:
    """Attention of GAT: out[i, a] = sum_j softmax_j(leaky_relu(sources[j, a] + targets[i, a])) h[j, a].

    Args:
      graph: What each row reads; weights of edges are not looked at.
      h: float[M, H, D].
      sources: float[M, H].
      targets: float[N, H].
      slope: Of the leaky ReLU.
      rate: Share of the attention weights that dropout zeroes.
      key: Drives dropout, on each device in its own way; None = none.
    Returns:
      float[N, H, D]; rows that read nothing give zeros.
    """
    if isinstance(graph, ShardedGraph):
        return _attend_in_blocks(graph, h, sources, targets, slope=slope, rate=rate, key=key)
    by_head = h.swapaxes(0, 1)  # H M D
    if isinstance(graph, SparsePlan):
        scores = jax.nn.leaky_relu(sources[graph.csr.indices] + targets[graph.row_ids], slope)  # E H
        return _sum_by_head(graph, by_head, nn.dropout(ops.segment_softmax(graph, scores), rate, key))
    scores = jax.nn.leaky_relu(sources[graph.indices] + targets[:, None], slope)  # N S H
    filled = graph.filled()[:, :, None]
    weights = nn.dropout(jax.nn.softmax(scores, axis=1, where=filled), rate, key)
    weights = jnp.where(filled, weights, 0)  # a row of nothing but padding has no softmax

    def of_slots(head: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ops.sampled_spmm(dataclasses.replace(graph, values=head[1]), head[0], reduce="sum")

    return jax.lax.map(of_slots, (by_head, jnp.moveaxis(weights, 2, 0))).swapaxes(0, 1)


def _sum_by_head(graph: SparsePlan, by_head: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums of h [H, M, D] by the weights of edges [E, H], one head after another: compiled once. Returns [N, H, D]."""

    def of_head(head: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ops.spmm(graph, head[0], values=head[1], reduce="sum")

    return jax.lax.map(of_head, (by_head, weights.T)).swapaxes(0, 1)


def _attend_in_blocks(
    graph: ShardedGraph, h: jax.Array, sources: jax.Array, targets: jax.Array, *, slope: float, rate: float, key: Any
) -> jax.Array:
    """`attend` where each device has a block of rows, and fetches what these read."""
    mesh = _ambient_mesh()
    axes = tuple(mesh.axis_names)

    def of_block(block: ShardedGraph, h: jax.Array, sources: jax.Array, targets: jax.Array, key: Any) -> jax.Array:
        local = own_block(block)
        plan, flat = local.plan, h.reshape(h.shape[0], -1)
        read = fetch_rows(local, flat, axes).reshape(-1, *h.shape[1:])
        scores = fetch_rows(local, sources, axes)[plan.csr.indices] + targets[plan.row_ids]  # E H
        # Blocks have room for the edges of the largest: what is beyond a block's own belongs to no row.
        own = jnp.arange(plan.nnz)[:, None] < plan.csr.indptr[-1]
        scores = jnp.where(own, jax.nn.leaky_relu(scores, slope), -jnp.inf)
        top = jax.ops.segment_max(jax.lax.stop_gradient(scores), plan.row_ids, targets.shape[0])
        powers = jnp.where(own, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)[plan.row_ids]), 0)
        total = jax.ops.segment_sum(powers, plan.row_ids, targets.shape[0])
        weights = powers / jnp.where(total == 0, 1, total)[plan.row_ids]
        own_key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axes))
        return _sum_by_head(plan, read.swapaxes(0, 1), nn.dropout(weights, rate, own_key))

    cut = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(axes), check_vma=False)
    run = cut(of_block, in_specs=(P(axes), P(axes), P(axes), P(axes), P()))
    return run(graph, h, sources, targets, key)


def _ambient_mesh() -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise UserError(
            "a graph in blocks of rows needs the mesh that it was cut for. Call the model inside of "
            "`with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):`, under jit."
        )
    return mesh


def _csr(adjacency: Adjacency) -> Csr:
    small = max(adjacency.num_edges, *adjacency.shape) < 2**31
    dtype = np.int32 if small else np.int64
    return Csr(adjacency.indptr.astype(dtype), adjacency.indices.astype(dtype), adjacency.values, shape=adjacency.shape)
