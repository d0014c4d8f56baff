"""Aggregation over the edges of a graph: all edges of each row, or a few that were drawn.

A layer is given one of three things and does not care which: a `SparsePlan`, of a whole graph or of edges that were
drawn from it once; the same cut into blocks of rows over the devices of the ambient mesh, a `ShardedGraph`; or an
`Ell`, the neighbours that were drawn around a mini-batch. Rows are destinations. The own state of row i is row i of
what the layer reads: of a whole graph these are the same nodes, and neighbourhoods are numbered so.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax import nn
from scalejax.data.graphs import Adjacency
from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.kernels import sampled_spmm as ops
from scalejax.kernels.sampled_spmm import PRIMES, Csr, Ell, SparsePlan, sampling
from scalejax.kernels.sampled_spmm.sparse_plan import plan_on_host, stack_plans
from scalejax.kernels.types import AnyArray
from scalejax.parallel.graph import ShardedGraph, fetch_rows, own_block, shard_draws, shard_graph, sharded_spmm
from scalejax.parallel.mesh import everywhere, put

Graph = SparsePlan | ShardedGraph | Ell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which edges of a row are read (ES-SpMM, arXiv 2104.10716).

    Attributes:
      width: Most edges of a row, S.
      strategy: How they are chosen, see `kernels.sampled_spmm.presample`.
      prime: Stride of "fastrand"; None = one of ten by seed.
      seed: Of strategies that take one.
      rate: Share of a row's edges, for strategies by rate, which take no more than the width either.
      rescale: What becomes of the weights of edges that stay: "degree" = times n / picks where the row has n, so that a
        row keeps its sum on average; "none" = as they are. A mean over neighbours has no weights to scale.
      draws: Draws that training takes turns with, by the seeds seed, seed + 1, ...: epoch e reads draw e mod draws.
        What is read once, as scoring does, is the first.
    """

    width: int | None = 32
    strategy: sampling.Strategy = "fastrand"
    prime: int | None = 577
    seed: int = 0
    rate: float | None = None
    rescale: Literal["degree", "none"] = "degree"
    draws: int = 1

    def __post_init__(self) -> None:
        rule = sampling.EdgeSampling(strategy=self.strategy, prime=self.prime, seed=self.seed, rate=self.rate)
        if self.width is None and not rule.by_rate:
            raise UserError(f"Sampling: width must be a number of edges for strategy {self.strategy!r}; got None.")
        if self.width is not None and self.width < 1:
            raise UserError(f"Sampling: width must be at least 1; got {self.width}.")
        check_one_of("Sampling: rescale", self.rescale, ("degree", "none"))
        check_at_least("Sampling: draws", self.draws, 1)
        ten = self.strategy == "fastrand" and self.prime is None
        most = len(PRIMES) if ten else None if self.strategy in ("quadratic_residue", "rate") else 1
        if most is not None and self.draws > most:
            raise UserError(
                f"Sampling: draws must be at most {most}, as many as differ with strategy {self.strategy!r} and "
                f"prime={self.prime}; got {self.draws}. 'fastrand' has {len(PRIMES)} with prime=None, "
                "'quadratic_residue' and 'rate' have more."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Graphs of edges that were drawn, which the epochs of a training read in turn.

    Attributes:
      graphs: All of them: each array has an axis of draws more, the first, or the second of graphs in blocks.
      count: How many.
    """

    graphs: SparsePlan | ShardedGraph
    count: int = dataclasses.field(metadata={"static": True})

    def of_epoch(self, epoch: jax.Array) -> SparsePlan | ShardedGraph:
        """The graph of an epoch, int[]."""
        axis = 1 if isinstance(self.graphs, ShardedGraph) else 0

        def taken(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(array, epoch % self.count, axis, keepdims=False)

        return jax.tree.map(taken, self.graphs)


def of_host(adjacency: Adjacency) -> SparsePlan:
    """The plan of a graph that was read on the host."""
    return ops.sparse_plan(_csr(adjacency))


def presampled(adjacency: Adjacency, drawn: Sampling) -> SparsePlan:
    """The plan of edges that are drawn here and now; every pass over it reads these."""
    return ops.plan_sample(_drawn(adjacency, drawn)).plan


def graph_of(adjacency: Adjacency, drawn: Sampling | None, mesh: Mesh | None = None) -> SparsePlan | ShardedGraph:
    """All edges, or those that are drawn: planned, or cut into blocks of rows where there is a mesh.

    Args:
      adjacency: The graph.
      drawn: Which edges; None = all.
      mesh: Its devices get a block each, in the order of the mesh; None = one device.
    """
    if mesh is not None:
        return put(blocks_of(adjacency, drawn, mesh.size), everywhere(mesh))
    return of_host(adjacency) if drawn is None else presampled(adjacency, drawn)


def blocks_of(adjacency: Adjacency, drawn: Sampling | None, devices: int) -> ShardedGraph:
    """All edges, or those that are drawn, cut into blocks of rows: NumPy arrays."""
    return shard_graph(_csr(adjacency) if drawn is None else _drawn(adjacency, drawn), devices)


def draws_of(adjacency: Adjacency, drawn: Sampling, devices: int = 1) -> Draws:
    """All draws of a sampling, planned once, in blocks where there are several devices: NumPy arrays."""
    if not adjacency.num_edges:
        raise UserError("draws_of: the graph must have edges to draw from; got none.")
    draws = [_drawn(adjacency, drawn, number).to_csr() for number in range(drawn.draws)]
    if devices > 1:
        return Draws(shard_draws(draws, devices), drawn.draws)
    return Draws(stack_plans([plan_on_host(draw) for draw in draws]), drawn.draws)


def num_rows(graph: Graph) -> int:
    """Rows of what a layer writes, padding included."""
    if isinstance(graph, ShardedGraph):
        return graph.devices * -(-graph.shape[0] // graph.devices)
    return graph.shape[0]


def _drawn(adjacency: Adjacency, s: Sampling, draw: int = 0) -> Ell:
    rule = {"strategy": s.strategy, "prime": s.prime, "seed": s.seed + draw, "rate": s.rate}
    ell = ops.presample(_csr(adjacency), s.width, **rule)
    if ell.values is not None and s.rescale == "degree":
        share = ell.degrees / np.maximum(ell.counts, 1)
        ell = dataclasses.replace(ell, values=ell.values * share.astype(ell.values.dtype)[:, None])
    return ell


def of_hop(
    indices: jax.Array,
    edges: jax.Array,
    counts: jax.Array,
    degrees: jax.Array,
    *,
    sources: int,
    values: AnyArray | None,
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
        return sharded_spmm(graph, h, mesh=ambient_mesh(), reduce=reduce)
    return ops.sampled_spmm(graph, h, reduce=reduce, rescale="degree" if reduce == "sum" else "none")


def attend(
    graph: Graph,
    h: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    *,
    slope: float,
    rate: float,
    key: jax.Array | None,
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
    graph: ShardedGraph,
    h: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    *,
    slope: float,
    rate: float,
    key: jax.Array | None,
) -> jax.Array:
    """`attend` where each device has a block of rows, and fetches what these read."""
    mesh = ambient_mesh()
    axes = tuple(mesh.axis_names)

    def of_block(
        block: ShardedGraph, h: jax.Array, sources: jax.Array, targets: jax.Array, key: jax.Array | None
    ) -> jax.Array:
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


def ambient_mesh() -> AbstractMesh:
    """The mesh that the program is traced for.

    Raises:
      UserError: there is none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise UserError(
            "a graph or a mini-batch in parts needs the mesh that it was cut for. Call the model inside of "
            "`with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):`, under jit."
        )
    return mesh


def _csr(adjacency: Adjacency) -> Csr:
    small = max(adjacency.num_edges, *adjacency.shape) < 2**31
    dtype = np.int32 if small else np.int64
    return Csr(adjacency.indptr.astype(dtype), adjacency.indices.astype(dtype), adjacency.values, shape=adjacency.shape)
