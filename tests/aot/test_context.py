"""Sequences cut over the chips of a slice: what travels in the compiled program, and what is held."""

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import context
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import topology
from scalejax.plan.compiled import collectives, hlo

pytestmark = pytest.mark.aot

RANKS, B, S, H, K, D = 4, 1, 16_384, 8, 2, 128


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_a_tpu_sends_what_is_stated(method):
    mesh, _ = topology.make_mesh(topology.parse("v5e:2x2"), MeshShape(fsdp=1, context=RANKS))
    sharding = NamedSharding(mesh, P(None, "context"))
    q, k, v, d_out = (jax.ShapeDtypeStruct((B, S, heads, D), jnp.bfloat16, sharding=sharding) for heads in (H, K, K, H))
    positions = jax.ShapeDtypeStruct((B, S), jnp.int32, sharding=sharding)

    def run(q, k, v, d_out, positions):
        def attend(q, k, v):
            return context.sharded_context_attention(
                q, k, v, positions=positions, method=method, implementation="pallas_tpu"
            )

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(d_out)

    compiled = cuda_topology.compile_for(mesh, run, q, k, v, d_out, positions)
    sent: dict[str, int] = {}
    for c in collectives.of_module(hlo.parse(compiled.as_text()), mesh):
        sent[c.kind] = sent.get(c.kind, 0) + c.minimum_bytes
    pair, integers = (2 * B * S * K * D * 2 * 3 // 4, B * S * 4 * 3 // 4)
    if method == "all_gather":
        assert sent.pop("all-gather") == pair + integers
        # The sum of gradients is stated as a reduce-scatter in float32. On four chips the compiler makes of it an
        # all-reduce and a cut, and since bfloat16 is what leaves, sums in that.
        assert set(sent) <= {"reduce-scatter", "all-reduce"}
        assert sum(sent.values()) <= 2 * pair
    else:
        # The compiler keeps nothing from the first time round to the second.
        assert sent == {"collective-permute": 2 * (pair + integers) + 2 * pair}
