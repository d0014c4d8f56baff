"""Exchanges of embeddings, compiled for chips: without padding where they have the collective, and of many widths."""

import jax
import pytest
from aot import cuda_topology
from embedding_cases import device_features, schema_of

from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.plan import explain_sharding, topology
from scalejax.plan.compiled.collectives import total

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

TABLES, DIM, EXAMPLES = 4, 64, 1024
"""Examples of one device."""


def exchange_of(mesh, widths=(DIM,) * TABLES, **exchange):
    """{(kind, axis): (bytes, count)} of a step of lookup and update."""
    tables = tuple(
        TableConfig(name=f"t{i}", rows=100_000, dim=dim, features=(f"f{i}",)) for i, dim in enumerate(widths)
    )
    on = EmbeddingCollection(tables=tables, mesh=mesh, exchange=Exchange(**exchange))
    schema = schema_of({f"f{i}": 1 for i in range(len(widths))}, 100_000)
    features = device_features(on, None, EXAMPLES * mesh.size, schema)

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, jax.tree.map(lambda x: 0.001 * x, embedded))

    compiled = jax.jit(step, donate_argnums=0).lower(on.abstract_state(), features).compile()
    return {(c.kind, c.axis): (c.bytes, c.count) for c in total(explain_sharding(compiled, mesh))}


@pytest.mark.parametrize(
    "name", ["v5p:2x2x1", "v6e:2x2", pytest.param("cuda", marks=cuda_topology.needs_cuda_compiler)]
)
def test_only_what_there_is_travels_in_full_lanes(name):
    mesh = cuda_topology.mesh(4) if name == "cuda" else topology.make_mesh(topology.parse(name))[0]
    padded, ragged = (
        {kind: found for (kind, _), found in exchange_of(mesh, all_to_all=way).items()} for way in ("padded", "ragged")
    )
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


@pytest.mark.parametrize("route", ["flat", pytest.param("two_level", marks=pytest.mark.slow)])
def test_tables_of_six_widths_travel_in_the_all_to_alls_of_one(route):
    """And in the bytes of six, but for less than a row of lanes of each width, hop and destination."""
    hosts = 2 if route == "two_level" else 1
    mesh, _ = topology.make_mesh(topology.parse("v5p:2x2x1"), meshes.MeshShape(replica=hosts))
    widths = (8, 16, 32, 48, 64, 128)
    found = exchange_of(mesh, widths, route=route)
    axes = ("replica", "fsdp") if hosts > 1 else ("fsdp",)
    assert {name: count for name, (_, count) in found.items()} == {("all-to-all", axis): 3 for axis in axes}
    slots = mesh.size * (2 * EXAMPLES // mesh.size + 8)
    for sent, _ in found.values():
        least = sum(4 * slots * (1 + 2 * dim) for dim in widths)
        assert least <= sent <= least + 3 * len(widths) * mesh.size * 4 * 127
