"""The ring in one kernel, compiled for chips that are not here: it is the only one who sends keys and values."""

import re

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.context_inference import sharded_pass_kv
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import topology
from scalejax.plan.compiled import collectives, hlo

pytestmark = pytest.mark.aot

H, K, D = 8, 2, 128


def compiled(chip, ranks, new, cached, dtype=jnp.bfloat16, batch=1, **options):
    """(memory, {kind of transfer: bytes of each}, text) of pass-KV of so many tokens over `context`."""
    mesh, _ = topology.make_mesh(topology.parse(chip), MeshShape(fsdp=1, context=ranks))
    cut = NamedSharding(mesh, P(None, "context"))

    def array(length, *rest, dtype=dtype):
        return jax.ShapeDtypeStruct((batch, length, *rest), dtype, sharding=cut)

    def run(q, k, v, query_positions, key_positions):
        return sharded_pass_kv(q, k, v, query_positions=query_positions, key_positions=key_positions, **options)

    keys = array(cached, K, D)
    positions = (array(length, dtype=jnp.int32) for length in (new, cached))
    found = cuda_topology.compile_for(mesh, run, array(new, H, D), keys, keys, *positions)
    sent: dict[str, list[int]] = {}
    for c in collectives.of_module(hlo.parse(found.as_text()), mesh):
        sent.setdefault(c.kind, []).extend([c.bytes // c.count] * c.count)
    return found.memory_analysis(), sent, found.as_text()


@pytest.mark.parametrize(
    ("chip", "options"),
    [
        ("v5e:2x2", {}),
        ("v6e:2x2", {"window": 1000}),
        ("v6e:2x2", {"dtype": jnp.float32, "batch": 2}),
        # A device of two cores, where a kernel on one of them is not the choice.
        ("v5p:2x2x1", {"ring": "kernel"}),
    ],
)
def test_xla_sends_positions_alone(chip, options):
    cached = 16_384
    _, sent, text = compiled(chip, 4, 4_096, cached, **options)
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert "ring_attention" in text
    assert "collective_id" in text
    assert sent == {"all-gather": [options.get("batch", 1) * cached * 4]}


@pytest.mark.parametrize(
    ("chip", "options"), [("v5p:2x2x1", {}), ("v6e:2x2", {"ring": "permutes"}), ("v6e:2x2", {"implementation": "xla"})]
)
def test_elsewhere_xla_sends_all(chip, options):
    _, sent, text = compiled(chip, 4, 1_024, 2_048, **options)
    assert "ring_attention" not in text
    assert set(sent) == {"collective-permute"}


def test_a_million_tokens_on_sixteen_chips():
    """Keys and values of a chip, here 64 MiB, lie twice in main memory; beside them the queries and their results."""
    tokens, ranks = 2**20, 16
    memory, sent, text = compiled("v6e:4x4", ranks, tokens, tokens)
    assert sent == {"all-gather": [tokens * 4]}
    (kernel,) = (line for line in text.splitlines() if "tpu_custom_call" in line)
    (held,) = re.findall(rf"\(.*(bf16\[2,2,1,{K},{tokens // ranks},{D}\]{{.*?}}).* custom-call\(", kernel)
    assert "S(1)" not in held  # vector memory
    queries = tokens // ranks * H * D
    most = 2 * (2 * tokens // ranks * K * D * 2) + queries * (2 + 4)
    assert memory.temp_size_in_bytes < 1.01 * most
