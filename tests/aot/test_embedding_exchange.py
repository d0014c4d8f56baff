"""The exchange of embeddings without padding, compiled for chips that have the collective."""

import jax
import pytest
from aot import cuda_topology
from embedding_cases import device_features, schema_of

from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.plan import explain_sharding, topology
from scalejax.plan.compiled.collectives import total

pytestmark = pytest.mark.aot

TABLES, DIM, EXAMPLES = 4, 64, 1024
"""Examples of one device."""


def exchange_of(mesh, all_to_all):
    """{kind: (bytes, count)} of a step of lookup and update."""
    tables = tuple(TableConfig(name=f"t{i}", rows=100_000, dim=DIM, features=(f"f{i}",)) for i in range(TABLES))
    on = EmbeddingCollection(tables=tables, mesh=mesh, exchange=Exchange(all_to_all=all_to_all))
    schema = schema_of({f"f{i}": 1 for i in range(TABLES)}, 100_000)
    features = device_features(on, None, EXAMPLES * mesh.size, schema)

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, jax.tree.map(lambda x: 0.001 * x, embedded))

    compiled = jax.jit(step, donate_argnums=0).lower(on.abstract_state(), features).compile()
    return {c.kind: (c.bytes, c.count) for c in total(explain_sharding(compiled, mesh))}


@pytest.mark.parametrize(
    "name", ["v5p:2x2x1", "v6e:2x2", pytest.param("cuda", marks=cuda_topology.needs_cuda_compiler)]
)
def test_only_what_there_is_travels_in_full_lanes(name):
    mesh = cuda_topology.mesh(4) if name == "cuda" else topology.make_mesh(topology.parse(name))[0]
    padded, ragged = (exchange_of(mesh, way) for way in ("padded", "ragged"))
    assert set(padded) == {"all-to-all"}
    assert padded["all-to-all"][1] == 3
    assert set(ragged) == {"all-to-all", "ragged-all-to-all"}
    sizes, count = ragged["all-to-all"]
    assert (sizes, count) == (2 * mesh.size * 8, 2)  # two numbers a device, twice
    # The collective names its whole operand, of which only the runs travel: ids and gradients of this device, and
    # rows for as many arrivals as there is room for. Lanes half empty would double it, lone ids make it 128 times.
    at_most, count = ragged["ragged-all-to-all"]
    slots = EXAMPLES * TABLES + mesh.size * 128
    room = 2 * EXAMPLES * TABLES + 8 * mesh.size + 127 + mesh.size * 128
    assert count == 3
    assert at_most <= slots * (4 + 4 * DIM) + room * 4 * DIM
