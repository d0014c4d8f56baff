"""Graphs cut into blocks of rows, one a device, and the exchange of the features that a block reads.

    device    rows (receivers)       features (senders)     reads
    0         0 ... R - 1            0 ... C - 1            its own, and those of other devices that its edges name
    1         R ... 2R - 1           C ... 2C - 1           ...

Features, and results, lie in blocks of equal numbers of rows, padded at the end (`pad_nodes`). What a block reads of
others comes by one of two exchanges:

    halo          an all-to-all of the rows that are needed, found on the host; every pair of devices has the room of
                  the pair that needs most
    all_gather    all rows go everywhere, which costs less where blocks read most of each other

Nothing is summed over devices in the forward pass, and the edges of a row keep their order: results do not depend on
the number of devices. Hubs make blocks of unequal work: shuffle the nodes of a graph that is sorted by degree.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError, check_one_of
from scalejax.kernels.sampled_spmm import Csr, Ell, Int8Rows, SparsePlan, spmm
from scalejax.kernels.sampled_spmm.api import Implementation
from scalejax.kernels.sampled_spmm.csr import Stored
from scalejax.kernels.sampled_spmm.sparse_plan import plan_on_host, stack_plans
from scalejax.parallel.mesh import everywhere, put

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

Tree = TypeVar("Tree")

Exchange = Literal["halo", "all_gather"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedGraph:
    """A graph in blocks of rows.

    Attributes:
      plan: Of the blocks: every array has a first axis of devices, and room for the block with the most edges.
      send: int[devices, devices, K]: send[p, q] are the rows of its features that p hands to q; None = all to all.
      shape: (N, M) of the graph.
    """

    plan: SparsePlan
    send: Stored
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def devices(self) -> int:
        """The number of blocks: one a device."""
        return self.plan.row_ids.shape[0]

    @property
    def rows_fetched(self) -> int:
        """Rows of features that arrive at each device in an exchange, padding included."""
        if self.send is None:
            return (self.devices - 1) * -(-self.shape[1] // self.devices)
        return (self.devices - 1) * self.send.shape[2]


def shard_graph(
    graph: Csr | Ell, devices: int, *, exchange: Exchange = "halo", mesh: Mesh | None = None
) -> ShardedGraph:
    """Cuts a graph into blocks of rows and plans the exchange, on the host.

    Args:
      graph: A CSR, or picked edges.
      devices: Blocks.
      exchange: "halo" or "all_gather".
      mesh: Where the blocks go, one on each device, of one process or of several that all cut the same graph; None =
        they stay NumPy arrays.

    Raises:
      UserError: the graph is not well formed or has no edges, an argument is out of range, or the mesh has another
        number of devices.
    """
    if not isinstance(graph, Csr | Ell):
        raise UserError(f"shard_graph: graph must be a Csr or Ell; got {type(graph).__name__}. Pass the Csr.")
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"shard_graph: devices must be at least 1, a whole number; got {devices!r}.")
    check_one_of("shard_graph: exchange", exchange, ("halo", "all_gather"))
    if mesh is not None and mesh.size != devices:
        raise UserError(f"shard_graph: devices must be the {mesh.size} of the mesh; got {devices}.")
    csr = (graph.to_csr() if isinstance(graph, Ell) else graph).check()
    if not csr.nnz:
        raise UserError("shard_graph: the graph must have edges; got none. A product with it is zeros.")
    csr = jax.tree.map(np.asarray, csr)
    rows, columns = (-(-count // devices) for count in csr.shape)
    blocks = [_block(csr, device * rows, rows) for device in range(devices)]
    if exchange == "all_gather":
        plans = [plan_on_host(dataclasses.replace(block, shape=(rows, devices * columns))) for block in blocks]
        sharded = ShardedGraph(stack_plans(plans), None, csr.shape)
    else:
        plans, send = _plan_halo(blocks, columns, _room(blocks, columns))
        sharded = ShardedGraph(stack_plans(plans), send, csr.shape)
    return sharded if mesh is None else put(sharded, everywhere(mesh))


def shard_draws(draws: Sequence[Csr], devices: int, *, mesh: Mesh | None = None) -> ShardedGraph:
    """`shard_graph` of several graphs of one shape, whose blocks one program reads: edges drawn again and again.

    Args:
      draws: CSRs with edges.
      devices: Blocks, one on each device of the mesh.
      mesh: Where they go; None = they stay NumPy arrays.

    Returns:
      Blocks in whose arrays a second axis counts draws, with the halo of the draw that needs most.
    """
    csrs = [jax.tree.map(np.asarray, csr.check()) for csr in draws]
    rows, columns = (-(-count // devices) for count in csrs[0].shape)
    cut = [[_block(csr, device * rows, rows) for device in range(devices)] for csr in csrs]
    room = max(_room(blocks, columns) for blocks in cut)
    planned = [_plan_halo(blocks, columns, room) for blocks in cut]
    flat = stack_plans([plan for plans, _ in planned for plan in plans])
    by_device = jax.tree.map(lambda a: a.reshape(len(draws), devices, *a.shape[1:]).swapaxes(0, 1), flat)
    sharded = ShardedGraph(by_device, np.stack([send for _, send in planned], axis=1), csrs[0].shape)
    return sharded if mesh is None else put(sharded, everywhere(mesh))


def pad_nodes(nodes: Tree, devices: int) -> Tree:
    """[N, ...], or `Int8Rows`, with zeros at the end, so that the first axis divides by a number of devices."""

    def pad(array: np.ndarray | jax.Array) -> jax.Array:
        missing = -len(array) % devices
        return jnp.pad(jnp.asarray(array), ((0, missing), *((0, 0),) * (np.ndim(array) - 1)))

    return jax.tree.map(pad, nodes)


def sharded_spmm(
    graph: ShardedGraph,
    h: "Float[Array, 'columns features'] | Int8Rows",
    *,
    mesh: Mesh | AbstractMesh,
    reduce: Literal["sum", "mean"] = "sum",
    implementation: Implementation | None = None,
) -> "Float[Array, 'rows features']":
    """`kernels.sampled_spmm.spmm` of a graph in blocks. Differentiable with respect to h.

    Args:
      graph: From `shard_graph`, with as many blocks as the mesh has devices.
      h: float[padded M, F] or `Int8Rows`, the features of all nodes after `pad_nodes`, of which each device holds a
        block.
      mesh: All of its axes cut the nodes.
      reduce: "sum" or "mean".
      implementation: As in `spmm`.

    Returns:
      [padded N, F], likewise; what is past row N is zeros.

    Raises:
      UserError: the mesh or h does not fit the graph.
    """
    if not isinstance(graph, ShardedGraph):
        raise UserError(
            f"sharded_spmm: graph must be a ShardedGraph; got {type(graph).__name__}. Pass shard_graph(csr, devices)."
        )
    if mesh.size != graph.devices:
        raise UserError(f"sharded_spmm: the graph is cut for {graph.devices} devices; the mesh has {mesh.size}.")
    padded = -(-graph.shape[1] // graph.devices) * graph.devices
    if len(h.shape) != 2 or h.shape[0] != padded:
        raise UserError(
            f"sharded_spmm: h must be a matrix of {padded} rows, those of the {graph.shape[1]} nodes and padding; "
            f"got {list(h.shape)}. Pass pad_nodes(h, devices)."
        )
    axes = tuple(mesh.axis_names)

    def of_block(block: ShardedGraph, h: jax.Array | Int8Rows) -> jax.Array:
        local = own_block(block)
        return spmm(local.plan, fetch_rows(local, h, axes), reduce=reduce, implementation=implementation)

    cut = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), P(axes)), out_specs=P(axes), check_vma=False)
    return cut(of_block)(graph, h)


def own_block(block: ShardedGraph) -> ShardedGraph:
    """Inside a shard_map over all axes: the block of this device, without its axis of devices."""
    return jax.tree.map(lambda array: array[0], block)


def fetch_rows(block: ShardedGraph, h: Tree, axes: tuple[str, ...]) -> Tree:
    """Inside a shard_map over all axes: the features that the columns of `block.plan` count through.

    Args:
      block: From `own_block`.
      h: [C, ...], or `Int8Rows`, the rows of this device.
      axes: Of the mesh.

    Returns:
      [M', ...]: all rows, or this device's own and then what each device sent, in the order of devices.
    """
    if block.send is None:
        return lax.all_gather(h, axes, tiled=True)

    def fetch(rows: jax.Array) -> jax.Array:
        arrived = lax.all_to_all(rows[block.send], axes, 0, 0, tiled=True)  # devices K ...
        return jnp.concatenate([rows, arrived.reshape(math.prod(arrived.shape[:2]), *rows.shape[1:])])

    return jax.tree.map(fetch, h)


def _block(csr: Csr, first: int, rows: int) -> Csr:
    """Rows first ... first + rows - 1; those past the end are empty."""
    bounds = csr.indptr[np.minimum(np.arange(first, first + rows + 1), csr.shape[0])]
    edges = slice(bounds[0], bounds[-1])
    values = None if csr.values is None else csr.values[edges]
    return Csr(bounds - bounds[0], csr.indices[edges], values, shape=(rows, csr.shape[1]))


def _room(blocks: list[Csr], columns: int) -> int:
    """Rows of the pair of blocks that needs most of each other, at least 1."""
    counts = np.stack([np.bincount(np.unique(block.indices) // columns, minlength=len(blocks)) for block in blocks])
    np.fill_diagonal(counts, 0)  # reader owner
    return max(1, int(counts.max()))


def _plan_halo(blocks: list[Csr], columns: int, room: int) -> tuple[list[SparsePlan], np.ndarray]:
    """(plans, send) of blocks whose columns count through all nodes."""
    devices = len(blocks)
    # Places that are left over send row 0, which no column at the reader counts.
    send = np.zeros((devices, devices, room), blocks[0].indices.dtype)
    plans = []
    for reader, block in enumerate(blocks):
        nodes = np.unique(block.indices)
        owner = nodes // columns
        place = nodes - owner * columns
        for sender in range(devices):
            theirs = owner == sender
            if sender != reader and theirs.any():
                mine = place[theirs]
                send[sender, reader, : mine.size] = mine
                place[theirs] = columns + sender * room + np.arange(mine.size)
        indices = place[np.searchsorted(nodes, block.indices)].astype(block.indices.dtype)
        shape = (block.shape[0], columns + devices * room)
        plans.append(plan_on_host(dataclasses.replace(block, indices=indices, shape=shape)))
    return plans, send
