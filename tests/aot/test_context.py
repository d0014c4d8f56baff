"""Sequences cut over the chips of a slice: what travels in the compiled program, and what is held."""

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import context, context_inference
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


@pytest.mark.parametrize(("chip", "method"), [("v5e:2x2", "pass_kv"), ("v5p:2x2x1", "pass_q"), ("v5e:2x2", "decode")])
def test_transfers_of_a_prompt_run_beside_kernels(chip, method):
    """Of each array n - 1. Keys and values are on their way while a kernel runs; queries, which are fewer, while one
    does or while results are put together, as the compiler finds best. It sends all positions at the start. There are
    so many keys that a transfer takes longer than putting results together, behind which the compiler may hide it."""
    mesh, _ = topology.make_mesh(topology.parse(chip), MeshShape(fsdp=1, context=RANKS))
    new, cached, rows = (1, 8_192, 8) if method == "decode" else (4_096, 65_536, B)
    cut, by_row = NamedSharding(mesh, P(None, "context")), NamedSharding(mesh, P("context"))

    def array(length, *rest, sharding=cut, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((rows, length, *rest), dtype, sharding=sharding)

    of_query = by_row if method == "decode" else cut
    given = (
        array(new, H, D, sharding=of_query), array(cached, K, D), array(cached, K, D),
        array(new, sharding=of_query, dtype=jnp.int32), array(cached, dtype=jnp.int32),
    )  # fmt: skip
    attend = {
        "pass_kv": context_inference.sharded_pass_kv,
        "pass_q": context_inference.sharded_pass_q,
        "decode": context_inference.sharded_decode,
    }[method]

    def run(q, k, v, query_positions, key_positions):
        positions = {"query_positions": query_positions, "key_positions": key_positions}
        return attend(q, k, v, **positions, implementation="pallas_tpu")

    module = hlo.parse(cuda_topology.compile_for(mesh, run, *given).as_text())
    order = module.computations[module.entry].instructions
    kinds = [c.kind for c in collectives.of_module(module, mesh) for _ in range(c.count)]
    travelling = 3 if method == "pass_kv" else 2
    assert kinds.count("collective-permute") == travelling * (RANKS - 1)
    assert len(kinds) - kinds.count("collective-permute") == (0 if method == "pass_kv" else 1)
    place = {instruction.name: number for number, instruction in enumerate(order)}
    kernels = [place[i.name] for i in order if '"tpu_custom_call"' in i.attributes]
    assert len(kernels) == RANKS
    work = kernels if method == "pass_kv" else [place[i.name] for i in order if i.opcode in ("custom-call", "fusion")]
    pairs = [i for i in order if i.opcode == "collective-permute-done" and i.arrays[0].dtype == "bf16"]
    assert len(pairs) == (travelling - 1) * (RANKS - 1)
    for done in pairs:
        assert any(place[done.operands[0]] < number < place[done.name] for number in work), done.name
