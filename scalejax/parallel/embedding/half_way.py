"""What a lookup in two hops gives where it stops between them: to each host its own towers, for the examples of all.

    half_way = collection.fetch_half_way(state, routing, towers)
    x = modules(half_way.by_tower())         # every device: the towers of its host, for its peers' examples
    x = half_way.to_examples(x)              # the hop between hosts: every device all towers, for its own examples

The last two lines are written as for one device and may be differentiated; the gradient of `half_way` goes to
`EmbeddingCollection.update`. Under jit they see all examples, in the explicit form of a step (a shard_map over the data
axes) those of a device. Paper: L. Luo et al., MLSys 2024 (arXiv 2403.00877), section 3.

Axes: H hosts, T towers, K = T / H of a host, F features of the largest tower, N width of the tables, B examples.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from scalejax import compat
from scalejax.parallel.embedding.exchange import wire
from scalejax.parallel.embedding.exchange.coroutines import complete
from scalejax.parallel.embedding.exchange.local import between_hosts
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import BATCH_AXES
from scalejax.parallel.towers import HostTowers


@functools.partial(jax.tree_util.register_dataclass, data_fields=("vectors",), meta_fields=("towers", "exchange"))
@dataclasses.dataclass(frozen=True)
class HalfWay:
    """Pooled vectors between the hops.

    Attributes:
      vectors: float[B, H * K, F, N], sharded as examples are. Row i of device (t, l) has what tower k of host t reads
        for example i of the peer (h, l), at h * K + k; zeros in place of features that a tower has not.
      towers: Which features each host has.
      exchange: What vectors travel as between hosts.
    """

    vectors: jax.Array
    towers: HostTowers
    exchange: Exchange

    def by_tower(self) -> tuple[jax.Array, jax.Array]:
        """float[T, F, B, N], zeros where a tower has no feature, and bool[T, F], whether it has.

        In the explicit form those of this host: [K, F, b * H, N] for b examples of a device. The order of examples is
        one of its own, which `to_examples` undoes.
        """
        present = jnp.asarray(self.towers.present)
        if _is_explicit():
            begin = lax.axis_index("replica") * self.towers.each
            present = lax.dynamic_slice_in_dim(present, begin, self.towers.each)
        return _on_devices(functools.partial(_by_tower, self.towers), _EXAMPLES, _AT_TOWERS, self.vectors), present

    def to_examples(self, x: jax.Array) -> jax.Array:
        """float[T, O, B, D] of what `by_tower` gave -> float[T, O, B, D] in the order of examples, each at its own.

        In the explicit form [K, O, b * H, D] -> [T, O, b, D].
        """
        hop = functools.partial(_hop, self.towers.hosts, self.exchange)
        return _on_devices(hop, _AT_TOWERS, P(None, None, BATCH_AXES), x)


_EXAMPLES, _AT_TOWERS = P(BATCH_AXES), P("replica", None, BATCH_AXES[1:])


def _is_explicit() -> bool:
    return "replica" in jax.sharding.get_abstract_mesh().manual_axes


def _on_devices(local: Callable[[jax.Array], jax.Array], before: P, after: P, x: jax.Array) -> jax.Array:
    """`local` of what each device has."""
    if _is_explicit():
        return local(x)
    axes = set(BATCH_AXES)
    return jax.shard_map(local, in_specs=before, out_specs=after, axis_names=axes, check_vma=False)(x)


def _by_tower(towers: HostTowers, vectors: jax.Array) -> jax.Array:
    """[b, H * K, F, N] -> [K, F, b * H, N]."""
    rows, _, room, dim = vectors.shape
    x = vectors.reshape(rows, towers.hosts, towers.each, room, dim).transpose(2, 3, 0, 1, 4)
    return x.reshape(towers.each, room, -1, dim)


@compat.custom_vjp(0, 1)
def _hop(hosts: int, exchange: Exchange, x: jax.Array) -> jax.Array:
    """[K, O, b * H, D] of this host -> [H * K, O, b, D] of all, for the examples of this device."""
    each, outputs, _, dim = x.shape
    blocks = x.reshape(each, outputs, -1, hosts, dim).transpose(3, 0, 1, 2, 4)  # H K O b D
    blocks = complete(wire.carry(blocks, exchange.forward, between_hosts))
    return blocks.reshape(hosts * each, outputs, -1, dim)


def _hop_forward(hosts: int, exchange: Exchange, x: jax.Array) -> tuple[jax.Array, None]:
    return _hop(hosts, exchange, x), None


def _hop_backward(hosts: int, exchange: Exchange, saved: None, g: jax.Array) -> tuple[jax.Array]:
    del saved
    towers, outputs, _, dim = g.shape
    blocks = g.reshape(hosts, towers // hosts, outputs, -1, dim)
    blocks = complete(wire.carry(blocks, exchange.backward, between_hosts, loss_scale=exchange.loss_scale))
    return (blocks.transpose(1, 2, 3, 0, 4).reshape(towers // hosts, outputs, -1, dim),)


_hop.defvjp(_hop_forward, _hop_backward)
